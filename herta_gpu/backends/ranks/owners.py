"""Which rank has which nodes, known to all of them together.

No rank holds a list of all nodes.  Of a list of owners each keeps what stands there of its own
range of ids, and the others ask it; rank 0 alone has all edges, and only while METIS works on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.graph import Graph
from herta_gpu.plumbing.partition import (
    Table,
    check_ranks,
    check_table,
    checked_partition,
    metis,
    range_of,
    starts,
)

_COMPARED = 10**9  # entries of a list of owners up to which all of it is compared between ranks
_CHUNK = 1 << 24  # bytes of it that are compared at once


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


def owners(team: Ranks, n: int, partition: Any, whole: Callable[[], Graph | None]) -> Owners:
    """The owners that `partition` names; `whole` gives the whole graph, on rank 0 at least."""
    partition = checked_partition(partition)
    kind = partition if partition in ("blocks", "metis") else "a list"
    team.same(kind, "partition", always=True)
    if kind == "blocks":
        first, last = starts(n, team.size)[team.rank : team.rank + 2].tolist()
        ends = starts(n, team.size)
        return Owners(lambda ids: range_of(ends, ids), np.arange(first, last), slice(first, last))
    if kind == "metis":
        return _listed(team, n, _by_metis(team, n, whole))
    return _listed(team, n, _own_slice(team, n, partition))


def _own_slice(team: Ranks, n: int, table: Table) -> Any:
    """What the list says of this rank's range of ids, checked."""
    check_table(table, n)
    team.same(_digest(table.ranks), "partition", always=True)
    first, last = starts(n, team.size)[team.rank : team.rank + 2].tolist()
    mine = np.asarray(table.ranks[first:last])
    check_ranks(table, team.size, mine)
    return mine.astype(np.int32)


def _digest(ranks: Any) -> str:
    """What all ranks must have the same of; of a very long list its length and its ends only."""
    found, step = hashlib.sha256(str((ranks.shape, ranks.dtype.str)).encode()), _CHUNK
    ends = (ranks,) if ranks.shape[0] <= _COMPARED else (ranks[:step], ranks[-step:])
    for part in ends:
        for a in range(0, part.shape[0], step):
            found.update(np.ascontiguousarray(part[a : a + step]).data)
    return found.hexdigest()


def _listed(team: Ranks, n: int, table: Any) -> Owners:
    """Owners from this rank's slice of their list."""
    ends = starts(n, team.size)
    first = int(ends[team.rank])
    mine = team.exchange_rows([first + np.flatnonzero(table == r) for r in range(team.size)])

    def of(ids: Any) -> Any:
        keeper = range_of(ends, ids)
        order = np.argsort(keeper, kind="stable")
        cuts = np.cumsum(np.bincount(keeper, minlength=team.size))[:-1]
        asked = team.exchange_rows(np.split(ids[order].astype(np.int64), cuts))
        found = np.empty(ids.shape[0], dtype=table.dtype)
        found[order] = np.concatenate(team.exchange_rows([table[part - first] for part in asked]))
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
        return team.exchange_rows([found[a:b] for a, b in pairwise(ends)])[0]
