"""The caller's wishes: checked once, decoded once, and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from herta_gpu.plumbing.checks import (
    MAX_SEED,
    check_choice,
    check_count,
    check_dtype,
    check_lam,
    check_not_negative,
    check_number,
    check_positive,
    check_ridge,
    parse_bytes,
)

LOSS_NAMES = ("mse", "ce", "bce")
DEVICES = ("auto", "cpu", "cpu-scipy", "cuda")
NORMALIZATIONS = ("none", "row", "unit", "standard")
MOST_HOPS = 100
LABEL_LAMS = (1.0, 5.0, 20.0, 100.0)  # of the features that labels make
LABEL_FOLDS = 5
LABEL_WIDTH = 16  # classes at a time: all lam at once need room
TOGETHER = 16  # products whose rows are added up together, for several lam at once
NEWTON_SIZE = 2000  # numbers in W up to which the whole Hessian of cross entropy is worth having
OPTIMIZER_NAMES = ("cg", "gd", "momentum", "adam", "lbfgs")
# What a parameter may be, where there are only a few choices.
_WORDS: dict[str, tuple[Any, ...]] = {
    "loss": LOSS_NAMES,
    "optimizer": OPTIMIZER_NAMES,
    "strategy": ("auto", "herta", "direct"),
    "reorder": ("auto", True, False),
    "precondition": (True, False),
    "fit_intercept": (True, False),
    "normalize": NORMALIZATIONS,
    "row_norm": (True, False),
}


def check_device(name: Any) -> int | None:
    """The number of a GPU that is named like "cuda:1"; None where the name has none."""
    numbered = re.fullmatch(r"cuda:(\d+)", name) if isinstance(name, str) else None
    check_choice("device", "cuda" if numbered else name, DEVICES)
    return None if numbered is None else int(numbered[1])


class Word(StrEnum):
    """One of a few words that users read: it prints, compares and is stored as its text."""

    __repr__ = str.__repr__


class Strategy(Word):
    """How a fit gets its gradients: by solves, or from stored rows of H^-1 X."""

    HERTA = "herta"
    DIRECT = "direct"


class Kind(Word):
    """How a gap, or a spectrum behind one, is known."""

    RESIDUAL = "residual"
    PROVEN = "spectral-proven"
    DETERMINISTIC = "spectral-deterministic"
    PROBABILISTIC = "spectral-probabilistic"
    DUALITY = "duality"
    NONNEGATIVE = "nonnegative"
    ESTIMATE = "estimate"
    NONE = "none"


class Status(Word):
    """What a fit is; `HERTA` says what the words mean."""

    CERTIFIED = "certified"
    REDUCED = "certified-reduced"
    CONVERGED = "converged"
    STAGNATED = "stagnated"
    MAX_ITER = "max_iter"
    DIVERGED = "diverged"

    @property
    def proven(self) -> bool:
        """Whether the gap is proven to be small, at least over the features that were kept."""
        return self in (Status.CERTIFIED, Status.REDUCED)


@dataclass(frozen=True)
class Wish:
    """Whether something is to be done: "auto" (if it pays), "always" or "never"; how much of it."""

    when: str
    count: int | None = None  # None: as much as the theory asks for


@dataclass(frozen=True)
class Settings:
    """What `HERTA` was asked for; see its parameters."""

    lam: float  # the largest, where there are several
    lams: tuple[float, ...]  # (lam,), or those of several blocks of features; 0 is X itself
    loss: str
    optimizer: str
    ridge: float
    tol: float
    max_iter: int
    strategy: str  # "auto", "herta" or "direct"
    sparsify: Wish
    scores: str  # how edges are scored: "sketch" is Algorithm 2, "degree" costs nothing
    mixed: bool  # the loop, too, may run on a sampled graph
    sketch: Wish
    precondition: bool
    device: str
    dtype: str
    memory_budget: int | None
    seed: int
    learning_rate: float | str | None
    reorder: Wish
    fit_intercept: bool = False
    label_folds: int = 0  # 0: labels are no features
    hidden: int = 0  # random ReLU features, of each draw
    hidden_after: bool = True  # behind the diffusion
    hidden_rank: int | None = 64
    hidden_draws: int = 1
    normalize: str = "none"
    row_norm: bool = False  # rows of each block of features are divided by their length
    hops: tuple[int, ...] = ()  # blocks S^k X
    weighted: bool = False  # by class
    loo: bool = False  # leave-one-out is wanted: stored rows, solved for tightly

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Settings:
        """Settings from the estimator's parameters, or a sentence that says what is wrong."""
        for name, choices in _WORDS.items():
            check_choice(name, params[name], choices)
        check_device(params["device"])
        seed = 0 if params["random_state"] is None else params["random_state"]
        lams, sparsify = strengths(params["lam"], params["alpha"]), params["sparsify"]
        hops = check_hops(params["hops"], lams)
        if hops and params["alpha"] is None and params["lam"] == 1.0:
            lams = ()  # nobody asked for a block of lam
        check_count("hidden", params["hidden"], least=0)
        check_count("hidden_draws", params["hidden_draws"])
        if params["hidden_rank"] is not None:
            check_count("hidden_rank", params["hidden_rank"])
        check_ridge(params["ridge"])
        check_positive("tol", params["tol"])
        check_count("max_iter", params["max_iter"])
        check_count("random_state", seed, least=0, most=MAX_SEED)
        check_class_weight(params["class_weight"])
        budget, rate = params["memory_budget"], params["learning_rate"]
        if isinstance(rate, str):
            check_choice("learning_rate", rate, ("spectral",))
        elif rate is not None:
            check_positive("learning_rate", rate)
            rate = float(rate)
        check_choice("hidden_at", params["hidden_at"], ("after", "before"))
        words = {name: params[name] for name in _WORDS if name != "reorder"}
        words |= {name: bool(words[name]) for name in ("precondition", "fit_intercept", "row_norm")}
        made = cls(
            **words,
            device=params["device"],
            lam=max(lams, default=1.0),
            lams=lams,
            ridge=float(params["ridge"]),
            tol=float(params["tol"]),
            max_iter=int(params["max_iter"]),
            sparsify=_wish("sparsify", sparsify, {"degree": "always", "mixed": "auto"}),
            # A word asks for what is cheap, a count or True for Algorithm 2.
            scores="degree" if isinstance(sparsify, str) else "sketch",
            mixed=isinstance(sparsify, str) and sparsify == "mixed",
            sketch=_wish("sketch", params["sketch"]),
            dtype=check_dtype(params["dtype"]),
            memory_budget=None if budget is None else parse_bytes(budget),
            seed=int(seed),
            learning_rate=rate,
            reorder=_wish("reorder", params["reorder"]),
            label_folds=_folds(params["label_features"]),
            hidden=int(params["hidden"]),
            hidden_after=params["hidden_at"] == "after",
            hidden_rank=params["hidden_rank"],
            hidden_draws=int(params["hidden_draws"]) if params["hidden"] else 1,
            hops=hops,
            weighted=params["class_weight"] is not None,
        )
        if made.hidden_draws > 1 and made.row_norm and not made.hidden_after:
            raise ValueError(
                "Rows whose length depends on the draw have no mean of draws: with row_norm and "
                'hidden_at="before" use hidden_draws=1.'
            )
        other = made.loss != "mse" and made.optimizer not in ("cg", "lbfgs")
        for what, asked in (
            ('strategy="herta"', made.strategy == "herta"),
            ("precondition=False", not made.precondition),
            ("sparsify or sketch", made.custom_P),
            (f'optimizer="{made.optimizer}" (not "lbfgs") with loss="{made.loss}"', other),
        ):
            if made.several and asked:
                raise ValueError(
                    "Several lam, hops, row norms, a hidden layer behind the diffusion and label "
                    f"features are trained on stored rows: {what} is for one lam."
                )
        return made

    @property
    def quadratic(self) -> bool:
        """Whether the Hessian is the same everywhere."""
        return self.loss == "mse"

    @property
    def several(self) -> bool:
        """Whether features are blocks of several lam (X itself, labels), not those of the paper."""
        made = self.label_folds > 0 or self.row_norm or (self.hidden > 0 and self.hidden_after)
        return self.lams != (self.lam,) or self.lam == 0 or made or bool(self.hops)

    @property
    def blocks(self) -> int:
        """How often the features count."""
        return len(self.lams) + len(self.hops)

    @property
    def custom_P(self) -> bool:
        """Whether a sampled graph or a sketch behind P was asked for by name."""
        return self.mixed or "always" in (self.sparsify.when, self.sketch.when)

    def features(self, d: int, c: int) -> int:
        """Rows of W for d columns of X and c outputs."""
        hidden = self.hidden * self.hidden_draws
        hidden *= 1 if self.hidden_after else self.blocks
        return self.blocks * d + hidden + (len(LABEL_LAMS) * c if self.label_folds else 0)

    def with_loo(self) -> Settings:
        """The same where leave-one-out is wanted, or a sentence that says why there is none."""
        if self.label_folds:
            raise ValueError(
                "Leave-one-out is not valid with label features, which hold the label left out: "
                "choose on validation nodes."
            )
        if self.loss != "mse":
            raise ValueError(
                f'Leave-one-out has a closed form for loss="mse" only, not "{self.loss}".'
            )
        if self.strategy == "herta" or not self.precondition or self.custom_P:
            raise ValueError(
                'Leave-one-out needs stored rows: use strategy="auto" or "direct", and neither '
                "sparsify, sketch nor precondition=False."
            )
        return replace(self, strategy="direct", loo=True)


def strengths(lam: Any, alpha: Any) -> tuple[float, ...]:
    """All lam, of one number (or APPNP's alpha in place of it) or of several."""
    lam = lam.tolist() if isinstance(lam, np.ndarray) and lam.ndim == 1 else lam
    several = isinstance(lam, (list, tuple))
    if alpha is not None:
        if several:
            raise ValueError("alpha stands for one lam: leave it out, or give one lam.")
        check_positive("alpha", alpha)
        if alpha >= 1:
            raise ValueError(f"alpha must lie between 0 and 1, not {alpha!r}.")
        lam = 1.0 / float(alpha) - 1.0
    given = lam if several else [lam]
    if not given:
        raise ValueError("lam is empty: give a number, or several like [0, 1, 20].")
    for one in given:
        if check_number("lam", one) != 0 or not several:  # 0 of several stands for X itself
            check_lam(one)
    if len(set(given)) < len(given):
        raise ValueError(f"lam names a number more than once: {list(given)}.")
    return tuple(float(one) for one in given)


def check_hops(given: Any, lams: tuple[float, ...]) -> tuple[int, ...]:
    """The powers of S that make blocks of features."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple, np.ndarray)):
        raise ValueError(f"hops must be a list of whole numbers like [0, 1, 2], not {given!r}.")
    hops = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
    if not hops:
        raise ValueError("hops is empty: give some like [0, 1, 2, 3], or leave it out.")
    for k in hops:
        check_count("hops", k, least=0, most=MOST_HOPS)
    if len(set(hops)) < len(hops) or (0 in hops and 0 in lams):
        raise ValueError(f"hops={list(hops)} (and lam=0) name a block more than once.")
    return hops


def check_class_weight(given: Any) -> None:
    """Raise an error unless it is None, "balanced" or numbers by label."""
    if given is None or (isinstance(given, str) and given == "balanced"):
        return
    if not isinstance(given, Mapping):
        raise ValueError(f'class_weight must be None, "balanced" or a dict, not {given!r}.')
    for label, weight in given.items():
        check_not_negative(f"class_weight of {label!r}", weight)


def _wish(name: str, value: Any, words: Mapping[str, str] | None = None) -> Wish:
    words = {"auto": "auto", **(words or {})}
    if isinstance(value, (bool, np.bool_)):
        return Wish("always" if value else "never")
    if isinstance(value, str) and value in words:
        return Wish(words[value])
    if isinstance(value, (int, np.integer)) and value > 0:
        return Wish("always", int(value))
    allowed = ", ".join(f'"{w}"' for w in words)
    raise ValueError(f"{name} must be {allowed}, True, False or a positive count, not {value!r}.")


def _folds(value: Any) -> int:
    """The folds of label features; True: the usual number, 0 or False: there are none."""
    if isinstance(value, (bool, np.bool_)):
        return LABEL_FOLDS if value else 0
    check_count("label_features", value, least=0)
    if value == 1:
        raise ValueError("label_features counts folds: at least 2, or 0 for no such features.")
    return int(value)
