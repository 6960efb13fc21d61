"""`herta selftest`: is a device right, and how fast is each kernel on it?

It checks the device against the plain CPU backend, times the kernels and the product of the sparse
library that is there (CuPy, SciPy on the CPU), and fits a generated graph, on a GPU one of the size
of ogbn-products.  All of it goes into one JSON file; what is printed can be pasted into a report.
`bench/device_race.py` races more products, and ways of copying.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app import device_checks as checks
from herta_gpu.app.results import NOTHING, CommandOutput, bytes_text
from herta_gpu.app.runs import check_new_file, environment, write_json
from herta_gpu.backends import get_backend
from herta_gpu.graph import Graph
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.progress import SHORTEST, Stages

LAM = 1000.0  # CG is far from done after the steps that are timed
COLUMN_BYTES = 64  # a node and a column, of all blocks that are timed, at most
EMULATED = "times mean nothing here: this is an emulator, not a GPU"


@dataclass(frozen=True)
class Size:
    """How much a run takes on."""

    dataset: str
    columns: tuple[int, ...] = (1, 8, 32, 47, 64, 100, 128)
    fits: tuple[str, ...] = tuple(checks.FITS)
    dtypes: tuple[str, ...] = ("float32", "float64")
    seconds: float = 0.1  # that a measurement takes at least
    repeats: int = 5  # measurements, of which the median counts


FULL = Size("synthetic:n=1e6,m=1e7,d=100,c=47")
FULL_ON_GPU = Size("synthetic:products")
QUICK_FITS = ("mse cg herta", "ce lbfgs direct", "Algorithms 1 and 2 as printed")
QUICK = Size("synthetic:n=20000,m=200000,d=32,c=8", fits=QUICK_FITS, seconds=0.02, repeats=3)


def run(args: argparse.Namespace) -> CommandOutput:
    """herta selftest"""
    if not __debug__:
        raise RuntimeError("selftest is made of assertions: run Python without -O.")
    path = Path(args.out or "herta-selftest.json")
    check_new_file(path, args.overwrite)
    stages, backend = Stages(args.verbose), get_backend(args.device)
    size = QUICK if args.quick else FULL_ON_GPU if backend.name == "cuda" else FULL
    name = args.dataset or size.dataset
    about = _about(backend)
    with stages("load"):
        data = datasets.load(name, args.data_dir, stages=stages)
        if data.y is None or data.X is None:
            raise ValueError(f"{name} has no features or no labels, which the fit needs.")
    with stages("checks"):
        found = [_outcome(*check) for check in _checks(backend, size)]
    with stages("kernels"):
        kernels = _kernels(backend, data.graph, size)
    model = HERTA(lam=10.0, ridge=0.01, device=backend.name, verbose=args.verbose)
    model.fit(data.graph, data.X, data.y, data.split.get("train"))
    graph = {"name": name, "nodes": data.graph.num_nodes, "edges": data.graph.num_edges}
    fit: dict[str, Any] = {"status": model.status_, "certificate": str(model.certificate_)}
    fit |= {"steps": len(model.history_) - 1, "seconds": model.stages_}
    content: dict[str, Any] = {"about": about, "graph": graph, "checks": found}
    content |= {"kernels": kernels, "fit": fit, "file": str(path)}
    write_json(path, content)
    failed = any(check["outcome"] == "failed" for check in found)
    return CommandOutput(content, _text(content), int(failed))


def _about(backend: Any) -> dict[str, Any]:
    """Versions and the device, and whether its times mean anything."""
    about = {k: v for k, v in environment().items() if k != "command"}
    about |= {"device": backend.name, "model": platform.processor() or platform.machine()}
    about |= {"free_bytes": backend.memory_available(), "times": "measured"}
    if backend.name == "cuda":
        runtime = backend.xp.cuda.runtime
        model = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        about |= {"model": model, "cupy": getattr(backend.xp, "__version__", "none")}
        about["cuda_runtime"] = runtime.runtimeGetVersion()
        about["cuda_driver"] = runtime.driverGetVersion()
        about["times"] = EMULATED if model == "emulator" else "measured"
    return about


# ---- checks -----------------------------------------------------------------------------------
def _checks(backend: Any, size: Size) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, check) of all that is asked of a device."""
    cuda = backend.name == "cuda"
    devices = ("cuda", "cpu") if cuda else ("cpu", "cpu-scipy")
    yield "primitives", partial(checks.check_primitives, backend)
    for name, dtype in product(size.fits, size.dtypes):
        yield f"fit: {name}, {dtype}", partial(checks.check_fit, name, dtype, devices)
    yield "sampled edges", partial(checks.check_sampled_edges_end_to_end, devices)
    if not cuda:
        return
    for kind, weighted in {"unweighted": False, "weighted": True}.items():
        for dtype in size.dtypes:
            hub = checks.graph("hub", weighted)
            reference = partial(checks.check_reference, backend, hub, dtype)
            yield f"product is that of CuPy: {kind}, {dtype}", reference
    yield "X in pinned memory", partial(checks.check_X_in_pinned_memory, backend)
    yield "captured steps", partial(checks.check_captured_steps, backend)
    yield "the caller's stream", partial(checks.check_callers_stream, backend)


def _outcome(name: str, check: Callable[[], Any]) -> dict[str, Any]:
    """What came of a check."""
    start, outcome, detail = time.perf_counter(), "passed", ""
    try:
        check()
    except Exception as error:  # whatever a device does wrong belongs into the report
        outcome, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    spent = time.perf_counter() - start
    return {"name": name, "outcome": outcome, "detail": detail, "seconds": spent}


# ---- times ------------------------------------------------------------------------------------
def timed(backend: Any, action: Callable[[], Any], size: Size) -> float:
    """Seconds of one call: the median of batches that are long enough to be timed."""

    def batch(count: int) -> float:
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            action()
        backend.synchronize()
        return time.perf_counter() - start

    batch(1)  # compiles, and allocates what is kept
    count = 1
    while count < 1000 and batch(count) < size.seconds:
        count *= 2
    return median(batch(count) for _ in range(size.repeats)) / count


def _kernels(backend: Any, graph: Graph, size: Size) -> list[dict[str, Any]]:
    """Seconds of each kernel for each width, beside L as a matrix of the device's own library."""
    L, there = backend.laplacian(graph, "float32"), backend.name == "cuda"
    M = backend.laplacian_csr(L) if there else graph.to_csr().astype(np.float32)
    return [
        {"kernel": name, "columns": k, "seconds": timed(backend, action, size)}
        for k in size.columns
        if COLUMN_BYTES * L.n * k <= backend.memory_available()
        for name, action in _actions(backend, L, M, k)
    ]


def _actions(backend: Any, L: Any, M: Any, k: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what is timed); blocks are freed in between."""
    rng = np.random.default_rng(k)
    X, Y, B = (backend.asarray(rng.standard_normal((L.n, k), dtype=np.float32)) for _ in range(3))
    yield "apply_H", partial(backend.apply_H, L, LAM, X, out=Y)
    yield ("CuPy" if backend.name == "cuda" else "SciPy"), lambda: M @ X
    yield "Chebyshev step", partial(backend.chebyshev_step, L, LAM, X, Y, B, 1e-3, 1e-4)
    state = backend.cg_start(L, LAM, X, backend.xp.zeros(k), 0.0, 0.0)
    yield "CG step", partial(backend.cg_step, L, LAM, state)
    del state
    R = backend.asarray(B, "float64")
    yield "residual", partial(backend.residual_rows, L, LAM, Y, R, 0, out=R)
    del R
    yield "sketch", partial(backend.sketch_incidence, L, k, 1)
    yield "SRHT", partial(backend.srht, X, max(1, L.n // 8), 1)


# ---- the report -------------------------------------------------------------------------------
def _text(content: dict[str, Any]) -> str:
    about, graph, checks, kernels, fit = (v for k, v in content.items() if k != "file")
    outcomes = [check["outcome"] for check in checks]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "failed"))
    versions = ("herta_gpu", "cupy", "cuda_runtime", "cuda_driver", "python", "numpy")
    known = ", ".join(f"{name} {about[name]}" for name in versions if name in about)
    spent = ", ".join(f"{name} {s:.2f}" for name, s in fit["seconds"].items() if s >= SHORTEST)
    size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges"
    parts = [
        f"herta selftest on {about['device']}: {about['model']}, "
        f"{bytes_text(about['free_bytes'])} free; {known}",
        f"checks: {counts}",
        *("- {name}: {outcome}, {detail}".format(**c) for c in checks if c["outcome"] != "passed"),
        f"**{EMULATED}**" if about["times"] == EMULATED else "",
        f"{graph['name']}: {size}, float32; milliseconds",
        _kernel_table(kernels),
        f"fit: {fit['status']} after {fit['steps']} steps, {fit['certificate']}; seconds: {spent}",
        f"all of it: {content['file']}",
    ]
    return "\n\n".join(filter(None, parts))


def _kernel_table(kernels: list[dict[str, Any]]) -> str:
    """A row for each kernel, a column for each number of columns, as forums and issues show it."""
    widths = sorted({row["columns"] for row in kernels})
    at = {(row["kernel"], row["columns"]): row["seconds"] for row in kernels}
    names = list(dict.fromkeys(row["kernel"] for row in kernels))
    lines = [["kernel", *(f"k = {k}" for k in widths)], ["---", *("---:" for _ in widths)]]
    for name in names:
        times = (at.get((name, k)) for k in widths)
        lines.append([name, *(NOTHING if s is None else f"{1e3 * s:.3g}" for s in times)])
    ahead = (f"{at[names[1], k] / at[names[0], k]:.2f}" for k in widths)
    lines.append(["product of the library / apply_H", *ahead])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
