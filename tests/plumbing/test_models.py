"""A fitted model in a file: everything comes back, to the last bit and without pickles."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.plumbing.files import DataError, write_npz
from herta_gpu.plumbing.models import from_plain, to_plain
from tests.conftest import random_graph

GRAPH = random_graph(120, 500)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((120, 7)), RNG.integers(0, 3, 120)
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "certified": ({"lam": 5.0}, Y),
    "text labels": ({"lam": 5.0, "loss": "ce", "ridge": 0.1}, np.array(["a", "bc", "d"])[Y]),
    "regression": ({"alpha": 0.2, "dtype": np.float64}, X @ np.arange(7.0)),
    "several targets": ({"ridge": 0.5, "optimizer": "lbfgs", "tol": 1e-3}, X[:, :2]),
    "no certificate": ({"precondition": False, "max_iter": np.int64(3)}, Y),
    "sampled": ({"sparsify": 200, "sketch": 40, "strategy": "herta", "memory_budget": "1GB"}, Y),
    "warm steps": ({"strategy": "direct", "loss": "ce", "ridge": 0.1}, Y),
    "several lam": ({"lam": [0, 1.5, 20], "fit_intercept": True, "class_weight": {2: 3.0}}, Y),
    "several labels": ({"loss": "bce", "ridge": 0.1}, np.stack([Y > 0, Y > 1], axis=1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_a_fit_leaves_comes_back(kind, tmp_path):
    params, y = KINDS[kind]
    model = HERTA(**params).fit(GRAPH, X, y, train=np.arange(80))
    model.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = HERTA.load(str(tmp_path / "model"))
    arrays = ("W_", "classes_", "intercept_", "train_")
    assert set(vars(again)) == set(vars(model))
    for name, value in vars(model).items():
        if name not in arrays and name != "dtype":
            assert getattr(again, name) == value, name
    assert again.dtype == np.dtype(model.dtype).name
    assert str(again.plan_) == str(model.plan_)
    assert type(again.plan_) is type(model.plan_)
    assert str(again.certificate_) == str(model.certificate_)
    for name in arrays:
        np.testing.assert_array_equal(getattr(again, name), getattr(model, name), strict=True)
    for call in ("transform", "predict"):
        ours, theirs = (getattr(m, call)(GRAPH, X) for m in (again, model))
        np.testing.assert_array_equal(ours, theirs, strict=True)
    assert again.score(GRAPH, X, y) == model.score(GRAPH, X, y)


def test_a_model_that_was_read_is_saved_and_fitted_like_any_other(tmp_path):
    class Mine(HERTA):
        pass

    model = HERTA(lam=3.0).fit(GRAPH, X, Y)
    model.save(tmp_path / "a")
    again = Mine.load(tmp_path / "a")
    assert type(again) is Mine
    again.save(tmp_path / "b")
    with np.load(tmp_path / "a") as a, np.load(tmp_path / "b") as b:
        assert str(a["about"]) == str(b["about"])
        # Infinity and NaN, which are no JSON, would be constants.
        json.loads(str(a["about"]), parse_constant=pytest.fail)
    assert (again.fit(GRAPH, X, Y).W_ == model.W_).all()


def test_a_failed_save_leaves_the_old_model(tmp_path):
    model = HERTA(ridge=0.1).fit(GRAPH, X, Y)
    model.save(tmp_path / "m")
    before = (tmp_path / "m").read_bytes()
    model.plan_ = object()
    with pytest.raises(TypeError, match="object cannot be written"):
        model.save(tmp_path / "m")
    with pytest.raises(RuntimeError, match="not fitted yet"):
        HERTA().save(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": 3}, "its entry plan is 3"),
        ({"plan": {}}, "plan has no entry strategy"),
        ({"history": {}}, "its entry history is {}"),
        ({"history": ["x"]}, "its entry history[0] is 'x'"),
        ({"spectrum": {"a": 1.0, "b": 2.0, "norm": 1.0, "kind": 4}}, "spectrum"),
        ({"stages": {"train": "long"}}, "its entry stages.train is 'long'"),
        ({"certificate": {"value": True, "kind": "none"}}, "its entry certificate.value is True"),
        ({"status": None}, "its entry status is None"),
    ],
)
def test_what_is_wrong_with_a_stored_fit_is_named(change, words, tmp_path):
    HERTA(ridge=0.1).fit(GRAPH, X, Y).save(tmp_path / "m")
    with np.load(tmp_path / "m") as stored:
        arrays = {name: stored[name] for name in stored if name != "format"}
    arrays["about"] = json.dumps({**json.loads(str(arrays["about"])), **change})
    write_npz(tmp_path / "m.npz", arrays, "model")
    with pytest.raises(DataError) as found:
        HERTA.load(tmp_path / "m.npz")
    assert "m.npz is not a whole model file" in str(found.value)
    assert words in str(found.value)


# ---- plain values ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Inner:
    size: float
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: list[tuple[str, int]]
    maybe: Inner | None
    kind: Literal["a", "b"] = "a"
    anything: dict[str, Any] = field(default_factory=dict)


def test_dataclasses_are_rebuilt_from_json():
    anything = {"x": [math.inf, -math.inf, 0.1], "y": None, "z": {"float": 1.0}}
    made = Outer(Inner(1 / 3, ("a", "b")), [("k", 2)], None, "b", anything)
    assert from_plain(Outer, json.loads(json.dumps(to_plain(made), allow_nan=False))) == made
    deep = Outer(Inner(math.inf), [], Inner(-0.0))
    assert from_plain(Outer, json.loads(json.dumps(to_plain(deep), allow_nan=False))) == deep
    assert math.isnan(from_plain(float, to_plain(math.nan)))
    assert to_plain(np.float32(0.5)) == 0.5


def test_lossy_json_is_for_readers_who_do_not_know_the_types():
    content = {1: (np.float32(0.5), -math.inf, math.nan), "at": Path("run"), "in": Inner(math.inf)}
    plain = {"1": [0.5, None, None], "at": "run", "in": {"size": None, "words": []}}
    assert to_plain(content, lossy=True) == plain
    with pytest.raises(TypeError, match="cannot be written"):
        to_plain(content)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, True), (int, 1.0), (float, False), (bool, 1), (str, None), (tuple[int, int], [1]),
     (Literal["a"], "c"), (int | None, "x"), (list[int], [1, "2"])],
)  # fmt: skip
def test_other_types_are_refused(kind, value):
    with pytest.raises(ValueError, match="its entry it"):
        from_plain(kind, value)
