"""Personalised PageRank whose every number has a bound, and the nodes that are surely at its top.

A walk starts at a seed, follows edges with probability a (`damping`) and starts anew otherwise:
pi = a A D^-1 pi + (1 - a) p, D = A 1 without self-loops.  With S = D^-1/2 A D^-1/2 and lam =
a / (1 - a), that is pi = D^1/2 H^-1 D^-1/2 p: a column of the solver's block for each set of seeds.
A walk that ends at a node without edges starts anew, too.

With r = D^1/2 R, R what is left of the solve: the inverse has no negative entry, its columns sum
to 1 in these coordinates, and D^-1 times it is symmetric.  So no number of a column is off by more
than sum_l |r_l|, nor by more than d_i max_l |r_l| / d_l.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.plumbing.checks import (
    check_choice,
    check_count,
    check_number,
    check_positive,
    node_rows,
)
from herta_gpu.plumbing.interop import of_scipy
from herta_gpu.solver import SDDSolver

_CHUNK = 1 << 19  # numbers of the residual that exist at a time
_MOST = 0.99999  # damping: lam is 1e5 by then
_TRIES = 6  # solves, each to a smaller tolerance, until every number is as exact as asked


class Top(NamedTuple):
    """The best nodes of a set of seeds and their scores, which fall.

    Whoever is in `nodes` and not in `undecided` is proven to be among the exact best ones, and
    whoever is in neither is proven not to be.
    """

    nodes: Any
    scores: Any
    undecided: Any


class PageRank(NamedTuple):
    """Probabilities (n, k), a column for each set of seeds, and what no number is off by more."""

    scores: Any
    error: Any

    def top(self, count: int) -> list[Top]:
        """The `count` nodes with the largest scores, and who is sure, for each set of seeds."""
        check_count("count", count, most=len(self.scores))
        return [_top(*pair, count) for pair in zip(self.scores.T, self.error.T, strict=True)]


def _top(score: Any, error: Any, count: int) -> Top:
    low, high = score - error, score + error
    best = np.argsort(-score, kind="stable")[:count]
    lows, highs = np.sort(low), np.sort(high)
    # Surely among the best: fewer than `count` others can reach its least; surely not: so many do.
    within = len(highs) - np.searchsorted(highs, low, "left") <= count
    outside = len(lows) - np.searchsorted(lows, high, "right") >= count
    return Top(best, score[best], np.flatnonzero(~within & ~outside))


def personalized_pagerank(
    graph: Graph,
    seeds: Any,
    damping: float = 0.85,
    tol: float = 1e-9,
    self_loops: bool = False,
    device: str = "auto",
) -> PageRank:
    """Personalised PageRank of many sets of seeds in one block solve, with a proven bound.

    Parameters
    ----------
    graph : Graph
    seeds : list of sets, or array or SciPy sparse matrix (n, k)
        Each set is a list of node ids, or a dict from ids to weights; or columns of weights.
    damping : float
        Probability to go on, as in networkx and igraph.
    tol : float
        No number shall be off by more than this; what is reached is `error`.
    self_loops : bool
        Walk on A + I, as the models here do, instead of on A.
    device : str
        As in `HERTA`.

    Examples
    --------
    >>> from herta_gpu import Graph, personalized_pagerank
    >>> path = Graph.from_edges([[0, 1, 2, 3], [1, 2, 3, 4]])
    >>> found = personalized_pagerank(path, [[0], {2: 1.0, 4: 3.0}])
    >>> found.scores.round(3).T.tolist()
    [[0.29, 0.33, 0.195, 0.13, 0.055], [0.066, 0.155, 0.233, 0.305, 0.242]]
    >>> best = found.top(2)[1]
    >>> best.nodes.tolist(), best.undecided.tolist(), bool(found.error.max() < 1e-9)
    ([3, 4], [], True)
    """
    check_whole(graph, "personalized_pagerank")
    check_choice("self_loops", self_loops, (False, True))
    check_positive("tol", tol)
    if not 0 <= check_number("damping", damping) <= _MOST:
        raise ValueError(f"damping must lie between 0 and {_MOST}, not {damping!r}.")
    P, at = _distributions(seeds, graph.num_nodes), graph.stored(np.arange(graph.num_nodes))
    stored = graph.degree if self_loops else graph.loopless_degree
    alone, degree = stored[at] == 0, np.where(stored > 0, stored, 1.0)
    walk = Graph(graph.indptr, graph.indices, graph.weights, degree, graph.order)
    degree = degree[at]
    # From nodes without edges a walk starts anew, which only enlarges all other numbers.
    again = 1 / (1 - damping * np.asarray(alone @ P))
    moving = sp.diags_array(np.where(alone, 0.0, 1 / np.sqrt(degree))) @ P
    Z, relative, total = _solved(walk, damping, sp.csr_array(moving), again, (tol, device))
    scores = again * (np.sqrt(degree)[:, None] * Z)
    scores[alone] = (1 - damping) * again * P[alone].toarray()
    rounded = (walk.indptr[1:] - walk.indptr[:-1]).max(initial=0) + 16 + 8 * again
    error = np.minimum(degree[:, None] * relative, total) * ~alone[:, None]
    return PageRank(scores, error + unit_roundoff() * rounded * scores)


def _solved(
    walk: Graph, damping: float, B: Any, scale: Any, how: tuple[float, str]
) -> tuple[Any, Any, Any]:
    """(H^-1 B, what bounds each column's error in pi for a unit of D, and in sum), pi so scaled."""
    lam, (tol, device), Z = damping / (1 - damping), how, None
    if lam == 0:
        return B.toarray(), np.zeros(B.shape[1]), np.zeros(B.shape[1])
    solver, aim = SDDSolver(walk, lam, device=device, dtype="float64"), tol
    for _ in range(_TRIES):
        solver.tol = aim
        Z = solver.solve(B, Z)
        relative, total = (scale * bound for bound in _errors(solver, B, Z))
        worst = float(np.minimum(relative * walk.degree.max(), total).max())
        if worst <= tol or (solver.info_ and solver.info_.status == "stagnated"):
            break
        aim *= min(0.1, 0.3 * tol / worst)
    return Z, relative, total


def _errors(solver: SDDSolver, B: Any, Z: Any) -> tuple[Any, Any]:
    """(max |R_l| / sqrt(d_l), sum |R_l| sqrt(d_l)) of each column, with what is rounded.

    Terms of the residual are rounded as often as there are neighbours, and so are the degrees, in
    either sum by no more than (1 + 2 lam) times that of Z; lam, and the distributions, are rounded
    themselves, which moves pi by some u.
    """
    H, graph, backend = solver.H, solver.graph, solver.backend
    order = np.arange(H.n) if graph.order is None else graph.order
    root, Z = np.sqrt(graph.degree)[:, None], Z[order]
    sides = [np.zeros((2, Z.shape[1])) for _ in range(3)]  # of R, Z and B
    there, step = backend.asarray(Z), max(1, _CHUNK // Z.shape[1])
    for a in range(0, H.n, step):
        rows, b = slice(a, a + step), B[order[a : a + step]].toarray()
        R = backend.to_numpy(H.residual_rows(backend.asarray(b), there, a))
        for found, part in zip(sides, (R, Z[rows], b), strict=True):
            part = np.abs(part)
            np.maximum(found[0], (part / root[rows]).max(axis=0), out=found[0])
            found[1] += (part * root[rows]).sum(axis=0)
    often = 2 * H.most_neighbours + 24
    lost = unit_roundoff() * (often * (1 + 2 * H.lam) * sides[1] + 16 * sides[2])
    relative, total = (sides[0] + lost) * (1 + (H.n + 8) * unit_roundoff())
    return relative, total


def _distributions(seeds: Any, n: int) -> Any:
    """(n, k) CSR: the weights of each set of seeds, which add up to 1."""
    seeds = of_scipy(seeds)
    if isinstance(seeds, (list, tuple)):
        pairs = [(i, j, w) for j, one in enumerate(seeds) for i, w in _weights(one)]
        nodes, sets, weights = np.array(pairs, dtype=np.float64).reshape(-1, 3).T
        at = node_rows(nodes.astype(np.int64), n, "seeds"), sets.astype(np.int64)
        P = sp.csr_array(sp.coo_array((weights, at), shape=(n, len(seeds))))
    elif np.ndim(seeds) == 2 and seeds.shape[0] == n:
        P = sp.csr_array(seeds, dtype=np.float64)
    else:
        raise TypeError(f"seeds must be a list of sets, like [[0], [3, 5]], or an ({n}, k) array.")
    sums = np.asarray(P.sum(axis=0))
    if not (np.isfinite(P.data).all() and (P.data >= 0).all() and sums.all() and sums.size):
        raise ValueError("Each set of seeds needs a node, and finite weights >= 0, not all 0.")
    return P @ sp.diags_array(1 / sums)


def _weights(one: Any) -> Any:
    """The nodes of a set and their weights."""
    if isinstance(one, (str, int, float, np.integer)):
        raise TypeError("seeds must be a list of sets of nodes, like [[0], [3, 5]].")
    return one.items() if isinstance(one, Mapping) else ((i, 1.0) for i in one)
