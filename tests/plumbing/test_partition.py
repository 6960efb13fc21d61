"""How nodes are shared out: what a partition moves, and what is wrong with one."""

from __future__ import annotations

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.plumbing import partition as module
from herta_gpu.plumbing.partition import metis, rows_moved


def by_hand(graph, owner) -> int:
    """Pairs of a node and another rank that has one of its neighbours."""
    pairs = set()
    for u, v in zip(*graph.edges()[:2], strict=True):
        if owner[u] != owner[v]:
            pairs |= {(int(u), int(owner[v])), (int(v), int(owner[u]))}
    return len(pairs)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_rows_that_are_moved_are_counted(size, tmp_path):
    rng = np.random.default_rng(size)
    graph = Graph.from_edges(rng.integers(0, 90, (2, 200)), 100)  # ten nodes have no edge
    # `starts` cuts at n r // size: node i belongs to the last range that begins at or before it.
    blocks = np.searchsorted(module.starts(100, size), np.arange(100), side="right") - 1
    assert rows_moved(graph, size, "blocks") == by_hand(graph, blocks) / 100
    drawn = rng.integers(0, size, 100)
    assert rows_moved(graph, size, drawn) == by_hand(graph, drawn) / 100
    np.save(tmp_path / "owners.npy", drawn)
    assert rows_moved(graph, size, tmp_path / "owners.npy") == by_hand(graph, drawn) / 100


def test_of_a_large_graph_a_sample_is_looked_at(monkeypatch):
    rng = np.random.default_rng(0)
    graph, owner = (
        Graph.from_edges(rng.integers(0, 5000, (2, 9000)), 5000),
        rng.integers(0, 4, 5000),
    )
    exact = rows_moved(graph, 4, owner)
    monkeypatch.setattr(module, "_SAMPLE", 2000)
    # Between 0 and 3 a node: the mean of 2,000 of 5,000 is off by more than 0.1 with p < 1e-5.
    assert rows_moved(graph, 4, owner) == pytest.approx(exact, abs=0.1)
    assert exact == by_hand(graph, owner) / 5000


def test_metis_cuts_little_and_shares_out_the_work():
    pytest.importorskip("pymetis")
    side = 40
    at = np.arange(side * side).reshape(side, side)
    grid = np.concatenate([np.stack([at[1:], at[:-1]]).reshape(2, -1),
                           np.stack([at[:, 1:], at[:, :-1]]).reshape(2, -1)], axis=1)  # fmt: skip
    shuffled = np.random.default_rng(0).permutation(side * side)
    graph = Graph.from_edges(shuffled[grid], side * side)
    owner = metis(graph, 2)
    assert by_hand(graph, owner) <= 4 * side  # a straight cut has 2 * side
    assert np.bincount(owner, minlength=2).max() <= 1.05 * side * side / 2
    assert rows_moved(graph, 2, "metis") < 0.2 * rows_moved(graph, 2, "blocks")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda path: None, "There is no partition file"),
        (lambda path: path.write_text("0\n1\n"), "is not a .npy file"),
        (lambda path: np.save(path, np.zeros((10, 1), int)), "of each of the 10 nodes, but holds"),
        (lambda path: np.save(path, np.zeros(10)), "but holds float64"),
        (lambda path: np.save(path, np.full(10, 2)), "names rank 2, but there are ranks 0 to 1"),
    ],
)
def test_a_wrong_partition_is_one_sentence(made, words, tmp_path):
    path = tmp_path / "owners.npy"
    made(path)
    with pytest.raises(ValueError, match=words):
        rows_moved(Graph.from_edges([[0, 1], [1, 2]], 10), 2, path)
