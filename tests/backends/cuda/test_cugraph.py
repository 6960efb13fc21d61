"""The cuGraph adapter, on a stand-in for cuGraph 26.10, which needs a GPU.

`test_rapids_names.py` holds the stand-in to what the real packages show.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends import get_backend
from herta_gpu.backends.cuda import cugraph as adapter
from herta_gpu.backends.cuda.graphs import DeviceGraph
from tests.conftest import on_device, random_graph


class Series:
    """A column on the device."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    hasnans = False

    @property
    def dtype(self) -> Any:
        return self._values.dtype

    @property
    def values(self) -> Any:
        return self._values

    to_numpy = values.fget

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

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))


DataFrame.__module__ = "cudf.core.dataframe"
DataFrame.iloc = DataFrame.to_pandas = None  # type: ignore[attr-defined]


def _values(values: Any) -> Any:
    return values.get() if hasattr(values, "get") else np.array(values)


class _Edges:
    """What a graph has once it is filled; cuGraph hides it behind `__getattr__`, too."""

    def __init__(self, directed: bool) -> None:
        self._directed, self._weighted, self._ids = directed, False, None
        self.input_df: DataFrame | None = None
        self.source_columns = self.destination_columns = self.weight_column = None

    def fill(self, u: Any, v: Any, w: Any) -> None:
        """One edge per pair of ends; of the weights given for it, the mean, which nobody gave."""
        pairs = np.stack([u, v]) if self._directed else np.sort([u, v], axis=0)
        self._ends, at, count = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
        self._weights = None if w is None else np.bincount(at.ravel(), weights=w) / count

    def view_edge_list(self) -> DataFrame:
        if self._directed and self.input_df is not None:
            return self.input_df
        u, v = self._ends
        flip = np.arange(u.shape[0]) % 2 == 0  # an edge is shown in either direction
        names = (self.source_columns or "src", self.destination_columns or "dst")
        columns = {names[0]: np.where(flip, v, u), names[1]: np.where(flip, u, v)}
        if self._weights is not None:
            columns["weight"] = self._weights
        return DataFrame(columns)

    def number_of_vertices(self) -> int:
        return len(np.unique(self._ends))


class CuGraph:
    """cugraph.Graph, as far as our adapter goes."""

    def __init__(self, m_graph: Any = None, directed: bool = False) -> None:
        self._directed = directed
        self._Impl: _Edges | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_Impl"], name)

    def from_cudf_edgelist(
        self,
        input_df: DataFrame,
        source: str = "source",
        destination: str = "destination",
        edge_attr: Any = None,
        weight: str | None = None,
        edge_id: str | None = None,
        edge_type: str | None = None,
        renumber: bool = True,
        store_transposed: bool = False,
        symmetrize: bool | None = None,
        vertices: Any = None,
    ) -> None:
        assert isinstance(input_df, DataFrame)
        made = self._Impl = _Edges(self._directed)
        made._weighted = edge_attr is not None or weight is not None
        weight = edge_attr if isinstance(edge_attr, str) else weight  # one in a list is forgotten
        others = edge_attr if isinstance(edge_attr, list) else [weight, edge_id, edge_type]
        names = [source, destination, *(name for name in others if name is not None)]
        columns = {name: input_df[name].to_numpy() for name in names}
        made.input_df = DataFrame(columns)
        made.source_columns, made.destination_columns = source, destination
        made.weight_column = weight
        w = None if weight is None else columns[weight]
        made.fill(columns[source], columns[destination], w)

    def to_undirected(self) -> CuGraph:
        """A copy that has forgotten all names, with weights in the order of the old list."""
        copy = CuGraph()
        made = copy._Impl = _Edges(False)
        frame, old = self.input_df, self._Impl
        w = None if old.weight_column is None else frame[old.weight_column].to_numpy()
        u, v = (frame[name].to_numpy() for name in (old.source_columns, old.destination_columns))
        made.fill(u, v, None)
        made._weights = None if w is None else w[: made._ends.shape[1]]
        return copy

    def is_directed(self) -> bool:
        return self._directed

    def is_weighted(self) -> bool:
        return self._weighted

    def is_multi_gpu(self) -> bool:
        return False

    def is_renumbered(self) -> bool:
        return False


def leiden(
    G: CuGraph,
    max_iter: int = 100,
    resolution: float = 1.0,
    random_state: Any = None,
    theta: float = 1.0,
) -> tuple[DataFrame, float]:
    """Four communities, by the id modulo 4, of the nodes that have an edge, in any order."""
    assert not G.is_directed()
    assert G.is_weighted()  # its documentation asks for weights
    names = np.random.default_rng(0).permutation(np.unique(G._ends))
    return DataFrame({"vertex": names, "partition": names % 4}), 0.5


def _package(name: str, **members: Any) -> ModuleType:
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None)
    package.__dict__.update(members)
    return package


@pytest.fixture(autouse=True)
def _rapids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudf", _package("cudf", DataFrame=DataFrame))
    monkeypatch.setitem(sys.modules, "cugraph", _package("cugraph", Graph=CuGraph, leiden=leiden))


@pytest.fixture
def cupy(backend: Any) -> Any:
    return backend.xp


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_there_and_back(weighted: bool, reordered: bool) -> None:
    g = random_graph(40, 60, weighted=weighted)
    g = g.reordered("degree") if reordered else g
    back = Graph.from_cugraph(g.to_cugraph(), g.num_nodes)
    assert (back.weights is None) == (not weighted)
    np.testing.assert_allclose(back.to_csr().toarray(), g.to_csr().toarray(), atol=1e-15)
    assert back.num_components == g.num_components


@on_device
@pytest.mark.parametrize("weighted", [False, True])
def test_columns_of_the_device_stay_there(device: Any, cupy: Any, weighted: bool) -> None:
    """Of a cuGraph graph, of a frame of cuDF by their names, and two arrays of CuPy."""
    g = random_graph(400, 1200, weighted=weighted)
    u, v, w = g.edges()
    columns = {"dst": v, "how": np.arange(1200.0), "src": u} | ({"weight": w} if weighted else {})
    there = {name: cupy.asarray(column) for name, column in columns.items()}
    G, frame = CuGraph(), DataFrame({})
    frame._data = {name: Series(column) for name, column in there.items()}
    G._Impl = _Edges(True)
    G._Impl.input_df, G._Impl._weighted = frame, weighted
    G._Impl.weight_column = "weight" if weighted else None
    G._Impl.number_of_vertices = lambda: 400
    pair = (there["src"], there["dst"])
    for make in (
        lambda: Graph.from_cugraph(G),
        lambda: Graph.from_edges(frame),
        lambda: Graph.from_edges(pair, 400, there.get("weight")),
    ):
        device.clear()
        made = make()
        assert isinstance(made, DeviceGraph)
        assert device.ledger()["largest_out"] <= 8
        np.testing.assert_allclose(made.to_csr("cpu").toarray(), g.to_csr().toarray(), atol=1e-14)
    frame._data["src"].hasnans = True
    with pytest.raises(ValueError, match="must hold integer node ids from 0 on in column src"):
        Graph.from_edges(frame)


def test_heavy_self_loops_survive() -> None:
    g = Graph.from_edges([[0, 1, 1], [1, 2, 1]], 3, [1.0, 1.0, 5.0])
    back = Graph.from_cugraph(g.to_cugraph())
    np.testing.assert_allclose(back.adjacency().toarray(), g.adjacency().toarray())


def filled(directed: bool = False, **options: Any) -> CuGraph:
    """Edges 0 -> 1, 1 -> 0, 1 -> 2, 2 -> 3 and their numbers, with the options of a caller."""
    frame = DataFrame(
        {"a": [0, 1, 1, 2], "b": [1, 0, 2, 3], "w": [2.0, 2.0, 3.0, 5.0], "id": [7, 8, 9, 10]}
    )
    G = CuGraph(directed=directed)
    G.from_cudf_edgelist(frame, source="a", destination="b", **options)
    return G


WEIGHTED = [[1, 2, 0, 0], [2, 1, 3, 0], [0, 3, 1, 5], [0, 0, 5, 1]]


@pytest.mark.parametrize("directed", [False, True])
def test_directed_graphs_are_completed(directed: bool) -> None:
    """Weights by whatever name, and edges listed in one direction only."""
    for options in ({"edge_attr": "w"}, {"weight": "w"}, {"weight": "w", "edge_id": "id"}):
        found = Graph.from_cugraph(filled(directed, **options))
        np.testing.assert_array_equal(found.adjacency().toarray(), WEIGHTED)


def test_edge_ids_are_no_weights() -> None:
    found = Graph.from_cugraph(filled(True, edge_id="id"))
    assert found.weights is None
    np.testing.assert_array_equal(found.adjacency().toarray(), np.array(WEIGHTED) > 0)


def test_repeated_edges_are_merged_by_our_rule() -> None:
    """cuGraph drops all but one; the weights of one direction add up here."""
    G = CuGraph()
    frame = DataFrame({"a": [0, 0, 1, 1], "b": [1, 1, 0, 2], "w": [1.0, 3.0, 4.0, 5.0]})
    G.from_cudf_edgelist(frame, source="a", destination="b", edge_attr="w")
    expected = [[1, 4, 0], [4, 1, 5], [0, 5, 1]]
    np.testing.assert_array_equal(Graph.from_cugraph(G).adjacency().toarray(), expected)


def test_two_directions_that_differ_are_quoted_as_the_caller_gave_them() -> None:
    G = CuGraph()
    frame = DataFrame({"a": [0, 1], "b": [1, 0], "w": [1.0, 4.0]})
    G.from_cudf_edgelist(frame, source="a", destination="b", edge_attr="w")
    with pytest.raises(ValueError, match=r"\(0, 1\) has weight 1 but \(1, 0\) has 4"):
        Graph.from_cugraph(G)


def test_graphs_whose_weights_nobody_knows_are_refused() -> None:
    for G, sentence in (
        (filled(True, edge_attr="w").to_undirected(), "give the graph that was copied"),
        (filled(edge_attr=["w"]), 'edge_attr="weights"'),
        (CuGraph(), "is empty: fill it by from_cudf_edgelist"),
        (CuGraph(directed=True), "is empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Graph.from_cugraph(G)
    assert Graph.from_cugraph(filled(True).to_undirected()).weights is None  # nothing to mix up


def test_graphs_on_several_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuGraph, "is_multi_gpu", lambda _: True)
    with pytest.raises(ValueError, match="several GPUs"):
        Graph.from_cugraph(filled())


def test_edge_lists_that_are_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MOST_ROWS", 4)
    with pytest.raises(ValueError, match="has 5 rows, but RAPIDS takes 4 at most"):
        Graph.from_edges(np.stack([np.arange(5), np.arange(1, 6)])).to_cugraph()


def test_without_cugraph_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cugraph", None)
    with pytest.raises(RuntimeError, match="cugraph and cudf"):
        random_graph(5, 6).to_cugraph()


def in_fours(n: int) -> Graph:
    """Nodes that know others of the same id modulo 4, and one that is alone."""
    rng = np.random.default_rng(0)
    u = rng.integers(0, n - 5, 6 * n)
    return Graph.from_edges([u, (u + 4 * rng.integers(1, 9, 6 * n)) % (4 * ((n - 1) // 4))], n)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_order_by_leiden(weighted: bool) -> None:
    g = in_fours(41)
    if weighted:
        u, v, _ = g.edges()
        g = Graph.from_edges([u, v], 41, np.linspace(0.5, 2.0, u.shape[0]))
    order = adapter.by_leiden(g, worth=0.9)
    assert np.array_equal(np.sort(order), np.arange(41))
    assert order[0] == 40  # the one without an edge
    assert (np.diff(order[1:] % 4) >= 0).all()
    assert adapter.by_leiden(random_graph(41, 200), worth=0.9) is None


@on_device
def test_a_large_graph_is_ordered_on_the_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Leiden where cuGraph is installed, else by the host; nothing where the caches suffice."""
    backend, g = get_backend("cuda"), in_fours(40_001)  # the stand-in's cache has 1 MB
    assert backend.order_columns == 65_000
    assert (np.diff(backend.communities(g, 0.5)[1:] % 4) >= 0).all()
    assert backend.communities(in_fours(1000), 0.5) is None
    small = in_fours(100)
    assert (
        backend.communities(backend.sampled_graph(small, cupy.ones(small.num_edges)), 0.0) is None
    )
    asked = []
    monkeypatch.setattr(adapter, "available", lambda: False)
    module = sys.modules[type(backend).__module__]
    monkeypatch.setattr(module, "by_community", lambda *given: asked.append(given))
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    backend.communities(g, 0.5)
    assert asked == [(g, 0.5)]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert backend.communities(g, 0.5) is None  # no numba, no order
    assert len(asked) == 1
