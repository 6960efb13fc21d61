"""What a fitted model says of nodes: Z* = H^-1 X W + 1 b^T, a block of outputs at a time.

Nothing of n x c numbers is needed unless it is asked for: outputs of some nodes are gathered block
by block, and labels take the best output so far, the second best and the class of the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.features import Features
from herta_gpu.plumbing.files import new_file
from herta_gpu.solver import RegularizedLaplacian, block_cg

TOL = 1e-6  # relative H-norm error of every output


class OutputBlock(NamedTuple):
    """Some outputs of all nodes, in the order in which the graph is stored."""

    J: slice
    Z: Array  # n x k
    error: float  # no number of Z is off by more than this


class Labels(NamedTuple):
    """The class with the largest output of each node, and how many were too close to call."""

    best: Array  # (n,) columns of Z
    undecided: int  # nodes whose two best outputs are closer than the error of the solve


class Outputs:
    """Z* = H^-1 X W, of which at most `width` columns exist at a time."""

    def __init__(
        self,
        systems: Sequence[RegularizedLaplacian],
        X: Features,
        W: Array,
        width: int,
        b: Array | None = None,
        extra: Features | None = None,
    ) -> None:
        """Of several H the outputs add up, each with its own block of rows of W; b is a constant
        per output.  `extra` are features that no H is applied to, with the last rows of W."""
        self.systems, self.H, self.X, self.W, self.width = systems, systems[0], X, W, width
        self.b, self.extra = b, extra

    def blocks(self) -> Iterator[OutputBlock]:
        """The outputs in turn, each from scratch: the same bits whichever others are asked for."""
        xp, c = self.H.backend.xp, self.W.shape[1]
        for j in range(0, c, self.width):
            J = slice(j, min(j + self.width, c))
            Z, error = self._solved(0, J)
            for i in range(1, len(self.systems)):
                more, off = self._solved(i, J)
                Z, error = Z + more, error + off
            if self.extra is not None:
                own = xp.ascontiguousarray(self.W[-self.extra.shape[1] :, J])
                Z = Z + self.extra.times(own).astype(Z.dtype)
            if self.b is not None:
                Z = Z + self.b[J].astype(Z.dtype)
            if not bool(xp.isfinite(Z).all()):  # synchronize!
                raise ValueError(
                    "H^-1 X W overflows: give X in the units the model was fitted with."
                )
            yield OutputBlock(J, Z, error)

    def _solved(self, i: int, J: slice) -> tuple[Array, float]:
        """Columns J of H^-1 X W for the i-th H, and a bound of their error."""
        H, d = self.systems[i], self.X.shape[1]
        B = self.X.times(H.backend.xp.ascontiguousarray(self.W[i * d : (i + 1) * d, J]))
        if H.lam == 0:
            return B, 0.0
        Z, info = block_cg(H, B, TOL)
        return Z, float(info.residuals.max(initial=0.0))

    def of(self, rows: Array | None, dtype: str) -> Array:
        """Z* at the stored rows `rows` (None: all)."""
        count = self.H.n if rows is None else rows.shape[0]
        out = self.H.backend.empty((count, self.W.shape[1]), dtype)
        for J, Z, _ in self.blocks():
            out[:, J] = Z if rows is None else Z[rows]
        return out

    def write(self, rows: Array | None, path: Path, dtype: str) -> Any:
        """Z* at the stored rows `rows` (None: all) in a new .npy file, given back as a map."""
        with self.file(rows, path, dtype) as file:
            for J, Z, _ in self.blocks():
                file[:, J] = self._on_host(Z, rows)
        return np.load(path, mmap_mode="r")

    @contextmanager
    def file(self, rows: Array | None, path: Path, dtype: str) -> Iterator[Any]:
        """A map of a new .npy file for Z* at the stored rows `rows` (None: all)."""
        shape = (self.H.n if rows is None else rows.shape[0], self.W.shape[1])
        with new_file(path) as temporary:
            made: Any = np.lib.format.open_memmap(temporary, "w+", np.dtype(dtype), shape)
            yield made
            made.flush()
            del made

    def _on_host(self, Z: Array, rows: Array | None) -> Any:
        return self.H.backend.to_numpy(Z if rows is None else Z[rows])  # synchronize!

    def labels(self, rows: Array | None, dtype: str, scores: Any = None) -> Labels:
        """The best class of the stored rows `rows` (None: all).

        `scores` is a map that takes Z* at these rows on the way.
        """
        xp, count = self.H.backend.xp, self.H.n if rows is None else rows.shape[0]
        first, second = (xp.full(count, -xp.inf, dtype=dtype) for _ in range(2))
        best, error = xp.zeros(count, dtype="int32"), 0.0
        for J, Z, off in self.blocks():
            error = max(error, off)
            if scores is not None:
                scores[:, J] = self._on_host(Z, rows)
            Z = (Z if rows is None else Z[rows]).astype(dtype, copy=False)
            for j in range(J.start, J.stop):
                z = Z[:, j - J.start]
                better = z > first
                second = xp.where(better, first, xp.maximum(second, z))
                first, best = xp.where(better, z, first), xp.where(better, j, best)
        close = first - second <= 2 * error
        return Labels(best, int(close.sum()) if self.W.shape[1] > 1 else 0)  # synchronize!


def check_probabilities(loss: str) -> None:
    """Raise an error unless outputs of this loss stand for probabilities."""
    if loss == "mse":
        raise ValueError(
            'The scores of loss="mse" are no probabilities: use decision_function, or fit with '
            'loss="ce".'
        )


def probabilities(xp: Any, Z: Array, loss: str) -> Array:
    """Softmax of each row for cross entropy; of each number its own for "bce"."""
    if loss == "bce":
        return 0.5 * (1.0 + xp.tanh(0.5 * Z))  # 1 / (1 + exp(-z)), which overflows nowhere
    S = xp.exp(Z - Z.max(axis=1, keepdims=True))
    return S / S.sum(axis=1, keepdims=True)
