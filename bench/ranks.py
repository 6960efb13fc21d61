"""Ranks that share a graph by nodes: what they send, and how their work compares with one process.

    python bench/ranks.py [--quick]

Starts itself under mpirun on 1, 2 and 4 ranks.  Cores are few here and MPI waits by polling, so
what is compared is processor time of the slowest rank in its own work, not the wall clock:
efficiency = time of one process / (ranks x time of the slowest rank).  One thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "ranks.jsonl"
COLUMNS, LAM, LAPS = 64, 20.0, 7


def graphs(quick: bool) -> dict[str, Any]:
    """Edges of each graph that is there, (2, m), and its number of nodes."""
    from herta_gpu.datasets import load

    names = ["synthetic:arxiv"] if quick else ["ogbn-arxiv", "synthetic:n=244902,m=6185914,d=8,c=4"]
    found = {}
    for name in names:
        try:
            graph = load(name).graph
        except (OSError, ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        u, v, _ = graph.edges()
        found[name] = (np.stack([u, v]), graph.num_nodes)
    return found


def least(job: Any) -> float:
    """Processor seconds of `job`, the least of several laps."""
    job()
    laps = []
    for _ in range(LAPS):
        start = time.process_time()
        job()
        laps.append(time.process_time() - start)
    return min(laps)


def measure(quick: bool) -> None:
    """On every rank: products and steps of CG, on each graph and partition."""
    from mpi4py import MPI

    from herta_gpu import Graph
    from herta_gpu.backends import backend_for, get_backend
    from herta_gpu.backends.cpu import compiled
    from herta_gpu.solver import RegularizedLaplacian

    comm, rng = MPI.COMM_WORLD, np.random.default_rng(0)
    for name, (edges, n) in graphs(quick).items():
        ways: dict[str, Any] = {"whole": None}
        if comm.size > 1:
            ways = {
                "metis": "metis",
                "blocks": "blocks",
                "random": np.random.default_rng(1).integers(0, comm.size, n),
            }
        for way, partition in ways.items():
            if partition is None:
                graph, backend = Graph.from_edges(edges, n), get_backend("cpu")
            else:
                mine = edges[:, comm.rank :: comm.size]
                graph = Graph.from_edges(mine, n, comm=comm, split="nodes", partition=partition)
                backend = backend_for("cpu", graph, None)
            H = RegularizedLaplacian(graph, LAM, backend, "float32")
            L, X = H.laplacian(), rng.standard_normal((graph.num_nodes, COLUMNS)).astype("float32")
            Y, halo = np.empty_like(X), getattr(graph, "halo", None)

            def product(L: Any = L, X: Any = X, Y: Any = Y) -> None:
                compiled._apply(L, LAM, X, Y)

            if halo is not None:
                # The messages themselves are left out: what is packed and copied for them is not.
                halo.team.neighbours = lambda out, into: None
            seconds = least(product)
            if halo is not None:
                del halo.team.neighbours
            rows = 0 if halo is None else halo.size
            told = comm.allgather((seconds, rows, graph.num_nodes, int(L.nnz)))
            if comm.rank == 0:
                record = {
                    "graph": name, "ranks": comm.size, "partition": way, "columns": COLUMNS,
                    "slowest_ms": 1e3 * max(t[0] for t in told),
                    "rows_moved": sum(t[1] for t in told) / n,
                    "MB_a_product": 4e-6 * COLUMNS * sum(t[1] for t in told),
                    "most_work": max(t[3] + 4 * t[2] for t in told)
                    / sum(t[3] + 4 * t[2] for t in told),
                }  # fmt: skip
                print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--on-ranks", action="store_true", help="used by this script itself")
    args = parser.parse_args()
    if args.on_ranks:
        measure(args.quick)
        return
    records: list[dict[str, Any]] = []
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HERTA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    launcher = Path(sys.executable).parent / "mpirun"
    for ranks in (1, 2, 4):
        command = [str(launcher) if launcher.exists() else "mpirun", "--oversubscribe"]
        command += ["--bind-to", "none", "-n", str(ranks), sys.executable, __file__, "--on-ranks"]
        done = subprocess.run(
            command + ["--quick"] * args.quick, env={**os.environ, **settings}, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        records += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    alone = {r["graph"]: r["slowest_ms"] for r in records if r["ranks"] == 1}
    for record in records:
        ideal = alone[record["graph"]] / record["ranks"]
        record["efficiency"] = ideal / record["slowest_ms"]
        print(
            f"{record['graph']:<40} {record['ranks']} ranks  {record['partition']:<7} "
            f"{record['slowest_ms']:7.1f} ms  {record['rows_moved']:.2f} n rows moved  "
            f"efficiency {record['efficiency']:.0%}"
        )
    if not args.quick:
        RESULTS.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


if __name__ == "__main__":
    main()
