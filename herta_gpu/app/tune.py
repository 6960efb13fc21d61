"""`herta tune`: choose lam, ridge and loss on the validation nodes, or by leave-one-out.

The rows of H^-1 X on the training and validation nodes come for all lam from one sequence of
products; each ridge is then a small dense problem (`search`).  Several lam, features of labels and
Correct and Smooth may be candidates as well, on validation nodes only: leave-one-out would see the
label that it leaves out in other rows.  The winner is trained again by HERTA, on the true model and
with a certificate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from herta_gpu.app.crew import Sharing
from herta_gpu.app.experiment import Source, load_for, make_model
from herta_gpu.app.metrics import evaluate, metric_of
from herta_gpu.app.results import Candidate, CommandOutput, candidate_rows
from herta_gpu.app.runs import check_free
from herta_gpu.app.search import SOLVE_TOL, Directions, Outcome, rows_for_each
from herta_gpu.app.text import table
from herta_gpu.app.train import Job, train
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import softmax
from herta_gpu.more.label_features import label_features
from herta_gpu.more.smoothing import CorrectAndSmooth, enlargement
from herta_gpu.more.sweep import all_rows
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.planning.settings import LOSS_NAMES, strengths
from herta_gpu.plumbing.checks import (
    check_choice,
    check_lam,
    check_ridge,
    check_rows,
    memory_budget,
)
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.targets import Targets, make_targets

LAMS = (1.0, 5.0, 10.0, 20.0, 50.0)
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SEVERAL = ((0.0, 1.0, 20.0), (0.0, 1.0, 5.0, 50.0))
CORRECT_LAMS = (0.0, 1.0, 5.0, 20.0, 100.0)  # 0: smooth only
SMOOTH_LAMS = (0.25, 1.0, 5.0, 20.0)
_SHOWN = 12  # candidates that the command prints
_SMOOTH_TOL = 1e-4  # of those solves; the winner's are tight

Features = Sequence[float]  # lam of each block of X


@dataclass(frozen=True)
class Grid:
    """What `tune` chooses from, and by what."""

    lams: Sequence[float] = LAMS
    ridges: Sequence[float] = RIDGES
    losses: Sequence[str] | None = None  # None: those that fit the targets (`losses_for`)
    by: str = "valid"  # the metric on validation nodes, or "loo": leave-one-out, which needs none
    several: Sequence[Features] = ()  # more features: a block for each lam of a set, 0 is X itself
    label_folds: int = 0  # of features of labels, tried with each set of features; 0: none
    smooth: bool = False  # Correct and Smooth after the best of each kind
    intercepts: Sequence[bool] = (False,)  # with which `fit_intercept` to try MSE

    def for_targets(self, y: Any) -> Grid:
        """The grid with all of its losses."""
        return self if self.losses is not None else replace(self, losses=losses_for(y, self.by))

    def check(self) -> None:
        """Refuse what cannot be tried; losses that follow the targets are right anyway."""
        losses, plain = self.losses or ("mse",), (self.lams or self.several) and self.ridges
        check_choice("by", self.by, ("valid", "loo"))
        if not plain or (self.losses is not None and not self.losses):
            raise ValueError("The grid is empty: give at least one lam, one ridge and one loss.")
        for ridge in self.ridges:
            check_ridge(ridge)
        for loss in losses:
            check_choice("loss", loss, LOSS_NAMES)
        if "bce" in losses and len(losses) > 1:
            raise ValueError(
                "The loss bce stands alone: its labels are zeros and ones, and no scores of other "
                "losses can be compared with its own."
            )
        if "bce" in losses and self.smooth:
            raise ValueError("Correct and Smooth is for one class per node, not for loss bce.")
        for lam in self.lams:
            check_lam(lam)
        for blocks in self.several:
            strengths(list(blocks), None)
        if self.by == "valid":
            return
        if self.several or self.label_folds or self.smooth:
            raise ValueError(
                "Leave-one-out is for one lam: several lam, label features and Correct and Smooth "
                'are chosen on validation nodes (by="valid").'
            )
        if tuple(losses) != ("mse",):
            raise ValueError(
                'Leave-one-out has a closed form for "mse" alone: leave out the others.'
            )
        if min(self.ridges) == 0:
            raise ValueError("Leave-one-out needs ridges above 0.")


def run(args: argparse.Namespace) -> CommandOutput:
    """herta tune DATASET"""
    stages, folds = Stages(args.verbose), args.label_features
    more = (args.by, args.several, folds, args.correct_and_smooth, (False, True))
    grid = Grid(args.lams, args.ridges, args.losses, *more)
    for lam in (*args.lams, *(list(lams) for lams in args.several)):  # before a long load
        for loss in grid.losses or ("mse",):
            make_model(args, lam=lam, loss=loss, optimizer="cg")._checked()
    grid.check()
    check_free(args.out, args.overwrite)
    data = load_for(args, stages)
    grid = grid.for_targets(data.y)
    for loss in grid.losses or ():  # before the search, which takes long
        check = make_model(args, lam=args.lams[0], loss=loss, optimizer="cg")
        nodes = data.split["train"]
        check._pose(check._checked(), data.graph, data.X, data.y, nodes, None, None)
    with stages("tune"):
        place = (args.device, args.memory_budget)
        found = tune(data, grid, *place, stages.note, args.random_state)
    best = found[0]
    names = ("ridge", "loss", "label_features", "fit_intercept")
    params = {name: getattr(best, name) for name in names}
    params["lam"] = list(best.lam) if isinstance(best.lam, tuple) else best.lam
    params["optimizer"] = args.optimizer or ("cg" if best.loss == "mse" else "lbfgs")
    smoother = best.smooth and CorrectAndSmooth(*best.smooth, device=args.device)
    source, alone = Source.of(vars(args)), Sharing(args.crew)
    job = Job(make_model(args, **params), data, source, stages, smoother, alone, found)
    result = train(job, args.out, args.overwrite)
    content = {**result.as_json(), "candidates": [asdict(c) for c in found]}
    shown, left = table(candidate_rows(found[:_SHOWN], result.metric)), len(found) - _SHOWN
    shown += f"\n... and {left} more, none better" * (left > 0)
    return CommandOutput(content, f"{shown}\n\n{result.text(args.out)}", result.diverged)


def tune(
    data: Dataset,
    grid: Grid = Grid(),
    device: str = "auto",
    memory_budget: int | str | None = None,
    report: Callable[[str], None] = lambda text: None,
    random_state: int = 0,
    **choices: Any,
) -> list[Candidate]:
    """Every candidate, best first; ties go to the larger ridge, then to the simpler model.

    Parameters
    ----------
    data : Dataset
    grid : Grid
        What to choose from, and by what.
    device, memory_budget
        As in `HERTA`.
    report : function of one text, optional
        Hears what is being done.
    random_state : int
        Of the folds of features of labels.
    **choices
        Fields of the grid by their names: ``tune(data, lams=[1.0], by="loo")``.

    Examples
    --------
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.app.tune import Grid, tune
    >>> found = tune(load("digits"), Grid(lams=[1.0, 20.0], ridges=[0.01, 1.0], losses=["mse"]))
    >>> len(found), found[0].lam, found[0].valid > 0.9
    (4, 20.0, True)
    >>> by_loo = Grid(lams=[1.0, 20.0], ridges=[1.0], losses=["mse"], by="loo")
    >>> tune(load("digits"), by_loo)[0].loo > 0.9
    True
    """
    grid = replace(grid, **choices)
    several = [tuple(np.atleast_1d(lam).tolist()) for lam in grid.several]
    grid = replace(grid, lams=[*grid.lams], ridges=[*grid.ridges], several=several)  # or arrays
    grid = grid.for_targets(data.y)
    grid.check()
    check_rows("X", data.X, data.graph)
    data = data.with_split("public")  # masks become ids
    valid = data.split.get("valid")
    if grid.by == "valid" and (valid is None or len(valid) == 0):
        raise ValueError(
            f"{data.name} has no validation nodes to choose on: use --split, or --by loo."
        )
    search = _Search(data, grid, device, memory_budget)
    if grid.label_folds:
        search.make_label_features(random_state)
    for blocks, Q in search.features(list(dict.fromkeys([*zip(grid.lams), *several])), report):
        for folds in {0, grid.label_folds}:
            search.along_ridges(blocks, Q, folds)
    if grid.smooth:
        report("Correct and Smooth after the best of them")
        search.smoothed()
    return sorted(search.found, key=lambda c: _rank(c, grid.by))


def losses_for(y: Any, by: str = "valid") -> tuple[str, ...]:
    """The losses to choose from: those that fit the targets, and what they are chosen by."""
    y = np.asarray(y)
    if by == "loo" or y.dtype.kind == "f":
        return ("mse",)
    return ("bce",) if y.ndim == 2 else ("mse", "ce")


def _rank(c: Candidate, by: str) -> tuple[Any, ...]:
    score = c.loo if by == "loo" else c.valid
    score = -math.inf if score is None or math.isnan(score) else score
    plain = (len(c.lams), c.label_features, c.smooth is not None, c.fit_intercept)
    return -score, -c.ridge, plain, c.lams, c.loss, c.smooth or ()


class _Search:
    """The data of a search, and the candidates found so far."""

    def __init__(self, data: Dataset, grid: Grid, device: str, budget: int | str | None) -> None:
        self.data, self.grid, self.device, self.budget = data, grid, device, budget
        self.losses: Sequence[str] = grid.losses or ()
        loss, n = self.losses[-1], data.graph.num_nodes
        self.targets: Targets = make_targets(data.y, data.split["train"], n, loss)
        self.metric = metric_of(data.metric, loss, self.targets.classes, self.targets.flat)
        valid = data.split["valid"] if grid.by == "valid" else []
        self.cut, self.valid = self.targets.rows.shape[0], np.asarray(valid, dtype=np.int64)
        self.rows = np.concatenate([self.targets.rows, self.valid])
        self.found: list[Candidate] = []
        self._best: dict[Any, tuple[Candidate, Outcome]] = {}  # of each kind of features

    def make_label_features(self, seed: int) -> None:
        """The columns that labels make, on all nodes."""
        graph, y, targets, folds = self.data.graph, self.data.y, self.targets, self.grid.label_folds
        if "bce" in self.losses:  # as the estimator does it: what is not known counts as 0
            y = np.zeros((graph.num_nodes, targets.Y.shape[1]))
            y[targets.rows] = np.maximum(targets.Y, 0.0)
        how: dict[str, Any] = {"folds": folds, "random_state": seed, "device": self.device}
        self.labels = label_features(graph, y, targets.rows, **how).columns

    def features(
        self, sets: list[Features], report: Callable[[str], None]
    ) -> Iterator[tuple[Features, Any]]:
        """(set, its rows of the features): all from one sequence of products if memory allows."""
        data, lams = self.data, sorted({lam for blocks in sets for lam in blocks})
        free = get_backend("cpu").memory_available()
        size = 4 * len(lams) * self.rows.shape[0] * data.X.shape[1]

        def solved(lams: Sequence[float]) -> Any:
            return rows_for_each(data.graph, data.X, self.rows, lams, self.device, self.budget)

        together = size <= memory_budget(self.budget, free) // 2
        report(f"solving for {self.rows.shape[0]:,} nodes, {len(lams)} lam")
        whole = dict(zip(lams, solved(lams))) if together else {}
        for blocks in sets:
            parts = [whole[lam] for lam in blocks] if together else list(solved(blocks))
            yield blocks, np.concatenate(parts, axis=1).astype(np.float64)

    def along_ridges(self, blocks: Features, Q: Any, folds: int) -> None:
        """A candidate per ridge, loss and intercept, the largest ridge first: the easiest one."""
        if folds:
            Q = np.hstack([Q, self.labels[self.rows]])
        lam = blocks[0] if len(blocks) == 1 and blocks[0] > 0 else tuple(blocks)
        by = self.grid.by
        for intercept in self.grid.intercepts:
            made = Directions(Q[: self.cut], Q[self.cut :], self.targets.Y, intercept)
            for loss in self.losses if not intercept else set(self.losses) & {"mse"}:
                for ridge in sorted(self.grid.ridges, reverse=True):
                    out = made.fit(loss, ridge, loo=by == "loo")
                    scores = self._scores(out.train, out.valid)
                    loo = None if out.loo is None else self._scores(out.loo, out.valid)["train"]
                    one = Candidate(lam, ridge, loss, **scores, loo=loo)
                    one = replace(one, fit_intercept=intercept, label_features=folds)
                    self.found.append(one)
                    key = (isinstance(lam, tuple), folds > 0)
                    best = self._best.get(key)
                    if best is None or _rank(one, by) < _rank(best[0], by):
                        self._best[key] = (one, out)

    def _scores(self, train: Any, valid: Any) -> dict[str, Any]:
        """The metric of outputs on the training and on the validation nodes."""
        parts = {"train": (self.targets.rows, train), "valid": (self.valid, valid)}
        y, classes = self.data.y, self.targets.classes
        return {
            part: evaluate(self.metric, y[nodes], Z, classes) for part, (nodes, Z) in parts.items()
        }

    # ---- Correct and Smooth ------------------------------------------------------------------
    def smoothed(self) -> None:
        """Candidates that correct and smooth the best one of each kind of features."""
        if self.targets.classes is None:
            raise ValueError("Correct and Smooth is for classes, not for numbers to be predicted.")
        H = RegularizedLaplacian(self.data.graph, 1.0, get_backend(self.device), "float32")
        for one, out in self._best.values():
            B = self._everywhere(H, one, out)
            B = softmax(np, B) if one.loss == "ce" else B
            for smooth, Z in self._corrected(H, B):
                scores = self._scores(Z[self.targets.rows], Z[self.valid])
                self.found.append(replace(one, **scores, smooth=smooth))

    def _everywhere(self, H: RegularizedLaplacian, one: Candidate, out: Outcome) -> Any:
        """The outputs of a candidate on all nodes."""
        blocks = one.lams
        X, d, Z = self.data.X, self.data.X.shape[1], np.tile(out.b, (self.data.graph.num_nodes, 1))
        for i, lam in enumerate(blocks):
            B = X @ out.W[i * d : (i + 1) * d]
            Z += B if lam == 0 else all_rows(H, [lam], B, SOLVE_TOL, BLOCK_WIDTH)[0]
        return Z + self.labels @ out.W[len(blocks) * d :] if one.label_features else Z

    def _corrected(
        self, H: RegularizedLaplacian, B: Any
    ) -> Iterator[tuple[tuple[float, float], Any]]:
        """Both steps for every pair of lam: each step is one sequence of products for all."""
        rows, Y, c = self.targets.rows, np.asarray(self.targets.Y), B.shape[1]
        E = np.zeros(B.shape)
        E[rows] = Y - B[rows]
        sigma = np.abs(E).sum() / rows.shape[0]
        sides = []
        for lam, E_hat in zip(CORRECT_LAMS, all_rows(H, CORRECT_LAMS, E, _SMOOTH_TOL, BLOCK_WIDTH)):
            G = B + enlargement(E_hat, sigma)[:, None] * E_hat if lam > 0 else B.copy()
            G[rows] = Y
            sides.append(G)
        Z = all_rows(H, SMOOTH_LAMS, np.hstack(sides), _SMOOTH_TOL, BLOCK_WIDTH)
        for i, first in enumerate(CORRECT_LAMS):
            for j, second in enumerate(SMOOTH_LAMS):
                yield (first, second), Z[j][:, i * c : (i + 1) * c]
