"""`herta selftest`: is a device right, and how fast is each kernel on it?

It checks the device against the plain CPU backend, times the kernels and the product of the sparse
library that is there (CuPy, SciPy on the CPU), and fits a generated graph, on a GPU one of the size
of ogbn-products, at which size it also compares all numbers.  All of it goes into one JSON file;
what is printed can be pasted into a report.  With a folder for --out, `herta compare` and `herta
profile` leave theirs there, and Nsight Systems where it is installed.
`bench/device_race.py` races more products, and ways of copying.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
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

LAM = 1000.0
COLUMN_BYTES = 64  # a node and a column, of all blocks that are timed, at most
_ENTRY_BYTES = 40  # of L as a matrix in float64, while it is made, and in float32
_LIVE_STEPS = 32  # of CG, in which no column is done
_IN_FOLDER = "selftest.json"
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


class Report:
    """What is known so far, written after every stage: what fails later loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, dict[str, Any](file=str(path))

    def add(self, **found: Any) -> None:
        self.content |= found
        write_json(self.path, self.content)
        if self.path.name == _IN_FOLDER:
            self.path.with_suffix(".md").write_text(_text(self.content) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> CommandOutput:
    """herta selftest"""
    if not __debug__:
        raise RuntimeError("selftest is made of assertions: run Python without -O.")
    path = Path(args.out or "herta-selftest.json")
    whole = path.suffix != ".json"  # a folder, for all there is
    path = path / _IN_FOLDER if whole else path
    check_new_file(path, args.overwrite)
    stages, backend, report = Stages(args.verbose), get_backend(args.device), Report(path)
    size = QUICK if args.quick else FULL_ON_GPU if backend.name == "cuda" else FULL
    name, about = args.dataset or size.dataset, _about(backend)
    with stages("load"):
        data = datasets.load(name, args.data_dir, stages=stages)
        if data.y is None or data.X is None:
            raise ValueError(f"{name} has no features or no labels, which the fit needs.")
    graph = {"name": name, "nodes": data.graph.num_nodes, "edges": data.graph.num_edges}
    path.parent.mkdir(parents=True, exist_ok=True)
    found, kernels = list[dict[str, Any]](), list[dict[str, Any]]()
    report.add(about=about, graph=graph)
    with stages("checks"):
        for check in _checks(backend, size):
            found.append(_outcome(*check))
        report.add(checks=found)
    with stages("kernels"):
        for checked, rows in _at_size(backend, data.graph, size):
            found.append(checked)
            kernels += rows
            report.add(checks=found, kernels=kernels)
    model = HERTA(lam=10.0, ridge=0.01, device=backend.name, verbose=args.verbose)
    model.fit(data.graph, data.X, data.y, data.split.get("train"))
    fit: dict[str, Any] = {"status": model.status_, "certificate": str(model.certificate_)}
    report.add(fit=fit | {"steps": len(model.history_) - 1, "seconds": model.stages_})
    if whole:
        _race(args, name, backend.name, report)
    failed = any(check["outcome"] == "failed" for check in found)
    return CommandOutput(report.content, _text(report.content), int(failed))


def _race(args: argparse.Namespace, name: str, device: str, report: Report) -> None:
    """What `herta compare` and `herta profile` say, and what Nsight Systems does where it is."""
    folder, texts = report.path.parent, dict[str, str]()
    place = [] if args.data_dir is None else ["--data-dir", str(args.data_dir)]
    how = [name, "--lam", "10", "--ridge", "0.01", *place, *["--quiet"] * (not args.verbose)]
    trace = ["--device", device, "--out", str(folder / "trace.json"), "--overwrite"]
    for command, options in (("compare", ["--devices", f"cpu,{device}"]), ("profile", trace)):
        words = [command, *how, *(options if device != "cpu" or command == "profile" else [])]
        asked = args.parse(words)
        asked.argv, asked.verbose, asked.crew = words, args.verbose, args.crew
        done = asked.run(asked)
        texts[command] = done.text
        report.add(**{command: done.content}, texts=texts)
    if shutil.which("nsys"):
        words = shlex.split(report.content["profile"]["nsys"])
        words[words.index("python")], words[words.index("-o") + 1] = (
            sys.executable,
            str(folder / "herta"),
        )
        summary = ["nsys", "stats", "--force-export=true", str(folder / "herta.nsys-rep")]
        ran = [subprocess.run(w, capture_output=True, text=True) for w in (words, summary)]
        (folder / "nsys.txt").write_text("\n".join(r.stdout + r.stderr for r in ran), "utf-8")
        report.add(nsys=[r.returncode for r in ran])


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


# ---- numbers and times at size ------------------------------------------------------------------
def timed(
    backend: Any,
    action: Callable[[], Any],
    size: Size,
    begin: Callable[[], Any] = int,
    most: int = 1000,
) -> float:
    """Seconds of one call: the median of batches that are long enough to be timed.

    A batch has `most` calls at most; `begin` comes before each of them, and is not timed.
    """

    def batch(count: int) -> float:
        begin()
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            action()
        backend.synchronize()
        return time.perf_counter() - start

    batch(1)  # compiles, and allocates what is kept
    count = 1
    while count < most and batch(count) < size.seconds:
        count *= 2
    return median(batch(count) for _ in range(size.repeats)) / count


def _at_size(
    backend: Any, graph: Graph, size: Size
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For each width what came of a check of all numbers, and seconds of each kernel."""
    L, there = backend.laplacian(graph, "float32"), backend.name == "cuda"
    M = None  # L as a matrix of the device's own library, in float64, and a copy in float32
    if _ENTRY_BYTES * (L.nnz + L.n) <= backend.memory_available():
        M = graph.to_csr("cuda" if there else "cpu")
    for k in size.columns:
        name, room = f"all numbers, k = {k}", COLUMN_BYTES * L.n * k
        if room > backend.memory_available():
            why = f"{bytes_text(room)} are not free"
            yield {"name": name, "outcome": "left out", "detail": why, "seconds": 0.0}, []
            continue
        yield _outcome(name, partial(checks.check_at_size, backend, graph, M, k)), []
        rows = list[dict[str, Any]]()
        detail = _outcome(f"times, k = {k}", partial(_time_all, backend, L, M, k, size, rows))
        yield detail, rows


def _time_all(backend: Any, L: Any, M: Any, k: int, size: Size, rows: list[dict[str, Any]]) -> None:
    library = None if M is None else M.astype(np.float32)
    for name, action, *how in _actions(backend, L, library, k):
        rows.append({"kernel": name, "columns": k, "seconds": timed(backend, action, size, *how)})


def _actions(backend: Any, L: Any, M: Any, k: int) -> Iterator[Any]:
    """(name, what is timed, perhaps what begins a batch and its most calls); blocks are freed in
    between."""
    rng = np.random.default_rng(k)
    X, Y, B = (backend.asarray(rng.standard_normal((L.n, k), dtype=np.float32)) for _ in range(3))
    yield "apply_H", partial(backend.apply_H, L, LAM, X, out=Y)
    if M is not None:
        yield ("CuPy" if backend.name == "cuda" else "SciPy"), lambda: M @ X
    yield "Chebyshev step", partial(backend.chebyshev_step, L, LAM, X, Y, B, 1e-3, 1e-4)
    states: list[Any] = []

    def begin() -> None:  # columns that are done would move nothing
        states[:] = [backend.cg_start(L, LAM, X.copy(), backend.xp.zeros(k), 0.0, 0.0)]

    yield "CG step", lambda: backend.cg_step(L, LAM, states[0]), begin, _LIVE_STEPS
    states.clear()
    R = backend.asarray(B, "float64")
    yield "residual", partial(backend.residual_rows, L, LAM, Y, R, 0, out=R)
    del R
    yield "sketch", partial(backend.sketch_incidence, L, k, 1)
    yield "SRHT", partial(backend.srht, X, max(1, L.n // 8), 1)


# ---- the report -------------------------------------------------------------------------------
def _text(content: dict[str, Any]) -> str:
    """What is there so far."""
    about, graph, fit = content["about"], content["graph"], content.get("fit")
    checks, kernels = content.get("checks", []), content.get("kernels", [])
    outcomes = [check["outcome"] for check in checks]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "left out", "failed"))
    versions = ("herta_gpu", "cupy", "cuda_runtime", "cuda_driver", "python", "numpy")
    known = ", ".join(f"{name} {about[name]}" for name in versions if name in about)
    size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges"
    parts = [
        f"herta selftest on {about['device']}: {about['model']}, "
        f"{bytes_text(about['free_bytes'])} free; {known}",
        f"checks: {counts}",
        *("- {name}: {outcome}, {detail}".format(**c) for c in checks if c["outcome"] != "passed"),
        f"**{EMULATED}**" if about["times"] == EMULATED else "",
        f"{graph['name']}: {size}, float32; milliseconds",
        _kernel_table(kernels) if kernels else "",
    ]
    if fit is not None:
        spent = ", ".join(f"{name} {s:.2f}" for name, s in fit["seconds"].items() if s >= SHORTEST)
        told = f"{fit['status']} after {fit['steps']} steps, {fit['certificate']}"
        parts.append(f"fit: {told}; seconds: {spent}")
    for name, text in content.get("texts", {}).items():
        parts.append(f"herta {name}:\n\n```text\n{text}\n```")
    parts.append(f"all of it: {content['file']}")
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
    if "apply_H" in names and names[1:2] in (["CuPy"], ["SciPy"]):
        both = [(at.get((names[1], k)), at.get(("apply_H", k))) for k in widths]
        ahead = (f"{a / b:.2f}" if a and b else NOTHING for a, b in both)
        lines.append(["product of the library / apply_H", *ahead])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
