"""Outputs and labels of a fitted model, in blocks, against dense algebra."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.prediction import TOL, Outputs
from tests.conftest import dense_H, random_graph

N, D, C, LAM = 120, 6, 5, 4.0


def data(seed: int = 0) -> tuple[Graph, Any, Any]:
    rng = np.random.default_rng(seed)
    return random_graph(N, 400), rng.standard_normal((N, D)), rng.integers(0, C, N)


def exact(graph: Graph, X: Any, W: Any) -> Any:
    return np.linalg.solve(dense_H(graph, LAM), X @ W)


def outputs(width: int, dtype: str = "float32", W: Any = None, graph: Any = None) -> Outputs:
    g, X, _ = data()
    g = g if graph is None else graph
    backend = get_backend("cpu")
    W = np.random.default_rng(1).standard_normal((D, C)) if W is None else W
    H = RegularizedLaplacian(g, LAM, backend, dtype)
    return Outputs([H], Features(X, backend, g.order), W, width)


# ---- blocks ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 64])
def test_blocks_cover_all_outputs_and_know_their_error(width, dtype):
    Z = outputs(width, dtype)
    true, seen = exact(*data()[:2], Z.W), []
    for J, block, error in Z.blocks():
        seen += list(range(C))[J]
        assert block.shape == (N, J.stop - J.start)
        assert J.stop - J.start <= width
        size = np.sqrt((true**2).sum(axis=0)).max()
        off = np.abs(block - true[:, J]).max()
        assert off <= error + 2 * float(np.finfo(dtype).eps) * size
        assert error <= 10 * TOL * size * (1 + 2 * LAM) ** 0.5
    assert seen == list(range(C))


def test_one_output_does_not_depend_on_the_others_asked_for():
    wide, narrow = outputs(5), outputs(1)
    rows = np.array([3, 7, 90])
    for width in (1, 5):
        whole = outputs(width).of(None, "float32")
        assert (outputs(width).of(rows, "float32") == whole[rows]).all()
    assert abs(wide.of(None, "float64") - narrow.of(None, "float64")).max() <= 1e-4


@pytest.mark.parametrize("width", [1, 2, 5])
def test_labels_are_those_of_the_largest_output(width):
    Z = outputs(width)
    best, undecided = Z.labels(None, "float32")
    assert (best == exact(*data()[:2], Z.W).argmax(axis=1)).all()
    assert undecided == 0
    rows = np.array([5, 2, 2, 77])
    assert (Z.labels(rows, "float32")[0] == best[rows]).all()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("pair", [(0, 1), (1, 4), (0, 4)])
def test_ties_are_counted_and_the_first_class_wins(width, pair):
    """Two columns of W are equal, and no other output is above theirs at some nodes."""
    W = np.random.default_rng(1).standard_normal((D, C))
    W[:, pair[1]] = W[:, pair[0]]
    best, undecided = outputs(width, W=W).labels(None, "float64")
    true = exact(*data()[:2], W)
    tied = np.isin(true.argmax(axis=1), pair)
    assert undecided == tied.sum() > 0
    assert np.isin(best[tied], pair).all()
    assert (best[~tied] == true.argmax(axis=1)[~tied]).all()


def test_no_node_is_undecided_between_one_class():
    found = outputs(3, W=np.ones((D, 1))).labels(None, "float32")
    assert found[1] == 0
    assert (found[0] == 0).all()


def test_outputs_that_all_vanish_are_undecided():
    found = outputs(2, W=np.zeros((D, C))).labels(None, "float32")
    assert found[1] == N


# ---- through the model ----------------------------------------------------------------------
def narrow(monkeypatch: Any, columns: int) -> None:
    """Make every model work on so many outputs at a time."""
    import herta_gpu.herta as module

    monkeypatch.setattr(module, "outputs_at_once", lambda g, X, c, *rest: min(c, columns))


@pytest.mark.parametrize("columns", [1, 3, 64])
@pytest.mark.parametrize("reorder", [False, True])
def test_transform_and_predict_agree_whatever_the_blocks(columns, reorder, monkeypatch):
    graph, X, y = data()
    model = HERTA(lam=LAM, reorder=reorder).fit(graph, X, y, np.arange(80))
    stored = graph.reordered("communities") if reorder else graph
    narrow(monkeypatch, columns)
    Z = model.transform(stored, X)
    true = exact(graph, X, model.W_)
    assert abs(Z - true).max() <= 1e-5 * abs(true).max()
    decided = np.sort(true, axis=1)[:, -1] - np.sort(true, axis=1)[:, -2] > 1e-4
    labels = model.predict(stored, X)
    assert (labels == model.classes_[Z.argmax(axis=1)])[decided].all()
    assert model.undecided_ <= (~decided).sum()
    for idx in (np.array([5, 3, 110, 3]), np.arange(N) % 3 == 0):
        assert (model.predict(stored, X, idx) == labels[idx]).all()
        assert (model.transform(stored, X, idx) == Z[idx]).all()


def test_text_labels_come_back_as_text():
    graph, X, y = data()
    names = np.array(["ant", "bee", "cow", "dog", "eel"])
    model = HERTA(lam=LAM).fit(graph, X, names[y], np.arange(80))
    other = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    assert (model.predict(graph, X) == names[other.predict(graph, X)]).all()
    idx = np.array([100, 7])
    assert (model.predict(graph, X, idx) == names[other.predict(graph, X, idx)]).all()


@pytest.mark.parametrize("flat", [True, False])
def test_float_targets_come_back_in_their_shape(flat):
    graph, X, _ = data()
    y = np.random.default_rng(4).standard_normal(N if flat else (N, 3))
    model = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    true = exact(graph, X, model.W_)
    idx = np.array([100, 7])
    found, some = model.predict(graph, X), model.predict(graph, X, idx)
    assert found.shape == y.shape
    assert abs(found - (true[:, 0] if flat else true)).max() <= 1e-5 * abs(true).max()
    assert (some == found[idx]).all()


@pytest.mark.parametrize("reorder", [False, True])
def test_outputs_go_to_a_file_that_is_mapped(reorder, tmp_path, monkeypatch):
    graph, X, y = data()
    model = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    stored = graph.reordered("communities") if reorder else graph
    narrow(monkeypatch, 2)
    Z = model.transform(stored, X)
    path = tmp_path / "Z.npy"
    idx = np.array([4, 119, 0])
    found = model.transform(stored, X, idx, out=path)
    assert isinstance(found, np.memmap)
    assert (np.asarray(found) == Z[idx]).all()
    assert (np.load(path) == Z[idx]).all()
    with pytest.raises(ValueError, match="is a folder"):
        model.transform(stored, X, idx, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["Z.npy"]


def test_a_solve_that_fails_leaves_no_file(tmp_path):
    graph, X, y = data()
    model = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    model.W_ = model.W_ * 1e300
    with pytest.raises(ValueError, match=r"overflows: give X in the units"):
        model.transform(graph, X * 1e30, out=tmp_path / "Z.npy")
    assert list(tmp_path.iterdir()) == []


def test_all_nodes_go_to_a_file_too(tmp_path):
    graph, X, y = data()
    model = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    found = model.transform(graph, X, out=tmp_path / "Z.npy")
    assert found.shape == (N, C)
    assert (np.asarray(found) == model.transform(graph, X)).all()


def test_an_output_that_overflows_is_told_in_a_sentence():
    graph, X, y = data()
    model = HERTA(lam=LAM).fit(graph, X, y, np.arange(80))
    model.W_ = model.W_ * 1e300
    with pytest.raises(ValueError, match=r"overflows: give X in the units"):
        model.predict(graph, X * 1e30)


def test_labels_need_no_array_of_all_outputs(tmp_path):
    """100 outputs of 8,000 nodes are 6.4 MB of float64; less memory holds a few at a time."""
    rng, n, c = np.random.default_rng(5), 8000, 100
    graph, X, y = random_graph(n, 16000), rng.standard_normal((n, 4)), np.arange(n) % c
    model = HERTA(lam=1.0, memory_budget="5MB").fit(graph, X, y, np.arange(500))
    model.predict(graph, X, out=tmp_path / "first.npy")  # kernels are compiled here, if ever
    tracemalloc.start()
    labels = model.predict(graph, X)
    without = tracemalloc.get_traced_memory()[1]
    again = model.predict(graph, X, out=tmp_path / "Z.npy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(without, peak) < 8 * n * c
    Z = np.load(tmp_path / "Z.npy")
    assert Z.shape == (n, c)
    assert (labels == again).all()
    assert (labels == model.classes_[Z.argmax(axis=1)]).all()
    u, v, _ = graph.edges()
    A = sp.coo_array((np.ones(u.size), (u, v)), (n, n))
    order = np.arange(n) if graph.order is None else graph.inverse_order()
    D = sp.diags_array(graph.degree[order] ** -0.5)
    H = 2.0 * sp.eye_array(n) - D @ (A + A.T + sp.eye_array(n)) @ D
    assert np.abs(H @ Z - X @ model.W_).max() <= 1e-6
