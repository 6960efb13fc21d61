"""Algorithm 2 does not see how a graph is stored: its numbers belong to the caller's nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA, Graph, Sparsifier, effective_dimension
from herta_gpu.backends import get_backend
from herta_gpu.backends.cpu.reference import CPUBackend
from tests.conftest import random_graph

METHODS = ("rcm", "degree")


def backends() -> list[Any]:
    return [CPUBackend(), get_backend("cpu")]


def kept(graph: Graph) -> dict[tuple[int, int], float]:
    """The weight of each edge, by the caller's ids."""
    u, v, w = graph.edges()
    w = np.ones(u.shape[0]) if w is None else w
    ends = np.sort(np.stack([u, v]), axis=0).T.tolist()
    return {(a, b): x for (a, b), x in zip(ends, w.tolist(), strict=True)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [False, True])
def test_sketches_belong_to_the_callers_nodes(method, weighted):
    g = random_graph(150, 600, weighted=weighted)
    r = g.reordered(method)
    assert (r.order != np.arange(150)).any()
    for backend in backends():
        there, here = (backend.laplacian(graph, "float64") for graph in (g, r))
        for name in ("sketch_incidence", "sketch_identity"):
            plain, stored = (getattr(backend, name)(L, 9, 5) for L in (there, here))
            np.testing.assert_allclose(stored, plain[r.order], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("scores", ["sketch", "degree"])
def test_the_order_of_storage_changes_no_sampled_edge(method, replace, scores):
    g = random_graph(120, 2500, weighted=True)
    for graph in (g, g.reordered("degree")):
        asked = {"scores": scores, "replace": replace, "n_samples": 700, "dtype": "float64"}
        plain, stored = (
            Sparsifier(lam=5.0, random_state=3, **asked).fit(x)
            for x in (graph, graph.reordered(method))
        )
        assert stored.n_lambda_ == pytest.approx(plain.n_lambda_, rel=1e-9)
        ours, theirs = kept(stored.graph_), kept(plain.graph_)
        assert set(ours) == set(theirs)
        assert [ours[e] for e in theirs] == pytest.approx(list(theirs.values()), rel=1e-9)


@pytest.mark.parametrize(
    "params", [{"sparsify": True}, {"sparsify": 900}, {"sparsify": "degree"}, {"sketch": 128}],
    ids=str,
)  # fmt: skip
def test_reorder_changes_nothing_but_rounding(params):
    pytest.importorskip("numba")
    g, rng = random_graph(300, 4000), np.random.default_rng(1)
    X, y, train = rng.standard_normal((300, 6)), rng.integers(0, 3, 300), np.arange(0, 300, 2)
    models = [
        HERTA(lam=20.0, strategy="herta", dtype="float64", max_iter=1, tol=1e-12, reorder=reorder,
              **params).fit(g, X, y, train)
        for reorder in (False, True)
    ]  # fmt: skip
    plain, stored = models
    assert g.reordered("communities").order is not None
    # After one step the weights still show which P they were found with.
    np.testing.assert_allclose(stored.W_, plain.W_, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        [h["grad_norm"] for h in stored.history_],
        [h["grad_norm"] for h in plain.history_],
        rtol=1e-5,
    )


def test_the_effective_dimension_does_not_depend_on_the_order():
    g = random_graph(80, 300)
    expected = effective_dimension(g, 3.0, 7)
    assert effective_dimension(g.reordered("rcm"), 3.0, 7) == pytest.approx(expected, rel=1e-9)
