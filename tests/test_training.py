"""The loop of Algorithm 1: its steps, its limits and how it ends."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu import problem as problem_module
from herta_gpu.certificate import Certificate, merge_certificates
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import BudgetError
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.training import Loop
from tests.conftest import closed_form, dense_H, least_squares, minimum, problem, random_graph


@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_there_are_never_more_steps_than_max_iter(strategy):
    g, X, y, train = problem()
    model = HERTA(loss="ce", optimizer="gd", ridge=1e-6, max_iter=3, tol=1e-300, strategy=strategy)
    model.fit(g, X, y, train=train)
    assert model.status_ == "max_iter"
    assert len(model.history_) == 3 + 1  # and the start
    # Steps on a stored A cost no solve and have a limit of their own.
    least, most = (10, 20 * 3 + 1) if strategy == "direct" else (0, 0)
    assert least <= len(model.warm_history_) <= most


def test_tolerances_below_rounding_stagnate():
    g, X, y, train = problem()
    model = HERTA(tol=1e-300, dtype="float64").fit(g, X, y, train=train)
    assert model.status_ == "stagnated"
    assert len(model.history_) < 30


def test_a_learning_rate_that_is_too_large_warns_and_keeps_the_last_good_point():
    g, X, y, train = problem()
    model = HERTA(optimizer="gd", learning_rate=1e6, precondition=False)
    with pytest.warns(UserWarning, match="lower learning_rate"):
        model.fit(g, X, y, train=train)
    assert model.status_ == "diverged"
    assert np.isfinite(model.W_).all()


def test_a_step_from_the_spectral_estimate():
    g, X, y, train = problem()
    model = HERTA(optimizer="gd", learning_rate="spectral", strategy="herta").fit(g, X, y, train)
    assert model.status_ == "certified"


def test_standard_training_is_slow_on_ill_conditioned_features():
    """What the paper is about: the same optimizer, with and without the preconditioner."""
    g, X, y, train = problem()
    X = X * np.logspace(0, -3, 8)
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 1.0)
    fast = HERTA(optimizer="gd", strategy="herta", max_iter=100).fit(g, X, y, train=train)
    slow = HERTA(optimizer="gd", precondition=False, max_iter=100).fit(g, X, y, train=train)
    assert len(fast.history_) <= 5
    assert fast.history_[-1]["loss"] <= best * (1 + 1e-6)
    assert slow.history_[-1]["loss"] > best * (1 + 1e-4)
    assert slow.status_ == "max_iter"
    assert slow.certificate_.kind == "none"


@pytest.mark.parametrize("optimizer", ["gd", "momentum", "adam", "cg", "lbfgs"])
@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_every_optimizer_reaches_the_optimum(optimizer, loss):
    g, X, y, train = problem()
    model = HERTA(
        lam=5.0, loss=loss, optimizer=optimizer, ridge=1.0, strategy="herta", max_iter=600, tol=1e-5
    ).fit(g, X, y, train=train)
    A = np.linalg.solve(dense_H(g, 5.0), X)[train]
    best = minimum(A, np.eye(3)[y[train]], loss, ridge=1.0)
    assert model.status_ == "certified"
    assert model.history_[-1]["loss"] <= best * (1 + 1e-5)


def test_training_starts_from_what_Q_says_of_Z(monkeypatch):
    g, X, y, train = problem(n=2000)
    fit = HERTA(lam=20.0, strategy="herta")
    spent = [fit.fit(g, X, y, train).history_[0]["inner_iterations"]]
    monkeypatch.setattr(Preconditioner, "guess", lambda self, backend, at: None)
    spent.append(fit.fit(g, X, y, train).history_[0]["inner_iterations"])
    assert spent[0] < 0.8 * spent[1]


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_the_objective_never_grows_under_an_exact_line_search(loss):
    g, X, y, train = problem()
    model = HERTA(lam=5.0, loss=loss, ridge=0.1, strategy="herta", optimizer="gd", sketch=32)
    model.fit(g, X, y, train)
    losses = [entry["loss"] for entry in model.history_]
    assert len(losses) > 2
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("max_iter", [1, 2, 5])
def test_more_steps_begin_with_the_same_ones(max_iter):
    g, X, y, train = problem()
    options = {"loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-12, "random_state": 3}
    short = HERTA(**options, max_iter=max_iter).fit(g, X, y, train)
    long = HERTA(**options, max_iter=8).fit(g, X, y, train)
    assert short.status_ == "max_iter"
    assert len(short.history_) == max_iter + 1
    assert [h["loss"] for h in short.history_] == [h["loss"] for h in long.history_][: max_iter + 1]


def test_entries_of_the_histories_tell_what_they_are():
    g, X, y, train = problem()
    seen = []
    model = HERTA(loss="ce", ridge=0.1, strategy="direct")
    model.fit(g, X, y, train, callback=seen.append)
    assert seen == model.warm_history_ + model.history_
    assert all(entry["warm"] for entry in model.warm_history_)
    assert not any(entry["warm"] for entry in model.history_)
    for history in (model.warm_history_, model.history_):
        assert [entry["step"] for entry in history] == list(range(len(history)))
        assert sorted(entry["seconds"] for entry in history) == [e["seconds"] for e in history]
    # A model that stands in for the true one certifies nothing.
    assert {entry["certificate"] for entry in model.warm_history_} == {np.inf}
    assert model.history_[-1]["certificate"] == model.certificate_.value <= 1e-6


def test_a_warm_start_on_a_stored_A_leaves_next_to_nothing_to_do():
    g, X, y, train = problem()
    options = {"lam": 5.0, "loss": "ce", "ridge": 0.1}
    direct = HERTA(**options, strategy="direct").fit(g, X, y, train)
    herta = HERTA(**options, strategy="herta").fit(g, X, y, train)
    assert not herta.warm_history_
    assert len(direct.history_) <= 2 < len(herta.history_)
    assert direct.history_[0]["loss"] == pytest.approx(herta.history_[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["herta", "direct"])
def test_the_last_entry_is_the_objective_of_W(strategy):
    g, X, y, train = problem()
    model = HERTA(lam=5.0, ridge=0.3, dtype="float64", strategy=strategy).fit(g, X, y, train)
    F = np.linalg.solve(dense_H(g, 5.0), X @ model.W_)[train]
    E = F - np.eye(3)[y[train]]
    objective = 0.5 * (E**2).sum() + 0.15 * (model.W_**2).sum()
    last = model.history_[-1]
    assert abs(last["loss"] - objective) <= last["loss_error"]
    # Stored rows alone know the objective a little less well than solves do.
    assert last["loss"] == pytest.approx(objective, rel=1e-9 if strategy == "herta" else 1e-6)
    A = np.linalg.solve(dense_H(g, 5.0), X)[train]
    size = np.linalg.norm(A.T @ E + 0.3 * model.W_)
    assert model.history_[-1]["grad_norm"] == pytest.approx(size, abs=1e-3)


def test_each_way_to_end_has_its_status():
    g, X, y, train = problem()
    ends = {
        "certified": HERTA(ridge=0.1),
        "certified-reduced": HERTA(lam=20.0),
        "converged": HERTA(lam=5.0, loss="ce", max_iter=300),
        "max_iter": HERTA(optimizer="adam", max_iter=2, precondition=False),
        "stagnated": HERTA(tol=1e-300, dtype="float64"),
    }
    for status, model in ends.items():
        mixed = np.hstack([X, X[:, :3] @ np.arange(1.0, 7.0).reshape(3, 2)])
        features = mixed if status == "certified-reduced" else X
        assert model.fit(g, features, y, train).status_ == status
        proven = model.certificate_.kind != "none" and model.certificate_.value <= model.tol
        assert proven == status.startswith("certified")


@pytest.mark.parametrize(
    ("loss", "ridge", "fit_intercept"), [("ce", 0.0, False), ("ce", 0.1, True), ("mse", 0.1, True)]
)
def test_one_class_is_trivially_optimal_and_says_so(loss, ridge, fit_intercept):
    """Cause: an optimum of 0 has no relative gap, and such fits ended "stagnated"."""
    graph, X, _, train = problem(60, 5)
    y = np.full(60, 7)
    model = HERTA(loss=loss, ridge=ridge, fit_intercept=fit_intercept).fit(graph, X, y, train)
    assert (model.status_, model.certificate_.gap, model.certificate_.value) == ("certified", 0, 0)
    assert "nothing to learn" in str(model.certificate_)
    assert len(model.history_) == 1
    assert (model.predict(graph, X) == 7).all()
    assert (model.W_ == 0).all()


def test_equal_labels_and_an_intercept_have_nothing_to_learn():
    graph, X, _, train = problem(60, 5)
    y = np.tile([1, 0], (60, 1))
    model = HERTA(loss="bce", ridge=0.1, fit_intercept=True).fit(graph, X, y, train)
    assert model.status_ == "converged"  # constants of 60 leave a loss of about 1e-25
    assert model.history_[-1]["loss"] <= model.certificate_.gap < 1e-20
    assert (model.predict(graph, X) == [1, 0]).all()
    flat = HERTA(ridge=0.1, fit_intercept=True).fit(graph, X, np.full(60, 0.3), train, loo=True)
    np.testing.assert_allclose(flat.loo_, 0.3, rtol=1e-12)
    np.testing.assert_allclose(flat.predict(graph, X), 0.3, rtol=1e-6)  # float32


@pytest.mark.parametrize("seed", [35, 61, 74])
def test_separable_classes_and_an_intercept_do_not_diverge(seed):
    """Cause: constants of outputs far from 0 were not found, and the loss seemed to explode."""
    rng = np.random.default_rng(seed)
    graph, X = random_graph(45, 120, seed), rng.standard_normal((45, 20)) * 10.0 ** (seed % 5 - 2)
    Z = np.linalg.solve(dense_H(graph, 20.0), X)
    scores = Z @ rng.standard_normal((20, 3)) + Z.std()
    for loss, y in (("ce", scores.argmax(axis=1)), ("bce", (scores > 0).astype(int))):
        for optimizer in ("cg", "lbfgs"):
            params = {"loss": loss, "optimizer": optimizer, "strategy": ("auto", "herta")[seed % 2]}
            model = HERTA(lam=20.0, fit_intercept=True, **params).fit(graph, X, y, np.arange(30))
            assert model.status_ == "converged"
            assert "separable" in model.certificate_.note or "nothing" in model.certificate_.note
            assert model.certificate_.gap <= 1e-5 * 30
            assert (model.predict(graph, X)[:30] == y[:30]).all()


# ---- a block of outputs after the other: proven for all of them together ----------------------
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

    def objective(W: np.ndarray) -> float:
        return 0.5 * float(((A @ W - Y) ** 2).sum()) + 0.5 * ridge * float((W**2).sum())

    return objective, least_squares(A, Y, ridge)[1]


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
    found = merge_certificates([first, second])
    assert (found.gap, found.optimum, found.value) == (4.0, 2.0, 2.0)
    assert (found.probability, found.kept, found.reduced, found.note) == (1e-3, 4, True, "cut")
    nothing = Certificate(math.inf, "none", note="why")
    assert merge_certificates([first, nothing]) == nothing
    assert merge_certificates([first]) == first


@pytest.mark.parametrize(("way", "m", "d"), [("factor", 450, 40), ("cg", 9_000, 40)])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_other_ways_to_Q_prove_the_optimum_of_dense_algebra(way, m, d, ridge):
    rng = np.random.default_rng(1)
    n, lam = 400, 1e3
    g = Graph.from_edges(rng.integers(0, n, (2, m)), num_nodes=n)
    X, Y, train = rng.standard_normal((n, d)), rng.standard_normal((n, 3)), np.arange(300)
    model = HERTA(lam=lam, ridge=ridge, strategy="direct").fit(g, X, Y, train)
    assert model.plan_.recipe.way == way
    assert model.status_ == "certified"
    A = np.linalg.solve(np.eye(n) + lam * g.to_csr().toarray(), X)[train]

    def objective(W):
        return 0.5 * ((A @ W - Y[train]) ** 2).sum() + 0.5 * ridge * (W**2).sum()

    stacked = np.vstack([A, np.sqrt(ridge) * np.eye(d)])
    best = objective(np.linalg.lstsq(stacked, np.vstack([Y[train], np.zeros((d, 3))]))[0])
    gap = objective(model.W_) / best - 1
    assert -1e-11 <= gap <= model.certificate_.value + 1e-11
