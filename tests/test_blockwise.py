"""A block of outputs after the other: the same optimum, proven for all of them together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu import problem as problem_module
from herta_gpu.certificate import Certificate, joined
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import BudgetError
from herta_gpu.training import Loop
from tests.conftest import dense_H, random_graph

LAM, N, TRAIN = 5.0, 1500, np.arange(700)
TIGHT = "1.5MB"


def targets(kind: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    if kind == "labels":
        return rng.integers(0, 12, N)
    Y = rng.standard_normal((N, 12))
    if kind == "awkward":
        A = np.linalg.solve(dense_H(graph(), LAM), features())
        Y[:, 0], Y[:, 5] = A @ np.ones(10), 0.0  # an optimum of 0, and nothing to learn
        Y[:, 7], Y[:, 9] = 1e4 * Y[:, 7], 1e-4 * Y[:, 9]
    return Y


def graph():
    return random_graph(N, 5000)


def features() -> np.ndarray:
    return np.random.default_rng(2).standard_normal((N, 10))


def optimum(y: np.ndarray, ridge: float):
    """(objective of W, its minimum), by dense algebra."""
    A = np.linalg.solve(dense_H(graph(), LAM), features())[TRAIN]
    Y = (np.eye(12)[y] if y.ndim == 1 else y)[TRAIN]
    best = np.linalg.solve(A.T @ A + ridge * np.eye(10), A.T @ Y)

    def objective(W: np.ndarray) -> float:
        return 0.5 * float(((A @ W - Y) ** 2).sum()) + 0.5 * ridge * float((W**2).sum())

    return objective, objective(best)


@pytest.mark.parametrize("kind", ["labels", "numbers", "awkward"])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_blocks_reach_the_optimum_of_all_outputs(kind, ridge, monkeypatch):
    solved, widest = problem_module.block_cg, []

    def watched(H, B, *rest, **more):
        widest.append(B.shape[1])
        return solved(H, B, *rest, **more)

    monkeypatch.setattr(problem_module, "block_cg", watched)
    y = targets(kind)
    model = HERTA(lam=LAM, ridge=ridge, strategy="herta", memory_budget=TIGHT)
    model.fit(graph(), features(), y, TRAIN)
    assert max(widest) <= model.plan_.outputs < 12
    assert "outputs at once" in str(model.plan_)
    assert sum(model.plan_.memory.values()) <= 1.5 * 2**20
    objective, best = optimum(y, ridge)
    gap = objective(model.W_) - best
    assert model.status_ == "certified"
    assert gap <= model.certificate_.gap + 1e-12 * best
    assert gap / best <= model.certificate_.value <= 1e-6
    assert model.certificate_.optimum <= best * (1 + 1e-15)
    last = model.history_[-1]
    assert abs(last["loss"] - objective(model.W_)) <= last["loss_error"] + 1e-12 * best
    assert last["certificate"] == model.certificate_.value
    assert [h["step"] for h in model.history_] == list(range(len(model.history_)))


@pytest.mark.parametrize("options", [
    {"optimizer": "gd"}, {"optimizer": "momentum"}, {"optimizer": "lbfgs"},
    {"optimizer": "adam", "max_iter": 400, "tol": 1e-3}, {"sketch": 64}, {"sparsify": 3000},
])  # fmt: skip
def test_every_way_to_iterate_has_blocks(options):
    y = targets("numbers")
    given = {"lam": LAM, "ridge": 0.3, "strategy": "herta", "memory_budget": TIGHT}
    model = HERTA(**{**given, **options}).fit(graph(), features(), y, TRAIN)
    objective, best = optimum(y, 0.3)
    assert 0 < model.plan_.outputs < 12
    assert model.status_ == "certified"
    assert objective(model.W_) - best <= model.certificate_.value * best


def test_steps_of_blocks_are_told_as_steps_of_all_outputs():
    y, told = targets("numbers"), []
    given = {"lam": LAM, "strategy": "herta", "sketch": 24, "tol": 1e-9, "max_iter": 4}
    model = HERTA(**given, memory_budget=TIGHT)
    model.fit(graph(), features(), y, TRAIN, callback=told.append)
    assert model.status_ == "max_iter"
    assert told == model.history_
    assert len(told) == 5
    losses = [h["loss"] for h in told]
    assert losses == sorted(losses, reverse=True)
    wide = HERTA(**given).fit(graph(), features(), y, TRAIN)
    assert losses == pytest.approx([h["loss"] for h in wide.history_], rel=1e-5)


@pytest.mark.parametrize("stop", [0, 1])
def test_a_fit_in_blocks_goes_on_to_the_same_bits(stop, tmp_path, monkeypatch):
    """The fit ends in the block `stop`; blocks before it are read, those from it on are trained."""
    y, loop, loops = targets("numbers"), Loop.run, []

    def interrupted(self, *args, **more):
        loops.append(1)
        if len(loops) == stop + 1:
            raise KeyboardInterrupt
        return loop(self, *args, **more)

    def fit(folder: str) -> HERTA:
        model = HERTA(lam=LAM, strategy="herta", sketch=24, tol=1e-9, memory_budget=TIGHT)
        state = Checkpoint(tmp_path / folder, worth=0.0)
        return model.fit(graph(), features(), y, TRAIN, checkpoint=state)

    monkeypatch.setattr(Loop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit("state")
    again, resumed = fit("state"), len(loops) - stop - 1
    loops[:] = [1] * (stop + 1)  # this one is not interrupted
    whole = fit("other")
    assert resumed == len(loops) - stop - 1 - stop > 0
    assert (again.W_ == whole.W_).all()
    assert again.certificate_ == whole.certificate_
    assert [h["loss"] for h in again.history_] == [h["loss"] for h in whole.history_]


def test_cross_entropy_says_which_strategy_needs_no_outputs():
    y = targets("labels")
    model = HERTA(lam=LAM, loss="ce", ridge=1.0, strategy="herta", memory_budget="1.2MB")
    with pytest.raises(BudgetError, match=r'needs at least \d+ MB .* or use strategy="direct"'):
        model.fit(graph(), features(), y, TRAIN)
    model.set_params(strategy="auto").fit(graph(), features(), y, TRAIN)
    assert model.plan_.strategy == "direct"


def test_certificates_of_independent_problems_add_up():
    first = Certificate(0.5, "duality", 0.0, 1.0, "", 5, 5)
    second = Certificate(math.inf, "spectral-probabilistic", 1e-3, 3.0, "cut", 4, 5)
    found = joined([first, second])
    assert (found.gap, found.optimum, found.value) == (4.0, 2.0, 2.0)
    assert (found.probability, found.kept, found.reduced, found.note) == (1e-3, 4, True, "cut")
    nothing = Certificate(math.inf, "none", note="why")
    assert joined([first, nothing]) == nothing
    assert joined([first]) == first
