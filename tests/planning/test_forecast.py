"""Plans for GPUs and processes that are not there: bytes by hand, ogbn-papers100M on 80 GB."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.planning.costs import Sizes
from herta_gpu.planning.forecast import (
    Card,
    Split,
    assumed_cut,
    assumptions,
    choose_split,
    list_work,
    sectors,
    splits,
    step_bytes,
)

PAPERS = {"n": 111_059_956, "m": 1_615_685_872, "d": 128, "c": 172, "n_train": 1_207_179}
SIZES = Sizes(**PAPERS, word=4, X_bytes=0)
GB = 10**9


def test_bytes_of_a_step():
    """By hand: 2 m rows of 32 floats and 2 m sectors of D^-1/2 gathered, 2 m indices, four blocks
    of n x 32 read or written; in half precision the gathers are halved, D^-1/2 is in them, and two
    more blocks of 2 and 4 bytes are touched."""
    n, m = SIZES.n, SIZES.m
    assert step_bytes(SIZES, 32) == 2 * m * 32 * (4 + 1) + 2 * m * 4 + 4 * n * 32 * 4
    half = replace(SIZES, half=True)
    assert step_bytes(half, 32) / GB == pytest.approx(298, abs=1)
    # Rows of 24 columns of float16 touch as many sectors as those of 32.
    own = n * 22
    assert step_bytes(half, 24) - 24 * own == step_bytes(half, 32) - 32 * own
    assert sectors(2 * 28) == np.mean([(o + 56 + 31) // 32 for o in (0, 24, 16, 8)])
    assert step_bytes(replace(SIZES, word=8), 32) > 1.7 * step_bytes(SIZES, 32) - 2 * m * 4
    # Wider blocks share the indices among more columns.
    assert step_bytes(SIZES, 64) < 2 * step_bytes(SIZES, 32)


@pytest.mark.parametrize("lam", [1.0, 20.0])
@pytest.mark.parametrize("params", [{}, {"loss": "ce", "ridge": 1.0}])
def test_papers100M_fits_80_GB(lam, params):
    model = HERTA(lam=lam, **params)
    plan = model.plan(**PAPERS, device_memory="80GB")
    assert plan.strategy == "direct"
    assert plan.stored
    total = sum(plan.memory.values())
    assert 60 * GB < total <= 80 * 2**30
    assert plan.recipe.width >= 16
    # Three blocks of float32, one of half precision; no array of n x c or n x d.
    block = plan.memory["one block of columns"]
    assert block >= plan.recipe.width * SIZES.n * (3 * 4 + 2)
    assert plan.memory["Q"] == SIZES.n_train * SIZES.d * 8
    assert plan.memory["graph"] >= 2 * SIZES.m * 4 + SIZES.n * 8
    for name in ("X (copies)", "chunks of X"):
        assert plan.memory[name] <= 2**30
    # Seven arrays of n x c would be a terabyte: a few outputs of MSE at most, none of several.
    assert plan.outputs < (1 if params else 8)


def test_a_card_that_is_too_small_says_what_would_do():
    with pytest.raises(MemoryError, match=r"needs at least [\d,]+ MB"):
        HERTA(lam=1.0).plan(**PAPERS, device_memory="16GB")


@pytest.mark.parametrize("lam", [1.0, 20.0])
def test_what_a_fit_moves(lam):
    model, card = HERTA(lam=lam), Card(80 * 2**30)
    plan = model.plan(**PAPERS, device_memory="80GB")
    sizes = replace(SIZES, half=True, top=1 + 2 * lam)
    products, residuals, passes = list_work(plan, sizes, card, X_itemsize=2)
    blocks = plan.recipe.blocks(128)
    assert [J.stop - J.start for J in blocks] == [32] * 4  # whole sectors of float16
    # Passes to 5e-4 at best, each with a residual: two of 1e-3 or more for a goal of 1e-6.
    each = {1.0: 12, 20.0: 60}[lam]
    assert products.moved == pytest.approx(4 * each * step_bytes(sizes, 32), rel=0.05)
    assert products.seconds == pytest.approx(products.moved / (0.65 * 3.35e12))
    assert residuals.moved % (4 * (2 * SIZES.m * (32 * 5 + 4) + SIZES.n * 32 * 12)) == 0
    # One for X^T X and norms, one for X C0, which goes to the host meanwhile and comes in blocks.
    whole = SIZES.n * SIZES.d
    assert passes.moved == 2 * whole * 2 + 2 * whole * 4
    chunks = -(-8 * whole // (16 << 20))
    assert passes.seconds == pytest.approx(max(8 * whole / 25e9, 2 * chunks * 180e-6))
    # The goals for papers100M on one such card, by this model, with X in float32.
    work = list_work(plan, sizes, card, X_itemsize=4)
    assert sum(moved.seconds for moved in work) <= {1.0: 20, 20.0: 45}[lam]


def test_an_X_that_fits_stays_on_the_card():
    card = Card(80 * 2**30)
    assert card.X_bytes(10**6, 100, 64 * 2**30) == 4 * 10**8
    assert card.X_bytes(SIZES.n, SIZES.d, 64 * 2**30) == 64 << 20
    assert "assumed, not measured" in card.assumptions


# ---- several processes ----
N, M, D, C, TRAIN, RANKS = 10**6, 10**7, 128, 40, 5 * 10**5, 8


@pytest.fixture(scope="module")
def plan():
    return HERTA(lam=20.0, memory_budget="64GB").plan(N, M, D, C, TRAIN)


def test_a_counted_cut_takes_the_place_of_the_assumed_one(plan):
    given = (plan, Sizes(N, M, D, C, TRAIN, word=4, X_bytes=0, ranks=RANKS), 80.0)
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
    sizes = Sizes(N, M, D, C, TRAIN, word=4, X_bytes=0, ranks=RANKS)
    (columns, nodes), (more, share) = (
        splits(plan, replace(sizes, X_bytes=held), 80.0) for held in (0, 8 << 30)
    )
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
    decision = choose_split(found, 4 << 30)
    assert decision.choice == choice
    assert words in decision.why


def test_what_was_counted_and_what_was_assumed_is_told():
    assert "assumed, not measured" in assumptions(None, "blocks")
    assert "as METIS left of ogbn-arxiv" in assumptions(None, "blocks")
    told = assumptions(0.25, "metis")
    assert told.startswith("0.25 n rows go from rank to rank in a product by metis, counted")
    assert "ogbn-arxiv" not in told
