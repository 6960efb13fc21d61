"""Random problems, each from (seed, number) alone: graphs, features, targets and settings.

`KINDS` is the table: what a kind fixes or prefers, and the function that has the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from tests.fuzz.reference import Reference, system

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
    factor: Any = None  # (m,) what edges are multiplied by, with their degrees kept
    before: Problem | None = None  # of a warm start: what the model with the weights is fitted to

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
        H = [system(self.n, self.edges, self.weights, one, self.factor) for one in lams]
        loss, ridge = self.params.get("loss", "mse"), self.params.get("ridge", 0.0)
        intercept = self.params.get("fit_intercept", False)
        return Reference(
            H, self.X, self.targets(), self.rows(), loss, ridge, self.row_weights(), intercept
        )


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
    more: dict[str, Any] = field(default_factory=dict)  # of the Problem

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def power(self, low: float, high: float) -> float:
        """Ten to a power between these."""
        return float(10.0 ** self.rng.uniform(low, high))

    def value(self, wish: Any) -> Any:
        """A wish from the table: a function of the draft, or the value itself."""
        return wish(self) if callable(wish) else wish

    def smooth(self, B: Any) -> Any:
        """H^-1 B in float64, for targets that the model can learn."""
        H = system(self.n, self.edges, self.weights, float(np.max(self.params["lam"])))
        return np.linalg.solve(H.astype(float), B)

    def done(self, kind: str) -> Problem:
        story = ", ".join([f"n={self.n}", f"d={self.X.shape[1]}", f"train={len(self.train)}"])
        return Problem(
            kind, self.n, self.edges, self.weights, self.X, self.y, self.train, self.params,
            f"{story}: {', '.join(self.story)}", **self.more,
        )  # fmt: skip


def power(low: float, high: float) -> Callable[[Draft], float]:
    return lambda p: p.power(low, high)


def pick(*choices: Any) -> Callable[[Draft], Any]:
    return lambda p: p.value(p.pick(*choices))


def between(low: int, high: int) -> Callable[[Draft], int]:
    return lambda p: int(p.rng.integers(low, high))


def some_ridge(low: float, high: float) -> Callable[[Draft], float]:
    """Only squares have an optimum without one."""
    return lambda p: p.power(low, high) * (p.params["loss"] != "mse" or p.chance(0.5))


def of_columns(low: float, high: float) -> Callable[[Draft], int]:
    """So many training rows, in shares of the number of columns."""
    return lambda p: int(p.X.shape[1] * p.rng.uniform(low, high)) + 1


def columns_plus(*extra: int) -> Callable[[Draft], int]:
    return lambda p: int(p.X.shape[1]) + p.pick(*extra)


# ---- graphs --------------------------------------------------------------------------------
def grid(p: Draft, u: Any, v: Any, chance: Any) -> Any:
    side = max(2, int(p.n**0.5))
    return ((v == u + 1) & (v % side != 0)) | (v == u + side)


def parts(p: Draft, u: Any, v: Any, chance: Any) -> Any:
    """Several components, isolated nodes among them."""
    part = p.rng.integers(0, p.rng.integers(2, 8), p.n)
    return (part[u] == part[v]) & (chance < 8 / p.n) & (u >= p.n // 10)


def cliques(p: Draft, u: Any, v: Any, chance: Any) -> Any:
    size = between(2, 9)(p)
    return u // size == v // size


SHAPES: dict[str, Callable[[Draft, Any, Any, Any], Any]] = {  # which pairs u < v are edges
    "random": lambda p, u, v, chance: chance < p.rng.uniform(1, 12) / p.n,
    "hubs": lambda p, u, v, c: ((u < max(1, p.n // 30)) & (c < 0.5)) | (c < 2 / p.n),
    "star": lambda p, u, v, chance: u == 0,
    "path": lambda p, u, v, chance: v == u + 1,
    "grid": grid,
    "parts": parts,
    "complete": lambda p, u, v, chance: u < v,
    "matching": lambda p, u, v, chance: (u % 2 == 0) & (v == u + 1),
    "half isolated": lambda p, u, v, c: (u >= p.n // 2) & (c < p.rng.uniform(1, 12) / p.n),
    "cliques": cliques,
}
USUAL = ("random", "random", "hubs", "star", "path", "cliques", "parts", "grid")
FEW_EIGENVALUES = ("matching", "complete", "half isolated", "cliques")


def draw_graph(p: Draft, nodes: tuple[int, int], shape: str) -> None:
    p.n = int(p.power(*np.log10(nodes)))
    u, v = np.triu_indices(p.n, 1)
    keep = SHAPES[shape](p, u, v, p.rng.random(u.size))
    u, v = u[keep], v[keep]
    if p.chance(0.2):
        loops = np.flatnonzero(p.rng.random(p.n) < 0.3)
        u, v, shape = np.append(u, loops), np.append(v, loops), f"{shape} with self-loops"
    flip = p.rng.random(u.size) < 0.5
    p.edges = np.stack([np.where(flip, v, u), np.where(flip, u, v)])
    spread = p.pick(0, 0, 0, 1, 6, 6)
    if spread:
        p.weights = 10.0 ** p.rng.uniform(-spread, spread, u.size)
        shape += f", weights 1e-{spread}..1e{spread}"
    p.story.append(shape)


# ---- features ------------------------------------------------------------------------------
def one_hot(rng: Rng, n: int, d: int) -> Any:
    X = np.eye(d)[rng.integers(0, d, n)]
    X[:, -1] = 1.0  # and an intercept
    return X


def low_rank(rng: Rng, n: int, d: int) -> Any:
    r = int(rng.integers(1, d + 1))
    return rng.standard_normal((n, r)) @ rng.standard_normal((r, d))


ORIGINS: dict[str, Callable[[Rng, int, int], Any]] = {
    "gaussian": lambda rng, n, d: rng.standard_normal((n, d)),
    "0/1": lambda rng, n, d: (rng.random((n, d)) < rng.uniform(0.02, 0.3)).astype(float),
    "one-hot": one_hot,
    "low rank": low_rank,
    "coordinates": lambda rng, n, d: np.cos(np.outer(np.arange(n) / n, np.arange(d)) * np.pi),
}
SCALES = {
    "one unit": pick(1e-8, 1e8, 1e-6, 1e6, 1e-4, 1e4),
    "any unit": power(0, 8),
    "extreme unit": pick(1e-20, 1e-30, 1e-100, 1e-150, 1e12, 1e16, 1e30),
}
COLUMNS: dict[str, Callable[[Draft, Any, Any], Any]] = {  # one, made from two others
    "equal columns": lambda p, a, b: a,
    "sum of columns": lambda p, a, b: a + b,
    "nearly equal columns": lambda p, a, b: (
        a + p.power(-9, -3) * p.rng.standard_normal(p.n) * (np.abs(a).max() or 1.0)
    ),
    "constant column": lambda p, a, b: p.power(-3, 3),
    "zero column": lambda p, a, b: 0.0,
    "hidden column": lambda p, a, b: np.where(np.isin(np.arange(p.n), p.train), 0.0, a),
    "rare column": lambda p, a, b: np.isin(np.arange(p.n), p.rng.integers(0, p.n, 2)),
}
SPOILS = ("units", "one unit", "offset", "all units", *COLUMNS)


def spoil(p: Draft, how: str) -> None:
    """One way in which real features are unpleasant."""
    X, j = p.X, between(0, p.X.shape[1])(p)
    if how in ("units", "extreme units"):
        reach = p.pick(3, 6, 12) if how == "units" else p.pick(20, 60, 140)
        X *= 10.0 ** p.rng.uniform(-reach, min(reach, 15), X.shape[1])
        how += f" 1e-{reach}.."
    elif how in SCALES:
        scale = SCALES[how](p)
        X[:, j] *= scale
        how += f" {scale:g}"
    elif how == "offset":
        X += p.power(0, 6)
    elif how == "all units":
        X *= p.power(-12, 9)
    else:
        others = p.rng.integers(0, X.shape[1], 2)
        X[:, j] = COLUMNS[how](p, *X[:, others].T)
    p.story.append(how)


# ---- targets and settings ------------------------------------------------------------------
def draw_train(p: Draft, count: int) -> None:
    count = count or int(p.n * p.pick(0.1, 0.3, 0.6, 0.8, 1.0))
    p.train = np.sort(p.rng.choice(p.n, min(max(count, 2), p.n), replace=False))


def draw_targets(p: Draft, noise: float) -> None:
    """Labels or floats, random or such as the model can learn."""
    rng, n, d = p.rng, p.n, p.X.shape[1]
    c = int(rng.integers(2, 5))
    sizes = np.abs(p.X).max(axis=0)
    B = p.smooth(p.X / np.where(sizes > 0, sizes, 1.0)) @ rng.standard_normal((d, c))
    F = B - B.mean(axis=0)
    F /= np.abs(F).max() or 1.0
    F += noise * rng.standard_normal((n, c))
    if p.params["loss"] == "bce":
        p.y = rng.integers(-1 if p.chance(0.4) else 0, 2, (n, c - 1))
        p.y[:, 0] = np.maximum(p.y[:, 0], 0)  # a node without any label is refused
        p.y[p.train[0]] = 1
        p.story.append(f"{c - 1} labels of 0 or 1")
        return
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


def draw_settings(p: Draft, wishes: dict[str, Any]) -> None:
    optimizer = p.pick("cg", "cg", "cg", "cg", "gd", "momentum", "lbfgs", "adam")
    p.params = {
        "lam": p.power(-2, 3),
        "loss": p.pick("mse", "mse", "ce"),
        "ridge": p.pick(0.0, 0.0, p.power(-8, 2)),
        "tol": p.power(-8, -3),
        "strategy": p.pick("auto", "herta", "herta", "direct"),
        "optimizer": optimizer,
        "max_iter": {"gd": 40, "momentum": 40, "adam": 30}.get(optimizer, 80),
        "dtype": p.pick("float32", "float64"),
        "random_state": int(p.rng.integers(1000)),
    }
    if p.chance(0.3):
        p.params["sparsify"] = p.pick(False, True, 20 * between(5, 60)(p), "degree", "mixed")
    if p.chance(0.3):
        p.params["sketch"] = p.pick(False, True, between(20, 200)(p))
    if p.chance(0.05):
        p.params["precondition"] = False
    for name, wish in wishes.items():  # which may look at those before it
        p.params[name] = p.value(wish)


def weigh_rows(p: Draft, spread: float) -> None:
    weight = 10.0 ** p.rng.uniform(-spread, spread, p.n)
    weight[p.rng.random(p.n) < p.pick(0.0, 0.2)] = 0.0
    weight[p.train[0]] = 1.0
    p.more["sample_weight"] = weight
    p.story.append(f"weights of rows 1e-{spread}..1e{spread}")


# ---- the last word of some kinds -----------------------------------------------------------
def plant(p: Draft) -> None:
    """Columns that differ by a little, and targets that need the difference."""
    signal, size = p.rng.standard_normal(p.n), p.power(-8, -4)
    p.X[:, 0] = p.X[:, -1] + size * signal
    y = p.smooth(signal)
    p.y = y / np.abs(y).max() * p.power(0, 2) + p.power(-3, -1) * p.rng.standard_normal(p.n)
    p.story.append(f"planted signal of size {size:.0e}")


def be_short_of_memory(p: Draft) -> None:
    if p.chance(0.4):  # a few columns beside what must be there, and no residual of Q
        m, n, d, count = p.edges.shape[1], p.n, p.X.shape[1], len(p.train)
        columns, word = between(1, 6)(p), 4 if p.params["dtype"] == "float32" else 8
        held = 8 * m + 40 * n + 8 * count * (d + (8 if p.params["loss"] == "mse" else 32))
        held += 24 * d * d + (24 * p.X.nnz if sp.issparse(p.X) else 0)
        p.params["memory_budget"] = 4 * (held + columns * (3 * word * n + 24 * count)) // 3
        p.story.append("narrow blocks")
    p.params |= {"device": "cpu-scipy"} if p.chance(0.15) else {}
    p.params |= {"reorder": True} if p.chance(0.15) else {}


def unequal_outputs(p: Draft) -> None:
    """Outputs of unequal size and difficulty, with memory for one or a few of them at a time."""
    (n, d), c = p.X.shape, between(2, 9)(p)
    size = np.sqrt((p.X**2).sum(axis=0))
    F = p.smooth(p.X / np.where(size > 0, size, 1.0)) @ p.rng.standard_normal((d, c))
    noise = p.rng.choice([0.0, 1e-3, 0.3, 1.0], c)  # 0: the optimum of this output is 0
    F = (F + noise * p.rng.standard_normal((n, c))) * 10.0 ** p.rng.uniform(-4, 4, c)
    p.y = F * (p.rng.random(c) < 0.9)
    at_once = between(1, c)(p)
    held = 8 * p.edges.shape[1] + 40 * n + 8 * n * d + 8 * len(p.train) * c + 24 * d * d
    p.params["memory_budget"] = 4 * (held + at_once * n * 136) // 3  # chunks of X take a quarter
    p.story.append(f"memory for about {at_once} of {c} outputs")


def several_lam(p: Draft, *choices: Any) -> None:
    lams = p.value(p.pick(*choices))
    fixed = {"strategy": p.pick("auto", "direct"), "optimizer": p.pick("cg", "lbfgs")}
    p.params |= {"lam": lams, "sparsify": "auto", "sketch": "auto", **fixed}
    p.params.pop("precondition", None)
    p.story.append(f"lam {lams}")


def go_beyond(p: Draft) -> None:
    if p.chance(0.45):
        some = (lambda p: [0.0, p.power(-2, 2)],)
        several_lam(p, [0.0], [0.0, 1.0], *some, [1.0, 20.0], [0.0, 1.0, 20.0])
    if p.y.dtype.kind != "f" and p.params["loss"] != "bce" and p.chance(0.3):
        p.params["class_weight"] = "balanced"
    if p.chance(0.7):
        weigh_rows(p, p.pick(0.3, 1, 3, 8))
    if p.chance(0.15):
        p.more |= {"later": p.done("beyond"), "change": "nothing", "stop": -1}


def be_extreme(p: Draft) -> None:
    """Units of y and weights of rows that float64 can hardly square, lam far apart."""
    if p.y.dtype.kind == "f" and p.chance(0.6):
        unit = p.power(*p.pick((-170, -140), (-60, -20), (10, 25), (25, 60)))
        p.y = p.y * unit
        p.story.append(f"y in units of {unit:.0e}")
    if p.chance(0.4):
        several_lam(p, [0.4, 1.8, 1e6], [0.0, 1e6], [1e-6, 1.0, 1e5], [1.0, 20.0])
    if p.chance(0.4):
        weigh_rows(p, p.pick(8, 16, 25))


def make_columns(p: Draft) -> None:
    """Hidden layers, rows of length 1, hops: at least one of them."""
    hops = p.pick(None, None, [0], [0, 1, 2], [1, 3])
    lam = p.pick(p.power(-1, 2), [0.0, p.power(-1, 2)], [1.0, 20.0])
    p.params |= {"lam": 1.0 if hops and p.chance(0.5) else lam, "hops": hops}
    p.params |= {"sparsify": "auto", "sketch": "auto", "optimizer": p.pick("cg", "lbfgs")}
    p.params |= {"strategy": p.pick("auto", "direct"), "row_norm": p.chance(0.4)}
    p.params.pop("precondition", None)
    if p.chance(0.7) or not (hops or p.params["row_norm"]):
        at = p.pick("after", "after", "before")
        p.params |= {"hidden": int(p.rng.integers(1, 60)), "hidden_at": at}
        p.params["hidden_rank"] = p.pick(None, 1, 3, 8)
    if p.chance(0.4):
        weigh_rows(p, p.pick(0.3, 1, 3))
    p.story.append(str({k: v for k, v in p.params.items() if k[:3] in ("hid", "row", "hop")}))


CHANGES: dict[str, Callable[[Draft], dict[str, Any]]] = {  # what is different then
    "nothing": lambda p: {},
    "max_iter": lambda p: {"params": {**p.params, "max_iter": 3 * p.params["max_iter"]}},
    "lam": lambda p: {"params": {**p.params, "lam": 3 * p.params["lam"]}},
    "X": lambda p: {"X": p.X + 0.5 * p.rng.standard_normal(p.X.shape)},
    "one entry of X": lambda p: {"X": p.X + 100.0 * (np.arange(p.X.size) == 7).reshape(p.X.shape)},
    "y": lambda p: {"y": p.rng.permutation(p.y)},
    "train": lambda p: other_rows(p, p.train.size),
    "graph": lambda p: dict(zip(("edges", "weights"), fewer_edges(p), strict=True)),
    "weights": lambda p: {"weights": p.weights * 10.0 ** p.rng.uniform(-1, 1, p.weights.size)},
}


def other_rows(p: Draft, count: int) -> dict[str, Any]:
    rows = np.sort(p.rng.choice(p.n, count, replace=False))
    missing = np.unique(p.y[rows]).size != np.unique(p.y[p.train]).size
    return {} if p.y.dtype.kind != "f" and missing else {"train": rows}


def fewer_edges(p: Draft) -> tuple[Any, Any]:
    keep = p.rng.random(p.edges.shape[1]) < 0.7
    return p.edges[:, keep], None if p.weights is None else p.weights[keep]


def change_later(p: Draft) -> None:
    """A fit that is interrupted, other data in its place, and a fit with the same folder."""
    p.params.pop("precondition", None)
    if p.params["loss"] == "ce":
        p.params["ridge"] = p.power(-4, 0)
    p.weights = np.ones(p.edges.shape[1]) if p.weights is None else p.weights
    change = p.pick(*CHANGES)
    p.story.append(f"changed: {change}")
    later = replace(p.done("resume"), **CHANGES[change](p))
    stop = -1 if p.chance(0.5) else between(1, 6)(p)
    p.more |= {"later": later, "change": change, "stop": stop}


def start_warm(p: Draft) -> None:
    """From the weights of a model of other data, which may be far from the optimum, or at it."""
    change = p.pick("nothing", "X", "y", "unit", "train", "all rows", "all rows", "graph", "lam")
    p.story.append(f"weights of another model: {change}")
    if change == "unit":
        other = {"y": p.y * p.power(-9, 9)} if p.y.dtype.kind == "f" else {}
    else:
        other = other_rows(p, p.n) if change == "all rows" else CHANGES[change](p)
    p.more["before"] = replace(p.done("warm start"), **other)


def as_layer(p: Draft) -> None:
    """F and dZ in one of four precisions, in units down to where they vanish."""
    dtype = p.pick("float16", "float16", "bfloat16", "bfloat16", "float32", "float64")
    low, high = {"float16": (-8, 4.5), "bfloat16": (-40, 38), "float32": (-45, 38),
                 "float64": (-323, 308)}[dtype]  # fmt: skip
    k, unit = between(1, 6)(p), (low, high) if p.chance(0.6) else (-2, 2)
    p.X, p.y = (
        np.clip(p.rng.standard_normal((p.n, k)), -1, 1) * 10.0 ** p.rng.uniform(*unit, k)
        for _ in range(2)
    )
    method = p.pick("chebyshev", "cg")
    p.params = {"lam": p.params["lam"], "tol": p.power(-8, -0.5), "method": method, "dtype": dtype}


def weigh_edges(p: Draft) -> None:
    """`Graph.reweighted`: some edges gone, some hardly there."""
    factor = p.rng.random(p.edges.shape[1]) ** p.pick(0.1, 1, 5, 30)
    factor[p.rng.random(factor.size) < p.pick(0.0, 0.3, 1.0)] = 0.0
    p.more["factor"] = np.where(p.edges[0] == p.edges[1], 1.0, factor)
    p.story.append("reweighted")


def as_walk(p: Draft) -> None:
    """Sets of seeds, most of them small, and a damping up to where walks hardly end."""
    k = between(1, 6)(p)
    p.X = p.rng.random((p.n, k)) ** p.pick(1, 9) * (p.rng.random((p.n, k)) < p.pick(0.05, 0.5, 1.0))
    p.X[p.rng.integers(0, p.n, k), np.arange(k)] = 1.0
    damping = p.pick(0.0, 0.5, 0.85, 0.99, 1 - p.power(-4.5, -2))
    loops = p.chance(0.3)
    p.params = {"damping": damping, "tol": p.power(-12, -1), "self_loops": loops}
    p.story.append(f"damping {damping:.6g}")


# ---- kinds ---------------------------------------------------------------------------------
MANY_COLUMNS, MANY_STRATEGIES = power(0, 1.7), pick("herta", "herta", "direct")


@dataclass(frozen=True)
class Kind:
    """What is drawn; a function stands for a number that is drawn as well."""

    share: float
    settings: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[int, int] = (10, 250)
    shapes: tuple[str, ...] = USUAL
    d: Any = MANY_COLUMNS
    origins: tuple[str, ...] = ("gaussian", "gaussian", *ORIGINS)
    rows: Any = 0  # of training; 0: a share of the nodes
    spoils: tuple[str, ...] = SPOILS
    how_many: tuple[int, ...] = (0,)  # of them
    noise: tuple[float, ...] = (1e-3, 0.1, 1.0, 1e3)
    sparse: float = 0.0
    last: Callable[[Draft], None] | None = None


KINDS = {
    "anything": Kind(
        0.2, rows=pick(0, 0, 0, 0, columns_plus(0), of_columns(0.5, 0.5)),
        how_many=(0, 1, 1, 2, 3), sparse=0.25,
    ),
    "stored rows": Kind(  # proven from the stored rows of Q, down to tolerances near rounding
        0.16, {
            "strategy": pick("direct", "direct", "auto"), "loss": pick("mse", "ce"),
            "ridge": some_ridge(-4, 1),
            "tol": power(-10, -3), "lam": power(-2, 2.5), "optimizer": pick("cg", "cg", "lbfgs"),
            "precondition": True, "sketch": "auto", "sparsify": "auto",
        },
        nodes=(40, 250), d=power(0, 1.6), rows=pick(0, 0, columns_plus(0, 1, 3)),
        spoils=(*SPOILS, "hidden column", "hidden column"), how_many=(0, 0, 1, 1, 2), sparse=0.25,
        last=be_short_of_memory,
    ),
    "ridge and units": Kind(
        0.1, {"ridge": power(-4, 1), "loss": pick("mse", "mse", "mse", "ce")}, nodes=(60, 250),
        d=between(5, 31), spoils=("one unit", "units", "offset"), how_many=(1,),
        noise=(1e-3, 0.1, 1.0),
    ),
    "few rows": Kind(  # P of low rank
        0.06, {"ridge": power(-8, 0), "loss": "mse", "strategy": pick("herta", "herta", "auto")},
        nodes=(100, 200), shapes=("random", "hubs"), d=between(60, 120), origins=("gaussian",),
        rows=of_columns(0.2, 0.48), spoils=("any unit",), how_many=(1,), noise=(0.1, 1.0),
    ),
    "planted": Kind(
        0.06, {"ridge": 0.0, "loss": "mse", "lam": power(-2, 1)}, nodes=(60, 200),
        d=between(3, 20), rows=lambda p: int(p.n * p.rng.uniform(0.5, 1.0)), last=plant,
    ),
    "interpolating": Kind(  # optima of 0, or nearly
        0.06, {"ridge": 0.0, "loss": "mse"}, nodes=(40, 150), d=between(20, 80),
        rows=of_columns(0.3, 1.1), how_many=(0, 1), sparse=0.5,
    ),
    "cross entropy": Kind(  # from random labels to classes that are nearly separable
        0.08, {"ridge": power(-5, 1), "loss": "ce"}, nodes=(40, 250), d=between(2, 20),
        how_many=(0, 1),
    ),
    "hard graph": Kind(  # where solves in float32 reach their limit
        0.06, {"lam": power(2, 4)}, nodes=(50, 400), shapes=("star", "path", "hubs"),
        d=between(1, 15),
    ),
    "blocks of outputs": Kind(
        0.06, {
            "strategy": pick("herta", "herta", "herta", "auto"), "loss": "mse",
            "lam": power(-2, 2.5), "ridge": pick(0.0, 0.0, power(-8, 2)), "tol": power(-9, -3),
        },
        nodes=(40, 250), d=power(0, 1.3), rows=pick(0, 0, 0, columns_plus(0, 2)),
        how_many=(0, 0, 1, 2), last=unequal_outputs,
    ),
    "beyond": Kind(  # weights of rows, an intercept, several lam, several labels per node
        0.18, {
            "loss": pick("mse", "mse", "ce", "bce"), "fit_intercept": pick(True, True, False),
            "ridge": some_ridge(-6, 2),
        },
        nodes=(20, 150), d=power(0, 1.4), how_many=(0, 0, 1, 2),
        rows=pick(0, 0, 0, of_columns(0.5, 0.5), of_columns(3, 3)), last=go_beyond,
    ),
    "made columns": Kind(  # hidden layers, rows of length 1, hops
        0.12, {
            "loss": pick("mse", "mse", "ce"), "fit_intercept": pick(True, False),
            "ridge": power(-5, 1), "tol": power(-8, -3),
        },
        nodes=(20, 150), d=power(0, 1.4), how_many=(0, 0, 1), noise=(0.1, 1.0),
        rows=pick(0, 0, of_columns(0.5, 0.5), of_columns(3, 3)), last=make_columns,
    ),
    "resume": Kind(
        0.1, {"strategy": MANY_STRATEGIES, "tol": power(-8, -5)}, nodes=(40, 150),
        d=between(2, 20), rows=lambda p: int(0.6 * p.n), noise=(0.1, 1.0), last=change_later,
    ),
    "few eigenvalues": Kind(  # matchings, complete and half-isolated graphs: Lanczos ends early
        0.1, {"strategy": MANY_STRATEGIES, "lam": power(-1, 2), "tol": power(-8, -1)},
        nodes=(30, 300), shapes=FEW_EIGENVALUES, d=power(0.5, 1.9),
        rows=pick(0, columns_plus(0, 5, 20)), how_many=(0, 0, 1),
    ),
    "warm start": Kind(
        0.1, {"strategy": MANY_STRATEGIES, "lam": power(-1, 2), "tol": power(-8, -1)},
        nodes=(30, 300), shapes=(*FEW_EIGENVALUES, "random", "hubs"), d=power(0.5, 1.9),
        rows=pick(0, columns_plus(0, 5, 20)), how_many=(0, 0, 1), last=start_warm,
    ),
    "extreme units": Kind(
        0.1, {
            "loss": pick("mse", "mse", "ce", "bce"), "fit_intercept": pick(True, False, False),
            "ridge": some_ridge(-6, 2),
        },
        nodes=(20, 120), d=power(0, 1.3), spoils=("extreme unit", "extreme units", "units"),
        how_many=(0, 1, 1, 2), last=be_extreme,
    ),
    "leave one out": Kind(
        0.08, {
            "loss": "mse", "strategy": "direct", "optimizer": "cg", "precondition": True,
            "sketch": "auto", "sparsify": "auto", "tol": 1e-10, "lam": power(-2, 2),
            "ridge": pick(0.0, power(-4, 1)), "fit_intercept": pick(True, False),
        },
        nodes=(20, 80), d=between(2, 40), rows=pick(0, of_columns(0.3, 0.9)),
        origins=("gaussian", "0/1", "coordinates"), noise=(0.1, 1.0),
        spoils=("one unit", "any unit", "units", "all units"), how_many=(0, 1, 1),
        last=lambda p: weigh_rows(p, 1) if p.chance(0.3) else None,
    ),
    "conformal": Kind(
        0.04, {"ridge": power(-2, 1), "tol": 1e-4, "loss": pick("mse", "ce"), "strategy": "direct"},
        nodes=(150, 400), shapes=("random", "hubs", "grid"), d=between(2, 10),
        rows=between(20, 60), origins=("gaussian",),
    ),
    "reweighted": Kind(
        0.06, {"ridge": some_ridge(-4, 1), "strategy": MANY_STRATEGIES}, nodes=(20, 200),
        d=between(2, 20), how_many=(0, 0, 1), last=weigh_edges,
    ),
    "pagerank": Kind(0.06, nodes=(3, 120), shapes=(*USUAL, "half isolated"), d=1, last=as_walk),
    "layer": Kind(0.08, {"lam": power(-2, 4)}, nodes=(5, 150), d=1, last=as_layer),
}  # fmt: skip


def draw(seed: int, number: int, kind: str | None = None) -> Problem:
    """Problem `number` of `seed`, whatever was drawn before it."""
    rng = np.random.default_rng([seed, number])
    shares = np.array([some.share for some in KINDS.values()])
    usual = list(KINDS)[int(rng.choice(len(KINDS), p=shares / shares.sum()))]
    kind = kind or usual
    p, how = Draft(rng), KINDS[kind]
    draw_settings(p, how.settings)
    draw_graph(p, how.nodes, p.pick(*how.shapes))
    origin = p.pick(*how.origins)
    p.X = ORIGINS[origin](rng, p.n, int(p.value(how.d)))
    p.story.append(origin)
    draw_train(p, p.value(how.rows))
    for _ in range(p.pick(*how.how_many)):
        spoil(p, p.pick(*how.spoils))
    draw_targets(p, p.pick(*how.noise))
    if how.sparse and p.chance(how.sparse):
        p.X = sp.csr_array(p.X)
        p.story.append("sparse")
    if how.last is not None:
        how.last(p)
    return p.done(kind)
