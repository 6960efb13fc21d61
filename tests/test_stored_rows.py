"""Training on stored rows: what happens when the first try does not prove the fit."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp

from herta_gpu import HERTA, Checkpoint, Graph
from tests.conftest import dense_H, minimum, problem, random_graph
from tests.fuzz import checks
from tests.fuzz.problems import Problem, draw
from tests.fuzz.reference import Reference


def offset_problem(**params: object) -> Problem:
    """Columns that an offset makes alike: norm 1 does not tell them apart, a ridge does."""
    rng = np.random.default_rng(0)
    lo, hi = np.triu_indices(80, 1)
    keep = rng.random(lo.size) < 0.08
    X = rng.standard_normal((80, 3)) + 3e5
    usual = {
        "lam": 20.0, "loss": "ce", "ridge": 2e-4, "tol": 1e-9, "strategy": "direct",
        "optimizer": "lbfgs", "max_iter": 40, "random_state": 0,
    }  # fmt: skip
    edges = np.stack([lo[keep], hi[keep]])
    y = rng.integers(0, 3, 80)
    return Problem("offset", 80, edges, None, X, y, np.arange(60), {**usual, **params}, "offset")


def test_weights_keep_their_meaning_when_the_coordinates_change():
    """Cause: u of columns of norm 1 was taken for u of orthonormal ones."""
    problem = offset_problem()
    model = checks.fit(problem)
    assert any("orthonormal" in change.choice for change in model.changes_)
    losses = [h["loss"] for h in model.history_]
    assert max(losses) <= losses[0] * (1 + 1e-3)
    best = problem.reference.best
    assert abs(losses[-1] - float(best.value)) <= 1e-6 * float(best.value)
    assert checks.bound_faults(model, problem.reference) == []


@pytest.mark.parametrize("number", [4, 5, 7, 8, 10, 13, 17])
def test_cross_entropy_has_no_spectrum(number):
    """Cause: where stored rows proved nothing, bounds for MSE were taken for those of softmax."""
    problem = draw(7, number, "stored rows")
    assert problem.params["loss"] == "ce"
    outcome = checks.run(problem)
    assert outcome.faults == []
    assert checks.fit(problem).spectrum_ is None


@pytest.mark.parametrize("optimizer", ["gd", "lbfgs", "adam"])
@pytest.mark.parametrize("few", [True, False])
def test_nor_where_rows_of_the_inverse_stand_in(optimizer, few):
    """Fewer rows than features, a ridge, and an optimizer that asks for the true gradient."""
    rng = np.random.default_rng(1)
    graph, d = random_graph(120, 400), 50 if few else 10
    X, y = rng.standard_normal((120, d)), rng.integers(0, 3, 120)
    model = HERTA(
        lam=2.0, loss="ce", ridge=0.1, strategy="direct", optimizer=optimizer, max_iter=300
    ).fit(graph, X, y, np.arange(30))
    assert model.spectrum_ is None
    assert model.certificate_.kind == "duality"
    problem = Problem(
        "few", 120, np.stack(graph.edges()[:2]), None, X, y, np.arange(30), model.get_params(), ""
    )
    assert isinstance(problem.reference, Reference)
    assert checks.bound_faults(model, problem.reference) == []


@pytest.mark.parametrize("params", [{}, {"ridge": 0.1}, {"loss": "ce", "ridge": 0.1}])
def test_narrow_blocks_end_at_the_same_optimum(params):
    """A budget that holds a few columns only."""
    rng = np.random.default_rng(2)
    n, d = 4000, 60
    graph, X, y = random_graph(n, 9000), rng.standard_normal((n, d)), rng.integers(0, 3, n)
    train = np.arange(300)
    common = {"lam": 5.0, "strategy": "direct", "tol": 1e-8, **params}
    wide = HERTA(**common).fit(graph, X, y, train)
    tight = HERTA(**common, memory_budget="1MB").fit(graph, X, y, train)
    assert tight.plan_.recipe.width < 16
    assert wide.status_ == tight.status_ == "certified"
    assert tight.history_[-1]["loss"] == pytest.approx(wide.history_[-1]["loss"], rel=1e-8)


def test_rows_too_alike_for_a_proof_get_a_look_at_the_true_model():
    """Cause: without any bound from the rows the fit ended, though the true model has gradients."""
    problem = draw(41, 102, "stored rows")
    assert any(change.what == "proof" for change in checks.fit(problem).changes_)
    assert checks.run(problem).faults == []


@pytest.mark.parametrize(("budget", "outputs"), [(None, 3), (100_000, 1), (60_000, 0)])
def test_an_optimum_of_zero_is_converged_to(budget, outputs):
    """As many training rows as features fit the targets exactly: no gap is relative to that."""
    rng = np.random.default_rng(4)
    graph, X, y = random_graph(300, 900), rng.standard_normal((300, 8)), rng.integers(0, 3, 300)
    model = HERTA(lam=1.0, strategy="direct", memory_budget=budget).fit(graph, X, y, np.arange(8))
    assert model.plan_.stored
    assert model.plan_.outputs == outputs
    assert model.status_ == "converged"
    Q = np.linalg.solve(dense_H(graph, 1.0), X)[:8]
    left = Q @ model.W_ - np.eye(3)[y[:8]][:, np.unique(y[:8])]
    assert np.linalg.norm(left) <= (1e-5 if outputs else 1e-4)  # solves that end at 0
    assert model.certificate_.value == math.inf


def test_outputs_beside_come_with_the_fit():
    rng = np.random.default_rng(3)
    graph, X, y = random_graph(200, 700), rng.standard_normal((200, 6)), rng.integers(0, 3, 200)
    model = HERTA(lam=5.0, strategy="direct").fit(
        graph, X, y, np.arange(100), evaluate=np.arange(150, 200)
    )
    Z = model.transform(graph, X)
    assert model.outputs_.shape == (50, 3)
    assert abs(model.outputs_ - Z[150:]).max() <= 1e-4 * abs(Z).max()
    assert math.isfinite(model.certificate_.value)


class Crash(Exception):  # noqa: N818
    """What a resume goes on from."""


@pytest.mark.parametrize("later", [None, np.arange(150, 200), np.arange(120, 170)])
def test_a_resume_that_wants_other_outputs_gets_those(later, tmp_path):
    """Cause: stored blocks of Q held the rows of the nodes that the first fit was asked for."""
    rng = np.random.default_rng(3)
    graph, X, y = random_graph(200, 700), rng.standard_normal((200, 6)), rng.integers(0, 3, 200)
    model = HERTA(lam=5.0, strategy="direct", loss="ce", ridge=0.1)

    def crash(_: object) -> None:
        raise Crash

    def fit(evaluate: object, callback: object = None) -> object:
        state = Checkpoint(tmp_path / "state", worth=0.0)
        how = {"callback": callback, "checkpoint": state, "evaluate": evaluate}
        return model.fit(graph, X, y, np.arange(100), **how)

    with pytest.raises(Crash):
        fit(np.arange(100, 150), crash)
    fit(later)
    assert hasattr(model, "outputs_") == (later is not None)
    if later is not None:
        Z = model.transform(graph, X)
        assert abs(model.outputs_ - Z[later]).max() <= 1e-4 * abs(Z).max()


@pytest.mark.parametrize("evaluate", [np.arange(30, 50), np.arange(60) % 2 == 0, []])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"strategy": "direct"},
        {"strategy": "herta"},
        {"lam": [0.0, 2.0]},
        {"loss": "ce"},
        {"precondition": False, "max_iter": 5},
        {"sketch": True},
        {"sparsify": True},
        {"label_features": 2},
        {"fit_intercept": True},
    ],
)
@pytest.mark.parametrize("few", [False, True])
def test_outputs_of_other_nodes_come_with_every_fit(few, params, ridge, evaluate):
    rng = np.random.default_rng(4)
    graph, X = random_graph(60, 150), rng.standard_normal((60, 30 if few else 5))
    y = rng.integers(0, 3, 60)
    model = HERTA(ridge=ridge, dtype="float64", **params)
    model.fit(graph, X, y, np.arange(20), evaluate=evaluate)
    Z = model.transform(graph, X, evaluate)
    assert model.outputs_.shape == Z.shape
    assert abs(model.outputs_ - Z).max(initial=0) <= 1e-4 * max(1.0, abs(Z).max(initial=0))


def test_outputs_of_other_nodes_where_there_is_nothing_to_learn():
    graph, X = random_graph(60, 150), np.random.default_rng(0).standard_normal((60, 30))
    for params in ({}, {"strategy": "herta"}, {"ridge": 0.1}, {"fit_intercept": True}):
        model = HERTA(**params).fit(graph, X, np.zeros(60), np.arange(20), evaluate=[50])
        assert (model.outputs_ == 0).all()


# ---- a warm start --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"ridge": 0.1},
        {"loss": "ce", "ridge": 0.1},
        {"loss": "ce", "ridge": 0.1, "strategy": "herta"},
        {"ridge": 0.1, "precondition": False, "max_iter": 400},
    ],
)
def test_a_grown_graph_is_certified_from_the_weights_of_the_old_one(params):
    """Nodes and edges were added; the optimum is that of dense algebra."""
    rng, n = np.random.default_rng(2), 600
    edges = rng.integers(0, n, (2, 2400))
    X = rng.standard_normal((n, 150))
    y = (X[:, :3] + 0.3 * rng.standard_normal((n, 3))).argmax(axis=1)
    old = Graph.from_edges(edges[:, (edges < 590).all(axis=0)], num_nodes=590)
    new, train = Graph.from_edges(edges, num_nodes=n), np.arange(450)
    first = HERTA(lam=10.0, **params).fit(old, X[:590], y[:590], train)
    model = HERTA(lam=10.0, **params).fit(new, X, y, train, warm_start=first)
    assert model.status_ == "certified"
    A, Y = np.linalg.solve(dense_H(new, 10.0), X)[train], np.eye(3)[y[train]]
    loss, ridge = params.get("loss", "mse"), params.get("ridge", 0.0)
    best = minimum(A, Y, loss, ridge)

    def objective(W):
        F = A @ W
        terms = (F - Y) ** 2 / 2 if loss == "mse" else np.logaddexp.reduce(F, axis=1) - F[Y > 0]
        return terms.sum() + ridge / 2 * (W**2).sum()

    assert objective(model.W_) - best <= (model.certificate_.value + 1e-9) * best
    if "strategy" in params or "precondition" in params:  # steps with true gradients from there
        assert model.history_[0]["loss"] == pytest.approx(objective(first.W_), rel=1e-4)


def test_a_warm_start_that_does_not_fit_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    g, X, y = random_graph(60, 150), rng.standard_normal((60, 5)), rng.integers(0, 3, 60)
    model = HERTA(ridge=0.1).fit(g, X, y)
    for X_now, y_now, words in ((X[:, :4], y, "shape"), (X, y + 1, "other classes")):
        with pytest.raises(ValueError, match=words):
            HERTA(ridge=0.1).fit(g, X_now, y_now, warm_start=model)
    with pytest.raises(TypeError, match="fitted HERTA"):
        HERTA().fit(g, X, y, warm_start=HERTA())
    with pytest.raises(ValueError, match="leave out warm_start"):
        HERTA().fit(g, X, y, warm_start=model, checkpoint=Checkpoint(tmp_path))
    for loss, value in itertools.product(("mse", "ce"), (np.nan, np.inf)):
        broken = pickle.loads(pickle.dumps(model))
        broken.W_[2, 1] = value
        with pytest.raises(ValueError, match="not finite"):
            HERTA(loss=loss, ridge=0.1).fit(g, X, y, warm_start=broken)
    assert (pickle.loads(pickle.dumps(model)).W_ == model.W_).all()
    model.save(tmp_path / "model.npz")
    again = HERTA(loss="ce", ridge=0.1).fit(g, X, y, warm_start=HERTA.load(tmp_path / "model.npz"))
    assert again.status_ == "certified"


@pytest.mark.parametrize("strategy", ["herta", "direct"])
@pytest.mark.parametrize(
    ("loss", "size"), [("ce", 1e6), ("ce", 1e30), ("ce", 1e200), ("bce", 1e30)]
)
def test_a_warm_start_that_is_worse_than_none_does_no_harm(strategy, loss, size):
    g, X, y, train = problem(120, 5)
    y = np.eye(3)[y].astype(int) if loss == "bce" else y
    params = {"loss": loss, "ridge": 0.1, "strategy": strategy}
    model = HERTA(**params).fit(g, X, y, train)
    huge = pickle.loads(pickle.dumps(model))
    huge.W_ *= size
    with np.errstate(all="ignore"):
        again = HERTA(**params).fit(g, X, y, train, warm_start=huge)
    assert again.status_ == "certified"
    assert again.history_[-1]["loss"] == pytest.approx(model.history_[-1]["loss"], rel=3e-6)


def _alike(seed: int) -> tuple[Graph, Any, Any, Any, Any]:
    """Two features that are nearly alike, all in other units, on a path: (graph, H, X, y, z)."""
    n, rng = 40, np.random.default_rng(seed)
    u = np.arange(n - 1)
    W = np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1)
    s = (W.sum(axis=1) + 1) ** -0.5
    H = np.eye(n) + s[:, None] * (np.diag(W.sum(axis=1)) - W) * s
    X = rng.standard_normal((n, 4))
    X[:, 0] = X[:, 1] + 10.0 ** rng.uniform(-10, -4) * X[:, 0]
    X *= 10.0 ** rng.uniform(-8, 8, 4)
    y = rng.integers(0, 3, n) if seed % 2 else rng.standard_normal(n)
    return Graph.from_edges(np.stack([u, u + 1]), n), H, X, y, np.arange(n - 5)


def _objective(F: Any, W: Any, y: Any, ridge: float) -> float:
    penalty = 0.5 * ridge * (W**2).sum()
    if y.dtype.kind == "f":
        return float(0.5 * ((F[:, 0] - y) ** 2).sum() + penalty)
    return float((logsumexp(F, axis=1) - F[np.arange(len(y)), y]).sum() + penalty)


@pytest.mark.parametrize("seed", [73, 121, 310, 406])
@pytest.mark.parametrize("max_iter", [1, 2, 30])
def test_the_best_attempt_is_returned_not_the_last(seed: int, max_iter: int) -> None:
    """Orthonormal columns made of features so alike were 10^2 to 10^4 times worse than W = 0."""
    graph, H, X, y, train = _alike(seed)
    loss, told, others = ("ce" if seed % 2 else "mse"), [], np.arange(35, 40)
    model = HERTA(loss=loss, ridge=1e-6, strategy="direct", dtype="float64", tol=1e-9,
                  max_iter=max_iter)  # fmt: skip
    model.fit(graph, X, y, train, callback=told.append, evaluate=others)
    F = np.linalg.solve(H, X @ model.W_)
    found = _objective(F[train], model.W_, y[train], 1e-6)
    last, steps = model.history_[-1], [h for h in told if not h["warm"]]
    assert found <= (1 + 1e-9) * min(h["loss"] + h["loss_error"] for h in steps)
    assert found <= (1 + 1e-12) * _objective(0 * F[train], 0 * model.W_, y[train], 1e-6)
    # All that is told is told of these very weights.
    assert abs(found - last["loss"]) <= last["loss_error"] + 1e-9 * found
    assert last["certificate"] == model.certificate_.value
    np.testing.assert_allclose(model.outputs_, F[others], atol=1e-6 * abs(F).max())


@pytest.mark.parametrize("intercept", [False, True])
def test_a_fit_that_diverges_returns_its_best_point(intercept: bool) -> None:
    graph, H, X, y, train = _alike(310)
    X, told = X / np.linalg.norm(X, axis=0), []
    model = HERTA(strategy="herta", optimizer="gd", learning_rate=40.0, tol=1e-9, dtype="float64",
                  ridge=0.1, fit_intercept=intercept)  # fmt: skip
    with pytest.warns(UserWarning, match="diverged"):
        model.fit(graph, X, y, train, callback=told.append)
    F = np.linalg.solve(H, X @ model.W_) + model.intercept_
    found = _objective(F[train], model.W_, y[train], 0.1)
    best = min((h for h in told if not h["warm"]), key=lambda h: h["loss"] + h["loss_error"])
    assert (model.status_, model.history_[-1]) == ("diverged", best)
    assert found == pytest.approx(best["loss"], rel=1e-9)
    assert model.certificate_.value == best["certificate"]


@pytest.mark.parametrize(("seed", "lams"), [(1, [0.4, 1.8]), (4, [1.0]), (7, [0.4, 1.8])])
def test_a_column_in_a_tiny_unit_beside_alike_ones_does_no_harm(seed: int, lams: Any) -> None:
    """Orthonormal columns gave it weights of 10^9 and more: the ridge term was up to 3e22.

    They belong to X and the ridge together now, and what outputs are off by counts in the gap, not
    in the gradient through X: 0.02 to 0.24 was all that could be proven.
    """
    n, rng = 20, np.random.default_rng(seed)
    edges = np.stack([rng.integers(0, n, 50), rng.integers(0, n, 50)])
    graph = Graph.from_edges(np.unique(edges[:, edges[0] < edges[1]], axis=1), n)
    X, y = rng.standard_normal((n, 3)) + 1e6, rng.integers(0, 3, n)
    X[:, 0], y[:3] = 1e-20 * rng.standard_normal(n), [0, 1, 2]
    model = HERTA(lams if len(lams) > 1 else 1.0, loss="ce", ridge=1.0, dtype="float64")
    model.fit(graph, X, y)
    A = np.hstack([np.linalg.solve(dense_H(graph, lam), X) for lam in lams])
    found = _objective(A @ model.W_, model.W_, y, 1.0)
    assert found <= n * np.log(3)
    assert model.status_ == "certified"
    last = model.history_[-1]
    assert abs(found - last["loss"]) <= last["loss_error"] + 1e-6 * found


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", [20, 22, 44, 54])
def test_weights_that_only_stored_rows_call_good_are_no_worse_than_none(seed: int) -> None:
    """Separable classes, a column in a tiny unit, weights of rows down to 1e-29.

    Weights of 1e35 had a loss of about 0 on stored rows, and one 3e5 to 1e18 times that of W = 0.
    """
    n, count, rng = 17, 10, np.random.default_rng(seed)
    edges = np.stack([rng.integers(0, n, 34), rng.integers(0, n, 34)])
    edges = np.unique(np.sort(edges, axis=0)[:, edges[0] != edges[1]], axis=1)
    X, y = 0.02 * rng.standard_normal((n, 2)), rng.integers(0, 2, n)
    X[:, 0] *= 3e-28
    weight = 10.0 ** -rng.uniform(0, 29, n)
    weight[0], y[:2] = 1.0, [0, 1]
    graph = Graph.from_edges(edges, n)
    model = HERTA(
        [0.4, 1.8], loss="ce", fit_intercept=True, dtype="float64", device="cpu-scipy"
    ).fit(graph, X, y, np.arange(count), sample_weight=weight)
    A = np.hstack([np.linalg.solve(dense_H(graph, lam), X) for lam in (0.4, 1.8)])
    F, w, t = (A @ model.W_ + model.intercept_)[:count], weight[:count], y[:count]
    rows = np.logaddexp.reduce(F, axis=1) - F[np.arange(count), t]
    share = np.array([w[t == k].sum() for k in (0, 1)]) / w.sum()
    assert w @ rows <= -(w @ np.log(share[t])) * (1 + 1e-6)
