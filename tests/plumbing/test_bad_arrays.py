"""Bad arrays and parameters given to Python, and too little memory, each with its sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph, SDDSolver, Sparsifier
from herta_gpu.app.tune import tune
from herta_gpu.datasets import DataError, Dataset, load
from tests.plumbing.bad_input import (
    EDGES,
    NAMES,
    SPARSE,
    D,
    G,
    N,
    X,
    Y,
    fit,
    masked,
    refused,
    rows,
    trained,
)


def search(X: Any = X, split: Any = None, **grid: Any) -> Any:
    split = {"train": np.arange(9), "valid": np.arange(9, 15)} if split is None else split
    return tune(Dataset("mine", G, X, Y, split), **grid)


def broken() -> Any:
    """A sparse matrix with an entry outside of its columns."""
    made = sp.csr_array(X)
    made.indices[0] = 99
    return made


OBJECTS = np.array([["a", 1]] * N, dtype=object)
LOST = np.where(np.arange(N) == 3, 1e-40, 1.0)
HUGE = np.full((N, D), 2**60)
NAN = np.where(np.arange(N * D).reshape(N, D) == 3, np.nan, X)
ARRAYS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("X masked", lambda: fit(X=masked(X)), ValueError, "X is a masked array"),
    ("X complex", lambda: fit(X=X + 0j), ValueError, "real numbers, not complex"),
    ("X sparse complex", lambda: fit(X=SPARSE.astype(complex)), ValueError, "real numbers"),
    ("X text", lambda: fit(X=X.astype(str)), ValueError, "real numbers"),
    ("X dates", lambda: fit(X=X.astype("datetime64[s]")), ValueError, "real numbers"),
    ("X objects", lambda: fit(X=OBJECTS), ValueError, "real numbers, not object"),
    ("X 0-d", lambda: fit(X=np.array(1.0)), ValueError, "one or two dimensions, not 0"),
    ("X 3-d", lambda: fit(X=X[:, :, None]), ValueError, "one or two dimensions, not 3"),
    ("X None", lambda: fit(X=None), ValueError, "X is None"),
    ("X ragged", lambda: fit(X=[[1.0], [1.0, 2.0]]), ValueError, "differ in length"),
    ("X without columns", lambda: fit(X=X[:, :0]), ValueError, "X has no columns"),
    ("X NaN", lambda: fit(X=NAN), ValueError, "X holds NaN or infinity"),
    ("X sparse NaN", lambda: fit(X=sp.csr_array(NAN)), ValueError, "X holds NaN or infinity"),
    ("X short", lambda: fit(X=X[:10]), ValueError, "X has 10 rows but the graph has 30 nodes"),
    ("X large", lambda: fit(X=X * 1e39), ValueError, "multiply X so that it is about 1"),
    ("X small", lambda: fit(X=X * 1e-50), ValueError, "multiply X so that it is about 1"),
    ("no graph", lambda: fit(graph=np.eye(N)), TypeError, "Graph.from_edges"),
    ("y without columns", lambda: fit(y=np.zeros((N, 0))), ValueError, "y has no columns"),
    ("y short", lambda: fit(y=Y[:5]), ValueError, "y has shape"),
    ("y NaN", lambda: fit(y=np.where(Y > 0, Y, np.nan)), ValueError, "infinity in a training row"),
    ("y of ce", lambda: fit(y=Y / 2, params={"loss": "ce"}), ValueError, "one integer class label"),
    ("y without labels", lambda: fit(y=Y * 0 - 1), ValueError, "no training node"),
    ("train empty", lambda: fit(train=[]), ValueError, "no training node"),
    ("train outside", lambda: fit(train=[1, 99]), ValueError, "node id 99, but ids must lie"),
    ("train twice", lambda: fit(train=[1, 1]), ValueError, "more than once"),
    ("train unlabelled", lambda: fit(y=Y - 1, train=[3, 4]), ValueError, "which has no label"),
    ("no GPU", lambda: fit(params={"device": "cuda"}), RuntimeError, "cuda"),
    ("little memory", lambda: fit(params={"memory_budget": 1000}), MemoryError, "needs at least"),
    ("not fitted", lambda: HERTA().predict(G, X), RuntimeError, "not fitted yet"),
    ("predict width", lambda: trained().predict(G, X[:, :2]), ValueError, "X has 2 features but"),
    ("y masked", lambda: fit(y=masked(Y)), ValueError, "y is a masked array"),
    ("y None", lambda: fit(y=None), ValueError, "y is None"),
    ("y 0-d", lambda: fit(y=np.array(1)), ValueError, "one row per node"),
    ("y 3-d", lambda: fit(y=np.zeros((N, 1, 1))), ValueError, "one row per node"),
    ("y complex", lambda: fit(y=Y + 0j), ValueError, "whole numbers, text or floats"),
    ("y dates", lambda: fit(y=Y.astype("datetime64[s]")), ValueError, "text or floats"),
    ("y of two kinds", lambda: fit(y=np.array(["a", 1] * 15, dtype=object)), ValueError, "kinds"),
    ("y below -1", lambda: fit(y=Y - 2), ValueError, "the label -2"),
    ("y beyond int64", lambda: fit(y=Y.astype("u8") + 2**63), ValueError, "from 0 on"),
    ("y text without any", lambda: fit(y=np.full(N, "")), ValueError, "no training node"),
    ("y text in columns", lambda: fit(y=np.full((N, 2), "a")), ValueError, "one text label"),
    ("train masked", lambda: fit(train=masked(np.arange(5))), ValueError, "masked array"),
    ("train 1.5", lambda: fit(train=[0.0, 1.5]), ValueError, "node ids or a mask"),
    ("train text", lambda: fit(train=["a"]), ValueError, "node ids or a mask"),
    ("train 0-d", lambda: fit(train=3), ValueError, "one-dimensional"),
    ("train 2-d", lambda: fit(train=[[1, 2]]), ValueError, "one-dimensional"),
    ("train huge", lambda: fit(train=np.array([2**63], "u8")), ValueError, "ids must lie in"),
    ("train short mask", lambda: fit(train=np.ones(3, bool)), ValueError, "must have shape (30,)"),
    ("y huge", lambda: fit(y=Y * 1e100), ValueError, "divide y by that"),
    ("y tiny", lambda: fit(y=(Y + 1) * 1e-170), ValueError, "divide y by that"),
    ("a weight lost", lambda: fit(sample_weight=LOST), ValueError, "give it 0, or 1e-30 of the"),
    ("X sparse 1-d", lambda: fit(X=sp.coo_array(X[:, 0])), ValueError, "must have two dimensions"),
    ("X sparse broken", lambda: fit(X=broken()), ValueError, "X is no whole sparse matrix"),
    ("callback", lambda: fit(callback=3), TypeError, "callback must be a function"),
    ("checkpoint", lambda: fit(checkpoint="x"), TypeError, "checkpoint must be a Checkpoint"),
    ("tune ridge", lambda: search(ridges=[-1]), ValueError, "ridge must not be negative"),
    ("tune loss", lambda: search(losses=["x"]), ValueError, "loss must be one of"),
    ("tune train", lambda: search(split={"valid": [3]}), DataError, "no train"),
    ("tune features", lambda: search(X=X + 0j), ValueError, "real numbers"),
    ("tune overlap", lambda: search(split={"train": [3], "valid": [3]}), DataError, "overlap"),
    ("split 3", lambda: Dataset("d", G, X, Y, {}).with_split(3), ValueError, "random:0.8"),
    ("name 3", lambda: load(3), TypeError, "a name or a path, not int"),
    ("plan of 0 nodes", lambda: HERTA().plan(0, 1, 1, 1, 1), ValueError, "n must be an integer"),
    ("plan of 1.5", lambda: HERTA().plan(9, 1.5, 1, 1, 1), ValueError, "m must be an integer"),
    ("plan of more", lambda: HERTA().plan(9, 9, 1, 1, 10), ValueError, "n_train is 10"),
    ("predict None", lambda: trained().predict(G, None), ValueError, "X is None"),
    ("predict NaN", lambda: trained().predict(G, X * np.nan), ValueError, "NaN or infinity"),
    ("overflow", lambda: trained().transform(G, X * 1e38), ValueError, "overflows"),
    ("overflow, ints", lambda: trained().predict(G, HUGE), ValueError, "overflows"),
    ("overflow, sparse", lambda: trained().transform(G, SPARSE * 1e300), ValueError, "overflows"),
    ("score None", lambda: trained().score(G, X, None), ValueError, "y is None"),
    ("score 0-d", lambda: trained().score(G, X, np.array(3)), ValueError, "one row per node"),
    ("score 2-d", lambda: trained().score(G, X, np.eye(N)), ValueError, "one number per node"),
    ("score text", lambda: trained().score(G, X, NAMES), ValueError, "one number per node"),
    ("score length", lambda: trained().score(G, X, Y[:5]), ValueError, "y has shape (5,)"),
    ("B masked", lambda: SDDSolver(G).solve(masked(X)), ValueError, "B is a masked array"),
    ("B complex", lambda: SDDSolver(G).solve(X + 0j), ValueError, "B must hold real numbers"),
    ("B None", lambda: SDDSolver(G).solve(None), ValueError, "B is None"),
    ("B short", lambda: SDDSolver(G).solve(np.ones(3)), ValueError, "B has 3 rows"),
    ("B NaN", lambda: SDDSolver(G).solve(NAN), ValueError, "B holds NaN"),
    ("method", lambda: SDDSolver(G, method="lu"), ValueError, "method must be one of"),
    ("scores", lambda: Sparsifier(scores="exact").fit(G), ValueError, "scores must be one of"),
    ("n_samples", lambda: Sparsifier(n_samples=0).fit(G), ValueError, "n_samples"),
    ("solver dtype", lambda: SDDSolver(G, dtype=None), ValueError, "dtype must be one of"),
    ("sparsifier dtype", lambda: Sparsifier(dtype=None).fit(G), ValueError, "dtype must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), rows(ARRAYS))
def test_arrays(call, kind, words):
    refused(kind, words, call)


def edges(edge_index: Any, **options: Any) -> Any:
    return lambda: Graph.from_edges(edge_index, **options)


GRAPHS: list[tuple[str, Callable[[], Any], str]] = [
    ("huge id", edges([[0, 2**31], [1, 2]]), "ids must be 0..n-1"),
    ("huge id names it", edges([[0, 2**40], [1, 2]]), "node id 1,099,511,627,776"),
    ("beyond int64", edges(np.array([[0], [2**63 + 5]], dtype="u8")), "ids must be 0..n-1"),
    ("huge num_nodes", edges([[0], [1]], num_nodes=10**13), "num_nodes is 10,000,000,000,000"),
    ("num_nodes 300.7", edges(EDGES, num_nodes=300.7), "num_nodes must be"),
    ("num_nodes True", edges(EDGES, num_nodes=True), "num_nodes must be"),
    ("masked ids", edges(masked(EDGES)), "edge_index is a masked array"),
    ("masked weights", edges(EDGES, edge_weight=masked(np.ones(N))), "edge_weight is a masked"),
    ("ragged weights", edges(EDGES, edge_weight=[[1], [1, 2]]), "edge_weight must have shape"),
    ("complex weights", edges(EDGES, edge_weight=np.ones(N) + 0j), "real numbers"),
    ("objects", edges(EDGES.astype(object)), "must hold integers, not object"),
    ("None", edges(None), "shape (2, m)"),
    ("one row", edges([[0, 1]]), "shape (2, m)"),
    ("floats", edges([[0.5], [1.0]]), "integers"),
    ("negative", edges([[0], [-1]]), "node id -1, but ids must lie in 0..0"),
    ("outside", edges([[0], [7]], num_nodes=5), "node id 7, but ids must lie in 0..4"),
    ("nothing", edges([[], []]), "graph is empty"),
    ("no nodes", edges([[], []], num_nodes=0), "graph is empty"),
    ("num_nodes -3", edges([[0], [1]], num_nodes=-3), "num_nodes"),
    ("num_nodes text", edges([[0], [1]], num_nodes="a"), "num_nodes"),
    ("ragged", edges([[0, 1], [1]]), "its two rows differ"),
    ("text weights", edges([[0], [1]], edge_weight=["x"]), "real numbers"),
    ("large weights", edges([[0], [1]], edge_weight=[1e39]), "only ratios of weights"),
    ("negative weights", edges([[0], [1]], edge_weight=[-2.0]), "must not be negative"),
    ("NaN weights", edges([[0], [1]], edge_weight=[np.nan]), "NaN or infinity"),
    ("more weights", edges([[0], [1]], edge_weight=[1.0, 2.0]), "shape (1,)"),
    ("3-d", edges(np.zeros((2, 3, 4), int)), "shape (2, m)"),
    ("bool", edges(EDGES > 3), "must hold integers, not bool"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), rows(GRAPHS))
def test_graphs(call, words):
    refused(ValueError, words, call)


# ---- memory ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params", [{}, {"loss": "ce"}, {"sketch": True}, {"dtype": "float64"}, {"precondition": False}]
)
def test_the_budget_that_is_named_is_enough(params):
    """The sentence names the same budget, whichever smaller one was given."""
    data = load("synthetic:n=20000,m=60000,d=64,c=5")
    given = (data.graph, data.X, data.y, data.split["train"])
    named = set()
    for budget in (1000, 10**6, 3 * 10**6):
        with pytest.raises(MemoryError, match="needs at least") as found:
            HERTA(memory_budget=budget, **params).fit(*given)
        named.add(str(found.value).split("at least ")[1].partition(" MB")[0])
    assert len(named) == 1
    HERTA(memory_budget=f"{named.pop()}MB", max_iter=1, **params).fit(*given)


def test_ids_for_labels_are_refused_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr("herta_gpu.plumbing.targets.host_memory", lambda: 1000)
    refused(ValueError, "give classes, not ids", lambda: fit(y=np.arange(N)))


def test_one_label_besides_unlabelled_warns():
    with pytest.warns(UserWarning, match="for two classes use 0 and 1"):
        fit(y=2 * (Y % 2) - 1)


def test_a_failed_fit_loses_nothing():
    model = HERTA(ridge=0.1).fit(G, X, Y)
    before = model.W_.copy()
    refused(ValueError, "NaN", lambda: model.fit(G, NAN, Y))
    np.testing.assert_array_equal(model.W_, before)
