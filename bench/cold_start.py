"""What does the first fit take, import and compilation included, without a cache and with one?

    HERTA_DATA=folder python bench/cold_start.py [--against FOLDER] [--laps N]

Every fit runs in a process of its own: "cold" with an empty cache of compiled code, "warm" with the
one that was just filled.  Processor seconds of the process and of whatever it starts; with another
tree (`--against`) the laps alternate.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import QUICK, ROOT, Results

FIT = """
import os, sys
from herta_gpu import HERTA
from herta_gpu.datasets import load
data = load(sys.argv[1], os.environ["HERTA_DATA"])
model = HERTA(ridge=0.01, **eval(sys.argv[2])).fit(data.graph, data.X, data.y, data.split["train"])
assert model.status_ == "certified", model.status_
"""
CASES = (
    ("cora", "{'lam': 1.0}"),
    ("cora", "{'lam': 20.0, 'loss': 'ce'}"),
    ("pubmed", "{'lam': 1.0}"),
)


def seconds(tree: Path, cache: str, data: str, options: str) -> float:
    """Processor seconds of one fit in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": cache}
    subprocess.run([sys.executable, "-c", FIT, data, options], check=True, env=env, cwd=tree)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree, for laps in turn")
    parser.add_argument("--laps", type=int, default=1 if QUICK else 3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    trees = {"this": ROOT} | ({"before": args.against.resolve()} if args.against else {})
    results = Results("cold_start")
    for data, options in CASES[:1] if QUICK else CASES:
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.laps):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("cold", "warm"):
                        spent = seconds(tree, cache, data, options)
                        found.setdefault((name, state), []).append(spent)
        for (name, state), laps in found.items():
            median = statistics.median(laps)
            ratio = median / statistics.median(found["this", state])
            results.add(
                data=data, options=options, tree=name, state=state, cpu_seconds=median, ratio=ratio
            )


if __name__ == "__main__":
    main()
