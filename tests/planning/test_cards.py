"""Plans for a GPU that is not there: bytes by hand, and ogbn-papers100M on 80 GB."""

from __future__ import annotations

from dataclasses import replace

import pytest

from herta_gpu import HERTA
from herta_gpu.planning.cards import Card, moved, step_bytes
from herta_gpu.planning.costs import Sizes

PAPERS = {"n": 111_059_956, "m": 1_615_685_872, "d": 128, "c": 172, "n_train": 1_207_179}
SIZES = Sizes(**PAPERS, word=4, X_bytes=0)
GB = 10**9


def test_bytes_of_a_step():
    """By hand: 2 m rows of 32 floats gathered, 2 m indices, four blocks of n x 32 read or written;
    in half precision the gathers are halved and two more blocks of 2 and 4 bytes are touched."""
    n, m = SIZES.n, SIZES.m
    assert step_bytes(SIZES, 32) == 2 * m * 32 * 4 + 2 * m * 4 + 4 * n * 32 * 4
    assert step_bytes(SIZES, 32) / GB == pytest.approx(484, abs=1)
    half = replace(SIZES, half=True)
    assert step_bytes(half, 32) / GB == pytest.approx(298, abs=1)
    assert step_bytes(replace(SIZES, word=8), 32) > 1.9 * step_bytes(SIZES, 32) - 2 * m * 4
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
    assert not plan.recipe.keep_residual


def test_a_card_that_is_too_small_says_what_would_do():
    with pytest.raises(MemoryError, match=r"needs at least [\d,]+ MB"):
        HERTA(lam=1.0).plan(**PAPERS, device_memory="16GB")


@pytest.mark.parametrize("lam", [1.0, 20.0])
def test_what_a_fit_moves(lam):
    model, card = HERTA(lam=lam), Card(80 * 2**30)
    plan = model.plan(**PAPERS, device_memory="80GB")
    sizes = replace(SIZES, half=True)
    products, passes = moved(plan, sizes, card, X_itemsize=2)
    blocks = plan.recipe.blocks(128)
    k = max(J.stop - J.start for J in blocks)
    steps = len(blocks) * (plan.recipe.degree + 2)
    assert products.moved == steps * step_bytes(sizes, k)
    assert products.seconds == pytest.approx(products.moved / (0.6 * 3.35e12))
    # One for column norms, one for X^T X, two for each block of columns.
    assert passes.moved == (1 + 2 * len(blocks)) * SIZES.n * SIZES.d * 2
    assert passes.seconds == pytest.approx(passes.moved / 25e9)
    # The design's table: 8 and 32 s of products with H.
    assert products.seconds == pytest.approx({1.0: 8, 20.0: 32}[lam], rel=0.25)


def test_an_X_that_fits_stays_on_the_card():
    card = Card(80 * 2**30)
    assert card.X_bytes(10**6, 100, 64 * 2**30) == 4 * 10**8
    assert card.X_bytes(SIZES.n, SIZES.d, 64 * 2**30) == 64 << 20
    assert "assumed, not measured" in card.assumptions
