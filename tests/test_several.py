"""Several lam: blocks of features, each solved for with its own H, against dense algebra."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Checkpoint, Graph
from herta_gpu.backends import get_backend
from herta_gpu.features import Features
from herta_gpu.several import Stacked
from herta_gpu.whitening import Units, whitened
from tests.conftest import dense_H, least_squares, minimum, random_graph

N, LAMS = 160, [0, 1.0, 20.0]
GRAPH = random_graph(N, 420)
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((N, 6)) + 0.5, RNG.integers(0, 3, N)
TRAIN = np.sort(RNG.permutation(N)[:120])


def blocks(graph=GRAPH, features=X, lams=LAMS):
    """[H_1^-1 X, H_2^-1 X, ...] by LAPACK."""
    return np.hstack([np.linalg.solve(dense_H(graph, lam), features) for lam in lams])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("loss", "ridge"), [("mse", 0.0), ("mse", 0.2), ("ce", 0.05)])
def test_the_optimum_is_that_of_all_columns(loss, ridge, dtype):
    model = HERTA(lam=LAMS, loss=loss, ridge=ridge, dtype=dtype, tol=1e-7)
    model.fit(GRAPH, X, Y, TRAIN, evaluate=[3, 150, 7])
    assert (model.status_, model.W_.shape, model.n_features_in_) == ("certified", (18, 3), 6)
    Z, T = blocks(), np.eye(3)[Y[TRAIN]]
    best = minimum(Z[TRAIN], T, loss, ridge)
    F = Z[TRAIN] @ model.W_
    terms = (F - T) ** 2 / 2 if loss == "mse" else np.logaddexp.reduce(F, axis=1) - F[T > 0]
    here = terms.sum() + ridge / 2 * (model.W_**2).sum()
    assert here - best <= (model.certificate_.value + 1e-9) * best
    size = np.abs(Z @ model.W_).max() + np.abs(model.W_).max()
    np.testing.assert_allclose(model.transform(GRAPH, X), Z @ model.W_, atol=1e-5 * size)
    np.testing.assert_allclose(model.outputs_, Z[[3, 150, 7]] @ model.W_, atol=1e-5 * size)
    assert model.score(GRAPH, X, Y) == np.mean((Z @ model.W_).argmax(axis=1) == Y)


def test_lam_0_alone_is_least_squares_without_a_graph():
    model = HERTA(lam=[0], fit_intercept=True, dtype="float64", tol=1e-10)
    model.fit(GRAPH, X, Y, TRAIN)
    W = least_squares(np.hstack([X[TRAIN], np.ones((120, 1))]), np.eye(3)[Y[TRAIN]])[0]
    np.testing.assert_allclose(np.vstack([model.W_, model.intercept_]), W, atol=1e-8)


def test_one_lam_in_a_list_is_one_lam():
    one, listed = (HERTA(lam=lam).fit(GRAPH, X, Y, TRAIN) for lam in (5.0, [5.0]))
    np.testing.assert_array_equal(one.W_, listed.W_)


@pytest.mark.parametrize("kind", ["few rows", "units", "no edges", "equal columns", "sparse"])
def test_awkward_input(kind):
    """It is certified, or says that it is over fewer features; the loss is the best there is."""
    graph, features, train, ridge = GRAPH, X.copy(), TRAIN, 0.0
    if kind == "few rows":
        train, ridge = TRAIN[:10], 0.1
    if kind == "units":
        features *= 10.0 ** np.array([-9, -5, 0, 0, 4, 9])
    if kind == "no edges":
        graph = Graph.from_edges(np.zeros((2, 0), dtype=int), num_nodes=N)
    if kind == "equal columns":
        features[:, 1] = features[:, 0]
    given = sp.csr_array(features) if kind == "sparse" else features
    model = HERTA(lam=LAMS, ridge=ridge).fit(graph, given, Y, train)
    assert model.status_ in ("certified", "certified-reduced")
    A = blocks(graph, features)[train]
    unit = np.abs(A).max(axis=0)
    T = np.eye(3)[Y[train]]
    best = least_squares(A / unit if ridge == 0 else A, T, ridge)[1]
    here = ((A @ model.W_ - T) ** 2).sum() / 2 + ridge / 2 * (model.W_**2).sum()
    assert here <= best * (1 + 2e-6)


def test_more_features_than_rows_need_a_ridge():
    with pytest.raises(ValueError, match=r"18 features of 10 training nodes.* give a ridge"):
        HERTA(lam=LAMS).fit(GRAPH, X, Y, TRAIN[:10])
    plan = HERTA(lam=LAMS, memory_budget="1GB").plan(1000, 5000, 10, 3, 500)
    assert plan.strategy == "direct"
    assert plan.memory["Q"] == 500 * 30 * 8


def test_an_interrupted_fit_goes_on_to_the_same_bits(tmp_path):
    class Stop(Exception):  # noqa: N818
        pass

    def stop(record):
        raise Stop

    def fit(**more):
        model = HERTA(lam=LAMS, loss="ce", ridge=0.1, fit_intercept=True)
        return model.fit(GRAPH, X, Y, TRAIN, **more)

    with pytest.raises(Stop):
        fit(callback=stop, checkpoint=Checkpoint(tmp_path, worth=0.0, share=1.0))
    resumed, whole = fit(checkpoint=Checkpoint(tmp_path, worth=0.0, share=1.0)), fit()
    np.testing.assert_array_equal(resumed.W_, whole.W_)
    np.testing.assert_array_equal(resumed.intercept_, whole.intercept_)


@pytest.mark.parametrize("make", [Units.of, lambda X: whitened(X, cut=False)])
def test_the_basis_is_block_diagonal(make):
    inner = make(Features(X, get_backend("cpu")))
    basis, eye = Stacked([inner, inner]), np.eye(6)
    C0 = inner.weights(eye)
    whole = np.block([[C0, 0 * C0], [0 * C0, C0]])
    u = RNG.standard_normal((12, 3))
    np.testing.assert_allclose(basis.weights(u), whole @ u, rtol=1e-12)
    np.testing.assert_allclose(basis.coordinates(whole @ u), u, rtol=1e-9)
    np.testing.assert_allclose(basis.rows(u.T @ whole.T), u.T @ whole.T @ np.linalg.inv(whole))
    np.testing.assert_allclose(basis.gradient(u), np.linalg.solve(whole.T, u), rtol=1e-9)
    G = basis.ridge if basis.ridge.ndim == 2 else np.diag(basis.ridge)
    np.testing.assert_allclose(G, whole.T @ whole, atol=1e-12)
    np.testing.assert_allclose(basis.metric().times(u), whole.T @ whole @ u, atol=1e-12)
    assert basis.dual_norm(u) >= np.linalg.norm(np.linalg.solve(whole.T, u)) * (1 - 1e-12)
    assert basis.norm >= np.linalg.norm(np.hstack([X, X]) @ whole, 2) * (1 - 1e-12)
