"""The caller's wishes: every one decoded, frozen, and each wrong value told in a sentence."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.losses import LOSSES
from herta_gpu.planning.settings import LOSS_NAMES, Settings, Wish
from herta_gpu.plumbing.checks import memory_budget


def settings(**wishes: Any) -> Settings:
    return Settings.of(HERTA(**wishes).get_params())


def test_the_defaults() -> None:
    assert settings() == Settings(
        lam=1.0, lams=(1.0,), loss="mse", optimizer="cg", ridge=0.0, tol=1e-6, max_iter=100,
        strategy="auto",
        sparsify=Wish("auto"), scores="degree", mixed=False, sketch=Wish("auto"),
        precondition=True, device="auto", dtype="float32", memory_budget=None, seed=0,
        learning_rate=None, reorder=Wish("auto"),
    )  # fmt: skip


SPARSIFY = {
    "auto": (Wish("auto"), "degree", False),
    True: (Wish("always"), "sketch", False),
    np.True_: (Wish("always"), "sketch", False),
    False: (Wish("never"), "sketch", False),
    700: (Wish("always", 700), "sketch", False),
    "degree": (Wish("always"), "degree", False),
    "mixed": (Wish("auto"), "degree", True),
}


@pytest.mark.parametrize("asked", ["auto", True, np.True_, False, 700, "degree", "mixed"])
def test_sparsify_is_decoded_once(asked: Any) -> None:
    found = settings(sparsify=asked)
    assert (found.sparsify, found.scores, found.mixed) == SPARSIFY[asked]


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        ("auto", Wish("auto")),
        (True, Wish("always")),
        (False, Wish("never")),
        (np.int64(64), Wish("always", 64)),
        (1, Wish("always", 1)),  # one row, not True
    ],
)
def test_sketch_and_reorder_are_decoded_once(asked: Any, wish: Wish) -> None:
    assert settings(sketch=asked).sketch == wish
    if wish.count is None:
        assert settings(reorder=asked).reorder == wish


@pytest.mark.parametrize(
    ("wishes", "custom"),
    [
        ({}, False),
        ({"sparsify": False, "sketch": False}, False),
        ({"sparsify": True}, True),
        ({"sparsify": "degree"}, True),
        ({"sparsify": "mixed"}, True),
        ({"sketch": 64}, True),
    ],
)
def test_a_P_of_the_callers_choice_is_known_as_one(wishes: dict[str, Any], custom: bool) -> None:
    assert settings(**wishes).custom_P is custom


def test_numbers_have_plain_types() -> None:
    found = settings(
        lam=np.float32(2), ridge=1, tol=np.float64(1e-3), max_iter=np.int32(7), dtype=np.float64,
        memory_budget="2MB", random_state=np.uint32(5), learning_rate=1, precondition=np.True_,
    )  # fmt: skip
    plain = (found.lam, found.ridge, found.tol, found.max_iter, found.dtype, found.memory_budget)
    assert plain == (2.0, 1.0, 1e-3, 7, "float64", 2 << 20)
    assert [type(value) for value in plain] == [float, float, float, int, str, int]
    assert (type(found.seed), type(found.learning_rate)) == (int, float)
    assert found.precondition is True


def test_alpha_stands_for_lam() -> None:
    assert settings(lam=7.0).lams == (7.0,)
    assert settings(lam=3.0, alpha=0.1).lam == pytest.approx(9.0)


def test_the_budget_is_what_was_asked_for_or_four_fifths_of_what_is_free() -> None:
    assert memory_budget(settings(memory_budget="1GB").memory_budget, 10) == 1 << 30
    assert memory_budget(settings().memory_budget, 1000) == 800


def test_settings_and_wishes_cannot_be_changed() -> None:
    found = settings()
    with pytest.raises(FrozenInstanceError):
        found.lam = 2.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        found.sketch.when = "never"  # type: ignore[misc]
    assert hash(found) == hash(settings())


def test_every_loss_that_may_be_asked_for_exists() -> None:
    for name in LOSS_NAMES:
        assert settings(loss=name).loss in LOSSES


def test_several_lam() -> None:
    assert not settings(lam=3.0).several
    assert not settings(lam=[3.0]).several
    assert settings(lam=[0]).several  # X itself
    found = settings(lam=np.array([0, 1, 20]))
    assert (found.lam, found.lams, found.several) == (20.0, (0.0, 1.0, 20.0), True)


WRONG = [
    ({"lam": []}, ValueError, "lam is empty"),
    ({"lam": [1, 1.0]}, ValueError, "more than once"),
    ({"lam": [1, -2]}, ValueError, "lam must be a positive number, not -2"),
    ({"lam": [1, "a"]}, TypeError, "lam must be a number"),
    ({"lam": [0, 1], "alpha": 0.5}, ValueError, "alpha stands for one lam"),
    ({"lam": [0, 1], "strategy": "herta"}, ValueError, "is for one lam"),
    ({"lam": [0, 1], "precondition": False}, ValueError, "is for one lam"),
    ({"lam": [0, 1], "sparsify": True}, ValueError, "is for one lam"),
    ({"lam": [0, 1], "sketch": 50}, ValueError, "is for one lam"),
    ({"lam": [0, 1], "loss": "ce", "optimizer": "adam"}, ValueError, "is for one lam"),
    ({"fit_intercept": 3}, ValueError, "fit_intercept must be one of"),
    ({"class_weight": "even"}, ValueError, "class_weight must be None"),
    ({"class_weight": {0: -1.0}}, ValueError, "class_weight of 0 must not be negative"),
    ({"class_weight": {0: float("nan")}}, ValueError, "class_weight of 0 must be finite"),
    ({"ridge": float("inf")}, ValueError, "ridge must be finite, not inf"),
    ({"ridge": float("nan")}, ValueError, "ridge must be finite, not nan"),
    ({"lam": float("inf")}, ValueError, "lam must be a finite number, not inf"),
    ({"lam": 0}, ValueError, "lam must be a positive number, not 0"),
    ({"lam": 1e7}, ValueError, "lam must be at most 1e+06"),
    ({"lam": "1"}, TypeError, "lam must be a number, not '1'"),
    ({"alpha": 1.0}, ValueError, "alpha must lie between 0 and 1, not 1.0"),
    ({"alpha": 1e-9}, ValueError, "lam must be at most"),
    ({"loss": "hinge"}, ValueError, 'loss must be one of "mse", "ce", "bce", not \'hinge\''),
    ({"optimizer": "sgd"}, ValueError, 'optimizer must be one of "cg"'),
    ({"strategy": "best"}, ValueError, 'strategy must be one of "auto", "herta", "direct"'),
    ({"ridge": -1}, ValueError, "ridge must not be negative, but is -1"),
    ({"ridge": 1e31}, ValueError, "ridge must be at most 1e+30"),
    ({"tol": 0.0}, ValueError, "tol must be a positive number"),
    ({"max_iter": 0}, ValueError, "max_iter must be an integer of at least 1"),
    ({"max_iter": True}, ValueError, "max_iter must be an integer of at least 1"),
    ({"random_state": -1}, ValueError, "random_state must be an integer of at least 0"),
    ({"random_state": 2**32}, ValueError, "random_state must be at most"),
    ({"reorder": "rcm"}, ValueError, 'reorder must be one of "auto", True, False'),
    ({"precondition": "yes"}, ValueError, "precondition must be one of True, False"),
    ({"device": "tpu"}, ValueError, 'device must be one of "auto", "cpu"'),
    ({"dtype": "float16"}, ValueError, 'dtype must be one of "float32", "float64"'),
    ({"memory_budget": "lots"}, ValueError, "memory_budget must be bytes or like"),
    ({"memory_budget": "1.2.3GB"}, ValueError, "memory_budget must be bytes or like"),
    ({"memory_budget": "0"}, ValueError, "memory_budget must be a positive number"),
    ({"dtype": None}, ValueError, "dtype must be one of"),
    ({"dtype": int}, ValueError, "dtype must be one of"),
    ({"dtype": object()}, ValueError, "dtype must be one of"),
    ({"memory_budget": 0}, ValueError, "memory_budget must be a positive number"),
    ({"sparsify": "edges"}, ValueError, 'sparsify must be "auto", "degree", "mixed", True, False'),
    ({"sparsify": -3}, ValueError, "or a positive count, not -3"),
    ({"sketch": "degree"}, ValueError, 'sketch must be "auto", True, False or a positive count'),
    ({"sketch": 0}, ValueError, "or a positive count, not 0"),
    ({"sketch": 2.5}, ValueError, "or a positive count, not 2.5"),
    ({"learning_rate": "fast"}, ValueError, 'learning_rate must be one of "spectral"'),
    ({"learning_rate": 0.0}, ValueError, "learning_rate must be a positive number"),
]


@pytest.mark.parametrize(
    ("wishes", "kind", "sentence"),
    WRONG,
    ids=[f"{i}-{'-'.join(w[0])}" for i, w in enumerate(WRONG)],
)
def test_each_wrong_value_has_its_sentence(
    wishes: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as error:
        settings(**wishes)
    assert sentence in str(error.value)
