"""Algorithm 2: the regularised spectral sparsifier.

L_tilde + I/lam approximates L_hat + I/lam with O(n_lambda log(n) / eps^2) edges, sampled by their
ridge leverage scores l_i = b_i^T (L_hat + I/lam)^-1 b_i, whose sum is n_lambda.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends import backend_of_rows, get_backend
from herta_gpu.backends.base import Array
from herta_gpu.graph import Graph, check_graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.planning.costs import MOST_DRAWS, block_width, sample_size
from herta_gpu.plumbing.building import edge_keys
from herta_gpu.plumbing.checks import (
    MAX_SEED,
    check_choice,
    check_count,
    check_dtype,
    check_positive,
    memory_budget,
)
from herta_gpu.plumbing.targets import Estimator

# K of k = K ln(m), the rows of a sketch.  A score is then off by more than a factor of 3 with
# probability at most 2 m^-1.7 (chi-square tails), and any of the m scores with at most 2 m^-0.7.
SKETCH_CONSTANT = 8.0
# Tolerance of the solves.  The paper prints 2^(1/4), an error larger than the solution; 1e-2 moves
# a score by a few per cent.
SOLVE_TOL = 1e-2


class Sparsifier(Estimator):
    """Sample a graph's edges by ridge leverage scores, keeping its degrees.

    Parameters
    ----------
    lam : float
        The regularisation is I / lam.
    eps : float
        Target: (1 - eps) (L_hat + I/lam) <= L_tilde + I/lam <= (1 + eps) (L_hat + I/lam).
    n_samples : int, optional
        By default C n_lambda ln(n) / eps^2 with C = 4 (measured, not proven; see `planning.costs`).
        When that reaches m, every edge is kept and L_tilde = L_hat; so it is for a number given
        here of more than 100 m.
    scores : {"sketch", "degree"}
        "sketch" is Algorithm 2.  "degree" is (1/d_u + 1/d_v) w / (1 + 1/lam), which needs no
        solve and is an estimate without the sketch's guarantee.
    replace : bool
        True: s draws with replacement, as in the paper.  False: each edge is kept or not, with
        probabilities that sum to s, which gives a better L_tilde for the same s.
    random_state : int
    device, dtype, memory_budget
        As in `HERTA`.

    Attributes
    ----------
    graph_ : Graph
        The sampled and reweighted graph with the degrees of the original: its `to_csr` is L_tilde.
    n_lambda_ : float
        The effective Laplacian dimension Tr[L_hat (L_hat + I/lam)^-1], as the sum of the scores.
    n_samples_ : int
    scores_ : array, one per edge of ``graph.edges()``
        Of a graph that is split by nodes each process has those of its edges.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph, Sparsifier
    >>> g = Graph.from_edges(np.array(np.triu_indices(200, 1)))  # complete: 19,900 edges
    >>> sp = Sparsifier(lam=1.0, eps=0.5).fit(g)
    >>> sp.graph_.num_edges < 0.4 * g.num_edges
    True
    """

    def __init__(
        self,
        lam: float = 1.0,
        eps: float = 0.5,
        n_samples: int | None = None,
        scores: str = "sketch",
        replace: bool = True,
        random_state: int = 0,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
    ) -> None:
        self.lam, self.eps, self.n_samples, self.scores = lam, eps, n_samples, scores
        self.replace, self.random_state = replace, random_state
        self.device, self.dtype, self.memory_budget = device, dtype, memory_budget

    def fit(self, graph: Graph) -> Sparsifier:
        """Score and sample the edges of `graph`."""
        check_graph(graph)
        check_positive("lam", self.lam)
        check_positive("eps", self.eps)
        check_choice("scores", self.scores, ("sketch", "degree"))
        check_count("random_state", self.random_state, least=0, most=MAX_SEED)
        if self.n_samples is not None:
            check_count("n_samples", self.n_samples)
        backend = backend_of_rows(self.device, graph)
        H = RegularizedLaplacian(graph, self.lam, backend, check_dtype(self.dtype))
        how = (self.n_samples, self.eps, self.scores, self.replace, self.random_state)
        with backend.working():
            budget = memory_budget(self.memory_budget, backend.memory_everywhere())
            found = sparsify(H, *how, budget)
        self.graph_, self._scores, self.n_lambda_, self.n_samples_ = found
        return self

    @property
    def scores_(self) -> Any:
        """The scores as a NumPy array; sampling uses them on the device and copies nothing."""
        return get_backend(self.device).to_numpy(self._scores)  # synchronize!


class Sample(NamedTuple):
    """A sampled graph, with the scores that it was sampled by."""

    graph: Graph  # it has the degrees of the original
    scores: Array  # (m,)
    n_lambda: float
    n_samples: int


def sparsify(
    H: RegularizedLaplacian,
    n_samples: int | None,
    eps: float,
    scores: str,
    replace: bool,
    seed: int,
    budget: int,
) -> Sample:
    """Algorithm 2 for H = I + lam L_hat; `Sparsifier` says what the parameters mean."""
    backend, graph, m = H.backend, H.graph, H.graph.num_edges
    if m == 0:
        return Sample(graph, np.zeros(0), 0.0, 0)
    found = sketched_scores(H, seed, budget) if scores == "sketch" else degree_scores(graph, H.lam)
    n_lambda = float(backend.total(float(found.sum())))  # synchronize!
    s = n_samples or sample_size(n_lambda, graph.nodes_of_all, eps)
    if s >= (m if n_samples is None else MOST_DRAWS * m + 1):
        return Sample(graph, found, n_lambda, m)
    # Subsample s rows of B_hat with probabilities l_i / Z; repeated edges are merged.
    weight: Any = backend.asarray(found)
    if graph.order is None:
        factors = backend.sample_edges(weight, s, seed, replace)
    else:  # how the edges are stored does not change which are drawn
        u, v, _ = graph.edges()
        sort = backend.asarray(np.argsort(edge_keys(u, v, graph.num_nodes)))
        factors = backend.xp.empty_like(weight)
        factors[sort] = backend.sample_edges(weight[sort], s, seed, replace)
    return Sample(backend.sampled_graph(graph, factors), found, n_lambda, int(s))


def sketched_scores(H: RegularizedLaplacian, seed: int, budget: int) -> Array:
    """Lines 1-8 of Algorithm 2, in blocks of sketch rows that fit the memory budget."""
    backend, L, n, m = H.backend, H.laplacian(), H.n, H.graph.num_edges
    k = max(4, math.ceil(SKETCH_CONSTANT * math.log(max(m, 2))))
    width = max(1, min(k, -int(backend.largest(-block_width(n, k, H.dtype, budget)))))

    def score(first: int) -> dict[str, Array]:
        rows, key = min(width, k - first), seed + (first // width << 32)
        # Every block has random numbers of its own.  Both lines solve with L_hat + I/lam = H / lam.
        B_S, _ = block_cg(H, backend.sketch_incidence(L, rows, key), SOLVE_TOL)
        Pi_S, _ = block_cg(H, backend.sketch_identity(L, rows, key), SOLVE_TOL)
        part = backend.edge_scores(L, B_S, Pi_S, H.lam)
        # From entries N(0, 1/rows) to entries N(0, 1/k).
        return {"scores": part * (H.lam**2 * rows / k)}

    scores: Array = 0.0
    for part in backend.dealt(range(0, k, width), score):
        scores = scores + part["scores"]
    # A ridge leverage score lies in (0, 1]; the cap removes only sketching noise.
    return backend.xp.clip(scores, 1e-12, 1.0)


def degree_scores(graph: Graph, lam: float) -> Any:
    """w (1/d_u + 1/d_v) / (1 + 1/lam): the score if L_hat were the identity around the edge."""
    u, v, w = graph.edges(stored=True)
    degree = graph.around(graph.degree)
    scores = (1.0 / degree[u] + 1.0 / degree[v]) / (1.0 + 1.0 / lam)
    return np.minimum(1.0, scores if w is None else scores * w)


def effective_dimension(graph: Graph, lam: float, random_state: int = 0) -> float:
    """n_lambda = Tr[L_hat (L_hat + I/lam)^-1] by Hutchinson's estimator with 64 probes.

    Examples
    --------
    >>> from herta_gpu import Graph, effective_dimension
    >>> g = Graph.from_edges([[0], [1]])        # eigenvalues of L_hat: 0 and 1
    >>> abs(effective_dimension(g, lam=1.0) - 0.5) < 0.1
    True
    """
    check_whole(graph, "effective_dimension")
    check_positive("lam", lam)
    backend = get_backend("cpu")
    H = RegularizedLaplacian(graph, lam, backend, "float64")
    rng = np.random.default_rng(random_state)
    probes = rng.choice([-1.0, 1.0], size=(graph.num_nodes, 64))
    if graph.order is not None:  # row i of the graph is the caller's node order[i]
        probes = probes[graph.order]
    Z, _ = block_cg(H, probes, 1e-4)
    # L (L + I/lam)^-1 = I - H^-1, and <g, (I - H^-1) g> = n - <g, H^-1 g> if g holds signs.
    return float(graph.num_nodes - backend.column_dots(probes, Z).mean())
