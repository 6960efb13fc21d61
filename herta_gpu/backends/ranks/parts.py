"""split="nodes": the part of a graph that one rank has, and the rows it fetches from others.

A part is a CSR matrix of the rank's own rows.  Its columns are the own nodes and, behind them, the
halo: nodes of other ranks with an edge to one of these.  A product with H needs their rows of the
block, which `Halo.extended` fetches; the kernels then work on the longer block as on any other.

No rank holds a list of all nodes.  Of a list of owners each keeps what stands there of its own
range of ids, and the others ask it; rank 0 alone has all edges, and only while METIS works on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import scipy.sparse as sp
from scipy.sparse import csgraph

from herta_gpu.backends.base import Array, Exact
from herta_gpu.backends.ranks.communicator import Ranks, ranks_of
from herta_gpu.graph import Edges, Graph, read_only
from herta_gpu.plumbing.building import distinct, row_sums
from herta_gpu.plumbing.checks import check_edges, check_weights
from herta_gpu.plumbing.partition import (
    check_ranks,
    checked_partition,
    metis,
    range_of,
    starts,
)

_FEW_NODES = 1 << 26  # up to here edges are merged under the caller's ids


# ---- who has which edges and nodes -------------------------------------------------------
def shared_graph(
    comm: Any, listed: tuple[Any, Any, Any, str | None], folder: Any, split: str, partition: Any
) -> Graph:
    """`Graph.from_edges` of the edges that all ranks have `listed`, with weights and duplicates."""
    edge_index, num_nodes, edge_weight, duplicates = listed
    team = ranks_of(comm)
    with team.together():
        n, edges = 0, np.zeros((2, 0), dtype=np.int64)
        if num_nodes is not None or np.size(edge_index):
            edges, n, _ = check_edges(edge_index, num_nodes)
        edges = np.ascontiguousarray(edges, dtype=np.int64)
        weights = check_weights(edge_weight, edges.shape[1])
        team.same((num_nodes, split), "num_nodes and split", always=True)
        # A rank without edges has no weights to give.
        plain = team.each(None if not edges.shape[1] else weights is None)
        if {True, False} <= set(plain):
            raise ValueError("Some ranks give edge_weight and some do not: give it on all or none.")
        n = int(team.largest(n))
        if False not in plain:
            weights = None
        else:
            weights = np.asarray(np.zeros(0) if weights is None else weights, dtype=np.float64)
        if split == "columns" or team.size == 1:
            ends = team.gather(np.ascontiguousarray(edges.T))[0].T
            weights = None if weights is None else team.gather(weights)[0]
            return Graph.from_edges(ends, n, weights, duplicates, folder).with_team(team)
        if folder is not None:
            raise ValueError('folder= needs split="columns".')

        def whole() -> Graph | None:  # without weights, on rank 0 alone
            none = edges.T[:0]
            found = team.exchange_rows([edges.T if r == 0 else none for r in range(team.size)])
            return Graph.from_edges(np.concatenate(found).T, n) if team.rank == 0 else None

        held = owners(team, n, partition, whole)
        # Each rank gets all edges of its nodes: of the graph of these it has the own rows whole.
        first, second = map(held.of, edges)
        there = [np.flatnonzero((first == r) | (second == r)) for r in range(team.size)]
        ends = np.concatenate(team.exchange_rows([edges[:, at].T for at in there])).T
        if weights is not None:
            weights = np.concatenate(team.exchange_rows([weights[at] for at in there]))
        names = None
        if n > _FEW_NODES:  # no table of all nodes: the messages of errors then name others
            names, found = np.unique(np.append(held.mine, ends), return_inverse=True)
            ends = found[held.mine.shape[0] :].reshape(ends.shape)
        size = n if names is None else max(1, names.shape[0])
        graph = Graph.from_edges(ends, size, weights, duplicates)
        return part_of(team, held, graph, n, names)


def on_all_ranks(comm: Any, graph: Any, split: str, partition: Any) -> Any:
    """A graph that every rank of `comm` has, for all of them; or, by nodes, this rank's part."""
    team = ranks_of(comm)
    with team.together():
        sizes = team.each((graph.num_nodes, graph.num_edges, graph.weights is None))
        if len(set(sizes)) > 1:
            raise ValueError(
                "The ranks have different graphs: give each the whole one, or its share of the "
                "edges to Graph.from_edges(..., comm=comm)."
            )
        team.same(graph.indices, "graph")
        if split == "columns" or team.size == 1:
            return graph.with_team(team)
        held = owners(team, graph.num_nodes, partition, lambda: graph)
        if graph.order is not None:
            raise ValueError(
                'A graph that was reordered is not split by nodes: use split="columns".'
            )
        return part_of(team, held, graph, graph.num_nodes)


class Owners(NamedTuple):
    """Who has which nodes."""

    of: Callable[[Any], Any]  # ids to ranks: an exchange, which all ranks come to together
    mine: Any  # this rank's ids, rising
    nodes: Any  # the same, as a slice where they are one


def owners(team: Ranks, n: int, partition: Any, whole: Callable[[], Graph | None]) -> Owners:
    """The owners that `partition` names; `whole` gives the whole graph, on rank 0 at least."""
    partition, ends = checked_partition(partition), starts(n, team.size)
    first, last = ends[team.rank : team.rank + 2].tolist()
    kind = partition if isinstance(partition, str) else "a list"
    team.same(kind, "partition", always=True)
    if kind == "blocks":
        return Owners(lambda ids: range_of(ends, ids), np.arange(first, last), slice(first, last))
    # Of a list of owners this rank has what it says of the ids first..last.
    if kind == "metis":
        graph, found = whole(), np.zeros(0, dtype=np.int32)
        with team.together(), team.patient():
            if graph is not None and team.rank == 0:
                found = metis(graph, team.size)
            table = team.exchange_rows([found[a:b] for a, b in pairwise(ends)])[0]
    else:
        partition = checked_partition(partition, n)
        team.same(np.ascontiguousarray(partition), "partition", always=True)
        table = np.array(partition[first:last])
        check_ranks(team.size, table)
        table = table.astype(np.int32)

    def of(ids: Any) -> Any:
        keeper = range_of(ends, ids)
        order = np.argsort(keeper, kind="stable")
        cuts = np.cumsum(np.bincount(keeper, minlength=team.size))[:-1]
        asked = team.exchange_rows(np.split(ids[order].astype(np.int64), cuts))
        found = np.empty(ids.shape[0], dtype=table.dtype)
        found[order] = np.concatenate(team.exchange_rows([table[part - first] for part in asked]))
        return found

    mine = team.exchange_rows([first + np.flatnonzero(table == r) for r in range(team.size)])
    ids = np.concatenate(mine)  # slices come in the order of their ids
    return Owners(of, ids, ids)


def part_of(team: Ranks, held: Owners, graph: Graph, n: int, names: Any = None) -> GraphPart:
    """This rank's part of a graph of n nodes, from one that has its rows whole, perhaps in files.

    Those rows are read, and no others; `names` are the ids of the nodes of `graph`, if not its own.
    """
    nodes = held.nodes if names is None else np.searchsorted(names, held.mine)
    at: Any
    if isinstance(nodes, slice):
        lengths = np.diff(graph.indptr[nodes.start : nodes.stop + 1])
        at = slice(int(graph.indptr[nodes.start]), int(graph.indptr[nodes.stop]))
    else:
        first = graph.indptr[nodes]
        lengths = graph.indptr[nodes + 1] - first
        at = np.arange(lengths.sum()) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = graph.indices[at] if names is None else names[graph.indices[at]]
    value = None
    if team.largest(int(graph.weights is not None)):  # on another rank all weights may be 1
        value = np.ones(column.shape[0]) if graph.weights is None else np.array(graph.weights[at])
    loopless = lengths.astype(np.float64)
    if value is not None:
        loopless = row_sums(value, indptr, np.zeros(lengths.shape[0]))
    given = graph.given_degree
    degree = loopless + 1.0 if given is None else np.array(given[nodes])
    upper = np.count_nonzero(column > np.repeat(held.mine, lengths))
    # The own columns come first, then those of other ranks, by rank and by id.
    ranks, local, wanted, start = held.of(column), np.empty_like(column), [], lengths.shape[0]
    for r in range(team.size):
        there = np.flatnonzero(ranks == r)
        if r == team.rank:
            local[there], ids = np.searchsorted(held.mine, column[there]), held.mine[:0]
        else:
            ids, found = np.unique(column[there], return_inverse=True)
            local[there] = start + found
        wanted.append(ids.astype(np.int64))
        start += ids.shape[0]
    send = [np.searchsorted(held.mine, ids) for ids in team.exchange_rows(wanted)]
    halo = Halo(team, send, [ids.shape[0] for ids in wanted], lengths.shape[0])
    return GraphPart(
        indptr,
        local.astype(np.int32),
        value,
        degree,
        None,
        team,
        halo,
        held.nodes,
        np.concatenate([held.mine, *wanted]),
        loopless,
        n,
        int(team.total(upper)),
        int(sum(team.each(lengths.shape[0])[: team.rank])),
    )


class Halo:
    """Rows of other ranks that this one's rows have an edge to, and who wants which of these."""

    def __init__(self, team: Ranks, send: list[Any], counts: list[int], n: int) -> None:
        self.team, self.send, self.n = team, send, n
        self.ends = (n + np.cumsum([0, *counts])).tolist()
        self._kept: dict[Any, Any] = {}

    @property
    def size(self) -> int:
        """Rows that come from other ranks."""
        return int(self.ends[-1] - self.n)

    def cut(self, columns: Any) -> tuple[Halo, Any, Any]:
        """The halo of these columns alone, their new numbers, and which of its rows are left."""
        seen = distinct(np, np.sort(columns[columns >= self.n]))
        cuts = np.searchsorted(seen, self.ends)
        wanted = [seen[a:b] - start for start, (a, b) in zip(self.ends, pairwise(cuts))]
        sent = self.team.exchange_rows(wanted)
        send = [rows[at] for rows, at in zip(self.send, sent, strict=True)]
        number = np.where(columns < self.n, columns, self.n + np.searchsorted(seen, columns))
        counts = [part.shape[0] for part in wanted]
        halo = Halo(self.team, send, counts, self.n)
        return halo, number.astype(columns.dtype), seen - self.n

    def extended(self, X: Array, fill: Callable[[Array], Any] | None = None, to: str = "") -> Array:
        """X with the halo's rows behind its own; `fill` writes the own ones, by default X.

        With a name (`to`) it is looked at only until the next call: the same array is used again
        and again.
        """
        G = self._again(to, (self.ends[-1], X.shape[1]), X.dtype)
        if fill is None:
            G[: self.n] = X
        else:
            fill(G[: self.n])
        out = []
        for r, rows in enumerate(self.send):
            out.append(self._again(("sent", r), (rows.shape[0], X.shape[1]), X.dtype))
            np.take(G, rows, axis=0, out=out[r], mode="clip")  # without a copy, as none is outside
        into = [G[a:b] for a, b in pairwise(self.ends)]
        self.team.exchange(out, into, "rows of neighbours")
        return G

    def _again(self, to: Any, shape: tuple[int, int], dtype: Any) -> Array:
        """An array of this name and shape, the one of the last time if there was one."""
        key = (to, shape, dtype)
        if not to:
            return np.empty(shape, dtype=dtype)
        if key not in self._kept:
            self._kept[key] = np.empty(shape, dtype=dtype)
        return self._kept[key]


@dataclass(frozen=True, eq=False, repr=False)
class GraphPart(Graph):
    """The rows of a graph that one rank has; see `Graph.from_edges` with split="nodes"."""

    halo: Any = None  # a `Halo`
    nodes: Any = None  # this rank's ids
    ids: Any = None  # the same as an array, and those of the halo behind them
    loopless_degree: Any = None
    nodes_of_all: Any = 0
    num_edges: Any = 0  # of the whole graph
    first_row: int = 0  # rows of the ranks before this one
    by_nodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ids", read_only(self.ids))
        assert self.lambda_max_bound >= 0  # all ranks find it together, now

    @cached_property
    def lambda_max_bound(self) -> float:
        """`Graph.lambda_max_bound` of the whole graph."""
        ratio = self.around(self.loopless_degree / self.degree)
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        most = float((ratio[row] + ratio[self.indices]).max(initial=0.0))
        return float(self.halo.team.largest(most)) * (1 + 1e-12)

    def around(self, x: Any) -> Any:
        return self.halo.extended(x[:, None])[:, 0]

    def rows_of(self, nodes: Any) -> Any:
        return np.flatnonzero(np.isin(self.ids[: self.num_nodes], nodes))

    def gathered(self, rows: Any) -> Any:
        team, rows = self.halo.team, np.asarray(rows)
        with team.together():
            if rows.shape[:1] != (self.num_nodes,):
                raise ValueError(
                    f"rows has shape {rows.shape}, but there are {self.num_nodes:,} nodes here."
                )
            found, ids = (team.gather(x)[0] for x in (rows, self.ids[: self.num_nodes]))
        whole = np.empty_like(found)
        whole[ids] = found
        return whole

    def exact(self) -> Exact:
        """`Laplacian.exact`, D^-1/2 of the halo behind that of the own rows."""
        s = self.around(1.0 / np.sqrt(self.degree))
        return s, self.loopless_degree / self.degree, self.weights

    def connected_to(self, rows: Any) -> Any:
        """`Graph.connected_to` of the training rows of all ranks."""
        n, size = self.num_nodes, self.ids.shape[0]
        ends = np.concatenate([self.indptr, np.full(size - n, self.indptr[-1])])
        ones = np.ones(self.indices.shape[0], dtype=bool)
        here = sp.csr_array((ones, self.indices, ends), shape=(size, size))
        label = csgraph.connected_components(here, directed=False)[1]
        hit, reached = np.zeros((size, 1), dtype=bool), np.zeros(label.max(initial=-1) + 1, bool)
        hit[rows] = True
        while True:  # each turn carries it into the components of other ranks that are next
            before = int(reached.sum())
            reached[label[hit[:, 0]]] = True
            if not self.halo.team.largest(int(reached.sum()) - before):
                return reached[label[:n]]
            hit = self.halo.extended(reached[label[:n], None])

    # ---- edges ----------------------------------------------------------------------------
    # An edge is numbered, scored and drawn by the rank that has its end with the smaller id.
    @cached_property
    def upper(self) -> Any:
        """(nnz,) which entries are this rank's edges: they come in the order of `Graph.edges`."""
        return self.ids[self.indices] > np.repeat(self.ids[: self.num_nodes], np.diff(self.indptr))

    def edges(self, stored: bool = True) -> Edges:
        """(u, v, weight) of this rank's edges, the ends as rows of a block with its halo."""
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))[self.upper]
        weight = None if self.weights is None else self.weights[self.upper]
        return row, self.indices[self.upper].astype(np.int64), weight

    def sums_before(self, x: Any) -> Any:
        """For each of this rank's edges the sum of the x >= 0, whole numbers, of all edges before.

        The order is that of `Graph.edges` in one process: by the smaller id, then by the other.
        """
        team, mine = self.halo.team, self.ids[: self.num_nodes]
        ends = np.concatenate([[0], np.cumsum(self.upper)])[self.indptr]
        within = np.concatenate([[0], np.cumsum(x)])
        sums = within[ends[1:]] - within[ends[:-1]]
        # Ranges of ids have a rank each, which adds up the rows of that range.
        at = (mine * team.size) // max(self.nodes_of_all, 1)
        cuts = np.searchsorted(at, np.arange(team.size + 1))
        came = team.exchange_rows([np.column_stack([mine, sums])[a:b] for a, b in pairwise(cuts)])
        ids, values = np.concatenate(came).T
        sort = np.argsort(ids)
        before = np.empty_like(values)
        before[sort] = np.cumsum(values[sort]) - values[sort]
        before += sum(team.each(int(values.sum()))[: team.rank])
        back = np.split(before, np.cumsum([part.shape[0] for part in came])[:-1])
        rows = np.concatenate(team.exchange_rows(back))
        return within[:-1] + np.repeat(rows - within[ends[:-1]], np.diff(ends))

    def with_edges(self, keep: Any, factor: Any) -> GraphPart:
        """`Graph.with_edges` of this rank's edges; those who have the other ends are told."""
        team, n = self.halo.team, self.num_nodes
        row = np.repeat(np.arange(n), np.diff(self.indptr))
        factors = np.zeros(self.indices.shape[0])
        factors[self.upper] = np.where(keep, factor, 0.0)
        mine, theirs = self.ids[row], self.ids[self.indices]
        owner = np.searchsorted(self.halo.ends, self.indices, side="right") - 1
        owner[self.indices < n] = team.rank
        # Between two ranks both know the edges: in the order of their ends nothing has to be named.
        told = [factors[self.upper & (owner == r)] for r in range(team.size)]
        for r, found in enumerate(team.exchange_rows(told)):
            at = np.flatnonzero(~self.upper & (owner == r))
            factors[at[np.lexsort((mine[at], theirs[at]))]] = found
        kept = np.flatnonzero(factors)
        weights = factors[kept] if self.weights is None else self.weights[kept] * factors[kept]
        halo, columns, still = self.halo.cut(self.indices[kept])
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row[kept], minlength=n))])
        return replace(
            self,
            indptr=indptr.astype(np.int64),
            indices=columns,
            weights=weights,
            halo=halo,
            ids=np.concatenate([self.ids[:n], self.ids[n:][still]]),
            loopless_degree=row_sums(weights, indptr, np.zeros(n)),
            num_edges=int(team.total(int(np.count_nonzero(self.upper[kept])))),
        )

    def in_local_order(self, find: Any = None) -> Graph:
        return self

    def _whole(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError('A graph that is split by nodes cannot do this: use split="columns".')

    to_csr = adjacency = reordered = save = to_cugraph = __reduce__ = _whole

    def __repr__(self) -> str:
        here, n = self.num_nodes, self.nodes_of_all
        return f"GraphPart({here:,} of {n:,} nodes, {self.num_edges:,} edges in all)"
