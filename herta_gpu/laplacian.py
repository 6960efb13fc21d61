"""H = I + lam L, and the two iterations that invert it: conjugate gradients and Chebyshev's.

Both work on blocks of columns.  CG stops on a bound of the relative H-norm error that it measures
(`solver` says how); Chebyshev takes as many steps as a bound of the spectrum asks for, and needs no
sum over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, Laplacian, unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.planning.costs import least_degree
from herta_gpu.plumbing.progress import marked

MARGIN = 0.9  # the recurrence aims a little lower than tol, so that the true residual passes
_LEAST_TOL = 1e-300  # below, tol itself would overflow what is computed from it
RANGE = 2.0**60  # float32 holds residuals that are so much larger or smaller than their unit
_LOOK = 1e-4  # how far one column is solved for to see how fast CG is
_MAX_CYCLES = 30  # refreshes of the true residual before giving up


class RegularizedLaplacian:
    """H = I + lam L on one backend, in the working precision and in float64."""

    def __init__(self, graph: Graph, lam: float, backend: Backend, dtype: str) -> None:
        self.graph, self.lam, self.backend, self.dtype = graph, float(lam), backend, dtype
        if backend.whole:
            check_whole(graph, "This")
        self.hops = 0  # products with S = I - L, in place of a solve
        self._in: dict[str, Laplacian] = {}
        self._digit = 0.0
        self.factor: Any = None  # a sparse one, where a plan solves by it

    def on(self, graph: Graph) -> RegularizedLaplacian:
        """I + lam L of another graph on the same nodes: a sampled one."""
        return RegularizedLaplacian(graph, self.lam, self.backend, self.dtype)

    def at(self, lam: float) -> RegularizedLaplacian:
        """I + lam L of the same graph, which is not stored twice."""
        other = copy(self)  # with the same dictionary of arrays
        other.lam = float(lam)
        other.factor, other._digit = None, 0.0
        if self.factor is not None and lam > 0:
            other.factored()
        return other

    def power(self, hops: int) -> RegularizedLaplacian:
        """That which stands for S^hops, S = I - L = D^-1/2 (A + I) D^-1/2, whose norm is 1."""
        other = self.at(-1.0 if hops else 0.0)
        other.hops = hops
        return other

    def hopped(self, B: Array) -> Array:
        """S^hops B in the precision of B."""
        for _ in range(self.hops):
            B = self.apply(B)
        return B

    def hop_rounding(self, columns: int) -> float:
        """||computed S^hops b - S^hops b|| <= this ||b|| in float64: |S| is no longer than S."""
        return self.hops * self.at(1.0).rounding(columns)

    def factored(self) -> int:
        """Non-zeros of a sparse factor, which is made if there is none; 0 if it would be full."""
        if self.factor is None:
            self.factor = self.backend.factor(self.laplacian("float64"), self.lam)
        return self.factor.nnz if self.factor is not None else 0

    def probe(self) -> float:
        """Steps that CG takes for each digit of one random column."""
        if self._digit == 0.0:
            b = np.random.default_rng(0).standard_normal((self.n, 1)).astype(self.dtype)
            most = chebyshev_degree(self, _LOOK)
            _, info = block_cg(self, self.backend.asarray(b), _LOOK, max_iter=most)
            self._digit = int(info.iterations.max()) / -math.log10(_LOOK)
        return self._digit

    def inverse(self, B: Array) -> Array:
        """H^-1 B by the factor, in float64; nothing is proven of it but what its residual says."""
        return self.backend.xp.ascontiguousarray(self.factor.solve(B.astype("float64", copy=False)))

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
        return unit_roundoff() * terms * self.lambda_max

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

    @classmethod
    def of_all(cls, infos: Sequence[SolveInfo]) -> SolveInfo:
        """One report for all blocks of columns, with the worst status and the wider dtype."""
        names = ("iterations", "residuals", "h_norm_bound")
        a, b, c = (np.concatenate([getattr(info, name) for info in infos]) for name in names)
        status = min((i.status for i in infos), key=("max_iter", "stagnated", "converged").index)
        return cls(a, b, c, status, max(info.dtype for info in infos))

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
    k, wide = B.shape[1], H.backend.padded(B.shape[1], H.dtype)
    with marked("solve", columns=k, tol=tol):
        B = _block(H.backend, B, wide)  # a B that nobody else holds is freed
        guess = guess if H.factor is None else H.inverse(B)
        Z = None if guess is None else _block(H.backend, guess, wide, new=True)
        return _refine(H, B, tol, Z, max_iter, k)


def _block(backend: Backend, X: Array, wide: int, new: bool = False) -> Array:
    """X with so many columns in runs of memory; the new ones are 0, and start frozen in CG."""
    n, k = X.shape
    if wide == k and not new:
        return backend.xp.ascontiguousarray(X)
    block = backend.empty((n, wide), str(X.dtype))
    block[:, :k] = X
    block[:, k:] = 0
    return block


def _refine(
    H: RegularizedLaplacian, B: Array, tol: float, Z: Array | None, max_iter: int | None, k: int
) -> tuple[Array, SolveInfo]:
    """The first k columns of `block_cg`, cycle by cycle, from Z, which is lost; None: from 0."""
    backend, xp, wide, working = H.backend, H.backend.xp, B.shape[1], H.dtype
    tol = max(tol, _LEAST_TOL)
    limit = max_iter or 3 * chebyshev_degree(H, tol / math.sqrt(H.lambda_max)) + 20
    b2 = backend.total(backend.column_dots(B, B))
    iterations, last = np.zeros(wide, dtype=np.int64), xp.full(wide, xp.inf)
    status, unit = "stagnated", _unit(xp, xp.sqrt(b2))

    def residual() -> tuple[Array, Array]:
        if Z is not None:
            return H.residual(B, Z, working, unit)
        R = backend.empty(B.shape, working)  # without a Z yet, R is B
        return xp.multiply(B, 1.0 / unit, out=R), xp.stack([b2, xp.zeros_like(b2)])

    for cycle in range(_MAX_CYCLES):
        R, dots = residual()
        norm, energy, bound = measure(H, b2, dots)
        open_ = ~(bound <= tol)  # a NaN stays open
        stuck = open_ & ~(bound <= 0.5 * last)
        strange = open_ & ((norm > RANGE * unit) | (RANGE * norm < unit))
        looks = xp.stack([open_.any(), stuck.any(), strange.any()]).tolist()  # synchronize!
        any_open, any_stuck, any_strange = looks
        done = int(iterations.max(initial=0))
        if not any_open or done >= limit:
            status = "max_iter" if any_open else "converged"
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
            R, _ = residual()
        last = bound
        # Columns that are done start frozen: no residual is larger than an infinite energy.
        energy = xp.where(open_, energy / unit**2, xp.inf)
        with marked("refinement cycle", number=cycle, precision=working):
            L = H.laplacian(working)
            floor = 2 * unit_roundoff(working)
            state = backend.cg_start(L, H.lam, R, energy, MARGIN * tol, floor)
            for step in range(0, limit - done, backend.check_every):
                if backend.cg_active(state) == 0:
                    break
                count = min(backend.check_every, limit - done - step)
                backend.cg_steps(L, H.lam, state, count)
            iterations += backend.to_numpy(state.iterations)  # synchronize!
        state.Z *= unit.astype(state.Z.dtype)
        Z = state.Z if Z is None else xp.add(Z, state.Z, out=Z)
        del state, R  # as large as what the next residual needs
        unit = _unit(xp, norm)  # the next residual is smaller, but not by 2^60
    Z = xp.zeros(B.shape, dtype=H.dtype) if Z is None else Z
    norms, bounds = backend.to_numpy(xp.stack([norm, bound]))  # synchronize!
    bounds = proven_bounds(H, Z, norms, bounds, tol)
    info = SolveInfo(iterations[:k], norms[:k], bounds[:k], status, str(Z.dtype))
    return Z if wide == k else backend.asarray(Z[:, :k]), info


def _unit(xp: Any, norm: Array) -> Array:
    """Powers of two, which round nothing, in which norms are about 1, whatever the unit of B."""
    return xp.exp2(xp.floor(xp.log2(xp.where(norm > 0, norm, 1.0))))


def measure(H: RegularizedLaplacian, b2: Array, dots: Array) -> tuple[Array, Array, Array]:
    """(||r||, 2<b, z> - <z, Hz>, H-norm bound) of each column, from `Backend.residual`.  The second
    is ||H^-1 b||_H^2 less the squared error, which is what CG adds to it step by step."""
    xp, energy = H.backend.xp, dots[1]
    norm = xp.sqrt(dots[0])
    least = xp.maximum(energy, b2 / H.lambda_max)
    safe = xp.where(least > 0, least, 1.0)
    return norm, energy, xp.where(b2 > 0, norm / xp.sqrt(safe), norm)


def measure_rounding(H: RegularizedLaplacian, columns: int) -> tuple[float, float]:
    """(rho, delta): what rounding may do to ||r||, relative to ||z||, and to the bound itself.
    Sums over n terms make ||r|| and the energy: the latter is 2 <b, z> - <z, b - r>, relative to
    S^2, S = ||H^-1 b||_H, with ||b|| <= sqrt(lambda_max) S and ||z|| <= ||z||_H, about S."""
    unit, n = unit_roundoff(), int(H.backend.total(H.n))
    return H.rounding(columns), 8 * (n + 8) * unit * math.sqrt(H.lambda_max)


def proven_bounds(H: RegularizedLaplacian, Z: Array, norms: Any, bounds: Any, tol: float) -> Any:
    """Bounds from measured residuals as true ones: what rounding may have done is added.  With t
    the bound, ||z|| <= ||z||_H <= (1 + t) S makes t <= (measured + rho) / (1 - rho).  Where that is
    not enough, ||z|| itself is measured: it is far below S if b is rough."""
    rho, delta = measure_rounding(H, Z.shape[1])
    found = (bounds * (1 + delta) + rho) / (1 - rho) if rho < 1 else np.full(bounds.shape, np.inf)
    if bool(((found > tol) & (bounds <= tol)).any()):
        size = H.backend.to_numpy(H.backend.total(H.backend.column_dots(Z, Z)))  # synchronize!
        S = norms / np.where(bounds > 0, bounds, 1.0)
        near = bounds * (1 + delta) + rho * (1 + delta) * np.sqrt(size) / np.where(S > 0, S, 1.0)
        found = np.where(S > 0, np.minimum(found, near), found)
    return found


def chebyshev_degree(H: RegularizedLaplacian, eps: float) -> int:
    """The least degree with proven error 1/T_k(sigma) <= eps on [1, lambda_max(H)]."""
    return least_degree(H.lambda_max, eps)


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
        return 8 * unit_roundoff(dtype)
    sigma = (top + 1) / (top - 1)
    r = 1.0 / (sigma + math.sqrt(sigma**2 - 1))
    hub = 4 * H.lam / (top + 1) * (H.backend.roundings(H.most_neighbours, columns) + 8)
    unit = unit_roundoff(dtype)
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
    tell: Callable[[float], None] = lambda share: None,
) -> Array:
    """Z = p(H) B with p the Chebyshev polynomial: a linear map, the same for every column.

    ||p(H) b - H^-1 b|| <= eps ||H^-1 b|| with eps = `chebyshev_error`, in the H-norm and in the
    2-norm alike, for every b: this is what makes the preconditioner's bound hold for any X.
    `work` are two blocks like B to work in, one of which becomes the result.  `half` allows to
    gather neighbours in half precision (with a third block, of uint16): nothing is proven of the
    result then but what its residual says.  `tell` hears before each step what share is done.
    """
    first, steps = chebyshev_steps(H, degree)
    L, told = H.laplacian(str(B.dtype)), _told(steps, tell)
    with marked("solve", columns=B.shape[1], degree=degree):
        return H.backend.chebyshev(L, H.lam, B, first, told, work, half)


def _told(steps: list[Any], tell: Callable[[float], None]) -> Iterator[Any]:
    for i, step in enumerate(steps):
        tell(i / len(steps))
        yield step


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
