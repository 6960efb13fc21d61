"""A hidden layer of random weights behind or before the diffusion: still convex in W.

Behind it, the cheaper place, psi sees the unit rows of H^-1 U (`random_features` has psi and U):
U is all that is solved for.  Before it, H^-1 psi(U) is the paper's nonlinear f.  Either way the
optimum over W is the global one, and its certificate covers the exact diffusion: what the solves
leave is carried through lengths and ReLUs to every column, and counts there as what the solves for
the other columns leave.  No array of n x w numbers exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, cast

import numpy as np

from herta_gpu.backends.base import Array, norm
from herta_gpu.certificate import merge_certificates
from herta_gpu.coordinates import Columns
from herta_gpu.diffusion import Rows
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.random_features import FLOOR, ROWS, UNIT, Layer, lengths_of
from herta_gpu.planning.plan import Recipe
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.bundles import Method
from herta_gpu.prediction import diffused
from herta_gpu.problem import UnfoldedMap


class _Made(Features, ABC):
    """Columns that a layer makes of n rows on the way: there is no array of all of them."""

    layer: Layer
    sparse = False

    @abstractmethod
    def rows_of(self, start: int, stop: int) -> Array:
        """Rows of inputs of the layer."""

    def parts(self, J: slice = slice(None)) -> Iterator[tuple[slice, Array]]:
        """(rows, those of the hidden columns J) in turn."""
        for a in range(0, self.shape[0], ROWS):
            rows = slice(a, min(a + ROWS, self.shape[0]))
            yield rows, self.layer.hidden(self.rows_of(rows.start, rows.stop), J)

    @property
    def sum_rounding(self) -> float:
        return (self.shape[0] + 2) * UNIT


class Behind(_Made):
    """The hidden columns behind the diffusion, on the rows that are trained on or, once `solve` has
    been called, on all of them."""

    def __init__(self, layer: Layer, X: Features, count: int) -> None:
        self.layer, self.backend, self.off = layer.on(X.backend), X.backend, 0.0
        U, off = self.layer.reduce(X)
        self.U = Features(U, X.backend)
        self.U.off, self.shape = norm(off), (X.shape[0], layer.R.shape[1])
        self.column_norms = self.layer.sizes(count)  # bounds, known before anything is solved for
        self.turned = 0.0

    @property
    def norm_bound(self) -> float:
        return float((self.column_norms**2).sum()) ** 0.5  # synchronize!

    def distinct_columns(self, at: Any) -> int:
        return self.shape[1]

    def inputs(self, A: UnfoldedMap, recipe: Recipe) -> tuple[Any, ...]:
        """What unit rows of H^-1 U are solved for with, as `Rows` are."""
        under = UnfoldedMap(A.H, self.U, A.train, A.width, systems=A.systems)
        under.row_floor = FLOOR
        blocks = [Columns.plain(self.U)] * under.blocks
        return under, replace(recipe, whiten=False), blocks

    def fill(self, under: Rows, train: Array, others: Array, unit: Array) -> Array:
        """Hidden columns in these units, from solved rows; (w,) bounds of what they are off by."""
        shrink = len(under.parts) ** -0.5
        for made, out in ((under.train_rows, train), (under.eval_rows, others)):
            for a in range(0, out.shape[0], ROWS):
                out[a : a + ROWS] = self.layer.hidden(shrink * made[a : a + ROWS]) * unit
        off = shrink * float(np.hypot.reduce([*under.turns.values()]))
        return self.layer.moved(off, train.shape[0]) * unit

    def solve(self, systems: Sequence[RegularizedLaplacian]) -> Behind:
        """The rows of all nodes, for outputs."""
        found, squares, shrink = [], 0.0, len(systems) ** -0.5
        for H in systems:
            B = self.backend.empty(self.U.shape, "float64")
            for rows, part in self.U.row_chunks():
                B[rows] = part
            Z, left = diffused(H, B)
            lengths = lengths_of(Z, FLOOR)
            squares += float((left**2).sum()) / float(lengths.min()) ** 2  # synchronize!
            found.append(Z * (shrink / lengths).astype(Z.dtype))
        self.V, self.turned = found, shrink * squares**0.5
        return self

    def rows_of(self, start: int, stop: int) -> Array:
        parts = [Z[start:stop] for Z in self.V]
        return parts[0] if len(parts) == 1 else self.backend.xp.concatenate(parts, axis=1)

    def times(self, W: Array) -> Array:
        out = self.backend.xp.empty((self.shape[0], W.shape[1]))
        for rows, part in self.parts():
            out[rows] = self.backend.matmul(part, W)
        return out

    def outputs_error(self, W: Array) -> float:
        return self.turned * float((self.layer.slopes @ abs(W)).max())  # synchronize!


class Before(_Made):
    """X and, beside it, what the layer makes of its rows: both are diffused."""

    def __init__(self, X: Features, layer: Layer) -> None:
        self.inner, self.layer, self.backend = X, layer.on(X.backend), X.backend
        self.U, off = self.layer.reduce(X)
        (n, d), w, xp = X.shape, layer.R.shape[1], X.backend.xp
        self.shape = (n, d + w)
        self.off = xp.concatenate([xp.zeros(d) + X.off, self.layer.moved(norm(off), n)])

    @property
    def reads(self) -> Any:
        return self.inner.reads

    def rows_of(self, start: int, stop: int) -> Array:
        return self.U[start:stop]

    def row_chunks(self, columns: slice | None = None) -> Iterator[tuple[slice, Array]]:
        d, w = self.inner.shape[1], self.layer.R.shape[1]
        J = columns or slice(0, d + w)
        right = slice(max(0, J.start - d), max(0, J.stop - d))
        if J.start >= d:
            yield from self.parts(right)
            return
        for rows, part in self.inner.row_chunks(slice(J.start, min(J.stop, d))):
            made = [part, self.layer.hidden(self.U[rows], right)] if J.stop > d else [part]
            yield rows, self.backend.xp.concatenate(made, axis=1) if J.stop > d else part

    def times(self, W: Array) -> Array:
        d = self.inner.shape[1]
        out = self.inner.times(W[:d])
        for rows, part in self.parts():
            out[rows] += self.backend.matmul(part, W[d:])
        return out

    def transpose_times(self, V: Array) -> Array:
        V, found = V.astype("float64", copy=False), 0.0
        for rows, part in self.parts():
            found = found + self.backend.matmul(part.T, V[rows])
        above = self.inner.transpose_times(V)
        return self.backend.xp.concatenate([above, self.backend.total(found)])

    @cached_property
    def column_norms(self) -> Array:
        squares = sum((part * part).sum(axis=0) for _, part in self.parts())
        hidden = self.backend.xp.sqrt(self.backend.total(squares))
        return self.backend.xp.concatenate([self.inner.column_norms, hidden])

    @cached_property
    def norm_bound(self) -> float:
        d, xp = self.inner.shape[1], self.backend.xp
        sizes = (self.column_norms[d:] + self.off[d:]) * (1 + self.sum_rounding)
        return float(np.hypot(self.inner.norm_bound, float(xp.sqrt((sizes * sizes).sum()))))

    def times_rounding(self, W: Array) -> float:
        d, sizes = self.inner.shape[1], self.backend.xp.sqrt((W * W).sum(axis=1))
        each = (W.shape[0] + 4) * UNIT * self.column_norms + self.off
        return self.inner.times_rounding(W[:d]) + float((each * sizes).sum())  # synchronize!

    @property
    def sum_rounding(self) -> float:
        return max(self.inner.sum_rounding, (self.shape[0] + 2) * UNIT)

    def transpose_rounding(self) -> Array:
        return self.sum_rounding * self.column_norms + self.off

    def distinct_columns(self, at: Any) -> int:
        return self.inner.distinct_columns(at) + self.layer.R.shape[1]


# ---- several draws ---------------------------------------------------------------------------
def each_draw(fit: Method) -> Method:
    """A `fit` that, with several draws of the layer, fits each and leaves the mean of their scores.

    Scores are linear in W: the mean of several fits is a model with all of their hidden columns.
    """

    @wraps(fit)
    def wrapped(model: Any, graph: Any, X: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings, made = model._settings(), []
        if settings.hidden_draws == 1:
            return fit(model, graph, X, *args, **kwargs)
        if kwargs.get("warm_start") is not None:
            raise ValueError("warm_start is for one draw of the hidden layer: hidden_draws=1.")
        checkpoint = kwargs.pop("checkpoint", None)
        for k in range(settings.hidden_draws):
            one = type(model)(**{**model.get_params(), "hidden_draws": 1})
            one._draw = k
            if checkpoint is not None:  # a folder of its own in the folder
                own = copy(checkpoint)
                own.folder = checkpoint.folder / f"draw-{k}"
                kwargs["checkpoint"] = own
            made.append(one.fit(graph, X, *args, **kwargs))
        return _take_mean(model, made, settings)

    return cast(Method, wrapped)


def _take_mean(model: Any, made: Sequence[Any], settings: Settings) -> Any:
    """Leave in `model` what the fits `made` of all draws say together."""
    first, k, w = made[0], len(made), settings.hidden
    vars(model).update({n: v for n, v in vars(first).items() if n[-1] == "_" or n == "_flat"})
    blocks = 1 if settings.hidden_after else settings.blocks
    size = settings.blocks * first.n_features_in_ // blocks
    parts: list[Any] = []
    for j in range(blocks):  # columns of X, then those of all layers
        a = j * (size + w)
        parts.append(sum(one.W_[a : a + size] for one in made) / k)
        parts += [one.W_[a + size : a + size + w] / k for one in made]
    parts.append(sum(one.W_[blocks * (size + w) :] for one in made) / k)
    model.W_ = np.concatenate(parts)
    drawn = {name: np.concatenate([m.fixed_[name] for m in made], axis=-1) for name in ("R", "b")}
    model.fixed_ = {**first.fixed_, **drawn}
    for name in ("intercept_", "outputs_", "loo_", "leverage_", "variance_"):
        if name in vars(first):
            setattr(model, name, sum(vars(one)[name] for one in made) / k)
    found, words = (
        merge_certificates([one.certificate_ for one in made]),
        [one.status_ for one in made],
    )
    order = ("diverged", "max_iter", "stagnated", "converged", "certified-reduced", "certified")
    model.certificate_, model.status_ = found, min(words, key=order.index)
    model.changes_ = [change for one in made for change in one.changes_]
    for name in ("history_", "warm_history_"):
        steps = [step for one in made for step in vars(one)[name]]
        setattr(model, name, [{**step, "step": i} for i, step in enumerate(steps)])
    names = dict.fromkeys(name for one in made for name in one.stages_)
    model.stages_ = {name: sum(one.stages_.get(name, 0.0) for one in made) for name in names}
    return model
