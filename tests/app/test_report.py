"""A report from Python: any fitted model has its page, without a run folder."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.app.cli import main
from herta_gpu.app.report import report, write_report
from herta_gpu.app.results import Candidate, FitResult
from herta_gpu.datasets import load


@pytest.fixture(scope="module")
def fitted():
    data = load("digits")
    model = HERTA(lam=20.0, ridge=0.01, loss="ce", optimizer="lbfgs")
    return model.fit(data.graph, data.X, data.y, data.split["train"]), data


def test_a_report_needs_no_run_folder(fitted, tmp_path):
    model, data = fitted
    result = report(model, data, tmp_path / "deep" / "mine.html")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["mine.html"]
    page = (tmp_path / "deep" / "mine.html").read_text()
    assert f"<h1>HERTA on {data.name}</h1>" in page
    for heading in ("Result", "Plan", "Memory planned", "Steps", "Parameters"):
        assert f"<h2>{heading}</h2>" in page
    assert "config.json" not in page  # this page belongs to no run
    assert result.scores["test"] == model.score(data.graph, data.X, data.y, data.split["test"])
    assert f"{result.scores['test']:.4f}" in page


def test_the_picture_is_inside(fitted, tmp_path):
    pytest.importorskip("matplotlib")
    model, data = fitted
    report(model, data, str(tmp_path / "r.html"))
    assert 'src="data:image/png;base64,' in (tmp_path / "r.html").read_text()


def test_the_page_of_a_run_is_that_of_python(fitted, tmp_path):
    """The page without times, memory, and the sentence that names the run's config.json."""
    model, data = fitted
    report(model, data, tmp_path / "mine.html")
    argv = ["train", "digits", "--lam", "20", "--ridge", "0.01", "--loss", "ce", "--optimizer",
            "lbfgs", "--quiet", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main(argv) == 0

    def steps(path):
        section = path.read_text().split("<h2>Steps</h2>")[1].split("<h2>")[0]
        return re.sub(r"<td class=n>\d+\.\d{3}</td></tr>", "", section)  # the last column: seconds

    run = tmp_path / "run" / "report.html"
    assert steps(tmp_path / "mine.html") == steps(run)
    assert "config.json beside this page" in run.read_text()


def test_classes_have_their_scores_and_a_confusion(fitted, tmp_path):
    """As scikit-learn counts them, on the test nodes."""
    metrics = pytest.importorskip("sklearn.metrics")
    model, data = fitted
    test = data.split["test"]
    result = report(model, data, tmp_path / "r.html")
    guess = model.predict(data.graph, data.X, test)
    theirs = metrics.confusion_matrix(data.y[test], guess)
    assert result.confusion["counts"] == theirs.tolist()
    page = (tmp_path / "r.html").read_text()
    row = page.partition("<h2>Classes (test)</h2>")[2].partition("<tr><td class=n>3</td>")[2]
    shown = [float(cell) for cell in re.findall(r"<td class=n>([\d.]+)", row)[:5]]
    wanted = [(data.y[test] == 3).sum(), (guess == 3).sum()]
    scores = (metrics.recall_score, metrics.precision_score, metrics.f1_score)
    wanted += [f(data.y[test], guess, labels=[3], average=None)[0] for f in scores]
    assert shown == pytest.approx(wanted, abs=5e-4)
    assert "<h2>Confusion (test)</h2>" in page


def test_the_plan_says_which_certificate_took_the_place_of_the_planned_one(tmp_path):
    data = load("digits")
    model = HERTA(lam=20.0, ridge=0.01).fit(data.graph, data.X, data.y, data.split["train"])
    kind, planned = model.certificate_.kind, model.plan_.certificate
    assert kind != planned
    report(model, data, tmp_path / "r.html")
    told = f"<td>{kind}</td><td>the smallest of the bounds at hand; {planned} was planned</td>"
    assert told in (tmp_path / "r.html").read_text()


def test_several_lam_have_a_picture_and_no_picture_is_of_one_point(tmp_path):
    pytest.importorskip("matplotlib")
    data = load("digits")
    model = HERTA(lam=[0, 1, 20], ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    one = [Candidate(1.0, 0.1, "mse", 0.9, 0.9), Candidate(5.0, 0.1, "mse", 0.9, 0.9)]
    write_report(model, FitResult.from_fit(model, data), tmp_path / "r.html", one)
    found = re.findall("<h2>(.*?)</h2><img", (tmp_path / "r.html").read_text())
    assert found == ["Blocks of features"]
    model = HERTA(hidden=8, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    result = report(model, data, tmp_path / "hidden.html")
    page = (tmp_path / "hidden.html").read_text()
    assert "<h2>Blocks of features</h2><img" in page
    assert ", hidden layer of 8" in result.model_text


def test_a_regression_has_its_report(tmp_path):
    data = load("digits")
    y = data.X @ np.arange(65.0)
    model = HERTA(lam=0.5, ridge=0.1).fit(data.graph, data.X, y, data.split["train"])
    result = report(model, replace(data, y=y), tmp_path / "r.html")
    assert result.metric == "r2"
    assert result.scores["test"] == pytest.approx(
        model.score(data.graph, data.X, y, data.split["test"]), abs=1e-6
    )


def test_what_cannot_be_written_is_told_first(fitted, tmp_path, monkeypatch):
    model, data = fitted
    monkeypatch.setattr(HERTA, "transform", lambda *args: pytest.fail("evaluated"))
    with pytest.raises(ValueError, match="is a folder"):
        report(model, data, tmp_path)
    with pytest.raises(RuntimeError, match="not fitted yet"):
        report(HERTA(), data, tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_the_time_of_each_rank_is_a_bar(fitted, tmp_path):
    model, data = fitted
    ranks = [{"work": 3.0, "waiting": 1.0, "messages": 0.0},
             {"work": 1.0, "waiting": 0.5, "messages": 0.5}]  # fmt: skip
    result = replace(FitResult.from_fit(model, data), ranks=ranks, ranks_split="nodes")
    write_report(model, result, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    bars = page.partition("<h2>Time per rank</h2>")[2].partition("</table>")[0]
    shares = [float(share) for share in re.findall(r"width:([0-9.]+)%", bars)]
    assert shares == [75.0, 25.0, 0.0, 25.0, 12.5, 12.5]  # of the longest: 4 s
    assert "2 by nodes: work 1.00 to 3.00 s" in page
    assert "on each of 2 ranks." in page
    report(model, data, tmp_path / "one.html")
    assert "Time per rank" not in (tmp_path / "one.html").read_text()
