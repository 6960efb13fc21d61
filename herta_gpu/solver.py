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
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from herta_gpu.backends import backend_of_rows
from herta_gpu.backends.base import Array
from herta_gpu.graph import Graph, check_graph
from herta_gpu.laplacian import (
    MARGIN,
    RANGE,
    RegularizedLaplacian,
    SolveInfo,
    block_cg,
    chebyshev,
    chebyshev_degree,
    chebyshev_error,
    chebyshev_rounding,
    measure,
    measure_rounding,
    proven_bounds,
)
from herta_gpu.planning.costs import block_width, column_bytes
from herta_gpu.plumbing.checks import (
    BudgetError,
    check_choice,
    check_count,
    check_dtype,
    check_lam,
    check_positive,
    check_rows,
    memory_budget,
)
from herta_gpu.plumbing.interop import (
    as_array,
    in_kind_of,
    is_sparse,
    of_scipy,
    on_device,
    take_rows,
    to_host,
)
from herta_gpu.plumbing.sdd import dominant


class SDDSolver:
    """Solver for H Z = B, H = I + lam * L, by block CG or Chebyshev iteration.

    Parameters
    ----------
    graph : Graph, or sparse matrix of SciPy or CuPy
        A matrix M that is symmetric and diagonally dominant, strictly so in some row of each part,
        is solved with as it is, M Z = B: norms are those of M then, and `kappa` is that of M after
        a diagonal scaling.
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
        graph: Graph | Any,
        lam: float = 1.0,
        method: str = "cg",
        tol: float = 1e-6,
        max_iter: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
    ) -> None:
        self._matrix: Any = dominant(of_scipy(graph)) if is_sparse(graph) else None
        graph = graph if self._matrix is None else Graph(*self._matrix.arrays)
        check_graph(graph)
        self._check_lam(lam)
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
        self._check_lam(lam)
        self.H = self.H.at(lam)

    def _check_lam(self, lam: Any) -> None:
        check_lam(lam)
        if self._matrix is not None and lam != 1:
            raise ValueError("lam is for a graph: a matrix is solved with as it is.")

    @property
    def kappa(self) -> float:
        """A proven bound of the condition number of H."""
        return self.H.lambda_max

    def solve(self, B: Any, guess: Any = None, dtype: str | None = None) -> Any:
        """Z = H^-1 B; what was reached is in `info_`.

        Parameters
        ----------
        B : array or sparse matrix (of SciPy or CuPy), (n,) or (n, k)
            Of a graph that is split by nodes, the rows of this process; so are those of Z.
        guess : array like Z, optional
            Where CG starts, such as the result for a similar B or lam.
        dtype : {"float32", "float64"}, optional
            Of the result; by default float64 only if tol asks for it.  What rounding to it costs is
            part of `info_`.
        """
        if self._matrix is None:
            return self._solve(B, guess, dtype)
        if dtype == "float32":
            raise ValueError("Of a matrix the result is float64: leave dtype out.")
        B = B if is_sparse(B) or on_device(B) or hasattr(B, "ndim") else np.asarray(B)
        start = None if guess is None else self._for_matrix(guess, True)
        Z = self._matrix.gathered(self._solve(self._for_matrix(B), start, "float64"))
        assert self.info_ is not None
        self.info_.h_norm_bound = bound = self._matrix.bound(self.info_.h_norm_bound, self.kappa)
        if self.info_.status == "converged" and bool((bound > self.tol).any()):
            self.info_.status = "stagnated"
        Z = Z[:, 0] if B.ndim == 1 else Z
        return in_kind_of(self.backend.asarray(Z) if on_device(B) else Z, B)

    def aslinearoperator(self) -> LinearOperator:
        """H^-1 (or M^-1) as SciPy knows linear operators, of vectors and of blocks.

        With method="chebyshev" it is the same linear map for every vector, as a preconditioner
        must be.

        Examples
        --------
        >>> import numpy as np
        >>> from herta_gpu import Graph, SDDSolver
        >>> g = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
        >>> inverse = SDDSolver(g, lam=2.0, method="chebyshev").aslinearoperator()
        >>> inverse.shape, np.allclose((np.eye(4) + 2 * g.to_csr()) @ (inverse @ np.ones(4)), 1)
        ((4, 4), True)
        """
        n = self.graph.num_nodes if self._matrix is None else self._matrix.n

        def times(B: Any) -> Any:
            return self.solve(np.asarray(B, dtype=np.float64))

        return LinearOperator(
            (n, n), dtype=np.float64, matvec=times, rmatvec=times, matmat=times, rmatmat=times
        )

    def _for_matrix(self, A: Any, guess: bool = False) -> Any:
        """A right-hand side or a guess as those of the graph."""
        A = of_scipy(A).toarray() if is_sparse(A) else np.asarray(to_host(A, self.backend))
        if A.ndim not in (1, 2) or A.shape[0] != self._matrix.n or A.dtype.kind not in "fiub":
            raise ValueError(
                f"B must hold a row of numbers for each of the {self._matrix.n:,} rows of the "
                f"matrix, not {A.shape} of {A.dtype}."
            )
        return self._matrix.spread(A[:, None] if A.ndim == 1 else A, guess)

    def _solve(self, B: Any, guess: Any, dtype: str | None) -> Any:
        with self.backend.working():
            given, B = B, as_array("B", B, self.backend)
            check_rows("B", B, self.graph)
            if dtype is not None:
                check_dtype(dtype)
            if guess is not None:
                guess = self._check_guess(guess, B.shape)
            what = (B.shape[not self.backend.whole :], guess is None)
            self.backend.same(what, "columns of B", True)
            flat = B.ndim == 1
            if flat:
                B, guess = B[:, None], None if guess is None else guess[:, None]
            width, found = self._width(B.shape[1]), []
            for j in range(0, max(B.shape[1], 1), width):
                J = slice(j, j + width)
                start = None if guess is None else guess[:, J]
                found.append(self._solve_block(B[:, J], start, dtype))
            blocks, infos = zip(*found, strict=True)
            self.info_ = SolveInfo.of_all(infos)
            xp = self.backend.xp if on_device(B) else np
            Z = xp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
            return in_kind_of(Z[:, 0] if flat else Z, given)

    def _check_guess(self, guess: Any, shape: tuple[int, ...]) -> Any:
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
        backend, xp, scale = self.backend, self.backend.xp, None
        block, start = self._place(B), None if guess is None else self._place(guess)
        if block.dtype == np.float64:
            size = backend.largest(_largest(xp, block))
            # Squares that overflow or vanish: columns are divided by their size.
            if bool(((size > 1e100) | ((size > 0) & (size < 1e-100))).any()):  # synchronize!
                scale = xp.where(size > 0, size, 1.0)
                block, start = block / scale, None if start is None else start / scale
        if start is not None:  # ||H^-1 b|| <= ||b||: from a far larger guess, 0 is closer
            size, most = (backend.largest(_largest(xp, A)) for A in (start, block))
            start = xp.where(size.astype("float64") > RANGE * most.astype("float64"), 0, start)
        if self.method == "cg":
            rho, delta = measure_rounding(self.H, block.shape[1])
            # What rounding may add comes on top; a tol below that is tried, and the bound says so.
            aim = max(0.5 * self.tol, (self.tol * (1 - rho) - rho) / (1 + delta))
            Z, info = block_cg(self.H, block, aim, start, self.max_iter)
        else:
            Z, info = self._chebyshev(block)
        if dtype == "float32" and (scale is not None or str(Z.dtype) != dtype):
            self._round(block, Z, scale, info)
        info.dtype = dtype or info.dtype
        if info.status == "converged" and bool((info.h_norm_bound > self.tol).any()):
            info.status = "stagnated"
        if scale is not None:
            Z = Z.astype("float64") * scale
            info.residuals = info.residuals * backend.to_numpy(scale)
        Z = Z if dtype is None else Z.astype(dtype, copy=False)
        Z = Z if on_device(B) else backend.to_numpy(Z)  # synchronize!
        return take_rows(Z, self.graph.inverse_order(), backend), info

    def _place(self, B: Any) -> Array:
        """A block of the caller's on this device, its rows where the graph has them."""
        dense = B.toarray() if is_sparse(B) else B
        dense = take_rows(dense, self.graph.order, self.backend)
        keep = self.dtype if dense.dtype.itemsize <= 4 and dense.dtype.kind == "f" else "float64"
        return self.backend.asarray(dense, keep)

    def _round(self, B: Array, Z: Array, scale: Array | None, info: SolveInfo) -> None:
        """Put into `info` what is reached once Z, in the caller's unit, is rounded to float32.  How
        far that moves Z is measured: numbers that are very small lose more than a float32 eps."""
        xp, unit = self.backend.xp, 1.0 if scale is None else scale
        Z = Z.astype("float64")
        if bool((abs(Z) * unit > np.finfo(np.float32).max).any()):  # synchronize!
            raise ValueError('The result is too large for float32: solve with dtype="float64".')
        near = (Z * unit).astype("float32").astype("float64") / unit
        squares, moved = self.H.residual(B, near)[1][0], near - Z
        total, dot = self.backend.total, self.backend.column_dots
        dots = [squares, *(total(dot(A, A)) for A in (moved, Z))]
        info.residuals, moved, size = self.backend.to_numpy(xp.sqrt(xp.stack(dots)))  # synchronize!
        # ||.|| <= ||.||_H <= sqrt(kappa) ||.||, and ||Z||_H <= (1 + bound) ||H^-1 B||_H.
        part = math.sqrt(self.kappa) * moved / np.where(size > 0, size, 1.0)
        info.h_norm_bound = info.h_norm_bound + (1 + info.h_norm_bound) * part

    def _chebyshev(self, B: Array) -> tuple[Array, SolveInfo]:
        H, backend, root = self.H, self.H.backend, math.sqrt(self.kappa)
        precise = self.tol < 16 * np.finfo(self.dtype).eps * H.lambda_max
        dtype = "float64" if precise else self.dtype
        degree = chebyshev_degree(H, MARGIN * self.tol)
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
            norm, _, bound = (backend.to_numpy(a) for a in measure(H, b2, dots))  # synchronize!
            bound = np.minimum(proven_bounds(H, Z, norm, bound, self.tol), proven)
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
