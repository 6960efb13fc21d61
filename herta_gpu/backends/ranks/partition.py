"""Who has which nodes: ranges of ids, as METIS finds it, or as a list of owners says.

No rank holds a list of all nodes.  Of a list of owners each keeps what stands there of its own
range of ids, and the others ask it; rank 0 alone has all edges, and only while METIS works on them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.graph import Graph
from herta_gpu.plumbing.files import DataError, load_npy

_COMPARED = 10**9  # entries of a list of owners up to which all of it is compared between ranks
_CHUNK = 1 << 24  # bytes of it that are compared at once
_SAMPLE = 1 << 16  # nodes of a large graph whose neighbours are looked at
_HOW = 'give "blocks", "metis", or a .npy file with the rank of each node'


class Owners(NamedTuple):
    """Who has which nodes."""

    of: Callable[[Any], Any]  # ids to ranks: an exchange, which all ranks come to together
    mine: Any  # this rank's ids, rising
    nodes: Any  # the same, as a slice where they are one

    def at(self, ids: Any) -> Any:
        """Where this rank has these ids, if they are its own."""
        if isinstance(self.nodes, slice):
            return ids - self.nodes.start
        return np.searchsorted(self.mine, ids)


def starts(n: int, size: int) -> Any:
    """Where ranges of (nearly) equal length begin, and the end of the last one."""
    return np.array([n * r // size for r in range(size + 1)])


def owners(team: Ranks, n: int, partition: Any, whole: Callable[[], Graph | None]) -> Owners:
    """The owners that `partition` names; `whole` gives the whole graph, on rank 0 at least."""
    partition = checked_partition(partition)
    kind = partition if partition in ("blocks", "metis") else "a list"
    team.same(kind, "partition", always=True)
    if kind == "blocks":
        first, last = starts(n, team.size)[team.rank : team.rank + 2].tolist()
        ends = starts(n, team.size)
        return Owners(lambda ids: _range(ends, ids), np.arange(first, last), slice(first, last))
    if kind == "metis":
        return _listed(team, n, _by_metis(team, n, whole))
    return _listed(team, n, _own_slice(team, n, partition))


def checked_partition(partition: Any) -> Any:
    """ "blocks", "metis", or an object with the list; a sentence if it is none of them."""
    if isinstance(partition, str) and partition in ("blocks", "metis"):
        return partition
    if not isinstance(partition, (str, os.PathLike)):
        return _Table(np.asarray(partition), "partition")
    path = Path(partition)
    if not path.is_file():
        raise ValueError(f"There is no partition file {path}: {_HOW}.")
    try:
        return _Table(load_npy(path, "a .npy file"), str(path))
    except DataError as error:
        raise ValueError(f"{str(error).rstrip('.')}: {_HOW}.") from None


class _Table(NamedTuple):
    """A list of owners, perhaps mapped from a file."""

    ranks: Any
    name: str


def _own_slice(team: Ranks, n: int, table: _Table) -> Any:
    """What the list says of this rank's range of ids, checked."""
    ranks, name = table
    if ranks.shape != (n,) or ranks.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must name the rank of each of the {n:,} nodes, but holds {ranks.dtype} of "
            f"shape {ranks.shape}."
        )
    team.same(_digest(ranks), "partition", always=True)
    first, last = starts(n, team.size)[team.rank : team.rank + 2].tolist()
    mine = np.asarray(ranks[first:last])
    if mine.size and not 0 <= int(mine.min()) <= int(mine.max()) < team.size:
        raise ValueError(
            f"{name} names rank {mine[(mine < 0) | (mine >= team.size)][0]}, but there are ranks "
            f"0 to {team.size - 1}: it was made for another number of ranks."
        )
    return mine.astype(np.int32)


def _digest(ranks: Any) -> str:
    """What all ranks must have the same of; of a very long list its length and its ends only."""
    found, step = hashlib.sha256(str((ranks.shape, ranks.dtype.str)).encode()), _CHUNK
    ends = (ranks,) if ranks.shape[0] <= _COMPARED else (ranks[:step], ranks[-step:])
    for part in ends:
        for a in range(0, part.shape[0], step):
            found.update(np.ascontiguousarray(part[a : a + step]).data)
    return found.hexdigest()


def _range(ends: Any, ids: Any) -> Any:
    return np.searchsorted(ends, ids, side="right") - 1


def _listed(team: Ranks, n: int, table: Any) -> Owners:
    """Owners from this rank's slice of their list."""
    ends = starts(n, team.size)
    first = int(ends[team.rank])
    mine = team.exchanged([first + np.flatnonzero(table == r) for r in range(team.size)])

    def of(ids: Any) -> Any:
        keeper = _range(ends, ids)
        order = np.argsort(keeper, kind="stable")
        cuts = np.cumsum(np.bincount(keeper, minlength=team.size))[:-1]
        asked = team.exchanged(np.split(ids[order].astype(np.int64), cuts))
        found = np.empty(ids.shape[0], dtype=table.dtype)
        found[order] = np.concatenate(team.exchanged([table[part - first] for part in asked]))
        return found

    ids = np.concatenate(mine)  # slices come in the order of their ids
    return Owners(of, ids, ids)


def _by_metis(team: Ranks, n: int, whole: Callable[[], Graph | None]) -> Any:
    """This rank's slice of the owners that cut few edges; rank 0 finds them and sends them out."""
    graph, ends = whole(), starts(n, team.size).tolist()
    found = np.zeros(0, dtype=np.int32)
    with team.together(), team.patient():
        if team.rank == 0:
            assert graph is not None
            found = metis(graph, team.size)
        return team.exchanged([found[a:b] for a, b in pairwise(ends)])[0]


def metis(graph: Graph, size: int) -> Any:
    """(n,) the rank of each node, so that few edges are cut and each has as much work."""
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            f'partition="metis" needs pymetis ({error}): pip install pymetis.'
        ) from None
    if size == 1 or graph.num_nodes == 0:
        return np.zeros(graph.num_nodes, dtype=np.int32)
    # The work of a row: its neighbours, and what it costs without any.
    work = (np.diff(graph.indptr) + 4).tolist()
    rows = pymetis.CSRAdjacency(graph.indptr, graph.indices)
    return np.asarray(pymetis.part_graph(size, rows, vweights=work)[1], dtype=np.int32)


def rows_moved(graph: Graph, size: int, partition: Any) -> float:
    """Rows that go from rank to rank in a product, in shares of all rows; of a sample if large.

    A node's row goes to every other rank that one of its neighbours is on.
    """
    n, ends = graph.num_nodes, starts(graph.num_nodes, size)
    table = checked_partition(partition)
    ranks = metis(graph, size) if table == "metis" else getattr(table, "ranks", None)
    if n == 0 or size == 1:
        return 0.0
    rows = np.arange(n)
    if n > _SAMPLE:
        rows = np.sort(np.random.default_rng(0).choice(n, _SAMPLE, replace=False))
    first, lengths = graph.indptr[rows], graph.indptr[rows + 1] - graph.indptr[rows]
    row = np.repeat(np.arange(rows.shape[0]), lengths)
    at = np.arange(row.shape[0]) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    near = graph.indices[at]
    here, there = (
        _range(ends, ids) if ranks is None else np.asarray(ranks[ids], dtype=np.int64)
        for ids in (rows, near)
    )  # fmt: skip
    away = there != here[row]
    return np.unique(row[away] * size + there[away]).shape[0] / rows.shape[0]
