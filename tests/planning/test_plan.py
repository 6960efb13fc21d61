"""The plan: what it decides, and that it says why."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.backends import get_backend
from tests.conftest import closed_form, problem, random_graph


def test_the_plan_tells_what_was_decided_and_why():
    g, X, y, train = problem()
    model = HERTA(strategy="herta", sparsify=True, sketch=True, optimizer="gd")
    model.fit(g, X, y, train=train)
    text = str(model.plan_)
    assert "capped at m" in text
    assert "capped at n" in text
    assert model.plan_.n_samples == g.num_edges
    assert model.plan_.sketch_rows == 128
    assert model.status_ == "certified"
    assert set(model.plan_.cost) == {"herta", "direct"}


def test_auto_weighs_solves_for_Q_against_solves_for_gradients():
    """ERRATA's rule: few features and many classes favour "direct", the reverse "herta"."""
    g = random_graph(1500, 6000)
    rng = np.random.default_rng(0)
    narrow, wide = rng.standard_normal((1500, 10)), rng.standard_normal((1500, 700))
    many, few = rng.standard_normal((1500, 30)), rng.standard_normal((1500, 1))
    train = np.arange(1200)
    assert HERTA(lam=20.0).fit(g, narrow, many, train).plan_.strategy == "direct"
    assert HERTA(lam=20.0).fit(g, wide, few, train).plan_.strategy == "herta"


def test_auto_sparsifies_dense_graphs_with_many_features_only():
    model = HERTA(lam=20.0, strategy="herta", memory_budget="64GB")
    thick = model.plan(n=100_000, m=10**8, d=20_000, c=1, n_train=80_000)
    assert thick.n_samples is not None
    assert thick.n_samples < 10**8
    narrow = model.plan(n=100_000, m=10**8, d=50, c=1, n_train=80_000)
    thin = model.plan(n=100_000, m=5 * 10**5, d=20_000, c=1, n_train=80_000)
    assert narrow.n_samples is None
    assert thin.n_samples is None


def test_samples_by_degree_scores_lead_to_the_same_optimum():
    rng = np.random.default_rng(0)
    g = Graph.from_edges(np.array(np.triu_indices(400, 1)))
    X, y, train = rng.standard_normal((400, 6)), rng.integers(0, 3, 400), np.arange(300)
    model = HERTA(sparsify="degree", strategy="herta").fit(g, X, y, train)
    assert model.plan_.n_samples < g.num_edges / 3
    _, best = closed_form(g, X, np.eye(3)[y[train]], train, 1.0)
    gap = (model.history_[-1]["loss"] - best) / best
    assert gap <= model.certificate_.value <= 1e-6


def test_the_mixed_rule_iterates_on_a_sample_and_certifies_on_the_full_graph():
    rng = np.random.default_rng(0)
    g = Graph.from_edges(np.array(np.triu_indices(400, 1)))
    X, y = rng.standard_normal((400, 6)), rng.integers(0, 3, 400)
    mixed = HERTA(sparsify="mixed", strategy="herta", tol=0.08).fit(g, X, y)
    assert mixed.plan_.loop_samples is not None
    assert mixed.status_ == "certified"
    tight = HERTA(sparsify="mixed", strategy="herta", tol=1e-6).fit(g, X, y)
    assert tight.plan_.loop_samples is None


def test_blocks_of_Q_are_wider_than_those_of_CG_where_memory_is_short():
    n, d, c, budget = 10**7, 100, 8, 16 << 30
    plan = HERTA(lam=1.0, strategy="herta", memory_budget=budget).plan(n, 10**8, d, c, n)
    assert plan.solve_width < plan.recipe.width <= d
    assert sum(plan.memory.values()) <= budget
    blocks = plan.recipe.blocks(d)
    assert [i for J in blocks for i in range(d)[J]] == list(range(d))
    sizes = [J.stop - J.start for J in blocks]
    assert max(sizes) <= plan.recipe.width
    assert max(sizes) - min(sizes) <= 4 * len(sizes)  # multiples of four, then the rest


def test_a_small_memory_budget_narrows_blocks_and_then_sketches():
    g = random_graph(4000, 12000)
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((4000, 60)), rng.integers(0, 2, 4000)
    wide = HERTA(lam=2.0, strategy="herta").fit(g, X, y)
    tight = HERTA(lam=2.0, strategy="herta", memory_budget="1.6MB").fit(g, X, y)
    assert tight.plan_.recipe.width < wide.plan_.recipe.width
    assert tight.plan_.sketch_rows is not None
    assert sum(tight.plan_.memory.values()) <= 1.6 * 2**20
    assert tight.status_ == "certified"
    assert tight.history_[-1]["loss"] == pytest.approx(wide.history_[-1]["loss"], rel=1e-5)


def test_a_mapped_graph_stays_in_its_file_where_memory_is_short(tmp_path):
    g = random_graph(4000, 200_000)
    rng = np.random.default_rng(0)
    X, y, train = rng.standard_normal((4000, 40)), rng.integers(0, 3, 4000), np.arange(3000)
    opened = g.save(tmp_path / "graph")
    model = HERTA(lam=5.0, strategy="direct", memory_budget="3MB")
    with pytest.raises(MemoryError, match="at least"):
        model.fit(g, X, y, train)
    model.fit(opened, X, y, train)
    told = {d.what: d.choice for d in model.plan_.decisions}
    assert told["neighbours"] == "read again for each product"
    assert model.status_ == "certified"
    W, _ = closed_form(g, X, np.eye(3)[y[train]], train, 5.0)
    assert np.abs(model.W_ - W).max() < 1e-3 * np.abs(W).max()


def test_weights_of_edges_count_as_memory():
    g = random_graph(500, 3000)
    u, v, _ = g.edges()
    heavy = Graph.from_edges([u, v], 500, np.random.default_rng(1).uniform(1, 2, u.shape[0]))
    X, y = np.random.default_rng(0).standard_normal((500, 6)), np.arange(500) % 3
    plain, weighted = (HERTA().fit(graph, X, y).plan_.memory["graph"] for graph in (g, heavy))
    L = get_backend("cpu").laplacian(heavy, "float32")
    assert weighted - plain >= heavy.weights.nbytes + L.weights.nbytes
