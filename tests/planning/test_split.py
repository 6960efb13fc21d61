"""Both ways to split a fit: what is predicted of them, and which one is taken."""

from __future__ import annotations

import pytest

from herta_gpu import HERTA
from herta_gpu.planning.split import Split, assumed_cut, assumptions, chosen, splits

N, M, D, C, TRAIN, RANKS = 10**6, 10**7, 128, 40, 5 * 10**5, 8


@pytest.fixture(scope="module")
def plan():
    return HERTA(lam=20.0, memory_budget="64GB").plan(N, M, D, C, TRAIN)


def test_a_counted_cut_takes_the_place_of_the_assumed_one(plan):
    given = (plan, N, D, TRAIN, 4, RANKS, 80.0)
    columns, assumed = splits(*given)
    same, counted = splits(*given, cut=assumed_cut(RANKS))
    assert (columns, assumed) == (same, counted)
    none, twice = splits(*given, cut=0.0)[1], splits(*given, cut=2 * assumed_cut(RANKS))[1]
    # Each rank receives `cut` n / ranks rows of every column of every product.
    halo = twice.moved - counted.moved
    assert halo == pytest.approx(counted.moved - none.moved, rel=1e-6)
    products = D * (plan.recipe.degree + 2)
    assert halo == pytest.approx(assumed_cut(RANKS) * N / RANKS * products * 4, rel=1e-6)
    assert none.memory < counted.memory < twice.memory
    assert none.seconds < counted.seconds < twice.seconds
    assert splits(*given, cut=0.0)[0] == columns


def test_X_in_memory_is_whole_on_each_rank_only_by_columns(plan):
    given = (plan, N, D, TRAIN, 4, RANKS, 80.0, None)
    (columns, nodes), (more, share) = splits(*given), splits(*given, X_bytes=8 << 30)
    assert more.memory - columns.memory == 8 << 30
    assert share.memory - nodes.memory == pytest.approx((8 << 30) / RANKS, abs=RANKS)


@pytest.mark.parametrize(
    ("memory", "seconds", "choice", "words"),
    [
        ((9, 2), (3.0, 4.0), "nodes", "columns needs 9.0 GB a rank"),
        ((3, 2), (3.0, 4.0), "columns", "predicted 3 s, and nodes 4 s"),
        ((3, 2), (5.0, 4.0), "nodes", "predicted 4 s, and columns 5 s"),
        ((9, 8), (1.0, 4.0), "nodes", "columns needs 9.0 GB a rank"),  # neither fits
        ((3, 8), (5.0, 4.0), "columns", "nodes needs 8.0 GB a rank"),
    ],
)
def test_what_fits_is_taken_and_then_what_is_faster(memory, seconds, choice, words):
    found = tuple(
        Split(name, size << 30, 0, s)
        for name, size, s in zip(("columns", "nodes"), memory, seconds, strict=True)
    )
    decision = chosen(found, 4 << 30)
    assert decision.choice == choice
    assert words in decision.why


def test_what_was_counted_and_what_was_assumed_is_told():
    assert "assumed, not measured" in assumptions(None, "blocks")
    assert "as METIS left of ogbn-arxiv" in assumptions(None, "blocks")
    told = assumptions(0.25, "metis")
    assert told.startswith("0.25 n rows go from rank to rank in a product by metis, counted")
    assert "ogbn-arxiv" not in told
