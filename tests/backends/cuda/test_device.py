"""How long rows are cut, and how often their sums are rounded."""

from __future__ import annotations

from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from herta_gpu.app import device_checks as checks
from herta_gpu.backends.cuda.device import (
    SEGMENT,
    SHORTEST,
    column_shape,
    roundings,
    segment_length,
    vector_width,
)


def test_a_segment_is_no_longer_than_the_rest_of_the_graph_takes() -> None:
    lengths = [segment_length(nnz) for nnz in range(0, 1 << 22, 999)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {64, 128, 256, 512}
    assert (lengths[0], lengths[-1]) == (SHORTEST, SEGMENT)
    # A quarter of a microsecond a neighbour, against 64 ps for each non-zero of the graph.
    for nnz in (1 << 19, 1 << 20, 1 << 21):
        assert 0.25e-6 * segment_length(nnz) <= 64e-12 * nnz * 1.01


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
