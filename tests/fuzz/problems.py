"""Random problems, each from (seed, number) alone: graphs, features, targets and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from tests.fuzz.reference import LD, Reference, system

Rng = np.random.Generator


@dataclass(frozen=True)
class Problem:
    """What a caller would give to `fit`, and how it came about."""

    kind: str
    n: int
    edges: Any  # (2, m), each pair once, in any direction
    weights: Any  # (m,) or None
    X: Any
    y: Any
    train: Any
    params: dict[str, Any]
    story: str
    later: Problem | None = None  # of a resume: what the data are by then
    change: str = ""
    stop: int = 0  # the step in which the first fit is interrupted; -1: its last
    sample_weight: Any = None  # (n,)

    def rows(self) -> Any:
        """The training nodes that have any weight."""
        if self.sample_weight is None:
            return self.train
        return self.train[self.sample_weight[self.train] > 0]

    def targets(self) -> Any:
        """Y of the training rows: one-hot by label, or the floats."""
        y = self.y[self.rows()]
        if self.y.dtype.kind == "f" or self.params.get("loss") == "bce":
            return y.reshape(len(y), -1).astype(float)
        return (y[:, None] == np.unique(y)[None, :]).astype(float)

    def row_weights(self) -> Any:
        """Of the rows, by node and by class."""
        w = np.ones(self.n) if self.sample_weight is None else self.sample_weight
        w = w[self.rows()]
        if self.params.get("class_weight") == "balanced":
            Y = self.targets()
            w = w * (Y @ (len(Y) / (Y.shape[1] * Y.sum(axis=0))))
        return w

    @cached_property
    def reference(self) -> Reference:
        lam = self.params["lam"]
        lams = lam if isinstance(lam, list) else [lam]
        H = [system(self.n, self.edges, self.weights, one) for one in lams]
        loss, ridge = self.params.get("loss", "mse"), self.params.get("ridge", 0.0)
        return Reference(
            H, self.X, self.targets(), self.rows(), loss, ridge, self.row_weights(),
            self.params.get("fit_intercept", False),
        )  # fmt: skip


@dataclass
class Draft:
    """A problem in the making."""

    rng: Rng
    n: int = 0
    edges: Any = None
    weights: Any = None
    X: Any = None
    train: Any = None
    y: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def power(self, low: float, high: float) -> float:
        """Ten to a power between these."""
        return float(10.0 ** self.rng.uniform(low, high))

    def smooth(self, B: Any) -> Any:
        """H^-1 B in float64, for targets that the model can learn."""
        lam = self.params["lam"]
        lam = max(lam) if isinstance(lam, list) else lam
        H = system(self.n, self.edges, self.weights, lam).astype(float)
        return np.linalg.solve(H, B)

    def done(self, kind: str) -> Problem:
        story = ", ".join([f"n={self.n}", f"d={self.X.shape[1]}", f"train={len(self.train)}"])
        return Problem(
            kind, self.n, self.edges, self.weights, self.X, self.y, self.train, self.params,
            f"{story}: {', '.join(self.story)}",
        )  # fmt: skip


# ---- graphs --------------------------------------------------------------------------------
def draw_graph(p: Draft, least: int = 10, most: int = 250, shape: str = "") -> None:
    rng = p.rng
    n = p.n = int(p.power(np.log10(least), np.log10(most)))
    shape = shape or p.pick("random", "random", "hubs", "star", "path", "complete", "parts", "grid")
    if shape == "complete" and n > 60:
        shape = "random"
    lo, hi = np.triu_indices(n, 1)
    if shape == "random":
        keep = rng.random(lo.size) < rng.uniform(1, 12) / n
    elif shape == "hubs":
        hubs = max(1, n // 30)
        keep = ((lo < hubs) & (rng.random(lo.size) < 0.5)) | (rng.random(lo.size) < 2 / n)
    elif shape == "star":
        keep = lo == 0
    elif shape == "path":
        keep = hi == lo + 1
    elif shape == "grid":
        side = max(2, int(n**0.5))
        keep = ((hi == lo + 1) & (hi % side != 0)) | (hi == lo + side)
    elif shape == "parts":  # several components, isolated nodes among them
        part = rng.integers(0, rng.integers(2, 8), n)
        keep = (part[lo] == part[hi]) & (rng.random(lo.size) < 8 / n) & (lo >= n // 10)
    else:
        keep = np.ones(lo.size, dtype=bool)
    u, v = lo[keep], hi[keep]
    if p.chance(0.2):
        loops = np.flatnonzero(rng.random(n) < 0.3)
        u, v, shape = np.append(u, loops), np.append(v, loops), f"{shape} with self-loops"
    flip = rng.random(u.size) < 0.5
    p.edges = np.stack([np.where(flip, v, u), np.where(flip, u, v)])
    spread = p.pick(0, 0, 0, 1, 6, 6)
    if spread:
        p.weights = 10.0 ** rng.uniform(-spread, spread, u.size)
        shape += f", weights 1e-{spread}..1e{spread}"
    p.story.append(shape)


# ---- features ------------------------------------------------------------------------------
def draw_features(p: Draft, d: int) -> None:
    """Features of one origin; `spoil` makes them hard."""
    rng, n = p.rng, p.n
    origin = p.pick("gaussian", "gaussian", "gaussian", "0/1", "one-hot", "low rank", "coordinates")
    if origin == "0/1":
        X = (rng.random((n, d)) < rng.uniform(0.02, 0.3)).astype(float)
    elif origin == "one-hot":
        X = np.eye(d)[rng.integers(0, d, n)]
        X[:, -1] = 1.0  # and an intercept
    elif origin == "low rank":
        r = int(rng.integers(1, d + 1))
        X = rng.standard_normal((n, r)) @ rng.standard_normal((r, d))
    elif origin == "coordinates":
        t = np.arange(n) / n
        X = np.stack([np.cos(k * t * np.pi) for k in range(d)], axis=1)
    else:
        X = rng.standard_normal((n, d))
    p.X = X
    p.story.append(origin)


def spoil(p: Draft, how: str) -> None:
    """One way in which real features are unpleasant."""
    rng, X = p.rng, p.X
    n, d = X.shape
    j, k, i = (int(a) for a in rng.integers(0, d, 3))
    if how == "units":
        reach = p.pick(3, 6, 12)
        X *= 10.0 ** rng.uniform(-reach, reach, d)
        how += f" 1e-{reach}..1e{reach}"
    elif how == "one unit":
        scale = p.pick(1e-8, 1e8, 1e-6, 1e6, 1e-4, 1e4)
        X[:, j] *= scale
        how += f" {scale:g}"
    elif how == "offset":
        offset = p.power(0, 6)
        X += offset
        how += f" {offset:.0e}"
    elif how == "all units":
        X *= p.power(-12, 9)
    elif how == "equal columns":
        X[:, j] = X[:, k]
    elif how == "sum of columns":
        X[:, j] = X[:, k] + X[:, i]
    elif how == "nearly equal columns" and j != k:
        size = p.power(-9, -3)
        X[:, j] = X[:, k] + size * rng.standard_normal(n) * (np.abs(X[:, k]).max() or 1.0)
        how += f" {size:.0e}"
    elif how == "constant column":
        X[:, j] = p.power(-3, 3)
    elif how == "zero column":
        X[:, j] = 0.0
    elif how == "hidden column":  # the training rows see it through the graph, if at all
        X[p.train, j] = 0.0
    elif how == "rare column":
        X[:, j] = 0.0
        X[rng.integers(0, n, 2), j] = 1.0
    p.story.append(how)


SPOILS = (
    "units", "one unit", "offset", "all units", "equal columns", "sum of columns",
    "nearly equal columns", "constant column", "zero column", "hidden column", "rare column",
)  # fmt: skip


# ---- targets -------------------------------------------------------------------------------
def draw_train(p: Draft, count: int = 0) -> None:
    count = count or int(p.n * p.pick(0.1, 0.3, 0.6, 0.8, 1.0))
    p.train = np.sort(p.rng.choice(p.n, min(max(count, 2), p.n), replace=False))


def draw_targets(p: Draft, noise: float = -1.0) -> None:
    """Labels or floats, random or such as the model can learn."""
    rng, n, d = p.rng, p.n, p.X.shape[1]
    c = int(rng.integers(2, 5))
    noise = p.pick(1e-3, 0.1, 1.0, 1e3) if noise < 0 else noise
    sizes = np.abs(p.X).max(axis=0)
    B = p.smooth(p.X / np.where(sizes > 0, sizes, 1.0)) @ rng.standard_normal((d, c))
    F = B - B.mean(axis=0)
    F /= np.abs(F).max() or 1.0
    F += noise * rng.standard_normal((n, c))
    if p.params["loss"] == "ce" or p.chance(0.4):
        p.y = F.argmax(axis=1)
        while np.unique(p.y[p.train]).size < 2:  # one class alone is another problem
            p.y[p.train] = rng.integers(0, c, p.train.size)
        p.story.append(f"labels, noise {noise:g}")
        return
    unit = p.power(-12, 12) if p.chance(0.3) else 1.0
    p.y = unit * (F[:, 0] if p.chance(0.5) else F)
    if p.chance(0.03):
        p.y = np.zeros(n)
    p.story.append(f"floats of unit {unit:.0e}, noise {noise:g}")


# ---- settings ------------------------------------------------------------------------------
def draw_settings(p: Draft, **fixed: Any) -> None:
    optimizer = p.pick("cg", "cg", "cg", "cg", "gd", "momentum", "lbfgs", "adam")
    steps = {"gd": 40, "momentum": 40, "adam": 30}.get(optimizer, 80)
    params: dict[str, Any] = {
        "lam": p.power(-2, 3),
        "loss": p.pick("mse", "mse", "ce"),
        "ridge": p.pick(0.0, 0.0, p.power(-8, 2)),
        "tol": p.power(-8, -3),
        "strategy": p.pick("auto", "herta", "herta", "direct"),
        "optimizer": optimizer,
        "max_iter": steps,
        "dtype": p.pick("float32", "float64"),
        "random_state": int(p.rng.integers(1000)),
    }
    if p.chance(0.3):
        count = int(p.rng.integers(5, 60))
        params["sparsify"] = p.pick(False, True, 20 * count, "degree", "mixed")
    if p.chance(0.3):
        params["sketch"] = p.pick(False, True, int(p.rng.integers(20, 200)))
    if p.chance(0.05):
        params["precondition"] = False
    params.update(fixed)
    p.params = params


# ---- kinds ---------------------------------------------------------------------------------
def anything(p: Draft) -> Problem:
    draw_settings(p)
    draw_graph(p)
    d = int(p.power(0, 1.7))
    draw_features(p, d)
    draw_train(p, p.pick(0, 0, 0, 0, d, d // 2 + 1))
    for _ in range(p.pick(0, 1, 1, 2, 3)):
        spoil(p, p.pick(*SPOILS))
    draw_targets(p)
    if p.chance(0.25):
        p.X = sp.csr_array(p.X)
        p.story.append("sparse")
    return p.done("anything")


def ridge_and_units(p: Draft) -> Problem:
    """Columns of unequal units, or a large offset, and a ridge."""
    draw_settings(p, ridge=p.power(-4, 1), loss=p.pick("mse", "mse", "mse", "ce"))
    draw_graph(p, 60)
    draw_features(p, int(p.rng.integers(5, 31)))
    draw_train(p)
    spoil(p, p.pick("one unit", "units", "offset"))
    draw_targets(p, p.pick(1e-3, 0.1, 1.0))
    return p.done("ridge and units")


def few_rows(p: Draft) -> Problem:
    """Fewer training rows than columns, a ridge, one column in another unit: P of low rank."""
    draw_settings(p, ridge=p.power(-8, 0), loss="mse", strategy=p.pick("herta", "herta", "auto"))
    draw_graph(p, 100, 200, shape=p.pick("random", "hubs"))
    d = int(p.rng.integers(60, 120))
    p.X = p.rng.standard_normal((p.n, d))
    scale = p.power(0, 8)
    p.X[:, 0] *= scale
    p.story.append(f"gaussian, one column times {scale:.0e}")
    draw_train(p, int(d * p.rng.uniform(0.2, 0.49)))
    draw_targets(p, p.pick(0.1, 1.0))
    return p.done("few rows")


def planted(p: Draft) -> Problem:
    """Without a ridge: columns that differ by a little, and targets that need the difference."""
    draw_settings(p, ridge=0.0, loss="mse", lam=p.power(-2, 1))
    draw_graph(p, 60, 200)
    draw_features(p, int(p.rng.integers(3, 20)))
    draw_train(p, int(p.n * p.rng.uniform(0.5, 1.0)))
    signal, size = p.rng.standard_normal(p.n), p.power(-8, -4)
    p.X[:, 0] = p.X[:, -1] + size * signal
    y = p.smooth(signal)
    p.y = y / np.abs(y).max() * p.power(0, 2) + p.power(-3, -1) * p.rng.standard_normal(p.n)
    p.story.append(f"planted signal of size {size:.0e}")
    return p.done("planted")


def interpolating(p: Draft) -> Problem:
    """Fewer training rows than columns and no ridge: optima of 0, or nearly."""
    draw_settings(p, ridge=0.0, loss="mse")
    draw_graph(p, 40, 150)
    d = int(p.rng.integers(20, 80))
    draw_features(p, d)
    draw_train(p, int(d * p.rng.uniform(0.3, 1.1)) + 1)
    if p.chance(0.5):
        spoil(p, p.pick(*SPOILS))
    draw_targets(p)
    p.X = sp.csr_array(p.X) if p.chance(0.5) else p.X
    return p.done("interpolating")


def cross_entropy(p: Draft) -> Problem:
    """With a ridge, from random labels to classes that are nearly separable."""
    draw_settings(p, ridge=p.power(-5, 1), loss="ce")
    draw_graph(p, 40)
    draw_features(p, int(p.rng.integers(2, 20)))
    draw_train(p)
    if p.chance(0.5):
        spoil(p, p.pick(*SPOILS))
    draw_targets(p)
    return p.done("cross entropy")


def hard_graph(p: Draft) -> Problem:
    """Stars and paths under a large lam, where solves in float32 reach their limit."""
    draw_settings(p, lam=p.power(2, 4))
    draw_graph(p, 50, 400, shape=p.pick("star", "path", "hubs"))
    draw_features(p, int(p.rng.integers(1, 15)))
    draw_train(p)
    draw_targets(p)
    return p.done("hard graph")


def stored_rows(p: Draft) -> Problem:
    """Problems that are proven from the stored rows of Q, down to tolerances near rounding."""
    loss = p.pick("mse", "ce")
    ridge = p.power(-4, 1) if loss == "ce" or p.chance(0.4) else 0.0
    draw_settings(
        p, strategy=p.pick("direct", "direct", "auto"), loss=loss, ridge=ridge,
        tol=p.power(-10, -3), lam=p.power(-2, 2.5), optimizer=p.pick("cg", "cg", "lbfgs"),
        precondition=True, sketch="auto", sparsify="auto",
    )  # fmt: skip
    draw_graph(p, 40)
    d = int(p.power(0, 1.6))
    draw_features(p, d)
    draw_train(p, p.pick(0, 0, d, d + 1, d + 3))
    for _ in range(p.pick(0, 0, 1, 1, 2)):
        spoil(p, p.pick(*SPOILS, "hidden column", "hidden column"))
    draw_targets(p)
    if p.chance(0.25):
        p.X = sp.csr_array(p.X)
        p.story.append("sparse")
    if p.chance(0.4):
        p.params["memory_budget"] = _narrow_budget(p, int(p.rng.integers(1, 6)))
        p.story.append("narrow blocks")
    if p.chance(0.15):
        p.params["device"] = "cpu-scipy"
    if p.chance(0.15):
        p.params["reorder"] = True
    return p.done("stored rows")


def _narrow_budget(p: Draft, columns: int) -> int:
    """Bytes that hold about so many columns beside what must be there, and no residual of Q."""
    m, n, d, count = p.edges.shape[1], p.n, p.X.shape[1], len(p.train)
    c, word = 4, 4 if p.params["dtype"] == "float32" else 8
    held = 8 * m + 40 * n + 8 * count * (d + (2 if p.params["loss"] == "mse" else 8) * c)
    held += 24 * d * d + (24 * p.X.nnz if sp.issparse(p.X) else 0)
    return 4 * (held + columns * (3 * word * n + 24 * count)) // 3  # chunks of X take a quarter


def blocks_of_outputs(p: Draft) -> Problem:
    """Outputs of unequal size and difficulty, with memory for one or a few of them at a time."""
    draw_settings(
        p, strategy=p.pick("herta", "herta", "herta", "auto"), loss="mse", lam=p.power(-2, 2.5),
        ridge=p.pick(0.0, 0.0, p.power(-8, 2)), tol=p.power(-9, -3),
    )  # fmt: skip
    draw_graph(p, 40)
    d, c = int(p.power(0, 1.3)), int(p.rng.integers(2, 9))
    draw_features(p, d)
    draw_train(p, p.pick(0, 0, 0, d, d + 2))
    for _ in range(p.pick(0, 0, 1, 2)):
        spoil(p, p.pick(*SPOILS))
    size = np.sqrt(((p.X.toarray() if sp.issparse(p.X) else p.X) ** 2).sum(axis=0))
    F = p.smooth(p.X / np.where(size > 0, size, 1.0)) @ p.rng.standard_normal((d, c))
    noise = p.rng.choice([0.0, 1e-3, 0.3, 1.0], c)  # 0: the optimum of this output is 0
    F = (F + noise * p.rng.standard_normal((p.n, c))) * 10.0 ** p.rng.uniform(-4, 4, c)
    p.y = F * (p.rng.random(c) < 0.9)
    m, n, count, word = p.edges.shape[1], p.n, len(p.train), 8
    held = 8 * m + 40 * n + word * n * d + 8 * count * c + 24 * d * d
    held += 24 * p.X.nnz if sp.issparse(p.X) else 0
    at_once = int(p.rng.integers(1, c))
    p.params["memory_budget"] = 4 * (held + at_once * n * 136) // 3  # chunks of X take a quarter
    p.story.append(f"memory for about {at_once} of {c} outputs")
    return p.done("blocks of outputs")


CHANGES = ("nothing", "max_iter", "X", "one entry of X", "y", "train", "graph", "weights", "lam")


def resumed(p: Draft) -> Problem:
    """A fit that is interrupted, other data in its place, and a fit with the same folder."""
    draw_settings(p, strategy=p.pick("herta", "herta", "direct"), tol=p.power(-8, -5))
    if p.params["loss"] == "ce":
        p.params["ridge"] = p.power(-4, 0)
    p.params.pop("precondition", None)
    draw_graph(p, 40, 150)
    draw_features(p, int(p.rng.integers(2, 20)))
    draw_train(p, int(0.6 * p.n))
    draw_targets(p, p.pick(0.1, 1.0))
    if p.weights is None:
        p.weights = np.ones(p.edges.shape[1])
    change = p.pick(*CHANGES)
    p.story.append(f"changed: {change}")
    first = p.done("resume")
    stop = -1 if p.chance(0.5) else int(p.rng.integers(1, 6))
    return replace(first, later=_changed(p, first, change), change=change, stop=stop)


def _changed(p: Draft, first: Problem, change: str) -> Problem:
    rng = p.rng
    if change == "X":
        return replace(first, X=first.X + 0.5 * rng.standard_normal(first.X.shape))
    if change == "one entry of X":
        X = first.X.copy()
        X[int(rng.integers(first.n)), int(rng.integers(X.shape[1]))] += 100.0
        return replace(first, X=X)
    if change == "y":
        return replace(first, y=rng.permutation(first.y))
    if change == "train":
        others = np.sort(rng.choice(first.n, first.train.size, replace=False))
        missing = np.unique(first.y[others]).size != np.unique(first.y[first.train]).size
        return replace(first, train=first.train if p.y.dtype.kind != "f" and missing else others)
    if change == "graph":
        keep = rng.random(first.edges.shape[1]) < 0.7
        return replace(first, edges=first.edges[:, keep], weights=first.weights[keep])
    if change == "weights":
        return replace(
            first, weights=first.weights * 10.0 ** rng.uniform(-1, 1, first.weights.size)
        )
    if change in ("lam", "max_iter"):
        old = first.params[change]
        return replace(first, params={**first.params, change: old * 3})
    return first


def beyond(p: Draft) -> Problem:
    """Weights of rows, an intercept, several lam, several labels per node; also interrupted."""
    loss = p.pick("mse", "mse", "ce", "bce")
    ridge = p.power(-6, 2) if loss != "mse" or p.chance(0.5) else 0.0
    draw_settings(p, loss=loss, ridge=ridge, fit_intercept=p.chance(0.6))
    if p.chance(0.45):
        lams = p.pick([0.0], [0.0, 1.0], [0.0, p.power(-2, 2)], [1.0, 20.0], [0.0, 1.0, 20.0])
        fixed = {"strategy": p.pick("auto", "direct"), "optimizer": p.pick("cg", "lbfgs")}
        p.params |= {"lam": lams, "sparsify": "auto", "sketch": "auto", **fixed}
        p.params.pop("precondition", None)
        p.story.append(f"lam {lams}")
    draw_graph(p, 20, 150)
    d = int(p.power(0, 1.4))
    draw_features(p, d)
    draw_train(p, p.pick(0, 0, 0, d // 2 + 1, 3 * d))
    for _ in range(p.pick(0, 0, 1, 2)):
        spoil(p, p.pick(*SPOILS))
    draw_targets(p)
    if loss == "bce":
        c = int(p.rng.integers(1, 4))
        p.y = p.rng.integers(-1 if p.chance(0.4) else 0, 2, (p.n, c))
        p.y[p.train[0]] = 1
        p.story.append(f"{c} labels of 0 or 1")
    elif p.y.dtype.kind != "f" and p.chance(0.3):
        p.params["class_weight"] = "balanced"
    first = p.done("beyond")
    if p.chance(0.7):
        spread = p.pick(0.3, 1, 3, 8)
        weight = 10.0 ** p.rng.uniform(-spread, spread, p.n)
        weight[p.rng.random(p.n) < p.pick(0.0, 0.2)] = 0.0
        weight[p.train[0]] = 1.0
        story = f"{first.story}, weights of rows 1e-{spread}..1e{spread}"
        first = replace(first, sample_weight=weight, story=story)
    if p.chance(0.15):
        return replace(first, later=first, change="nothing", stop=-1)
    return first


KINDS: dict[str, tuple[float, Callable[[Draft], Problem]]] = {
    "anything": (0.26, anything),
    "stored rows": (0.2, stored_rows),
    "ridge and units": (0.12, ridge_and_units),
    "few rows": (0.07, few_rows),
    "planted": (0.08, planted),
    "resume": (0.12, resumed),
    "interpolating": (0.07, interpolating),
    "cross entropy": (0.1, cross_entropy),
    "hard graph": (0.07, hard_graph),
    "beyond": (0.25, beyond),
    "blocks of outputs": (0.08, blocks_of_outputs),
}


def draw(seed: int, number: int, kind: str | None = None) -> Problem:
    """Problem `number` of `seed`, whatever was drawn before it."""
    rng = np.random.default_rng([seed, number])
    shares = np.array([share for share, _ in KINDS.values()])
    usual = list(KINDS)[int(rng.choice(len(KINDS), p=shares / shares.sum()))]
    return KINDS[kind or usual][1](Draft(rng))


__all__ = ["KINDS", "LD", "Problem", "draw"]
