"""Penalties against their derivatives, the energy against dense algebra, Z* against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
import scipy.sparse.linalg as sla
from hypothesis import given, settings
from hypothesis import strategies as st

from herta_gpu import AttentionSolver, Graph, Huber, Power, PseudoHuber
from tests.conftest import dense_H, random_graph, shared

PENALTIES = [
    PseudoHuber(0.3), Huber(0.3), Power(0.3, p=1.3), Power(0.3, p=2.0), Power(0.3, p=0.5),
    Power(0.3, p=0.0),
]  # fmt: skip


class Dense:
    """E, its gradient and Hessian for a small graph, from the incidence matrix."""

    def __init__(self, graph, lam, penalty, F):
        u, v, w = graph.edges()
        D = graph.degree[graph.stored(np.arange(graph.num_nodes))]
        self.B = np.zeros((len(u), graph.num_nodes))
        self.B[np.arange(len(u)), u], self.B[np.arange(len(u)), v] = 1, -1
        self.B /= np.sqrt(D)
        self.w, self.lam, self.F = np.ones(len(u)) if w is None else w, lam, F
        self.penalty = penalty

    def rho(self, r):
        """By the formulas of the literature, without the package's own."""
        d, p = self.penalty.delta, getattr(self.penalty, "p", 1.0)
        if isinstance(self.penalty, PseudoHuber):
            return 2 * d**2 * (np.sqrt(1 + r**2 / d**2) - 1)
        far = np.maximum(r, d)
        if p == 0:
            return np.where(r > d, d**2 + 2 * d**2 * np.log(far / d), r**2)
        grown = d ** (2 - p) * (far**p - d**p) * 2 / p
        return np.where(r > d, d**2 + grown, r**2)

    def value(self, z):
        Z = z.reshape(self.F.shape)
        r = np.sqrt(((self.B @ Z) ** 2).sum(axis=1))
        return 0.5 * ((Z - self.F) ** 2).sum() + 0.5 * self.lam * (self.w * self.rho(r)).sum()

    def gradient(self, z):
        Z = z.reshape(self.F.shape)
        r = np.sqrt(((self.B @ Z) ** 2).sum(axis=1))
        far = np.maximum(r, self.penalty.delta)
        p = getattr(self.penalty, "p", 1.0)
        gamma = (self.penalty.delta / far) ** (2 - p)
        if isinstance(self.penalty, PseudoHuber):
            gamma = 1 / np.sqrt(1 + r**2 / self.penalty.delta**2)
        pull = self.B.T @ ((self.w * gamma)[:, None] * (self.B @ Z))
        return (Z - self.F + self.lam * pull).ravel()

    def minimum(self, start):
        found = scipy.optimize.minimize(
            self.value, start.ravel(), jac=self.gradient, method="BFGS",
            options={"gtol": 1e-11, "maxiter": 20_000},
        )  # fmt: skip
        return found.x.reshape(self.F.shape)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_weight_and_slope_are_derivatives(penalty):
    r = np.geomspace(1e-2, 1e3, 200)
    r = r[abs(r - penalty.delta) > 1e-2]  # kinks
    s, h = r**2, 1e-4
    further, nearer = np.sqrt(s * (1 + h)), np.sqrt(s * (1 - h))
    rise, bend = (f(further) - f(nearer) for f in (penalty.value, penalty.weight))
    np.testing.assert_allclose(penalty.weight(r), rise / (2 * h * s), rtol=1e-7)
    np.testing.assert_allclose(penalty.slope(r), bend / (2 * h * s), rtol=1e-6, atol=1e-9)
    assert penalty.weight(0.0) == 1
    assert (np.diff(penalty.weight(r)) <= 0).all()
    # The least curvature of rho(r^2) / 2 is that of gamma + 2 s rho''.
    least = (penalty.weight(r) + 2 * s * penalty.slope(r)).min()
    assert -penalty.concavity <= least + 1e-12
    assert penalty.concavity == 0 or least < -0.8 * penalty.concavity


def test_the_attention_of_twirls():
    r, tau = np.geomspace(1e-3, 1e2, 50), 0.2
    for p in (0.0, 0.5, 1.0, 1.7):
        theirs = 1 / np.maximum(tau, (r**2) ** (1 - p / 2))
        ours = Power(delta=tau ** (1 / (2 - p)), p=p).weight(r)
        np.testing.assert_allclose(theirs, ours / tau, rtol=1e-12)


def test_extreme_distances_are_numbers():
    with np.errstate(all="raise", under="ignore"):
        for penalty in (PseudoHuber(1e-300), Huber(1e-300), Power(1e-300, p=1.5)):
            assert np.isfinite(penalty.weight(np.array([0.0, 1e-320, 1.0]))).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PseudoHuber(0.0), "delta must be a positive number"),
        (lambda: Huber(quantile=1.5), "quantile must be at most 1"),
        (lambda: Power(1.0, p=-1.0), "p must not be negative"),
        (lambda: Power(1.0, p=3.0), "p must be at most 2"),
        (lambda: AttentionSolver(Graph.from_edges([[0], [1]]), penalty=Huber()), "have a delta"),
    ],
)
def test_wrong_penalties_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_the_minimum_is_that_of_scipy(penalty, weighted, k):
    g = random_graph(30, 60, weighted=weighted).reordered("rcm")
    F = np.random.default_rng(k).standard_normal((30, k))
    lam = 4.0 if penalty.concavity == 0 else 0.4 / penalty.concavity / g.lambda_max_bound
    dense = Dense(g, lam, penalty, F)
    for tol in (1e-2, 1e-6, 1e-10):
        solver = AttentionSolver(g, lam, penalty, tol=tol)
        Z, info = solver.solve(F), solver.info_
        assert info.status == "converged"
        # E is strongly convex: what is left of the gradient says how far SciPy is off itself.
        best = dense.minimum(Z)
        unsure = np.linalg.norm(dense.gradient(best)) / info.modulus
        off, gap = np.linalg.norm(Z - best), dense.value(Z) - dense.value(best)
        assert off <= info.distance + unsure
        assert info.distance <= tol * (np.linalg.norm(best) + off)
        assert gap <= info.gap + 1e-13 * dense.value(best)
        own = np.linalg.norm(dense.gradient(Z))
        assert own <= info.gradient <= own * (1 + 1e-6) + 1e-12
    np.testing.assert_allclose(Z, best, atol=1e-7)


@pytest.mark.parametrize("penalty", [PseudoHuber(0.3), Power(0.3, p=1.3), Power(0.3, p=0.5)])
def test_no_eigenvalue_of_the_hessian_is_below_the_modulus(penalty):
    g, rng = random_graph(15, 40), np.random.default_rng(0)
    F = rng.standard_normal((15, 2))
    lam = 5.0 if penalty.concavity == 0 else 0.7 / penalty.concavity / g.lambda_max_bound
    solver = AttentionSolver(g, lam, penalty)
    solver.solve(F)
    assert 0 < solver.info_.modulus <= 1
    for scale in (0.1, 1.0, 3.0):
        dense, z = Dense(g, lam, penalty, F), scale * rng.standard_normal(30)
        hessian = scipy.optimize.approx_fprime(z, dense.gradient, 1e-7)
        least = np.linalg.eigvalsh(0.5 * (hessian + hessian.T))[0]
        assert least >= solver.info_.modulus - 1e-4


def test_nothing_is_proven_of_an_energy_that_is_not_convex():
    g = random_graph(60, 200)
    F, penalty = np.random.default_rng(0).standard_normal((60, 2)), Power(0.1, p=0.0)
    solver = AttentionSolver(g, 10.0, penalty, tol=1e-8)
    Z, info = solver.solve(F), solver.info_
    assert info.status == "stationary"
    assert info.modulus <= 0
    assert info.distance == info.gap == np.inf
    dense = Dense(g, 10.0, penalty, F)
    assert np.linalg.norm(dense.gradient(Z)) <= info.gradient <= 1e-8 * np.linalg.norm(Z)
    assert dense.value(Z) < dense.value(F)
    again = AttentionSolver(g, 10.0, penalty, tol=1e-8)
    again.solve(F, guess=Z)
    assert again.info_.iterations == 0


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6), power=st.integers(-10, -1), unit=st.sampled_from([-150, -9, 0, 200])
)
def test_the_bound_holds_in_any_unit(seed, power, unit):
    rng = np.random.default_rng(seed)
    g = random_graph(25, 50, seed, weighted=seed % 2 == 0)
    F, lam = rng.standard_normal((25, 2)), 10.0 ** rng.uniform(-2, 2)
    penalty = [PseudoHuber, Huber][seed % 2](10.0 ** rng.uniform(-3, 1))
    solver = AttentionSolver(g, lam, penalty.at(penalty.delta * 10.0**unit), tol=10.0**power)
    Z = solver.solve(F * 10.0**unit) / 10.0**unit
    own = np.linalg.norm(Dense(g, lam, penalty, F).gradient(Z))
    assert own * 10.0**unit <= solver.info_.distance * (1 + 1e-9) + 1e-14 * 10.0**unit
    assert solver.info_.status in ("converged", "stagnated")


def test_without_attention_it_is_the_linear_solve():
    g, F = random_graph(50, 150), np.random.default_rng(1).standard_normal((50, 3))
    Z = AttentionSolver(g, 20.0, PseudoHuber(1e9), tol=1e-10).solve(F)
    np.testing.assert_allclose(Z, np.linalg.solve(dense_H(g, 20.0), F), atol=1e-9)


def test_order_and_shape_of_what_is_given():
    g, f = random_graph(40, 90, weighted=True), np.random.default_rng(1).standard_normal(40)
    solvers = [AttentionSolver(one, 5.0, Huber(0.2), 1e-9) for one in (g, g.reordered("degree"))]
    a, b = (solver.solve(f) for solver in solvers)
    assert a.shape == (40,)
    np.testing.assert_allclose(a, b, atol=1e-8)
    named = []
    for solver in solvers:
        ends = np.sort(np.stack(solver.graph.edges()[:2]), axis=0)
        named.append(solver.weights(a)[np.lexsort(ends)])
    np.testing.assert_allclose(*named, rtol=1e-12)
    plain = AttentionSolver(g, 5.0, Huber(0.2), 1e-9, device="cpu-scipy").solve(f)
    np.testing.assert_allclose(plain, a, atol=1e-8)
    assert not AttentionSolver(g, 5.0, Huber(0.2)).solve(np.zeros((40, 2))).any()
    with pytest.raises(ValueError, match="41 rows"):
        solvers[0].solve(np.zeros(41))


def test_cora_takes_the_steps_of_a_linear_solve():
    """IRLS with a sparse LU is the reference; design: 22 products to 1e-3, 41 to 1e-6."""
    data = shared("cora")
    g, lam = data.graph, 20.0
    F = np.random.default_rng(0).standard_normal((g.num_nodes, 7))
    u, v, _ = g.edges()
    root = np.sqrt(g.degree)[:, None]

    def distances(Z):
        A = Z / root
        return np.sqrt(((A[u] - A[v]) ** 2).sum(axis=1))

    penalty, Z = PseudoHuber(float(np.median(distances(F)))), F
    for _ in range(200):
        gamma = 1 / np.sqrt(1 + (distances(Z) / penalty.delta) ** 2)
        A = sp.coo_array((gamma, (u, v)), shape=(g.num_nodes,) * 2).tocsr()
        A = A + A.T
        L = sp.diags_array(1 / root.ravel()) @ (sp.diags_array(A.sum(axis=1)) - A)
        H = sp.csc_array(sp.eye_array(g.num_nodes) + lam * L @ sp.diags_array(1 / root.ravel()))
        last, Z = Z, sla.splu(H).solve(F)
        if np.linalg.norm(Z - last) <= 1e-10 * np.linalg.norm(Z):
            break
    for tol, most in ((1e-3, 40), (1e-6, 75)):
        solver = AttentionSolver(g, lam, penalty, tol)
        off = np.linalg.norm(solver.solve(F) - Z)
        assert off <= solver.info_.distance + 1e-9 * np.linalg.norm(Z)
        assert solver.info_.distance <= tol * np.linalg.norm(Z)
        assert solver.info_.iterations <= most
