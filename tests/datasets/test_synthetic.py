"""The block model: same seed same graph, power-law degrees, classes that help."""

from __future__ import annotations

import os

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.datasets import blockmodel, load


def test_same_seed_same_graph_whatever_the_threads(monkeypatch):
    text = "n=3000,m=20000,d=7,c=4"
    monkeypatch.setattr(blockmodel, "_EDGE_CHUNK", 1 << 12)
    monkeypatch.setattr(blockmodel, "_ROW_CHUNK", 1 << 8)
    first = load(f"synthetic:{text}", random_state=5)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again = load(f"synthetic:{text}", random_state=5)
    other = load(f"synthetic:{text}", random_state=6)
    assert (first.graph.indices == again.graph.indices).all()
    assert (first.X == again.X).all()
    assert (first.y == again.y).all()
    assert (first.graph.indices[:100] != other.graph.indices[:100]).any()


def test_synthetic_is_a_power_law_with_classes():
    data = load("synthetic:n=20000,m=100000,d=16,c=5")
    degree = np.diff(data.graph.indptr)
    assert data.graph.num_edges == 100000
    assert degree.max() > 12 * degree.mean()
    # The tail of P(degree > k) ~ k^-1.5: Hill's estimator on the upper tenth, cap aside.
    tail = np.sort(degree)[-2000:-100].astype(float)
    assert 0.9 < 1 / np.mean(np.log(tail / tail[0])) < 2.6
    u, v, _ = data.graph.edges()
    chance = np.sum((np.bincount(data.y) / 20000) ** 2)
    expected = blockmodel.HOMOPHILY + (1 - blockmodel.HOMOPHILY) * chance
    assert abs(np.mean(data.y[u] == data.y[v]) - expected) < 0.02
    means = np.stack([data.X[data.y == k].mean(axis=0) for k in range(5)])
    assert np.linalg.norm(means[0] - means[1]) > 0.5


def test_the_graph_helps_on_synthetic_data():
    data = load("synthetic:n=2000,m=12000,d=16,c=4")
    score = {}
    for lam in (1e-3, 10.0):
        model = HERTA(lam=lam, ridge=1e-2).fit(data.graph, data.X, data.y, data.split["train"])
        score[lam] = model.score(data.graph, data.X, data.y, data.split["test"])
    assert score[10.0] > score[1e-3] + 0.05


def test_a_large_X_is_mapped_from_the_cache(monkeypatch, tmp_path):
    text = "n=500,m=1000,d=9,c=3"
    in_memory = load(f"synthetic:{text}").X
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path))
    monkeypatch.setattr(blockmodel, "_ON_DISK", 0)
    mapped = load(f"synthetic:{text}").X
    assert isinstance(mapped, np.memmap)
    assert (mapped == in_memory).all()
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and one file: nothing temporary


@pytest.mark.parametrize(
    "text", ["nope", "arxiv@2", "arxiv@x", "n=10,m=99", "k=3", "m=5", "n=a", "n=2,c=3,m=0"]
)
def test_wrong_synthetic_names_are_one_sentence(text):
    with pytest.raises(ValueError, match="synthetic"):
        load(f"synthetic:{text}")
