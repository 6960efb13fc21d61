"""Proofs from stored rows: every bound, against optima by dense algebra."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.certificate import Proof, StoredProblem, Terms
from herta_gpu.losses import LOSSES
from herta_gpu.steps import _again
from tests.conftest import random_graph
from tests.fuzz.reference import Reference, system


class Case:
    """A fit that is proven from stored rows, and the last proof in it."""

    def __init__(
        self, monkeypatch: Any, n: int = 160, d: int = 8, train: int = 90, seed: int = 0,
        X: Any = None, **params: Any,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        graph = random_graph(n, 3 * n, seed)
        X = rng.standard_normal((n, d)) if X is None else X
        y = (X[:, :3] + rng.standard_normal((n, 3))).argmax(axis=1)
        at = np.sort(rng.choice(n, train, replace=False))
        self.seen: list[tuple[StoredProblem, Any, Proof]] = []
        real = StoredProblem.proof

        def spied(problem: StoredProblem, u: Any, why_not: Any, at_zero: float = 0.0) -> Proof:
            proof = real(problem, u, why_not, at_zero)
            self.seen.append((problem, u, proof))
            return proof

        monkeypatch.setattr(StoredProblem, "proof", spied)
        self.model = HERTA(**{"lam": 3.0, "strategy": "direct", **params}).fit(graph, X, y, at)
        u, v, w = graph.edges()
        H = system(n, np.stack([u, v]), w, params.get("lam", 3.0))
        Y = np.eye(3)[y[at]]
        loss, ridge = params.get("loss", "mse"), params.get("ridge", 0.0)
        self.reference = Reference(H, X, Y, at, loss, ridge)
        self.problem, self.u, self.proof = self.seen[-1]

    def truth(self, u: Any, problem: Any = None) -> tuple[float, float]:
        """(the true objective at u, how far it is above the optimum), in extended precision."""
        basis = (problem or self.problem).basis  # which a second try may change
        here = self.reference.objective(basis.weights(u))
        return float(here.value), float(here.value - self.reference.best.value)


LOSS = [
    {},
    {"ridge": 1e-3},
    {"ridge": 2.0},
    {"loss": "ce", "ridge": 1e-2},
    {"loss": "ce", "ridge": 1.0},
    {"lam": 50.0},
    {"lam": 50.0, "loss": "ce", "ridge": 0.1},
]


def why(_: float) -> str:
    return "why"


@pytest.mark.parametrize("params", LOSS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_hold_wherever_they_are_taken(params, dtype, monkeypatch):
    """At the optimum and away from it, of rows that are solved well and badly."""
    for tol in (1e-3, 1e-8):
        case = Case(monkeypatch, dtype=dtype, tol=tol, **params)
        assert case.model.status_ == "certified"
        rng = np.random.default_rng(1)
        for problem, u, _ in list(case.seen):
            for size in (0.0, 1e-6, 1e-3, 0.1, 3.0):
                v = u + size * rng.standard_normal(u.shape) * abs(u).max()
                proof = problem.proof(v, why)
                objective, gap = case.truth(v, problem)
                found = proof.certificate()
                assert gap <= found.gap
                assert gap <= found.value * (objective - gap) or found.value == math.inf
                assert abs(proof.objective - objective) <= proof.error()
                for terms in proof.choices:  # each by itself
                    assert gap <= terms.gap()


@pytest.mark.parametrize("params", LOSS[:5])
def test_bounds_are_of_use(params, monkeypatch):
    """A gap of 1e-4 is not claimed to be more than some thousand times that."""
    case = Case(monkeypatch, tol=1e-10, **params)
    u = case.u * (1 + 3e-3 * np.random.default_rng(0).standard_normal(case.u.shape))
    objective, gap = case.truth(u)
    assert 1e-8 < gap / objective < 1e-3
    bound = case.problem.proof(u, why).certificate().gap
    convexity = 1.0 if params.get("loss", "mse") == "mse" else 1e3 / params["ridge"]
    assert bound <= 4 * gap * convexity


@pytest.mark.parametrize("params", LOSS)
def test_a_smaller_share_never_proves_less(params, monkeypatch):
    case = Case(monkeypatch, tol=1e-4, **params)
    shares = [0.0, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 1.0]
    found = [case.proof.certificate(s) for s in shares]
    for name in ("gap", "value"):
        values = [getattr(c, name) for c in found]
        assert values == sorted(values)
    errors = [case.proof.error(s) for s in shares]
    assert errors == sorted(errors)
    assert found[-1] == case.proof.certificate()


@pytest.mark.parametrize("params", LOSS)
def test_what_is_wanted_would_be_enough(params, monkeypatch):
    case = Case(monkeypatch, tol=1e-3, **params)
    for tol in (1e-3, 1e-5, 1e-7):
        share = case.proof.wanted(tol)
        if share == 0.0:
            assert not case.proof.enough(tol, 1e-13)
            continue
        assert case.proof.enough(tol, share)
        assert share > 0.8 or not case.proof.enough(tol, 1.3 * share)


def test_solving_for_the_wanted_share_certifies(monkeypatch):
    """The loop of the strategy: a goal that was too loose is found out and mended."""
    import herta_gpu.planning.plan

    monkeypatch.setattr(herta_gpu.planning.plan, "Q_goal", lambda *_: 0.05)
    for params in LOSS:
        case = Case(monkeypatch, tol=1e-7, **params)
        assert case.model.status_ == "certified"
        assert any(change.what == "Q again" for change in case.model.changes_)
        _, gap = case.truth(case.u)
        assert gap <= case.model.certificate_.gap


def test_rows_of_the_inverse_prove_a_ridge(monkeypatch):
    """Fewer training rows than features: H^-1 M^T is solved for, and X is never diffused."""
    for params in ({"ridge": 1e-2}, {"ridge": 1.0}, {"loss": "ce", "ridge": 0.1}):
        for d, train in ((40, 30), (100, 30)):  # a P of d x d, and one of low rank
            case = Case(monkeypatch, d=d, train=train, tol=1e-8, **params)
            assert case.model.plan_.recipe.by_rows
            assert case.model.status_ == "certified"
            for problem, u, _ in list(case.seen):
                for size in (0.0, 1e-4, 0.3):
                    noise = np.random.default_rng(2).standard_normal(u.shape)
                    v = u + size * abs(u).max() * noise
                    proof = problem.proof(v, why)
                    objective, gap = case.truth(v, problem)
                    assert gap <= proof.certificate().gap
                    assert abs(proof.objective - objective) <= proof.error()


@pytest.mark.parametrize("kind", ["units", "offset", "alike", "hidden"])
@pytest.mark.parametrize("params", [{}, {"ridge": 0.1}, {"loss": "ce", "ridge": 0.1}])
def test_features_of_all_sorts(kind, params, monkeypatch):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((160, 8))
    if kind == "units":
        X *= 10.0 ** np.linspace(-4, 4, 8)
    elif kind == "offset":
        X += 1e4
    elif kind == "alike":
        X[:, 5] = X[:, 4] + 1e-6 * X[:, 5]
    else:
        X[:, 7] = 0.0
        X[np.setdiff1d(np.arange(160), np.sort(rng.choice(160, 130, replace=False)))[:3], 7] = 1.0
    case = Case(monkeypatch, X=X, tol=1e-6, **params)
    for problem, u, proof in list(case.seen):
        _, gap = case.truth(u, problem)
        objective = case.reference.objective(problem.basis.weights(u))
        found = proof.certificate()
        assert gap <= found.gap + float(objective.error) or found.reduced
        assert abs(proof.objective - float(objective.value)) <= proof.error()
    if not params:
        assert case.model.status_ == "certified"


def test_nothing_is_claimed_without_strong_convexity(monkeypatch):
    case = Case(monkeypatch, loss="ce")
    assert case.proof.choices == ()
    assert case.proof.certificate().kind == "none"
    assert case.proof.certificate().value == math.inf
    truth, _ = case.truth(case.u)  # the objective is known all the same
    assert abs(truth - case.proof.objective) <= case.proof.error() < 1e-3 * truth
    assert not case.proof.enough(1e-3)
    assert case.proof.wanted(1e-3) == 0.0
    assert case.model.status_ == "converged"


# ---- the formulas themselves ----------------------------------------------------------------
def terms(**other: Any) -> Terms:
    made = Terms("residual", 0.1, 2.0, 1.0, 0.25, 0.5, 0.0, 1.0)
    return replace(made, **other)


def test_the_formula_of_the_gap():
    # (0.1 + 0.25 * 2 + (1 + 0.25) 0.5)^2 / (2 (1 - 0.25)^2), and without what the solves left
    assert terms().gap() == pytest.approx((0.1 + 0.5 + 0.625) ** 2 / (2 * 0.75**2))
    assert terms().gap(0.0) == pytest.approx(0.1**2 / 2)
    assert terms(D=1.0).gap() == math.inf  # nothing is left of the convexity
    # of W: the ridge does not become less
    dual = terms(kind="duality", D=10.0, convexity=math.sqrt(2.0))
    assert dual.gap() == pytest.approx((0.1 + 20 + 11 * 0.5) ** 2 / 4)


def test_the_best_of_two_bounds_counts():
    proof = Proof(100.0, 0.0, 2.0, 0.0, (terms(), terms(D=0.5)), 0.5, 0.0, "", 3, 3)
    assert proof.certificate().gap == terms().gap()
    gap, off = terms().gap(), 0.5 * (2.0 + 0.25)
    assert proof.certificate().value == pytest.approx(gap / (100 - off - gap))
    assert proof.error() == pytest.approx(off)
    small = replace(proof, objective=gap + off)
    assert small.certificate().value == math.inf  # an optimum that may be 0


def test_features_that_had_to_go_are_told_for_the_spectral_kind_only():
    proof = Proof(100.0, 0.0, 2.0, 0.0, (terms(),), 0.5, 0.0, "two are alike", 2, 3)
    assert proof.certificate().reduced
    assert proof.certificate().note == "two are alike"
    dual = replace(proof, choices=(terms(kind="duality"),))
    assert not dual.certificate().reduced


def test_a_certified_fit_asks_for_no_more_solves(monkeypatch):
    case = Case(monkeypatch, tol=1e-6)
    run = type("Run", (), {"status": "certified"})
    recipe, settings = case.model.plan_.recipe, type("Settings", (), {"tol": 1e-6})
    assert case.proof.enough(1e-6)
    assert _again(run, case.proof, case.problem.P, recipe, settings) is None


@cache
def large() -> tuple[Graph, Any, Any]:
    rng = np.random.default_rng(0)
    return random_graph(400, 1500), rng.standard_normal((400, 6)), rng.integers(0, 3, 400)


def test_runs_of_rows_give_what_all_rows_give(monkeypatch):
    """Loss and gradient are added up over runs of rows."""
    import herta_gpu.certificate as module

    graph, X, y = large()
    found = []
    for chunk in (32 << 20, 8 * 3 * 50):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
        for params in ({}, {"loss": "ce", "ridge": 0.1}):
            model = HERTA(lam=2.0, strategy="direct", **params).fit(graph, X, y)
            found.append((model.history_[-1]["loss"], model.history_[-1]["loss_error"]))
    for a, b in zip(found[:2], found[2:], strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-12)
        assert a[1] == pytest.approx(b[1], rel=0.5)


def test_least_squares_is_refined(monkeypatch):
    """u from a factor of P that is off by a thousandth: gradients of the true sum repair it."""
    case = Case(monkeypatch, dtype="float64", tol=1e-6)
    problem = case.problem
    P = problem.P
    inner = replace(P.inner, L=P.inner.L * (1 + 1e-3 * np.tri(*P.inner.L.shape)))
    rough = replace(P, inner=inner, w_start=inner.to_gradient(problem.Q.T @ problem.Y))
    again = StoredProblem(
        problem.backend, LOSSES["mse"], rough, problem.Y, problem.ridge, problem.X_norm
    )
    best = np.linalg.lstsq(problem.Q, problem.Y, rcond=None)[0]
    assert abs(again.least_squares(1e-12) - best).max() <= 1e-8 * abs(best).max()
    assert abs(inner.to_weights(rough.w_start) - best).max() > 1e-4 * abs(best).max()
