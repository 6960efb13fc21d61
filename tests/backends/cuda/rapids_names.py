"""What the installed RAPIDS really is: signatures, attributes and column names, as JSON.

Run as a program by the interpreter that has RAPIDS, which is seldom that of the tests.  No GPU is
needed: cuGraph's own Python code runs here on frames of pandas, and only the graph on the device,
which is the compiled part, is replaced by a few lines that keep the arrays they are given.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from functools import reduce
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("RAPIDS_NO_INITIALIZE", "1")

EDGES = {"a": [0, 1, 2, 2], "b": [1, 2, 0, 3], "how much": [0.5, 2.0, 3.0, 4.0]}
ASKED = "called"  # the argument that asks for signatures; without it, for behaviour


def parameters(dotted: str) -> list[str] | bool:
    """Names of the parameters of ``module:name``; False if there is no such thing."""
    module, _, name = dotted.partition(":")
    try:
        thing = reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return False
    if isinstance(thing, property):
        return []
    return [p for p in inspect.signature(thing).parameters if p != "self"]


class DeviceGraph:
    """Keeps the edges it is given, in both directions if it shall; later ones win."""

    def __init__(self, *, src_or_offset_array: Any, dst_or_index_array: Any, weight_array: Any,
                 edge_id_array: Any, symmetrize: bool = False, **_: Any) -> None:  # fmt: skip
        u, v = src_or_offset_array.tolist(), dst_or_index_array.tolist()
        w = [None] * len(u) if weight_array is None else weight_array.tolist()
        kept = {}
        for a, b, x in zip(u, v, w, strict=False):
            kept[a, b] = x
            if symmetrize:
                kept[b, a] = x
        self.weighted, self.ids = weight_array is not None, edge_id_array
        self.rows = sorted((a, b, x) for (a, b), x in kept.items())

    def edge_list(self) -> tuple[Any, ...]:
        u, v, w = (list(column) for column in zip(*self.rows, strict=True))
        return u, v, w if self.weighted else None, None, None


def on_pandas() -> Any:
    """The module cugraph with pandas in the place of cuDF, as far as graphs are made and shown."""
    import cugraph
    import pandas as pd
    from cugraph.structure import number_map
    from cugraph.structure.graph_implementation import simpleGraph

    simpleGraph.cudf = number_map.cudf = pd
    simpleGraph.SGGraph = DeviceGraph
    simpleGraph.ResourceHandle = simpleGraph.GraphProperties = SimpleNamespace
    simpleGraph.pylibcugraph_decompress_to_edgelist = lambda graph, **_: graph.edge_list()
    simpleGraph.symmetrize_df = _symmetrized
    return cugraph


def _symmetrized(frame: Any, source: str, destination: str, weights: str | None = None) -> Any:
    both = {*zip(frame[source], frame[destination]), *zip(frame[destination], frame[source])}
    import pandas as pd

    columns = [pd.Series(list(column)) for column in zip(*sorted(both))]
    return columns if weights is None else [*columns, pd.Series([1.0] * len(both))]


def seen(G: Any) -> dict[str, Any]:
    """What our adapter looks at."""
    frame = G.view_edge_list()
    return {
        "columns": list(frame.columns),
        "rows": len(frame),
        "input_df": None if G.input_df is None else list(G.input_df.columns),
        "source_columns": G.source_columns,
        "destination_columns": G.destination_columns,
        "weight_column": G.weight_column,
        "is_weighted": G.is_weighted(),
        "is_directed": G.is_directed(),
        "is_multi_gpu": G.is_multi_gpu(),
        "renumbered": G.is_renumbered(),
    }


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "weighted": (False, {"edge_attr": "how much"}),
    "plain": (False, {}),
    "directed": (True, {"edge_attr": "how much"}),
    "directed, ids only": (True, {"edge_id": "number"}),
    "an attribute in a list": (False, {"edge_attr": ["how much"]}),
}


def behaviour() -> dict[str, Any]:
    cugraph = on_pandas()
    import pandas as pd

    found: dict[str, Any] = {}
    for name, (directed, options) in CASES.items():
        G = cugraph.Graph(directed=directed)
        frame = pd.DataFrame(EDGES | {"number": range(4)})
        G.from_cudf_edgelist(frame, source="a", destination="b", **options)
        found[name] = seen(G)
        if name == "directed":
            found["made undirected"] = seen(G.to_undirected())
    found["empty has view_edge_list"] = hasattr(cugraph.Graph(), "view_edge_list")
    found["versions"] = {
        package: importlib.import_module(package).__version__
        for package in ("cudf", "cugraph", "rmm")
    }
    return found


if __name__ == "__main__":
    if sys.argv[1:] == [ASKED]:
        print(json.dumps({name: parameters(name) for name in json.load(sys.stdin)}))
    else:
        print(json.dumps(behaviour()))
