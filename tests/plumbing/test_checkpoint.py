"""A checkpoint goes on with its own fit and with no other, and believes nothing it can measure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.app.runs import load_model
from herta_gpu.datasets import load
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.fingerprint import differences, fingerprint

PARAMS = {"lam": 5.0, "loss": "ce", "ridge": 0.1, "strategy": "herta", "tol": 1e-9}
WAY_OUT = r"choose another folder, or begin anew with checkpoint\.delete\(\) \(--overwrite on"


def given() -> dict:
    data = load("synthetic:n=400,m=2000,d=12,c=3")
    return {"graph": data.graph, "X": data.X, "y": data.y, "train": data.split["train"]}


def killed(folder: Path, data: dict, at: int = 3, warm: bool = True, **params) -> None:
    """The state of a fit that stopped when it had recorded step `at`, of a cheaper model or not."""

    def stop(entry: dict) -> None:
        if entry["step"] == at and (warm or not entry["warm"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder, data, stop, **params)
    assert (folder / "step.npz").is_file()
    assert list(folder.glob("Q*.npz"))


def fit(folder: Path, data: dict, callback=None, **params) -> HERTA:
    checkpoint = Checkpoint(folder, worth=0.0, share=1.0)
    return HERTA(**{**PARAMS, **params}).fit(**data, callback=callback, checkpoint=checkpoint)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def other_entry(data: dict) -> None:
    data["X"] = data["X"].copy()
    data["X"][391, 7] += 1e-6


def other_dtype(data: dict) -> None:
    data["X"] = data["X"].astype("float16" if data["X"].dtype == "float32" else "float32")


def other_label(data: dict) -> None:
    data["y"] = data["y"].copy()
    node = data["train"][5]
    data["y"][node] = (data["y"][node] + 1) % 3


def other_train(data: dict) -> None:
    outside = np.setdiff1d(np.arange(400), data["train"])[0]
    data["train"] = np.append(data["train"][1:], outside)


def other_edges(data: dict, weight: float | None = None, drop: bool = False) -> None:
    u, v, _ = data["graph"].edges()
    weights = np.ones(u.shape[0])
    if weight is not None:
        weights[17] = weight
    keep = np.arange(u.shape[0]) != (17 if drop else -1)
    data["graph"] = Graph.from_edges(np.stack([u, v])[:, keep], 400, weights[keep])


CHANGES = {
    "an entry of X": (other_entry, "the features X changed"),
    "the type of X": (other_dtype, "the features X changed"),
    "a label": (other_label, "the labels y changed"),
    "a training node": (other_train, "the training nodes changed"),
    "an edge": (lambda data: other_edges(data, drop=True), "the graph changed"),
    "a weight": (lambda data: other_edges(data, weight=1.001), "the graph changed"),
    "the order": (lambda data: data.update(graph=data["graph"].reordered()), "the graph changed"),
    "two": (lambda data: (other_entry(data), other_label(data)), "the features X and the labels y"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_and_nothing_is_lost(tmp_path, change):
    data, folder = given(), tmp_path / "state"
    W = HERTA(**PARAMS).fit(**data).W_
    killed(folder, data)
    before, (apply, words) = files(folder), CHANGES[change]
    changed = dict(data)
    apply(changed)
    with pytest.raises(ValueError, match=rf"made from something else: {words}.*{WAY_OUT}") as said:
        fit(folder, changed)
    assert "\n" not in str(said.value)
    assert files(folder) == before
    assert (fit(folder, data).W_ == W).all()  # as if nobody had asked


def test_an_entry_of_a_sparse_X_is_seen(tmp_path):
    data = given()
    data["X"] = sp.random(400, 12, 0.3, random_state=0, format="csr")
    killed(tmp_path, data)
    before, changed = files(tmp_path), dict(data, X=data["X"].copy())
    changed["X"].data[600] *= 1.001
    with pytest.raises(ValueError, match="the features X changed"):
        fit(tmp_path, changed)
    with pytest.raises(ValueError, match="the features X changed"):
        fit(tmp_path, dict(data, X=data["X"].toarray()))
    assert files(tmp_path) == before
    assert (fit(tmp_path, data).W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"lam": 6.0}, r"lam \(5.0 then, 6.0 now\)"),
        ({"ridge": 0.2}, r"ridge \(0.1 then, 0.2 now\)"),
        ({"lam": 6.0, "ridge": 1.0}, r"lam \(5.0 then, 6.0 now\) and ridge \(0.1 then, 1.0 now\)"),
        ({"loss": "mse"}, r"loss \(ce then, mse now\)"),
        ({"dtype": "float64"}, r"dtype \(float32 then, float64 now\)"),
        ({"random_state": 1}, r"random_state \(0 then, 1 now\)"),
        ({"tol": 1e-3}, r"tol \(1e-09 then, 0.001 now\)"),
        ({"optimizer": "lbfgs"}, r"optimizer \(cg then, lbfgs now\)"),
        ({"strategy": "direct"}, r"strategy \(herta then, direct now\)"),
        ({"sketch": True}, r"sketch \(auto then, True now\)"),
        ({"precondition": False}, r"precondition \(True then, False now\)"),
    ],
)
def test_another_model_is_refused(tmp_path, params, words):
    data = given()
    killed(tmp_path, data)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=rf"{words} changed; .*{WAY_OUT}"):
        fit(tmp_path, data, **params)
    assert files(tmp_path) == before


def test_one_row_is_not_yes(tmp_path):
    data = given()
    killed(tmp_path, data, sketch=True)
    with pytest.raises(ValueError, match=r"sketch \(True then, 1 now\)"):
        fit(tmp_path, data, sketch=1)


def test_the_same_said_otherwise_is_the_same(tmp_path):
    """Ids or a mask, another layout, NumPy's numbers, a name for the device."""
    data = given()
    killed(tmp_path, data)
    mask = np.zeros(400, dtype=bool)
    mask[data["train"]] = True
    same = {**data, "train": mask, "X": np.asfortranarray(data["X"])}
    again = fit(tmp_path, same, lam=np.float64(5), dtype=np.dtype("float32"), device="cpu")
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize(
    ("loss", "strategy"), [("mse", "herta"), ("ce", "herta"), ("ce", "direct")]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tol", [1e-6, 1e-13])  # 1e-13: solves that are tightened, or stagnate
def test_a_measured_point_has_the_bits_of_the_stored_one(tmp_path, loss, strategy, dtype, tol):
    data = given()
    params = {"loss": loss, "strategy": strategy, "dtype": dtype, "tol": tol, "ridge": 1e-3}
    params["sketch"] = 30 if loss == "mse" else "auto"  # so rough a P takes steps
    whole = HERTA(**{**PARAMS, **params}).fit(**data)
    last = len(whole.warm_history_ or whole.history_) - 1
    assert last > 3
    for at in (1, last // 2, last):
        folder, seen = tmp_path / str(at), []
        killed(folder, data, at=at, **params)
        again = fit(folder, data, seen.append, **params)
        assert at - 1 <= seen[0]["step"] <= at  # where a loop starts is not stored
        assert (again.W_ == whole.W_).all()
        steps = (model.warm_history_ + model.history_ for model in (again, whole))
        for ours, theirs in zip(*steps, strict=True):
            assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
        assert again.certificate_ == whole.certificate_


# ---- what may differ ------------------------------------------------------------------------
def test_more_steps_go_on_from_the_last_one(tmp_path):
    data = given()
    short = fit(tmp_path, data, max_iter=5)
    assert short.status_ == "max_iter"
    seen = []
    longer = fit(tmp_path, data, seen.append, max_iter=100, verbose=True)
    assert seen[0]["step"] == 5
    assert longer.status_ == "certified"
    assert (longer.W_ == HERTA(**PARAMS).fit(**data).W_).all()


def test_fewer_steps_than_there_were_end_where_they_are(tmp_path):
    data = given()
    killed(tmp_path, data, at=6)
    again = fit(tmp_path, data, max_iter=2)
    assert again.status_ == "max_iter"
    assert len(again.history_) == 7
    assert again.certificate_.value == again.history_[-1]["certificate"] < np.inf
    assert again.history_[-1]["loss"] < again.history_[-2]["loss"]


@pytest.mark.parametrize(
    ("loss", "strategy"), [("mse", "herta"), ("ce", "herta"), ("ce", "direct")]
)
@pytest.mark.parametrize("less", [True, False])
def test_another_budget_goes_on_from_the_weights(tmp_path, loss, strategy, less):
    """P from a sketch instead of Q, and no loop on Q: other coordinates, other loops."""
    data = load("synthetic:n=2000,m=8000,d=40,c=3")
    X = data.X * np.logspace(-1, 1, 40).astype("float32")
    data = {"graph": data.graph, "X": X, "y": data.y, "train": np.arange(100, 2000)}
    params = {"loss": loss, "strategy": strategy, "tol": 1e-9, "ridge": 0.01, "max_iter": 200}
    optimum = HERTA(**{**PARAMS, **params, "tol": 1e-12, "dtype": "float64"}).fit(**data)
    budgets = [_sketching(HERTA(**{**PARAMS, **params})), 2**30]
    first, second = budgets[::-1] if less else budgets
    before = HERTA(**{**PARAMS, **params, "memory_budget": first}).fit(**data)
    last = len(before.history_) - 1
    if last == 0:
        pytest.skip("P is so good that there is no step to go on from")
    killed(tmp_path, data, at=last, warm=False, memory_budget=first, **params)
    seen = []
    after = fit(tmp_path, data, seen.append, memory_budget=second, **params)
    assert (before.plan_.sketch_rows is None) == less != (after.plan_.sketch_rows is None)
    assert seen[0]["warm"] or last - 1 <= seen[0]["step"] <= last
    assert seen[0]["loss"] == pytest.approx(before.history_[-1]["loss"], rel=1e-3)
    loss_now = after.history_[-1]["loss"]
    assert after.status_ == "certified"
    assert (loss_now - optimum.history_[-1]["loss"]) / loss_now <= after.certificate_.value <= 1e-9


def _sketching(model: HERTA) -> int:
    """The largest budget (in steps of 1%) with which P is made from a sketch."""
    budget = 2**22
    while model.set_params(memory_budget=budget).plan(2000, 8000, 40, 3, 1900).sketch_rows is None:
        budget = int(0.99 * budget)
    return budget


# ---- memory maps ----------------------------------------------------------------------------
@pytest.fixture
def mapped(tmp_path) -> tuple[dict, Path]:
    """Data with X in a file, and that file."""
    data, path = given(), tmp_path / "X.npy"
    np.save(path, np.tile(data["X"], (1, 3)) + np.arange(36, dtype="float32"))
    return dict(data, X=np.load(path, mmap_mode="r")), path


def reopened(data: dict, path: Path) -> dict:
    return dict(data, X=np.load(path, mmap_mode="r"))


COMPARED = (
    r"of a memory map only 400 rows, the file's size and the file's time of change are compared"
)


def test_a_changed_memory_map_is_refused(tmp_path, mapped):
    data, path = mapped
    folder, about = tmp_path / "state", path.stat()
    killed(folder, data)
    before = files(folder)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=rf"X \(by the file's time of change; {COMPARED}\)"):
        fit(folder, reopened(data, path))
    X = np.load(path)
    X[-1, -1] += 1
    np.save(path, X)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # rows give it away all the same
    with pytest.raises(ValueError, match=rf"the features X \(by 400 rows; {COMPARED}\) changed"):
        fit(folder, reopened(data, path))
    assert files(folder) == before
    X[-1, -1] -= 1
    np.save(path, X)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    again = fit(folder, reopened(data, path))
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


def test_rows_of_a_large_map_are_sampled(tmp_path):
    """The first, the last and others between; a row that is not among them goes unseen."""
    from herta_gpu.backends import get_backend

    path, n = tmp_path / "X.npy", 50_000
    np.save(path, np.zeros((n, 2), dtype="float32"))
    about = path.stat()

    def of(row: int) -> dict:
        X = np.load(path, mmap_mode="r+")
        X[row] = 1
        X.flush()
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        graph = Graph.from_edges([[0], [1]], num_nodes=2)
        found = fingerprint(
            HERTA().get_params(), get_backend("cpu"), graph, X, np.zeros(n), np.arange(3)
        )
        X[row] = 0
        X.flush()
        return found

    step = (n - 1) / 4095
    then = of(1)  # not among them
    assert differences(then, of(2)) == []
    for row in (0, n - 1, int(1000 * step)):
        assert "the features X (by 4,096 rows; of a memory map" in differences(then, of(row))[0]


# ---- nothing is believed --------------------------------------------------------------------
def edited(path: Path, change) -> None:
    """step.npz with another point, in the form that a checkpoint gives it."""
    with np.load(path) as stored:
        arrays = dict(stored)
    about = json.loads(str(arrays["about"]))["dict"]
    point = {k: v["array"] if isinstance(v, dict) else v for k, v in about["point"]["dict"].items()}
    change(about, point, arrays)
    for name, value in point.items():
        if not isinstance(about["point"]["dict"][name], dict):
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
    """All of it fits together, but for other weights."""
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
@pytest.mark.parametrize(
    ("loss", "strategy"), [("mse", "herta"), ("ce", "herta"), ("ce", "direct")]
)
def test_a_tampered_step_is_not_believed(tmp_path, change, loss, strategy):
    data = given()
    data["X"] = data["X"] * np.logspace(-1, 1, 12).astype("float32")
    params = {"loss": loss, "strategy": strategy, "ridge": 0.01, "tol": 1e-8}
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
    """By dense algebra in float64, from the weights and the data alone."""
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
    """Copied into the folder, beside a fingerprint that is right."""
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


def test_the_fingerprint_is_there_before_anything_else(tmp_path, monkeypatch):
    """And nothing at all without a checkpoint: hashing takes time."""
    from herta_gpu import herta
    from herta_gpu.plumbing import checkpoint

    written, write = [], checkpoint._write
    monkeypatch.setattr(
        checkpoint, "_write", lambda p, *a: (written.append(files(tmp_path)), write(p, *a))
    )
    fit(tmp_path, given())
    assert list(written[0]) == ["made-from.json"]
    assert len(written) > 2
    monkeypatch.setattr(herta, "fingerprint", None)
    HERTA(**PARAMS).fit(**given())


# ---- the command line -----------------------------------------------------------------------
def store(path: Path, data: dict, X) -> None:
    u, v, _ = data["graph"].edges()
    rest = np.setdiff1d(np.arange(400), data["train"])
    np.savez(
        path, edge_index=np.stack([u, v]), num_nodes=400, features=X, labels=data["y"],
        train=data["train"], valid=rest[:50], test=rest[50:],
    )  # fmt: skip


@pytest.mark.parametrize("at", [0, 3])
def test_resume_after_the_file_was_replaced(tmp_path, capsys, at):
    data, npz, run = given(), tmp_path / "mine.npz", tmp_path / "run"
    store(npz, data, data["X"])
    command = ["train", str(npz), "--loss", "ce", "--ridge", "0.01", "--strategy", "herta"]
    code = (
        "import os; from herta_gpu.app.cli import main; from herta_gpu.app.runs import Run\n"
        "record = Run.record\n"
        "def fatal(self, entry):\n"
        "    record(self, entry)\n"
        f"    if entry['step'] == {at}: os.kill(os.getpid(), 9)\n"
        "Run.record = fatal\n"
        f"main({[*command, '--quiet', '--out', str(run)]!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 99}\n')  # not in the state, and not to be lost by a refusal
    before = files(run)
    store(npz, data, data["X"] * 2)
    assert main(["train", "--resume", str(run), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "the features X changed" in said
    assert "--overwrite" in said
    assert said.count("\n") == 1
    assert files(run) == before
    store(npz, data, data["X"])
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == list(range(len(steps)))
    W = load_model(run / "model.npz").W_
    store(npz, data, data["X"] * 2)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--json"]) == 0  # finished: what it found then
    assert json.loads(capsys.readouterr().out) == json.loads((run / "result.json").read_text())
    assert main([*command, "--quiet", "--out", str(run), "--overwrite"]) == 0
    assert not np.array_equal(load_model(run / "model.npz").W_, W)


def test_other_test_nodes_are_seen_by_a_run(tmp_path):
    """They decide the scores of its result, if not its weights."""
    data, checkpoint = given(), Checkpoint(tmp_path)
    checkpoint.split = {"train": data["train"], "test": np.arange(5)}
    HERTA(**PARAMS).fit(**data, checkpoint=checkpoint)
    checkpoint.split = {"train": data["train"], "test": np.arange(6)}
    with pytest.raises(ValueError, match="the validation or test nodes changed"):
        HERTA(**PARAMS).fit(**data, checkpoint=checkpoint)


def test_arrays_come_to_the_host_as_the_backend_says(tmp_path):
    """By its `to_numpy`, not by what an array of some library happens to offer."""

    class Elsewhere:
        dtype = np.dtype("float64")

        def get(self):
            raise AssertionError("nobody but the backend knows how")

    backend = SimpleNamespace(to_numpy=lambda x: np.arange(3.0), xp=np)
    checkpoint = Checkpoint(tmp_path, share=1.0)
    checkpoint.save_step({"w": Elsewhere(), "step": 2}, backend)
    stored = checkpoint.last_step(backend)
    assert stored["w"].tolist() == [0.0, 1.0, 2.0]
