"""`HERTA().fit(data)`: objects of the real PyG, imitations of what it may hold, and our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.datasets import from_pyg, load
from tests.conftest import problem


@pytest.fixture
def held() -> Any:
    """(graph, X, y, train, the same as a PyG `Data`)."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    reason = "torch_geometric is not installed"
    pyg = pytest.importorskip("torch_geometric.data", reason=reason)
    g, X, y, train = problem(n=120, d=5)
    u, v, _ = g.edges()
    both = torch.tensor(np.stack([np.r_[u, v], np.r_[v, u]]))
    data = pyg.Data(x=torch.tensor(X).float(), edge_index=both, y=torch.tensor(y))
    data.train_mask = torch.zeros(120, dtype=torch.bool)
    data.train_mask[train] = True
    data.test_mask = ~data.train_mask
    return g, data.x.numpy(), y, train, data


def same_fit(data: Any, g: Graph, X: Any, y: Any, train: Any) -> HERTA:
    model = HERTA(lam=3.0, ridge=0.1).fit(data)
    plain = HERTA(lam=3.0, ridge=0.1).fit(g, X, y, train)
    np.testing.assert_array_equal(model.W_, plain.W_)
    return model


def test_one_line_for_a_data_object_of_pyg(held):
    import torch

    g, X, y, train, data = held
    model = same_fit(data, g, X, y, train)
    labels = model.predict(data)
    assert isinstance(labels, torch.Tensor)  # as x is
    np.testing.assert_array_equal(labels.numpy(), model.predict(g, X))
    np.testing.assert_array_equal(model.transform(data).numpy(), model.transform(g, X))
    np.testing.assert_array_equal(model.predict(data, idx=[3, 5]).numpy(), labels.numpy()[[3, 5]])
    others = np.setdiff1d(np.arange(120), train)
    assert model.score(data) == model.score(g, X, y, others)  # on test_mask
    assert model.score(data, idx=train) == model.score(g, X, y, train)
    assert model.decision_function(data).shape == (120, 3)
    chances = HERTA(loss="ce", ridge=0.1).fit(data).predict_proba(data)
    torch.testing.assert_close(chances.sum(dim=1), torch.ones(120))
    few = HERTA(lam=3.0, ridge=0.1).fit(data, train=train[:20])  # what is said goes first
    np.testing.assert_array_equal(few.W_, HERTA(lam=3.0, ridge=0.1).fit(g, X, y, train[:20]).W_)
    del data.train_mask, data.test_mask
    every = HERTA(lam=3.0, ridge=0.1).fit(data)
    np.testing.assert_array_equal(every.W_, HERTA(lam=3.0, ridge=0.1).fit(g, X, y).W_)
    assert every.score(data) == every.score(g, X, y)


def test_our_own_dataset_as_it_is():
    data = load("digits")
    model = same_fit(data, data.graph, data.X, data.y, data.split["train"])
    assert model.score(data) == model.score(data.graph, data.X, data.y, data.split["test"])
    np.testing.assert_array_equal(model.predict(data), model.predict(data.graph, data.X))


def test_labels_of_ogb_and_half_precision(held):
    g, X, y, train, data = held
    data.y = data.y[:, None]
    same_fit(data, g, X, y, train)
    data.train_mask = data.train_mask[:, None]
    same_fit(data, g, X, y, train)
    data.x = data.x.bfloat16().requires_grad_()
    same_fit(data, g, data.x.detach().float().numpy(), y, train)


def test_adjacencies_and_features_that_are_sparse(held):
    import torch

    g, X, y, train, data = held
    edges, ones = data.edge_index, torch.ones(data.edge_index.shape[1])
    whole = torch.sparse_coo_tensor(edges, ones, (120, 120))
    for adjacency in (whole, whole.to_sparse_csr(), whole.to_sparse_csc()):
        del data.edge_index
        data.adj_t = adjacency
        same_fit(data, g, X, y, train)
        assert from_pyg(data).graph.weights is None
        del data.adj_t
        data.edge_index = edges
    # torch_sparse.SparseTensor, by what it offers
    rows = SimpleNamespace(coo=lambda: (edges[0], edges[1], None), sizes=lambda: [120, 120])
    imitation = SimpleNamespace(
        adj_t=rows, x=data.x, y=data.y, train_mask=data.train_mask, num_nodes=120
    )
    same_fit(imitation, g, X, y, train)
    cut = torch.where(data.x > 0, data.x, 0.0)
    data.x = cut.to_sparse_csr()
    same_fit(data, g, sp.csr_array(cut.numpy()), y, train)


def test_weights_of_edges(held):
    import torch

    _, X, y, train, data = held
    m = data.edge_index.shape[1] // 2
    half = torch.rand(m) + 0.5
    weight = torch.cat([half, half])
    weighted = Graph.from_edges(data.edge_index.numpy(), 120, weight.numpy())
    for name, values in (
        ("edge_weight", weight), ("edge_attr", weight), ("edge_attr", weight[:, None]),
    ):  # fmt: skip
        data[name] = values
        same_fit(data, weighted, X, y, train)
        del data[name]
    plain = Graph.from_edges(data.edge_index.numpy(), 120)
    for values in (torch.ones(2 * m), torch.rand(2 * m, 3), torch.arange(2 * m) % 4):
        data.edge_attr = values  # weights of 1, features of edges, types of edges: no weights
        same_fit(data, plain, X, y, train)


def test_what_cannot_be_unpacked_is_said(held):
    pyg = pytest.importorskip("torch_geometric.data")
    g, X, y, _, data = held
    several = data.clone()
    several.train_mask = data.train_mask[:, None].repeat(1, 10)
    with pytest.raises(ValueError, match=r"train_mask has 10 columns, one for each split"):
        HERTA().fit(several)
    model = HERTA().fit(several, train=several.train_mask[:, 3])
    assert model.predict(several).shape == (120,)  # no mask is asked for here
    several.test_mask = several.train_mask
    with pytest.raises(ValueError, match=r"test_mask has 10 columns"):
        model.score(several)
    with pytest.raises(ValueError, match="a graph but no features"):
        HERTA().fit(pyg.Data(edge_index=data.edge_index, y=data.y, num_nodes=120))
    with pytest.raises(ValueError, match="y is None"):
        HERTA().fit(pyg.Data(x=data.x, edge_index=data.edge_index))
    with pytest.raises(TypeError, match="to_homogeneous"):
        HERTA().fit(pyg.HeteroData())
    for wrong in (X, None, "cora"):
        with pytest.raises(TypeError, match=r"graph must be a herta_gpu\.Graph"):
            HERTA().fit(wrong, X, y)
    with pytest.raises(ValueError, match="X is None"):
        HERTA().fit(g)


def test_a_data_set_of_pyg_is_not_one_of_its_graphs(held):
    data_sets = pytest.importorskip("torch_geometric.datasets")
    fake = data_sets.FakeDataset(num_graphs=1, avg_num_nodes=30, task="node")
    with pytest.raises(TypeError, match=r"dataset\[0\]"):
        HERTA().fit(fake)
    assert HERTA(ridge=1.0).fit(fake[0]).predict(fake[0]).shape == (fake[0].num_nodes,)
