"""The result of a fit: plain data that goes to JSON and comes back."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import fields, replace

import numpy as np
import pytest

from herta_gpu import HERTA, Certificate
from herta_gpu.app.results import FitResult
from herta_gpu.app.train import fit
from herta_gpu.datasets import load
from herta_gpu.plumbing.progress import Stages


@pytest.fixture(scope="module")
def fitted():
    data, stages = load("digits"), Stages()
    with stages("load"):
        model = HERTA(lam=20.0, ridge=0.1)
    return model, data, fit(model, data, stages, None)


# Earlier versions did not write them.
LATER = (
    "hidden", "confusion", "wall_seconds",
    "warm_steps", "normalize", "X_reads", "fit_intercept", "label_features", "correct_and_smooth",
    "base_scores", "output_error", "undecided", "ranks", "ranks_split", "partition", "more_scores",
)  # fmt: skip


def through_json(result: FitResult) -> FitResult:
    return FitResult.from_json(json.loads(json.dumps(result.as_json())))


def test_a_result_survives_json(fitted):
    result = fitted[2]
    again = through_json(result)
    assert again == result
    assert again.text("folder") == result.text("folder")
    assert again.as_json() == result.as_json()


def test_the_keys_are_those_that_result_json_always_had(fitted):
    content = fitted[2].as_json()
    assert list(content) == [
        "dataset", "nodes", "edges", "features", "outputs", "lam", "ridge", "loss_function",
        "status", "steps", "warm_steps", "loss", "certificate", "metric", "scores", "more_scores",
        "confusion", "wall_seconds", "seconds",
        "peak_memory_bytes", "strategy", "dtype", "device", "normalize", "X_reads",
        "ranks", "ranks_split", "partition", "fit_intercept", "label_features", "hidden",
        "correct_and_smooth", "base_scores", "output_error", "undecided", "note",
    ]  # fmt: skip
    assert set(content["certificate"]) == {
        "value", "kind", "probability", "gap", "note", "kept", "features", "reduced", "text"
    }  # fmt: skip


def test_what_json_has_no_number_for_survives_as_well(fitted):
    none = Certificate(math.inf, "none", note="diverged")
    scores = {"train": 0.5, "test": math.nan}
    result = replace(fitted[2], certificate=none, scores=scores, loss=math.inf, status="diverged")
    again = through_json(result)
    assert again.certificate == none
    assert math.isnan(again.scores["test"])
    assert math.isnan(again.loss)  # null stands for infinity and NaN, and is read as NaN
    assert again.as_json() == result.as_json()
    assert again.code(Namespace(allow_uncertified=True)) == 1
    assert "no certificate (diverged)" in again.text()


@pytest.mark.parametrize("name", [f.name for f in fields(FitResult)])
def test_a_result_that_lacks_an_entry_is_refused_or_complete(fitted, name):
    content = fitted[2].as_json()
    del content[name]
    if name in LATER:
        assert FitResult.from_json(content).text()
        return
    with pytest.raises(ValueError, match=f"it has no entry {name}"):
        FitResult.from_json(content)


@pytest.mark.parametrize("certificate", [None, [], {}, {"value": "small", "kind": "duality"}])
def test_a_damaged_certificate_is_refused(fitted, certificate):
    with pytest.raises(ValueError, match="it"):
        FitResult.from_json({**fitted[2].as_json(), "certificate": certificate})


def test_one_timer_holds_the_seconds_of_everything(fitted):
    model, _, result = fitted
    assert next(iter(result.seconds)) == "load"
    assert list(result.seconds)[-1] == "evaluate"
    assert {k: result.seconds[k] for k in model.stages_} == pytest.approx(model.stages_)
    assert not {"load", "evaluate"} & set(model.stages_)


def test_a_timer_that_times_two_fits_tells_them_apart():
    data, stages = load("digits"), Stages()
    models = [HERTA(lam=lam, ridge=0.1) for lam in (1.0, 20.0)]
    for model in models:
        model.fit(data.graph, data.X, data.y, data.split["train"], _stages=stages)
    first, second = (model.stages_ for model in models)
    assert first["train"] + second["train"] == pytest.approx(stages.seconds["train"])


def test_a_model_that_was_fitted_elsewhere_is_evaluated_without_a_timer(fitted):
    model, data, result = fitted
    again = FitResult.from_fit(model, data)
    assert again.scores == result.scores
    assert set(again.seconds) == {*model.stages_, "evaluate"}
    assert "evaluate" not in model.stages_  # the model's own record is left alone


def test_without_a_split_all_labelled_nodes_are_scored(fitted):
    model, data, _ = fitted
    y = data.y.copy()
    y[::3] = -1
    result = FitResult.from_fit(model, replace(data, y=y, split={}))
    assert list(result.scores) == ["all"]
    assert result.scores["all"] == model.score(data.graph, data.X, y, np.flatnonzero(y >= 0))


def test_a_model_that_cannot_be_reported_says_why(fitted):
    model, data, _ = fitted
    with pytest.raises(RuntimeError, match="not fitted yet"):
        FitResult.from_fit(HERTA(), data)
    with pytest.raises(ValueError, match="no labels to score against"):
        FitResult.from_fit(model, replace(data, y=None))


def test_a_stored_model_has_the_result_of_its_fit(fitted, tmp_path):
    model, data, _ = fitted
    model.save(tmp_path / "model.npz")
    again, result = (
        FitResult.from_fit(HERTA.load(tmp_path / "model.npz"), data),
        FitResult.from_fit(model, data),
    )
    same = {"seconds": {}, "peak_memory_bytes": 0}
    assert replace(again, **same) == replace(result, **same)


def test_an_x_that_was_read_from_a_file_is_told_with_its_rate(fitted, tmp_path):
    model, data, result = fitted
    assert result.X_reads["passes"] > 0
    assert result.X_reads["bytes_read"] == 0
    assert "passes over X" not in result.text()
    np.save(tmp_path / "X.npy", data.X)
    mapped = replace(data, X=np.load(tmp_path / "X.npy", mmap_mode="r"))
    again = HERTA(**model.get_params())
    found = fit(again.set_params(reorder=False), mapped, Stages(), None)
    reads = found.X_reads
    assert reads["bytes_read"] == reads["passes"] * data.X.nbytes
    rate = reads["bytes_read"] / reads["seconds"] / 1e9
    assert ["passes", "over", "X", f"{reads['passes']},", f"{rate:.1f}", "GB/s"] in [
        line.split() for line in found.text().splitlines()
    ]
    assert through_json(found) == found
