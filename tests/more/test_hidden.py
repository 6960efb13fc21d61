"""Hidden layers, row norms and hops, against dense algebra that shares no line with the package."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Checkpoint, Graph, RandomFeatures
from herta_gpu.backends import get_backend
from herta_gpu.coordinates import Columns
from herta_gpu.datasets import load
from herta_gpu.datasets.dataset import Dataset
from herta_gpu.diffusion import Rows, no_cache
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.problem import UnfoldedMap
from herta_gpu.task import fixed_parts, systems_of, with_hidden
from tests.conftest import RECIPE, dense_H, minimum, random_graph

N = 160
GRAPH = random_graph(N, 420)
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((N, 6)) + 0.5, RNG.integers(0, 3, N)
TRAIN = np.sort(RNG.permutation(N)[:120])
T = np.eye(3)[Y]
AFTER = {"lam": 2.0, "hidden": 20, "hidden_rank": 4}
BEFORE = {**AFTER, "hidden_at": "before"}
ALL = {"lam": [0, 5.0], "hops": [1, 3], "row_norm": True, "hidden": 30, "hidden_rank": 3}
KINDS = {
    "after": AFTER,
    "before": BEFORE,
    "before, two lam": {**BEFORE, "lam": [1.0, 9.0], "row_norm": True},
    "row norm": {"lam": 2.0, "row_norm": True},
    "hops": {"hops": [0, 1, 2]},
    "hops and a lam": {"hops": [1], "lam": 4.0},
    "all columns": {"lam": 2.0, "hidden": 15, "hidden_rank": None},
    "all": ALL,
}


def unit(rows, floor=0.0):
    return rows / np.maximum(np.linalg.norm(rows, axis=1), floor)[:, None]


def features(model, X=X, graph=GRAPH):
    """All columns that W has rows for: `model` tells its parameters, V, R, b and floors only."""
    s, f, n = model._settings(), model.fixed_, len(X)
    L = dense_H(graph, 1.0) - np.eye(n)
    maps = [np.linalg.inv(np.eye(n) + lam * L) for lam in s.lams]
    maps += [np.linalg.matrix_power(np.eye(n) - L, k) for k in s.hops]
    behind: list = []
    if s.hidden:
        U = unit(X @ f["V"], f["floor"])
        if s.hidden_after:
            inputs = np.hstack([unit(M @ U, 1e-3) for M in maps]) / np.sqrt(len(maps))
            behind = [np.sqrt(2 / s.hidden) * np.maximum(inputs @ f["R"] + f["b"], 0)]
        else:
            psi = np.sqrt(2 / s.hidden) * np.maximum(U @ f["R"] + f["b"], 0)
            X = np.hstack([X, psi])
    blocks = [M @ X for M in maps]
    if s.row_norm:
        blocks = [unit(block, f["row_floor"]) for block in blocks]
    return np.hstack(blocks + behind)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("loss", "ridge"), [("mse", 0.1), ("ce", 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimum_is_that_of_dense_algebra(kind, loss, ridge, dtype):
    model = HERTA(loss=loss, ridge=ridge, dtype=dtype, tol=1e-7, **KINDS[kind])
    model.fit(GRAPH, X, Y, TRAIN, evaluate=[3, 150, 7])
    Z = features(model)
    assert (model.status_, model.W_.shape) == ("certified", (Z.shape[1], 3))
    best, F = minimum(Z[TRAIN], T[TRAIN], loss, ridge), Z[TRAIN] @ model.W_
    terms = (F - T[TRAIN]) ** 2 / 2
    if loss == "ce":
        terms = np.logaddexp.reduce(F, axis=1) - F[T[TRAIN] > 0]
    here = terms.sum() + ridge / 2 * (model.W_**2).sum()
    assert here - best <= (model.certificate_.value + 1e-9) * best
    size = np.abs(Z @ model.W_).max() + np.abs(model.W_).max()
    np.testing.assert_allclose(model.transform(GRAPH, X), Z @ model.W_, atol=1e-5 * size)
    np.testing.assert_allclose(model.outputs_, Z[[3, 150, 7]] @ model.W_, atol=1e-5 * size)


@pytest.mark.parametrize("kind", ["after", "before", "all"])
def test_weights_and_an_intercept(kind):
    w = RNG.uniform(0.1, 2.0, N)
    model = HERTA(ridge=0.2, fit_intercept=True, tol=1e-10, dtype="float64", **KINDS[kind])
    model.fit(GRAPH, X, Y, TRAIN, sample_weight=w)
    B, root = np.hstack([features(model), np.ones((N, 1))])[TRAIN], np.sqrt(w[TRAIN])[:, None]
    P = (root * B).T @ (root * B) + 0.2 * np.diag([1.0] * (B.shape[1] - 1) + [0.0])
    W = np.linalg.solve(P, (root * B).T @ (root * T[TRAIN]))
    assert model.status_ == "certified"
    np.testing.assert_allclose(np.vstack([model.W_, model.intercept_]), W, atol=1e-6)


@pytest.mark.parametrize("goal", [0.3, 1e-2, 1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("kind", ["after", "before", "row norm", "all"])
def test_no_column_is_further_from_the_exact_diffusion_than_its_bound(kind, goal):
    """However roughly Q is solved for."""
    s, backend = HERTA(**KINDS[kind])._settings(), get_backend("cpu")
    H, given = RegularizedLaplacian(GRAPH, s.lam, backend, "float32"), Features(X, backend)
    fixed = fixed_parts(given, s)
    F, hidden = with_hidden(given, fixed, s, len(TRAIN))
    A = UnfoldedMap(H, F, TRAIN, 3, systems=systems_of(H, s))
    A.hidden, A.row_floor = hidden, fixed.get("row_floor", 0.0)
    columns = [Columns.unit(F)] * A.blocks + [Columns.unit(one) for one in A.extras]
    rows = Rows(A, replace(RECIPE, goal=goal, exact=False), columns, TRAIN[:0])
    rows.tighten(goal, no_cache, "Q")
    exact = features(SimpleNamespace(_settings=lambda: s, fixed_=fixed))[TRAIN] * rows.basis.C
    found = np.linalg.norm(rows.train_rows - exact, axis=0)
    assert (found <= rows.residual_bound).all()
    assert found.max() > 1e-9 or goal < 1e-6  # the test is about something


def test_leave_one_out_is_what_refits_say():
    train = TRAIN[:40]
    for kind, intercept in itertools.product(("after", "before", "all"), (False, True)):
        model = HERTA(ridge=0.3, fit_intercept=intercept, tol=1e-12, dtype="float64", **KINDS[kind])
        model.fit(GRAPH, X, Y, train, loo=True)
        B = np.hstack([features(model), np.ones((N, int(intercept)))])
        penalty = 0.3 * np.diag([1.0] * model.W_.shape[0] + [0.0] * intercept)
        for i in (0, 17, 39):
            A, others = B[np.delete(train, i)], T[np.delete(train, i)]
            W = np.linalg.solve(A.T @ A + penalty, A.T @ others)
            np.testing.assert_allclose(model.loo_[i], B[train[i]] @ W, atol=1e-8)


def test_several_draws_are_the_mean_of_their_fits(tmp_path):
    for kind in (AFTER, {**BEFORE, "lam": [1.0, 9.0]}, ALL):
        params = {"ridge": 0.1, "dtype": "float64", "fit_intercept": True, **kind}
        model = HERTA(hidden_draws=3, **params)
        model.fit(GRAPH, X, Y, TRAIN, evaluate=[5, 9], loo=True)
        ones, gaps, optima = [], 0.0, 0.0
        for draw in range(3):
            one = HERTA(**params)
            one._draw = draw
            one.fit(GRAPH, X, Y, TRAIN, evaluate=[5, 9], loo=True)
            ones.append((one.transform(GRAPH, X), one.outputs_, one.loo_))
            gaps, optima = gaps + one.certificate_.gap, optima + one.certificate_.optimum
        wanted = [np.mean([one[i] for one in ones], axis=0) for i in range(3)]
        np.testing.assert_allclose(model.transform(GRAPH, X), wanted[0], atol=1e-5)
        np.testing.assert_allclose(model.outputs_, wanted[1], atol=1e-9)
        np.testing.assert_allclose(model.loo_, wanted[2], atol=1e-9)
        assert np.abs(ones[0][0] - ones[1][0]).max() > 1e-3
        assert model.certificate_.value == pytest.approx(gaps / optima)
        model.save(tmp_path / "model.npz")
        again = HERTA.load(tmp_path / "model.npz")
        assert (again.transform(GRAPH, X) == model.transform(GRAPH, X)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_stored_says_the_same(kind, tmp_path):
    model = HERTA(ridge=0.1, normalize="standard", **KINDS[kind]).fit(GRAPH, X, Y, TRAIN)
    model.save(tmp_path / "model.npz")
    again, other = HERTA.load(tmp_path / "model.npz"), random_graph(200, 500, 7)
    Z = RNG.standard_normal((200, 6))
    for graph, F in ((GRAPH, X), (other, Z)):
        assert (again.transform(graph, F) == model.transform(graph, F)).all()
    scaled = (Z - X.mean(axis=0)) / X.std(axis=0)  # in the units of the fit
    wanted = features(model, scaled, other) @ model.W_
    np.testing.assert_allclose(model.transform(other, Z), wanted, atol=1e-4)


@pytest.mark.parametrize("how", ["row", "unit", "standard"])
@pytest.mark.parametrize("sparse", [False, True])
def test_normalising_in_the_model_or_before_it_gives_the_same_bits(how, sparse):
    F = abs(X) * (RNG.random(X.shape) < 0.7)
    F[5] = 0.0
    F = sp.csr_array(F) if sparse else F
    inside = HERTA(ridge=0.1, normalize=how).fit(GRAPH, F, Y, TRAIN)
    made = Dataset("made", GRAPH, F, Y, {}).normalized(how).X
    outside = HERTA(ridge=0.1).fit(GRAPH, made, Y, TRAIN)
    assert (inside.W_ == outside.W_).all()
    assert (inside.transform(GRAPH, F) == outside.transform(GRAPH, made)).all()
    wide = made.toarray() if sparse else made
    sizes = {"row": abs(wide).sum(axis=1), "unit": (wide**2).sum(axis=1)}
    if how != "standard":
        np.testing.assert_allclose(np.delete(sizes[how], 5), 1.0)


def test_other_ways_to_the_same_features():
    """Sparse or on disk, with little memory, by community: the same outputs."""
    graph, rng = random_graph(3000, 9000, 2), np.random.default_rng(0)
    F = rng.standard_normal((3000, 40)) * (rng.random((3000, 40)) < 0.3)
    labels, train = rng.integers(0, 4, 3000), np.arange(0, 3000, 3)
    for kind in ({"hidden_at": "after"}, {"hidden_at": "before"}, {"row_norm": True}):
        params = {"lam": 3.0, "ridge": 1.0, "hidden": 100, "hidden_rank": 8, **kind}
        plain = HERTA(**params).fit(graph, F, labels, train)
        for change, given in (
            ({}, sp.csr_array(F)),
            ({"memory_budget": "40MB"}, F),
            ({"reorder": True}, F),
            ({"strategy": "direct"}, F),
        ):
            other = HERTA(**{**params, **change}).fit(graph, given, labels, train)
            assert other.status_ == "certified"
            Z = other.transform(graph, given)
            np.testing.assert_allclose(Z, plain.transform(graph, F), atol=2e-4)


def test_features_on_disk_and_a_checkpoint(tmp_path):
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    for kind in ("after", "all"):
        plain = HERTA(ridge=0.1, hidden_draws=2, **KINDS[kind]).fit(GRAPH, X, Y, TRAIN)
        held = Checkpoint(tmp_path / kind, worth=0.0)
        for _ in range(2):  # the second one reads Q
            other = HERTA(ridge=0.1, hidden_draws=2, **KINDS[kind])
            other.fit(GRAPH, mapped, Y, TRAIN, checkpoint=held)
            np.testing.assert_array_equal(other.W_, plain.W_)


def test_there_is_no_array_of_all_nodes_and_all_hidden_columns():
    n, w = 30_000, 1024
    graph, rng = random_graph(n, 60_000, 1), np.random.default_rng(1)
    F, labels = rng.standard_normal((n, 20)).astype("float32"), rng.integers(0, 3, n)
    tracemalloc.start()
    model = HERTA(lam=2.0, ridge=1.0, hidden=w, hidden_rank=8).fit(graph, F, labels, np.arange(200))
    model.predict(graph, F)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.status_ == "certified"
    assert peak < 8 * n * w / 2


def test_an_exclusive_or_needs_a_hidden_layer():
    rng = np.random.default_rng(0)
    n = 1200
    a, b = rng.integers(0, 2, (2, n))
    y = a ^ b
    F = np.stack([2.0 * a - 1, 2.0 * b - 1], axis=1) + 0.6 * rng.standard_normal((n, 2))
    kind = 2 * a + b
    u, v = rng.integers(0, n, (2, 60 * n))
    keep = (kind[u] == kind[v]) & (rng.random(60 * n) < 0.2)
    graph = Graph.from_edges(np.stack([u[keep], v[keep]]), num_nodes=n)
    train, test = np.arange(0, n, 2), np.arange(1, n, 2)
    found = {}
    for at, hidden in (("after", 0), ("after", 100), ("before", 100)):
        model = HERTA(lam=2.0, ridge=0.1, hidden=hidden, hidden_at=at, fit_intercept=True)
        model.fit(graph, F, y, train)
        assert model.status_ == "certified"
        found[at, hidden] = model.score(graph, F, y, test)
    assert found["after", 0] < 0.65
    assert found["after", 100] > 0.9
    assert found["before", 100] > 0.9


@pytest.mark.parametrize("kind", ["after", "all"])
def test_no_bit_depends_on_other_labels(kind):
    other = Y.copy()
    rest = np.setdiff1d(np.arange(N), TRAIN)
    other[rest] = RNG.permutation(other[rest])
    a, b = (HERTA(ridge=0.1, **KINDS[kind]).fit(GRAPH, X, y, TRAIN) for y in (Y, other))
    assert (a.W_ == b.W_).all()


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"hidden": -1}, "hidden must be an integer of at least 0"),
        ({"hidden": 8, "hidden_at": "inside"}, "hidden_at must be one of"),
        ({"hidden": 8, "hidden_rank": 0}, "hidden_rank must be an integer of at least 1"),
        ({"hidden": 8, "hidden_draws": 0}, "hidden_draws must be an integer of at least 1"),
        ({"normalize": "max"}, "normalize must be one of"),
        ({"row_norm": "yes"}, "row_norm must be one of"),
        ({"hops": [0, 1, 1]}, "name a block more than once"),
        ({"hops": [0, 1], "lam": [0, 2.0]}, "name a block more than once"),
        ({"hops": [-1]}, "hops must be an integer of at least 0"),
        ({"hops": 3}, "hops must be a list"),
        ({"hops": []}, "hops is empty"),
        ({"hidden": 8, "strategy": "herta"}, "stored rows"),
        ({"row_norm": True, "precondition": False}, "stored rows"),
        ({**BEFORE, "row_norm": True, "hidden_draws": 2}, "hidden_draws=1"),
    ],
)
def test_bad_parameters(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        HERTA(**params).fit(GRAPH, X, Y, TRAIN)


# ---- RandomFeatures ----------------------------------------------------------------------------
def test_random_features_are_those_of_an_svd():
    rng = np.random.default_rng(0)
    F = rng.standard_normal((300, 40)) * 0.6 ** np.arange(40)
    F[7] = 0.0
    made = RandomFeatures(width=50, rank=6, random_state=4)
    A = made.fit_transform(F)
    layer = made.layer_
    _, S, Vt = np.linalg.svd(F, full_matrices=False)
    V = Vt[:6].T / S[:6]
    V *= np.sign((V * layer.V).sum(axis=0))
    np.testing.assert_allclose(layer.V, V, rtol=0.02, atol=0.02 * np.abs(V).max())
    U = unit(F @ layer.V, layer.floor)
    psi = np.sqrt(2 / 50) * np.maximum(U @ layer.R + layer.b, 0)
    np.testing.assert_allclose(A, np.hstack([U, psi]), atol=1e-12)
    again = RandomFeatures(width=50, rank=6, random_state=4).fit(sp.csr_array(F))
    np.testing.assert_allclose(again.transform(sp.csr_array(F)), A, atol=1e-9)
    whole = RandomFeatures(width=5, rank=None).fit(F)
    np.testing.assert_allclose(whole.reduce(F), unit(F, whole.layer_.floor), atol=1e-12)


def test_random_features_refuse_what_they_cannot_take():
    with pytest.raises(ValueError, match="not fitted"):
        RandomFeatures().transform(X)
    with pytest.raises(ValueError, match="NaN"):
        RandomFeatures(5, 2).fit(np.full((4, 3), np.nan))
    with pytest.raises(ValueError, match="X has 4 features but 6"):
        RandomFeatures(5, 2).fit(X).transform(X[:, :4])
    with pytest.raises(ValueError, match="hidden_rank"):
        RandomFeatures(5, 0).fit(X)


def test_a_hidden_layer_on_real_images():
    """More than the linear model gets, with the certificate of either."""
    data = load("digits").random_split(0.3)
    scores = []
    for hidden in (0, 512):
        model = HERTA(lam=0.5, ridge=0.05, fit_intercept=True, hidden=hidden, hidden_rank=None)
        model.fit(data.graph, data.X, data.y, data.split["train"])
        assert model.status_ == "certified"
        scores.append(model.score(data.graph, data.X, data.y, data.split["test"]))
    assert scores[1] >= scores[0]
