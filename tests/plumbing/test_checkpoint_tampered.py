"""A checkpoint believes nothing of its files that it can measure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.plumbing.checkpoint import Checkpoint
from tests.plumbing.killed_fits import PARAMS, WAY_OUT, files, fit, given, killed


def edited(path: Path, change) -> None:
    """Change the point in step.npz, and write it in the form that a checkpoint has."""
    with np.load(path) as stored:
        arrays = dict(stored)
    about = json.loads(str(arrays["about"]))["dict"]
    stored_point = about["point"]["dict"] | about["rows"]["dict"]
    point = {k: v["array"] if isinstance(v, dict) else v for k, v in stored_point.items()}
    change(about, point, arrays)
    for name, value in point.items():
        if not isinstance(stored_point[name], dict):
            about["point"]["dict"][name] = value
    arrays["about"] = np.array(json.dumps({"dict": about}))
    np.savez(path, **arrays)


def small_gradient(about, point, arrays) -> None:
    for name in ("g", "gradient"):
        arrays[point[name]] = arrays[point[name]] * 1e-9


def small_objective(about, point, arrays) -> None:
    point["objective"] = 1e-3


def no_residuals(about, point, arrays) -> None:
    point["forward_residual"] = point["adjoint_residual"] = 0.0
    arrays[point["Z"]] = arrays[point["Z"]] * 1.5


def point_of_others(about, point, arrays) -> None:
    """A point whose entries fit together, but belong to other weights."""
    arrays[point["w"]] = arrays[point["w"]][::-1].copy()


def not_numbers(about, point, arrays) -> None:
    arrays[point["W"]] = arrays[point["W"]] * np.nan


def flat_curvature(about, point, arrays) -> None:
    about["curvature"] = 1e-6


TAMPERED = [
    small_gradient, small_objective, no_residuals, point_of_others, not_numbers, flat_curvature
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The stored state contradicts itself")
@pytest.mark.parametrize("change", TAMPERED)
@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_a_tampered_step_is_not_believed(tmp_path, change, loss):
    data = given()
    data["X"] = data["X"] * np.logspace(-1, 1, 12).astype("float32")
    params = {"loss": loss, "ridge": 0.01, "tol": 1e-8}
    params["sketch"] = 30 if loss == "mse" else "auto"
    exact = {"tol": 1e-13, "dtype": "float64", "strategy": "herta"}
    optimum = HERTA(**{**PARAMS, **params, **exact}).fit(**data).history_[-1]["loss"]
    killed(tmp_path, data, at=2, **params)
    edited(tmp_path / "step.npz", change)
    model = fit(tmp_path, data, **params)
    truth = objective(model, data)
    assert model.history_[-1]["loss"] == pytest.approx(truth, rel=1e-5)
    assert min(h["loss"] for h in model.history_) >= optimum * (1 - 1e-6)
    assert model.status_ == "certified"
    assert (truth - optimum) / truth <= model.certificate_.value + 1e-12


def objective(model: HERTA, data: dict) -> float:
    """The objective by dense algebra in float64, from the weights and the data alone."""
    H = np.eye(400) + model.lam * data["graph"].to_csr().toarray()
    F = np.linalg.solve(H, data["X"].astype("float64") @ model.W_)[np.sort(data["train"])]
    codes = np.searchsorted(model.classes_, data["y"][np.sort(data["train"])])
    ridge = 0.5 * model.ridge * (model.W_**2).sum()
    if model.loss == "mse":
        return 0.5 * ((F - np.eye(3)[codes]) ** 2).sum() + ridge
    top = F.max(axis=1)
    log_sum = np.log(np.exp(F - top[:, None]).sum(axis=1)) + top
    return (log_sum - F[np.arange(len(codes)), codes]).sum() + ridge


def test_files_of_another_fit_are_not_read(tmp_path):
    """Files are copied into the folder of another fit, whose fingerprint is right."""
    data, other = given(), given()
    other["X"] = other["X"][::-1].copy()
    killed(tmp_path / "mine", data)
    killed(tmp_path / "other", other)
    for path in (tmp_path / "other").glob("*.npz"):
        (tmp_path / "mine" / path.name).write_bytes(path.read_bytes())
    seen = []
    again = fit(tmp_path / "mine", data, seen.append)
    assert seen[0]["step"] == 0
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize("left", [None, "", "[]", '{"data": 3}', "{"])
def test_a_state_of_unknown_origin_is_refused(tmp_path, left):
    data = given()
    killed(tmp_path, data)
    (tmp_path / "made-from.json").unlink()
    if left is not None:
        (tmp_path / "made-from.json").write_text(left)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=WAY_OUT):
        fit(tmp_path, data)
    assert files(tmp_path) == before
    Checkpoint(tmp_path).delete()
    assert (fit(tmp_path, data).W_ == HERTA(**PARAMS).fit(**data).W_).all()


def test_a_state_of_another_version_is_refused(tmp_path, monkeypatch):
    data = given()
    killed(tmp_path, data)
    monkeypatch.setattr("herta_gpu.plumbing.fingerprint.__version__", "9.9")
    with pytest.raises(ValueError, match=r"version of herta_gpu \(0\..* then, 9\.9 now\) changed"):
        fit(tmp_path, data)
