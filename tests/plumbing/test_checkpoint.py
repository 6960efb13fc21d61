"""A checkpoint goes on with its own fit and with no other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.datasets import load
from herta_gpu.diffusion import Rows
from herta_gpu.plumbing.checkpoint import Checkpoint
from tests.plumbing.killed_fits import PARAMS, WAY_OUT, files, fit, given, killed


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
    assert (fit(folder, data).W_ == W).all()  # the refusal has changed nothing


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
    """A mask for ids, another layout of X, NumPy's numbers, and the device by its name."""
    data = given()
    killed(tmp_path, data)
    mask = np.zeros(400, dtype=bool)
    mask[data["train"]] = True
    same = {**data, "train": mask, "X": np.asfortranarray(data["X"])}
    again = fit(tmp_path, same, lam=np.float64(5), dtype=np.dtype("float32"), device="cpu")
    assert (again.W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize("optimizer", ["cg", "gd", "momentum", "adam", "lbfgs"])
@pytest.mark.parametrize("strategy", ["direct", "herta"])
def test_a_fit_from_the_stored_Q_has_the_same_bits(tmp_path, optimizer, strategy, monkeypatch):
    data = given()
    params = {"optimizer": optimizer, "strategy": strategy, "max_iter": 6}
    whole = HERTA(**{**PARAMS, **params}).fit(**data)
    killed(tmp_path, data, **params)
    monkeypatch.setattr(Rows, "_block", lambda *args: pytest.fail("Q is solved for again"))
    again = fit(tmp_path, data, **params)
    assert (again.W_ == whole.W_).all()
    steps = (model.warm_history_ + model.history_ for model in (again, whole))
    for ours, theirs in zip(*steps, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert again.certificate_ == whole.certificate_


# ---- what may differ ------------------------------------------------------------------------
def test_more_steps_than_before(tmp_path):
    data = given()
    assert fit(tmp_path, data, max_iter=5).status_ == "max_iter"
    longer = fit(tmp_path, data, max_iter=100, verbose=True)
    assert (longer.W_ == HERTA(**PARAMS).fit(**data).W_).all()


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("less", [True, False])
def test_another_budget(tmp_path, loss, less):
    """P from a sketch instead of Q, and no loop on Q: other coordinates, other loops."""
    data = load("synthetic:n=2000,m=8000,d=40,c=3")
    X = data.X * np.logspace(-1, 1, 40).astype("float32")
    data = {"graph": data.graph, "X": X, "y": data.y, "train": np.arange(100, 2000)}
    params = {"loss": loss, "tol": 1e-9, "ridge": 0.01, "max_iter": 200}
    optimum = HERTA(**{**PARAMS, **params, "tol": 1e-12, "dtype": "float64"}).fit(**data)
    budgets = [_sketching(HERTA(**{**PARAMS, **params})), 2**30]
    first, second = budgets[::-1] if less else budgets
    before = HERTA(**{**PARAMS, **params, "memory_budget": first}).fit(**data)
    killed(tmp_path, data, at=0, memory_budget=first, **params)
    after = fit(tmp_path, data, memory_budget=second, **params)
    assert (before.plan_.sketch_rows is None) == less != (after.plan_.sketch_rows is None)
    loss_now = after.history_[-1]["loss"]
    assert after.status_ == "certified"
    assert (loss_now - optimum.history_[-1]["loss"]) / loss_now <= after.certificate_.value <= 1e-9


def _sketching(model: HERTA) -> int:
    """The largest budget (in steps of 1%) with which P is made from a sketch."""
    budget = 2**22
    while model.set_params(memory_budget=budget).plan(2000, 8000, 40, 3, 1900).sketch_rows is None:
        budget = int(0.99 * budget)
    return budget


# ---- files that are not its own --------------------------------------------------------------
def test_files_of_another_fit_are_not_read(tmp_path):
    """Files are copied into the folder of another fit, whose fingerprint is right."""
    data, other = given(), given()
    other["X"] = other["X"][::-1].copy()
    killed(tmp_path / "mine", data)
    killed(tmp_path / "other", other)
    for path in (tmp_path / "other").glob("*.npz"):
        (tmp_path / "mine" / path.name).write_bytes(path.read_bytes())
    again = fit(tmp_path / "mine", data)
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
    monkeypatch.setattr("herta_gpu.plumbing.checkpoint.__version__", "9.9")
    with pytest.raises(ValueError, match=r"version of herta_gpu \(0\..* then, 9\.9 now\) changed"):
        fit(tmp_path, data)


# ---- what is written, and when ---------------------------------------------------------------
def test_the_fingerprint_is_there_before_anything_else(tmp_path, monkeypatch):
    """Without a checkpoint none is computed: hashing takes time."""
    from herta_gpu import task
    from herta_gpu.plumbing import checkpoint

    written, write = [], checkpoint.write
    monkeypatch.setattr(
        checkpoint, "write", lambda p, *a: (written.append(files(tmp_path)), write(p, *a))
    )
    fit(tmp_path, given())
    assert list(written[0]) == ["made-from.json"]
    assert len(written) > 1
    monkeypatch.setattr(task, "fingerprint", None)
    HERTA(**PARAMS).fit(**given())


def test_other_test_nodes_are_seen_by_a_run(tmp_path):
    """Test nodes decide the scores of a run, if not its weights."""
    data, checkpoint = given(), Checkpoint(tmp_path)
    checkpoint.split = {"train": data["train"], "test": np.arange(5)}
    HERTA(**PARAMS).fit(**data, checkpoint=checkpoint)
    checkpoint.split = {"train": data["train"], "test": np.arange(6)}
    with pytest.raises(ValueError, match="the validation or test nodes changed"):
        HERTA(**PARAMS).fit(**data, checkpoint=checkpoint)


def test_arrays_come_to_the_host_as_the_backend_says(tmp_path):
    """A checkpoint uses `to_numpy` of the backend, not a method of some library's array."""

    class Elsewhere:
        dtype = np.dtype("float64")

        def get(self):
            raise AssertionError("nobody but the backend knows how")

    backend = SimpleNamespace(
        to_numpy=lambda x: np.arange(3.0), xp=np, largest=lambda x: x, whole=True
    )
    checkpoint = Checkpoint(tmp_path, worth=0.0)
    recall = checkpoint.on(backend, "plan")
    recall("block", lambda: {"w": Elsewhere(), "note": "text"})
    stored = recall("block", None)
    assert stored["w"].tolist() == [0.0, 1.0, 2.0]
    assert stored["note"] == "text"
