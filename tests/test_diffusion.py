"""Rows of H^-1 X C0 and what is left of them, against dense algebra in extended precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp

from herta_gpu import Graph
from herta_gpu.backends import get_backend
from herta_gpu.coordinates import Columns, whiten
from herta_gpu.diffusion import Rows, Workspace, no_cache
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.planning.plan import Recipe
from herta_gpu.problem import UnfoldedMap
from tests.conftest import RECIPE, dense_H, random_graph

LD = np.longdouble
N, D = 150, 7
AT, BESIDE = np.arange(0, N, 2), np.array([1, 5, 149])


def hubs() -> Graph:
    rng = np.random.default_rng(3)
    edges = [(0, i) for i in range(1, N)] + [(1, i) for i in range(2, N, 2)]
    edges += [tuple(e) for e in rng.integers(2, N, (100, 2)) if e[0] != e[1]]
    return Graph.from_edges(np.array(edges).T, N)


GRAPHS = {
    "random": lambda: random_graph(N, 400),
    "weighted": lambda: random_graph(N, 400, weighted=True),
    "hubs": hubs,
    "no edges": lambda: Graph.from_edges(np.zeros((2, 0), dtype=int), N),
    "parts": lambda: Graph.from_edges(np.array([[0, 1, 5, 7], [1, 2, 6, 7]]), N),
}


def features(kind: str = "plain") -> Any:
    X = np.random.default_rng(5).standard_normal((N, D))
    if kind == "offset":
        X += 1e5
    elif kind == "alike":
        X[:, 1] = X[:, 0] + 1e-7 * X[:, 1]
    elif kind == "zero column":
        X[:, 2] = 0.0
    elif kind == "sparse":
        return sp.csr_array(X * (np.random.default_rng(6).random(X.shape) < 0.1))
    return X


class Case:
    """Rows of Q, and the same in extended precision."""

    def __init__(
        self, graph: Graph, lam: float, dtype: str = "float32", X: Any = None, white: bool = True,
        width: int = 3, at: Any = AT,
    ) -> None:  # fmt: skip
        backend, X = get_backend("cpu"), features() if X is None else X
        self.H = RegularizedLaplacian(graph, lam, backend, dtype)
        self.X, F = X, Features(X, backend)
        self.basis = whiten(F, cut=True) if white else Columns.unit(F)

        recipe = replace(RECIPE, width=width, exact=False)
        self.rows = Rows(UnfoldedMap(self.H, F, at, 8), recipe, [self.basis], BESIDE)
        self.dense = dense_H(graph, lam)

    def columns(self) -> Any:
        """X C0 in extended precision."""
        C = self.basis.C if self.basis.C.ndim == 2 else np.diag(self.basis.C)
        X = self.X.toarray() if sp.issparse(self.X) else self.X
        return X.astype(LD) @ C.astype(LD)

    def exact(self) -> Any:
        """H^-1 X C0, refined in extended precision."""
        B, factor = self.columns(), scipy.linalg.cho_factor(self.dense)
        Z = np.zeros_like(B)
        for _ in range(4):
            R = B - self.dense.astype(LD) @ Z
            Z += scipy.linalg.cho_solve(factor, R.astype(float))
        return Z

    def tighten(self, goal: float, name: str = "Q", cache: Any = no_cache) -> Any:
        self.rows.tighten(goal, cache, name)
        return self.rows

    def off(self) -> Any:
        """Norms of what the columns of the stored rows are off by."""
        off = self.rows.train_rows.astype(LD) - self.exact()[self.rows.train]
        return np.sqrt((off * off).sum(axis=0))


# dense_H is float64: what it is off the true H counts as rounding of Z.
SLOP = 4e-15


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lam", [0.1, 5.0, 300.0])
@pytest.mark.parametrize("graph", GRAPHS)
def test_no_row_is_off_by_more_than_what_is_left(graph, lam, dtype):
    case = Case(GRAPHS[graph](), lam, dtype)
    for goal in (1e-2, 1e-6, 1e-10):
        found = case.tighten(goal, f"Q-{goal}")
        assert (case.off() <= found.residual_bound * (1 + 1e-12) + lam * SLOP).all()
        assert found.worst <= 2 * goal + lam * 1e-13
        near = found.eval_rows.astype(float) - case.exact()[BESIDE].astype(float)
        assert abs(near).max() <= found.residual_bound.max() + 4 * float(np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["plain", "offset", "alike", "zero column", "sparse"])
@pytest.mark.parametrize("white", [True, False])
def test_what_is_left_bounds_the_true_residual(kind, white, dtype):
    """All rows are asked for, so that X C0 - H Q is known to every digit."""
    graph, X = random_graph(N, 400), features(kind)
    everything = np.arange(N)
    for goal in (1e-1, 1e-5, 1e-9, 1e-13):
        case = Case(graph, 10.0, dtype, X, white, at=everything)
        found = case.tighten(goal)
        R = case.columns() - case.dense.astype(LD) @ found.train_rows.astype(LD)
        true = np.sqrt((R * R).sum(axis=0)).astype(float)
        assert (true <= found.residual_bound + 10 * SLOP).all()
        # The bound is of use: no more than rounding above the truth.
        rounding = 4e-12 * case.basis.norm + 2 * case.basis.rounding
        assert (found.residual_bound <= true * (1 + float(np.finfo(dtype).eps)) + rounding).all()


def test_a_rough_start_is_no_obstacle_to_a_tight_end():
    case = Case(random_graph(N, 400), 5.0, "float32")
    case.tighten(1e-2, "a")
    assert case.tighten(1e-11, "b").worst <= 4e-11
    assert (case.off() <= case.rows.residual_bound).all()


def test_nothing_is_done_where_the_goal_is_met():
    case = Case(random_graph(N, 400), 3.0)
    case.tighten(1e-8, "a")
    rows, left = case.rows.train_rows.copy(), case.rows.residual_bound.copy()
    case.tighten(1e-5, "b")
    assert (case.rows.train_rows == rows).all()
    assert (case.rows.residual_bound <= left * (1 + 1e-6) + 1e-15).all()
    assert (case.off() <= case.rows.residual_bound).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_of_any_width_lead_to_the_same_rows(dtype):
    found = [Case(hubs(), 20.0, dtype, width=w).tighten(1e-8) for w in (1, 2, 3, 5, 7)]
    for one in found:
        assert abs(one.train_rows - found[0].train_rows).max() <= 1.1e-8
        assert one.worst <= 1.1e-8


def test_the_residual_is_not_of_the_working_precision():
    """Columns so alike that X C0 rounded to float32 is another problem."""
    case = Case(random_graph(N, 400), 1.0, "float32", features("offset"))
    assert case.tighten(1e-11).worst < 1e-7
    assert (case.off() <= case.rows.residual_bound).all()
    assert case.off().max() < 1e-9


def test_a_resumed_solve_has_the_same_bits():
    store: dict[str, Any] = {}

    def cache(name: str, make: Any) -> Any:
        if name not in store:
            store[name] = {k: np.array(v) for k, v in make().items()}
        return store[name]

    def stops(name: str, make: Any) -> Any:
        if len(store) == 4 and name not in store:
            raise KeyboardInterrupt
        return cache(name, make)

    def run(cache: Any) -> Rows:
        case = Case(hubs(), 20.0)
        case.tighten(1e-3, "a", cache)
        return case.tighten(1e-9, "b", cache)

    whole = run(no_cache)
    with pytest.raises(KeyboardInterrupt):
        run(stops)
    assert len(store) == 4  # three blocks of the first call, one of the second
    again = run(cache)
    for name in ("train_rows", "eval_rows", "residual_bound"):
        assert (getattr(again, name) == getattr(whole, name)).all()
    assert again.products == whole.products


def test_without_edges_one_product_is_enough():
    case = Case(GRAPHS["no edges"](), 20.0)
    assert case.tighten(1e-6).products == 1
    assert case.rows.worst <= 1e-12 or case.tighten(1e-12, "b").worst <= 1e-12


def test_rounding_ends_it_where_no_pass_helps():
    case = Case(hubs(), 1e4, "float32")
    found = case.tighten(1e-30)
    assert found.products < 10**5
    assert (case.off() <= found.residual_bound + 1e4 * SLOP).all()
    assert found.worst < 1e-8


def test_a_workspace_gives_blocks_that_do_not_overlap():
    H = RegularizedLaplacian(random_graph(N, 400), 1.0, get_backend("cpu"), "float32")
    for k in (1, 3, 5):
        B, iterates = Workspace(H, 5, "float32").blocks(k)
        for i, block in enumerate((B, *iterates[:2])):
            assert block.shape == (N, k)
            block[...] = i
        assert [float(b.max()) for b in (B, *iterates[:2])] == [0.0, 1.0, 2.0]
        assert [float(b.min()) for b in (B, *iterates[:2])] == [0.0, 1.0, 2.0]


def test_blocks_have_multiples_of_four_columns():
    recipe = dict.fromkeys(Recipe.__dataclass_fields__)
    for d, width, sizes in (
        *[(100, 64, [52, 48]), (128, 64, [64, 64]), (130, 64, [44, 44, 42])],
        *[(100, 50, [50, 50]), (7, 64, [7]), (1, 1, [1])],
    ):
        blocks = Recipe(**{**recipe, "width": width, "multiple": 4}).blocks(d)
        assert [J.stop - J.start for J in blocks] == sizes
        assert [j for J in blocks for j in range(d)[J]] == list(range(d))
        assert max(J.stop - J.start for J in blocks) <= width
    # Sectors of float16, where the width allows them.
    for width, sizes in ((64, [64, 36]), (32, [32, 32, 32, 4]), (31, [28, 28, 28, 16])):
        blocks = Recipe(**{**recipe, "width": width, "multiple": 16}).blocks(100)
        assert [J.stop - J.start for J in blocks] == sizes
