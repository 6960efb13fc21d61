"""Run folders: their files, their locks, their pages, and runs that go on after a kill."""

from __future__ import annotations

import base64
import html
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from herta_gpu import HERTA, diffusion
from herta_gpu.app.cli import main
from herta_gpu.app.report import write_report
from herta_gpu.app.results import FitResult
from herta_gpu.app.runs import Run
from herta_gpu.datasets import load
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.models import to_plain
from tests.conftest import users_environment
from tests.plumbing.killed_fits import killed_command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    code = main(["train", "digits", "--lam", "20", "--ridge", "0.01", "--loss", "ce",
                 "--optimizer", "lbfgs", "--quiet", "--out", str(folder)])  # fmt: skip
    assert code == 0
    return folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_repeats_from_its_config(run):
    config = json.loads((run / "config.json").read_text())
    data = load(config["dataset"]).with_split(config["split"]).normalized(config["normalize"])
    again = HERTA(**config["params"]).fit(data.graph, data.X, data.y, data.split["train"])
    stored = HERTA.load(run / "model.npz")
    assert (again.W_ == stored.W_).all()
    told = sorted(lines(run), key=lambda line: not line["warm"])  # Q may be solved for again
    for ours, theirs in zip(again.warm_history_ + again.history_, told, strict=True):
        assert ours["loss"] == theirs["loss"]
        assert to_plain(ours["certificate"], lossy=True) == theirs["certificate"]


def test_a_stored_model_predicts_the_same(run, tmp_path):
    data = load("digits")
    model = HERTA.load(run / "model.npz")
    Z = model.transform(data.graph, data.X)
    target = tmp_path / "p.csv"
    assert main(["predict", str(run), "digits", "--to", str(target), "--quiet"]) == 0
    assert target.read_text().splitlines()[0] == "node,prediction"
    table = np.loadtxt(target, delimiter=",", skiprows=1)
    assert (table[:, 1] == model.classes_[Z.argmax(axis=1)]).all()
    result = json.loads((run / "result.json").read_text())
    assert result["scores"]["test"] == model.score(data.graph, data.X, data.y, data.split["test"])
    assert result["certificate"]["value"] == model.certificate_.value


def hold(folder: str, ready, done) -> None:
    with Run.create(folder):
        ready.set()
        done.wait(30)


def test_two_processes_cannot_share_a_folder(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(str(tmp_path / "r"), ready, done))
    other.start()
    assert ready.wait(30)
    with (
        pytest.raises(RuntimeError, match="Another process is writing a run into"),
        Run.create(tmp_path / "r", overwrite=True),
    ):
        pass
    os.kill(other.pid, signal.SIGKILL)  # it cannot clean up, but the lock must be free
    other.join(30)
    with Run.create(tmp_path / "r") as mine:
        mine.record({"step": 0, "loss": float("inf")})
    assert lines(tmp_path / "r") == [{"step": 0, "loss": None}]


def test_steps_are_on_disk_while_training_runs(tmp_path):
    data = load("digits")
    seen = []
    with Run.create(tmp_path / "r") as mine:

        def watch(step: dict) -> None:
            mine.record(step)
            seen.append(len(lines(tmp_path / "r")))

        HERTA(lam=5.0).fit(data.graph, data.X, data.y, data.split["train"], callback=watch)
    assert seen == list(range(1, len(seen) + 1))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    with Run.create(tmp_path / "r") as mine:
        mine.write_json("a.json", {"old": 1})
        monkeypatch.setattr(json, "dumps", lambda *args, **how: "new \ud800")
        with pytest.raises(UnicodeEncodeError):
            mine.write_json("a.json", {})
        assert sorted(p.name for p in mine.folder.iterdir()) == [".lock", "a.json"]
        assert json.loads((mine.folder / "a.json").read_text()) == {"old": 1}


def test_the_picture_and_the_page(run):
    pytest.importorskip("matplotlib")
    page = (run / "report.html").read_text()
    png = base64.b64decode(page.partition('src="data:image/png;base64,')[2].partition('"')[0])
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(png))
    assert image.shape[0] > 200
    assert image[..., :3].std() > 0.02  # not blank
    assert "http://" not in page
    assert "https://" not in page  # nothing to load


BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), ""
)


@pytest.mark.skipif(not BROWSER, reason="no chromium to open the page with")
def test_the_page_is_drawn_as_it_is_meant_by_a_browser(run, tmp_path):
    """The picture is there, nothing sticks out of a wide or a narrow page, and colours differ."""
    pytest.importorskip("matplotlib")
    probe = """<script>addEventListener("load", () => {
      const picture = document.querySelector("img"), whole = document.querySelector(".lane");
      const lane = [...whole.children], wide = part => part.getBoundingClientRect().width;
      document.body.dataset.seen = JSON.stringify({
        picture: picture.complete && picture.naturalWidth > 600,
        inside: document.documentElement.scrollWidth <= innerWidth,
        full: lane.reduce((sum, part) => sum + wide(part), 0) > 0.97 * wide(whole),
        colours: lane.length > 1 && new Set(lane.map(p => p.style.background)).size == lane.length,
        tiles: document.querySelectorAll(".tile").length == 6,
      });
    });</script>"""
    page = tmp_path / "page.html"
    page.write_text((run / "report.html").read_text().replace("</body>", f"{probe}</body>"))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --virtual-time-budget=2000 --dump-dom"
    for width in (1200, 500):
        own = [f"--user-data-dir={tmp_path / str(width)}", f"--window-size={width},900"]
        argv = [BROWSER, *flags.split(), *own, page.as_uri()]
        dom = subprocess.run(argv, capture_output=True, text=True, timeout=120).stdout
        seen = json.loads(html.unescape(dom.split('data-seen="')[1].split('"')[0]))
        assert all(seen.values()), (width, seen)


def test_a_name_cannot_write_into_the_page(tmp_path):
    """A parser of HTML sees the same tags as in the page of a harmless name."""
    data, tags = load("digits"), []
    model = HERTA(ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    for name in ("harmless", "<img src=x onerror=\"document.title='taken'\"> & </title>"):
        result = FitResult.from_fit(model, replace(data, name=name))
        result = replace(result, note=name, metric=name, seconds={name: 1.0})
        write_report(model, result, tmp_path / "page.html", repeat=name)
        parser, seen = HTMLParser(), []
        parser.handle_starttag = lambda tag, attrs, seen=seen: seen.append((tag, len(attrs)))
        parser.feed((tmp_path / "page.html").read_text())
        tags.append(seen)
    assert tags[0] == tags[1]


def test_a_run_without_matplotlib_still_has_its_page(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from herta_gpu.app.cli import main;"
        "argv = ['train', 'digits', '--strategy', 'herta', '--loss', 'ce', '--quiet', '--out'];"
        f"sys.exit(main([*argv, {str(tmp_path / 'r')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0
    assert 'pip install "herta_gpu[plot]"' in done.stderr
    assert (tmp_path / "r" / "report.html").is_file()
    assert "data:image" not in (tmp_path / "r" / "report.html").read_text()


# ---- resume ---------------------------------------------------------------------------------
SLOW = [
    "train", "synthetic:n=400,m=2000,d=12,c=3", "--lam", "20", "--loss", "ce", "--optimizer",
    "lbfgs", "--ridge", "1e-2", "--strategy", "herta", "--quiet",
]  # fmt: skip


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    assert main([*SLOW, "--out", str(tmp_path / "whole")]) == 0
    whole = [{**entry, "seconds": 0} for entry in lines(tmp_path / "whole")]
    W = HERTA.load(tmp_path / "whole" / "model.npz").W_
    for step in (0, len(whole) // 2):
        folder = tmp_path / f"killed-{step}"
        killed_command([*SLOW, "--out", str(folder)], step)
        assert not (folder / "result.json").exists()
        assert len(lines(folder)) == step + 1
        assert main(["train", "--resume", str(folder), "--quiet"]) == 0
        assert (HERTA.load(folder / "model.npz").W_ == W).all()
        assert [{**entry, "seconds": 0} for entry in lines(folder)] == whole
        assert not (folder / "checkpoint").exists()


def test_a_run_that_was_killed_while_it_wrote_its_config_leaves_nothing(tmp_path):
    mine = (".config.json.ab12.json", ".of.mine.txt")
    for name in mine:
        (tmp_path / name).write_text("{")
    assert main(["train", "digits", "--quiet", "--ridge", "0.1", "--out", str(tmp_path)]) == 0
    hidden = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert hidden == {".lock", ".of.mine.txt"}


KILLS = int(os.environ.get("HERTA_KILLS", "1"))  # runs that are killed; 20 are the long version


def test_kill_9_at_random_moments_loses_nothing(tmp_path):
    """The kill comes from outside, while the run imports, loads, builds Q, trains or writes."""
    command = [sys.executable, "-m", "herta_gpu"]
    task = [*SLOW[:1], "synthetic:n=5000,m=25000,d=64,c=4", *SLOW[2:], "--tol", "1e-9"]
    task += ["--max-iter", "60"]
    start = time.perf_counter()
    whole_run = [*command, *task, "--out", str(tmp_path / "whole")]
    env = users_environment()
    subprocess.run(whole_run, check=True, timeout=300, stdout=subprocess.DEVNULL, env=env)
    whole = time.perf_counter() - start
    W = HERTA.load(tmp_path / "whole" / "model.npz").W_
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    reached = []
    for i in range(KILLS):
        folder, kills = tmp_path / f"killed-{i}", 0
        argv = [*task, "--out", str(folder)]
        while not (folder / "result.json").exists():
            assert kills < 50
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with subprocess.Popen([*command, *argv], **quiet, env=env) as process:
                try:
                    # Longer each time: a machine that has become busy must get to the end, too.
                    process.wait(rng.uniform(0.1, 1.1 if kills else 0.8) * whole * 1.1**kills)
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
            begun = (folder / "config.json").exists()
            argv = ["train", "--resume", str(folder), "--quiet"] if begun else argv
        steps = [entry["step"] for entry in lines(folder)]
        assert steps == list(range(len(steps)))
        assert (HERTA.load(folder / "model.npz").W_ == W).all()
        assert not [p for p in folder.iterdir() if p.name.startswith(".") and p.name != ".lock"]
        reached.append(kills)
    print("kills per run:", reached)


def test_resume_reads_blocks_of_Q_instead_of_solving(tmp_path, monkeypatch):
    data = load("synthetic:n=600,m=3000,d=200,c=3")
    arguments = (data.graph, data.X, data.y, data.split["train"])
    model = HERTA(lam=5.0, ridge=0.1, strategy="herta")
    W = model.fit(*arguments).W_
    solves = []
    original = diffusion.chebyshev

    def counted(H, B, degree, *more):
        solves.append(B.shape[1])
        if len(solves) == 3:
            raise KeyboardInterrupt
        return original(H, B, degree, *more)

    monkeypatch.setattr(diffusion, "chebyshev", counted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*arguments, checkpoint=Checkpoint(tmp_path, worth=0.0))
    assert len(list(tmp_path.glob("*-columns-*.npz"))) == 2
    again = model.fit(*arguments, checkpoint=Checkpoint(tmp_path, worth=0.0))
    assert (again.W_ == W).all()
    assert sum(solves) == 200 + solves[2]  # the interrupted block was solved twice
    assert not list(tmp_path.glob("*-columns-*.npz"))  # Q is complete


def test_a_damaged_checkpoint_is_made_again(tmp_path):
    data = load("digits")
    arguments = (data.graph, data.X, data.y, data.split["train"])
    model = HERTA(lam=5.0, ridge=0.1, strategy="herta")
    W = model.fit(*arguments, checkpoint=Checkpoint(tmp_path, worth=0.0)).W_
    stored = list(tmp_path.glob("Q*.npz"))
    assert stored
    for path in stored:
        path.write_bytes(path.read_bytes()[:100])
    assert (model.fit(*arguments, checkpoint=Checkpoint(tmp_path)).W_ == W).all()


def test_what_needs_no_resuming_or_cannot_be(run, tmp_path, capsys):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert main(["train", "--resume", str(run), "--json"]) == 0  # a finished run: its result
    assert json.loads(capsys.readouterr().out) == json.loads(before["result.json"])
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before
    assert main(["train", "--resume", str(tmp_path), "--quiet"]) == 1
    assert "is no run" in capsys.readouterr().err
    for argv in (["train", "--resume", "r", "--lam", "3"], ["train", "digits", "--resume", "r"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
        assert "leave out" in capsys.readouterr().err
