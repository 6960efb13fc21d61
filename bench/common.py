"""What the benchmarks share: data, interleaved timing, and JSON lines with machine and versions."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The threads of MKL and torch go on spinning for a while after a call and would slow down whoever
# runs next; told to sleep, nobody disturbs anybody.
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import scipy.sparse as sp

from herta_gpu import Graph
from herta_gpu.datasets import load

ROOT = Path(__file__).parent.parent
QUICK = "--quick" in sys.argv
# Short runs are for a look, not for the record.
RESULTS = Path(os.environ.get("HERTA_RESULTS", ROOT / "bench" / "results"))
RESULTS = RESULTS / ("quick" if QUICK else "")
_PACKAGES = ("numpy", "scipy", "numba", "torch", "pyamg", "sparse_dot_mkl", "mkl", "scikit-learn",
             "scikit-sparse")  # fmt: skip


def machine() -> dict[str, Any]:
    """Where the numbers come from; the load says how far to trust them."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "threads": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = {key: [x.split(":", 1)[1].strip() for x in lines if x.startswith(key)][:1] for key in
             ("model name", "flags")}  # fmt: skip
    wide = [f for f in ("avx2", "avx512f") if f in " ".join(found["flags"]).split()]
    return " ".join(found["model name"] + wide)


class Results:
    """Rows of one benchmark, printed as they come and kept as JSON lines.

    Of an earlier run on the same machine (or on any, for what does not depend on it), rows that
    are not measured `again` stay.
    """

    def __init__(
        self,
        name: str,
        again: Callable[[dict[str, Any]], bool] | None = None,
        any_machine: bool = False,
    ) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.path, here, kept = RESULTS / f"{name}.jsonl", machine(), []
        if again is not None and self.path.exists():
            before, rows = read(name)
            if any_machine or all(before[key] == here[key] for key in ("cpu", "cores")):
                kept = [row for row in rows if not again(row)]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in [{"machine": here}, *kept]))

    def add(self, **row: Any) -> None:
        row["load"] = round(os.getloadavg()[0], 2)
        with self.path.open("a") as out:
            out.write(json.dumps(row, default=float) + "\n")
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{k}={v}" for k, v in shown.items() if v is not None), flush=True)


def read(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(machine, rows) of a benchmark's last run."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    return json.loads(lines[0])["machine"], [json.loads(line) for line in lines[1:]]


def race(
    runners: dict[str, Callable[[], Any]], repeats: int = 9, seconds: float = 60.0
) -> dict[str, dict[str, float]]:
    """Run everybody in turn, again and again: what disturbs one disturbs all.

    A first round compiles and is not timed, unless one repeat is all: for what takes minutes.
    Gives the median and quartiles of wall seconds, and the median of processor seconds.
    """
    walls: dict[str, list[float]] = {name: [] for name in runners}
    cpus: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values() if repeats > 1 else ():
        run()  # compile, fault in memory
    gc.disable()
    started = time.perf_counter()
    for lap in range(repeats):
        for name, run in runners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            walls[name].append(time.perf_counter() - wall)
            cpus[name].append(time.process_time() - cpu)
        if lap >= 1 and time.perf_counter() - started > seconds:
            break
    gc.enable()
    found = {}
    for name, wall_list in walls.items():
        low, mid, high = np.percentile(wall_list, [25, 50, 75])
        found[name] = {
            "seconds": float(mid),
            "low": float(low),
            "high": float(high),
            "cpu_seconds": float(np.median(cpus[name])),
            "laps": len(wall_list),
        }
    return found


def record(results: Results, what: str, found: dict[str, dict[str, float]], ours: str, **more: Any):
    """One row per runner, with our advantage over it in wall and in processor time."""
    for name, row in found.items():
        results.add(
            what=what,
            runner=name,
            **more,
            **row,
            ratio=row["seconds"] / found[ours]["seconds"],
            cpu_ratio=row["cpu_seconds"] / found[ours]["cpu_seconds"],
        )


class Data:
    """One dataset of the directory that the environment variable HERTA_DATA names."""

    def __init__(self, name: str) -> None:
        directory = os.environ.get("HERTA_DATA")
        if not directory:
            raise SystemExit("Set HERTA_DATA to the directory of the datasets.")
        data = load(name, directory)
        self.name, self.graph, self.y, n = name, data.graph, data.y, data.graph.num_nodes
        self.X: Any = data.X.astype(np.float64) if sp.issparse(data.X) else data.X
        if name == "citeseer":  # 15 nodes without a label count as class 0, as in all results here
            self.y = np.maximum(data.y, 0)
        official = data.split["train"] if name == "ogbn-arxiv" else None
        # Public splits have so few rows that the optimum is about 0: train on 80% of the nodes.
        shuffled = np.random.default_rng(0).permutation(n)
        self.train = np.sort(shuffled[: int(0.8 * n)]) if official is None else official
        if self.y is not None:
            self.train = self.train[self.y[self.train] >= 0]

    @property
    def one_hot(self) -> Any:
        labels = self.y[self.train]
        return (labels[:, None] == np.unique(labels)[None, :]).astype(np.float64)


def random_power_law(n: int, m: int, seed: int = 0) -> Graph:
    """About m edges with degrees that fall like a power law, nodes in random order."""
    rng = np.random.default_rng(seed)
    name = rng.permutation(n)  # of each node, so that the order tells nothing
    parts = []
    for start in range(0, m, 1 << 22):  # a part at a time: memory for large m
        # Expected degrees fall like rank^-1/2, whose cumulated sum is a square root.
        u, v = (name[np.int64(n * rng.random(min(1 << 22, m - start)) ** 2)] for _ in range(2))
        parts.append(np.stack([u, v])[:, u != v])
    return Graph.from_edges(np.concatenate(parts, axis=1), num_nodes=n)
