"""The cuGraph adapter, on a stand-in with the signatures of cuGraph 26.10, which needs a GPU."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from herta_gpu.backends.cuda.graphs import DeviceGraph
from tests.conftest import random_graph
from tests.cuda_emulator import compiler
from tests.cupy_standin import installed
from tests.cupy_standin.device_array import ndarray
from tests.cupy_standin.ledger import LEDGER


class Series:
    """A column on the device."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self) -> Any:
        return self._values

    def to_cupy(self) -> Any:
        return ndarray(self._values)

    def nunique(self, dropna: bool = True) -> int:
        return len(np.unique(self._values))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a host NumPy array is not allowed.")


class DataFrame:
    def __init__(self, data: dict[str, Any]) -> None:
        self._data = {name: Series(_values(values)) for name, values in data.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._data)

    def __getitem__(self, name: str) -> Series:
        return self._data[name]

    def groupby(self, by: list[str], as_index: bool = True) -> Grouped:
        assert not as_index  # the keys would no longer be columns
        return Grouped(self, by)


def _values(values: Any) -> Any:
    return values.get() if isinstance(values, ndarray) else np.array(values)


class Grouped:
    """Rows of equal keys as one, in an order that nobody may count on."""

    def __init__(self, frame: DataFrame, by: list[str]) -> None:
        self._frame, self._by = frame, by

    def _merged(self, merge: Any, start: float) -> DataFrame:
        keys = np.stack([self._frame[name].to_numpy() for name in self._by])
        unique, at = np.unique(keys, axis=1, return_inverse=True)
        shuffle = np.random.default_rng(0).permutation(unique.shape[1])
        columns = {name: unique[i, shuffle] for i, name in enumerate(self._by)}
        for name in set(self._frame.columns) - set(self._by):
            total = np.full(unique.shape[1], start)
            merge.at(total, at.ravel(), self._frame[name].to_numpy())
            columns[name] = total[shuffle]
        return DataFrame(columns)

    def sum(self) -> DataFrame:
        return self._merged(np.add, 0.0)

    def min(self) -> DataFrame:
        return self._merged(np.minimum, np.inf)


class CuGraph:
    """cugraph.Graph: both directions are one edge, of the smaller weight, shown in either."""

    def __init__(self, m_graph: Any = None, directed: bool = False) -> None:
        self._directed, self._frame = directed, None

    def from_cudf_edgelist(
        self,
        input_df: DataFrame,
        source: str = "source",
        destination: str = "destination",
        edge_attr: str | None = None,
        weight: str | None = None,
        edge_id: str | None = None,
        edge_type: str | None = None,
        renumber: bool = True,
        store_transposed: bool = False,
        symmetrize: bool | None = None,
        vertices: Any = None,
    ) -> None:
        assert isinstance(input_df, DataFrame)
        columns = {name: input_df[name].to_numpy() for name in input_df.columns}
        ends = np.sort(np.stack([columns[source], columns[destination]]), axis=0)
        frame = DataFrame(columns | {source: ends[0], destination: ends[1]})
        self._frame = frame.groupby([source, destination], as_index=False).min()
        self.source_columns, self.destination_columns = source, destination
        self.weight_column = edge_attr

    def view_edge_list(self) -> DataFrame:
        columns = {name: self._frame[name].to_numpy() for name in self._frame.columns}
        flip = np.arange(len(columns["src"])) % 2 == 0
        src, dst = columns["src"], columns["dst"]
        columns |= {"src": np.where(flip, dst, src), "dst": np.where(flip, src, dst)}
        return DataFrame(columns)

    def is_directed(self) -> bool:
        return self._directed

    def number_of_vertices(self) -> int:
        return len(np.unique([self._frame[name].to_numpy() for name in ("src", "dst")]))

    def is_weighted(self) -> bool:
        return self.weight_column is not None


def weakly_connected_components(
    G: CuGraph, directed: Any = None, connection: Any = None, return_labels: Any = None
) -> DataFrame:
    """Of the nodes that have an edge."""
    src, dst = (G._frame[name].to_numpy() for name in ("src", "dst"))
    names, at = np.unique([src, dst], return_inverse=True)
    src, dst = at.reshape(2, -1)
    A = sp.coo_array((np.ones(len(src)), (src, dst)), shape=(len(names),) * 2)
    labels = sp.csgraph.connected_components(A, directed=False)[1]
    return DataFrame({"vertex": names, "labels": 7 * labels + 3})


def _package(name: str, **members: Any) -> ModuleType:
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None)
    package.__dict__.update(members)
    return package


@pytest.fixture(autouse=True)
def _rapids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudf", _package("cudf", DataFrame=DataFrame))
    members = {"Graph": CuGraph, "weakly_connected_components": weakly_connected_components}
    monkeypatch.setitem(sys.modules, "cugraph", _package("cugraph", **members))


@pytest.fixture
def cupy() -> Iterator[Any]:
    """The stand-in for CuPy: edge lists on the device need an array library there."""
    if compiler() is None:
        pytest.skip("no g++: the kernels cannot be emulated")
    with installed():
        get_backend("cuda")  # which tries the device out, and that is not what a test counts
        yield sys.modules["cupy"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_there_and_back(weighted: bool, reordered: bool) -> None:
    g = random_graph(40, 60, weighted=weighted)
    g = g.reordered("degree") if reordered else g
    back = Graph.from_cugraph(g.to_cugraph(), g.num_nodes)
    assert (back.weights is None) == (not weighted)
    np.testing.assert_allclose(back.to_csr().toarray(), g.to_csr().toarray(), atol=1e-15)
    assert back.num_components == g.num_components


def test_heavy_self_loops_survive() -> None:
    g = Graph.from_edges([[0, 1, 1], [1, 2, 1]], 3, [1.0, 1.0, 5.0])
    back = Graph.from_cugraph(g.to_cugraph())
    np.testing.assert_allclose(back.adjacency().toarray(), g.adjacency().toarray())


def test_directed_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="directed"):
        Graph.from_cugraph(CuGraph(directed=True))


def test_without_cugraph_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cugraph", None)
    with pytest.raises(RuntimeError, match="cugraph and cudf"):
        random_graph(5, 6).to_cugraph()


# ---- edge lists on the device -----------------------------------------------------------------


def messy_edges(weighted: bool) -> tuple[Any, Any]:
    """Both directions of some edges, repeated ones, self-loops, nodes without any."""
    rng = np.random.default_rng(0)
    lo, hi = np.triu_indices(50, 1)
    pick = rng.choice(lo.shape[0], 70, replace=False)
    one = np.stack([lo[pick], hi[pick]])
    w = rng.uniform(0.5, 3, 70) if weighted else np.ones(70)
    w[5:8] = 0.0  # dropped
    loops = np.array([[3, 3, 60], [3, 3, 60]])
    edges = np.concatenate([one, one[::-1, 10:40], one[:, 50:], loops], axis=1)
    return edges, np.concatenate([w, w[10:40], w[50:], [1.0, 2.0, 0.5]])


@pytest.mark.parametrize("weighted", [False, True])
def test_edges_on_the_device_stay_there(cupy: Any, weighted: bool) -> None:
    edges, w = messy_edges(weighted)
    expected = Graph.from_edges(edges, 64, w)
    edges_there, w_there = cupy.asarray(edges), cupy.asarray(w)
    LEDGER.clear()
    g = Graph.from_edges(edges_there, 64, w_there)
    assert isinstance(g, DeviceGraph)
    adapter = 2 * 8 * (3 * w.shape[0])  # the stand-in's frames read what they are given
    assert LEDGER.total("bytes_down") <= adapter + 8 * 64
    assert LEDGER.total("bytes_up") == 0
    assert (g.num_nodes, g.num_edges) == (64, expected.num_edges)
    assert g.num_components == expected.num_components
    L = g.to_csr()
    assert not sp.issparse(L)
    np.testing.assert_allclose(L.get().toarray(), expected.to_csr().toarray(), atol=1e-14)
    for name in ("indptr", "indices", "weights", "degree"):
        found, wanted = getattr(g, name), getattr(expected, name)
        assert (found is None) == (wanted is None)
        assert found is None or np.allclose(found, wanted, rtol=1e-14)
    again = pickle.loads(pickle.dumps(g))
    assert type(again) is Graph
    assert repr(again) == repr(g) == repr(expected)


def test_unweighted_edges_on_the_device(cupy: Any) -> None:
    edges = np.array([[0, 1, 2, 5], [1, 2, 0, 4]], dtype="int32")
    g, expected = Graph.from_edges(cupy.asarray(edges)), Graph.from_edges(edges)
    assert isinstance(g, DeviceGraph)
    assert g.weights is None
    assert g.num_components == expected.num_components == 3
    np.testing.assert_array_equal(g.indices, expected.indices)
    assert g.indices.dtype == expected.indices.dtype


def test_a_fit_on_a_graph_of_the_device(cupy: Any) -> None:
    edges, w = messy_edges(True)
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((64, 5)), rng.integers(0, 3, 64)
    graphs = (
        Graph.from_edges(cupy.asarray(edges), 64, cupy.asarray(w)),
        Graph.from_edges(edges, 64, w),
    )
    ours, theirs = (
        HERTA(lam=5.0, device=device, dtype="float64").fit(g, X, y)
        for g, device in zip(graphs, ("cuda", "cpu"), strict=True)
    )
    np.testing.assert_allclose(ours.W_, theirs.W_, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("edges", "n", "w", "duplicates"),
    [
        ([[0, 5], [1, 1]], 3, None, None),
        ([[0, -1], [1, 1]], None, None, None),
        ([[0.0, 1.0], [1.0, 2.0]], None, None, None),
        ([[0, 1, 2]], None, None, None),
        ([[0, 1], [1, 2]], None, [1.0, -1.0], None),
        ([[0, 1], [1, 2]], None, [1.0, np.nan], None),
        ([[0, 1], [1, 2]], None, [1.0], None),
        ([[0, 1], [1, 0]], None, [1.0, 2.0], None),
        ([[1, 0, 0], [0, 1, 1]], None, None, "sum"),  # twice one way, once the other
        ([[4, 2, 0, 2, 4], [4, 1, 1, 1, 4]], None, None, "error"),
        ([[2, 0, 2], [1, 1, 1]], None, [1.0, 1.0, 1.0], "error"),
        ([[0], [1]], None, None, "once"),
    ],
)
def test_what_is_wrong_on_the_host_is_wrong_on_the_device(
    cupy: Any, edges: Any, n: Any, w: Any, duplicates: Any
) -> None:
    edges, w = np.array(edges), None if w is None else np.array(w)
    with pytest.raises(ValueError) as expected:  # noqa: PT011 - the other says which
        Graph.from_edges(edges, n, w, duplicates)
    w_there = None if w is None else cupy.asarray(w)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        Graph.from_edges(cupy.asarray(edges), n, w_there, duplicates)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("duplicates", [None, "sum"])
def test_repeated_edges_without_weights_on_the_device(cupy: Any, duplicates: Any) -> None:
    edges = np.array([[0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 0, 0, 1, 3, 3, 3]])
    g = Graph.from_edges(cupy.asarray(edges), 5, duplicates=duplicates)
    expected = Graph.from_edges(edges, 5, duplicates=duplicates)
    assert isinstance(g, DeviceGraph)
    assert (g.weights is None) == (expected.weights is None) == (duplicates is None)
    np.testing.assert_array_equal(g.indices, expected.indices)
    np.testing.assert_allclose(g.to_csr().get().toarray(), expected.to_csr().toarray(), atol=1e-15)
    assert g.num_components == expected.num_components == 2


@pytest.mark.parametrize("missing", ["cudf", "cugraph"])
def test_without_cugraph_the_host_merges(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    edges, w = messy_edges(True)
    g, expected = (
        Graph.from_edges(cupy.asarray(edges), 64, cupy.asarray(w)),
        Graph.from_edges(edges, 64, w),
    )
    assert type(g) is Graph
    np.testing.assert_array_equal(g.weights, expected.weights)
    assert g.num_components == expected.num_components
