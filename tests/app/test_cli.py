"""The command line as a user meets it: results, exit codes, one sentence per mistake."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.arguments import parser
from herta_gpu.app.cli import main
from herta_gpu.app.metrics import accuracy, rocauc
from herta_gpu.app.runs import Run, read_config
from herta_gpu.app.train import fit, make_model
from herta_gpu.backends.base import Backend
from herta_gpu.datasets import load, sizes
from herta_gpu.plumbing.partition import rows_moved
from herta_gpu.plumbing.progress import Stages
from tests.conftest import ROOT

SHARED = os.environ.get("HERTA_DATA", "")
LARGE = "synthetic:n=3000,m=20000,d=8,c=3"  # enough for compiled kernels
needs_shared = pytest.mark.skipif(
    not (SHARED and Path(SHARED, "cora.npz").is_file()), reason="HERTA_DATA has no cora.npz"
)


def run(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- train and predict ----------------------------------------------------------------------
def test_train_is_the_estimator(capsys):
    answer = run(capsys, "train", "digits", "--lam", "20", "--ridge", "0.1", "--seed", "3")
    data = load("digits")
    model = HERTA(lam=20.0, ridge=0.1, random_state=3)
    model.fit(data.graph, data.X, data.y, data.split["train"])
    assert answer["status"] == "certified"
    assert answer["loss"] == model.history_[-1]["loss"]
    for part, ids in data.split.items():
        assert answer["scores"][part] == model.score(data.graph, data.X, data.y, ids)


def test_a_fit_that_ends_early_has_an_exit_code_of_its_own(capsys):
    early = ("train", "digits", "--lam", "5", "--ridge", "1e-4", "--loss", "ce", "--quiet")
    early += ("--optimizer", "gd", "--strategy", "herta", "--max-iter", "1")
    assert main(early) == 3
    said = capsys.readouterr()
    assert "max_iter after 1 outer step" in said.out
    assert "\nnext: a larger --ridge" in said.out
    assert said.err == ""  # the result says it, no warning
    assert main([*early, "--allow-uncertified"]) == 0


@needs_shared
def test_training_without_options_is_certified_and_says_what_to_do_next(capsys):
    assert main(["train", "cora", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "certified after" in said
    assert "next: herta tune cora" in said
    assert main(["train", "cora", "--lam", "10", "--quiet"]) == 0
    assert "next:" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "plan", "compare", "profile"])
def test_every_parameter_of_the_estimator_is_an_option(command):
    args = parser().parse_args([command, "digits"])
    told = set(vars(args)) | {"verbose"}  # `verbose` is the absence of --quiet
    assert set(HERTA().get_params()) <= told
    args.verbose = False
    assert make_model(args).get_params() == HERTA(ridge=0.01).get_params()
    alpha = parser().parse_args([command, "digits", "--alpha", "0.1"]).alpha
    assert alpha == 0.1


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("no", False), ("auto", "auto")])
def test_the_order_of_the_nodes_can_be_chosen(word, value, capsys):
    args = parser().parse_args(["train", "digits", "--reorder", word])
    args.verbose = False
    assert repr(make_model(args).reorder) == repr(value)
    assert main(["train", "digits", "--reorder", "rcm", "--quiet"]) == 2
    assert "reorder must be one of" in capsys.readouterr().err


def test_every_option_reaches_the_model(capsys):
    answer = run(
        capsys, "train", "digits", "--loss", "ce", "--optimizer", "lbfgs", "--dtype", "float64",
        "--strategy", "herta", "--sketch", "no", "--sparsify", "2000", "--split", "random:0.5",
        "--normalize", "standard", "--ridge", "1", "--tol", "1e-3", "--memory-budget", "1GB",
    )  # fmt: skip
    assert (answer["strategy"], answer["dtype"], answer["features"]) == ("herta", "float64", 65)
    assert answer["normalize"] == "standard"
    assert answer["certificate"]["value"] <= 1e-3


def test_the_table_is_for_people(capsys):
    assert main(["train", "digits", "--ridge", "0.1"]) == 0
    shown = capsys.readouterr()
    for word in ("certificate", "relative gap <=", "test accuracy", "peak memory", "seconds"):
        assert word in shown.out
    assert "certified gap" in shown.err  # the line with the bar


@needs_shared
@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed", "amazon-photo"])
def test_train_on_the_shared_data(capsys, name):
    answer = run(capsys, "train", name, "--data-dir", SHARED, "--lam", "10", "--ridge", "0.01")
    assert answer["status"] == "certified"
    least = {"cora": 0.79, "citeseer": 0.70, "pubmed": 0.77, "amazon-photo": 0.85}
    assert answer["scores"]["test"] > least[name]


# ---- plan, info, compare, profile -----------------------------------------------------------
def test_plan_needs_no_data(capsys):
    answer = run(capsys, "plan", "synthetic:papers100M", "--memory-budget", "64GB")
    assert answer["n"] == 111_059_956
    assert answer["fits"] is True
    assert answer["memory_bytes"]["graph"] > 4 * 2 * 1_615_685_872
    assert sizes("synthetic:papers100M").m == answer["m"]


def test_plan_for_ranks_counts_the_cut_of_a_graph_that_is_there(capsys, tmp_path):
    there = run(capsys, "plan", "digits", "--ranks", "4")
    assert there["cut"] == rows_moved(load("digits").graph, 4, "blocks")
    assert {s["split"] for s in there["splits"]} == {"columns", "nodes"}
    assert there["split"] in there["why"] or "fit" in there["why"]
    made = run(capsys, "plan", "synthetic:papers100M", "--ranks", "8", "--device-memory", "80GB")
    assert made["cut"] is None
    assert main(["plan", "digits", "--ranks", "4"]) == 0
    told = capsys.readouterr().out
    assert "chosen: " in told
    assert "n rows go from rank to rank in a product by blocks, counted" in told
    np.save(tmp_path / "owners.npy", np.zeros(1797, dtype=int))
    alone = run(capsys, "plan", "digits", "--ranks", "4", "--partition", f"{tmp_path}/owners.npy")
    assert alone["cut"] == 0


def test_in_one_process_nothing_is_split(capsys):
    argv = ["train", "digits", "--lam", "1", "--ridge", "0.1"]
    assert main([*argv, "--split", "nodes", "--split", "random:0.5"]) == 0
    said = capsys.readouterr()
    assert "There is one process: nothing is split." in said.err
    assert "ranks " not in said.out
    args = parser().parse_args(["train", "digits", "--split", "columns"])
    assert (args.split, args.ranks_split, args.partition) == (None, "columns", "blocks")
    args = parser().parse_args(["tune", "digits", "--split", "nodes"])  # that of the data: wrong
    assert args.split == "nodes"


def test_neighbours_stay_on_disk_where_they_would_displace_columns(capsys):
    name = "synthetic:papers100M"
    small = run(capsys, "plan", name, "--memory-budget", "14GB", "--device", "cpu")
    told = {what: choice for what, choice, _ in small["decisions"]}
    assert small["fits"] is True
    assert told["neighbours"] == "read again for each product"
    assert int(told["columns at once"]) >= 8
    held = run(capsys, "plan", name, "--memory-budget", "64GB", "--device", "cpu")
    assert "neighbours" not in {what for what, *_ in held["decisions"]}
    card = run(capsys, "plan", name, "--device-memory", "80GB")
    assert "neighbours" not in {what for what, *_ in card["decisions"]}
    assert card["memory_bytes"]["graph"] > 4 * 2 * 1_615_685_872
    tiny = run(capsys, "plan", name, "--memory-budget", "2GB", "--device", "cpu")
    assert tiny["fits"] is False


def test_plan_loads_nothing_that_is_slow_to_import():
    code = (
        "import sys; from herta_gpu.app.cli import main; main(['plan', 'synthetic:papers100M']);"
        "slow = {'scipy.stats', 'scipy.optimize', 'matplotlib', 'torch', 'ogb'} & set(sys.modules);"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_compiling_is_a_stage_of_its_own(tmp_path):
    pytest.importorskip("numba", reason="without numba nothing is compiled")
    argv = [sys.executable, "-m", "herta_gpu", "train", LARGE, "--lam", "1"]
    told = []
    for _ in range(2):
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "HERTA_FAST": "1"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        told.append(done.stderr)
        found = re.search(r"train (\d+\.\d+)", done.stdout)  # less than 5 ms is not told
        assert found is None or float(found[1]) < 2
    first, second = told
    assert first.count("compiling kernels, once on this machine ...") >= 1
    assert float(re.search(r"compile +(\d+\.\d+) s", first)[1]) > 0.1
    assert "compil" not in second


def test_plan_is_what_train_does(capsys):
    name = "synthetic:n=2000,m=9000,d=16,c=4"
    answer = run(capsys, "plan", name, "--lam", "20", "--memory-budget", "1GB")
    data = load(name)
    model = HERTA(lam=20.0, memory_budget="1GB")
    model.fit(data.graph, data.X, data.y, data.split["train"])
    assert answer["strategy"] == model.plan_.strategy
    del answer["memory_bytes"]["X itself (can stay on disk when dense)"]
    assert answer["memory_bytes"] == model.plan_.memory


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux counts it")
@pytest.mark.parametrize("shape", ["n=150000,m=300000,d=64,c=4", "n=150000,m=300000,d=8,c=48"])
def test_the_planned_peak_is_what_a_process_takes(capsys, shape):
    """The peak is decided by Q for the first shape, by the outputs for the second."""
    name = f"synthetic:{shape}"
    planned = run(capsys, "plan", name)["expected_peak_bytes"]
    train = [sys.executable, "-m", "herta_gpu", "train", "--json"]
    # A first run may compile the CPU kernels, which takes memory of its own.
    for _ in range(2):
        done = subprocess.run([*train, name], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    assert abs(planned / measured - 1) < 0.2, (planned, measured)


def test_info_names_what_is_missing(capsys):
    answer = run(capsys, "info")
    assert answer["versions"]["numpy"] == np.__version__
    assert "digits" in answer["datasets"]
    assert set(answer["devices"]) == {"cpu", "cuda"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for package, about in answer["packages"].items():
        extra = re.fullmatch(r'pip install "herta_gpu\[(.*)\]"', about["install"])[1]
        name = {"sklearn": "scikit-learn"}.get(package, package)
        assert any(name in needed for needed in extras[extra]), package
        assert about["gives"]


def test_without_numba_the_result_and_its_page_say_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("herta_gpu.app.results.find_spec", lambda name: None)
    told = "without numba a fit takes several times as long"
    out = str(tmp_path / "run")
    assert main(["train", LARGE, "--quiet", "--out", out]) == 0
    assert told in capsys.readouterr().out
    assert told in Path(out, "report.html").read_text()
    assert main(["train", "digits", "--quiet"]) == 0  # so small that SciPy is taken anyway
    assert told not in capsys.readouterr().out


def test_profile_writes_a_trace_that_adds_up(capsys, tmp_path, monkeypatch):
    calls = []

    @contextlib.contextmanager
    def profiled(self):
        calls.append("start")
        yield
        calls.append("stop")

    monkeypatch.setattr(Backend, "profiled", profiled)
    path = tmp_path / "t.json"
    argv = ["profile", "digits", "--ridge", "0.1", "--split", "random:0.5", "--out", str(path)]
    answer = run(capsys, *argv)
    assert calls == ["start", "stop"]
    events = json.loads(path.read_text())["traceEvents"]
    stages = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [e["name"] for e in stages] == list(answer["seconds"])
    total = sum(answer["seconds"].values())
    assert stages[-1]["ts"] + stages[-1]["dur"] == pytest.approx(1e6 * total, abs=5)
    assert "--capture-range=cudaProfilerApi" in answer["nsys"]
    for command in (answer["nsys"], answer["ncu"]):  # all that the user said is said again
        words = shlex.split(command)
        assert words[words.index("herta_gpu") + 1 :] == [*argv, "--json"]
    assert answer["kernels"] == {}  # the CPU has none


# ---- mistakes -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["train"], ["train", "digits", "--loss", "x"],
             ["tune", "digits", "--lam", "a,b"], ["compare", "digits", "--devices", "tpu"],
             ["train", "digits", "--lam", "1", "--alpha", "0.5"]],
)  # fmt: skip
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: herta" in capsys.readouterr().err


def test_ctrl_c_names_the_command_that_goes_on(capsys, tmp_path, monkeypatch):
    def stopped(self, step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "record", stopped)
        assert main(["train", "digits", "--quiet", "--out", str(tmp_path / "r")]) == 130
    said = f"herta: Interrupted: herta train --resume {tmp_path / 'r'} goes on.\n"
    assert capsys.readouterr().err == said
    assert main(["train", "digits", "--quiet", "--out", str(tmp_path / "r")]) == 2
    assert f"--resume {tmp_path / 'r'}" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "r"), "digits", "--quiet"]) == 1
    assert "is not finished: herta train --resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "r"), "--quiet"]) == 0
    assert main(["train", "--resume", str(tmp_path / "r")]) == 0
    assert "is finished: this is its result" in capsys.readouterr().err


def test_a_run_is_resumed_from_any_folder(tmp_path, monkeypatch, capsys):
    def full(self, step):
        raise OSError("no space left on device")

    data, record = load("digits"), Run.record
    u, v, _ = data.graph.edges()
    arrays = {"edge_index": np.stack([u, v]), "num_nodes": 1797, "features": data.X}
    np.savez(tmp_path / "d.npz", labels=data.y, **arrays, **data.split)
    (tmp_path / "elsewhere").mkdir()
    for i, argv in enumerate((["d.npz"], ["d", "--data-dir", "."])):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Run, "record", full)
        assert main(["train", *argv, "--quiet", "--out", f"r{i}"]) == 1
        monkeypatch.setattr(Run, "record", record)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert main(["train", "--resume", f"../r{i}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["nodes"] == 1797
        assert read_config(f"../r{i}")["params"]["lam"] == 1.0


def test_the_help_tells_the_defaults_of_the_estimator(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("lam", "ridge", "tol"):
        assert f"default {HERTA().get_params()[name]:g}" in shown
    assert f"default {HERTA().max_iter}" in shown


def test_debug_shows_the_traceback_and_json_the_error(capsys):
    with pytest.raises(ValueError, match="did you mean"):
        main(["train", "digitz", "--debug"])
    assert main(["train", "digitz", "--json"]) == 2
    assert "did you mean" in json.loads(capsys.readouterr().out)["error"]


def test_python_m_herta_gpu():
    command = [sys.executable, "-m", "herta_gpu"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in ("train", "tune", "predict", "compare", "plan"))
    wrong = subprocess.run(
        [*command, "train", "digitz"], capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2
    last = wrong.stderr.splitlines()[-1]
    assert last == "herta: There is no dataset 'digitz': did you mean digits?"


# ---- metrics --------------------------------------------------------------------------------
def test_metrics_are_those_of_scikit_learn():
    score = pytest.importorskip("sklearn.metrics").roc_auc_score
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (200, 6))
    y[:, 4] = 1  # a task with one class only does not count
    scores = np.round(rng.random((200, 6)), 1)  # with ties
    truth = np.mean([score(y[:, j], scores[:, j]) for j in (0, 1, 2, 3, 5)])
    assert rocauc(y, scores) == pytest.approx(truth, abs=1e-12)
    assert accuracy(np.array([0, 1, -1]), np.array([0, 0, 2])) == 0.5


def test_several_tasks_train_with_mse_and_rocauc():
    data = load("digits")
    tasks = np.eye(10, dtype=np.float32)[data.y]
    several = replace(data, y=tasks, metadata={"metric": "rocauc"})
    result = fit(HERTA(lam=20.0, ridge=0.1), several, Stages(), None)
    assert result.metric == "rocauc"
    assert result.scores["test"] > 0.97
    assert result.status == "certified"


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux counts it")
def test_peak_memory_is_not_that_of_whoever_started_the_process():
    ballast = np.ones(60_000_000)  # 480 MB here; ru_maxrss of a child would begin with it
    code = "from herta_gpu.app.results import peak_memory; print(peak_memory())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 20e6 < int(shown.stdout) < ballast.nbytes
