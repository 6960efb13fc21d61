"""The kernel model, against the definition of its kernel in long double and against refits."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, KernelModel
from herta_gpu.datasets import load
from herta_gpu.more.wide_kernel import kernel_ridge, wide_kernel
from herta_gpu.plumbing.checks import BudgetError
from tests.conftest import dense_H, random_graph

N = 160
GRAPH = random_graph(N, 420)
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((N, 6)) + 0.5, RNG.integers(0, 3, N)
TRAIN = np.sort(RNG.permutation(N)[:120])
T = np.eye(3)[Y]
KINDS = {
    "hops": {},
    "lam": {"hops": (), "lam": [2.0, 9.0]},
    "all": {"hops": [0, 2], "lam": [3.0], "rank": None, "normalize": "none"},
    "no linear part": {"linear": 0.0, "rank": 3},
}


def unit(rows, floor=1e-300):
    return rows / np.maximum(np.linalg.norm(rows, axis=1), floor)[:, None]


def wide(A, B):
    """The kernel by its definition, in long double, with angles that keep their digits near 0."""
    pi = 4 * np.arctan(np.longdouble(1))
    A, B = A.astype(np.longdouble), B.astype(np.longdouble)
    a, b = (np.sqrt((M * M).sum(axis=1, keepdims=True)) for M in (A, B))
    near, far = ((A / a)[:, None] - (B / b)[None], (A / a)[:, None] + (B / b)[None])
    t = 2 * np.arctan2(np.sqrt((near**2).sum(axis=2)), np.sqrt((far**2).sum(axis=2)))
    Theta = A @ B.T
    for _ in range(2):
        less = (2 * pi * np.sin(t / 2) ** 2 + t * np.cos(t) - np.sin(t)) / pi  # 1 - cos of the next
        Theta = a * b.T * (1 - less) + Theta * (pi - t) / pi
        t = 2 * np.arcsin(np.sqrt(less / 2))
    return Theta


def test_the_kernel_is_that_of_a_wide_random_net():
    """Its first layer is the mean over random ReLUs: 400,000 of them, five standard errors."""
    rng = np.random.default_rng(0)
    A = unit(rng.standard_normal((4, 3)))
    R = rng.standard_normal((3, 400_000))
    F = np.maximum(A @ R, 0)
    products = 2 * F[:, None] * F[None]
    mean, error = products.mean(axis=2), products.std(axis=2) / np.sqrt(400_000)
    angle = np.arccos(np.clip(A @ A.T, -1, 1))
    first = (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi
    assert (np.abs(mean - first) < 5 * error + 1e-9).all()


@pytest.mark.parametrize("off", [0.0, 1e-12, 1e-8, 1e-4])
def test_no_kernel_is_further_off_than_its_bound(off):
    rng = np.random.default_rng(1)
    for alike in (1.0, 1e-3, 1e-9, 0.0):  # rows that are nearly the same are the hard ones
        A = rng.standard_normal((1, 7)) + alike * rng.standard_normal((40, 7))
        A = np.hstack([unit(A), np.full((40, 1), 0.5)])
        moved = A + off * unit(rng.standard_normal(A.shape)) * 0.99
        offs = np.full(40, off)
        found, error = wide_kernel(moved, moved, 0, (offs, offs))
        assert np.linalg.norm((found - wide(A, A)).astype(float)) <= error
        found, error = wide_kernel(moved[:9], moved[9:], None, (offs[:9], offs[9:]))
        assert np.linalg.norm((found - wide(A[:9], A[9:])).astype(float)) <= error


def kernels(model, graph=GRAPH, F=X):
    """K of all nodes of the fitted model, from dense algebra in long double where it matters."""
    n, f = len(F), model.fixed_
    F = unit(F) if model.normalize == "unit" else F
    L = dense_H(graph, 1.0) - np.eye(n)
    maps = [np.linalg.matrix_power(np.eye(n) - L, k) for k in model.hops]
    maps += [np.linalg.inv(np.eye(n) + lam * L) for lam in model.lam]
    U = unit(F @ f["V"], f["floors"][0])
    Z = np.hstack([unit(M @ U, 1e-3) for M in maps]) / np.sqrt(len(maps))
    Z = np.hstack([Z, np.full((n, 1), 0.5)])
    K = wide(Z, Z).astype(float)
    K /= np.diag(K)[TRAIN].mean()
    if model.linear:
        B = np.hstack([unit(M @ F, f["floors"][1]) for M in maps])
        B = B - B[TRAIN].mean(axis=0)
        K += model.linear * B @ B.T / np.mean(np.sum(B[TRAIN] ** 2, axis=1))
    return K, model.ridge * np.diag(K)[TRAIN].mean()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_kernel_ridge_by_dense_algebra(kind):
    model = KernelModel(ridge=0.05, **KINDS[kind]).fit(GRAPH, X, Y, TRAIN, evaluate=[3, 150, 7])
    K, rho = kernels(model)
    A, mean = K[np.ix_(TRAIN, TRAIN)], T[TRAIN].mean(axis=0)
    inverse = np.linalg.inv(A + rho * np.eye(120))
    best = inverse @ (T[TRAIN] - mean)

    def objective(a):
        return ((T[TRAIN] - mean - A @ a) ** 2).sum() / 2 + rho / 2 * (a * (A @ a)).sum()

    gap = objective(model.a_) - objective(best)
    assert model.status_ == "certified"
    assert gap <= model.certificate_.gap + 1e-14 * objective(best)
    assert objective(best) >= model.certificate_.optimum * (1 - 1e-12)
    np.testing.assert_allclose(model.a_, best, atol=1e-7 * np.abs(best).max())
    outputs = K[:, TRAIN] @ best + mean
    np.testing.assert_allclose(model.transform(GRAPH, X), outputs, atol=1e-7)
    np.testing.assert_allclose(model.outputs_, outputs[[3, 150, 7]], atol=1e-7)
    assert (model.predict(GRAPH, sp.csr_array(X)) == outputs.argmax(axis=1)).all()
    for i in (0, 60, 119):  # refits without a node, with the mean of the others
        keep = np.delete(np.arange(120), i)
        level = T[TRAIN][keep].mean(axis=0)
        a = np.linalg.solve(A[np.ix_(keep, keep)] + rho * np.eye(119), T[TRAIN][keep] - level)
        np.testing.assert_allclose(model.loo_[i], A[i, keep] @ a + level, atol=1e-8)


def test_the_certificate_holds_for_kernels_and_weights_that_are_off():
    """60 random problems: a kernel perturbed by up to its E, solved as if it were the true one."""
    rng, used = np.random.default_rng(5), 0.0
    for _ in range(60):
        n, rho = 30, 10 ** rng.uniform(-3, 0)
        A = rng.standard_normal((n, rng.integers(3, 40)))
        K, P = A @ A.T / A.shape[1], rng.standard_normal((n, n))
        P = (P + P.T) * 10 ** rng.uniform(-9, -3) * rho / np.linalg.norm(P + P.T)
        y = rng.standard_normal((n, 2)) + 1
        E = float(np.linalg.norm(P))
        a, _, found = kernel_ridge(K + P, rho, y, E)
        t, H = y - y.mean(axis=0), K + rho * np.eye(n)
        R = (t - H.astype(np.longdouble) @ a).astype(float)
        gap = (R * np.linalg.solve(H, K @ R)).sum() / 2  # a difference of objectives is rounding
        assert gap <= found.gap
        assert rho / 2 * (t * np.linalg.solve(H, t)).sum() >= found.optimum * (1 - 1e-12)
        used = max(used, gap / found.gap)
    assert used > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_model_says_the_same(kind, tmp_path):
    model = KernelModel(**KINDS[kind]).fit(GRAPH, X, np.array(list("abc"))[Y], TRAIN)
    model.save(tmp_path / "model.npz")
    again, other = KernelModel.load(tmp_path / "model.npz"), random_graph(200, 500, 7)
    Z = RNG.standard_normal((200, 6))
    for graph, F in ((GRAPH, X), (other, Z)):
        assert (again.transform(graph, F) == model.transform(graph, F)).all()
    assert again.score(GRAPH, X, np.array(list("abc"))[Y], TRAIN) > 0.5
    assert again.certificate_ == model.certificate_
    model = HERTA().fit(GRAPH, X, Y, TRAIN)
    model.save(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="herta_gpu model"):
        KernelModel.load(tmp_path / "other.npz")


def test_numbers_and_an_exclusive_or():
    y = X[:, 0] * X[:, 1]
    model = KernelModel(hops=[0], rank=None, ridge=1e-3).fit(GRAPH, X, y, TRAIN)
    assert model.predict(GRAPH, X).shape == (N,)
    rest = np.setdiff1d(np.arange(N), TRAIN)
    assert model.score(GRAPH, X, y, rest) > HERTA(lam=[0]).fit(GRAPH, X, y, TRAIN).score(
        GRAPH, X, y, rest
    )


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"hops": (), "lam": ()}, "hops and lam are empty"),
        ({"ridge": 0.0}, "ridge must be"),
        ({"rank": 0}, "rank must be"),
        ({"linear": -1.0}, "linear must"),
        ({"normalize": "max"}, "normalize must be one of"),
        ({"lam": [-1.0]}, "lam must"),
    ],
)
def test_bad_parameters(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        KernelModel(**params).fit(GRAPH, X, Y, TRAIN)


def test_a_budget_that_is_too_small_is_named():
    data = load("digits")
    with pytest.raises(BudgetError, match="raise memory_budget"):
        KernelModel(memory_budget="1MB").fit(data.graph, data.X, data.y, data.split["train"])
