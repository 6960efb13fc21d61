"""Random ReLU features of X, and what computing them may be off by.

    u = V^T x / |V^T x|,      psi(u) = sqrt(2/w) max(R^T u + b, 0)

V are the leading right singular vectors of X, whitened; R and b are drawn once and never trained.
Two facts carry errors through:

* Rows of length at least s that move by eta turn by eta/s at most: x / max(|x|, f) is, up to the
  factor f, the projection onto a ball, which makes nothing longer.
* A ReLU moves no further than what goes into it, so column j moves by |R_j| times that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array, Backend, unit_roundoff
from herta_gpu.features import Features
from herta_gpu.plumbing.checks import MAX_SEED, check_count, check_scale
from herta_gpu.plumbing.interop import as_matrix, on_device
from herta_gpu.plumbing.targets import Estimator, not_fitted

FLOOR = 1e-3  # rows shorter than this share of the usual length are not made longer than that
BIAS = 0.5  # spread of b
_MORE = 10  # columns of the range finder beside those that are wanted
_PASSES = 4  # of the range finder over X^T X
_CUT = 1e-12  # of the largest: squared singular values below are no directions
ROWS = 1 << 10  # rows that are expanded together
UNIT = unit_roundoff()


@dataclass(frozen=True)
class Layer:
    """V, R and b of a layer: on the host, or where `on` has brought them."""

    V: Array  # (d, k)
    R: Array  # (blocks k, w): of several blocks unit rows stand side by side, together of length 1
    b: Array  # (w,)
    floor: float  # rows V^T x are divided by their length or, where they are shorter, by this
    scale: float  # sqrt(2/w)

    @classmethod
    def draw(
        cls, X: Features, width: int, rank: int | None, seed: int, draw: int = 0, blocks: int = 1
    ) -> Layer:
        """A layer for these features; `draw` tells those of one V apart."""
        backend, xp, (n, d) = X.backend, X.backend.xp, X.shape
        if rank is None or rank >= d:
            V = np.eye(d)
        else:
            rng = np.random.default_rng([seed, 17])
            start = rng.standard_normal((d, min(d, rank + _MORE)))
            Q = backend.asarray(start)
            for _ in range(_PASSES):
                Q = xp.linalg.qr(X.transpose_times(X.times(Q)))[0]
            XQ = X.times(Q)
            squares, T = np.linalg.eigh(backend.to_numpy(backend.matmul(XQ.T, XQ)))
            squares, T = squares[::-1][:rank], T[:, ::-1][:, :rank]
            kept = squares > _CUT * max(squares[0], 1e-300)
            V = backend.to_numpy(Q) @ T[:, kept] / np.sqrt(squares[kept])
            V = V * np.where((start[:, :1] * V).sum(axis=0) < 0, -1.0, 1.0)  # its sign is free
        rng = np.random.default_rng([seed, 18, draw])
        R = rng.standard_normal((blocks * V.shape[1], width))
        b, scale = BIAS * rng.standard_normal(width), float(np.sqrt(2.0 / width))
        lengths = lengths_of(X.times(backend.asarray(V)), 0.0)
        usual = float(xp.sqrt((lengths * lengths).mean())) if n else 1.0  # synchronize!
        return cls(V, R, b, FLOOR * usual or 1.0, scale)

    def on(self, backend: Backend) -> Layer:
        V, R, b = (backend.asarray(array, "float64") for array in (self.V, self.R, self.b))
        return replace(self, V=V, R=R, b=b)

    def reduce(self, X: Features) -> tuple[Array, Array]:
        """(unit rows U of X V in the order of the graph, (n, 1) bounds of what each is off by)."""
        xp, U = X.backend.xp, X.times(self.V)
        lengths = lengths_of(U, self.floor)
        wide = X.row_norms() * float(xp.sqrt((self.V * self.V).sum()))  # synchronize!
        return U / lengths, (sum(self.V.shape) + 8) * UNIT * wide / lengths

    def hidden(self, U: Array, J: slice = slice(None)) -> Array:
        """psi of some rows, of some outputs; rows see nothing but themselves."""
        F = U.astype("float64", copy=False) @ self.R[:, J] + self.b[J]
        return self.scale * F.clip(0.0, None)

    @cached_property
    def slopes(self) -> Array:
        """(w,) how far each output moves, at most, where a row moves by 1."""
        return self.scale * (self.R * self.R).sum(axis=0) ** 0.5

    def sizes(self, count: int) -> Array:
        """(w,) bounds of the norms of the outputs of so many rows of length 1."""
        return (self.slopes + self.scale * abs(self.b)) * float(np.sqrt(count))

    def moved(self, off: float, count: int) -> Array:
        """(w,) what the outputs of so many rows, off by this together, are off by themselves."""
        return self.slopes * off + (self.R.shape[0] + 8) * UNIT * self.sizes(count)


class RandomFeatures(Estimator):
    """x -> [u, sqrt(2/width) max(R^T u + b, 0)], u = V^T x scaled to length 1.

    What `HERTA(hidden=width)` puts behind (or before) the diffusion, for use on its own.

    Parameters
    ----------
    width : int
        Random ReLU features.
    rank : int or None
        Leading singular vectors of X that they see, whitened; None (or as many as X has columns):
        X as it is.
    random_state : int

    Attributes
    ----------
    layer_ : Layer
        V (d, k), R (k, width), b (width,).

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import RandomFeatures
    >>> X = np.random.default_rng(0).standard_normal((200, 30))
    >>> made = RandomFeatures(width=50, rank=8).fit(X)
    >>> U = made.reduce(X)
    >>> U.shape, made.expand(U).shape, bool(np.allclose((U * U).sum(axis=1), 1))
    ((200, 8), (200, 58), True)
    """

    def __init__(self, width: int = 1024, rank: int | None = 64, random_state: int = 0) -> None:
        self.width, self.rank, self.random_state = width, rank, random_state

    def fit(self, X: Any, y: Any = None) -> RandomFeatures:
        """Find V of X (n, d), an array or a sparse matrix; y is not looked at."""
        check_layer(self.width, self.rank)
        check_count("random_state", self.random_state, least=0, most=MAX_SEED)
        features = _features(X)
        self.layer_ = Layer.draw(features, self.width, self.rank, self.random_state)
        self.n_features_in_ = features.shape[1]
        return self

    def reduce(self, X: Any) -> Any:
        """The rows of X V, of length 1."""
        if not hasattr(self, "layer_"):
            raise not_fitted(self)
        features = _features(X)
        if features.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {features.shape[1]:,} features but {self.n_features_in_:,} were fitted."
            )
        return self.layer_.on(features.backend).reduce(features)[0]

    def expand(self, U: Any) -> Any:
        """[U, psi(U)] for unit rows U: those of `reduce`, or what a diffusion made of them."""
        if not hasattr(self, "layer_"):
            raise not_fitted(self)
        backend = get_backend("cuda" if on_device(U) else "cpu")
        U, layer = backend.asarray(U, "float64"), self.layer_.on(backend)
        parts = [layer.hidden(U[a : a + ROWS]) for a in range(0, len(U), ROWS)]
        hidden = backend.xp.concatenate(parts) if parts else layer.hidden(U)
        return backend.xp.concatenate([U, hidden], axis=1)

    def transform(self, X: Any) -> Any:
        """[U, psi(U)] of the rows U = `reduce(X)`."""
        return self.expand(self.reduce(X))

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).transform(X)


def check_layer(width: Any, rank: Any) -> None:
    """Raise an error unless a layer can have this width and rank."""
    check_count("hidden", width)
    if rank is not None:
        check_count("hidden_rank", rank)


def _features(X: Any) -> Features:
    backend = get_backend("cuda" if on_device(X) else "cpu")
    X = as_matrix(X, backend)
    if 0 in X.shape:
        raise ValueError("X is empty: give at least one row and one feature.")
    values = X.data if hasattr(X, "indptr") else X
    largest = float(abs(values).max()) if values.size else 0.0  # synchronize!
    if not np.isfinite(largest):
        raise ValueError("X holds NaN or infinity: leave out these rows, or fill them in.")
    check_scale(largest)
    return Features(X, backend)


def lengths_of(U: Array, floor: float) -> Array:
    """(n, 1) lengths of rows, or `floor` where they are shorter."""
    return ((U * U).sum(axis=1, keepdims=True) ** 0.5).clip(floor, None)
