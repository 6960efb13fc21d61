"""Bad input gets one clear sentence before any work starts."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph, SDDSolver, Sparsifier
from herta_gpu.plumbing.checks import parse_bytes
from tests.conftest import random_graph

G = random_graph(20, 40)
X = np.random.default_rng(0).standard_normal((20, 3))
Y = np.arange(20) % 2


def with_nan(array):
    array = array.astype(float).copy()
    array.flat[3] = np.nan
    return array


@pytest.mark.parametrize(
    ("edges", "options", "message"),
    [
        ([[0, 1]], {}, r"shape \(2, m\)"),
        ([[0.5], [1.0]], {}, "integers"),
        ([[0], [-1]], {}, r"node id -1, but ids must lie in 0\.\.0"),
        ([[0], [7]], {"num_nodes": 5}, r"node id 7, but ids must lie in 0\.\.4"),
        ([[], []], {}, "graph is empty"),
        ([[], []], {"num_nodes": 0}, "graph is empty"),
        ([[0], [1]], {"num_nodes": -3}, "num_nodes"),
        ([[0], [1]], {"num_nodes": "a"}, "num_nodes"),
        ([[0, 1], [1]], {}, "its two rows differ"),
        ([[0], [1]], {"edge_weight": ["x"]}, "real numbers"),
        ([[0], [1]], {"edge_weight": [1e39]}, "only ratios of weights"),
        ([[0], [1]], {"edge_weight": [-2.0]}, "must not be negative"),
        ([[0], [1]], {"edge_weight": [np.nan]}, "NaN or infinity"),
        ([[0], [1]], {"edge_weight": [1.0, 2.0]}, r"shape \(1,\)"),
    ],
)
def test_bad_graphs(edges, options, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_edges(edges, **options)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lam": 0.0}, "lam must be a positive number"),
        ({"lam": -1}, "lam must be a positive number"),
        ({"lam": np.nan}, "lam must be a positive number"),
        ({"lam": 1e20}, "lam must be at most"),
        ({"memory_budget": "1.2.3GB"}, "memory_budget must be bytes or like"),
        ({"memory_budget": "0"}, "memory_budget must be a positive number"),
        ({"alpha": 1.5}, "alpha must lie between 0 and 1"),
        ({"loss": "hinge"}, 'loss must be one of "mse", "ce"'),
        ({"optimizer": "sgd"}, "optimizer must be one of"),
        ({"strategy": "fast"}, "strategy must be one of"),
        ({"ridge": -0.1}, "ridge must not be negative"),
        ({"tol": 0}, "tol must be a positive number"),
        ({"max_iter": 0}, "max_iter must be an integer of at least 1"),
        ({"sparsify": "yes"}, "sparsify must be"),
        ({"sketch": -5}, "sketch must be"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"memory_budget": "lots"}, "memory_budget must be bytes or like"),
        ({"random_state": -1}, "random_state"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_bad_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        HERTA(**params).fit(G, X, Y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": with_nan(X)}, "X holds NaN or infinity"),
        ({"X": sp.csr_array(with_nan(X))}, "X holds NaN or infinity"),
        ({"X": X[:10]}, "X has 10 rows but the graph has 20 nodes"),
        ({"X": X[:, :0]}, "X has no columns"),
        ({"X": X * 1e39}, "multiply X so that it is about 1"),
        ({"X": X * 1e-50}, "multiply X so that it is about 1"),
        ({"y": np.zeros((20, 0))}, "y has no columns"),
        ({"X": X.astype(complex)}, "real numbers"),
        ({"y": Y[:5]}, "y has shape"),
        ({"y": with_nan(Y)}, "NaN or infinity in a training row"),
        ({"y": np.full(20, -1)}, "no training node"),
        ({"train": []}, "no training node"),
        ({"train": [1, 99]}, r"train holds node id 99, but ids must lie in 0\.\.19"),
        ({"train": [1, 1]}, "more than once"),
        ({"train": np.ones(7, bool)}, "mask train must have shape"),
        ({"train": [0.5]}, "node ids or a mask"),
    ],
)
def test_bad_data(change, message):
    arguments = {"X": X, "y": Y, "train": None, **change}
    with pytest.raises(ValueError, match=message):
        HERTA().fit(G, **arguments)


def test_unlabelled_training_nodes():
    y = Y.copy()
    y[4] = -1
    with pytest.raises(ValueError, match="train holds node 4, which has no label"):
        HERTA().fit(G, X, y, train=[3, 4])


def test_cross_entropy_needs_labels():
    with pytest.raises(ValueError, match="needs one integer class label per node"):
        HERTA(loss="ce").fit(G, X, Y.astype(float))


def test_one_label_besides_unlabelled_warns():
    with pytest.warns(UserWarning, match="for two classes use 0 and 1"):
        HERTA().fit(G, X, 2 * Y - 1)


def test_lam_must_be_a_number():
    with pytest.raises(TypeError, match="lam must be a number"):
        HERTA(lam="1").fit(G, X, Y)


def test_not_a_graph():
    with pytest.raises(TypeError, match=r"Graph\.from_edges"):
        HERTA().fit(np.eye(20), X, Y)


def test_too_little_memory_names_what_is_needed():
    with pytest.raises(MemoryError, match=r"needs at least .* MB but the budget is"):
        HERTA(memory_budget=1000).fit(G, X, Y)


def test_a_failed_fit_loses_nothing():
    model = HERTA().fit(G, X, Y)
    before = model.W_.copy()
    with pytest.raises(ValueError, match="NaN"):
        model.fit(G, with_nan(X), Y)
    np.testing.assert_array_equal(model.W_, before)


def test_unfitted_and_mismatched_models():
    with pytest.raises(RuntimeError, match="not fitted yet"):
        HERTA().predict(G, X)
    with pytest.raises(ValueError, match="X has 2 features but the model was fitted with 3"):
        HERTA().fit(G, X, Y).predict(G, X[:, :2])


def test_no_gpu_is_one_sentence():
    with pytest.raises(RuntimeError, match="cuda"):
        HERTA(device="cuda").fit(G, X, Y)


def test_bad_solver_and_sparsifier_arguments():
    with pytest.raises(ValueError, match="method must be one of"):
        SDDSolver(G, method="lu")
    with pytest.raises(ValueError, match="B has 3 rows"):
        SDDSolver(G).solve(np.ones(3))
    with pytest.raises(ValueError, match="B holds NaN"):
        SDDSolver(G).solve(np.full(20, np.nan))
    with pytest.raises(ValueError, match="scores must be one of"):
        Sparsifier(scores="exact").fit(G)
    with pytest.raises(ValueError, match="n_samples"):
        Sparsifier(n_samples=0).fit(G)


@pytest.mark.parametrize(
    ("text", "value"), [("8GB", 8 * 2**30), ("512 MB", 2**29), ("1.5k", 1536), (77, 77), ("9", 9)]
)
def test_memory_budgets(text, value):
    assert parse_bytes(text) == value


def test_bad_thread_counts(monkeypatch):
    monkeypatch.setenv("HERTA_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="HERTA_NUM_THREADS"):
        SDDSolver(random_graph(2000, 60_000)).solve(np.ones((2000, 64)))
