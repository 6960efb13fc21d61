"""How nodes are shared out to ranks: ranges of ids, as METIS finds it, or a list of owners.

Nothing here needs MPI: `herta plan` counts what would be moved without any other process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.plumbing.building import distinct
from herta_gpu.plumbing.files import DataError, load_npy

# What a row costs, in neighbours, beside its own: it comes from memory and goes there, while good
# parts find their neighbours in the caches.  Measured at 64 columns: 16 to 34.
_ROW = 24
_SAMPLE = 1 << 16  # nodes of a large graph whose neighbours are looked at
_HOW = 'give "blocks", "metis", or a .npy file with the rank of each node'


def checked_partition(partition: Any, n: int | None = None) -> Any:
    """ "blocks", "metis", or the ranks of n nodes, perhaps mapped; a sentence if it is none."""
    if isinstance(partition, str) and partition in ("blocks", "metis"):
        return partition
    ranks, name = partition, "partition"
    if isinstance(partition, (str, os.PathLike)):
        name = str(partition)
        if not Path(partition).is_file():
            raise ValueError(f"There is no partition file {name}: {_HOW}.")
        try:
            ranks = load_npy(Path(partition), "a .npy file")
        except DataError as error:
            raise ValueError(f"{str(error).rstrip('.')}: {_HOW}.") from None
    ranks = np.asarray(ranks)
    if n is not None and (ranks.shape != (n,) or ranks.dtype.kind not in "iu"):
        held = f"{ranks.dtype} of shape {ranks.shape}"
        raise ValueError(f"{name} must name the rank of each of the {n:,} nodes, but holds {held}.")
    return ranks


def check_ranks(size: int, part: Any) -> None:
    """A sentence unless this part of a list names ranks that there are."""
    wrong = part[(part < 0) | (part >= size)]
    if wrong.size:
        raise ValueError(
            f"partition names rank {wrong[0]}, but there are ranks 0 to {size - 1}: it was made "
            "for another number of ranks."
        )


def starts(n: int, size: int) -> Any:
    """Where ranges of (nearly) equal length begin, and the end of the last one."""
    return np.array([n * r // size for r in range(size + 1)])


def range_of(ends: Any, ids: Any) -> Any:
    """The range, as `starts` has them, in which each id lies."""
    return np.searchsorted(ends, ids, side="right") - 1


def metis(graph: Any, size: int) -> Any:
    """(n,) the rank of each node, so that few edges are cut and each has as much work."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            f'partition="metis" needs pymetis ({error}): pip install "herta_gpu[metis]".'
        ) from None
    if size == 1 or graph.num_nodes == 0:
        return np.zeros(graph.num_nodes, dtype=np.int32)
    work = np.diff(graph.indptr) + _ROW
    rows = pymetis.CSRAdjacency(graph.indptr, graph.indices)
    return np.asarray(pymetis.part_graph(size, rows, vweights=work)[1], dtype=np.int32)


def rows_moved(graph: Any, size: int, partition: Any) -> float:
    """Rows that go from rank to rank in a product, in shares of all rows; of a sample if large.

    A node's row goes to every other rank that one of its neighbours is on.
    """
    n, ends = graph.num_nodes, starts(graph.num_nodes, size)
    ranks = checked_partition(partition, n)
    if isinstance(ranks, str):
        ranks = metis(graph, size) if ranks == "metis" else None
    rows = np.arange(n)
    if n > _SAMPLE:
        rows = np.sort(np.random.default_rng(0).choice(n, _SAMPLE, replace=False))
    first, lengths = graph.indptr[rows], graph.indptr[rows + 1] - graph.indptr[rows]
    row = np.repeat(np.arange(rows.shape[0]), lengths)
    at = np.arange(row.shape[0]) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    here, there = (
        range_of(ends, ids) if ranks is None else np.asarray(ranks[ids], dtype=np.int64)
        for ids in (rows, graph.indices[at])
    )
    check_ranks(size, there)
    away = there != here[row]
    sent = distinct(np, np.sort(row[away] * size + there[away]))
    return sent.shape[0] / max(1, rows.shape[0])
