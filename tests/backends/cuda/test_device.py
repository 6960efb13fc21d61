"""How long rows are cut, and how often their sums are rounded."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends.cuda import device as cuda_device
from herta_gpu.backends.cuda.device import (
    SEGMENT,
    SHORTEST,
    blocks,
    column_shape,
    roundings,
    segment_length,
    source,
    vector_width,
)
from tests.backends.cuda import primitive_checks as checks
from tests.backends.cuda.kernel_sources import kernel_names
from tests.conftest import on_device, random_graph
from tests.cuda_device.compiler import find_kernels


def test_a_segment_is_no_longer_than_the_rest_of_the_graph_takes() -> None:
    lengths = [segment_length(nnz) for nnz in range(0, 1 << 22, 999)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {64, 128, 256, 512}
    assert (lengths[0], lengths[-1]) == (SHORTEST, SEGMENT)
    # A quarter of a microsecond a neighbour, against 64 ps for each non-zero of the graph.
    for nnz in (1 << 19, 1 << 20, 1 << 21):
        assert 0.25e-6 * segment_length(nnz) <= 64e-12 * nnz * 1.01


def test_only_sums_bound_the_blocks_of_a_grid() -> None:
    """1,024 blocks on cards that hold 432 to 740 at once would leave up to a third of them idle."""
    assert blocks(10**8, 32, summed=True) == 1024
    assert blocks(10**8, 32) == 10**8 // 32
    assert blocks(0, 32) == blocks(5, 32, summed=True) == 1


@on_device
def test_the_grid_of_a_step_without_sums_has_a_block_for_every_32_rows(
    device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, module = {}, sys.modules["herta_gpu.backends.cuda.backend"]
    launch = module._launch

    def watched(file: str, name: str, grid: Any, *rest: Any) -> None:
        grids[name.partition("_f32")[0]] = grid[0]
        launch(file, name, grid, *rest)

    monkeypatch.setattr(module, "_launch", watched)
    monkeypatch.setattr(cuda_device, "MAX_BLOCKS", 4)
    g, b = random_graph(1000, 3000), type(backend)()
    L = b.laplacian(g, "float32")
    X = [b.asarray(checks.block(1000, 32, "float32")) for _ in range(3)]
    b.chebyshev_step(L, 3.0, *X, 0.1, 0.1)
    b.chebyshev_step(L, 3.0, *X, 0.1, 0.1, b.halves(L, X[2]))
    b.cg_step(L, 3.0, b.cg_start(L, 3.0, X[0], b.xp.zeros(32), 0.0, 0.0))
    rows = -(-1000 // 32)
    assert {
        name: grids[name] for name in ("chebyshev", "chebyshev_half", "halve")
    } == dict.fromkeys(("chebyshev", "chebyshev_half", "halve"), rows)
    assert (grids["apply_H"], grids["cg_residual"], grids["cg_direction"]) == (4, 4, rows)


@on_device
def test_a_module_for_each_type_of_indices(backend: Any) -> None:
    """What takes the most time to compile is not compiled for graphs that nobody has."""
    both = [find_kernels(source("laplacian.cu", wide), ["-std=c++17"]) for wide in (0, 1)]
    assert not any("i64" in name for name in both[0])
    assert all("i64" in name for name in both[1])
    assert {*both[0], *both[1]} == {*kernel_names("laplacian.cu")}


@on_device
def test_a_hub_of_a_small_graph_is_cut(backend: Any) -> None:
    """600 neighbours among 2,400 non-zeros: eight lanes would be at them long after the others."""
    L = backend.laplacian(checks.graph("hub"), "float32")
    assert L.segment == 64
    assert backend.to_numpy(L.long_rows).tolist() == [0, 1]
    assert L.segment_row.shape[0] == 2 * -(-600 // 64)
    made_there = backend.sampled_graph(checks.graph("hub"), backend.xp.ones(1199))
    cut = backend.laplacian(made_there, "float64")
    assert np.array_equal(backend.to_numpy(cut.segment_row), backend.to_numpy(L.segment_row))


@pytest.mark.parametrize("k", [1, 8, 47, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_term_is_rounded_more_often_than_is_counted(k: int, dtype: str) -> None:
    """Against the sums of the kernel, carried out with the number of roundings of each term."""
    rng = np.random.default_rng(k)
    for neighbours in (1, 5, 63, 64, 65, 511, 513, 5000, *rng.integers(600, 300_000, 4)):
        for nnz in (2 * neighbours, 1 << 19, 1 << 24):
            if nnz >= 2 * neighbours:
                found = most_rounded(int(neighbours), segment_length(int(nnz)), k, dtype)
                assert found <= roundings(neighbours, k), (neighbours, nnz)


def most_rounded(neighbours: int, segment: int, k: int, dtype: str) -> int:
    """Roundings of the term that takes most of them; None is an empty sum, which rounds nothing."""
    width = vector_width(k, dtype)
    x, y, _ = column_shape(k, width, least=8)
    lanes = min(x, 1 << max(0, k // width - 1).bit_length())
    splits = x // lanes

    def add(a: int | None, b: int | None) -> int | None:
        return max(a, b) + 1 if a is not None and b is not None else b if a is None else a

    def in_pairs(parts: list[int | None]) -> int | None:
        while len(parts) > 1:
            half = (len(parts) + 1) // 2
            parts = [add(*pair) for pair in zip_longest(parts[:half], parts[half:])]
        return parts[0]

    def shared(count: int, workers: int) -> list[int | None]:
        """The sum of each worker: a fused multiply-add for each neighbour, then the splits."""
        step = workers * splits
        sums = [len(range(first, count, step)) or None for first in range(step)]
        return [in_pairs(sums[w * splits : (w + 1) * splits]) for w in range(workers)]

    if neighbours <= segment:
        return shared(neighbours, 1)[0] or 0
    pieces = [min(segment, neighbours - a) for a in range(0, neighbours, segment)]
    full, last = (in_pairs(shared(count, y)) for count in (segment, pieces[-1]))
    sums = [full] * (len(pieces) - 1) + [last]
    return (in_pairs([reduce(add, sums[row::y], None) for row in range(y)]) or 0) + 1


def star_sum(backend: Any, m: int, k: int, dtype: str, x: Any) -> Any:
    """What the kernels make of a sum over m neighbours; `x` (m,) are the terms."""
    star = Graph.from_edges(np.stack([np.zeros(m, int), np.arange(1, m + 1)]))
    L, one = backend.laplacian(star, dtype), backend.xp.ones(m + 1)
    of_block = one.astype(dtype)
    exact = (one, 0 * one, None)
    L = replace(L, inv_sqrt_degree=of_block, diagonal=0 * of_block, unrounded=lambda: exact)
    X = np.zeros((m + 1, k), dtype)
    X[1:] = x[:, None]
    X = backend.asarray(X)
    product = -backend.to_numpy(backend.apply_H(L, 1.0, X))[0].astype("float64")
    return product, backend.to_numpy(backend.residual_rows(L, 1.0, X, 0.0 * X, 0))[0]


@on_device
@pytest.mark.parametrize("m", [1, 64, 512, 513, 5000])
@pytest.mark.parametrize("k", [1, 3, 8, 40, 256])
def test_sums_round_as_often_as_is_said(backend: Any, m: int, k: int) -> None:
    """Every term behind the first of a thread is lost: half of what the bound allows."""
    for dtype in ("float32", "float64"):
        u = float(np.finfo(dtype).eps) / 2
        x = np.full(m, u / 2, dtype)
        x[0] = 1.0
        exact = math.fsum(x.tolist())
        allowed = roundings(m, k) * exact
        product, residual = star_sum(backend, m, k, dtype, x)
        assert (np.abs(product - exact) <= u * allowed).all()
        assert (np.abs(residual - exact) <= 2.0**-53 * allowed).all()
        if m == 64 and k == 40:  # one thread has the whole row: the bound cannot be smaller
            assert np.abs(product - exact).min() >= 0.45 * u * m


@on_device
def test_hubs_round_no_more_than_a_segment(backend: Any) -> None:
    for m, k in ((513, 64), (10_000, 47), (500_000, 64)):
        assert 512 / 8 <= backend.roundings(m, k) <= 520
    assert backend.roundings(100, 64) == 100
    assert backend.roundings(10**8, 64) < 10**5  # segments are added, too
