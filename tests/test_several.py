"""Several lam: blocks of features, each solved for with its own H, against dense algebra."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Checkpoint, Graph
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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_fewer_rows_than_features_without_a_ridge_fit_with_the_smallest_weights(
    intercept, weighted
):
    """Independent rows: the optimum is 0, and the objective is proven to be about that."""
    train, w = TRAIN[:10], RNG.uniform(0.3, 2.0, N)
    model = HERTA(lam=LAMS, fit_intercept=intercept, dtype="float64")
    model.fit(GRAPH, X, Y, train, sample_weight=w if weighted else None)
    assert (model.status_, model.certificate_.kind) == ("converged", "nonnegative")
    A, T, w = blocks()[train], np.eye(3)[Y[train]], w[train] if weighted else np.ones(10)
    here = (w[:, None] * (A @ model.W_ + model.intercept_ - T) ** 2).sum() / 2
    assert here <= model.certificate_.gap <= 1e-6 * (w[:, None] * T**2).sum() / 2
    unit = np.tile(np.linalg.norm(X, axis=0), 3)
    mean, level = (w @ A / w.sum(), w @ T / w.sum()) if intercept else (0.0, 0.0)
    smallest = np.linalg.pinv((A - mean) / unit) @ (T - level) / unit[:, None]
    np.testing.assert_allclose(model.W_, smallest, atol=1e-7 * np.abs(smallest).max())


@pytest.mark.parametrize("intercept", [False, True])
def test_fewer_rows_than_features_that_cannot_fit_are_certified_where_they_see(intercept):
    """Two features in 20 columns: rank 6 of 60 columns, for 25 rows."""
    features = X[:, :2] @ RNG.standard_normal((2, 20))
    train = TRAIN[:25]
    model = HERTA(lam=LAMS, fit_intercept=intercept).fit(GRAPH, features, Y, train)
    certificate = model.certificate_
    assert (model.status_, certificate.kept) == ("certified-reduced", 6)
    assert "the 6 directions that they see" in certificate.note
    A, T = blocks(features=features)[train], np.eye(3)[Y[train]]
    if intercept:
        A, T = A - A.mean(axis=0), T - T.mean(axis=0)
    best = least_squares(A, T)[1]  # it cuts where rounding makes more directions
    here = ((A @ model.W_ - T) ** 2).sum() / 2
    assert here - best <= (certificate.value + 1e-12) * best <= 1.1e-6 * best


@pytest.mark.parametrize("loss", ["ce", "bce"])
@pytest.mark.parametrize("folds", [0, 3])
def test_fewer_rows_than_features_separate_any_classes(loss, folds):
    """Without a ridge there is no minimiser: the objective is proven to be about 0 instead."""
    y = Y if loss == "ce" else np.eye(3, dtype=int)[Y]
    model = HERTA(lam=LAMS, loss=loss, label_features=folds, fit_intercept=True, dtype="float64")
    model.fit(GRAPH, X, y, TRAIN[:12])
    assert (model.status_, model.certificate_.kind) == ("converged", "nonnegative")
    assert "separable" in model.certificate_.note
    F, T = model.transform(GRAPH, X)[TRAIN[:12]], np.eye(3)[Y[TRAIN[:12]]]
    if loss == "ce":
        here = (np.logaddexp.reduce(F, axis=1) - F[T > 0]).sum()
    else:
        here = np.logaddexp(0.0, np.where(T > 0, -F, F)).sum()
    # transform has an error of 1e-6 of outputs of about this size.
    assert here <= model.certificate_.gap + 1e-5 * np.abs(F).sum()
    assert model.certificate_.gap <= 1e-6 * 12 * 3


def test_a_plan_of_several_lam():
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
        fit(callback=stop, checkpoint=Checkpoint(tmp_path, worth=0.0))
    resumed, whole = fit(checkpoint=Checkpoint(tmp_path, worth=0.0)), fit()
    np.testing.assert_array_equal(resumed.W_, whole.W_)
    np.testing.assert_array_equal(resumed.intercept_, whole.intercept_)
