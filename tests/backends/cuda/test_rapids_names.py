"""The real RAPIDS against our adapter and its stand-in: names, parameters, columns.

RAPIDS takes 5 GB and lives in an environment of its own, whose interpreter HERTA_RAPIDS_PYTHON
names (``python -m venv rapids && rapids/bin/pip install cugraph-cu13``).  It needs no GPU for this.
What it showed is kept in `rapids_record.json`, to which the stand-in is held everywhere;
``python -m tests.backends.cuda.test_rapids_names`` writes that file anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.backends.cuda import rapids_names
from tests.backends.cuda.test_cugraph import CuGraph, DataFrame

RECORD = Path(__file__).with_name("rapids_record.json")

# All that the adapter and the documentation use, with the parameters that they name.
USED = {
    "cudf:DataFrame": ["data"],
    "cudf:DataFrame.columns": [],
    "cudf:DataFrame.__getitem__": [],
    "cudf:Series.__len__": [],
    "cudf:Series.to_numpy": [],
    "cudf:Series.values": [],
    "cudf:Series.hasnans": [],
    "cudf:Series.dtype": [],
    "cudf:Series.nunique": [],
    "cugraph:Graph": ["directed"],
    "cugraph:Graph.from_cudf_edgelist": ["input_df", "source", "destination", "edge_attr"],
    "cugraph:Graph.is_directed": [],
    "cugraph:Graph.is_weighted": [],
    "cugraph:Graph.is_multi_gpu": [],
    "cugraph:leiden": ["G", "random_state"],
    "rmm.allocators.cupy:rmm_cupy_allocator": ["nbytes"],
}


def interpreter() -> str | None:
    """The Python that has RAPIDS, if there is one."""
    named = os.environ.get("HERTA_RAPIDS_PYTHON")
    return named or (sys.executable if find_spec("cugraph") else None)


@cache
def asked(*arguments: str, given: str = "") -> Any:
    python = interpreter()
    if python is None:
        pytest.skip("no RAPIDS: HERTA_RAPIDS_PYTHON names no interpreter that has cugraph")
    command = [python, "-P", rapids_names.__file__, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_real_packages_have_what_we_use() -> None:
    found = asked(rapids_names.ASKED, given=json.dumps(list(USED)))
    missing = {
        name: wanted
        for name, wanted in USED.items()
        if found[name] is False or not {*wanted} <= {*found[name]}
    }
    assert missing == {}


def test_a_name_that_is_not_there_is_noticed() -> None:
    names = ["cugraph:Graph.from_edges", "cugraph:no_such_thing"]
    assert not any(asked(rapids_names.ASKED, given=json.dumps(names)).values())


def test_the_real_packages_behave_as_recorded() -> None:
    found, record = asked(), json.loads(RECORD.read_text(encoding="utf-8"))
    assert {**found, "versions": None} == {**record, "versions": None}


@pytest.mark.parametrize("name", rapids_names.CASES)
def test_the_standin_shows_what_was_recorded(name: str) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    directed, options = rapids_names.CASES[name]
    G = CuGraph(directed=directed)
    frame = DataFrame(rapids_names.EDGES | {"number": [0, 1, 2, 3]})
    G.from_cudf_edgelist(frame, source="a", destination="b", **options)
    assert rapids_names.seen(G) == record[name]
    if name == "directed":
        assert rapids_names.seen(G.to_undirected()) == record["made undirected"]
    assert hasattr(CuGraph(), "view_edge_list") == record["empty has view_edge_list"]


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(what)}" for name, what in asked().items())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
