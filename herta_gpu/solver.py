"""SDDSolver: (I + lam L) Z = B for many right-hand sides, to a measured accuracy.

A linear solver in the paper's sense (Definition 5.1) has ||z - H^-1 b||_H <= eps ||H^-1 b||_H.
Neither side is known while solving, but both can be bounded from what is:

* H >= I, so ||z - H^-1 b||_H = ||r||_{H^-1} <= ||r|| with the true residual r = b - H z;
* ||H^-1 b||_H^2 >= 2 <b, z> - <z, H z> = <b, z> + <r, z> for every z, and >= ||b||^2/lambda_max(H).

The quotient, and what rounding may have done to it, is the bound reported as
`SolveInfo.h_norm_bound`.  H need not be diagonally dominant for any of this; it is positive
definite with condition number at most 1 + lam * lambda_max(L).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends import backend_of_rows
from herta_gpu.backends.base import Array, Backend, Laplacian
from herta_gpu.graph import Graph, check_graph, check_whole
from herta_gpu.plumbing.interop import as_array, in_kind_of, on_device, take_rows
from herta_gpu.plumbing.stages import marked
from herta_gpu.plumbing.validation import (
    BudgetError,
    check_choice,
    check_count,
    check_dtype,
    check_lam,
    check_positive,
    check_rows,
    memory_budget,
)

BLOCK_WIDTH = 64  # columns advanced together when memory allows: best per column on the CPU
_MARGIN = 0.9  # the recurrence aims a little lower than tol, so that the true residual passes
_LEAST_TOL = 1e-300  # below, tol itself would overflow what is computed from it
_RANGE = 2.0**60  # float32 holds residuals that are so much larger or smaller than their unit
_MAX_CYCLES = 30  # refreshes of the true residual before giving up


class RegularizedLaplacian:
    """H = I + lam L on one backend, in the working precision and in float64."""

    def __init__(self, graph: Graph, lam: float, backend: Backend, dtype: str) -> None:
        self.graph, self.lam, self.backend, self.dtype = graph, float(lam), backend, dtype
        if backend.whole:
            check_whole(graph, "This")
        self._in: dict[str, Laplacian] = {}

    def on(self, graph: Graph) -> RegularizedLaplacian:
        """I + lam L of another graph on the same nodes: a sampled one."""
        return RegularizedLaplacian(graph, self.lam, self.backend, self.dtype)

    def at(self, lam: float) -> RegularizedLaplacian:
        """I + lam L of the same graph, which is not stored twice."""
        other = RegularizedLaplacian(self.graph, lam, self.backend, self.dtype)
        other._in = self._in
        if "most_neighbours" in self.__dict__:
            other.most_neighbours = self.most_neighbours
        return other

    def laplacian(self, dtype: str | None = None) -> Laplacian:
        dtype = str(np.dtype(dtype or self.dtype))
        if dtype not in self._in:
            self._in[dtype] = self.backend.laplacian(self.graph, dtype)
        return self._in[dtype]

    @property
    def n(self) -> int:
        return self.graph.num_nodes

    @property
    def lambda_max(self) -> float:
        """Upper bound of the spectrum; the lower bound is 1."""
        return 1.0 + self.lam * self.laplacian().lambda_max

    @cached_property
    def most_neighbours(self) -> float:
        """The largest number of terms in a sum over neighbours."""
        indptr = self.graph.indptr
        here = float((indptr[1:] - indptr[:-1]).max(initial=0))  # synchronize!
        return float(self.backend.largest(here))

    def rounding(self, columns: int, rows: bool = False) -> float:
        """||computed B - H Z less the true one|| <= this ||Z||, blocks of so many columns.

        Of `residual`, or of `residual_rows` if `rows`.

        In float64, and before R is rounded to be stored.  A term of a row's sum is rounded
        `roundings` times, and eight times more by its factors and by what the sum is added to:
        what is not a term of H Z, b - h_i z, is r plus a part of H Z.
        """
        terms = self.backend.roundings(self.most_neighbours, columns, rows) + 8
        return 0.5 * float(np.finfo(np.float64).eps) * terms * self.lambda_max

    def residual_rows(self, B: Array, Z: Array, start: int) -> Array:
        """Rows start, start + 1, ... of B - H Z in float64; B holds those rows, and is lost."""
        L = self.laplacian(str(Z.dtype))
        return self.backend.residual_rows(L, self.lam, Z, B, start, out=B)

    def with_neighbours(self, Z: Array) -> Array:
        """Z for all calls of `residual_rows`: what comes from other processes comes once."""
        return self.backend.with_neighbours(self.laplacian(str(Z.dtype)), Z)

    def apply(self, X: Array) -> Array:
        """H X in the precision of X."""
        return self.backend.apply_H(self.laplacian(str(X.dtype)), self.lam, X)

    def residual(
        self, B: Array, Z: Array, dtype: str = "float64", unit: Array | None = None
    ) -> tuple[Array, Array]:
        """`Backend.residual`: B - H Z, computed in float64 and stored in `dtype`, and its dots."""
        unit = self.backend.xp.ones(Z.shape[1]) if unit is None else unit
        with marked("residual", columns=Z.shape[1]):
            L = self.laplacian(str(Z.dtype))
            R, dots = self.backend.residual(L, self.lam, Z, B, dtype, unit)
        return R, self.backend.total(dots)


@dataclass
class SolveInfo:
    """What a solve reached, measured on its result; arrays hold one number per column.

    Attributes
    ----------
    iterations : int array
    residuals : float array
        True residual norms ||b - H z||, computed in float64 from the returned Z.
    h_norm_bound : float array
        Proven bound of ||z - H^-1 b||_H / ||H^-1 b||_H, rounding of the residual included.
    status : str
        "converged", "stagnated" (rounding forbids tol; `h_norm_bound` is the level reached) or
        "max_iter".
    dtype : str
        Precision of the result: float64 when tol is below what float32 can hold.
    """

    iterations: Any
    residuals: Any
    h_norm_bound: Any
    status: str
    dtype: str

    def first(self, k: int) -> SolveInfo:
        """Of the first k columns."""
        arrays = (self.iterations[:k], self.residuals[:k], self.h_norm_bound[:k])
        return SolveInfo(*arrays, self.status, self.dtype)

    def __str__(self) -> str:
        return (
            f"{self.status}: {int(self.iterations.max(initial=0))} iterations, "
            f"H-norm error <= {self.h_norm_bound.max(initial=0.0):.2e}"
        )


def block_cg(
    H: RegularizedLaplacian,
    B: Array,
    tol: float,
    guess: Array | None = None,
    max_iter: int | None = None,
) -> tuple[Array, SolveInfo]:
    """Solve H Z = B by block CG until the measured H-norm bound of every column is <= tol.

    Each cycle measures the true residual, computed in float64 and rounded only to be gone on from,
    and solves for the correction in the working precision.  When float32 cannot go on, Z is kept in
    float64 (iterative refinement); when that cannot either, the corrections are found in float64,
    too; after that the status is "stagnated".
    """
    k, backend = B.shape[1], H.backend
    wide = backend.padded(k, H.dtype)
    with marked("solve", columns=k, tol=tol):
        B = _block(backend, B, wide)  # a B that nobody else holds is freed
        Z = None if guess is None else _block(backend, guess, wide, copy=True)
        Z, info = _refined(H, B, tol, Z, max_iter)
        return (Z, info) if wide == k else (backend.asarray(Z[:, :k]), info.first(k))


def _block(backend: Backend, X: Array, wide: int, copy: bool = False) -> Array:
    """X with so many columns in runs of memory; the new ones are 0, and start frozen in CG."""
    n, k = X.shape
    if wide == k and not copy:
        return backend.xp.ascontiguousarray(X)
    block = backend.empty((n, wide), str(X.dtype))
    block[:, :k] = X
    block[:, k:] = 0
    return block


def _refined(
    H: RegularizedLaplacian, B: Array, tol: float, Z: Array | None, max_iter: int | None
) -> tuple[Array, SolveInfo]:
    """`block_cg`, cycle by cycle, from Z, which is lost; None: from 0."""
    xp, k = H.backend.xp, B.shape[1]
    tol = max(tol, _LEAST_TOL)
    limit = max_iter or 3 * chebyshev_degree(H, tol / math.sqrt(H.lambda_max)) + 20
    b2 = H.backend.total(H.backend.column_dots(B, B))
    iterations = np.zeros(k, dtype=np.int64)
    last, working = xp.full(k, xp.inf), H.dtype
    status, unit = "stagnated", _unit(xp, xp.sqrt(b2))
    for cycle in range(_MAX_CYCLES):
        R, dots = _residual(H, B, Z, working, unit, b2)
        norm, energy, bound = _measure(H, b2, dots)
        open_ = ~(bound <= tol)  # a NaN stays open
        stuck = open_ & ~(bound <= 0.5 * last)
        strange = open_ & ((norm > _RANGE * unit) | (_RANGE * norm < unit))
        any_open, any_stuck, any_strange = xp.stack(
            [open_.any(), stuck.any(), strange.any()]
        ).tolist()  # synchronize!
        if not any_open:
            status = "converged"
            break
        if iterations.max(initial=0) >= limit:
            status = "max_iter"
            break
        if any_stuck:
            if Z is not None and Z.dtype != np.float64:
                Z = Z.astype("float64")
            elif working != "float64":
                working = "float64"
            else:
                break
        if any_strange or str(R.dtype) != working:  # rare: a guess of quite another size, say
            unit = _unit(xp, norm)
            R, _ = _residual(H, B, Z, working, unit, b2)
        last = bound
        # Columns that are done start frozen: no residual is larger than an infinite energy.
        energy = xp.where(open_, energy / unit**2, xp.inf)
        with marked("refinement cycle", number=cycle, precision=working):
            step, steps = _cycle(H, R, energy, tol, limit - int(iterations.max(initial=0)))
        iterations += steps
        step *= unit.astype(step.dtype)
        Z = _added(Z, step)
        unit = _unit(xp, norm)  # the next residual is smaller, but not by 2^60
    Z = xp.zeros(B.shape, dtype=H.dtype) if Z is None else Z
    norms, bounds = H.backend.to_numpy(xp.stack([norm, bound]))  # synchronize!
    return Z, SolveInfo(iterations, norms, _proven(H, Z, norms, bounds, tol), status, str(Z.dtype))


def _residual(
    H: RegularizedLaplacian, B: Array, Z: Array | None, dtype: str, unit: Array, b2: Array
) -> tuple[Array, Array]:
    """`RegularizedLaplacian.residual`; without a Z yet, R is B and nothing is multiplied."""
    if Z is not None:
        return H.residual(B, Z, dtype, unit)
    xp, R = H.backend.xp, H.backend.empty(B.shape, dtype)
    return xp.multiply(B, 1.0 / unit, out=R), xp.stack([b2, xp.zeros_like(b2)])


def _added(Z: Array | None, step: Array) -> Array:
    if Z is None:
        return step
    Z += step
    return Z


def _unit(xp: Any, norm: Array) -> Array:
    """Powers of two, which round nothing, in which norms are about 1, whatever the unit of B."""
    return xp.exp2(xp.floor(xp.log2(xp.where(norm > 0, norm, 1.0))))


def _measure(H: RegularizedLaplacian, b2: Array, dots: Array) -> tuple[Array, Array, Array]:
    """(||r||, 2<b, z> - <z, Hz>, H-norm bound) of each column, from `Backend.residual`.

    The second is ||H^-1 b||_H^2 less the squared error, which is what CG adds to it step by step.
    """
    xp, energy = H.backend.xp, dots[1]
    norm = xp.sqrt(dots[0])
    least = xp.maximum(energy, b2 / H.lambda_max)
    safe = xp.where(least > 0, least, 1.0)
    return norm, energy, xp.where(b2 > 0, norm / xp.sqrt(safe), norm)


def _lost(H: RegularizedLaplacian, columns: int) -> tuple[float, float]:
    """(rho, delta): what rounding may do to ||r||, relative to ||z||, and to the bound itself.

    Sums over n terms make ||r|| and the energy: the latter is 2 <b, z> - <z, b - r>, relative to
    S^2, S = ||H^-1 b||_H, with ||b|| <= sqrt(lambda_max) S and ||z|| <= ||z||_H, about S.
    """
    unit, n = 0.5 * float(np.finfo(np.float64).eps), int(H.backend.total(H.n))
    return H.rounding(columns), 8 * (n + 8) * unit * math.sqrt(H.lambda_max)


def _proven(H: RegularizedLaplacian, Z: Array, norms: Any, bounds: Any, tol: float) -> Any:
    """Bounds from measured residuals as true ones: what rounding may have done is added.

    With t the bound, ||z|| <= ||z||_H <= (1 + t) S makes t <= (measured + rho) / (1 - rho).  Where
    that is not enough, ||z|| itself is measured: it is far below S if b is rough.
    """
    rho, delta = _lost(H, Z.shape[1])
    found = (bounds * (1 + delta) + rho) / (1 - rho) if rho < 1 else np.full(bounds.shape, np.inf)
    if bool(((found > tol) & (bounds <= tol)).any()):
        size = H.backend.to_numpy(H.backend.total(H.backend.column_dots(Z, Z)))  # synchronize!
        S = norms / np.where(bounds > 0, bounds, 1.0)
        near = bounds * (1 + delta) + rho * (1 + delta) * np.sqrt(size) / np.where(S > 0, S, 1.0)
        found = np.where(S > 0, np.minimum(found, near), found)
    return found


def _cycle(
    H: RegularizedLaplacian, R: Array, energy: Array, tol: float, limit: int
) -> tuple[Array, Any]:
    """One run of block CG on normalised residuals; the stopping test stays on the device."""
    L, backend = H.laplacian(str(R.dtype)), H.backend
    floor = float(np.finfo(R.dtype).eps)
    state = backend.cg_start(L, H.lam, R, energy, _MARGIN * tol, floor)
    for step in range(0, limit, backend.check_every):
        if backend.cg_active(state) == 0:
            break
        backend.cg_steps(L, H.lam, state, min(backend.check_every, limit - step))
    return state.Z, backend.to_numpy(state.iterations)  # synchronize!


def chebyshev_degree(H: RegularizedLaplacian, eps: float) -> int:
    """The least degree with proven error 1/T_k(sigma) <= eps on [1, lambda_max(H)]."""
    top = H.lambda_max
    if top <= 1.0 or eps >= 1.0:
        return 1
    return max(1, math.ceil(math.acosh(1.0 / eps) / math.acosh((top + 1) / (top - 1)) - 1e-9))


def chebyshev_error(H: RegularizedLaplacian, degree: int) -> float:
    """1/T_k(sigma): ||I - H p(H)|| for the polynomial of `chebyshev`."""
    top = H.lambda_max
    if top <= 1.0:
        return 0.0
    return 1.0 / math.cosh(degree * math.acosh((top + 1) / (top - 1)))


def chebyshev_rounding(
    H: RegularizedLaplacian, dtype: str, columns: int, degree: int | None = None
) -> float:
    """What rounding may add to a column of `chebyshev`, relative to ||H^-1 b||; a worst case.

    For blocks of so many columns or more, and for any degree unless one is given.

    A step computes Z + rho rho' (Z - Z_prev) + c2 (B - H Z) with rho, rho' <= (top - 1)/(top + 1).
    As ||Z|| <= 2 ||H^-1 b|| and ||b|| <= top ||H^-1 b||, its dozen roundings come to less than
    96 u ||H^-1 b||, and a sum over neighbours adds 4 lam/(top + 1) (k + 8) u ||Z||, k how often a
    term is rounded on its way, which is less than their number.  An error made at step m counts
    (j + 1) r^j (1 + r^2m) j steps later, r = 1/(sigma + sqrt(sigma^2 - 1)): all of them together no
    more than 1/(1 - r)^2.  Of a known degree the late steps count most, and by then ||Z|| is close
    to ||H^-1 b||: the sum over the steps themselves is about half of that where a hub has many
    neighbours.
    """
    top = H.lambda_max
    if top <= 1.0:
        return 4 * float(np.finfo(dtype).eps)
    sigma = (top + 1) / (top - 1)
    r = 1.0 / (sigma + math.sqrt(sigma**2 - 1))
    hub = 4 * H.lam / (top + 1) * (H.backend.roundings(H.most_neighbours, columns) + 8)
    unit = 0.5 * float(np.finfo(dtype).eps)
    # The last term: b itself was rounded.
    found = unit * ((96 + 2 * hub) / (1 - r) ** 2 + top)
    if degree is None or found > 0.1:
        return found
    m = np.arange(1, degree + 1)
    # Step m reads Z_(m-1), which is off by 1/T_(m-1) and by what rounding did: less than `found`.
    size = 1 + found + 1 / np.cosh((m - 1) * math.acosh(sigma))
    counts = (degree - m + 1) * r ** (degree - m) * (1 + r ** (2 * m))
    return min(found, float(unit * ((counts * (96 + hub * size)).sum() + top)))


def chebyshev(
    H: RegularizedLaplacian,
    B: Array,
    degree: int,
    work: tuple[Array, ...] | None = None,
    half: bool = False,
) -> Array:
    """Z = p(H) B with p the Chebyshev polynomial: a linear map, the same for every column.

    ||p(H) b - H^-1 b|| <= eps ||H^-1 b|| with eps = `chebyshev_error`, in the H-norm and in the
    2-norm alike, for every b: this is what makes the preconditioner's bound hold for any X.
    `work` are two blocks like B to work in, one of which becomes the result.  `half` allows to
    gather neighbours in half precision (with a third block, of uint16): nothing is proven of the
    result then but what its residual says.
    """
    first, steps = chebyshev_steps(H, degree)
    L = H.laplacian(str(B.dtype))
    with marked("solve", columns=B.shape[1], degree=degree):
        return H.backend.chebyshev(L, H.lam, B, first, steps, work, half)


def chebyshev_steps(
    H: RegularizedLaplacian, degree: int
) -> tuple[float, list[tuple[float, float]]]:
    """The factor of the first step, and (c1, c2) of each of the others."""
    theta, delta = (H.lambda_max + 1) / 2, (H.lambda_max - 1) / 2
    rho, steps = delta / theta, []
    for _ in range(degree - 1):
        rho_next = 1.0 / (2 * theta / delta - rho) if delta > 0 else 0.0
        steps.append((rho * rho_next, 2 * rho_next / delta if delta > 0 else 0.0))
        rho = rho_next
    return 1 / theta, steps


def column_bytes(dtype: str) -> int:
    """Per node, of a column that block CG works on.

    B, which may be float64; Z; and of a cycle R, P, H P, its own Z and, on a CPU, D^-1/2 P.
    """
    return 8 + 6 * np.dtype(dtype).itemsize


def block_width(n: int, k: int, dtype: str, budget: int) -> int:
    """Columns that a solve may advance together within `budget` bytes; 0 when not even one."""
    return int(min(k, BLOCK_WIDTH, budget // (max(n, 1) * column_bytes(dtype))))


class SDDSolver:
    """Solver for H Z = B, H = I + lam * L, by block CG or Chebyshev iteration.

    Parameters
    ----------
    graph : Graph
    lam : float
        From 1e-3 to 1e4 is tested; the condition number of H is at most 1 + 2 lam.
    method : {"cg", "chebyshev"}
        CG adapts to each column.  Chebyshev has a fixed degree, so it is a linear operator, and
        its error bound is proven in advance.
    tol : float
        Bound of the relative H-norm error of every column.
    device, dtype : str
        As in `HERTA`.  A tol below what float32 can hold is reached by float64 refinement.
    memory_budget : int or str, optional
        Bytes (or "8GB") that one block of columns may use; by default 80% of what is free.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph, SDDSolver
    >>> g = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
    >>> solver = SDDSolver(g, lam=20.0, tol=1e-8)
    >>> Z = solver.solve(np.eye(4))
    >>> solver.info_.status
    'converged'
    >>> np.allclose((np.eye(4) + 20 * g.to_csr()) @ Z, np.eye(4), atol=1e-6)
    True
    >>> solver.lam = 21.0  # the next solve is for another H, and Z is near its result
    >>> Z = solver.solve(np.eye(4), guess=Z)
    """

    def __init__(
        self,
        graph: Graph,
        lam: float = 1.0,
        method: str = "cg",
        tol: float = 1e-6,
        max_iter: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
    ) -> None:
        check_graph(graph)
        check_lam(lam)
        check_positive("tol", tol)
        if max_iter is not None:
            check_count("max_iter", max_iter)
        check_choice("method", method, ("cg", "chebyshev"))
        self.graph, self.method, self.tol = graph, method, tol
        self.max_iter, self.device, self.dtype = max_iter, device, check_dtype(dtype)
        self.memory_budget = memory_budget
        self.backend = backend_of_rows(device, graph)
        self.H = RegularizedLaplacian(graph, lam, self.backend, self.dtype)
        self.info_: SolveInfo | None = None

    @property
    def lam(self) -> float:
        """May be changed between two solves: the graph's arrays stay as they are."""
        return self.H.lam

    @lam.setter
    def lam(self, lam: float) -> None:
        check_lam(lam)
        self.H = self.H.at(lam)

    @property
    def kappa(self) -> float:
        """A proven bound of the condition number of H."""
        return self.H.lambda_max

    def solve(self, B: Any, guess: Any = None, dtype: str | None = None) -> Any:
        """Z = H^-1 B; what was reached is in `info_`.

        Parameters
        ----------
        B : array or SciPy sparse matrix, (n,) or (n, k)
        guess : array like Z, optional
            Where CG starts, such as the result for a similar B or lam.
        dtype : {"float32", "float64"}, optional
            Of the result; by default float64 only if tol asks for it.  What rounding to it costs is
            part of `info_`.

        Of a graph that is split by nodes each process gives its rows of B, and gets those of Z.
        """
        with self.backend.working():
            return self._solve(B, guess, dtype)

    def _solve(self, B: Any, guess: Any, dtype: str | None) -> Any:
        given, B = B, as_array("B", sp.csr_array(B) if sp.issparse(B) else B, self.backend)
        check_rows("B", B, self.graph)
        if dtype is not None:
            check_dtype(dtype)
        guess = self._checked_guess(guess, B.shape)
        self.backend.same((B.shape[not self.backend.whole :], guess is None), "columns of B", True)
        flat = B.ndim == 1
        if flat:
            B, guess = B[:, None], None if guess is None else guess[:, None]
        k, width = B.shape[1], self._width(B.shape[1])
        cuts = [slice(j, j + width) for j in range(0, k, width)]
        parts = [
            self._solve_block(B[:, J], None if guess is None else guess[:, J], dtype) for J in cuts
        ]
        self.info_ = _joined([info for _, info in parts])
        if not parts:
            return np.zeros(B.shape, dtype=dtype or self.dtype)
        xp = self.backend.xp if on_device(B) else np
        Z = xp.concatenate([Z for Z, _ in parts], axis=1) if len(parts) > 1 else parts[0][0]
        return in_kind_of(Z[:, 0] if flat else Z, given)

    def _checked_guess(self, guess: Any, shape: tuple[int, ...]) -> Any:
        if guess is None:
            return None
        if self.method != "cg":
            raise ValueError('A guess is for method="cg": Chebyshev is a linear map of B alone.')
        guess = as_array("guess", guess, self.backend)
        check_rows("guess", guess, self.graph)
        if guess.shape != shape:
            raise ValueError(f"guess has shape {guess.shape} but B has {shape}: they must agree.")
        return guess

    def _width(self, k: int) -> int:
        budget = memory_budget(self.memory_budget, self.backend.memory_everywhere())
        width = block_width(self.graph.num_nodes, max(k, 1), self.dtype, budget)
        width = -int(self.backend.largest(-width))
        if width < 1:
            need = self.graph.num_nodes * column_bytes(self.dtype)
            raise BudgetError(
                f"One column needs {need:,} bytes but memory_budget allows {budget:,}: "
                "raise memory_budget or free memory."
            )
        return width

    def _solve_block(self, B: Any, guess: Any, dtype: str | None) -> tuple[Any, SolveInfo]:
        block, start = self._stored(B), None if guess is None else self._stored(guess)
        scale = self._unit(block)
        if scale is not None:
            block, start = block / scale, None if start is None else start / scale
        start = None if start is None else self._sane(start, block)
        Z, info = self._cg(block, start) if self.method == "cg" else self._chebyshev(block)
        if dtype == "float32" and (scale is not None or str(Z.dtype) != dtype):
            info = self._rounded(block, Z, scale, info)
        elif dtype is not None:
            info = replace(info, dtype=dtype)
        if scale is not None:
            Z = Z.astype("float64") * scale
            info.residuals = info.residuals * self.backend.to_numpy(scale)
        Z = Z if dtype is None else Z.astype(dtype, copy=False)
        Z = Z if on_device(B) else self.backend.to_numpy(Z)  # synchronize!
        return take_rows(Z, self.graph.inverse_order(), self.backend), info

    def _stored(self, B: Any) -> Array:
        """A block of the caller's on this device, its rows where the graph has them."""
        dense = B.toarray() if sp.issparse(B) else B
        dense = take_rows(dense, self.graph.order, self.backend)
        keep = self.dtype if dense.dtype.itemsize <= 4 and dense.dtype.kind == "f" else "float64"
        return self.backend.asarray(dense, keep)

    def _sane(self, start: Array, B: Array) -> Array:
        """A guess with zeros for columns so large that 0 is closer: ||H^-1 b|| <= ||b||."""
        size, most = (self.backend.largest(_largest(self.backend.xp, A)) for A in (start, B))
        lost = size.astype("float64") > _RANGE * most.astype("float64")
        return self.backend.xp.where(lost, 0, start)

    def _rounded(self, B: Array, Z: Array, scale: Array | None, info: SolveInfo) -> SolveInfo:
        """What a solve has reached once its result, in the caller's unit, is rounded to float32.

        How far that moves Z is measured: numbers that are very small lose more than a float32 eps.
        """
        xp, unit = self.backend.xp, 1.0 if scale is None else scale
        Z = Z.astype("float64")
        if bool((abs(Z) * unit > np.finfo(np.float32).max).any()):  # synchronize!
            raise ValueError('The result is too large for float32: solve with dtype="float64".')
        near = (Z * unit).astype("float32").astype("float64") / unit
        squares, moved = self.H.residual(B, near)[1][0], near - Z
        total, dot = self.backend.total, self.backend.column_dots
        dots = [squares, *(total(dot(A, A)) for A in (moved, Z))]
        norm, moved, size = self.backend.to_numpy(xp.sqrt(xp.stack(dots)))  # synchronize!
        # ||.|| <= ||.||_H <= sqrt(kappa) ||.||, and ||Z||_H <= (1 + bound) ||H^-1 B||_H.
        part = math.sqrt(self.kappa) * moved / np.where(size > 0, size, 1.0)
        bound = info.h_norm_bound + (1 + info.h_norm_bound) * part
        missed = info.status == "converged" and bool((bound > self.tol).any())
        status = "stagnated" if missed else info.status
        return SolveInfo(info.iterations, norm, bound, status, "float32")

    def _unit(self, block: Array) -> Array | None:
        """Column sizes to divide by where squares would overflow or vanish; else None."""
        if block.dtype != np.float64:
            return None
        xp = self.backend.xp
        size = self.backend.largest(_largest(xp, block))
        strange = (size > 1e100) | ((size > 0) & (size < 1e-100))
        if not bool(strange.any()):  # synchronize!
            return None
        return xp.where(size > 0, size, 1.0)

    def _cg(self, B: Array, guess: Array | None) -> tuple[Array, SolveInfo]:
        rho, delta = _lost(self.H, B.shape[1])
        # What rounding may add comes on top; a tol below that is tried, and the bound says so.
        aim = max(0.5 * self.tol, (self.tol * (1 - rho) - rho) / (1 + delta))
        Z, info = block_cg(self.H, B, aim, guess, self.max_iter)
        missed = info.status == "converged" and bool((info.h_norm_bound > self.tol).any())
        return Z, replace(info, status="stagnated" if missed else info.status)

    def _chebyshev(self, B: Array) -> tuple[Array, SolveInfo]:
        H, backend, root = self.H, self.H.backend, math.sqrt(self.kappa)
        precise = self.tol < 16 * np.finfo(self.dtype).eps * H.lambda_max
        dtype = "float64" if precise else self.dtype
        degree = chebyshev_degree(H, _MARGIN * self.tol)
        # H >= I, so what rounding adds is at most sqrt(kappa) times as large in the H-norm.
        rounded = root * chebyshev_rounding(H, dtype, B.shape[1], degree)
        proven = chebyshev_error(H, degree) + rounded
        if proven > self.tol:  # the residual must show it, which sees the error from further away
            degree, proven = chebyshev_degree(H, 0.5 * self.tol / root), math.inf
        Z, R, iterations = 0.0, B.astype(dtype), 0
        b2, last = backend.total(backend.column_dots(B, B)), math.inf
        while True:
            Z, iterations = Z + chebyshev(H, R, degree), iterations + degree
            R, dots = H.residual(B, Z, dtype)
            norm, _, bound = (backend.to_numpy(a) for a in _measure(H, b2, dots))  # synchronize!
            bound = np.minimum(_proven(H, Z, norm, bound, self.tol), proven)
            worst = float(bound.max(initial=0.0))
            if worst <= self.tol or not worst < 0.5 * last:
                break
            # Another pass, on what is left: in float64, and no longer proven beforehand.
            Z, last, proven = Z.astype("float64"), worst, math.inf
            degree = chebyshev_degree(H, 0.5 * self.tol / worst)
        status = "converged" if worst <= self.tol else "stagnated"
        counts = np.full(B.shape[1], iterations)
        return Z, SolveInfo(counts, norm, bound, status, str(Z.dtype))


def _largest(xp: Any, A: Array) -> Array:
    """(k,) the largest size of a number in each column; 0 where there are no rows."""
    return abs(A).max(axis=0) if A.shape[0] else xp.zeros(A.shape[1], dtype=A.dtype)


def _joined(infos: list[SolveInfo]) -> SolveInfo:
    """One report for all column blocks, with the worst status."""
    if not infos:
        none = np.zeros(0)
        return SolveInfo(none.astype(np.int64), none, none, "converged", "float32")
    seen = {info.status for info in infos}
    worst = next(status for status in ("max_iter", "stagnated", "converged") if status in seen)
    return SolveInfo(
        np.concatenate([i.iterations for i in infos]),
        np.concatenate([i.residuals for i in infos]),
        np.concatenate([i.h_norm_bound for i in infos]),
        worst,
        "float64" if "float64" in {i.dtype for i in infos} else infos[0].dtype,
    )
