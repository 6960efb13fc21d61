"""The cuGraph adapter, on a stand-in with the documented signatures: cuGraph itself needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from tests.conftest import random_graph


class Series:
    def __init__(self, values: Any) -> None:
        self._values = values

    def to_numpy(self) -> Any:
        return self._values

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a host NumPy array is not allowed.")


class DataFrame:
    def __init__(self, data: dict[str, Any]) -> None:
        self._data = {name: Series(np.array(values)) for name, values in data.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._data)

    def __getitem__(self, name: str) -> Series:
        return self._data[name]


class CuGraph:
    """cugraph.Graph: undirected edges are shown once, in whatever direction."""

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
    ) -> None:
        assert isinstance(input_df, DataFrame)
        self._frame, self.weight_column = input_df, edge_attr
        self.source_columns, self.destination_columns = source, destination

    def view_edge_list(self) -> DataFrame:
        columns = {name: self._frame[name].to_numpy() for name in self._frame.columns}
        flip = np.arange(len(columns["src"])) % 2 == 0
        src, dst = columns["src"], columns["dst"]
        columns |= {"src": np.where(flip, dst, src), "dst": np.where(flip, src, dst)}
        return DataFrame(columns)

    def is_directed(self) -> bool:
        return self._directed

    def is_weighted(self) -> bool:
        return self.weight_column is not None


@pytest.fixture(autouse=True)
def _rapids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudf", SimpleNamespace(DataFrame=DataFrame))
    monkeypatch.setitem(sys.modules, "cugraph", SimpleNamespace(Graph=CuGraph))


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
