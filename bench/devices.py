"""GPU against CPU, for whoever has one: the same fit and the same solve on every device.

python bench/devices.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import Results, race, random_power_law

from herta_gpu import HERTA, SDDSolver
from herta_gpu.backends import get_backend


def devices() -> list[str]:
    try:
        get_backend("cuda")
    except (RuntimeError, ImportError, ValueError) as reason:
        print(f"CPU alone: {reason}")
        return ["cpu"]
    return ["cpu", "cuda"]


def main() -> None:
    results, found = Results("devices"), devices()
    graph = random_power_law(100_000, 1_000_000)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((graph.num_nodes, 64), dtype=np.float32)
    y = rng.integers(0, 8, graph.num_nodes)

    def solve(device: str) -> Any:
        return lambda: SDDSolver(graph, 20.0, tol=1e-5, device=device).solve(X)

    def fit(device: str) -> Any:
        return lambda: HERTA(lam=20.0, device=device).fit(graph, X, y)

    for what, make in (("solve", solve), ("fit", fit)):
        timed = race({device: make(device) for device in found}, 3, 120)
        for device, row in timed.items():
            ratio = timed["cpu"]["seconds"] / row["seconds"]
            results.add(what=what, device=device, devices=found, **row, faster_than_cpu=ratio)


if __name__ == "__main__":
    main()
