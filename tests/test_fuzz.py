"""The fuzz at fixed seeds, and proof that it can fail: sabotage that it must find."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import herta_gpu.certificate
import herta_gpu.diffusion
import herta_gpu.planning.costs
import herta_gpu.training
from herta_gpu import Graph
from herta_gpu.more import pagerank
from tests.conftest import dense_H, least_squares, minimum
from tests.fuzz import checks
from tests.fuzz.__main__ import main
from tests.fuzz.problems import KINDS, Problem, draw
from tests.fuzz.reference import LD, Reference, pivoted_qr, system

SEED, PARTS, CASES = 13, 8, 20


@pytest.mark.parametrize("part", range(PARTS))
def test_no_certificate_is_false(part):
    """Some cases at fixed seeds; `python -m tests.fuzz --seconds 600` is the long version."""
    faults = []
    for number in range(part * CASES, (part + 1) * CASES):
        outcome = checks.run(draw(SEED, number))
        again = f"python -m tests.fuzz --seed {SEED} --case {number}"
        faults += [f"[{outcome.problem.kind}] {f}; again: {again}" for f in outcome.faults]
    assert not faults, "\n".join(["", *faults])


def test_weights_whose_loss_is_not_known_well_are_measured_against_none():
    """Units of 1e-20: stored rows said no more than 37, the loss of W = 0; the true one was 82."""
    assert checks.run(draw(200, 731, "extreme units")).faults == []


def test_rows_that_nearly_decide_alone_are_left_out_rightly_or_not_at_all():
    """1 - h of 1e-9 had lost its digits in h; at 1e-15 the errors of Q said more than the ridge."""
    assert checks.run(draw(771, 829, "leave one out")).faults == []


def test_a_case_is_the_same_whatever_came_before_it():
    for kind in KINDS:
        a, b = draw(3, 5, kind), draw(3, 5, kind)
        assert a.kind == kind
        assert a.params == b.params
        assert (a.targets() == b.targets()).all()
        assert abs(a.X - b.X).sum() == 0
    assert draw(3, 5).story == draw(3, 5).story != draw(3, 6).story


# ---- it can fail ---------------------------------------------------------------------------
def easy(**params: Any) -> Problem:
    """A problem without difficulties, and an optimizer that takes many steps."""
    rng = np.random.default_rng(0)
    n = 80
    lo, hi = np.triu_indices(n, 1)
    keep = rng.random(lo.size) < 0.06
    X = rng.standard_normal((n, 6))
    y = (X[:, :3] + 0.5 * rng.standard_normal((n, 3))).argmax(axis=1)
    usual = {
        "lam": 2.0, "loss": "mse", "ridge": 0.0, "tol": 1e-6, "strategy": "herta",
        "optimizer": "gd", "learning_rate": 0.5, "max_iter": 60, "random_state": 0,
    }  # fmt: skip
    edges = np.stack([lo[keep], hi[keep]])
    return Problem("easy", n, edges, None, X, y, np.arange(50), {**usual, **params}, "easy")


SETTINGS = [
    {},
    {"ridge": 0.5},
    {"loss": "ce", "ridge": 0.1, "optimizer": "lbfgs", "learning_rate": None},
    {"strategy": "direct"},
    {"sketch": 64},
]


@pytest.mark.parametrize("params", SETTINGS)
def test_it_has_nothing_to_say_about_a_good_fit(params):
    outcome = checks.run(easy(**params))
    assert outcome.faults == []
    assert outcome.status == "certified"
    assert 0 <= outcome.true_gap <= outcome.claimed <= 1e-6


@pytest.mark.parametrize("params", [p for p in SETTINGS if p.get("strategy") != "direct"])
def test_it_finds_a_certificate_that_was_made_smaller(params, monkeypatch):
    real = herta_gpu.training.certify

    def smaller(*args: Any, **kwargs: Any) -> Any:
        c = real(*args, **kwargs)
        return replace(c, value=c.value * 1e-4, gap=c.gap * 1e-4)

    monkeypatch.setattr(herta_gpu.training, "certify", smaller)
    outcome = checks.run(easy(**params))
    assert any("the gap is" in fault for fault in outcome.faults)


@pytest.mark.parametrize("params", [{}, {"ridge": 0.5}, {"loss": "ce", "ridge": 0.1}])
def test_it_finds_a_proof_from_stored_rows_that_was_made_smaller(params, monkeypatch):
    """Rows of Q that are a hundredth off, and a bound of that which is a millionth of it."""
    real = herta_gpu.certificate.Proof.certificate

    def smaller(*args: Any, **kwargs: Any) -> Any:
        c = real(*args, **kwargs)
        return replace(c, value=1e-7 * min(c.value, 1.0), gap=c.gap * 1e-9)

    problem = easy(strategy="direct", optimizer="cg", learning_rate=None, **params)
    monkeypatch.setattr(herta_gpu.planning.costs, "Q_goal", lambda *_: 0.01)
    monkeypatch.setattr(herta_gpu.planning.costs, "_TRY_FACTOR", float("inf"))  # its Q is exact
    assert checks.run(problem).faults == []  # a goal that is too loose is found out ...
    monkeypatch.setattr(herta_gpu.certificate.Proof, "certificate", smaller)
    monkeypatch.setattr(herta_gpu.certificate.Proof, "enough", lambda *_: True)
    assert any("the gap is" in fault for fault in checks.run(problem).faults)  # ... or not


def test_it_finds_rows_of_Q_that_are_not_what_is_said(monkeypatch):
    """Q of another graph's solves: what is left of each column is stated as a millionth of it."""
    real = herta_gpu.diffusion.Rows.tighten

    def careless(self: Any, *args: Any) -> None:
        real(self, *args)
        self.residual_bound = 1e-6 * self.residual_bound

    monkeypatch.setattr(herta_gpu.planning.costs, "Q_goal", lambda *_: 0.01)
    monkeypatch.setattr(herta_gpu.planning.costs, "_TRY_FACTOR", float("inf"))  # its Q is exact
    monkeypatch.setattr(herta_gpu.diffusion.Rows, "tighten", careless)
    problem = easy(strategy="direct", optimizer="cg", learning_rate=None)
    assert any("the gap is" in fault for fault in checks.run(problem).faults)


def test_it_finds_a_P_that_is_not_what_it_says(monkeypatch):
    """P is a thousandth of the Hessian, and the spectrum still says that it is the Hessian."""
    real = herta_gpu.training.choose_spectrum

    def believed(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return replace(found, a=1e3 * found.a, b=1e3 * found.b)

    monkeypatch.setattr(herta_gpu.training, "choose_spectrum", believed)
    assert any("the gap is" in fault for fault in checks.run(easy()).faults)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Whatever is fitted is not what it was afterwards."""
    real = checks.fit

    def spoiled(problem: Problem, **more: Any) -> Any:
        model = real(problem, **more)
        vars(model).update(change(model))
        return model

    monkeypatch.setattr(checks, "fit", spoiled)


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {  # by the words that tell it
    "but the gap is": lambda model: {"W_": model.W_ * 1.01},
    "but it is": lambda model: {"history_": lower_loss(model.history_)},
    "W_ is not finite": lambda model: {"W_": model.W_ * [np.nan, 1.0, 1.0]},
    "max_iter is 1": lambda model: {"max_iter": 1},
    "unknown status 'fine'": lambda model: {"status_": "fine"},
    "certified-reduced, but kept": lambda model: {"status_": "certified-reduced"},
    "without W": lambda model: {"W_": 10 * model.W_, "status_": "stagnated"},  # worse than none
}


def lower_loss(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*history[:-1], {**history[-1], "loss": 0.999 * history[-1]["loss"]}]


@pytest.mark.parametrize("words", WRONG)
def test_it_finds_a_result_that_is_wrong(words, monkeypatch):
    spoil(monkeypatch, WRONG[words])
    assert any(words in fault for fault in checks.run(easy()).faults)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("wrong", ["loo_", "leverage_", ""])
def test_it_finds_a_wrong_leave_one_out(wrong, few, monkeypatch):
    spoil(monkeypatch, lambda m: {wrong: (1 + 1e-4) * getattr(m, wrong)} if wrong else {})
    settings = {"strategy": "direct", "optimizer": "cg", "learning_rate": None, "tol": 1e-10}
    problem = replace(easy(ridge=0.5, **settings), kind="leave one out", y=easy().X[:, 0])
    problem = replace(problem, train=problem.train[:4]) if few else problem
    words = {"loo_": "an output without its row", "leverage_": "a leverage is", "": ""}[wrong]
    faults = checks.run(problem).faults
    assert any(words in fault for fault in faults) if wrong else faults == []


def test_it_finds_sets_that_cover_too_little(monkeypatch):
    class Narrow(checks.SplitConformal):
        def calibrate(self, *args: Any) -> Any:
            super().calibrate(*args)
            self.threshold_ -= 10.0
            return self

    problem = replace(easy(), kind="conformal", train=np.arange(30))
    assert checks.run(problem).faults == []
    monkeypatch.setattr(checks, "RARE", 1e-3)  # of so few nodes
    monkeypatch.setattr(checks, "SplitConformal", Narrow)
    assert any("covered" in fault for fault in checks.run(problem).faults)


def test_it_finds_a_layer_that_forgets_what_it_rounds(monkeypatch):
    pytest.importorskip("torch")
    layer = importlib.import_module("herta_gpu.torch")
    real, params = layer._round, {"lam": 2.0, "tol": 1e-6, "method": "cg", "dtype": "bfloat16"}
    rng = np.random.default_rng(0)
    F, G = rng.standard_normal((2, 80, 3))
    problem = replace(easy(), kind="layer", X=F, y=G, params=params)
    assert checks.run(problem).faults == []
    monkeypatch.setattr(layer, "_round", lambda *args: (real(*args)[0], 0.0))
    words = [fault.split(" is ")[0] for fault in checks.run(problem).faults]
    assert words == ["Z", "dF", "dG"]


def test_it_finds_a_reweighted_graph_of_other_degrees(monkeypatch):
    factor = np.random.default_rng(1).random(easy().edges.shape[1])
    problem = replace(easy(), kind="reweighted", factor=factor)
    assert checks.run(problem).faults == []

    def renewed(graph: Graph, weight: Any) -> Graph:
        u, v, _ = graph.edges()
        return Graph.from_edges([u, v], graph.num_nodes, edge_weight=weight)

    monkeypatch.setattr(Graph, "reweighted", renewed)
    assert checks.run(problem).faults


@pytest.mark.parametrize("wrong", ["bound", "best"])
def test_it_finds_walks_that_are_not_where_is_said(wrong, monkeypatch):
    X = np.random.default_rng(2).random((80, 3)) ** 9
    params = {"damping": 0.85, "tol": 0.1, "self_loops": False}
    problem = replace(easy(), kind="pagerank", X=X, params=params)
    assert checks.run(problem).faults == []
    errors, top = pagerank._errors, pagerank._top
    if wrong == "bound":
        monkeypatch.setattr(pagerank, "_errors", lambda *a: tuple(1e-3 * e for e in errors(*a)))
    else:
        monkeypatch.setattr(pagerank, "_top", lambda score, error, k: top(-score, error, k))
    words = {"bound": "further off than its bound", "best": "among the best"}[wrong]
    assert any(words in fault for fault in checks.run(problem).faults)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (np.linalg.LinAlgError("Eigenvalues did not converge."), False),
        (ValueError("operands could not be broadcast together"), False),
        (ValueError("X has no columns: give at least one feature."), True),
        (ZeroDivisionError("division by zero"), False),
    ],
)
def test_an_exception_must_be_a_sentence(error, found, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(checks, "fit", fails)
    assert (checks.run(easy()).faults == []) == found


@pytest.mark.parametrize("change", ["y", "nothing"])
def test_it_finds_a_resume_that_believes_old_data(change, monkeypatch):
    """The second fit answers for the data of the first; or, unchanged, with other bits."""
    first = easy()
    later = replace(first, y=np.roll(first.y, 7)) if change == "y" else first
    problem = replace(first, later=later, change=change, stop=2)
    assert checks.run(problem).faults == [] or change == "y"  # a sound checkpoint has none
    real = checks.fit

    def stale(problem: Problem, **more: Any) -> Any:
        model = real(first, **{k: v for k, v in more.items() if k == "callback"})
        if change == "nothing" and more:
            model.W_ = np.nextafter(model.W_, 1)
        return model

    monkeypatch.setattr(checks, "fit", stale)
    word = "but the gap is" if change == "y" else "other bits"
    assert any(word in fault for fault in checks.run(problem).faults)


def test_a_bound_that_may_fail_by_chance_is_tried_again(monkeypatch):
    real, calls = checks.bound_faults, []

    def once(*args: Any) -> list[str]:
        calls.append(real(*args))
        return ["bad luck"] if len(calls) == 1 else []

    monkeypatch.setattr(checks, "bound_faults", once)
    outcome = checks.run(easy(sketch=64))
    assert outcome.chance > 0
    assert outcome.unlucky
    assert outcome.faults == []
    assert len(calls) == 1 + checks.REPEATS


def test_the_program_tells_how_to_repeat_a_fault(monkeypatch, capsys):
    assert main(["--cases", "2", "--kind", "hard graph", "--seed", "5"]) in (0, 1)
    assert "2 cases in" in capsys.readouterr().out
    monkeypatch.setattr(checks, "form_faults", lambda model: ["something"])
    assert main(["--case", "4", "--kind", "few rows"]) == 1
    out = capsys.readouterr().out
    assert 'something; again: python -m tests.fuzz --seed 0 --case 4 --kind "few rows"' in out


# ---- the reference itself ------------------------------------------------------------------
def test_the_system_is_that_of_the_graph():
    for number in range(8):
        p = draw(1, number, "anything")
        g = Graph.from_edges(p.edges, p.n, p.weights)
        H = system(p.n, p.edges, p.weights, p.params["lam"])
        assert np.allclose(H.astype(float), dense_H(g, p.params["lam"]), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
def test_the_optimum_is_that_of_other_algebra(loss, ridge):
    p = easy(loss=loss, ridge=ridge)
    if loss == "ce" and ridge == 0:
        return  # without a ridge there may be no optimum
    found = p.reference.best
    A = np.linalg.solve(system(p.n, p.edges, None, 2.0).astype(float), p.X)[p.train]
    best = minimum(A, p.targets(), loss, ridge)
    assert abs(found.value - best) <= 1e-9 * best
    assert found.error <= 1e-15 * found.value
    if loss == "mse":
        W = least_squares(A, p.targets(), ridge)[0]
        here = p.reference.objective(W)
        assert found.value <= here.high  # rounding decides which of two equal objectives is higher
        assert abs(here.value - best) <= 1e-12 * best


def test_an_evaluation_says_how_far_it_can_be_off():
    """Weights of 1e15 that cancel: in float64 nothing would be left of the objective."""
    p = easy()
    X = p.X.copy()
    X[:, 1] = X[:, 0] * (1 + 2**-40)
    W = np.zeros((6, 3))
    W[0], W[1] = -1e15 * (1 + 2**-40), 1e15
    found = replace(p, X=X).reference.objective(W)
    H = system(p.n, p.edges, None, 2.0)
    Z = Reference(H, X, p.targets(), p.train, "mse", 0.0).solve(X.astype(LD) @ W.astype(LD))[0]
    exact = ((Z[p.train] - p.targets()) ** 2).sum() / 2
    assert abs(found.value - exact) <= found.error <= 1e-1 * (exact + 1)


def test_the_factors_are_those_of_the_matrix():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((30, 8)).astype(LD)
    A[:, 5] = A[:, 2] + A[:, 3]
    A[:, 6] = A[:, 0] + LD(1e-13) * A[:, 6]
    Q, R, order = pivoted_qr(A, 1e-16)
    assert Q.shape[1] == 7
    assert np.abs(Q.T @ Q - np.eye(7)).max() < 1e-17
    assert np.abs(Q @ R - A[:, order]).max() < 1e-17
