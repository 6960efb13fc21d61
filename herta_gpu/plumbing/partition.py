"""How nodes are shared out to ranks: ranges of ids, as METIS finds it, or a list of owners.

Nothing here needs MPI: `herta plan` counts what would be moved without any other process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.plumbing.building import distinct
from herta_gpu.plumbing.files import DataError, load_npy

# What a row costs, in neighbours, beside its own: it comes from memory and goes there, while good
# parts find their neighbours in the caches.  Measured at 64 columns: 16 to 34.
_ROW = 24
_SAMPLE = 1 << 16  # nodes of a large graph whose neighbours are looked at
_HOW = 'give "blocks", "metis", or a .npy file with the rank of each node'


class Table(NamedTuple):
    """A list of owners, perhaps mapped from a file."""

    ranks: Any
    name: str


def checked_partition(partition: Any) -> Any:
    """ "blocks", "metis", or the `Table` of a list; a sentence if it is none of them."""
    if isinstance(partition, str) and partition in ("blocks", "metis"):
        return partition
    if not isinstance(partition, (str, os.PathLike)):
        return Table(np.asarray(partition), "partition")
    path = Path(partition)
    if not path.is_file():
        raise ValueError(f"There is no partition file {path}: {_HOW}.")
    try:
        return Table(load_npy(path, "a .npy file"), str(path))
    except DataError as error:
        raise ValueError(f"{str(error).rstrip('.')}: {_HOW}.") from None


def check_table(table: Table, n: int) -> None:
    """A sentence unless the list has an entry for each of n nodes."""
    ranks, name = table
    if ranks.shape != (n,) or ranks.dtype.kind not in "iu":
        held = f"{ranks.dtype} of shape {ranks.shape}"
        raise ValueError(f"{name} must name the rank of each of the {n:,} nodes, but holds {held}.")


def check_ranks(table: Table, size: int, part: Any) -> None:
    """A sentence unless this part of the list names ranks that there are."""
    wrong = part[(part < 0) | (part >= size)]
    if wrong.size:
        raise ValueError(
            f"{table.name} names rank {wrong[0]}, but there are ranks 0 to {size - 1}: it was made "
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
    n, ends, table = graph.num_nodes, starts(graph.num_nodes, size), checked_partition(partition)
    if isinstance(table, Table):
        check_table(table, n)
    ranks = table.ranks if isinstance(table, Table) else None
    ranks = metis(graph, size) if table == "metis" else ranks
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
    if isinstance(table, Table):
        check_ranks(table, size, there)
    away = there != here[row]
    sent = distinct(np, np.sort(row[away] * size + there[away]))
    return sent.shape[0] / max(1, rows.shape[0])
