"""How does the cost of a fit grow with the number of edges, at fixed d and c?

    python bench/scaling.py [--quick] [--largest 1e8]

Random power-law graphs of average degree 20 in random node order, dense N(0, 1) features.  One
process per size, so that memory is its own; medians of three fits.  The exponent is fitted from
10^6 and from 10^7 edges on (a last-level cache of 32 MB still holds the blocks of 10^6), in seconds
and in counted work (products of H with one column, times edges), which is free of caches.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import numpy as np
from common import Results, random_power_law

import herta_gpu.backends.cpu.compiled as fast
from herta_gpu import HERTA
from herta_gpu.laplacian import RegularizedLaplacian

D, C, DEGREE, LAM, TOL = 32, 8, 20, 1.0, 1e-4


def one(m: int) -> dict[str, float]:
    """A certified fit on a graph of about m edges."""
    graph = random_power_law(max(100, 2 * m // DEGREE), m)
    n = graph.num_nodes
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, D), dtype=np.float32)
    y = rng.integers(0, C, n)
    columns = 0.0
    apply = fast._apply

    def counted(L, lam, block, *rest, **more):  # type: ignore[no-untyped-def]
        nonlocal columns
        columns += block.shape[1]
        apply(L, lam, block, *rest, **more)

    residual_rows = RegularizedLaplacian.residual_rows

    def counted_rows(H, B, Z, start):  # type: ignore[no-untyped-def]
        nonlocal columns
        columns += Z.shape[1] * B.shape[0] / H.n
        return residual_rows(H, B, Z, start)

    fast._apply, RegularizedLaplacian.residual_rows = counted, counted_rows
    HERTA(lam=LAM, tol=TOL).fit(random_power_law(100, 1000), X[:100], y[:100])  # compile
    walls, cpus, base = [], [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        columns = 0.0
        vars(graph).pop("lambda_max_bound", None)  # known from the fit before
        started, cpu_started = time.perf_counter(), time.process_time()
        model = HERTA(lam=LAM, tol=TOL).fit(graph, X, y)
        walls.append(time.perf_counter() - started)
        cpus.append(time.process_time() - cpu_started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "m": graph.num_edges, "n": n, "seconds": np.median(walls), "low": min(walls),
        "high": max(walls), "cpu_seconds": np.median(cpus), "columns": round(columns),
        "work": columns * graph.num_edges, "status": model.status_,
        "certificate": model.certificate_.value, "before_MB": base / 1024, "peak_MB": peak / 1024,
    }  # fmt: skip


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(one(int(sys.argv[-1])), default=float))
        return
    largest = float(sys.argv[sys.argv.index("--largest") + 1]) if "--largest" in sys.argv else 1e7
    sizes = [10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8]
    sizes = [m for m in sizes if m <= (3e6 if "--quick" in sys.argv else largest)]
    results, rows = Results("scaling"), []
    for m in sizes:
        command = [sys.executable, __file__, "--one", str(m)]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            results.add(m=m, failed=found.stderr.strip().splitlines()[-1:])
            continue
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        results.add(**rows[-1])
    for least in (8e5, 8e6):  # from 10^7 on nothing of a fit is in the caches any more
        add_exponents(results, [r for r in rows if r["m"] >= least])


def add_exponents(results: Results, large: list[dict[str, float]]) -> None:
    measures = ("seconds", "cpu_seconds", "work")
    if len(large) < 2:
        return
    logs = {k: np.log([r[k] for r in large]) for k in ("m", *measures)}
    exponents = {k: float(np.polyfit(logs["m"], logs[k], 1)[0]) for k in measures}
    results.add(
        fitted_from=large[0]["m"], exponent=exponents["seconds"],
        exponent_cpu=exponents["cpu_seconds"], exponent_work=exponents["work"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
