"""The report: one self-contained HTML page about a fitted model, with its pictures inside.

Pictures are drawn by matplotlib, which is optional, as the bytes of PNG files.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Sequence
from html import escape
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

from herta_gpu.app.results import (
    NOTHING,
    Candidate,
    FitResult,
    Rows,
    bytes_text,
    candidate_rows,
    count_text,
    lams_text,
)
from herta_gpu.app.runs import check_new_file, environment
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import new_file

_LONG = 20  # rows: a longer table opens on a click
# Tableau's colours: every stage that a fit can have gets one of its own.
_COLOURS = "4e79a7 f28e2b e15759 76b7b2 59a14f edc948 b07aa1 ff9da7 9c755f bab0ac"
COLOURS = tuple(f"#{colour}" for colour in _COLOURS.split())
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
    images = {}
    try:
        images["Convergence"] = _draw_convergence(model)
        images["What was chosen from"] = _draw_path(candidates or (), result.metric)
    except ImportError as error:
        print(error, file=sys.stderr)
    drawn = images.get("Convergence")
    if picture is not None and drawn is not None:
        with new_file(Path(picture)) as temporary:
            temporary.write_bytes(drawn)
    with new_file(Path(path)) as temporary:
        temporary.write_text(_page(model, result, images, candidates, repeat), "utf-8")


_ABOUT = {
    "Convergence": "certified gap and loss against steps and seconds",
    "What was chosen from": "score against ridge, a line for each lam",
}


def _page(
    model: HERTA,
    result: FitResult,
    images: dict[str, bytes | None],
    candidates: Sequence[Candidate] | None,
    repeat: str,
) -> str:
    """The whole file; every text is escaped."""
    title, plan, proof = escape(f"HERTA on {result.dataset}"), model.plan_, result.certificate
    scores = ((f"{part} {result.metric}", f"{s:.3f}") for part, s in result.scores.items())
    tiles = [  # the numbers in large type, each with its name
        *scores,
        (f"certified relative gap{proof.over}", f"{proof.value:.1e}".replace("inf", "none")),
        (f"outer step{'s' * (result.steps != 1)}", str(result.steps)),
        ("total", f"{result.total_seconds:.1f} s"),
    ]
    shown = (f"<div class=tile><b>{escape(b)}</b><span>{escape(a)}</span></div>" for a, b in tiles)
    parts = [f"<h1>{title}</h1>"]
    parts.append(f"<p class=lead>{escape(f'{result.size_text}; {result.model_text}')}</p>")
    parts.append(f"<p class=note>{escape(result.note)}</p>" if result.note else "")
    parts.append(f"<div class=tiles>{''.join(shown)}</div>")
    for name, png in images.items():
        if png is not None:
            source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
            parts.append(f'<h2>{name}</h2><img alt="{_ABOUT[name]}" src="{source}">')
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
    about = environment()
    ranks = f" on each of {len(result.ranks)} ranks" if result.ranks else ""
    foot = (
        f"Made by herta_gpu {about['herta_gpu']} with Python {about['python']}, NumPy "
        f"{about['numpy']} and SciPy {about['scipy']}; {result.dtype} on {result.device}, "
        f"{count_text(int(about['threads']), 'thread')}{ranks}. {repeat}"
    )
    parts.append(f"<footer>{escape(foot.rstrip())}</footer>")
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{title}</title><style>{_STYLE}</style>"
    body = "\n".join(filter(None, parts))
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>{body}</body></html>\n"


def _step_rows(model: HERTA) -> Rows:
    rows = [("step", "loss", "gradient norm", "certified gap", "inner iterations", "seconds")]
    for h in model.warm_history_ + model.history_:
        gap = f"{h['certificate']:.2e}" if h["certificate"] < math.inf else NOTHING
        name, loss = f"{'warm ' * h['warm']}{h['step']}", f"{h['loss']:.8g}"
        work = (str(h["inner_iterations"]), f"{h['seconds']:.3f}")
        rows.append((name, loss, f"{h['grad_norm']:.2e}", gap, *work))
    return rows


# ---- pieces of HTML ---------------------------------------------------------------------------
def _timeline(stages: dict[str, float]) -> str:
    total = sum(stages.values()) or 1.0
    stages = {name: s for name, s in stages.items() if s >= 0.002 * total}
    colours = dict(zip(stages, cycle(COLOURS)))
    return _lane(stages, total, colours) + _keys(
        colours, {n: f" {s:.2f} s" for n, s in stages.items()}
    )


def _rank_bars(ranks: list[dict[str, float]]) -> str:
    """A bar for each process: what it worked, waited for others, and spent on messages."""
    longest = max(max(sum(seconds.values()) for seconds in ranks), 1e-9)
    colours = dict(zip(ranks[0], (COLOURS[0], COLOURS[-1], COLOURS[1])))
    rows = "<tr><th></th><th></th>" + "".join(f"<th class=n>{name}</th>" for name in ranks[0])
    for rank, seconds in enumerate(ranks):
        rows += f"</tr><tr><td>rank {rank}</td><td class=bar>{_lane(seconds, longest, colours)}"
        rows += "</td>" + "".join(f"<td class=n>{s:.2f} s</td>" for s in seconds.values())
    return f"<div class=wide><table class=ranks>{rows}</tr></table></div>{_keys(colours, {})}"


def _lane(seconds: dict[str, float], total: float, colours: dict[str, str]) -> str:
    """One bar, in which each part is as wide as its share of `total`."""
    part = "<div style='width:{:.3f}%;background:{}' title='{} {:.2f} s'></div>"
    parts = (part.format(100 * s / total, colours[n], escape(n), s) for n, s in seconds.items())
    return f"<div class=lane>{''.join(parts)}</div>"


def _keys(colours: dict[str, str], more: dict[str, str]) -> str:
    """What the colours of a bar stand for."""
    key = "<span class=key><i style='background:{}'></i>{}{}</span>"
    keys = (key.format(c, escape(name), more.get(name, "")) for name, c in colours.items())
    return f"<p>{' '.join(keys)}</p>"


def _section(title: str, rows: Rows) -> str:
    """A table with its title; columns of numbers are aligned to the right, long ones fold."""
    head, *body = rows
    numeric = [bool(body) and all(map(_is_number, column)) for column in zip(*body)]

    def line(cells: Sequence[str], tag: str) -> str:
        marks = (" class=n" if number else "" for number in numeric or [False] * len(cells))
        cell = (f"<{tag}{mark}>{escape(c)}</{tag}>" for c, mark in zip(cells, marks))
        return f"<tr>{''.join(cell)}</tr>"

    top = line(head, "th") if any(head) else ""
    made = f"<div class=wide><table>{top}{''.join(line(row, 'td') for row in body)}</table></div>"
    if len(body) > _LONG:
        made = f"<details><summary>all {len(body):,} rows</summary>{made}</details>"
    return f"<h2>{title}</h2>{made}"


def _is_number(text: str) -> bool:
    return text == NOTHING or text.replace(",", "").partition(" ")[0].lstrip("-")[:1].isdigit()


# ---- pictures ---------------------------------------------------------------------------------
def pyplot() -> Any:
    """The pyplot of matplotlib, set up to draw without a display."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            f'Pictures are drawn by matplotlib ({error}): pip install "herta_gpu[plot]".'
        ) from None
    return plt


def _draw_convergence(model: HERTA) -> bytes | None:
    """Certified gap and loss, against steps and against seconds; None where no step was needed.

    The loss of every step is drawn against a proven lower bound of the optimum, also for steps
    that had no certificate while they ran.
    """
    plt, history = pyplot(), model.warm_history_ + model.history_
    if len(history) < 2:
        return None
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6), sharey="row", sharex="col")
    losses, gaps, seconds = ([h[k] for h in history] for k in ("loss", "certificate", "seconds"))
    bound = losses[-1] - model.certificate_.gap
    above = [(loss - bound) / bound if bound > 0 else math.inf for loss in losses]
    # Steps on a cheaper model come first; those of the fit are numbered after them.
    for (top, bottom), name, x in zip(axes.T, ("step", "seconds"), (range(len(history)), seconds)):
        for y, colour, label in (
            (above, "#9db7d5", "loss above the proven bound"),
            (gaps, "#1f5fa8", "certificate of the step"),
        ):
            points = [(a, b) for a, b in zip(x, y) if b is not None and 0 < b < math.inf]
            if points:  # that a logarithmic axis can show
                top.semilogy(*zip(*points), "o-", color=colour, label=label, markersize=3)
        if top.lines:
            top.axhline(model.tol, color="#888888", linestyle="--", linewidth=1, label="tol")
        else:
            top.text(0.5, 0.5, "no certificate", transform=top.transAxes, ha="center")
        bottom.plot(x, losses, "o-", color="#b3541e", markersize=3)
        bottom.set_xlabel(name)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    if axes[0, 1].lines:
        axes[0, 1].legend(fontsize=8, framealpha=0.9)
    axes[0, 0].set_ylabel("relative gap")
    axes[1, 0].set_ylabel("loss")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    return _png(figure)


def _draw_path(candidates: Sequence[Candidate], metric: str) -> bytes | None:
    """What each ridge gives: a panel for each kind of model, a line for each lam."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for c in sorted(candidates, key=lambda c: (len(c.lams), sum(c.lams))):
        if c.smooth is None and not math.isnan(c.score):
            panel = c.loss + ", intercept" * c.fit_intercept + ", labels" * (c.label_features > 0)
            # A ridge of 0 has no place on a logarithmic axis.
            point = (max(c.ridge, 1e-12), c.score)
            curves.setdefault(panel, {}).setdefault(lams_text(c.lams), []).append(point)
    if not curves:
        return None
    plt, size = pyplot(), (max(5.0, 3.6 * len(curves)), 3.8)
    figure, axes = plt.subplots(1, len(curves), figsize=size, sharey=True, squeeze=False)
    for axis, (panel, lines) in zip(axes[0], curves.items()):
        for i, (lam, points) in enumerate(lines.items()):
            how = {"color": plt.get_cmap("viridis")(0.9 * i / max(1, len(lines) - 1))}
            how |= {"markersize": 3, "linewidth": 1.2, "label": f"lam {lam}"}
            axis.plot(*zip(*sorted(points)), "o-", **how)
        axis.set_xscale("log")
        axis.set_xlabel("ridge")
        axis.set_title(panel, fontsize=10)
        axis.grid(alpha=0.3)
    by_loo = any(c.loo is not None for c in candidates)
    axes[0, 0].set_ylabel(f"{'leave-one-out' if by_loo else 'valid'} {metric}")
    axes[0, -1].legend(fontsize=7, loc="best")
    return _png(figure)


def draw_bars(groups: dict[str, dict[str, float]]) -> bytes:
    """Seconds per stage, one bar per candidate: {candidate: {stage: seconds}}."""
    figure, axis = pyplot().subplots(figsize=(8, 4))
    spent = [pair for seconds in groups.values() for pair in seconds.items()]
    least = 0.005 * max(s for _, s in spent)
    stages = list(dict.fromkeys(stage for stage, s in spent if s > least))
    for i, (name, seconds) in enumerate(groups.items()):
        at = [j + i / (len(groups) + 0.5) for j in range(len(stages))]
        height, values = 1 / (len(groups) + 0.5), [seconds.get(stage, 0.0) for stage in stages]
        drawn = axis.barh(at, values, height, label=name, color=COLOURS[i], tick_label=stages)
        axis.bar_label(drawn, [f"{s:.3g} s" for s in values], padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.margins(x=0.12)
    axis.legend(loc="best")
    return _png(figure)


def _png(figure: Any) -> bytes:
    """The figure as a PNG file; it is closed, so that pyplot forgets it."""
    figure.tight_layout()
    file = BytesIO()
    figure.savefig(file, dpi=120, format="png")
    pyplot().close(figure)
    return file.getvalue()
