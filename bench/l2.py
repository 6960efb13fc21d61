"""Does another order of the nodes save memory traffic on a GPU?  A simulation of its L2 cache.

    HERTA_DATA=folder python bench/l2.py [--quick]

No GPU is needed, and no time is measured: what is counted are the bytes that one product Y = H X
moves between DRAM and a set-associative LRU cache of 40 MB (A100) and 50 MB (H100), with lines of
128 bytes in sectors of 32.  Addresses come in the order in which `apply_H` of kernels/laplacian.cu
asks for them: blocks of 256 threads, 1,024 of them in a grid that strides down the rows, as many at
once as 108 multiprocessors hold, and all of these in step, neighbour by neighbour.  The two
halves of the A100's cache count as one.  Of large graphs a twentieth of the rows stands for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from common import QUICK, Results, read
from numba import njit

from herta_gpu import Graph
from herta_gpu.datasets import load
from herta_gpu.plumbing.building import edge_keys, of_keys

LINE, SECTOR, WAYS = 128, 32, 16
PROCESSORS, THREADS = 108, 1024  # multiprocessors, and threads on each at an occupancy of 50%
BLOCK, BLOCKS = 256, 1024  # threads of a block, blocks of the grid
SAMPLED, SHARE = 1 << 25, 20  # non-zeros from which one row in so many stands for all


@njit(cache=True)
def access(line, sectors, write, tags, masks, dirty, stamps, now, moved):
    """One line, some of its sectors; adds the bytes from and to DRAM to `moved`."""
    # A multiplicative hash, as no stride of a matrix may favour a set.
    at = (line * 2654435761 >> 8) % tags.shape[0]
    oldest, slot = stamps[at, 0], 0
    for way in range(WAYS):
        if tags[at, way] == line:
            missing = sectors & ~masks[at, way]
            stamps[at, way] = now
            masks[at, way] |= sectors
            if write:
                dirty[at, way] |= sectors
            else:
                moved[0] += SECTOR * count(missing)
            return
        if stamps[at, way] < oldest:
            oldest, slot = stamps[at, way], way
    moved[1] += SECTOR * count(dirty[at, slot])  # what is thrown out is written first
    tags[at, slot], masks[at, slot], stamps[at, slot] = line, sectors, now
    dirty[at, slot] = sectors if write else 0
    if not write:
        moved[0] += SECTOR * count(sectors)


@njit(cache=True)
def count(bits):
    return (bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1) + (bits >> 3 & 1)


@njit(cache=True)
def touch(base, size, write, tags, masks, dirty, stamps, now, moved):
    """The bytes base ... base + size."""
    first, last = base // SECTOR, (base + size - 1) // SECTOR
    for line in range(first // 4, last // 4 + 1):
        sectors = 0
        for sector in range(max(first, 4 * line), min(last, 4 * line + 3) + 1):
            sectors |= 1 << sector - 4 * line
        access(line, sectors, write, tags, masks, dirty, stamps, now, moved)


@njit(cache=True)
def simulate(
    indptr, indices, row_bytes, gather_bytes, scaled, cache_bytes, resident, per_block, cut
):
    """(bytes read, written) of DRAM, and rows done; neighbours are rows of `gather_bytes`.

    Only the first 1 / `cut` of the rows are done, by each wave of blocks.
    """
    n = indptr.shape[0] - 1
    sets = cache_bytes // (LINE * WAYS)
    tags, stamps = np.full((sets, WAYS), -1, np.int32), np.zeros((sets, WAYS), np.int32)
    masks, dirty = np.zeros((sets, WAYS), np.uint8), np.zeros((sets, WAYS), np.uint8)
    moved, now, done = np.zeros(2, np.int64), 0, 0
    # Where the arrays begin; G is X itself unless neighbours are kept in float16.
    X = 0
    G = X if gather_bytes == row_bytes else (n * row_bytes + 511) // 512 * 512
    Y = G + (n * gather_bytes + 511) // 512 * 512 + (n * row_bytes + 511) // 512 * 512
    s = Y + (n * row_bytes + 511) // 512 * 512
    entries = s + (4 * n + 511) // 512 * 512
    for wave in range(0, BLOCKS, resident):
        rows_at_once = min(resident, BLOCKS - wave) * per_block
        for base in range(wave * per_block, n // cut, BLOCKS * per_block):
            last, left, turn = min(base + rows_at_once, n), True, 0
            while left:  # all rows in step, a neighbour each
                left = False
                for i in range(base, last):
                    e = indptr[i] + turn
                    if e >= indptr[i + 1]:
                        continue
                    left, j = True, indices[e]
                    now += 1
                    if e % 8 == 0 or turn == 0:  # a sector holds eight of them
                        touch(entries + 4 * e, 4, False, tags, masks, dirty, stamps, now, moved)
                    if scaled:
                        touch(s + 4 * j, 4, False, tags, masks, dirty, stamps, now, moved)
                    at = G + j * gather_bytes
                    touch(at, gather_bytes, False, tags, masks, dirty, stamps, now, moved)
                turn += 1
            done += last - base
            for i in range(base, last):
                now += 1
                touch(X + i * row_bytes, row_bytes, False, tags, masks, dirty, stamps, now, moved)
                touch(Y + i * row_bytes, row_bytes, True, tags, masks, dirty, stamps, now, moved)
    for at in range(sets):
        for way in range(WAYS):
            moved[1] += SECTOR * count(dirty[at, way])
    return moved[0], moved[1], done


def communities(n: int, m: int, size: int = 2000, inside: float = 0.6) -> Graph:
    """Groups of nodes with most edges among themselves; the order of the nodes tells nothing."""
    rng, parts = np.random.default_rng(0), []
    name = rng.permutation(n)
    for start in range(0, m, 1 << 22):
        count = min(1 << 22, m - start)
        u, away = rng.integers(0, n, count), rng.integers(0, n, count)
        near = np.minimum(u // size * size + away % size, n - 1)
        v = np.where(rng.random(count) < inside, near, away)
        parts.append(edge_keys(name[u], name[v], n)[u != v])
    return Graph(*of_keys(np.concatenate(parts), n))


def graphs() -> Iterator[tuple[str, Graph]]:
    folder = os.environ.get("HERTA_DATA")
    for name in ("ogbn-arxiv", "cnr-2000") if folder else ():
        yield name, load(name, folder).graph
    n, m = (200_000, 2_000_000) if QUICK else (2_449_029, 61_859_140)  # those of ogbn-products
    yield "communities", communities(n, m)
    yield "block model", load(f"synthetic:n={n},m={m},c=47", features=False).graph


def ordered(graph: Graph, name: str) -> Iterator[tuple[str, Graph]]:
    yield "given", graph
    if name in ("ogbn-arxiv", "cnr-2000"):  # the others come in a random order
        yield "random", graph._permuted(np.random.default_rng(0).permutation(graph.num_nodes))
    if name != "block model":  # where no order is local: `in_local_order` finds that out
        yield "communities", graph.reordered("communities")


def rows(graph: Graph, k: int, half: bool, megabytes: int) -> dict[str, Any]:
    """Bytes of one product, and how many it must move at least and at most."""
    n, nnz, lanes = graph.num_nodes, graph.indices.shape[0], max(8, k // 4)
    wide, gathered = 4 * k, (2 if half else 4) * k
    per_block = BLOCK // lanes
    resident = PROCESSORS * THREADS // BLOCK
    cut = SHARE if nnz > SAMPLED else 1
    read, written, done = simulate(
        *(graph.indptr, graph.indices, wide, gathered, not half),
        *(megabytes << 20, resident, per_block, cut),
    )
    plain = 4 * nnz + (12 if half else 16) * n + 2 * n * wide  # all but the neighbours
    return {
        "bytes": int((read + written) * n / done) + 12 * n,  # indptr and the diagonal, once
        "least": plain + (n * gathered if half else 0),
        "most": plain + nnz * gathered,
    }


def main() -> None:
    # What a run that was stopped has found stays: a large graph takes minutes.
    results = Results("l2", again=lambda row: False, any_machine=True)
    keys = ("graph", "order", "columns", "L2_MB", "gathered")
    done = {tuple(row[key] for key in keys) for row in read("l2")[1]}
    for name, graph in graphs():
        before = time.process_time()
        for order, stored in ordered(graph, name):
            spent, share = round(time.process_time() - before, 1), _within(stored)
            for k, half, megabytes in product((32, 64), (False, True), (40, 50)):
                case = (name, order, k, megabytes, "float16" if half else "float32")
                if case in done:
                    continue
                found = rows(stored, k, half, megabytes)
                over = found["bytes"] / found["least"]
                about = {"order_cpu_seconds": spent, "within_4096": share, "over_least": over}
                results.add(**dict(zip(keys, case)), **about, **found)
            before = time.process_time()


def _within(graph: Graph) -> float:
    """The share of the neighbours that are stored within 4,096 rows."""
    row = np.repeat(np.arange(graph.num_nodes, dtype=np.int32), np.diff(graph.indptr))
    row -= graph.indices
    return round(float((np.abs(row, out=row) < 4096).mean()), 3)


if __name__ == "__main__":
    main()
