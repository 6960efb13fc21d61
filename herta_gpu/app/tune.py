"""`herta tune`: choose lam, ridge and loss on the validation nodes, or by leave-one-out.

The rows of H^-1 X on the training and validation nodes come for all lam from one sequence of
products (`sweep`).  What does not depend on the ridge, the singular directions of the training
rows, is done once per set of features; each ridge is then a small dense problem: for MSE in closed
form, leave-one-out included, for cross entropy a fit that is proven to be within _GAP of its
optimum.  Several lam, features of labels and Correct and Smooth may be candidates as well, on
validation nodes only: leave-one-out would see the label that it leaves out in other rows.  The
winner is trained again by HERTA, on the true model and with a certificate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.app import recipe
from herta_gpu.app.metrics import evaluate, metric_of
from herta_gpu.app.results import Candidate, CommandOutput, candidate_rows, table
from herta_gpu.app.runs import check_free
from herta_gpu.app.train import Job, make_model
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.factors import RANK_CUT
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES, softmax
from herta_gpu.more.label_features import label_features
from herta_gpu.more.labels import CorrectAndSmooth, enlargement
from herta_gpu.more.leave_one_out import DualRows
from herta_gpu.more.sweep import all_rows
from herta_gpu.optimizers import minimise
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.planning.settings import LOSS_NAMES, strengths
from herta_gpu.plumbing.checks import (
    check_choice,
    check_lam,
    check_ridge,
    check_rows,
    memory_budget,
)
from herta_gpu.plumbing.targets import make_targets
from herta_gpu.problem import StoredProblem

LAMS = (1.0, 5.0, 10.0, 20.0, 50.0)
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SEVERAL = ((0.0, 1.0, 20.0), (0.0, 1.0, 5.0, 50.0))
CORRECT_LAMS = (0.0, 1.0, 5.0, 20.0, 100.0)  # 0: smooth only
SMOOTH_LAMS = (0.25, 1.0, 5.0, 20.0)
SOLVE_TOL = 1e-5  # of the rows, relative to the columns of X
_SMOOTH_TOL = 1e-4  # of both steps of Correct and Smooth; the winner's are tight
_GAP = 1e-3  # of cross entropy, relative
_SHOWN = 12  # candidates that the command prints

Features = Sequence[float]  # lam of each block of X


@dataclass(frozen=True)
class Grid:
    """What `tune` chooses from, and by what."""

    lams: Sequence[float] = LAMS
    ridges: Sequence[float] = RIDGES
    losses: Sequence[str] | None = None  # None: those that fit the targets (`for_targets`)
    by: str = "valid"  # the metric on validation nodes, or "loo": leave-one-out, which needs none
    several: Sequence[Features] = ()  # more features: a block for each lam of a set, 0 is X itself
    label_folds: int = 0  # of features of labels, tried with each set of features; 0: none
    smooth: bool = False  # Correct and Smooth after the best of each kind
    intercepts: Sequence[bool] = (False,)  # with which `fit_intercept` to try MSE

    def for_targets(self, y: Any) -> Grid:
        """The grid with all of its losses."""
        y = np.asarray(y)
        numbers = self.by == "loo" or y.dtype.kind == "f"
        fitting = ("mse",) if numbers else ("bce",) if y.ndim == 2 else ("mse", "ce")
        return replace(self, losses=fitting if self.losses is None else self.losses)

    def check(self) -> None:
        """Refuse what cannot be tried; losses that follow the targets are right anyway."""
        losses = ("mse",) if self.losses is None else tuple(self.losses)
        check_choice("by", self.by, ("valid", "loo"))
        if not ((self.lams or self.several) and self.ridges and losses):
            raise ValueError("The grid is empty: give at least one lam, one ridge and one loss.")
        for ridge in self.ridges:
            check_ridge(ridge)
        for loss in losses:
            check_choice("loss", loss, LOSS_NAMES)
        for lam in self.lams:
            check_lam(lam)
        for blocks in self.several:
            strengths(list(blocks), None)
        by_loo, bce = self.by == "loo", "bce" in losses
        if bce and len(losses) > 1:
            raise ValueError(
                "The loss bce stands alone: its labels are zeros and ones, and no scores of other "
                "losses can be compared with its own."
            )
        if bce and self.smooth:
            raise ValueError("Correct and Smooth is for one class per node, not for loss bce.")
        if by_loo and (self.several or self.label_folds or self.smooth):
            raise ValueError(
                "Leave-one-out is for one lam: several lam, label features and Correct and Smooth "
                'are chosen on validation nodes (by="valid").'
            )
        if by_loo and losses != ("mse",):
            raise ValueError(
                'Leave-one-out has a closed form for "mse" alone: leave out the others.'
            )
        if by_loo and min(self.ridges) == 0:
            raise ValueError("Leave-one-out needs ridges above 0.")


def run(args: argparse.Namespace) -> CommandOutput:
    """herta tune DATASET"""
    if args.recipe:
        return recipe.run(args)
    several: list[Features] = []
    for given in args.several or ():  # --several alone: the usual ones
        several += SEVERAL if given is None else [given]
    more = (args.by, several, args.label_features, args.smooth, (False, True))
    grid = Grid(args.lams, args.ridges, args.losses, *more)
    for lam in (*args.lams, *map(list, several)):  # before a long load
        for loss in grid.losses or ("mse",):
            make_model(args, lam=lam, loss=loss, optimizer="cg")._checked()
    grid.check()
    check_free(args.out, args.overwrite)
    job = Job.of(args).load()
    data, grid = job.data, grid.for_targets(job.data.y)
    for loss in grid.losses or ():  # before the search, which takes long
        model = make_model(args, lam=args.lams[0], loss=loss, optimizer="cg")
        nodes = data.split["train"]
        model._pose(model._checked(), data.graph, data.X, data.y, nodes, None, None)
    with job.stages("tune"):
        place = (args.device, args.memory_budget)
        data = data.normalized(args.normalize)  # as the model does it
        found = tune(data, grid, *place, job.stages.note, args.random_state)
    best = found[0]
    names = ("ridge", "loss", "label_features", "fit_intercept")
    params = {name: getattr(best, name) for name in names}
    params["lam"] = list(best.lam) if isinstance(best.lam, tuple) else best.lam
    params["optimizer"] = args.optimizer or ("cg" if best.loss == "mse" else "lbfgs")
    smoother = CorrectAndSmooth(*best.smooth, device=args.device) if best.smooth else None
    job = replace(job, model=make_model(args, **params), smoother=smoother, candidates=found)
    result = job.train(args.out, args.overwrite)
    content = {**result.as_json(), "candidates": [asdict(c) for c in found]}
    shown, left = table(candidate_rows(found[:_SHOWN], result.metric)), len(found) - _SHOWN
    shown += f"\n... and {left} more, none better" * (left > 0)
    return CommandOutput(content, f"{shown}\n\n{result.text(args.out)}", result.code(args))


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
    if grid.by == "valid" and len(data.split.get("valid", ())) == 0:
        raise ValueError(
            f"{data.name} has no validation nodes to choose on: use --split, or --by loo."
        )
    search = _Search(data, grid, device, memory_budget, random_state)
    for blocks, Q in search.features(list(dict.fromkeys([*zip(grid.lams), *several])), report):
        for folds in {0, grid.label_folds}:
            search.along_ridges(blocks, Q, folds)
    if grid.smooth:
        report("Correct and Smooth after the best of them")
        search.smooth()
    return sorted(search.found, key=_rank)


def _rank(c: Candidate) -> tuple[Any, ...]:
    score = -math.inf if math.isnan(c.score) else c.score
    plain = (len(c.lams), c.label_features, c.smooth is not None, c.fit_intercept)
    return -score, -c.ridge, plain, c.lams, c.loss, c.smooth or ()


class _Search:
    """The data of a search, and the candidates found so far."""

    def __init__(
        self, data: Dataset, grid: Grid, device: str, budget: int | str | None, seed: int
    ) -> None:
        self.data, self.grid, self.device, self.budget = data, grid, device, budget
        self.losses: Sequence[str] = grid.losses or ()
        loss, graph, y = self.losses[-1], data.graph, data.y
        self.targets = make_targets(y, data.split["train"], graph.num_nodes, loss)
        self.metric = metric_of(data.metric, loss, self.targets.classes, self.targets.flat)
        train, valid = self.targets.rows, data.split["valid"] if grid.by == "valid" else []
        self.valid = np.asarray(valid, dtype=np.int64)
        self.rows = np.concatenate([train, self.valid])
        self.found: list[Candidate] = []
        self._best: dict[Any, tuple[Candidate, Outcome]] = {}  # of each kind of features
        if grid.label_folds:  # the columns that labels make, on all nodes
            if loss == "bce":  # as the estimator does it: what is not known counts as 0
                y = np.zeros((graph.num_nodes, self.targets.Y.shape[1]))
                y[train] = np.maximum(self.targets.Y, 0.0)
            how: dict[str, Any] = {"folds": grid.label_folds, "random_state": seed}
            self.labels = label_features(graph, y, train, **how, device=device).columns

    def features(
        self, sets: list[Features], report: Callable[[str], None]
    ) -> Iterator[tuple[Features, Any]]:
        """(set, its rows of the features): all from one sequence of products if memory allows."""
        data, lams = self.data, sorted({lam for blocks in sets for lam in blocks})
        free = get_backend("cpu").memory_available()
        size = 4 * len(lams) * self.rows.shape[0] * data.X.shape[1]

        def solve(lams: Sequence[float]) -> dict[float, Any]:
            place = (self.device, self.budget)
            return dict(zip(lams, rows_for_each(data.graph, data.X, self.rows, lams, *place)))

        report(f"solving for {self.rows.shape[0]:,} nodes, {len(lams)} lam")
        whole = solve(lams) if size <= memory_budget(self.budget, free) // 2 else None
        for blocks in sets:
            known = solve(blocks) if whole is None else whole
            yield blocks, np.concatenate([known[lam] for lam in blocks], axis=1).astype(np.float64)

    def along_ridges(self, blocks: Features, Q: Any, folds: int) -> None:
        """A candidate per ridge, loss and intercept, the largest ridge first: the easiest one."""
        if folds:
            Q = np.hstack([Q, self.labels[self.rows]])
        lam = blocks[0] if len(blocks) == 1 and blocks[0] > 0 else tuple(blocks)
        cut, by_loo = self.targets.rows.shape[0], self.grid.by == "loo"
        for intercept in self.grid.intercepts:
            made = Directions(Q[:cut], Q[cut:], self.targets.Y, intercept)
            for loss in self.losses if not intercept else set(self.losses) & {"mse"}:
                for ridge in sorted(self.grid.ridges, reverse=True):
                    out = made.fit(loss, ridge, by_loo)
                    loo = None if out.loo is None else self._score(self.targets.rows, out.loo)
                    one = Candidate(lam, ridge, loss, *self._scores(out.train, out.valid), loo)
                    one = replace(one, fit_intercept=intercept, label_features=folds)
                    self.found.append(one)
                    best = self._best.setdefault((isinstance(lam, tuple), folds > 0), (one, out))
                    if _rank(one) < _rank(best[0]):
                        self._best[isinstance(lam, tuple), folds > 0] = (one, out)

    def _score(self, nodes: Any, Z: Any) -> float:
        return evaluate(self.metric, self.data.y[nodes], Z, self.targets.classes)

    def _scores(self, train: Any, valid: Any) -> tuple[float, float]:
        """The metric of outputs on the training and on the validation nodes."""
        return self._score(self.targets.rows, train), self._score(self.valid, valid)

    def smooth(self) -> None:
        """Candidates that correct and smooth the best one of each kind of features.

        Both steps for every pair of lam: each step is one sequence of products for all.
        """
        if self.targets.classes is None:
            raise ValueError("Correct and Smooth is for classes, not for numbers to be predicted.")
        H = RegularizedLaplacian(self.data.graph, 1.0, get_backend(self.device), "float32")
        rows, Y = self.targets.rows, np.asarray(self.targets.Y)
        for one, out in self._best.values():
            B = self._everywhere(H, one, out)
            B = softmax(np, B) if one.loss == "ce" else B
            E, c = np.zeros(B.shape), B.shape[1]
            E[rows] = Y - B[rows]
            sigma, sides = np.abs(E).sum() / rows.shape[0], []
            solved = all_rows(H, CORRECT_LAMS, E, _SMOOTH_TOL, BLOCK_WIDTH)
            for lam, E_hat in zip(CORRECT_LAMS, solved):
                G = B + enlargement(E_hat, sigma)[:, None] * E_hat if lam > 0 else B.copy()
                G[rows] = Y
                sides.append(G)
            Z = all_rows(H, SMOOTH_LAMS, np.hstack(sides), _SMOOTH_TOL, BLOCK_WIDTH)
            for i, first in enumerate(CORRECT_LAMS):
                for second, found in zip(SMOOTH_LAMS, Z[:, :, i * c : (i + 1) * c]):
                    train, valid = self._scores(found[rows], found[self.valid])
                    pair = (first, second)
                    self.found.append(replace(one, train=train, valid=valid, smooth=pair))

    def _everywhere(self, H: RegularizedLaplacian, one: Candidate, out: Outcome) -> Any:
        """The outputs of a candidate on all nodes."""
        X, d, Z = self.data.X, self.data.X.shape[1], np.tile(out.b, (self.data.graph.num_nodes, 1))
        for i, lam in enumerate(one.lams):
            B = X @ out.W[i * d : (i + 1) * d]
            Z += B if lam == 0 else all_rows(H, [lam], B, SOLVE_TOL, BLOCK_WIDTH)[0]
        return Z + self.labels @ out.W[len(one.lams) * d :] if one.label_features else Z


def rows_for_each(
    graph: Graph,
    X: Any,
    rows: Any,
    lams: Sequence[float],
    device: str = "auto",
    budget: int | str | None = None,
    tol: float = SOLVE_TOL,
) -> Any:
    """(lams, len(rows), d) float32: the rows of H_lam^-1 X; by len(rows) columns or by d."""
    backend = get_backend(device)
    H = RegularizedLaplacian(graph, 1.0, backend, "float32")
    (n, d), count, sparse = X.shape, rows.shape[0], sp.issparse(X)
    # 16 products wait on the rows that are added up, and each lam has its sum of them.
    allowed = memory_budget(budget, backend.memory_available()) // 4
    summed = (16 + 2 * len(lams)) * (count if count > d else n)
    width = int(min(BLOCK_WIDTH, max(1, allowed // (4 * (3 * n + summed)))))
    if count > d:
        return all_rows(H, lams, sp.csc_array(X) if sparse else X, tol, width, rows)
    X_T = sp.csr_array(X.T) if sparse else np.asarray(X, dtype="float32").T
    out = np.empty((len(lams), count, d), dtype=np.float32)
    for a in range(0, count, width):
        part = rows[a : a + width]
        unit = np.zeros((n, len(part)), dtype="float32")
        unit[part, np.arange(len(part))] = 1
        # H is symmetric: these columns of H^-1 are the rows that are wanted, before X.
        for i, Z in enumerate(all_rows(H, lams, unit, tol, width)):
            out[i, a : a + width] = (X_T @ Z).T
    return out


@dataclass
class Outcome:
    """What one loss, ridge and intercept make of one set of features."""

    train: Any  # outputs on the training nodes
    valid: Any  # ... and on the validation nodes
    W: Any  # p x c
    b: Any  # (c,)
    loo: Any = None  # outputs on the training nodes by models that left each of them out


class Directions:
    """Features in the coordinates w of W = V w, with V from the training rows A = U S V^T.

    Nothing is lost: with a ridge the best W lies in the span of V.  With an intercept, rows and
    targets are taken less their means over the training nodes.
    """

    def __init__(self, train: Any, valid: Any, Y: Any, intercept: bool) -> None:
        self.rows, self.Y, self.intercept = train, np.asarray(Y), intercept
        self.mean, self.Y_mean = (A.mean(axis=0) * intercept for A in (train, self.Y))
        A = train - self.mean
        self.few = A.shape[0] <= A.shape[1]
        squares, V = np.linalg.eigh(A @ A.T if self.few else A.T @ A)
        keep = squares > RANK_CUT * squares[-1]
        self.squares, V = squares[keep], V[:, keep]
        self.V = (A.T @ V) / np.sqrt(self.squares) if self.few else V
        self.train, self.valid = A @ self.V, (valid - self.mean) @ self.V
        self._w: dict[str, Any] = {}  # where the last ridge ended

    def fit(self, loss: str, ridge: float, loo: bool = False) -> Outcome:
        """The optimum for one ridge; those of a loss are best asked for from the largest down."""
        if loss == "mse":
            w = (self.train.T @ (self.Y - self.Y_mean)) / (self.squares + ridge)[:, None]
        else:  # each search starts where the one before it ended
            problem = StoredProblem(get_backend("cpu"), LOSSES[loss], self.train, self.Y, ridge)
            w = self._w[loss] = minimise(problem, _GAP, 300, self._w.get(loss)).u
        W, b = self.V @ w, self.Y_mean
        left = self.leave_one_out(ridge) if loo else None
        return Outcome(self.train @ w + b, self.valid @ w + b, W, b - self.mean @ W, left)

    def leave_one_out(self, ridge: float) -> Any:
        """n_train x c: row i is the output at node i of the least squares that left it out.

        e_i / (1 - h_i) is what the residual of node i becomes, h_i its leverage; of fewer rows than
        features, where 1 - h_i would lose its digits, `DualRows` has it without that difference.
        """
        if self.few:
            weights = np.ones(self.rows.shape[0])
            return self.Y - DualRows(self.rows, weights, ridge, self.intercept).missed(self.Y)[0]
        T, Y = self.train / (self.squares + ridge), self.Y - self.Y_mean
        h = (T * self.train).sum(axis=1) + self.intercept / self.train.shape[0]
        residual = Y - T @ (self.train.T @ Y)
        return self.Y - residual / np.maximum(1.0 - h, 1e-12)[:, None]
