"""The report: one page about a fitted model, with a picture of its convergence inside."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herta_gpu.app.page import Page
from herta_gpu.app.pictures import draw_convergence, draw_path
from herta_gpu.app.results import Candidate, FitResult, candidate_rows
from herta_gpu.app.runs import check_new_file, environment
from herta_gpu.app.text import NOTHING, Rows, bytes_text, counted
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import new_file


def report(
    model: HERTA,
    data: Dataset,
    path: str | Path,
    *,
    result: FitResult | None = None,
    candidates: Sequence[Candidate] | None = None,
    picture: str | Path | None = None,
    repeat: str = "",
    overwrite: bool = False,
) -> FitResult:
    """Write a page about a fitted model into the file `path`, and return what it says.

    The page is one HTML file with nothing to load.  Where matplotlib is installed, it holds a
    picture of the convergence.

    Parameters
    ----------
    model : HERTA
        A fitted model.
    data : Dataset
        What it was fitted on; its scores are those on the parts of `data.split`.
    path : path
        The file to write, for example "report.html".
    result : FitResult, optional
        That of `FitResult.from_fit` where it is known; by default the model is evaluated here.
    candidates : list of Candidate, optional
        What the model was chosen from, for a table.
    picture : path, optional
        A file that gets the picture as well.
    repeat : str
        A sentence for the foot of the page: how to repeat the fit.
    overwrite : bool
        Replace files that exist; by default they are an error.

    Examples
    --------
    >>> import tempfile
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.app.report import report
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> model = HERTA(lam=20.0, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    >>> path = tempfile.mkdtemp() + "/report.html"
    >>> result = report(model, data, path)
    >>> result.status, result.scores["test"] > 0.9
    ('certified', True)
    >>> "HERTA on digits" in open(path).read()
    True
    """
    for target in (path, picture) if picture is not None else (path,):
        check_new_file(target, overwrite)
    result = FitResult.from_fit(model, data) if result is None else result
    write_report(model, result, path, candidates, picture, repeat)
    return result


def write_report(
    model: HERTA,
    result: FitResult,
    path: str | Path,
    candidates: Sequence[Candidate] | None = None,
    picture: str | Path | None = None,
    repeat: str = "",
) -> None:
    """Write the page, and the picture beside it, over what may be there."""
    drawn = _convergence(model)
    if picture is not None and drawn is not None:
        _write(Path(picture), drawn)
    path_drawn = None if candidates is None else _path(candidates, result.metric)
    page = fit_page(model, result, drawn, candidates, repeat, path_drawn)
    _write(Path(path), page.html().encode("utf-8"))


def fit_page(
    model: HERTA,
    result: FitResult,
    picture: bytes | None = None,
    candidates: Sequence[Candidate] | None = None,
    repeat: str = "",
    path: bytes | None = None,
) -> Page:
    """The page about a fitted model and its result."""
    history = model.warm_history_ + model.history_
    memory = [(k, bytes_text(v)) for k, v in model.plan_.memory.items()]
    sections: list[tuple[str, Rows]] = [
        ("Result", [("", ""), *result.rows()]),
        ("Plan", [("", "decision", "why"), *model.plan_.decisions, *model.changes_]),
        ("Memory planned", [("for", "size"), *memory]),
        ("Steps", _step_rows(history)),
        ("Parameters", [("name", "value"), *((k, str(v)) for k, v in model.get_params().items())]),
    ]
    if candidates is not None:
        sections.insert(1, ("Candidates", candidate_rows(candidates, result.metric)))
    return Page(
        title=f"HERTA on {result.dataset}",
        lead=f"{result.size_text}; {result.model_text}",
        tiles=_tiles(result),
        seconds=result.seconds,
        sections=sections,
        picture=picture,
        path=path,
        ranks=result.ranks,
        note=result.note,
        foot=_foot(result, repeat),
    )


def _convergence(model: HERTA) -> bytes | None:
    """The picture, or None with a line on standard error where matplotlib is missing."""
    history = model.warm_history_ + model.history_
    try:
        return draw_convergence(history, model.tol, model.certificate_.gap)
    except ImportError as error:
        print(error, file=sys.stderr)
        return None


def _size(c: Candidate) -> tuple[int, float]:
    """One lam before several, small ones before large ones."""
    return (len(c.lam), sum(c.lam)) if isinstance(c.lam, tuple) else (1, c.lam)


def _path(candidates: Sequence[Candidate], metric: str) -> bytes | None:
    """What every ridge gave, for each lam and kind of model; None where matplotlib is missing."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    by_loo = any(c.loo is not None for c in candidates)
    for c in sorted(candidates, key=_size):
        if c.smooth is not None:
            continue  # after the best of the others only: no path
        panel = c.loss + ", intercept" * c.fit_intercept + ", labels" * (c.label_features > 0)
        score = c.loo if by_loo else c.valid
        if score is not None and not math.isnan(score):
            curves.setdefault(panel, {}).setdefault(c.lam_text, []).append((c.ridge, score))
    name = f"leave-one-out {metric}" if by_loo else f"valid {metric}"
    try:
        return draw_path(curves, name) if curves else None
    except ImportError:
        return None  # said once, with the other picture


def _tiles(result: FitResult) -> list[tuple[str, str]]:
    """The numbers in large type, each with its name."""
    gap, over = result.certificate.value, result.certificate.over
    return [
        *((f"{part} {result.metric}", f"{score:.3f}") for part, score in result.scores.items()),
        (f"certified relative gap{over}", f"{gap:.1e}" if gap < math.inf else "none"),
        (f"outer step{'s' * (result.steps != 1)}", str(result.steps)),
        ("total", f"{result.total_seconds:.1f} s"),
    ]


def _step_rows(history: list[dict[str, Any]]) -> Rows:
    head = ("step", "loss", "gradient norm", "certified gap", "inner iterations", "seconds")
    return [head] + [
        (f"{'warm ' * h['warm']}{h['step']}", f"{h['loss']:.8g}", f"{h['grad_norm']:.2e}",
         f"{h['certificate']:.2e}" if h["certificate"] < math.inf else NOTHING,
         str(h["inner_iterations"]), f"{h['seconds']:.3f}")
        for h in history
    ]  # fmt: skip


def _foot(result: FitResult, repeat: str) -> str:
    about = environment()
    made = (
        f"Made by herta_gpu {about['herta_gpu']} with Python {about['python']}, NumPy "
        f"{about['numpy']} and SciPy {about['scipy']}; {result.dtype} on {result.device}, "
        f"{counted(int(about['threads']), 'thread')}"
        + (f" on each of {len(result.ranks)} ranks." if result.ranks else ".")
    )
    return f"{made} {repeat}".rstrip()


def _write(path: Path, content: bytes) -> None:
    """The file appears whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_bytes(content)
