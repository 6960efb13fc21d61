"""The primitives that need a kernel, documented once.

The algorithms of this package are written once, over a `Backend` and its array module ``xp``
(NumPy or CuPy).  A backend holds only what cannot be said in array operations: the product with
H = I + lam * L, one step of block CG and of Chebyshev, the two Gaussian sketches of Algorithm 2,
edge scores, edge sampling, and the Hadamard sketch of Algorithm 1.

All blocks are row-major n x k.  The randomness of Algorithms 1 and 2 comes from Philox-4x32-10
counters, so the same seed gives the same numbers on every backend, whatever the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from herta_gpu.graph import Graph
from herta_gpu.plumbing.checks import memory_budget
from herta_gpu.plumbing.reading import MappedRows, Part, Reads, check_not_shrunk, mapping_of

Array = Any  # numpy.ndarray or cupy.ndarray, as the backend says
Exact = tuple[Array, Array, Array | None]  # D^-1/2, diag(L) and the weights in float64

CHUNK = 1 << 19  # numbers of a block that `residual_over` computes a residual for at a time

# Philox streams: one number per use, so that no two uses share random bits.
STREAM_INCIDENCE = 0  # Pi_1, keyed by the edge's two ends
STREAM_IDENTITY = 1  # Pi_2, keyed by the node
STREAM_SAMPLE = 2  # edge sampling, keyed by the draw (or by the edge for Bernoulli)
STREAM_SIGNS = 3  # the Rademacher matrix R of the SRHT
STREAM_ROWS = 4  # the uniform rows of the SRHT


def norm(x: Array) -> float:
    """||x||_F as a number of the host.

    NumPy's own wakes the threads of its BLAS, which then spin beside whatever comes next.
    """
    return float((x * x).sum()) ** 0.5  # synchronize!


def unit_roundoff(dtype: Any = np.float64) -> float:
    """The largest relative error of one operation that is rounded to the nearest number.

    >>> unit_roundoff() == 2.0**-53, unit_roundoff("float32") == 2.0**-24
    (True, True)
    """
    return 0.5 * float(np.finfo(dtype).eps)


def keep_probabilities(
    xp: Any, scores: Array, s: int, total: Callable[[Any], Any] = lambda x: x
) -> Array:
    """p = min(1, tau * score) with sum(p) = s: what is capped at 1 is shared out again.

    Where other processes have other edges, `total` adds up over all of them.
    """
    p = xp.minimum(1.0, s * scores / total(scores.sum()))
    for _ in range(50):
        free = p < 1.0
        capped = xp.count_nonzero(~free)
        rest = xp.where(free, scores, 0.0).sum()
        sums = total(xp.stack([p.sum(), 1.0 * capped, 1.0 * p.shape[0] - capped, rest]))
        kept, capped, count, rest = sums.tolist()  # synchronize!
        budget = s - capped
        if budget <= 0 or count == 0 or kept >= s * (1 - 1e-12):
            break
        p = xp.where(free, xp.minimum(1.0, budget * scores / rest), p)
    return p


def score_exponent(m: int, largest: float) -> int:
    """e such that floor(2^e * score) of m scores, none above `largest`, add up exactly in 64 bits.

    It comes from the largest score alone: rounding of the others changes no draw.
    """
    return 61 - int(np.ceil(np.log2(max(m, 2)))) - int(np.ceil(np.log2(largest)))


@dataclass
class Laplacian:
    """L = D^-1/2 (diag(A 1) - A) D^-1/2 on a device, A without self-loops.

    This one form covers the normalised Laplacian L_hat and the sampled L_tilde, whose ``D`` is
    the original one, so that its diagonal (A 1) / D is not 1.
    """

    n: int
    indptr: Array  # (n + 1,) int64
    indices: Array  # (nnz,) int32, or int64 from 2^31 nodes on
    weights: Array | None  # (nnz,) of A; None when every weight is 1
    inv_sqrt_degree: Array  # (n,) D^-1/2
    diagonal: Array  # (n,) diag(L)
    lambda_max: float  # proven upper bound of the largest eigenvalue
    # (n,) int64, row i is the caller's node order[i], which keys the sketches; None: node i.
    order: Array | None = field(default=None, kw_only=True)
    unrounded: Callable[[], Exact] | None = field(default=None, kw_only=True, repr=False)
    cuts: Array = field(default=None, kw_only=True)  # of the rows, into chunks of equal work
    halo: Any = field(default=None, kw_only=True)  # rows of neighbours that other processes have
    around: Array = field(default=None, kw_only=True)  # D^-1/2, that of the halo behind it

    @cached_property
    def exact(self) -> Exact:
        """(D^-1/2, diag(L), weights) in float64, whatever this Laplacian's own precision is.

        A residual must be that of the graph's H, not of an H whose entries were rounded to
        float32.  Made when first asked for: 16 bytes a node.
        """
        if self.inv_sqrt_degree.dtype == np.float64:
            return self.inv_sqrt_degree, self.diagonal, self.weights
        assert self.unrounded is not None
        return self.unrounded()

    @property
    def nnz(self) -> int:
        return int(self.indices.shape[0])


@dataclass
class Halves:
    """D^-1/2 Z in float16, which is what Chebyshev's neighbours are read from.

    Column j is multiplied by 2^e_j, which brings the largest entry of D^-1/2 B to about 2^14, once
    for all iterates: D^-1/2 H^-1 D^1/2 has no negative entry and row sums of 1, so that of
    D^-1/2 H^-1 B is no larger.  What passes 65,504 on the way counts as that.
    """

    G: Array  # n x k uint16, the bits of float16
    up: Array  # (k,) float32, 2^e
    down: Array  # (k,) float32, 2^-e


@dataclass
class CGState:
    """Where k columns of block CG stand; everything of it lives on the device.

    The two methods are the scalar work of a step on the CPU; on a GPU `cg.cu` does the same.
    """

    Z: Array  # n x k, the correction found so far
    R: Array  # n x k, residuals of the recurrence
    P: Array  # n x k, search directions
    HP: Array  # n x k, H P
    rho: Array  # (k,) float64, ||R||^2 by column
    energy: Array  # (k,) float64, a lower bound of ||H^-1 b||_H^2
    tol: float  # a column freezes when ||R|| <= tol * sqrt(energy)
    floor: Array  # (k,) float64, ... or when ||R||^2 <= floor
    active: Array  # (k,) bool
    iterations: Array  # (k,) int64
    scratch: Array | None = field(default=None, kw_only=True)  # n x k, if the backend needs one

    def step_length(self, pHp: Array) -> Array:
        """(k,) alpha = rho / <p, H p>; 0 for frozen columns and where rounding leaves no step."""
        going = self.active & (pHp > 0)
        alpha = np.where(going, self.rho / np.where(going, pHp, 1.0), 0.0)
        return np.where(np.isfinite(alpha), alpha, 0.0)

    def turn(self, alpha: Array, rho: Array) -> Array:
        """(k,) beta, from the new rho = ||R||^2; columns that are done or cannot go on freeze."""
        # ||x||_H^2 grows by alpha * rho with each CG step: that is what tol is relative to.
        self.energy = self.energy + alpha * self.rho
        self.iterations += self.active
        going = self.active & (alpha > 0) & np.isfinite(rho)
        beta = np.where(going, rho / np.where(self.rho > 0, self.rho, 1.0), 0.0)
        self.rho = np.where(going, rho, self.rho)
        self.active = going & (rho > np.maximum(self.tol**2 * self.energy, self.floor))
        return beta


class Blocks:
    """A dense matrix, rows in `order`, that is worked on part by part.

    One that lies in a file, in the order of its rows, is read ahead of its use (`MappedRows`).
    """

    def __init__(self, X: Any, order: Any = None) -> None:
        self.X, self.order = X, order
        self.reads = Reads()  # passes over X so far, their bytes and seconds
        self._mapping = mapping_of(X)
        self._in_rows = MappedRows.of(X) if order is None else None

    def parts(self, wanted: Sequence[Part]) -> Iterator[tuple[slice, Array]]:
        """(rows, X[rows, columns]) in turn; with the next one, a part may be overwritten."""
        file = self._readable()
        if file is not None:
            with closing(file.parts(wanted, self.reads)) as parts:
                for (rows, _), part in zip(wanted, parts, strict=True):
                    yield rows, part
            return
        for rows, columns in wanted:
            yield rows, self.X[rows if self.order is None else self.order[rows], columns]
        self.reads.passes += 1

    def whole_rows(self, columns: int) -> bool:
        """Whether a part with so many of the columns takes the room of whole rows on the device."""
        return False

    def _readable(self) -> MappedRows | None:
        """The file of X if its rows can be read there; a file that was cut short is an error."""
        if self._mapping is not None:
            check_not_shrunk(self._mapping)
        file = self._in_rows
        return file if file is not None and file.still_there() else None


class Team:
    """The processes that share a fit, as this one sees them; here it is alone.

    With several, either each has all rows, and columns are dealt out, or each has some of the rows
    (`backends.ranks`).  What is asked of a team, all processes ask in the same order.
    """

    rank, size = 0, 1  # this process, of so many
    whole = True  # whether each of them has all rows
    first_row = 0  # where not: rows that the processes before this one have

    def total(self, x: Any) -> Any:
        """The sum of all processes' x, in their order; x itself where each has all rows."""
        return x

    # Of one process all of these are x itself.
    largest = total  # the largest of all processes' x; x itself where each has all rows
    least = total  # the smallest of all processes' x, whatever rows they have
    agree = total  # what the first process has: a number, an array, or what can be pickled
    train_on = total  # the ids of all training nodes, rising, from those of this process
    gather = total  # the training rows of all processes, in the order of those ids
    own = total  # this process's rows of what `gather` put together
    join = total  # any rows of all processes, one process after the other

    def same(self, x: Any, what: str, always: bool = False) -> Any:
        """x, of which all processes have the same bits: in a debug mode, or `always`, that is made
        sure of."""
        return x

    def deal(
        self, items: Sequence[Any], work: Callable[[Any], dict[str, Array]]
    ) -> Iterator[dict[str, Array]]:
        """work(item) of each item in turn; processes may share the items out."""
        for item in items:
            yield work(item)


def _of_team(name: str) -> Any:
    """What the team of a backend has by this name."""
    return property(lambda backend: getattr(backend.team, name))


class Backend:
    """What a device must be able to do, and what is done alike on all of them."""

    name: str
    xp: Any
    # What each does in a way of its own: `CPUBackend`, with which all are compared, documents it.
    asarray: Callable[..., Array]
    to_numpy: Callable[..., Any]
    memory_available: Callable[[], int]
    laplacian: Callable[..., Any]
    solve_triangular: Callable[..., Array]  # C^-1 B (or C^-T B) for a lower triangular C
    _triangle: Callable[..., Array | None]  # L of P = L L^T, or None, as the library says
    pivoted_cholesky: Callable[..., tuple[Array, Array]]  # `lapack.pivoted_cholesky`
    apply_H: Callable[..., Array]
    residual_rows: Callable[..., Array]
    column_dots: Callable[..., Array]
    cg_step: Callable[..., None]
    cg_active: Callable[..., int]
    chebyshev_step: Callable[..., None]
    sketch_incidence: Callable[..., Array]
    sketch_identity: Callable[..., Array]
    edge_scores: Callable[..., Array]
    sample_edges: Callable[..., Array]
    srht: Callable[..., Array]
    # Columns that a fit multiplies with H, from which a local order of the nodes pays.
    order_columns = float("inf")
    communities: Callable[[Graph, float], Any] | None = None  # how to find it, if not by the host
    at_once = 1 << 18  # numbers of a block that array operations take at a time
    slowness = 1.0  # of products with H, in the times of the compiled CPU backend
    samples = True  # whether Algorithm 2 works here
    share = 0.8  # of the free memory that a plan may use
    check_every = 1  # CG steps between two looks at the mask of converged columns

    # ---- several processes ----------------------------------------------------------------
    team = Team()
    total, largest, agreed, same = map(_of_team, ("total", "largest", "agree", "same"))
    train_on, gathered, own = map(_of_team, ("train_on", "gather", "own"))
    joined, dealt = map(_of_team, ("join", "deal"))
    rank, ranks, whole = map(_of_team, ("rank", "size", "whole"))
    first_row = _of_team("first_row")

    def with_team(self, team: Team) -> Backend:
        """The same backend, working with other processes."""
        found = copy(self)
        found.team = team
        return found

    def on_part(self, graph: Any) -> Backend:
        """The backend for the part of a graph that this process has, in place of this one."""
        raise ValueError(
            'split="nodes" works on GPUs and on the compiled CPU backend: install numba and use '
            'device="cpu".'
        )

    def memory_everywhere(self) -> int:
        """Bytes that can still be allocated on the device of every process."""
        return self.team.least(self.memory_available())

    def plan_budget(self, wish: int | str | None) -> int:
        """Bytes that a plan may use on every process, which counts what comes and goes."""
        return memory_budget(wish, self.team.least(self.memory_free()), self.share)

    def with_neighbours(self, L: Laplacian, Z: Array) -> Array:
        """Z for `residual_rows`: with the rows of neighbours that other processes have, behind."""
        return Z

    def block_rows(self, L: Laplacian) -> int:
        """Rows of the blocks that `chebyshev` works in: those of such neighbours may be behind."""
        return L.n

    # ---- arrays -------------------------------------------------------------------------
    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An uninitialised array, its rows where this device reads them fastest."""
        return self.xp.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """The same, filled with zeros."""
        return self.xp.zeros(shape, dtype=dtype)

    def padded(self, k: int, dtype: str) -> int:
        """How many columns a block of k should have, zeros behind them, to be read fastest."""
        return k

    def csr(self, M: Any) -> Any:
        """The SciPy CSR matrix `M` on this device."""
        return M

    def host_blocks(self, X: Any, order: Any = None) -> Blocks:
        """The dense X of the host, which stays there; its parts come as arrays of this device."""
        return Blocks(np.asarray(X), order)

    def spooled(
        self, parts: Iterable[tuple[slice, Array]], blocks: Sequence[slice], shape: Any, dtype: str
    ) -> list[Any] | None:
        """Blocks of columns of a matrix whose rows come in parts, in memory of the host that copies
        to the device read fastest; None where that is not to be had."""
        return None

    def matmul(self, A: Array, B: Array) -> Array:
        """A B of dense matrices, by the library that factors them, too."""
        return A @ B

    def add_gram(self, G: Array, A: Array) -> None:
        """G += A^T A in float64."""
        G += A.T @ A

    def for_steps(self) -> Backend:
        """The backend for many dense products with the same rows."""
        return self

    def cholesky(self, P: Array) -> Array | None:
        """L of P = L L^T, or None where there is none: NaN and infinity are no factor."""
        L = self._triangle(P)
        # Whatever is not finite in a row of P, or arises there, reaches the diagonal of L.
        finite = L is not None and math.isfinite(float(L.diagonal().sum()))  # synchronize!
        return L if finite else None

    def thin_svd(self, Q: Array) -> tuple[Array, Array]:
        """(U, s) of Q^T = U diag(s) V^T for a Q with fewer rows than columns; s falls."""
        U, s, _ = self.xp.linalg.svd(Q.T, full_matrices=False)
        return U, s

    def row_space(self, A: Array, cut: float) -> tuple[Array, Array]:
        """(V, R): V orthonormal, the span of A's rows; R upper triangular, (A V)^T A V = R^T R.

        Directions in which A is smaller than `cut` times its size are left out.
        """
        V, s, _ = self.xp.linalg.svd(A.T, full_matrices=False)
        r = int((s > cut * s[0]).sum())  # synchronize!
        return self.xp.ascontiguousarray(V[:, :r]), self.xp.diag(s[:r])

    def profiled(self) -> AbstractContextManager[Any]:
        """Around what a profiler shall record: warm-up and compilation stay outside.

        On a device with kernels of ours this gives the bytes that each of them must move.
        """
        return nullcontext()

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """Around work that shall go to a stream of another library's, by its address.

        The host has no streams.
        """
        return nullcontext()

    def working(self) -> AbstractContextManager[Any]:
        """Around the work of a caller: a device does it on a stream of its own.

        That work comes after what the caller's stream has been given before, and what the caller's
        stream is given afterwards comes after that work.
        """
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked."""

    def memory_free(self) -> int:
        """The same in arrays that stay."""
        return self.memory_available()

    # ---- H = I + lam L -------------------------------------------------------------------
    def residual(
        self, L: Laplacian, lam: float, Z: Array, B: Array, dtype: str, unit: Array
    ) -> tuple[Array, Array]:
        """(R, dots): R = B - (I + lam L) Z in units of `unit`, one power of two by column.

        R_i is computed in float64 as in `residual_rows`, whatever Z, B and R are stored in, and
        rounded once, to `dtype`, when it is stored.  `dots` (2, k) are ||r||^2 and <b + r, z> in
        float64, in the units of B, of the r that was not rounded yet: what is proven from them
        does not know of the precision in which R goes on.

        Examples
        --------
        >>> import numpy as np
        >>> from herta_gpu import Graph
        >>> from herta_gpu.backends import get_backend
        >>> backend, graph = get_backend("cpu"), Graph.from_edges([[0, 1], [1, 2]])
        >>> L, B, unit = backend.laplacian(graph, "float32"), np.ones((3, 2)), np.array([1.0, 0.5])
        >>> Z = np.zeros((3, 2), "float32")
        >>> R, dots = backend.residual(L, 5.0, Z, B, "float32", unit)
        >>> R[0].tolist(), dots.tolist()
        ([1.0, 2.0], [[3.0, 3.0], [0.0, 0.0]])
        """
        (n, k), xp = Z.shape, self.xp
        R, dots = self.empty((n, k), dtype), xp.zeros((2, k))
        rows = max(1, self.at_once // max(k, 1))
        for a in range(0, n, rows):
            at = slice(a, min(a + rows, n))
            b, z = B[at].astype("float64"), Z[at].astype("float64")
            r = self.residual_rows(L, lam, Z, b, a)
            dots += xp.stack([(r * r).sum(axis=0), ((b + r) * z).sum(axis=0)])
            R[at] = r / unit
        return R, dots

    def factor(self, L: Laplacian, lam: float) -> Any:
        """A sparse factor of I + lam L as SciPy's `splu` makes it; None where it would be full."""
        return None

    def residual_over(self, L: Laplacian, lam: float, Z: Array, B: Array) -> Array:
        """B <- B - (I + lam L) Z; (k,) ||r||^2 of the float64 r before it is rounded to B's type.

        Z is `with_neighbours`.
        """
        (n, k), squares = B.shape, self.xp.zeros(B.shape[1])
        for a in range(0, n, max(1, CHUNK // k)):
            rows = slice(a, min(a + max(1, CHUNK // k), n))
            R = B[rows].astype("float64")
            B[rows] = self.residual_rows(L, lam, Z, R, a, out=R)
            squares = squares + self.column_dots(R, R)
        return squares

    def roundings(self, neighbours: float, columns: int, rows: bool = False) -> float:
        """How often a term of a sum over so many neighbours is rounded, at most, on its way.

        For a block of so many columns, in a product and in `residual` alike, or in `residual_rows`
        if `rows`; as often as there are neighbours, in any order.
        """
        return neighbours

    def cg_start(
        self, L: Laplacian, lam: float, R: Array, energy: Array, tol: float, floor: float
    ) -> CGState:
        """Block CG for H Z = R from Z = 0; columns of R that are 0 start frozen.

        A column also freezes once ||R|| <= floor * ||R at the start||, where rounding rules.
        """
        R = self.asarray(R, str(L.inv_sqrt_degree.dtype))
        P, rho = self.empty(R.shape, str(R.dtype)), self.total(self.column_dots(R, R))
        P[...] = R
        return CGState(
            Z=self.zeros(R.shape, str(R.dtype)),
            R=R,
            P=P,
            HP=self.empty(R.shape, str(R.dtype)),
            rho=rho,
            energy=energy,
            tol=tol,
            floor=floor**2 * rho,
            active=rho > self.xp.maximum(tol**2 * energy, 0.0),
            iterations=self.xp.zeros(R.shape[1], dtype="int64"),
        )

    def cg_steps(self, L: Laplacian, lam: float, state: CGState, count: int) -> None:
        """`count` steps in a row, without a look at the mask between them."""
        for _ in range(count):
            self.cg_step(L, lam, state)

    def chebyshev(
        self,
        L: Laplacian,
        lam: float,
        B: Array,
        first: float,
        steps: Iterable[tuple[float, float]],
        work: tuple[Array, ...] | None = None,
        half: bool = False,
    ) -> Array:
        """Z of Z_0 = 0, Z_1 = first B, and a `chebyshev_step` for each (c1, c2).

        `work` are two blocks like B, of `block_rows` rows, for the iterates, one of which holds the
        result; with them, no other array of n x k numbers is made.

        With `half`, neighbours may be read in float16 where B is float32 (`Halves`): the step then
        moves up to half of the bytes, for a relative error of about 5e-4, which a second pass on
        the residual takes away.  It needs n x k numbers of 16 bits, which `work` may hold as its
        third block, of uint16.  `half_pays` says where it is worth it.
        """
        B, n = self.asarray(B), B.shape[0]
        Z, Z_prev = self.iterates(L, B, work)
        halves = None
        if half and B.dtype == np.float32:
            halves = self.halves(L, B, work[2] if work and len(work) > 2 else None)
        Z_prev.fill(0)
        self.xp.multiply(B, B.dtype.type(first), out=Z[:n])
        for c1, c2 in steps:
            self.chebyshev_step(L, lam, Z, Z_prev, B, c1, c2, halves)
            Z, Z_prev = Z_prev, Z
        return Z if Z.shape[0] == n else Z[:n]

    def iterates(self, L: Laplacian, B: Array, work: tuple[Array, ...] | None) -> tuple[Array, ...]:
        """The two blocks that `chebyshev` works in: the caller's, or new ones."""
        shape, dtype = (self.block_rows(L), B.shape[1]), B.dtype
        if work is None:
            return self.empty(shape, str(dtype)), self.empty(shape, str(dtype))
        wanted = ((shape, dtype), (shape, dtype), (B.shape, np.uint16))
        for block, of in zip(work, wanted, strict=False):
            if (block.shape, block.dtype) != of or not block.flags.c_contiguous:
                raise ValueError(
                    f"work must be two C-contiguous blocks of {shape}, {dtype}, "
                    "and perhaps a third one of uint16."
                )
        return work[:2]

    def halves(self, L: Laplacian, B: Array, G: Array | None = None) -> Halves:
        """What `chebyshev` needs to solve for B with float16 neighbours; G is not filled yet."""
        xp, s, (n, k) = self.xp, L.inv_sqrt_degree, B.shape
        largest, rows = xp.zeros(k, dtype=B.dtype), max(1, self.at_once // max(k, 1))
        for a in range(0, n, rows):
            part = abs(B[a : a + rows]) * s[a : a + rows, None]
            largest = xp.maximum(largest, part.max(axis=0))
        _, exponent = np.frexp(self.to_numpy(largest))  # synchronize!
        # Neither 2^e nor 2^-e may leave float32's range; of tiny numbers fewer bits are kept.
        e = np.clip(14 - exponent, -126, 126)
        up, down = (np.ldexp(np.float32(1), power).astype("float32") for power in (e, -e))
        G = self.empty(B.shape, "uint16") if G is None else G
        return Halves(G, self.asarray(up), self.asarray(down))

    def half_pays(self, L: Laplacian, k: int) -> bool:
        """Whether `chebyshev` of a float32 block of k columns is faster with `half`."""
        return False

    # ---- Algorithm 2 ---------------------------------------------------------------------
    def sampled_graph(self, graph: Graph, factors: Array) -> Graph:
        """The edges of `graph` with a factor above 0, weights times it: the graph of L_tilde."""
        return graph.with_edges(factors > 0, factors)

    # ---- SRHT ----------------------------------------------------------------------------
