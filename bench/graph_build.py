"""How fast, and in how much memory, does an edge list become a graph?

    python bench/graph_build.py [--quick]

The compiled passes against NumPy's sorts of one key per edge, in turn on the same random list, and
then each in a process of its own for its peak memory.  The graphs must be the same, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import QUICK, Results, race, record

from herta_gpu import Graph
from herta_gpu.plumbing import building

WAYS = {"compiled": 0, "keys": 1 << 62}  # sizes from which compiled code is used
ARRAYS = ("indptr", "indices", "weights", "degree")


def listed(n: int, m: int, weighted: bool) -> tuple[Any, Any]:
    """Random pairs, each in one direction if it has a weight: repeats then add up."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, n, (2, m))
    if weighted:
        edges.sort(axis=0)
    return edges, rng.random(m) if weighted else None


def built(way: str, edges: Any, n: int, w: Any, folder: Path | None = None) -> Graph:
    building.COMPILED = WAYS[way]
    return Graph.from_edges(edges, n, w, folder=folder)


def check_same(edges: Any, n: int, w: Any) -> None:
    one, other = (built(way, edges, n, w) for way in WAYS)
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and a.tobytes() != b.tobytes()):
            raise SystemExit(f"The two ways differ in {name}.")


def highest() -> float:
    """The most memory that this process ever had, in MB (`ru_maxrss` counts its parent's, too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def peak(way: str, n: int, m: int, weighted: bool) -> dict[str, float]:
    """Megabytes that a build needed at most, beside the list, and those of the graph."""
    edges, w = listed(n, m, weighted)
    few = np.minimum(edges[:, :1000], 999)
    built(way, few, 1000, None if w is None else np.ones(1000))  # compile
    before = highest()
    g = built(way, edges, n, w)
    after = highest()
    held = g.indptr.nbytes + g.indices.nbytes
    held += sum(x.nbytes for x in (g.weights, g.given_degree) if x is not None)
    return {"peak_MB": after - before, "graph_MB": held / 2**20}


def memory(way: str, *size: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--peak", way, *map(str, map(int, size))]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def bench_folder(results: Results, edges: Any, w: Any, size: dict[str, Any]) -> None:
    """Built into a folder, and opened from there."""
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        built("compiled", edges, size["n"], w, Path(place) / "graph")
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        Graph.open(Path(place) / "graph")
        opened = time.perf_counter() - started
    results.add(what="into a folder", runner="compiled", **size, seconds=seconds, open=opened)


def main() -> None:
    if "--peak" in sys.argv:
        way, *size = sys.argv[sys.argv.index("--peak") + 1 :]
        n, m, weighted = map(int, size)
        print(json.dumps(peak(way, n, m, bool(weighted))))
        return
    results = Results("graph_build")
    for n, m, weighted in [(10**6, 2 * 10**7, False), (10**6, 10**7, True)]:
        n, m = (n // 10, m // 10) if QUICK else (n, m)
        edges, w = listed(n, m, weighted)
        check_same(edges, n, w)
        runners = {way: (lambda way=way: built(way, edges, n, w)) for way in WAYS}  # noqa: B023
        size = {"n": n, "m": m, "weighted": weighted}
        found = race(runners, 9, 120)
        for way, row in found.items():
            row |= memory(way, n, m, weighted)
        record(results, "from_edges", found, "compiled", **size)
        bench_folder(results, edges, w, size)


if __name__ == "__main__":
    main()
