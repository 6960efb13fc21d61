"""The whole of Algorithm 1 against closed forms, on made-up data."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from tests.conftest import closed_form, dense_H, minimum, problem


# ---- made-up data -------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["herta", "direct", "auto"])
@pytest.mark.parametrize("lam", [1e-3, 1.0, 20.0, 1e3])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_weights_are_the_closed_form(strategy, lam, ridge):
    g, X, y, train = problem(weighted=True)
    W, best = closed_form(g, X, np.eye(3)[y[train]], train, lam, ridge)
    model = HERTA(lam=lam, strategy=strategy, ridge=ridge, tol=1e-10).fit(g, X, y, train=train)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-9)
    np.testing.assert_allclose(model.W_, W, atol=1e-4 * np.abs(W).max())
    Z = np.linalg.solve(dense_H(g, lam), X @ W)
    np.testing.assert_allclose(model.transform(g, X), Z, atol=1e-4 * np.abs(Z).max())
    assert (model.predict(g, X) == Z.argmax(axis=1)).mean() > 0.99


@pytest.mark.parametrize("kind", ["csr", "float32", "float16", "fortran", "memmap", "int"])
def test_every_kind_of_X(kind, tmp_path):
    g, X, y, train = problem()
    X = np.round(X * 4)  # exact in all of these types
    given = {
        "csr": lambda: sp.csr_matrix(X),
        "float32": lambda: X.astype(np.float32),
        "float16": lambda: X.astype(np.float16),
        "fortran": lambda: np.asfortranarray(X),
        "int": lambda: X.astype(np.int64),
        "memmap": lambda: X,
    }[kind]()
    if kind == "memmap":
        np.save(tmp_path / "X.npy", X.astype(np.float16))
        given = np.load(tmp_path / "X.npy", mmap_mode="r")
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 5.0)
    model = HERTA(lam=5.0).fit(g, given, y, train=train)
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)


def test_train_as_ids_mask_or_none():
    g, X, y, train = problem()
    mask = np.zeros(200, bool)
    mask[train] = True
    unlabelled = np.where(mask, y, -1)
    fits = [
        HERTA().fit(g, X, y, train=train[::-1]),
        HERTA().fit(g, X, y, train=mask),
        HERTA().fit(g, X, unlabelled),
    ]
    for other in fits[1:]:
        np.testing.assert_array_equal(fits[0].W_, other.W_)


def test_float_targets_one_or_many():
    g, X, _, train = problem()
    Z = np.linalg.solve(dense_H(g, 2.0), X)
    y = Z @ np.arange(8.0) + 0.01 * np.random.default_rng(0).standard_normal(200)
    model = HERTA(lam=2.0).fit(g, X, y, train=train)
    assert model.classes_ is None
    assert model.predict(g, X).shape == (200,)
    assert model.score(g, X, y) > 0.99
    many = HERTA(lam=2.0).fit(g, X, np.stack([y, -y], axis=1), train=train)
    assert many.predict(g, X).shape == (200, 2)
    np.testing.assert_allclose(many.W_[:, 0], model.W_[:, 0], atol=1e-4)


def test_labels_need_not_be_0_to_c():
    g, X, y, train = problem()
    named = np.array([7, 100, 3])[y]
    model = HERTA().fit(g, X, named, train=train)
    assert model.classes_.tolist() == [3, 7, 100]
    assert set(model.predict(g, X)) <= {3, 7, 100}


def test_alpha_is_appnps():
    g, X, y, train = problem()
    a, b = HERTA(alpha=0.1).fit(g, X, y, train), HERTA(lam=9.0).fit(g, X, y, train)
    np.testing.assert_allclose(a.W_, b.W_, rtol=1e-6)
    # APPNP's fixed point: Z = (1 - alpha) A_hat Z + alpha X W.
    Z, s = a.transform(g, X).astype(float), 1 / np.sqrt(g.degree)
    A_hat = s[:, None] * g.adjacency().toarray() * s[None, :]
    np.testing.assert_allclose(Z, 0.9 * A_hat @ Z + 0.1 * X @ a.W_, atol=1e-4)


@pytest.mark.parametrize("method", ["rcm", "degree"])
def test_a_reordered_graph_changes_nothing_for_the_caller(method):
    g, X, y, train = problem()
    plain = HERTA(lam=20.0, tol=1e-9).fit(g, X, y, train=train)
    r = g.reordered(method)
    moved = HERTA(lam=20.0, tol=1e-9).fit(r, X, y, train=train)
    np.testing.assert_allclose(moved.W_, plain.W_, atol=2e-4 * np.abs(plain.W_).max())
    np.testing.assert_allclose(moved.transform(r, X), plain.transform(g, X), atol=1e-4)


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_fitting_by_community_reaches_the_same_optimum(loss):
    pytest.importorskip("numba")
    g, X, y, train = problem()
    model = HERTA(lam=20.0, tol=1e-8, loss=loss, ridge=0.1, reorder=True, max_iter=300)
    model.fit(g, X, y, train)
    assert model.status_ == "certified"
    assert "by community" in str(model.plan_)
    A, Y = np.linalg.solve(dense_H(g, 20.0), X), np.eye(3)[y]
    assert model.history_[-1]["loss"] == pytest.approx(
        minimum(A[train], Y[train], loss, 0.1), rel=1e-6
    )
    # Node ids of the caller: each output belongs to its own row of X.
    np.testing.assert_allclose(model.transform(g, X), A @ model.W_, atol=1e-5)


def test_short_fits_are_not_worth_a_search_for_communities(monkeypatch):
    monkeypatch.setattr("herta_gpu.graph.LARGE", 1)
    monkeypatch.setattr("herta_gpu.backends.SMALL", 0)
    asked = []
    monkeypatch.setattr("herta_gpu.graph.by_community", lambda *_: asked.append(1))
    g, _, y, train = problem()
    if get_backend("cpu").order_columns == np.inf:
        pytest.skip("numba is not installed: nothing is reordered")
    rng = np.random.default_rng(0)
    for d, wanted in ((8, False), (100, True)):  # at lam 20 some 30 products for each column
        HERTA(lam=20.0).fit(g, rng.standard_normal((200, d)), y, train)
        assert bool(asked) == wanted


def test_the_same_seed_gives_the_same_bits():
    g, X, y, train = problem()
    options = {"lam": 20.0, "strategy": "herta", "sparsify": True, "sketch": True}
    a, b = (HERTA(**options).fit(g, X, y, train=train) for _ in range(2))
    np.testing.assert_array_equal(a.W_, b.W_)
    assert [h["loss"] for h in a.history_] == [h["loss"] for h in b.history_]
    other = HERTA(**options, random_state=1).fit(g, X, y, train=train)
    assert (other.W_ != a.W_).any()


# ---- awkward input ------------------------------------------------------------------------
def test_rank_deficient_features():
    g, X, y, train = problem()
    doubled = np.hstack([X, X[:, :3], np.zeros((200, 2))])
    _, best = closed_form(g, doubled, np.eye(3)[y[train]], train, 20.0)
    for strategy in ("herta", "direct"):
        model = HERTA(lam=20.0, strategy=strategy).fit(g, doubled, y, train=train)
        assert np.isfinite(model.W_).all()
        assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)
        # Repeated and empty columns change nothing: the optimum is that of the problem as given.
        assert model.status_ == "certified"
        assert (model.certificate_.kept, model.certificate_.features) == (13, 13)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_features_that_depend_on_others_leave_a_reduced_certificate(strategy):
    g, X, y, train = problem()
    mixed = np.hstack([X, X[:, :3] @ np.random.default_rng(0).standard_normal((3, 2))])
    model = HERTA(lam=20.0, strategy=strategy).fit(g, mixed, y, train=train)
    assert model.status_ == "certified-reduced"
    assert (model.certificate_.kept, model.certificate_.features) == (8, 10)
    assert "over 8 of 10 features" in str(model.certificate_)
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 20.0)
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
@pytest.mark.parametrize("n_train", [1, 5, 20, 35])
def test_fewer_training_rows_than_features(strategy, n_train):
    g, X, y, _ = problem(d=40)
    model = HERTA(lam=5.0, strategy=strategy).fit(g, X, y, train=np.arange(n_train))
    assert model.status_ == "converged"
    assert model.certificate_.kind == "nonnegative"  # the optimum is 0: the objective is the gap
    assert model.history_[-1]["loss"] <= model.certificate_.gap < 1e-6 * n_train
    ridged = HERTA(lam=5.0, strategy=strategy, ridge=0.5)
    ridged.fit(g, X, y, train=np.arange(n_train))
    Y = np.eye(ridged.classes_.size)[np.searchsorted(ridged.classes_, y[:n_train])]
    W, _ = closed_form(g, X, Y, np.arange(n_train), 5.0, 0.5)
    assert ridged.status_ == "certified"
    np.testing.assert_allclose(ridged.W_, W, atol=2e-3 * np.abs(W).max())


def test_no_edges_at_all_is_plain_least_squares():
    _, X, y, train = problem()
    g = Graph.from_edges(np.zeros((2, 0), dtype=int), num_nodes=200)
    W = np.linalg.lstsq(X[train], np.eye(3)[y[train]], rcond=None)[0]
    np.testing.assert_allclose(HERTA(lam=20.0).fit(g, X, y, train).W_, W, atol=1e-5)


def test_disconnected_graphs_and_isolated_nodes():
    rng = np.random.default_rng(0)
    edges = np.hstack([rng.integers(0, 50, (2, 100)), rng.integers(60, 100, (2, 80))])
    edges = np.unique(np.sort(edges, axis=0), axis=1)
    g = Graph.from_edges(edges, num_nodes=120)
    X, y = rng.standard_normal((120, 4)), rng.integers(0, 2, 120)
    _, best = closed_form(g, X, np.eye(2)[y], np.arange(120), 20.0)
    model = HERTA(lam=20.0).fit(g, X, y)
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("X", [np.zeros((200, 3)), np.ones((200, 1))])
def test_features_that_say_nothing(X):
    g, _, y, train = problem()
    model = HERTA(lam=2.0).fit(g, X, y, train=train)
    best = (
        0.5 * train.size if not X.any() else closed_form(g, X, np.eye(3)[y[train]], train, 2.0)[1]
    )
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)


def test_one_class_only():
    g, X, y, train = problem()
    for loss in ("mse", "ce"):
        model = HERTA(loss=loss).fit(g, X, y * 0, train=train)
        assert (model.predict(g, X) == 0).all()


def test_features_that_only_occur_outside_the_training_rows():
    """They reach the training rows through several hops; P must see them as the Hessian does."""
    n = 300
    ring = np.stack([np.arange(n), (np.arange(n) + 1) % n])
    g = Graph.from_edges(ring, n)
    rng = np.random.default_rng(0)
    train = np.arange(200)
    X = rng.standard_normal((n, 6))
    for j in range(4):
        X[:, j] = 0
        X[205 + 3 * j, j] = 1.0  # up to 15 hops away
    y = rng.integers(0, 3, n)
    model = HERTA(lam=5.0, strategy="herta").fit(g, X, y, train=train)
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 5.0)
    # Far features add less than 1e-6 to what the training rows see: they are not spoken of.
    assert model.status_ == "certified-reduced"
    assert model.certificate_.kept == 3
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("lam", [1.0, 20.0])
@pytest.mark.parametrize("units", [(1, 1e-7), (1e9, 1), (1, 1e-12), (3e8, 1e-6)])
def test_a_features_unit_does_not_decide_whether_it_counts(lam, units):
    g, X, _, train = problem(d=2)
    Z = np.linalg.solve(dense_H(g, lam), X)
    y = Z @ np.array([1.0, 2.0]) + 0.01 * np.random.default_rng(1).standard_normal(200)
    _, best = closed_form(g, X, y[train, None], train, lam)
    model = HERTA(lam=lam).fit(g, X * np.array(units), y, train=train)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-5)


def test_cancelling_columns_are_not_taken_for_nothing():
    """P 1 = 0 here: a power iteration from the vector of ones would see no size at all."""
    g, X, _, train = problem(d=2)
    X = 1e-8 * np.hstack([X, -X])
    y = np.linalg.solve(dense_H(g, 1.0), X[:, :2]) @ np.array([1e8, 2e8])
    y += 0.1 * np.random.default_rng(1).standard_normal(200)
    _, best = closed_form(g, X, y[train, None], train, 1.0)
    model = HERTA(lam=1.0).fit(g, X, y, train=train)
    assert model.history_[-1]["loss"] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("sparse", [sp.lil_array, sp.dok_array, sp.coo_array, sp.csc_matrix])
def test_every_sparse_format(sparse):
    g, X, y, train = problem()
    np.testing.assert_allclose(
        HERTA().fit(g, sparse(X), y, train).W_, HERTA().fit(g, X, y, train).W_, atol=1e-6
    )


def test_numpy_booleans_are_booleans():
    g, X, y, train = problem()
    options = {"strategy": "herta", "optimizer": "gd"}
    a = HERTA(sketch=np.True_, sparsify=np.True_, **options).fit(g, X, y, train)
    b = HERTA(sketch=True, sparsify=True, **options).fit(g, X, y, train)
    np.testing.assert_array_equal(a.W_, b.W_)


def test_labels_keep_their_type():
    g, X, y, train = problem(c=2)
    assert HERTA().fit(g, X, y.astype(bool), train).predict(g, X).dtype == bool
    assert HERTA().fit(g, X, y.astype(np.uint8), train).classes_.dtype == np.uint8


def test_scores_compare_like_with_like():
    g, X, _, train = problem()
    y = X[:, 0] + 0.1
    model = HERTA().fit(g, X, y, train)
    assert model.score(g, X, y) == pytest.approx(model.score(g, X, y[:, None]))
    with pytest.raises(ValueError, match="no row to score"):
        model.score(g, X, y, idx=np.zeros(0, int))
    with pytest.raises(ValueError, match="but there are 200 predictions"):
        model.score(g, X, y[:10])


@pytest.mark.parametrize("options", [{"ridge": 0.1, "sketch": True}, {"optimizer": "momentum"}])
def test_lanczos_on_nothing(options):
    g, _, y, train = problem()
    model = HERTA(**options).fit(g, np.zeros((200, 3)), y, train)
    assert np.abs(model.W_).max() == 0


# ---- scikit-learn manners -----------------------------------------------------------------
def test_scikit_learn_clone_and_params():
    model = HERTA(lam=3.0, memory_budget="8GB", sparsify=1000)
    twin = clone(model)
    assert twin is not model
    assert twin.get_params() == model.get_params()
    assert twin.set_params(lam=4.0) is twin
    assert (twin.lam, model.lam) == (4.0, 3.0)
    assert repr(model) == "HERTA(lam=3.0, sparsify=1000, memory_budget='8GB')"
    with pytest.raises(ValueError, match="no parameter 'lamb'"):
        model.set_params(lamb=1)


def test_parameters_are_stored_as_given():
    g, X, y, train = problem()
    model = HERTA(alpha=0.5, memory_budget="1GB")
    before = model.get_params()
    model.fit(g, X, y, train)
    assert model.get_params() == before


@pytest.mark.parametrize("reordered", [False, True])
def test_outputs_in_a_file_are_those_in_memory(tmp_path, reordered):
    g, X, y, train = problem()
    g = g.reordered("rcm") if reordered else g
    model = HERTA(lam=20.0).fit(g, X, y, train)
    exact = np.linalg.solve(dense_H(g, 20.0), X @ model.W_)
    for i, idx in enumerate((slice(None), [7, 3, 150])):
        nodes = None if isinstance(idx, slice) else idx
        Z = model.transform(g, X, nodes, out=tmp_path / f"{i}.npy")
        assert isinstance(Z, np.memmap)
        np.testing.assert_array_equal(Z, model.transform(g, X, nodes))
        np.testing.assert_allclose(Z, exact[idx], atol=1e-4 * np.abs(exact).max())
