"""Our product against those of cuSPARSE, and our ways of copying against memcpy, on a GPU.

python bench/device_race.py [DATASET]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import Results
from cusparse import ALGORITHMS, RowMajorProduct

from herta_gpu import datasets
from herta_gpu.app.selftest import FULL_ON_GPU, LAM, timed
from herta_gpu.backends import get_backend

PART = 32 << 20  # bytes that are sent at a time
COPIED = 1 << 28  # bytes: more than any cache holds


def products(backend: Any, graph: Any, k: int) -> dict[str, Callable[[], Any]]:
    """H X by our kernel; L X by CuPy, and by cuSPARSE on row-major blocks."""
    L, rng = backend.laplacian(graph, "float32"), np.random.default_rng(k)
    M = backend.laplacian_csr(L)
    X, Y = (backend.asarray(rng.standard_normal((L.n, k), dtype=np.float32)) for _ in range(2))
    race: dict[str, Callable[[], Any]] = {"apply_H": partial(backend.apply_H, L, LAM, X, out=Y)}
    race["CuPy"] = lambda: M @ X
    for algorithm in ALGORITHMS:
        race[f"cuSPARSE {algorithm}"] = RowMajorProduct(backend.xp, M, X, Y, algorithm)
    return race


def copies(backend: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Within the device, and between it and the host; memcpy, then our own ways."""
    host = np.ones((size // 256, 64), np.float32)
    X = backend.asarray(host)
    Y = backend.xp.zeros_like(X)
    cuda, blocks = backend.xp.cuda, backend.host_blocks(host)
    ends = (Y.data.ptr, X.data.ptr, X.nbytes, cuda.runtime.memcpyDeviceToDevice)
    rows = max(1, PART // 256)
    parts = [(slice(a, a + rows), slice(0, 64)) for a in range(0, host.shape[0], rows)]
    return {
        "within the device": lambda: backend.xp.copyto(Y, X),
        "within the device, memcpy": lambda: cuda.runtime.memcpyAsync(
            *ends, cuda.get_current_stream().ptr
        ),
        "from pinned memory, memcpy": lambda: X.set(blocks.X, stream=cuda.get_current_stream()),
        "from pinned memory, in parts": lambda: sum(1 for _ in blocks.parts(parts)),
        "from the host": lambda: backend.asarray(host),
        "to the host": lambda: backend.to_numpy(X),
    }


def main() -> None:
    results, backend, size = Results("device_race"), get_backend("cuda"), FULL_ON_GPU
    graph = datasets.load(sys.argv[1] if len(sys.argv) > 1 else size.dataset, features=False).graph
    for k in size.columns:
        for name, action in products(backend, graph, k).items():
            results.add(what=name, columns=k, seconds=timed(backend, action, size))
    for name, action in copies(backend, COPIED).items():
        moved = (2 if name.startswith("within") else 1) * COPIED
        results.add(what=name, bytes_per_second=moved / timed(backend, action, size))


if __name__ == "__main__":
    main()
