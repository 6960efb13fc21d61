"""What does a graph take that does not fit: seconds, memory, passes over X?

    python bench/large.py [--quick] [SHARE ...]

Shares of a block model of the size of ogbn-papers100M (n = 111,059,956, d = 128, c = 172); 0.01 if
none is named.  The data are made first, by another process.  The measured one maps them, compiles
on a small graph and fits within a budget.  Meanwhile its anonymous memory, which it allocated, is
looked at every 50 ms, apart from the mapped pages of X and graph, which the system may take back.
The files may be in the system's cache: the rate of reading X is not that of the disk.

The plans for cards of 80, 40 and 24 GB are counted, not measured: no GPU has run anything.
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
from common import QUICK, Results

from herta_gpu import HERTA, Graph
from herta_gpu.datasets import Dataset, load
from herta_gpu.diffusion import Rows

NAME, EVERY = "synthetic:papers100M", 0.05
BUDGETS = {"0.1": "8GB", "0.01": "800MB"}  # of a share; any other has that of 0.01
LAM, CARDS, LAMS = 1.0, ("80GB", "40GB", "24GB"), (1.0, 20.0)
POINTS = 400  # of the curve of memory that are kept


def make(share: str, folder: str) -> None:
    """The data as files: in the cache of the datasets, which keeps large ones, or in `folder`."""
    data = load(f"{NAME}@{share}")
    if isinstance(data.X, np.memmap):
        return
    data.graph.save(f"{folder}/graph")
    for name, array in {"X": data.X, "y": data.y, **data.split}.items():
        np.save(f"{folder}/{name}.npy", array)


def mapped(share: str, folder: str) -> Dataset:
    """What `make` made."""
    if not Path(folder, "graph").exists():
        return load(f"{NAME}@{share}")
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in Path(folder).glob("*.npy")}
    X, y = arrays.pop("X"), arrays.pop("y")
    return Dataset(NAME, Graph.open(f"{folder}/graph"), X, y, arrays)


def one(share: str, budget: str, folder: str) -> dict[str, Any]:
    """A certified fit on a share of the graph, evaluated on all parts of the split."""
    data = mapped(share, folder)
    _compile()
    products = []
    tighten = Rows.tighten

    def counted(self: Rows, *rest: Any) -> None:
        tighten(self, *rest)
        products.append(self.products)

    Rows.tighten = counted  # type: ignore[method-assign]
    nodes = np.concatenate(list(data.split.values()))
    print(f"fit {time.clock_gettime(time.CLOCK_MONOTONIC)}", flush=True)
    model = HERTA(lam=LAM, memory_budget=budget)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(data.graph, data.X, data.y, data.split["train"], evaluate=nodes)
    reads, (n, d) = model.X_reads_, data.X.shape
    return {
        "n": n, "m": data.graph.num_edges, "d": d, "c": model.W_.shape[1],
        "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu,
        "stages": model.stages_, "status": model.status_,
        "certificate": model.certificate_.value, "kind": model.certificate_.kind,
        "loss": model.history_[-1]["loss"], "loss_error": model.history_[-1]["loss_error"],
        "products": max(products, default=None), "blocks": len(model.plan_.recipe.blocks(d)),
        "passes": reads["passes"], "bytes_read": reads["bytes_read"],
        "read_seconds": reads["seconds"], "waited": reads["waited"],
    }  # fmt: skip


def _compile() -> None:
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(rng.integers(0, 2000, (2, 20000)), num_nodes=2000)
    X = rng.standard_normal((2000, 64), dtype=np.float32)
    HERTA(lam=LAM, strategy="direct").fit(graph, X, rng.integers(0, 172, 2000))


def watched(command: list[str]) -> tuple[dict[str, Any], list[tuple[float, int, int]]]:
    """What a process printed last, and (seconds since its fit began, anonymous, mapped bytes)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    curve = []
    while process.poll() is None:
        memory = _memory(process.pid)
        if memory is not None:
            curve.append((time.clock_gettime(time.CLOCK_MONOTONIC), *memory))
        time.sleep(EVERY)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed.")
    begun = float(next(line for line in lines if line.startswith("fit ")).split()[1])
    return json.loads(lines[-1]), [(t - begun, *rest) for t, *rest in curve]


def _memory(pid: int) -> tuple[int, int] | None:
    """(anonymous, mapped) bytes of a process; None when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in found:
        return None
    anonymous, mapped = (1024 * int(found[key].split()[0]) for key in ("RssAnon", "RssFile"))
    return anonymous, mapped


def measure(results: Results, share: str) -> None:
    budget = BUDGETS.get(share, BUDGETS["0.01"])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--make", share, folder], check=True)
        row, curve = watched([sys.executable, __file__, "--one", share, budget, folder])
    # The largest value of each run of points, so that no peak gets lost.
    step = -(-len(curve) // POINTS)
    runs = [curve[i : i + step] for i in range(0, len(curve), step)]
    thinned = [[round(run[-1][0], 2), *(max(p[k] for p in run) for k in (1, 2))] for run in runs]
    results.add(
        what="fit", share=share, lam=LAM, budget=budget, **row,
        peak_anonymous=max(anonymous for _, anonymous, _ in curve),
        peak_mapped=max(files for _, _, files in curve),
    )  # fmt: skip
    with results.path.open("a") as out:  # long, and nothing to look at on a terminal
        out.write(json.dumps({"what": "memory", "share": share, "curve": thinned}) + "\n")


def plan(results: Results, card: str, lam: float) -> None:
    command = [sys.executable, "-m", "herta_gpu", "plan", NAME, "--device-memory", card]
    found = subprocess.run(
        [*command, "--lam", str(lam), "--json"], check=True, capture_output=True, text=True
    )
    made = json.loads(found.stdout)
    decisions = {name: choice for name, choice, _ in made["decisions"]}
    work = {w["what"]: w for w in made["work"]}
    results.add(
        what="plan", card=card, lam=lam, fits=made["fits"], strategy=made["strategy"],
        total_bytes=made["total_bytes"], budget_bytes=made["budget_bytes"],
        columns=int(decisions["columns at once"]),
        products_bytes=work["products with H"]["moved"],
        products_seconds=work["products with H"]["seconds"],
        passes=int(work["passes over X"]["times"]), X_bytes=work["passes over X"]["moved"],
        X_seconds=work["passes over X"]["seconds"], assumptions=made["assumptions"],
    )  # fmt: skip


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(one(*sys.argv[-3:]), default=float))
        return
    if "--make" in sys.argv:
        make(*sys.argv[-2:])
        return
    shares = [a for a in sys.argv[1:] if not a.startswith("--")]
    shares = shares or (["0.001"] if QUICK else ["0.01"])
    results = Results("large", again=lambda row: row["what"] == "plan" or row["share"] in shares)
    for card in CARDS:
        for lam in LAMS:
            plan(results, card, lam)
    for share in shares:
        measure(results, share)


if __name__ == "__main__":
    main()
