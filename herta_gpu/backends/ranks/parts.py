"""split="nodes": the part of a graph that one rank has, and the rows it fetches from others.

A part is a CSR matrix of the rank's own rows.  Its columns are the own nodes and, behind them, the
halo: nodes of other ranks with an edge to one of these.  A product with H needs their rows of the
block, which `Halo.extended` fetches; the kernels then work on the longer block as on any other.

No rank holds a list of all nodes (`owners`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp
from scipy.sparse import csgraph

from herta_gpu.backends.base import Array, Exact
from herta_gpu.backends.ranks.communicator import Ranks
from herta_gpu.backends.ranks.owners import Owners
from herta_gpu.graph import Edges, Graph, read_only

_FEW_NODES = 1 << 26  # up to here edges are merged under the caller's ids


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
        seen = np.unique(columns[columns >= self.n])
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
        self.team.neighbours(out, [G[a:b] for a, b in pairwise(self.ends)])
        return G

    def _again(self, to: Any, shape: tuple[int, int], dtype: Any) -> Array:
        """An array of this name and shape, the one of the last time if there was one."""
        key = (to, shape, dtype)
        if not to:
            return np.empty(shape, dtype=dtype)
        if key not in self._kept:
            self._kept[key] = np.empty(shape, dtype=dtype)
        return self._kept[key]


class GraphPart(Graph):
    """The rows of a graph that one rank has; see `Graph.from_edges` with split="nodes"."""

    by_nodes = True
    halo: Halo
    nodes: Any = None  # this rank's ids
    ids: Any  # the same as an array, and those of the halo behind them
    nodes_of_all = num_edges = 0  # of the whole graph
    first_row: int  # rows of the ranks before this one
    loopless_degree: Any = None

    def __init__(self, rows: Any, degrees: Any, sizes: tuple[int, int], **known: Any) -> None:
        """`rows`: indptr, indices and weights; `degrees`: with and without self-loops."""
        known |= dict(zip(("indptr", "indices", "weights"), rows, strict=True))
        known |= dict(zip(("given_degree", "loopless_degree"), degrees, strict=True))
        known |= dict(zip(("nodes_of_all", "num_edges"), sizes, strict=True))
        # The dataclass is frozen: its fields go in by the back door.
        self.__dict__.update(known, order=None, team=known["halo"].team)
        self.__dict__["ids"] = read_only(self.ids)
        self.__post_init__()
        self.__dict__["lambda_max_bound"] = self._bound_lambda_max()

    def _bound_lambda_max(self) -> float:
        """`Graph.lambda_max_bound` of the whole graph."""
        ratio = self.halo.extended((self.loopless_degree / self.degree)[:, None])[:, 0]
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        most = float((ratio[row] + ratio[self.indices]).max(initial=0.0))
        return float(self.halo.team.largest(most)) * (1 + 1e-12)

    def rows_of(self, nodes: Any) -> Any:
        return np.flatnonzero(np.isin(self.ids[: self.num_nodes], nodes))

    @property
    def degree_around(self) -> Any:
        return self.halo.extended(self.degree[:, None])[:, 0]

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
        s = (1.0 / np.sqrt(self.degree))[:, None]
        return self.halo.extended(s)[:, 0], self.loopless_degree / self.degree, self.weights

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

    def edges(self) -> Edges:
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
        count = int(team.total(int(np.count_nonzero(self.upper[kept]))))
        indptr, loopless = _by_row(row[kept], weights, n)
        ids = np.concatenate([self.ids[:n], self.ids[n:][still]])
        known = {"nodes": self.nodes, "ids": ids, "first_row": self.first_row, "halo": halo}
        rows, degrees = (indptr, columns, weights), (self.degree, loopless)
        return GraphPart(rows, degrees, (self.nodes_of_all, count), **known)

    def in_local_order(self, find: Any = None) -> Graph:
        return self

    def _whole(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError('A graph that is split by nodes cannot do this: use split="columns".')

    to_csr = adjacency = reordered = save = to_cugraph = _whole

    def __reduce__(self) -> Any:
        self._whole()

    def __repr__(self) -> str:
        here, n = self.num_nodes, self.nodes_of_all
        return f"GraphPart({here:,} of {n:,} nodes, {self.num_edges:,} edges in all)"


def part_of_edges(
    team: Ranks, held: Owners, edges: Any, n: int, weights: Any, duplicates: str | None
) -> GraphPart:
    """This rank's part, from any share of the edges on each rank."""
    lo, hi, w, loops = _merged(team, held, edges, n, weights, duplicates)
    weighted = bool(team.largest(int(w is not None)))
    w = np.ones(lo.shape[0]) if w is None else w
    m = int(team.total(lo.shape[0]))
    # Each edge is with the owner of its smaller end; the other end's owner needs it, too.
    ranks = held.of(hi)
    there = [np.flatnonzero(ranks == r) for r in range(team.size)]
    ends = team.exchange_rows([np.column_stack([hi[at], lo[at]]) for at in there])
    more = team.exchange_rows([w[at] for at in there])
    row = held.at(np.concatenate([lo, *(e[:, 0] for e in ends)]))
    column, value = np.concatenate([hi, *(e[:, 1] for e in ends)]), np.concatenate([w, *more])
    count = held.mine.shape[0]
    # By id, as in one process: the terms of a row are added in the same order there.
    sort = np.lexsort((column, row))
    indptr, loopless = _by_row(row[sort], value[sort], count)
    degree = loopless + np.ones(count)
    at = held.at(loops[0])
    degree[at] = loopless[at] + loops[1]
    rows = (indptr, column[sort], value[sort] if weighted else None)
    return _part(team, held, rows, (degree, loopless), (n, m))


def part_of_graph(team: Ranks, held: Owners, graph: Graph) -> GraphPart:
    """This rank's part of a graph that every rank has, perhaps in files: its rows are read."""
    if graph.order is not None:
        raise ValueError('A graph that was reordered is not split by nodes: use split="columns".')
    if isinstance(held.nodes, slice):
        a, b = held.nodes.start, held.nodes.stop
        lengths = np.diff(graph.indptr[a : b + 1])
        at: Any = slice(int(graph.indptr[a]), int(graph.indptr[b]))
    else:
        first = graph.indptr[held.mine]
        lengths = graph.indptr[held.mine + 1] - first
        firsts = first - np.cumsum(lengths) + lengths
        at = np.arange(lengths.sum()) + np.repeat(firsts, lengths)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    column, value = graph.indices[at], None if graph.weights is None else graph.weights[at]
    loopless: Any = lengths.astype(np.float64)
    if value is not None:
        row = np.repeat(np.arange(lengths.shape[0]), lengths)
        loopless = np.bincount(row, weights=value, minlength=lengths.shape[0])
    given = graph.given_degree
    degree = loopless + 1.0 if given is None else np.array(given[held.nodes])
    sizes = (graph.num_nodes, graph.num_edges)
    return _part(team, held, (indptr, column, value), (degree, loopless), sizes)


def _part(team: Ranks, held: Owners, rows: Any, degrees: Any, sizes: Any) -> GraphPart:
    """A part from its rows, whose columns are the caller's ids and rise within each row."""
    indptr, column, value = rows
    local, halo, ids = _columns(team, held, column)
    value = None if value is None else np.array(value)
    rows = (indptr.astype(np.int64), local.astype(np.int32), value)
    first = int(sum(team.each(held.mine.shape[0])[: team.rank]))
    return GraphPart(rows, degrees, sizes, nodes=held.nodes, ids=ids, first_row=first, halo=halo)


def _by_row(row: Any, value: Any, count: int) -> tuple[Any, Any]:
    """Where each of the sorted rows begins, and the sum of its values."""
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=count))])
    sums = np.bincount(row, weights=value, minlength=count)
    return indptr.astype(np.int64), sums.astype(np.float64)


def _merged(
    team: Ranks, held: Owners, edges: Any, n: int, weights: Any, duplicates: str | None
) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """(lo, hi, weight) of each edge once, with the owner of lo, and the self-loops given there."""
    ranks = held.of(edges.min(axis=0))
    there = [np.flatnonzero(ranks == r) for r in range(team.size)]
    came = np.concatenate(team.exchange_rows([edges[:, at].T for at in there]))
    given = None
    if team.largest(int(weights is not None)):
        w = np.zeros(0) if weights is None else np.asarray(weights, dtype=np.float64)
        given = np.concatenate(team.exchange_rows([w[at] for at in there]))
    names, ends = np.arange(n), came
    if n > _FEW_NODES:  # no table of all nodes: the messages of errors then name others
        names, ends = np.unique(came, return_inverse=True)
        ends = ends.reshape(came.shape)
    if not came.shape[0]:
        none = np.zeros(0, dtype=np.int64)
        return none, none, None, (none, np.zeros(0))
    small = Graph.from_edges(ends.T, names.shape[0], given, duplicates)
    lo, hi, merged = small.edges()
    extra = small.degree - small.loopless_degree
    named = np.flatnonzero(extra != 1.0)
    named = named[np.isin(names[named], held.mine)]
    return names[lo], names[hi], merged, (names[named], extra[named])


def _columns(team: Ranks, held: Owners, column: Any) -> tuple[Any, Halo, Any]:
    """Columns of a part: own rows first, then those of other ranks, by rank and by id.

    With them the halo, and the id of each column.
    """
    n, ranks, local = held.mine.shape[0], held.of(column), np.empty(column.shape[0], dtype=np.int64)
    wanted, start = [], n
    for r in range(team.size):
        at = np.flatnonzero(ranks == r)
        if r == team.rank:
            local[at], ids = held.at(column[at]), held.mine[:0]
        else:
            ids, found = np.unique(column[at], return_inverse=True)
            local[at] = start + found
        wanted.append(ids.astype(np.int64))
        start += ids.shape[0]
    send = [held.at(ids) for ids in team.exchange_rows(wanted)]
    halo = Halo(team, send, [ids.shape[0] for ids in wanted], n)
    return local, halo, np.concatenate([held.mine, *wanted])
