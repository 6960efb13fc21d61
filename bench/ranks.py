"""Ranks that share a graph by nodes: what they send, and how their work compares with one process.

    python bench/ranks.py [--quick] [--graphs NAME,NAME] [--without-fit]
    python bench/ranks.py --against FOLDER

Starts itself under mpirun on 1, 2 and 4 ranks, one thread each: a product of 64 columns, a step of
CG, and a whole fit, by METIS, by ranges of ids and at random.  Cores are few here and MPI polls
while it waits, so what is compared is processor time in a rank's own work: that of waiting and of
messages is measured apart and taken off.

    efficiency = time of one process / (ranks x time of the slowest rank)

The second form asks whether one process has become slower: it fits in turn with this tree and with
another one, that before there were ranks, say.

The wall clock is told where there is a core for each rank.  At the end, what a model of bytes and
rates says of 8 and 64 GPUs and of 10^12 edges: arithmetic, not measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu import HERTA, Graph
from herta_gpu.backends import backend_for
from herta_gpu.backends.cpu import compiled
from herta_gpu.datasets import load
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.planning.costs import Sizes
from herta_gpu.planning.forecast import Card, assumed_cut, step_bytes
from herta_gpu.plumbing.partition import metis

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "ranks.jsonl"
GRAPHS = ("ogbn-arxiv", "synthetic:products@0.1")
COLUMNS, LAM, LAPS = 64, 20.0, 9
FIT: dict[str, Any] = {"lam": 5.0, "ridge": 0.01, "reorder": False}  # ranks keep the ids' order
FEATURES = 32


# ---- what is measured, before there are ranks ------------------------------------------------
def prepare(names: list[str], folder: Path, several: list[int]) -> dict[str, dict[str, Any]]:
    """Graphs as folders, labels, and a list of owners for each number of ranks and partition."""
    found = {}
    for number, name in enumerate(names):
        try:
            data = load(name, features=False)
        except (OSError, ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        at = folder / str(number)
        graph = data.graph.save(at / "graph")
        np.save(at / "y.npy", data.y)
        np.save(at / "train.npy", data.split["train"])
        seconds = {}
        for ranks in several:
            start = time.process_time()
            np.save(at / f"metis-{ranks}.npy", metis(graph, ranks))
            seconds[ranks] = time.process_time() - start
            drawn = np.random.default_rng(ranks).integers(0, ranks, graph.num_nodes)
            np.save(at / f"random-{ranks}.npy", drawn)
        found[name] = {"folder": str(at), "metis_seconds": seconds}
    return found


# ---- on each rank ----------------------------------------------------------------------------
class Clock:
    """Processor and wall seconds of this rank's own work, without waiting and messages."""

    def __init__(self, team: Any) -> None:
        self.away, self.sent, self._team = 0.0, 0, team
        if team is not None:
            finished, started = team.finished, team.started

            def timed(requests: Any, what: str) -> None:
                start = time.process_time()
                finished(requests, what)
                self.away += time.process_time() - start

            def counted(out: Any, into: Any) -> Any:
                others = [a for r, a in enumerate(out) if r != team.rank]
                lists = [a if isinstance(a, list) else [a] for a in others]
                self.sent += sum(a.nbytes for part in lists for a in part)
                return started(out, into)

            team.finished, team.started = timed, counted

    def measured(self, job: Callable[[], Any], laps: int) -> dict[str, float]:
        """Of the best lap: processor seconds, wall seconds, and bytes that this rank sent."""
        found = []
        for lap in range(laps + (laps > 1)):  # the first of several warms up
            if self._team is not None:
                self._team.arrive()
            self.away, self.sent = 0.0, 0
            wall, start = time.perf_counter(), time.process_time()
            job()
            spent = (time.process_time() - start - self.away, time.perf_counter() - wall, self.sent)
            found += [spent] if lap or laps == 1 else []
        return {
            "work": min(f[0] for f in found), "wall": min(f[1] for f in found), "bytes": found[0][2]
        }  # fmt: skip


@contextmanager
def shared(folder: Path, comm: Any, partition: str) -> Iterator[Graph]:
    """This rank's part of a graph; the whole one in one process."""
    whole = Graph.open(folder / "graph")
    if comm.size == 1:
        yield Graph(np.array(whole.indptr), np.array(whole.indices))
        return
    named = partition if partition == "blocks" else folder / f"{partition}-{comm.size}.npy"
    yield whole.on_ranks(comm, "nodes", named)


def of_graph(graph: Graph, folder: Path, with_fit: bool) -> dict[str, Any]:
    """A product, a step of CG and a fit on this rank."""
    clock = Clock(graph.team)
    told: dict[str, Any] = {
        "rows": getattr(getattr(graph, "halo", None), "size", 0), "nodes": graph.num_nodes,
        "entries": int(graph.indices.shape[0]), **_steps(graph, clock),
    }  # fmt: skip
    if not with_fit:
        return told
    n, at, y = graph.nodes_of_all, graph.nodes, np.load(folder / "y.npy")
    mask = np.zeros(n, dtype=bool)
    mask[np.load(folder / "train.npy")] = True
    X = np.random.default_rng(0).standard_normal((n, FEATURES), dtype=np.float32)[at]
    model = HERTA(**FIT, memory_budget="1GB", device="cpu")
    told["fit"] = clock.measured(lambda: model.fit(graph, X, y[at], mask[at]), 1)
    return {**told, "status": model.status_, "loss": model.history_[-1]["loss"]}


def _steps(graph: Graph, clock: Clock) -> dict[str, Any]:
    """A product and a step of CG."""
    backend = backend_for("cpu", graph, None)
    L = RegularizedLaplacian(graph, LAM, backend, "float32").laplacian()
    shape = (graph.num_nodes, COLUMNS)
    X, Y = (backend.empty(shape, "float32") for _ in range(2))
    X[...] = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    # A tolerance that is never reached: no column freezes.
    state = backend.cg_start(L, LAM, X, np.ones(COLUMNS), 0.0, 0.0)
    return {
        "product": clock.measured(lambda: compiled._apply(L, LAM, X, Y), LAPS),
        "step": clock.measured(lambda: backend.cg_step(L, LAM, state), LAPS),
    }


def measure(prepared: dict[str, dict[str, Any]], with_fit: bool) -> None:
    """On every rank: each graph, by each partition; rank 0 prints a line for each."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for name, about in prepared.items():
        folder = Path(about["folder"])
        for partition in ("metis", "blocks", "random") if comm.size > 1 else ("whole",):
            with shared(folder, comm, partition) as graph:
                told = comm.allgather(of_graph(graph, folder, with_fit))
                n, m = graph.nodes_of_all, graph.num_edges
            if comm.rank == 0:
                print(json.dumps(_record(name, comm.size, partition, n, m, told)), flush=True)


def _record(name: str, ranks: int, partition: str, n: int, m: int, told: list[Any]) -> Any:
    work = [t["entries"] + 24 * t["nodes"] for t in told]
    record = {
        "graph": name, "n": n, "m": m, "ranks": ranks, "partition": partition, "columns": COLUMNS,
        "rows_moved": sum(t["rows"] for t in told) / n, "most_work": max(work) / sum(work),
    }  # fmt: skip
    for what in ("product", "step", "fit"):
        if what in told[0]:
            record[f"{what}_ms"] = 1e3 * max(t[what]["work"] for t in told)
            record[f"{what}_wall_ms"] = 1e3 * max(t[what]["wall"] for t in told)
            record[f"{what}_MB"] = 1e-6 * sum(t[what]["bytes"] for t in told)
    return {**record, **{key: told[0][key] for key in ("status", "loss") if key in told[0]}}


# ---- all of it -------------------------------------------------------------------------------
def run(ranks: int, prepared: dict[str, dict[str, Any]], with_fit: bool) -> list[dict[str, Any]]:
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1", "HERTA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    launcher = Path(sys.executable).parent / "mpirun"
    command = [str(launcher) if launcher.exists() else "mpirun", "--oversubscribe"]
    command += ["--bind-to", "none", "-n", str(ranks), sys.executable, __file__]
    command += ["--on-ranks", json.dumps(prepared)] + ["--without-fit"] * (not with_fit)
    done = subprocess.run(
        command, env={**os.environ, **settings}, text=True, stdout=subprocess.PIPE, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compared(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with efficiencies; the better one of two runs of one process counts."""
    kept: dict[Any, dict[str, Any]] = {}
    for record in records:
        key = (record["graph"], record["ranks"], record["partition"])
        times = [k for k in record if k.endswith("_ms")]
        if key in kept:
            record |= {k: min(record[k], kept[key][k]) for k in times}
        kept[key] = record
    for (graph, ranks, _), record in kept.items():
        alone = kept[graph, 1, "whole"]
        for what in ("product", "step", "fit"):
            if f"{what}_ms" in record:
                share = alone[f"{what}_ms"] / ranks
                record[f"{what}_efficiency"] = share / record[f"{what}_ms"]
                if 1 < ranks <= (os.cpu_count() or 1):
                    ratio = alone[f"{what}_wall_ms"] / record[f"{what}_wall_ms"]
                    record[f"{what}_speedup_by_the_clock"] = ratio
    return list(kept.values())


def show(record: dict[str, Any]) -> None:
    shown = [f"{record['graph']:<24} {record['ranks']} {record['partition']:<7}"]
    shown += [f"{record['rows_moved']:5.2f} n rows, {record['product_MB']:6.1f} MB a product"]
    for what, unit in (("product", "ms"), ("step", "ms"), ("fit", "s")):
        if f"{what}_ms" in record:
            value = record[f"{what}_ms"] / (1 if unit == "ms" else 1e3)
            shown.append(f"{what} {value:7.1f} {unit} {record[f'{what}_efficiency']:5.0%}")
    clock = record.get("fit_speedup_by_the_clock")
    shown += [] if clock is None else [f"fit {clock:.2f}x by the clock"]
    print("  ".join(shown))


# ---- arithmetic ------------------------------------------------------------------------------
def projection() -> None:
    """A product of 64 columns on GPUs that are not here, by bytes and assumed rates."""
    card, nvlink, network = Card(80 << 30), 450e9, 50e9
    papers = (111_059_956, 1_615_685_872)
    web = (25_000_000_000, 1_000_000_000_000)
    print(
        "\nArithmetic, not measurement: a float32 product of 64 columns on cards of 80 GB.\n"
        "  work     = (gathered rows + indices + blocks) / ranks / reached bandwidth\n"
        "  messages = cut n 64 x 4 bytes / ranks / link; hidden or not: both sums are told\n"
        "  memory   = (CSR + three blocks of 64 columns) / ranks + the halo of one block\n"
        f"  {card.assumptions}; NVLink {nvlink / 1e9:g}, network {network / 1e9:g} GB/s a card;\n"
        "  cut      = 0.28 n for each doubling of the ranks, as METIS left of ogbn-arxiv, and\n"
        "             0.1 of the edges' ends for 10^12 edges (a crawl in its own order)"
    )
    rows = [("papers100M", *papers, 8, nvlink), ("papers100M", *papers, 64, network),
            ("10^12 edges", *web, 64, network), ("10^12 edges", *web, 1024, network)]  # fmt: skip
    for name, n, m, ranks, link in rows:
        sizes = Sizes(n=n, m=m, d=128, c=16, n_train=n // 100, word=4, X_bytes=0)
        work = step_bytes(sizes, COLUMNS) / ranks / (card.reached * card.bandwidth)
        cut = assumed_cut(ranks) * n if n < 10**9 else 0.1 * 2 * m
        messages = cut * COLUMNS * 4 / ranks / link
        held = (8 * n + 8 * m + 3 * n * COLUMNS * 4) / ranks + cut * COLUMNS * 4 / ranks
        fits = "fits" if held <= 0.9 * card.memory else "does NOT fit"
        print(
            f"  {name:<12} {ranks:4d} cards  work {1e3 * work:9.1f} ms  messages "
            f"{1e3 * messages:9.1f} ms  together {1e3 * max(work, messages):9.1f} to "
            f"{1e3 * (work + messages):9.1f} ms  {held / 2**30:9,.1f} GB a card: {fits}"
        )


# ---- one process, with this tree and with another one ------------------------------------------
ALONE = """
import json, sys, time
from herta_gpu import HERTA
from herta_gpu.datasets import load
name, params = json.loads(sys.argv[1])
data, best = load(name), float("inf")
for lap in range(5):
    start = time.process_time()
    model = HERTA(**params, device="cpu", memory_budget="1GB").fit(
        data.graph, data.X, data.y, data.split["train"])
    best = min(best, time.process_time() - start) if lap else best
print(json.dumps([best, "mpi4py" in sys.modules, model.status_]))
"""
FITS = [("cora", {"lam": 10.0, "ridge": 0.01}), ("cora", {"lam": 10.0, "ridge": 0.1, "loss": "ce"}),
        ("pubmed", {"lam": 10.0, "ridge": 0.01}), ("synthetic:n=50000,m=500000,d=64,c=10",
        {"lam": 5.0})]  # fmt: skip


def against(other: str, laps: int = 4) -> None:
    """Processor seconds of fits in one process, of both trees in turn."""
    for name, params in FITS:
        best = {str(ROOT): float("inf"), other: float("inf")}
        for tree in [*best] * laps:
            done = subprocess.run(
                [sys.executable, "-c", ALONE, json.dumps([name, params])], text=True, check=True,
                env={**os.environ, "PYTHONPATH": tree, "HERTA_NUM_THREADS": "1",
                     "OPENBLAS_NUM_THREADS": "1"}, stdout=subprocess.PIPE, cwd=tree,
            )  # fmt: skip
            seconds, mpi, status = json.loads(done.stdout.splitlines()[-1])
            assert not mpi, "one process has imported mpi4py"
            best[tree] = min(best[tree], seconds)
        here, there = best[str(ROOT)], best[other]
        print(f"{name:<40} {json.dumps(params):<46} {status}  {here:.3f} s against {there:.3f} s: "
              f"{here / there:.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small graph, nothing is stored")
    parser.add_argument("--graphs", default="", help="names, with commas between them")
    parser.add_argument("--ranks", default="1,2,4", help="how many, with commas between them")
    parser.add_argument("--without-fit", action="store_true")
    parser.add_argument("--against", default="", help="a folder with another tree")
    parser.add_argument("--on-ranks", default="", help="used by this script itself")
    args = parser.parse_args()
    if args.on_ranks:
        measure(json.loads(args.on_ranks), not args.without_fit)
        return
    if args.against:
        against(args.against)
        return
    names = args.graphs.split(",") if args.graphs else list(GRAPHS)
    names = ["synthetic:n=20000,m=100000,d=8,c=4"] if args.quick else names
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        several = [int(ranks) for ranks in args.ranks.split(",") if ranks != "1"]
        prepared = prepare(names, Path(folder), several)
        for ranks in (1, *several, 1):  # one process twice: others use the machine as well
            records += run(ranks, prepared, not args.without_fit)
    found = compared(records)
    for record in found:
        show(record)
    projection()
    if not args.quick and (args.graphs, args.ranks) == ("", "1,2,4"):
        RESULTS.write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")


if __name__ == "__main__":
    main()
