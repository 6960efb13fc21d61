"""A certificate must bound the true gap, at every step, and must not be vacuous.

Bounds of the Hessian and proofs from stored rows, each against dense algebra.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import herta_gpu.training
from herta_gpu import HERTA, Certificate, Graph
from herta_gpu.backends import get_backend
from herta_gpu.certificate import (
    Proof,
    Spectrum,
    Terms,
    _norm_bound,
    choose_spectrum,
    lanczos,
    measured_spectrum,
    probabilistic_spectrum,
    prove,
    ritz_interval,
)
from herta_gpu.certificate import (
    least_squares as stored_least_squares,
)
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_degree
from herta_gpu.preconditioner import Preconditioner, build, no_preconditioner
from herta_gpu.problem import StoredPoint, StoredProblem, UnfoldedMap
from tests.conftest import RECIPE, dense_H, least_squares, minimum, random_graph
from tests.fuzz.reference import Reference, system


def problem(seed=0, n=250, d=15, c=3, decades=2, separable=False):
    g = random_graph(n, 3 * n, seed)
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) * np.logspace(0, -decades, d)
    y = (
        X @ rng.standard_normal((d, c)) + (0.0 if separable else 0.5) * rng.standard_normal((n, c))
    ).argmax(1)
    return g, X, y, np.sort(rng.choice(n, int(0.7 * n), replace=False))


def true_gaps(model, g, X, y, train, lam, ridge=0.0):
    A = np.linalg.solve(dense_H(g, lam), X)[train]
    best = least_squares(A, np.eye(y.max() + 1)[y[train]], ridge)[1]
    return [h["loss"] / best - 1 for h in model.history_], best


KINDS = {
    "spectral-proven": {"all_rows": True},
    "spectral-proven, masked": {},
    "spectral-deterministic": {"measured": True},
    "spectral-probabilistic": {"sketch": 128},
    "duality": {"ridge": 0.5},
}


@pytest.mark.parametrize("wrong", [1.0, 1e6])
def test_a_wrong_guess_of_Z_costs_iterations_only(wrong, monkeypatch):
    usual = Preconditioner.for_training

    def misled(self, backend, blocks):
        P = usual(self, backend, blocks)
        noise = np.random.default_rng(0).standard_normal(P.Z_start.shape).astype(np.float32)
        return replace(P, Z_start=P.Z_start + wrong * noise)

    monkeypatch.setattr(Preconditioner, "for_training", misled)
    g, X, y, train = problem()
    model = HERTA(lam=20.0, strategy="herta").fit(g, X, y, train)
    gaps, _ = true_gaps(model, g, X, y, train, 20.0)
    assert model.status_ == "certified"
    for gap, h in zip(gaps, model.history_, strict=True):
        assert gap <= h["certificate"] + 1e-10


def test_weights_beyond_the_working_precision_give_no_guess():
    """A feature of a tiny unit and targets of a huge one: W is above what float32 can hold."""
    g, X, _, train = problem()
    X[:, 0] *= 1e-20
    target = X[:, 0] * 1e40 + 1e20 * np.random.default_rng(0).standard_normal(len(X))
    model = HERTA(lam=1.0).fit(g, X, target, train)
    A = np.linalg.solve(dense_H(g, 1.0), X)[train]
    scale = np.linalg.norm(A, axis=0)
    best = least_squares(A / scale, target[train, None] / 1e20, 0.0)[1] * 1e40
    assert abs(model.W_).max() > np.finfo(np.float32).max
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] / best - 1 <= 1e-6


@pytest.mark.parametrize("optimizer", ["cg", "gd", "momentum", "lbfgs", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_bounds_the_true_gap_at_every_step(kind, optimizer, monkeypatch):
    lam = {"cg": 1.0, "lbfgs": 1.0}.get(optimizer, 20.0)
    options, kind = dict(KINDS[kind]), kind.split(",")[0]
    if options.pop("measured", False):
        monkeypatch.setattr("herta_gpu.certificate._PROVEN", 2.0)  # nothing is good enough
    g, X, y, train = problem()
    if options.pop("all_rows", False):
        train = np.arange(g.num_nodes)
    model = HERTA(lam=lam, optimizer=optimizer, strategy="herta", max_iter=60, tol=1e-8, **options)
    model.fit(g, X, y, train=train)
    gaps, _ = true_gaps(model, g, X, y, train, lam, options.get("ridge", 0.0))
    for gap, h in zip(gaps, model.history_, strict=True):
        assert gap <= h["certificate"] + 1e-10
    # The last point once more, from W_ alone.
    A = np.linalg.solve(dense_H(g, lam), X)[train]
    Y, ridge = np.eye(3)[y[train]], options.get("ridge", 0.0)
    value = 0.5 * ((A @ model.W_ - Y) ** 2).sum() + 0.5 * ridge * (model.W_**2).sum()
    assert value / least_squares(A, Y, ridge)[1] - 1 <= model.certificate_.value + 1e-12
    if optimizer != "adam":
        assert model.status_ == "certified"
        assert model.certificate_.value <= 1e-8
    if kind != "duality":
        assert model.certificate_.kind == kind
    assert (model.certificate_.probability > 0) == (kind == "spectral-probabilistic")


@pytest.mark.parametrize("kind", ["spectral-proven", "masked", "spectral-deterministic"])
def test_it_is_within_ten_times_of_the_true_gap(kind, monkeypatch):
    """Near convergence, on gaps large enough to be known: steps of a slow optimizer."""
    g, X, y, train = problem(decades=1)
    if kind == "spectral-proven":
        train = np.arange(g.num_nodes)
    if kind == "spectral-deterministic":
        monkeypatch.setattr("herta_gpu.certificate._PROVEN", 2.0)
    model = HERTA(
        lam=5.0, optimizer="gd", learning_rate=0.3, strategy="herta", tol=1e-7, dtype="float64"
    ).fit(g, X, y, train=train)
    gaps, _ = true_gaps(model, g, X, y, train, 5.0)
    checked = 0
    for gap, h in zip(gaps, model.history_, strict=True):
        if 1e-7 < gap < 1e-2:
            assert gap <= h["certificate"] <= 10 * gap
            checked += 1
    assert checked >= 3


def test_rounding_at_a_hub_is_paid_for_by_the_interval(captured):
    """10^5 equal terms summed in float32 err by 10^-3: more than the polynomial does."""
    n = 100_001
    g = Graph.from_edges(np.stack([np.zeros(n - 1, dtype=int), np.arange(1, n)]), n)
    rng = np.random.default_rng(0)
    X = np.stack([np.ones(n), rng.random(n), rng.standard_normal(n), np.sqrt(np.diff(g.indptr))], 1)
    y = rng.integers(0, 2, n)
    for train in (np.arange(n), np.arange(0, n, 2)):
        model = HERTA(lam=1.0, strategy="direct", tol=1e-4).fit(g, X, y, train=train)
        H = sp.eye_array(n) + g.to_csr()
        A = spla.spsolve(sp.csc_array(H), X)[train]
        C = captured["P"].factor.to_weights(np.eye(4))
        values = np.linalg.eigvalsh(C.T @ A.T @ A @ C)
        assert model.spectrum_.a <= values[0]
        assert values[-1] <= model.spectrum_.b


def test_loose_inner_solves_are_paid_for_by_the_certificate(monkeypatch):
    """With solves to 1e-2 only and no sharpening, the bound must grow, not break."""
    import herta_gpu.training as module

    monkeypatch.setattr(module, "_TIGHTENINGS", 0)
    monkeypatch.setattr(module, "_LEAST_INNER", 1e-2)
    real = module.Problem.__init__

    def loose(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.tol = 1e-2

    monkeypatch.setattr(module.Problem, "__init__", loose)
    g, X, y, train = problem()
    model = HERTA(lam=20.0, strategy="herta", max_iter=5).fit(g, X, y, train=train)
    A = np.linalg.solve(dense_H(g, 20.0), X)[train]
    Y = np.eye(3)[y[train]]
    best = least_squares(A, Y)[1]
    true = 0.5 * ((A @ model.W_ - Y) ** 2).sum() / best - 1
    assert true <= model.certificate_.value
    assert model.certificate_.value > 1e-6
    assert model.status_ == "max_iter"


@pytest.mark.parametrize("ridge", [1e-3, 1e-1, 10.0])
def test_cross_entropy_with_a_ridge(ridge):
    g, X, y, train = problem(seed=3)
    model = HERTA(
        lam=5.0, loss="ce", optimizer="lbfgs", ridge=ridge, max_iter=300, strategy="herta"
    )
    model.fit(g, X, y, train=train)
    A = np.linalg.solve(dense_H(g, 5.0), X)[train]
    Y = np.eye(3)[y[train]]

    best = minimum(A, Y, "ce", ridge)
    assert model.status_ == "certified"
    assert model.certificate_.kind == "duality"
    for h in model.history_:
        assert h["loss"] / best - 1 <= h["certificate"] + 1e-9
    assert model.history_[-1]["loss"] <= best * (1 + 1e-6)


def test_an_optimum_of_zero_is_not_called_a_relative_gap():
    g, X, y, _ = problem(d=40, decades=0)
    model = HERTA(lam=1.0).fit(g, X, y, train=np.arange(20))
    assert model.status_ == "converged"
    assert model.history_[-1]["loss"] <= 1e-12 * 10


def test_lanczos_solves_tighter_where_features_are_barely_seen(monkeypatch):
    """||H^-1 X P^-1/2|| is about 10^5 here: solves to 1e-4 would blur every Ritz value."""
    import herta_gpu.planning.plan as planner

    monkeypatch.setattr(planner, "_certificate", lambda *a: "spectral-probabilistic")
    n = 300
    g = Graph.from_edges(np.stack([np.arange(n), (np.arange(n) + 1) % n]), n)
    rng = np.random.default_rng(0)
    X, train = rng.standard_normal((n, 30)), np.arange(200)
    for j in range(4):
        X[:, j] = 0
        X[205 + 3 * j, j] = 1.0
    y = rng.integers(0, 3, n)
    model = HERTA(lam=2.0, strategy="herta").fit(g, X, y, train=train)
    A = np.linalg.solve(dense_H(g, 2.0), X)[train]
    best = least_squares(A, np.eye(3)[y[train]])[1]
    assert model.spectrum_.norm > 1e3
    assert model.status_ == "certified-reduced"
    assert model.certificate_.kept < 30
    assert model.certificate_.kind == "spectral-probabilistic"
    assert model.history_[-1]["loss"] <= best * (1 + model.certificate_.value)


def test_certificates_print():
    assert "3.70e-04" in str(Certificate(3.7e-4, "spectral-proven", gap=1.0))
    assert "fails with probability <= 1.0e-03" in str(
        Certificate(1e-7, "spectral-probabilistic", 1e-3, 1.0)
    )


def test_cross_entropy_without_a_ridge_prints_no_number():
    g, X, y, train = problem(seed=4)
    y = np.random.default_rng(4).integers(0, 3, y.shape[0])  # not separable, surely
    model = HERTA(loss="ce", optimizer="lbfgs").fit(g, X, y, train=train)
    assert model.status_ == "converged"
    assert model.certificate_.kind == "none"
    assert math.isinf(model.certificate_.value)
    assert "strongly convex" in str(model.certificate_)
    assert all(math.isinf(h["certificate"]) for h in model.history_)
    X = np.hstack([X, 40 * np.eye(3)[y]])
    model = HERTA(loss="ce", optimizer="lbfgs").fit(g, X, y, train=train)
    assert "separable" in model.certificate_.note
    assert model.score(g, X, y, train) == 1.0


# ---- bounds of the preconditioned Hessian ----------------------------------------------------


N, D = 90, 6
BACKEND = get_backend("cpu")
ROUGH = replace(RECIPE, degree=10, width=4, exact=False, all_rows=True)


class Known:
    """P of some recipe, and the dense Hessian behind it."""

    def __init__(
        self, lam: float = 5.0, ridge: float = 0.0, n_train: int = 60, dtype: str = "float32",
        **recipe: Any,
    ) -> None:  # fmt: skip
        graph, rng = random_graph(N, 250), np.random.default_rng(0)
        X, train = rng.standard_normal((N, D)), np.sort(rng.permutation(N)[:n_train])
        self.H = RegularizedLaplacian(graph, lam, BACKEND, dtype)
        self.map = UnfoldedMap(self.H, Features(X, BACKEND), train, 8)
        self.whole = np.linalg.solve(dense_H(graph, lam), X)
        self.A, self.ridge = self.whole[train], ridge
        Y = rng.standard_normal((n_train, 2))
        self.P = build(replace(ROUGH, **recipe), self.H, self.map, Y, ridge)

    def eigenvalues(self) -> Any:
        C = self.P.factor.to_weights(np.eye(self.P.factor.rank))
        T = self.A.T @ self.A + self.ridge * np.eye(D)
        return np.linalg.eigvalsh(C.T @ T @ C)

    def norm(self) -> float:
        """||H^-1 X P^-1/2||."""
        return float(np.linalg.norm(self.whole @ self.P.factor.to_weights(np.eye(D)), 2))

    def holds(self, found: Spectrum) -> bool:
        values = self.eigenvalues()
        inside = found.a <= values[0] and values[-1] <= found.b
        return bool(inside) and self.norm() <= found.norm


@pytest.mark.parametrize("kind", ["spectral-proven", "spectral-deterministic"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("lam", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("eps", [1e-1, 1e-2, 1e-4])
def test_what_the_polynomial_proves(kind, ridge, lam, eps):
    case = Known(lam, ridge)
    degree = chebyshev_degree(case.H, eps)
    case = Known(lam, ridge, degree=degree)
    found = choose_spectrum(kind, case.P, case.map, ridge, 0)
    assert found is not None
    if found.kind != "estimate":
        assert case.holds(found)
    if eps == 1e-4:
        assert found.kind in ("spectral-proven", "spectral-deterministic")
        assert found.probability == 0.0
        assert found.kappa < 1.5


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("goal", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_residuals_prove(whiten, ridge, goal, dtype):
    made = {"all_rows": False, "keep_rows": True, "goal": goal, "whiten": whiten}
    case = Known(5.0, ridge, dtype=dtype, **made)
    found = measured_spectrum(case.P, case.P.column_error)
    if found is not None:
        assert case.holds(found)
        assert found.kind == "spectral-deterministic"
    if goal == 1e-7:
        assert found is not None
        assert found.kappa == pytest.approx(1, abs=1e-4)
        again = choose_spectrum("residual", case.P, case.map, ridge, 0)
        assert again == found


def test_residuals_that_are_too_large_prove_nothing():
    case = Known(all_rows=False, goal=1e-3)
    assert measured_spectrum(case.P, np.full(D, 10.0)) is None


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_lanczos_brackets_the_spectrum(ridge):
    """Six directions are all that there are: Ritz values are eigenvalues, up to the solves."""
    case = Known(5.0, ridge, degree=2, all_rows=False)
    found = probabilistic_spectrum(case.P, case.map, ridge, 0)
    assert found is not None
    assert case.holds(found)
    assert found.a >= 0.5 * case.eigenvalues()[0]
    low, high = ritz_interval(case.P, case.map, ridge, 0)
    values = case.eigenvalues()
    assert low == pytest.approx(values[0], rel=1e-2)
    assert high == pytest.approx(values[-1], rel=1e-2)


def test_nothing_is_known_without_a_preconditioner_or_of_the_other_kinds():
    case = Known()
    none = no_preconditioner(BACKEND, D, 2)
    assert choose_spectrum("duality", none, case.map, 1.0, 0) is None
    assert choose_spectrum("none", none, case.map, 0.0, 0) is None


def test_a_P_that_is_another_matrix_is_refused():
    case = Known(degree=chebyshev_degree(Known().H, 1e-6))
    shifted = replace(case.P.inner, slack=math.inf)
    P = replace(case.P, inner=shifted)
    assert isinstance(P, Preconditioner)
    found = choose_spectrum("spectral-deterministic", P, case.map, 0.0, 0)
    assert found is None or found.kind in ("spectral-probabilistic", "estimate")


def test_the_norm_bound_is_one():
    rng = np.random.default_rng(0)
    for r in (1, 3, 30):
        B = rng.standard_normal((40, r))
        S = B.T @ B
        true = np.linalg.eigvalsh(S)[-1]
        assert true <= _norm_bound(S, BACKEND) <= true * r ** (1 / 16) * (1 + 1e-5)
        assert true <= _norm_bound(S, BACKEND, enough=10 * np.trace(S))
    assert _norm_bound(np.zeros((3, 3)), BACKEND) == 0.0


# ---- runs of Lanczos that end ----------------------------------------------------------------
def pairs(n: int) -> Graph:
    return Graph.from_edges(np.arange(n).reshape(2, -1), num_nodes=n)


def complete(n: int) -> Graph:
    return Graph.from_edges(np.stack(np.triu_indices(n, 1)), num_nodes=n)


def half_isolated(n: int) -> Graph:
    return Graph.from_edges(np.arange(n // 2).reshape(2, -1), num_nodes=n)


def squares(graph: Graph, lam: float) -> Any:
    """H^-2, whose distinct eigenvalues are as many as those of the graph."""
    inverse = np.linalg.inv(dense_H(graph, lam))
    return inverse @ inverse


R = 60
MAPS = {
    "matching": squares(pairs(R), 5.0),
    "complete": squares(complete(R), 5.0),
    "half isolated": squares(half_isolated(R), 5.0),
    "identity": np.eye(R),
    "spread": np.diag(np.linspace(0.1, 3.0, R)),
    "one above": np.diag([50.0] + [1.0] * (R - 1)),
}


def runs_of(maps, steps, seed, noise=0.0, n=1000):
    """Lanczos with dense matrices, whose products are off by `noise` in a random direction."""
    rng = np.random.default_rng(seed)

    def multiply(v):
        made = np.stack([S @ v[:, i] for i, S in enumerate(maps)], axis=1)
        off = rng.standard_normal(made.shape)
        off *= noise / np.linalg.norm(off, axis=0)
        return made + off, np.stack([np.zeros(len(maps))] * 2 + [np.full(len(maps), noise)])

    start = rng.standard_normal((R, len(maps)))
    return lanczos(BACKEND, multiply, start, steps, lambda v: v, R, n)


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_each_run_has_its_own_end(first, second):
    """A run ends after as many steps as its matrix has eigenvalues, whatever the other does."""
    for name, run in zip((first, second), runs_of([MAPS[first], MAPS[second]], 20, 0)):
        distinct = np.unique(np.linalg.eigvalsh(MAPS[name]).round(9))
        assert (run.ritz.shape[0] < 20) == (name != "spread")
        assert run.ritz.shape[0] == min(20, distinct.size)
        if run.ritz.shape[0] < 20:
            np.testing.assert_allclose(run.ritz, distinct, atol=1e-8)


@pytest.mark.parametrize("noise", [0.0, 1e-13, 1e-9, 1e-5])
@pytest.mark.parametrize("name", MAPS)
def test_what_a_run_missed_is_bounded(name, noise):
    """40 starts, each bound of which fails with probability at most 3 / (4 * 1000)."""
    values, outside = np.linalg.eigvalsh(MAPS[name]), 0
    for seed in range(40):
        (run,) = runs_of([MAPS[name]], 20, seed, noise)
        slip = run.gain * (run.left + run.off[2])
        top = run.largest_root(0.0, run.off[2]) ** 2
        low = top - (top - (run.ritz[0] - slip)) / (1 - run.share)
        outside += top < values[-1] or low > values[0]
        if noise <= 1e-13:
            assert top <= 1.2 * values[-1] + 1e-5
    assert outside <= 2  # three or more by chance: below 5e-5


def test_a_run_that_ends_by_rounding_alone_claims_no_more_than_it_saw():
    """An eigenvalue that the start hardly sees: the space is invariant to 1e-12, and misses it."""
    S = np.diag([1.0] * (R - 1) + [1.5])
    start = np.ones((R, 1))
    start[-1] = 1e-12

    def multiply(v):
        return S @ v, np.zeros((3, 1))

    n = 2 * 10**11  # at this probability such a start is to be expected
    (run,) = lanczos(BACKEND, multiply, start, 20, lambda v: v, R, n)
    assert run.ritz.shape == (1,)
    assert run.largest_root(0.0, 0.0) ** 2 >= 1.5


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("more", [{}, {"fit_intercept": True}, {"sparsify": True}, {"tol": 1e-6}])
@pytest.mark.parametrize(
    ("graph", "d", "n_train"),
    [(pairs(600), 200, 210), (half_isolated(600), 200, 210), (complete(200), 60, 70)],
)
def test_bounds_of_graphs_with_few_eigenvalues(graph, d, n_train, more, start):
    """The Hessian of one run has one eigenvalue, that of the other many."""
    n, rng = graph.num_nodes, np.random.default_rng(1)
    X, y = rng.standard_normal((n, d)), rng.standard_normal((n, 2))
    train = np.sort(rng.permutation(n)[:n_train])
    params = {"lam": 5.0, "dtype": "float64", "tol": 1e-2, "strategy": "herta", **more}
    params["max_iter"] = 20
    first = HERTA(**params).fit(graph, X, y) if start else None
    model = HERTA(**params).fit(graph, X, y, train, warm_start=first)
    A, Y = np.linalg.solve(dense_H(graph, 5.0), X)[train], y[train]
    if "fit_intercept" in more:
        A, Y = A - A.mean(axis=0), Y - Y.mean(axis=0)
    W = np.linalg.lstsq(A, Y, rcond=None)[0]
    best, here = (np.sum((A @ V - Y) ** 2) for V in (W, model.W_))
    assert here - best <= (model.certificate_.value + 1e-12) * best
    if not more.get("sparsify"):
        assert model.status_ == "certified"


@pytest.mark.parametrize("graph", [pairs(1200), half_isolated(1200)])
@pytest.mark.parametrize("seed", range(3))
def test_the_spectrum_of_graphs_with_few_eigenvalues(graph, seed):
    """P is rough, so that both runs have eigenvalues to find."""
    rng, n, d = np.random.default_rng(seed), 1200, 400
    X, train = rng.standard_normal((n, d)), np.sort(rng.permutation(n)[:420])
    H = RegularizedLaplacian(graph, 5.0, BACKEND, "float64")
    A = UnfoldedMap(H, Features(X, BACKEND), train, 8)
    P = build(replace(ROUGH, degree=8, all_rows=False), H, A, np.zeros((420, 1)), 0.0)
    Z = np.linalg.solve(dense_H(graph, 5.0), X) @ P.factor.to_weights(np.eye(d))
    values = np.linalg.svd(Z[train], compute_uv=False) ** 2
    found = probabilistic_spectrum(P, A, 0.0, seed)
    assert found.kind == "spectral-probabilistic"
    assert found.a <= values[-1] * (1 + 1e-9)
    assert values[0] <= found.b * (1 + 1e-9)
    assert np.linalg.norm(Z, 2) <= found.norm * (1 + 1e-9)
    assert found.norm <= 1.5 * np.linalg.norm(Z, 2)


# ---- proofs from stored rows -----------------------------------------------------------------


class Proving(NamedTuple):
    """A stored problem, and what a proof takes beside it."""

    rows: StoredProblem
    P: Preconditioner
    X_norm: float

    def proof(self, u: Any) -> Proof:
        return prove(self.rows, self.rows.at(u), self.P, self.X_norm, lambda _: "why")


class Stored:
    """A fit that is proven from stored rows, and the last proof in it."""

    def __init__(
        self, monkeypatch: Any, n: int = 160, d: int = 8, train: int = 90, seed: int = 0,
        X: Any = None, **params: Any,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        graph = random_graph(n, 3 * n, seed)
        X = rng.standard_normal((n, d)) if X is None else X
        y = (X[:, :3] + rng.standard_normal((n, 3))).argmax(axis=1)
        at = np.sort(rng.choice(n, train, replace=False))
        self.seen: list[tuple[Proving, Any, Proof]] = []
        real = herta_gpu.training.prove

        def spied(problem: StoredProblem, at: StoredPoint, *known: Any) -> Proof:
            proof = real(problem, at, *known)
            self.seen.append((Proving(problem, *known[:2]), at.u, proof))
            return proof

        monkeypatch.setattr(herta_gpu.training, "prove", spied)
        self.model = HERTA(**{"lam": 3.0, "strategy": "direct", **params}).fit(graph, X, y, at)
        u, v, w = graph.edges()
        H = system(n, np.stack([u, v]), w, params.get("lam", 3.0))
        Y = np.eye(3)[y[at]]
        loss, ridge = params.get("loss", "mse"), params.get("ridge", 0.0)
        self.reference = Reference(H, X, Y, at, loss, ridge)
        self.problem, self.u, self.proof = self.seen[-1]

    def truth(self, u: Any, problem: Any = None) -> tuple[float, float]:
        """(the true objective at u, how far it is above the optimum), in extended precision."""
        basis = (problem or self.problem).rows.basis  # which a second try may change
        here = self.reference.objective(basis.to_weights(u))
        return float(here.value), float(here.value - self.reference.best.value)


LOSS = [
    {},
    {"ridge": 1e-3},
    {"ridge": 2.0},
    {"loss": "ce", "ridge": 1e-2},
    {"loss": "ce", "ridge": 1.0},
    {"lam": 50.0},
    {"lam": 50.0, "loss": "ce", "ridge": 0.1},
]
FEW = [  # training rows than features: H^-1 M^T is solved for, and X is never diffused
    {"d": d, "train": 30, **more}  # a P of d x d, and one of low rank
    for d in (40, 100)
    for more in ({"ridge": 1e-2}, {"ridge": 1.0}, {"loss": "ce", "ridge": 0.1})
]


@pytest.mark.parametrize("params", [*LOSS, *FEW])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_hold_wherever_they_are_taken(params, dtype, monkeypatch):
    """At the optimum and away from it, of rows that are solved well and badly."""
    for tol in (1e-3, 1e-8):
        case = Stored(monkeypatch, dtype=dtype, tol=tol, **params)
        assert case.model.status_ == "certified"
        assert case.model.plan_.recipe.by_rows == ("d" in params)
        rng = np.random.default_rng(1)
        for problem, u, _ in list(case.seen):
            for size in (0.0, 1e-6, 1e-3, 0.1, 3.0):
                v = u + size * rng.standard_normal(u.shape) * abs(u).max()
                proof = problem.proof(v)
                objective, gap = case.truth(v, problem)
                found = proof.certificate()
                assert gap <= found.gap
                assert gap <= found.value * (objective - gap) or found.value == math.inf
                assert abs(proof.objective - objective) <= proof.error()
                for terms in proof.choices:  # each by itself
                    assert gap <= terms.gap()


@pytest.mark.parametrize("params", LOSS[:5])
def test_bounds_are_of_use(params, monkeypatch):
    """A gap of 1e-4 is not claimed to be more than some thousand times that."""
    case = Stored(monkeypatch, tol=1e-10, **params)
    u = case.u * (1 + 3e-3 * np.random.default_rng(0).standard_normal(case.u.shape))
    objective, gap = case.truth(u)
    assert 1e-8 < gap / objective < 1e-3
    bound = case.problem.proof(u).certificate().gap
    convexity = 1.0 if params.get("loss", "mse") == "mse" else 1e3 / params["ridge"]
    assert bound <= 4 * gap * convexity


@pytest.mark.parametrize("params", LOSS)
def test_a_smaller_share_never_proves_less(params, monkeypatch):
    case = Stored(monkeypatch, tol=1e-4, **params)
    shares = [0.0, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 1.0]
    found = [case.proof.certificate(s) for s in shares]
    for name in ("gap", "value"):
        values = [getattr(c, name) for c in found]
        assert values == sorted(values)
    errors = [case.proof.error(s) for s in shares]
    assert errors == sorted(errors)
    assert found[-1] == case.proof.certificate()


@pytest.mark.parametrize("params", LOSS)
def test_what_is_wanted_would_be_enough(params, monkeypatch):
    case = Stored(monkeypatch, tol=1e-3, **params)
    for tol in (1e-3, 1e-5, 1e-7):
        share = case.proof.needed_share(tol)
        if share == 0.0:
            assert not case.proof.enough(tol, 1e-13)
            continue
        assert case.proof.enough(tol, share)
        assert share > 0.8 or not case.proof.enough(tol, 1.3 * share)


def test_solving_for_the_wanted_share_certifies(monkeypatch):
    """The loop of the strategy: a goal that was too loose is found out and mended."""
    import herta_gpu.planning.costs

    monkeypatch.setattr(herta_gpu.planning.costs, "Q_goal", lambda *_: 0.05)
    for params in LOSS:
        case = Stored(monkeypatch, tol=1e-7, **params)
        assert case.model.status_ == "certified"
        assert any(change.what == "Q again" for change in case.model.changes_)
        _, gap = case.truth(case.u)
        assert gap <= case.model.certificate_.gap


@pytest.mark.parametrize("kind", ["units", "offset", "alike", "hidden"])
@pytest.mark.parametrize("params", [{}, {"ridge": 0.1}, {"loss": "ce", "ridge": 0.1}])
def test_features_of_all_sorts(kind, params, monkeypatch):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((160, 8))
    if kind == "units":
        X *= 10.0 ** np.linspace(-4, 4, 8)
    elif kind == "offset":
        X += 1e4
    elif kind == "alike":
        X[:, 5] = X[:, 4] + 1e-6 * X[:, 5]
    else:
        X[:, 7] = 0.0
        X[np.setdiff1d(np.arange(160), np.sort(rng.choice(160, 130, replace=False)))[:3], 7] = 1.0
    case = Stored(monkeypatch, X=X, tol=1e-6, **params)
    for problem, u, proof in list(case.seen):
        _, gap = case.truth(u, problem)
        objective = case.reference.objective(problem.rows.basis.to_weights(u))
        found = proof.certificate()
        assert gap <= found.gap + float(objective.error) or found.reduced
        assert abs(proof.objective - float(objective.value)) <= proof.error()
    if not params:
        assert case.model.status_ == "certified"


def test_nothing_is_claimed_without_strong_convexity(monkeypatch):
    case = Stored(monkeypatch, loss="ce")
    assert case.proof.choices == ()
    assert case.proof.certificate().kind == "none"
    assert case.proof.certificate().value == math.inf
    truth, _ = case.truth(case.u)  # the objective is known all the same
    assert abs(truth - case.proof.objective) <= case.proof.error() < 1e-3 * truth
    assert not case.proof.enough(1e-3)
    assert case.proof.needed_share(1e-3) == 0.0
    assert case.model.status_ == "converged"


# ---- the formulas themselves ----------------------------------------------------------------
def terms(**other: Any) -> Terms:
    made = Terms("residual", 0.1, 2.0, 1.0, 0.25, 0.5, 0.0, 1.0)
    return replace(made, **other)


def test_the_formula_of_the_gap():
    # (0.1 + 0.25 * 2 + (1 + 0.25) 0.5)^2 / (2 (1 - 0.25)^2), and without what the solves left
    assert terms().gap() == pytest.approx((0.1 + 0.5 + 0.625) ** 2 / (2 * 0.75**2))
    assert terms().gap(0.0) == pytest.approx(0.1**2 / 2)
    assert terms(D=1.0).gap() == math.inf  # nothing is left of the convexity
    # of W: the ridge does not become less
    dual = terms(kind="duality", D=10.0, convexity=math.sqrt(2.0))
    assert dual.gap() == pytest.approx((0.1 + 20 + 11 * 0.5) ** 2 / 4)


def test_the_best_of_two_bounds_counts():
    proof = Proof(100.0, 0.0, 2.0, 0.0, (terms(), terms(D=0.5)), 0.5, 0.0, "", 3, 3)
    assert proof.certificate().gap == terms().gap()
    gap, off = terms().gap(), 0.5 * (2.0 + 0.25)
    assert proof.certificate().value == pytest.approx(gap / (100 - off - gap))
    assert proof.error() == pytest.approx(off)
    small = replace(proof, objective=gap + off)
    assert small.certificate().value == math.inf  # an optimum that may be 0


def test_features_that_had_to_go_are_told_for_the_spectral_kind_only():
    proof = Proof(100.0, 0.0, 2.0, 0.0, (terms(),), 0.5, 0.0, "two are alike", 2, 3)
    assert proof.certificate().reduced
    assert proof.certificate().note == "two are alike"
    dual = replace(proof, choices=(terms(kind="duality"),))
    assert not dual.certificate().reduced


def test_a_certified_fit_asks_for_no_more_solves(monkeypatch):
    case = Stored(monkeypatch, tol=1e-6)
    assert case.proof.enough(1e-6)
    assert len(case.seen) == 1
    assert not case.model.changes_


def test_runs_of_rows_give_what_all_rows_give(monkeypatch):
    """Loss and gradient are added up over runs of rows."""
    rng = np.random.default_rng(0)
    graph, X, y = random_graph(400, 1500), rng.standard_normal((400, 6)), rng.integers(0, 3, 400)
    found = []
    for chunk in (32 << 20, 8 * 3 * 50):
        monkeypatch.setattr("herta_gpu.problem._CHUNK_BYTES", chunk)
        for params in ({}, {"loss": "ce", "ridge": 0.1}):
            model = HERTA(lam=2.0, strategy="direct", **params).fit(graph, X, y)
            found.append((model.history_[-1]["loss"], model.history_[-1]["loss_error"]))
    for a, b in zip(found[:2], found[2:], strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-12)
        assert a[1] == pytest.approx(b[1], rel=0.5)


def test_least_squares_is_refined(monkeypatch):
    """u from a factor of P that is off by a thousandth: gradients of the true sum repair it."""
    case = Stored(monkeypatch, dtype="float64", tol=1e-6)
    problem, P = case.problem.rows, case.problem.P
    inner = replace(P.inner, L=P.inner.L * (1 + 1e-3 * np.tri(*P.inner.L.shape)))
    rough = replace(P, inner=inner, w_start=inner.to_gradient(problem.Q.T @ problem.Y))
    best = np.linalg.lstsq(problem.Q, problem.Y, rcond=None)[0]
    found = stored_least_squares(problem, rough, 1e-12).u
    assert abs(found - best).max() <= 1e-8 * abs(best).max()
    assert abs(inner.to_weights(rough.w_start) - best).max() > 1e-4 * abs(best).max()
