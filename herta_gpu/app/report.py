"""The report: one self-contained HTML page about a fitted model, with its pictures inside."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path

from herta_gpu.app.pictures import COLOURS, draw_convergence, draw_path
from herta_gpu.app.results import Candidate, FitResult, candidate_rows
from herta_gpu.app.runs import check_new_file, environment
from herta_gpu.app.text import NOTHING, Rows, bytes_text, count_text
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import new_file

_LONG = 20  # rows: a longer table opens on a click
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #e4e4e4;
       vertical-align: top; } td:first-child { white-space: nowrap; color: #555; }
th { color: #555; font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
.lead, footer { color: #555; margin-top: .2rem; } img { max-width: 100%; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .8rem;
       margin-top: 1.2rem; }
.tile { background: #f4f6f9; border-radius: 6px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; } .tile span { color: #555; }
.lane { display: flex; height: 1.8rem; width: 100%; border-radius: 4px; overflow: hidden; }
.lane div { height: 100%; } .key { margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; }
table.ranks { width: 100%; } td.bar { width: 60%; vertical-align: middle; }
td.bar .lane { height: 1.1rem; }
.note { background: #fff6dd; padding: .6rem .9rem; border-left: 4px solid #e0b030; }
summary { cursor: pointer; color: #1f5fa8; } footer { margin-top: 3rem; font-size: .85rem; }
"""


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
    for target in (path, picture):
        if target is not None:
            check_new_file(target, overwrite)
    result = result or FitResult.from_fit(model, data)
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
    history, gap = model.warm_history_ + model.history_, model.certificate_.gap
    drawn: dict[str, bytes | None] = {"convergence": None, "path": None}
    try:
        drawn["convergence"] = draw_convergence(history, model.tol, gap)
        drawn["path"] = _path(candidates or (), result.metric)
    except ImportError as error:
        print(error, file=sys.stderr)
    if picture is not None and drawn["convergence"] is not None:
        with new_file(Path(picture)) as temporary:
            temporary.write_bytes(drawn["convergence"])
    page = _page(model, result, drawn, candidates, repeat)
    with new_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _page(
    model: HERTA,
    result: FitResult,
    drawn: dict[str, bytes | None],
    candidates: Sequence[Candidate] | None,
    repeat: str,
) -> str:
    """The whole file; every text is escaped."""
    title, plan = escape(f"HERTA on {result.dataset}"), model.plan_
    parts = [f"<h1>{title}</h1>"]
    parts.append(f"<p class=lead>{escape(f'{result.size_text}; {result.model_text}')}</p>")
    if result.note:
        parts.append(f"<p class=note>{escape(result.note)}</p>")
    tiles = (f"<b>{escape(value)}</b><span>{escape(name)}</span>" for name, value in _tiles(result))
    parts.append(f"<div class=tiles>{''.join(f'<div class=tile>{t}</div>' for t in tiles)}</div>")
    about = "certified gap and loss against steps and seconds"
    parts.append(_image("Convergence", about, drawn["convergence"]))
    about = "score against ridge, a line for each lam"
    parts.append(_image("What was chosen from", about, drawn["path"]))
    parts.append("<h2>Where the time went</h2>" + _timeline(result.seconds))
    if result.ranks:
        parts.append("<h2>Time per rank</h2>" + _rank_bars(result.ranks))
    sizes = ((name, bytes_text(size)) for name, size in plan.memory.items())
    values = ((name, str(value)) for name, value in model.get_params().items())
    tables: dict[str, Rows | None] = {
        "Result": [("", ""), *result.rows()],
        "Candidates": None if candidates is None else candidate_rows(candidates, result.metric),
        "Plan": [("", "decision", "why"), *plan.decisions, *model.changes_],
        "Memory planned": [("for", "size"), *sizes],
        "Steps": _step_rows(model),
        "Parameters": [("name", "value"), *values],
    }
    parts += [_section(name, rows) for name, rows in tables.items() if rows is not None]
    parts.append(f"<footer>{escape(f'{_foot(result)} {repeat}'.rstrip())}</footer>")
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{title}</title><style>{_STYLE}</style>"
    body = "\n".join(filter(None, parts))
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>{body}</body></html>\n"


def _tiles(result: FitResult) -> list[tuple[str, str]]:
    """The numbers in large type, each with its name."""
    gap, over = result.certificate.value, result.certificate.over
    return [
        *((f"{part} {result.metric}", f"{score:.3f}") for part, score in result.scores.items()),
        (f"certified relative gap{over}", f"{gap:.1e}" if gap < math.inf else "none"),
        (f"outer step{'s' * (result.steps != 1)}", str(result.steps)),
        ("total", f"{result.total_seconds:.1f} s"),
    ]


def _path(candidates: Sequence[Candidate], metric: str) -> bytes | None:
    """A picture of what every ridge gave, for each lam and kind of model."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    by_loo = any(c.loo is not None for c in candidates)
    for c in sorted(candidates, key=lambda c: (len(c.lams), sum(c.lams))):
        score = c.loo if by_loo else c.valid
        if c.smooth is None and score is not None and not math.isnan(score):
            panel = c.loss + ", intercept" * c.fit_intercept + ", labels" * (c.label_features > 0)
            curves.setdefault(panel, {}).setdefault(c.lam_text, []).append((c.ridge, score))
    name = f"leave-one-out {metric}" if by_loo else f"valid {metric}"
    return draw_path(curves, name) if curves else None


def _step_rows(model: HERTA) -> Rows:
    rows = [("step", "loss", "gradient norm", "certified gap", "inner iterations", "seconds")]
    for h in model.warm_history_ + model.history_:
        gap = f"{h['certificate']:.2e}" if h["certificate"] < math.inf else NOTHING
        name, loss = f"{'warm ' * h['warm']}{h['step']}", f"{h['loss']:.8g}"
        work = (str(h["inner_iterations"]), f"{h['seconds']:.3f}")
        rows.append((name, loss, f"{h['grad_norm']:.2e}", gap, *work))
    return rows


def _foot(result: FitResult) -> str:
    about = environment()
    ranks = f" on each of {len(result.ranks)} ranks" if result.ranks else ""
    return (
        f"Made by herta_gpu {about['herta_gpu']} with Python {about['python']}, NumPy "
        f"{about['numpy']} and SciPy {about['scipy']}; {result.dtype} on {result.device}, "
        f"{count_text(int(about['threads']), 'thread')}{ranks}."
    )


# ---- pieces of HTML ---------------------------------------------------------------------------
def _image(title: str, about: str, png: bytes | None) -> str:
    if png is None:
        return ""
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    return f'<h2>{title}</h2><img alt="{about}" src="{source}">'


def _timeline(stages: dict[str, float]) -> str:
    total = sum(stages.values()) or 1.0
    stages = {name: s for name, s in stages.items() if s >= 0.002 * total}
    colours = dict(zip(stages, cycle(COLOURS)))
    keys = _keys({name: f"{name} {s:.2f} s" for name, s in stages.items()}, colours)
    return f"{_lane(stages, total, colours)}<p>{keys}</p>"


def _rank_bars(ranks: list[dict[str, float]]) -> str:
    """A bar for each process: what it worked, waited for others, and spent on messages."""
    longest = max(max(sum(seconds.values()) for seconds in ranks), 1e-9)
    colours = dict(zip(ranks[0], (COLOURS[0], COLOURS[-1], COLOURS[1])))
    rows = "<tr><th></th><th></th>" + "".join(f"<th class=n>{name}</th>" for name in ranks[0])
    for rank, seconds in enumerate(ranks):
        rows += f"</tr><tr><td>rank {rank}</td><td class=bar>{_lane(seconds, longest, colours)}"
        rows += "</td>" + "".join(f"<td class=n>{s:.2f} s</td>" for s in seconds.values())
    keys = _keys({name: name for name in ranks[0]}, colours)
    return f"<div class=wide><table class=ranks>{rows}</tr></table></div><p>{keys}</p>"


def _lane(seconds: dict[str, float], total: float, colours: dict[str, str]) -> str:
    """One bar, in which each part is as wide as its share of `total`."""
    parts = "".join(
        f"<div style='width:{100 * s / total:.3f}%;background:{colours[name]}' "
        f"title='{escape(name)} {s:.2f} s'></div>"
        for name, s in seconds.items()
    )
    return f"<div class=lane>{parts}</div>"


def _keys(texts: dict[str, str], colours: dict[str, str]) -> str:
    """What the colours of a bar stand for."""
    return " ".join(
        f"<span class=key><i style='background:{colours[name]}'></i>{escape(text)}</span>"
        for name, text in texts.items()
    )


def _section(title: str, rows: Rows) -> str:
    """A table with its title; columns of numbers are aligned to the right, long ones fold."""
    head, *body = rows
    numeric = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(head))]

    def line(cells: Sequence[str], tag: str) -> str:
        marks = (" class=n" if number else "" for number in numeric)
        cell = (f"<{tag}{mark}>{escape(c)}</{tag}>" for c, mark in zip(cells, marks))
        return f"<tr>{''.join(cell)}</tr>"

    top = line(head, "th") if any(head) else ""
    made = f"<div class=wide><table>{top}{''.join(line(row, 'td') for row in body)}</table></div>"
    if len(body) > _LONG:
        made = f"<details><summary>all {len(body):,} rows</summary>{made}</details>"
    return f"<h2>{title}</h2>{made}"


def _is_number(text: str) -> bool:
    return text == NOTHING or text.replace(",", "").partition(" ")[0].lstrip("-")[:1].isdigit()
