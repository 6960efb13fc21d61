"""From an edge list to a graph: CSR, degrees, and everything the Laplacian needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from herta_gpu.plumbing.building import (
    LARGE,
    WORTH,
    build,
    by_community,
    by_degree,
    components,
    of_edges,
    permuted,
    reverse_cuthill_mckee,
    row_sums,
)
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.columns import edges_of_frame, is_frame
from herta_gpu.plumbing.files import GraphWriter, open_graph
from herta_gpu.plumbing.interop import is_sparse, on_device

if TYPE_CHECKING:
    from herta_gpu.backends.ranks.communicator import Ranks

_GATHERED = 1 << 20  # neighbours looked at together
_QUICK = 10**6  # edges up to which `repr` looks for components
Edges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64] | None]


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """An undirected graph with self-loops, as the paper assumes it (Section 4).

    Stored once: the CSR arrays of A without self-loops, and the degrees D *with* them.  The
    Laplacian is L = D^-1/2 (diag(A 1) - A) D^-1/2; for a graph made by `from_edges` this is
    L_hat = I - D^-1/2 (A + self-loops) D^-1/2.  The incidence matrix B_hat is never stored.
    Its arrays are read-only: compiled code relies on ids that were checked once.

    Examples
    --------
    >>> from herta_gpu import Graph
    >>> g = Graph.from_edges([[0, 1, 2], [1, 2, 0]], num_nodes=4)
    >>> g
    Graph(4 nodes, 3 edges, unweighted, 1 isolated node, 2 components)
    >>> g.to_csr().toarray().round(2).tolist()[3]
    [0.0, 0.0, 0.0, 0.0]
    """

    indptr: NDArray[np.int64]  # (n + 1,)
    indices: NDArray[Any]  # (2m,) int32, or int64 from 2^31 nodes on
    weights: NDArray[np.float64] | None = None  # (2m,); None when every weight is 1
    given_degree: NDArray[np.float64] | None = None  # (n,) D; None when each weight is 1, loops too
    order: NDArray[np.int64] | None = None  # row i holds the caller's node order[i]
    team: Ranks | None = None  # the processes that share the work on it; None: this one alone
    by_nodes: ClassVar[bool] = False  # whether each process has its nodes only
    made_on: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        for name in ("indptr", "indices", "weights", "given_degree", "order"):
            object.__setattr__(self, name, read_only(getattr(self, name)))

    @classmethod
    def from_edges(
        cls,
        edge_index: ArrayLike,
        num_nodes: int | None = None,
        edge_weight: Any = None,
        duplicates: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        comm: Any = None,
        split: str = "columns",
        partition: Any = "blocks",
    ) -> Graph:
        """Build a graph from (2, m) node ids, in any direction and order.

        Without weights every pair is one edge of weight 1, in whichever directions and however
        often it is listed.  With weights, repeats of one direction add up; (u, v) and (v, u) of
        equal weight are one edge, and of different weight an error.  Self-loops follow the same
        rule, missing ones get weight 1, and edges of weight 0 are dropped.

        Parameters
        ----------
        edge_index : array of ints, shape (2, m)
            Or a DataFrame with one edge per row, in columns source and target (src and dst, ...),
            and weight if there is one; see `datasets.from_tables`.
        num_nodes : int, optional
            Needed when the last nodes have no edge; by default the largest id plus one.
        edge_weight : array of m non-negative numbers, optional
        duplicates : {None, "sum"}
            None is the rule above.  "sum" counts the repeats of an edge without weights as its
            weight.
        folder : path, optional
            A new folder that the graph is written to while it is made, and then opened from:
            for graphs that are larger than the memory.  See `save` and `open`.
        comm : mpi4py.MPI.Comm, optional
            Processes that share the work on this graph; each calls this with its share of the
            edges, whichever it is.  Those who have the whole graph use `on_ranks` instead.
        split : {"columns", "nodes"}
            With `comm`: each process gets the whole graph, and they share out blocks of columns;
            or each gets its nodes (`nodes`) only, and gives their rows of X and y to a fit.
        partition : "blocks", "metis", array of n ranks, or the path of a .npy file with one
            With split="nodes": ranges of ids of equal length, so that few edges are cut (by
            pymetis, on the first process), or the process that has each node.

        Notes
        -----
        A memory-mapped `edge_index` is read in parts and may be larger than the memory.

        PyG's `to_undirected` adds the weights of both directions: of an edge that was listed in
        both, each direction has twice its weight afterwards, and so has the edge here.  Its edges
        without weights need no such step here.

        Arrays on a GPU stay there, as do a pair of them (sources, destinations) and a frame of
        cuDF.

        Examples
        --------
        >>> from herta_gpu import Graph
        >>> listed = [[0, 0, 1, 1], [1, 1, 0, 2]]  # 0-1 twice in one direction, once in the other
        >>> Graph.from_edges(listed)
        Graph(3 nodes, 2 edges, unweighted)
        >>> Graph.from_edges(listed, edge_weight=[0.5, 1.5, 2.0, 1.0]).edges()[2].tolist()
        [2.0, 1.0]
        """
        check_choice("duplicates", duplicates, (None, "sum"))
        check_choice("split", split, ("columns", "nodes"))
        if is_frame(edge_index):
            edge_index, edge_weight = edges_of_frame(edge_index, edge_weight)
        if comm is not None:
            from herta_gpu.backends.ranks.parts import shared_graph

            edges = (edge_index, num_nodes, edge_weight, duplicates)
            return shared_graph(comm, edges, folder, split, partition)
        pair = edge_index if isinstance(edge_index, (tuple, list)) else ()
        if on_device(edge_index) or (len(pair) == 2 and all(map(on_device, pair))):
            from herta_gpu.backends import get_backend

            device: Any = get_backend("cuda")
            made: Graph = device.graph_from_edges(edge_index, num_nodes, edge_weight, duplicates)
            return made if folder is None else made.save(folder)
        arrays = build(edge_index, num_nodes, edge_weight, duplicates, folder)
        return cls.open(str(folder), check=False) if arrays is None else cls(*arrays)

    def save(self, folder: str | os.PathLike[str]) -> Graph:
        """Write this graph into a new folder of .npy files; gives the graph opened from there.

        Examples
        --------
        >>> import tempfile
        >>> from herta_gpu import Graph
        >>> with tempfile.TemporaryDirectory() as place:
        ...     g = Graph.from_edges([[0, 1, 2], [1, 2, 0]]).save(place + "/triangle")
        ...     Graph.open(place + "/triangle")
        Graph(3 nodes, 3 edges, unweighted)
        """
        arrays = (self.indptr, self.indices, self.weights, self.given_degree, self.order)
        nnz, weighted = self.indices.shape[0], self.weights is not None
        GraphWriter(folder, self.num_nodes, nnz, weighted).write(*arrays)
        return Graph.open(folder, check=False)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], check: bool = True) -> Graph:
        """The graph in a folder that `save` or `from_edges` wrote.

        Its arrays are memory maps: they are read where and when they are used.  The files must
        stay while the graph is in use.  With `check` they are read once here and compared with
        their checksums, at the speed of the disk; False opens a graph of any size at once.
        """
        return cls(*open_graph(folder, check))

    @classmethod
    def from_sparse(cls, adjacency: Any) -> Graph:
        """The graph of a symmetric sparse matrix; a triangular one is completed.

        Of SciPy's, or of ``cupyx.scipy.sparse``, which stays on the GPU.

        Examples
        --------
        >>> import scipy.sparse as sp
        >>> from herta_gpu import Graph
        >>> Graph.from_sparse(sp.csr_array([[0, 2.0], [2.0, 0]]))
        Graph(2 nodes, 1 edges, weighted)
        """
        if not is_sparse(adjacency) or adjacency.shape != adjacency.shape[:1] * 2:
            raise TypeError("Graph.from_sparse needs a square sparse matrix, of SciPy's or CuPy's.")
        A = adjacency.tocoo(copy=True)
        A.sum_duplicates()
        return cls.from_edges(np.stack([A.row, A.col]), A.shape[0], A.data.astype("float64"))

    @classmethod
    def from_cugraph(cls, G: Any, num_nodes: int | None = None) -> Graph:
        """The graph of a ``cugraph.Graph`` with vertex ids 0..num_nodes-1; see `from_edges`."""
        from herta_gpu.backends.cuda.cugraph import from_cugraph

        return from_cugraph(G, num_nodes)

    def to_cugraph(self) -> Any:
        """This graph as a ``cugraph.Graph``; nodes without an edge are not in it."""
        from herta_gpu.backends.cuda.cugraph import to_cugraph

        return to_cugraph(self)

    def on_ranks(self, comm: Any, split: str = "columns", partition: Any = "blocks") -> Graph:
        """This graph, which every process of the MPI communicator `comm` has, for all of them.

        `HERTA.fit` then shares its work out to them: each calls it with all of X and y.  With
        split="nodes" each gets its nodes only (`nodes`), by `partition` as in `from_edges`, and
        gives their rows; of a graph in files it reads only those.

        Examples
        --------
        >>> from herta_gpu import Graph
        >>> from mpi4py import MPI  # doctest: +SKIP
        >>> g = Graph.from_edges([[0, 1], [1, 2]]).on_ranks(MPI.COMM_WORLD)  # doctest: +SKIP
        """
        from herta_gpu.backends.ranks.parts import on_all_ranks

        check_choice("split", split, ("columns", "nodes"))
        found: Graph = on_all_ranks(comm, self, split, partition)
        return found

    def with_team(self, team: Ranks) -> Graph:
        """This graph, the work on which these processes share."""
        made = copy(self)
        object.__setattr__(made, "team", team)
        return made

    def __reduce__(self) -> Any:  # a copy elsewhere has no part in the work here
        return Graph, (self.indptr, self.indices, self.weights, self.given_degree, self.order)

    @property
    def nodes(self) -> Any:
        """The nodes that this process has, for the rows of X and y; all of them, as a rule."""
        return slice(0, self.num_nodes)

    @property
    def nodes_of_all(self) -> int:
        """The number of nodes that all processes have together."""
        return self.num_nodes

    def gathered(self, rows: Any) -> Any:
        """Rows of all nodes, in the order of their ids, from those of `nodes` in each process.

        Every process gets all of them; all must call it.  Where each has all nodes, `rows` itself.

        Examples
        --------
        >>> import numpy as np
        >>> from herta_gpu import Graph
        >>> Graph.from_edges([[0, 1], [1, 2]]).gathered(np.array([5, 6, 7])).tolist()
        [5, 6, 7]
        """
        return rows

    def around(self, x: Any) -> Any:
        """A number of each node here, with those of neighbours that other processes have behind."""
        return x

    def together(self) -> AbstractContextManager[None]:
        """Around what all processes of this graph do: an error of one is an error of all."""
        return nullcontext() if self.team is None else self.team.together()

    @property
    def num_nodes(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """Edges without self-loops, each counted once."""
        return self.indices.shape[0] // 2

    @property
    def degree(self) -> NDArray[np.float64]:
        """(n,) D, self-loops included; made anew at each call where all weights are 1."""
        return self.loopless_degree + 1.0 if self.given_degree is None else self.given_degree

    @property
    def loopless_degree(self) -> NDArray[np.float64]:
        """A 1: the degrees without self-loops (in L_tilde, those of the sampled edges)."""
        if self.weights is None:
            return np.subtract(self.indptr[1:], self.indptr[:-1], dtype=np.float64)
        return self._row_sums

    @cached_property
    def _row_sums(self) -> Any:
        return read_only(row_sums(self.weights, self.indptr, np.zeros(self.num_nodes)))

    @property
    def num_isolated(self) -> int:
        return int(np.count_nonzero(self.indptr[1:] == self.indptr[:-1]))

    @cached_property
    def num_components(self) -> int:
        """Connected components, isolated nodes included."""
        return components(self)[0]

    def connected_to(self, rows: Any) -> NDArray[np.bool_]:
        """Which stored rows are in a component with one of `rows`; H^-1 mixes no others in."""
        label = components(self)[1]
        hit = np.zeros(self.num_nodes, dtype=bool)
        hit[label[rows]] = True
        return hit[label]

    def edges(self, stored: bool = False) -> Edges:
        """(u, v, weight) of each edge once, without self-loops; weight is None if all are 1.

        The caller's ids; or the rows that hold these nodes, if `stored`.
        """
        row = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        upper = self.indices > row
        lo, hi = row[upper], self.indices[upper].astype(np.int64)
        if self.order is not None and not stored:
            lo, hi = self.order[lo], self.order[hi]
        return lo, hi, None if self.weights is None else self.weights[upper]

    def to_csr(self, device: str | None = None) -> Any:
        """L_hat (of a sampled graph L_tilde) as a CSR matrix, float64, in the caller's order.

        SciPy's for device="cpu", one of ``cupyx.scipy.sparse`` for "cuda"; by default where the
        graph was made.
        """
        if self._wanted_there(device):
            return csr_there(self)
        s, A = sp.diags_array(1.0 / np.sqrt(self.degree)), self._off_diagonal()
        return self._callers_order(s @ (sp.diags_array(self.loopless_degree) - A) @ s)

    def adjacency(self, device: str | None = None) -> Any:
        """A with self-loops as a CSR matrix, float64, in the caller's order; see `to_csr`."""
        if self._wanted_there(device):
            return csr_there(self, with_loops=True)
        loops = sp.diags_array(self.degree - self.loopless_degree)
        return self._callers_order(self._off_diagonal() + loops)

    def _wanted_there(self, device: str | None) -> bool:
        """Whether a matrix for this device is made on a GPU."""
        check_choice("device", device, (None, "cpu", "cuda"))
        return (device or self.made_on) == "cuda"

    def _off_diagonal(self) -> Any:
        data = np.ones(self.indices.shape[0]) if self.weights is None else self.weights
        return sp.csr_array((data, self.indices, self.indptr), shape=(self.num_nodes,) * 2)

    def _callers_order(self, M: Any) -> Any:
        M, inverse = sp.csr_array(M), self.inverse_order()
        M = M if inverse is None else M[inverse][:, inverse]
        M.sort_indices()
        return M

    @cached_property
    def lambda_max_bound(self) -> float:
        """A proven bound of the largest eigenvalue: max of dt_u/d_u + dt_v/d_v over the edges.

        It is the largest row sum of |W^1/2 B D^-1 B^T W^1/2| up to a similarity, dt the degrees
        without self-loops; below 2 for L_hat, and valid for L_tilde, whose diagonal is not 1.
        """
        ratio, most = self.loopless_degree / self.degree, 0.0
        parts = np.arange(0, self.indices.shape[0] + _GATHERED, _GATHERED)
        cuts = np.unique(np.searchsorted(self.indptr, parts)).clip(max=self.num_nodes)
        for a, b in pairwise(cuts.tolist()):
            row = np.repeat(ratio[a:b], np.diff(self.indptr[a : b + 1]))
            others = ratio[self.indices[self.indptr[a] : self.indptr[b]]]
            most = max(most, float((row + others).max(initial=0.0)))
        return most * (1 + 1e-12)

    def reordered(self, method: str = "rcm") -> Graph:
        """The same graph, stored in an order that keeps neighbours close in memory.

        Invisible to the caller: node ids, X, y and results keep the caller's order.

        Parameters
        ----------
        method : {"rcm", "degree", "communities"}
            Reverse Cuthill-McKee, nodes by falling degree, or by community (needs numba; the
            fastest to find, and the best on large real graphs).
        """
        orders = {"rcm": reverse_cuthill_mckee, "degree": by_degree, "communities": by_community}
        check_choice("method", method, tuple(orders))
        return self._permuted(orders[method](self))

    def _permuted(self, p: NDArray[np.int64]) -> Graph:
        """The same graph with node p[i] in row i."""
        order = p if self.order is None else self.order[p]
        degree = None if self.given_degree is None else self.given_degree[p]
        return Graph(*permuted(self, p), degree, order, self.team)

    def in_local_order(self, find: Callable[[Graph, float], Any] | None = None) -> Graph:
        """This graph stored by community if it is large and that pays; else itself.

        A device that can `find` communities itself gets the graph and the share of edges that must
        lie within them, and gives an order or None.
        """
        if self.num_nodes < LARGE or self.order is not None:
            return self
        p = (find or by_community)(self, WORTH)
        return self if p is None else self._permuted(p)

    def reweighted(self, weight: ArrayLike) -> Graph:
        """This graph with every edge multiplied by a weight from 0 to 1, and its degrees kept.

        What an edge loses stays at its two ends, as self-loops do, so that L and all that is proven
        of it mean what they mean of any graph.  Edges of weight 0 are gone.

        Parameters
        ----------
        weight : array (m,)
            One number for each edge, in the order of `edges`: see `similarity`.

        Examples
        --------
        >>> from herta_gpu import Graph
        >>> g = Graph.from_edges([[0, 1], [1, 2]]).reweighted([0.25, 0.0])
        >>> g.edges()[2].tolist(), g.degree.tolist(), g.adjacency().diagonal().tolist()
        ([0.25], [2.0, 3.0, 2.0], [1.75, 2.75, 2.0])
        """
        check_whole(self, "Graph.reweighted")
        weight = np.asarray(weight)
        if weight.shape != (self.num_edges,) or weight.dtype.kind not in "fiub":
            raise ValueError(
                f"weight must hold one number for each of the {self.num_edges:,} edges, not an "
                f"array of shape {weight.shape} and {weight.dtype}."
            )
        if not bool(((weight >= 0) & (weight <= 1)).all()):
            raise ValueError(
                "weight must lie between 0 and 1 on every edge: divide it by its largest, or give "
                "Graph.from_edges an edge_weight, which changes the degrees as well."
            )
        made = self.with_edges(weight > 0, weight.astype(np.float64))
        return made if self.team is None else made.with_team(self.team)

    def with_edges(self, keep: NDArray[np.bool_], factor: NDArray[np.float64]) -> Graph:
        """The edges `keep` of `edges`, weights times `factor`, with this graph's degrees kept."""
        if keep.all():  # as often as a model asks for other weights, at the price of a product
            new = factor[self._edge_of] * (1.0 if self.weights is None else self.weights)
            return Graph(self.indptr, self.indices, new, self.degree, self.order)
        lo, hi, weight = self.edges(stored=True)
        weight = factor[keep] if weight is None else weight[keep] * factor[keep]
        arrays = of_edges(lo[keep], hi[keep], weight, self.num_nodes)
        return Graph(*arrays, self.degree, self.order)

    @cached_property
    def _edge_of(self) -> NDArray[np.int64]:
        """(2m,) which of `edges` each stored entry is."""
        row, n = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr)), self.num_nodes
        keys = np.minimum(row, self.indices) * n + np.maximum(row, self.indices)
        listed = keys[self.indices > row]
        order = np.argsort(listed, kind="stable")
        return order[np.searchsorted(listed, keys, sorter=order)]

    def rows_of(self, nodes: Any) -> Any:
        """Those of these nodes (ids, rising) that are here, as `fit` takes them."""
        return nodes

    def stored(self, nodes: Any) -> Any:
        """The rows that hold these nodes of the caller's."""
        inverse = self.inverse_order()
        return nodes if inverse is None else inverse[nodes]

    def inverse_order(self) -> NDArray[np.int64] | None:
        """The row that holds each of the caller's nodes."""
        if self.order is None:
            return None
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(self.order.shape[0])
        return inverse

    def __repr__(self) -> str:
        kind = "unweighted" if self.weights is None else "weighted"
        parts = [f"{self.num_nodes:,} nodes", f"{self.num_edges:,} edges", kind]
        if self.num_isolated:
            parts.append(f"{self.num_isolated:,} isolated node" + "s" * (self.num_isolated > 1))
        if self.num_edges <= _QUICK and self.num_components > 1:
            parts.append(f"{self.num_components:,} components")
        return f"Graph({', '.join(parts)})"


def csr_there(graph: Graph, with_loops: bool = False) -> Any:
    """L on the GPU as a matrix of CuPy; A with its self-loops, if `with_loops`."""
    from herta_gpu.backends import get_backend

    backend: Any = get_backend("cuda")
    L = backend.laplacian(graph, "float64")
    return backend.laplacian_csr(L, graph.order, backend.loops(graph) if with_loops else None)


def read_only(array: Any) -> Any:
    """A view of a NumPy array that refuses to be written to; the array itself stays as it is."""
    if isinstance(array, np.ndarray) and array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be a herta_gpu.Graph, not {type(graph).__name__}: use Graph.from_edges."
        )


def check_whole(graph: Any, name: str) -> None:
    """`check_graph` of what needs all nodes in one process."""
    check_graph(graph)
    if graph.by_nodes:
        raise ValueError(
            f"{name} does not work on a graph that is split by nodes, as HERTA, SDDSolver and "
            'Sparsifier do: use split="columns".'
        )
