"""Bad stored models and runs, and places where none can be written, each with its sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.app.runs import Run, read_config
from herta_gpu.datasets import DataError
from tests.plumbing.bad_input import (
    HTML,
    D,
    G,
    X,
    Y,
    check_text,
    cut,
    listing,
    model_file,
    npz,
    raw,
    refused,
    rows,
    tables,
    trained,
    with_config,
)

W, CLASSES = np.ones((D, 3)), np.arange(3)  # they have the shapes of those of the model
MODELS: list[tuple[str, Callable[[Path], Path], str]] = [
    ("a web page", lambda f: raw(f, HTML, "model.npz"), "it is a web page"),
    ("garbage", lambda f: raw(f, bytes(range(256)), "model.npz"), "is not a whole model file"),
    ("Python objects", lambda f: raw(f, b"\x80\x04N.", "model.npz"), "is not a whole model file"),
    ("empty", lambda f: raw(f, b"", "model.npz"), "it is empty"),
    ("cut", lambda f: cut(model_file(f), 0.7), "is not a whole model file"),
    ("one array", lambda f: raw(f, tables(f, y=Y).joinpath("y.npy").read_bytes(), "model.npz"),
     "it is a single array"),
    ("NaN", lambda f: model_file(f, W=W * np.nan), "W holds NaN or infinity"),
    ("infinity", lambda f: model_file(f, W=W / 0.0), "W holds NaN or infinity"),
    ("W 1-d", lambda f: model_file(f, W=W[0]), "not a matrix of floats"),
    ("W 0-d", lambda f: model_file(f, W=1.0), "not a matrix of floats"),
    ("W empty", lambda f: model_file(f, W=W[:0]), "not a matrix of floats"),
    ("W complex", lambda f: model_file(f, W=W + 0j), "not a matrix of floats"),
    ("W text", lambda f: model_file(f, W=W.astype(str)), "not a matrix of floats"),
    ("W objects", lambda f: model_file(f, W=W.astype(object)), "holds Python objects"),
    ("no W", lambda f: model_file(f, drop=("W",)), "has no entry W"),
    ("too few classes", lambda f: model_file(f, classes=CLASSES[:2]), "W has 3 columns"),
    ("equal classes", lambda f: model_file(f, classes=CLASSES * 0), "not distinct"),
    ("float classes", lambda f: model_file(f, classes=CLASSES * 1.0), "not distinct"),
    ("no about", lambda f: model_file(f, drop=("about",)), "has no entry about"),
    ("about empty", lambda f: model_file(f, about=""), "is not a whole model file"),
    ("about {}", lambda f: model_file(f, about="{}"), "has no entry params"),
    ("about []", lambda f: model_file(f, about="[]"), "it is a list"),
    ("about null", lambda f: model_file(f, about="null"), "not an object"),
    ("about an array", lambda f: model_file(f, about=np.zeros(0)), "about is no text"),
    ("no params", lambda f: model_file(f, about={"params": []}), "its entry params is []"),
    ("unknown", lambda f: model_file(f, about={"params": {"x": 1}}), "no parameter 'x'"),
    ("wrong", lambda f: model_file(f, about={"params": {"lam": "1"}}), "lam must be a number"),
    ("dtype", lambda f: model_file(f, about={"params": {"dtype": "f"}}), "dtype must be one of"),
    ("flat", lambda f: model_file(f, about={"flat": 7}), "its entry flat is 7"),
    ("bound", lambda f: model_file(f, about={"certificate": {"x": 1}}), "not a whole model file"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), rows(MODELS))
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_models(make, words, tmp_path, capsys, finished):
    path = make(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copy(path, run / "model.npz")
    before = listing(tmp_path)
    refused(DataError, words, lambda: HERTA.load(path))
    assert main(["predict", str(run), str(finished.parent / "data.npz"), "--quiet"]) == 1
    check_text(capsys.readouterr().err, words)
    assert listing(tmp_path) == before


CONFIGS: list[tuple[str, Any, str]] = [
    ("{}", "{}", "has no entry dataset"),
    ("[]", "[]", "it is a list"),
    ("[1]", "[1]", "it is a list"),
    ("a number", "7", "it is a int"),
    ("empty", "", "is damaged"),
    ("cut", '{"dataset": "di', "is damaged"),
    ("a web page", HTML.decode(), "is damaged"),
    ("no text", b"\xff\xfe\x00", "is damaged"),
    ("dataset", {"dataset": 3}, "its entry dataset is 3"),
    ("split", {"split": []}, "its entry split is []"),
    ("normalize", {"normalize": "max"}, "normalize must be one of"),
    ("params", {"params": None}, "its entry params is None"),
    ("params of others", {"params": {"depth": 3}}, "no parameter 'depth'"),
    ("a wrong type", {"params": {"lam": "big"}}, "lam must be a number"),
    ("a wrong value", {"params": {"lam": -1}}, "lam must be a positive number"),
    ("environment", {"environment": []}, "its entry environment is []"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), rows(CONFIGS))
def test_configs(content, words, tmp_path, capsys, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if isinstance(content, dict):
        with_config(run, **content)
    else:
        (run / "config.json").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    before = listing(run)
    refused(DataError, words, lambda: read_config(run))
    for argv in (["predict", str(run), "digits"], ["train", "--resume", str(run)]):
        assert main([*argv, "--quiet"]) == 1
        check_text(capsys.readouterr().err, words)
    assert listing(run) == before


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"dataset": 3}', "nonsense"])
def test_a_damaged_result(content, tmp_path, capsys, finished):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "result.json").write_text(content)
    before = listing(run)
    assert main(["train", "--resume", str(run), "--quiet"]) == 1
    check_text(capsys.readouterr().err, "result.json is damaged")
    assert listing(run) == before


# ---- writing --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["model", "model.npz", "model.bin", "deep/er/model", ".hidden"])
def test_a_model_is_written_where_it_was_asked_for(name, tmp_path):
    path = tmp_path / name
    trained().save(path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert (HERTA.load(path).predict(G, X) == trained().predict(G, X)).all()
    trained().save(str(path))  # again, over itself
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("dtype", [np.float64, np.dtype("float64"), float, "float64", np.float32])
def test_any_way_to_name_a_precision_is_stored(dtype, tmp_path):
    model = HERTA(dtype=dtype, ridge=0.1).fit(G, X, Y)
    model.save(tmp_path / "m")
    again = HERTA.load(tmp_path / "m")
    assert again.dtype == np.dtype(dtype).name
    assert (again.transform(G, X) == model.transform(G, X)).all()


SAVES: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("not fitted", lambda f: HERTA().save(f / "m"), RuntimeError, "not fitted yet"),
    ("a folder", lambda f: trained().save(f), ValueError, "is a folder"),
    ("below a file", lambda f: trained().save(f / "file" / "m"), ValueError, "is a file"),
    ("empty", lambda f: trained().save(""), ValueError, "is a folder"),
    ("load nothing", lambda f: HERTA.load(f / "none"), FileNotFoundError, "no trained model"),
    ("load a folder", lambda f: HERTA.load(f), FileNotFoundError, "no trained model"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), rows(SAVES))
def test_saves(call, kind, words, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = listing(tmp_path)
    refused(kind, words, lambda: call(tmp_path))
    assert listing(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("name", ["p.npz", "p.csv", "new/folder/p.npz"])
def test_a_disk_that_is_full_while_predictions_are_written(name, tmp_path, finished):
    data = str(finished.parent / "data.npz")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
    code = f"import sys; {limit} from herta_gpu.app.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["predict", str(finished), data, "--to", str(tmp_path / name), "--quiet", "--overwrite"]
    (tmp_path / "p.npz").write_bytes(b"of before")
    before = listing(tmp_path)
    command = [sys.executable, "-B", "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    check_text(done.stderr, "File too large")
    assert listing(tmp_path) == before


def test_a_run_that_fails_half_way_can_be_gone_on_with(tmp_path, monkeypatch, capsys):
    record = Run.record
    monkeypatch.setattr(Run, "record", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    argv = ["train", str(npz(tmp_path)), "--out", str(tmp_path / "r"), "--quiet"]
    assert main(argv) == 1
    check_text(capsys.readouterr().err, "disk full")
    monkeypatch.setattr(Run, "record", record)
    assert main(["train", "--resume", str(tmp_path / "r"), "--quiet"]) == 0
