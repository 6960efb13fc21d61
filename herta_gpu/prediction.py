"""What a fitted model says of nodes: Z* = H^-1 X W + 1 b^T, a block of outputs at a time.

Nothing of n x c numbers is needed unless it is asked for: outputs of some nodes are gathered block
by block, and labels take the best output so far, the second best and the class of the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.plumbing.files import new_file

TOL = 1e-6  # relative H-norm error of every output


def diffused(H: RegularizedLaplacian, B: Array, tol: float = TOL) -> tuple[Array, Any]:
    """H^-1 B (or S^k B), and the norms of what it leaves, on the host."""
    if H.hops or H.lam == 0:
        return H.hopped(B), np.zeros(0)
    Z, info = block_cg(H, B, tol)
    return Z, info.residuals


class _OwnRows:
    """A map of a file of which this process writes some rows."""

    def __init__(self, file: Any, rows: Any) -> None:
        self.file, self.rows = file, rows

    def __setitem__(self, at: tuple[slice, slice], values: Any) -> None:
        self.file[self.rows, at[1]] = values


class Outputs:
    """Z* = H^-1 X W, of which at most `width` columns exist at a time."""

    def __init__(
        self,
        systems: Sequence[RegularizedLaplacian],
        X: Features,
        W: Array,
        width: int,
        b: Array | None = None,
        extras: Sequence[Any] = (),
        floor: float = 0.0,
        tol: float = TOL,
    ) -> None:
        """Of several H the outputs add up, each with its own block of rows of W; b is a constant
        per output.  `extras` are features that no H is applied to, with the last rows of W.  With a
        `floor` the rows of each block of features have been divided by their lengths."""
        self.systems, self.H, self.X, self.W, self.width = systems, systems[0], X, W, width
        self.b, self.extras, self.floor, self.tol = b, extras, floor, tol

    @cached_property
    def lengths(self) -> list[tuple[Array, float]]:
        """(n, 1) lengths of the rows of each block, and what each may be off by: from all columns
        of the features, a block of them at a time."""
        found, (n, d), xp = [], self.X.shape, self.H.backend.xp
        for H in self.systems:
            squares, off = xp.zeros((n, 1)), 0.0
            for j in range(0, d, BLOCK_WIDTH):
                J = slice(j, min(j + BLOCK_WIDTH, d))
                B = self.H.backend.empty((n, J.stop - j), "float64")
                for rows, part in self.X.row_chunks(J):
                    B[rows] = part
                Z, left = diffused(H, B, self.tol)
                squares += (Z.astype("float64", copy=False) ** 2).sum(axis=1, keepdims=True)
                off += float((left**2).sum())
            found.append((xp.maximum(xp.sqrt(squares), self.floor), off**0.5))
        return found

    def blocks(self, rows: Array | None = None) -> Iterator[tuple[slice, Array, float]]:
        """(J, Z[:, J] at `rows` (None: all), what no number of it is off by more than) in turn.
        Each block is from scratch: the same bits whichever others are asked for."""
        c, starts = self.W.shape[1], range(0, self.W.shape[1], self.width)
        for j, made in zip(starts, self.H.backend.dealt(starts, partial(self._block, rows))):
            yield slice(j, min(j + self.width, c)), made["Z"], float(made["error"])

    def _block(self, rows: Array | None, j: int) -> dict[str, Array]:
        xp, d = self.H.backend.xp, self.X.shape[1]
        J, error = slice(j, min(j + self.width, self.W.shape[1])), 0.0
        Z: Any = 0.0
        for i, H in enumerate(self.systems):
            part = self.X.times(xp.ascontiguousarray(self.W[i * d : (i + 1) * d, J]))
            part, residuals = diffused(H, part, self.tol)
            left = float(residuals.max(initial=0.0))
            if self.floor:
                lengths, off = self.lengths[i]
                part = part / lengths.astype(part.dtype)
                left = (left + float(abs(part).max()) * off) / float(lengths.min())  # synchronize!
            error += left
            Z = part if i == 0 else Z + part
        first = len(self.systems) * d
        for extra in self.extras:
            own = xp.ascontiguousarray(self.W[first : first + extra.shape[1], J])
            Z = Z + extra.times(own).astype(Z.dtype)
            error, first = error + extra.outputs_error(own), first + extra.shape[1]
        if self.b is not None:
            Z = Z + self.b[J].astype(Z.dtype)
        if not bool(xp.isfinite(Z).all()):  # synchronize!
            raise ValueError("H^-1 X W overflows: give X in the units the model was fitted with.")
        return {"Z": Z if rows is None else Z[rows], "error": np.float64(error)}

    def of(self, rows: Array | None, dtype: str) -> Array:
        """Z* at the stored rows `rows` (None: all)."""
        count = self.H.n if rows is None else rows.shape[0]
        out = self.H.backend.empty((count, self.W.shape[1]), dtype)
        for J, Z, _ in self.blocks(rows):
            out[:, J] = Z
        return out

    def write(self, rows: Array | None, path: Path, dtype: str) -> Any:
        """Z* at the stored rows `rows` (None: all) in a new .npy file, given back as a map.  Where
        processes have rows of their own, the file holds those of all, by their ids (or, where rows
        are named, one process after the other), and each gets its own back."""
        with self.file(rows, path, dtype) as file:
            for J, Z, _ in self.blocks(rows):
                file[:, J] = self.H.backend.to_numpy(Z)  # synchronize!
        whole = np.load(path, mmap_mode="r")
        return whole if self.H.backend.whole else whole[self._places(rows)[0]]

    @contextmanager
    def file(self, rows: Array | None, path: Path, dtype: str) -> Iterator[Any]:
        """A map of a new .npy file for Z* at the stored rows `rows` (None: all)."""
        backend, (at, count) = self.H.backend, self._places(rows)
        first = backend.whole or backend.rank == 0
        with new_file(path) if first else nullcontext(path) as temporary:
            made: Any = None
            if first:
                shape = (count, self.W.shape[1])
                made = np.lib.format.open_memmap(temporary, "w+", np.dtype(dtype), shape)
            if not backend.whole:
                name = backend.agreed(str(temporary))
                made = made if first else np.lib.format.open_memmap(name, "r+")
            yield made if backend.whole else _OwnRows(made, at)
            made.flush()
            del made
            backend.largest(0)  # all have written theirs before the file gets its name
        backend.largest(0)

    def _places(self, rows: Array | None) -> tuple[Any, int]:
        """Where these rows (None: all) are in a file of all processes' rows, and its length."""
        here = self.H.n if rows is None else rows.shape[0]
        if self.H.backend.whole:
            return slice(None), here
        if rows is None:
            return self.H.graph.nodes, self.H.graph.nodes_of_all
        counts = self.H.backend.joined(np.array([here]))
        first = int(counts[: self.H.backend.rank].sum())
        return slice(first, first + here), int(counts.sum())

    def labels(self, rows: Array | None, dtype: str, scores: Any = None) -> tuple[Array, int]:
        """(the best class of the stored rows `rows` (None: all), how many were too close to call).
        Those are nodes whose two best outputs are closer than the error of the solve.  `scores` is
        a map that takes Z* at these rows on the way."""
        xp, count = self.H.backend.xp, self.H.n if rows is None else rows.shape[0]
        first, second = (xp.full(count, -xp.inf, dtype=dtype) for _ in range(2))
        best, error = xp.zeros(count, dtype="int32"), 0.0
        for J, Z, off in self.blocks(rows):
            error = max(error, off)
            if scores is not None:
                scores[:, J] = self.H.backend.to_numpy(Z)  # synchronize!
            Z = Z.astype(dtype, copy=False)
            for j in range(J.start, J.stop):
                z = Z[:, j - J.start]
                better = z > first
                second = xp.where(better, first, xp.maximum(second, z))
                first, best = xp.where(better, z, first), xp.where(better, j, best)
        close = first - second <= 2 * error
        undecided = int(self.H.backend.total(int(close.sum())))  # synchronize!
        return best, undecided if self.W.shape[1] > 1 else 0


def check_probabilities(loss: str) -> None:
    """Raise an error unless outputs of this loss stand for probabilities."""
    if loss == "mse":
        raise ValueError(
            'The scores of loss="mse" are no probabilities: use decision_function, or fit with '
            'loss="ce".'
        )
