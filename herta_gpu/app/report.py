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

import numpy as np

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
from herta_gpu.planning.plan import Decision
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
.lane { display: flex; height: 1.4rem; width: 100%; border-radius: 4px; overflow: hidden; }
.lane div { height: 100%; } .key { margin-right: 1.2rem; white-space: nowrap; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; }
table.bars { width: 100%; } td.bar { width: 90%; padding: .1rem 0; border: 0; }
.note { background: #fff6dd; padding: .6rem .9rem; border-left: 4px solid #e0b030; }
summary { cursor: pointer; color: #1f5fa8; } footer { margin-top: 3rem; font-size: .85rem; }
"""


def report(model: HERTA, data: Dataset, path: str | Path, *, overwrite: bool = False) -> FitResult:
    """Write a page about a fitted model into the file `path`, and return what it says.

    The page is one HTML file with nothing to load.  Where matplotlib is installed, it has pictures.

    Parameters
    ----------
    model : HERTA
        A fitted model.
    data : Dataset
        What it was fitted on; its scores are those on the parts of `data.split`.
    path : path
        The file to write, for example "report.html".
    overwrite : bool
        Replace a file that exists; by default that is an error.

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
    check_new_file(path, overwrite)
    result = FitResult.from_fit(model, data)
    write_report(model, result, path)
    return result


def write_report(
    model: HERTA,
    result: FitResult,
    path: str | Path,
    candidates: Sequence[Candidate] | None = None,
    repeat: str = "",
) -> None:
    """Write the page over what may be there: with the `candidates` that the model was chosen from,
    and at its foot how to `repeat` the fit."""
    images: dict[str, bytes | None] = {}
    try:
        images["Convergence"] = _draw_convergence(model)
        images["Blocks of features"] = _draw_blocks(model, result)
        images["What was chosen from"] = _draw_path(candidates or (), result.metric)
    except ImportError as error:
        print(error, file=sys.stderr)
    with new_file(Path(path)) as temporary:
        temporary.write_text(_page(model, result, images, candidates, repeat), "utf-8")


_ABOUT = {
    "Convergence": "certified gap and loss against steps and seconds",
    "Blocks of features": "norm of the weights of each block, by its lam",
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
    about, wall = environment(), result.wall_seconds or result.total_seconds
    tiles = [  # the numbers in large type, each with its name
        *((f"{part} {result.metric}", f"{s:.3f}") for part, s in result.scores.items()),
        (f"certified relative gap{proof.over}", f"{proof.value:.1e}".replace("inf", "none")),
        (f"outer step{'s' * (result.steps != 1)}", str(result.steps)),
        ("total, by the clock" if result.wall_seconds else "total", f"{wall:.1f} s"),
    ]
    shown = (f"<div class=tile><b>{escape(b)}</b><span>{escape(a)}</span></div>" for a, b in tiles)
    parts = [f"<h1>{title}</h1>"]
    lead = f"{result.size_text}; {result.model_text}; {about['date']}"
    parts.append(f"<p class=lead>{escape(lead)}</p>")
    parts.append(f"<p class=note>{escape(result.note)}</p>" if result.note else "")
    parts.append(f"<div class=tiles>{''.join(shown)}</div>")
    for name, png in images.items():
        if png is not None:
            source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
            parts.append(f'<h2>{name}</h2><img alt="{_ABOUT[name]}" src="{source}">')
    spent = {k: s for k, s in result.seconds.items() if s >= 0.002 * result.total_seconds}
    parts.append("<h2>Where the time went</h2>" + _bars({"": spent}, sum(spent.values())))
    if result.ranks:
        by_rank = {f"rank {i}": seconds for i, seconds in enumerate(result.ranks)}
        longest = max(sum(seconds.values()) for seconds in result.ranks)
        parts.append("<h2>Time per rank</h2>" + _bars(by_rank, longest))
    decisions = [*plan.decisions, *model.changes_]
    if proof.kind not in ("none", plan.certificate):
        why = f"the smallest of the bounds at hand; {plan.certificate} was planned"
        decisions.append(Decision("certificate", proof.kind, why))
    sizes = ((name, bytes_text(size)) for name, size in plan.memory.items())
    values = ((name, str(value)) for name, value in model.get_params().items())
    tables: dict[str, Rows | None] = {
        "Result": [("", ""), *result.rows()],
        **_class_tables(result),
        "Candidates": None if candidates is None else candidate_rows(candidates, result.metric),
        "Plan": [("", "decision", "why"), *decisions],
        "Memory planned": [("for", "size"), *sizes],
        "Steps": _step_rows(model),
        "Parameters": [("name", "value"), *values],
    }
    parts += [_section(name, rows) for name, rows in tables.items() if rows is not None]
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


def _class_tables(result: FitResult) -> dict[str, Rows | None]:
    """Scores of each class, and which class was taken for which."""
    if result.confusion is None:
        return {}
    part, names = result.confusion["part"], [str(name) for name in result.confusion["classes"]]
    counts = np.array(result.confusion["counts"])
    right, true, taken = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    scores: list[tuple[str, ...]] = [("class", "nodes", "predicted", "recall", "precision", "F1")]
    for name, hits, a, b in zip(names, right, true, taken):
        shares = (hits / max(1, a), hits / max(1, b), 2 * hits / max(1, a + b))
        scores.append((name, f"{a:,}", f"{b:,}", *(f"{share:.3f}" for share in shares)))
    matrix = [("true, predicted:", *names)]
    matrix += [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, counts)]
    return {f"Classes ({part})": scores, f"Confusion ({part})": matrix}


def _step_rows(model: HERTA) -> Rows:
    rows = [("step", "loss", "gradient norm", "certified gap", "inner iterations", "seconds")]
    for h in model.warm_history_ + model.history_:
        gap = f"{h['certificate']:.2e}" if h["certificate"] < math.inf else NOTHING
        name, loss = f"{'warm ' * h['warm']}{h['step']}", f"{h['loss']:.8g}"
        work = (str(h["inner_iterations"]), f"{h['seconds']:.3f}")
        rows.append((name, loss, f"{h['grad_norm']:.2e}", gap, *work))
    return rows


# ---- pieces of HTML ---------------------------------------------------------------------------
def _bars(rows: dict[str, dict[str, float]], longest: float) -> str:
    """A bar for each row, whose parts are as wide as their seconds; then what they stand for."""
    colours = dict(zip(next(iter(rows.values())), cycle(COLOURS)))
    part = "<div style='width:{:.3f}%;background:{}' title='{} {:.2f} s'></div>"
    lines = []
    for row, seconds in rows.items():
        pieces = (
            part.format(100 * s / max(longest, 1e-9), colours[name], escape(name), s)
            for name, s in seconds.items()
        )
        label = f"<td>{row}</td>" if row else ""
        lines.append(f"<tr>{label}<td class=bar><div class=lane>{''.join(pieces)}</div></td></tr>")
    keys = (
        f"<span class=key><i style='background:{colour}'></i>{escape(name)} "
        f"{', '.join(f'{seconds[name]:.2f}' for seconds in rows.values())} s</span>"
        for name, colour in colours.items()
    )
    return f"<table class=bars>{''.join(lines)}</table><p>{' '.join(keys)}</p>"


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
    return f"<h2>{escape(title)}</h2>{made}"


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
    history = model.warm_history_ + model.history_
    if len(history) < 2:
        return None  # before matplotlib is imported, which takes longer than such a fit
    losses, gaps, seconds = ([h[k] for h in history] for k in ("loss", "certificate", "seconds"))
    bound = losses[-1] - model.certificate_.gap
    above = [(loss - bound) / bound if bound > 0 else math.inf for loss in losses]
    curves = {"loss above the proven bound": above, "certificate of the step": gaps}
    drawn = {
        name: [i for i, y in enumerate(ys) if y is not None and 0 < y < math.inf]
        for name, ys in curves.items()
    }
    proven = any(len(at) > 1 for at in drawn.values())  # one point is no curve
    shape = (2 if proven else 1, 2)
    figure, axes = pyplot().subplots(
        *shape, figsize=(9.5, 3 * shape[0]), sharey="row", sharex="col", squeeze=False
    )
    # Steps on a cheaper model come first; those of the fit are numbered after them.
    for column, name, x in zip(axes.T, ("step", "seconds"), (range(len(history)), seconds)):
        for curve, at in drawn.items() if proven else ():
            points = ([x[i] for i in at], [curves[curve][i] for i in at])
            column[0].semilogy(*points, "o-", label=curve, markersize=3)
        column[-1].plot(x, losses, "o-", color="#b3541e", markersize=3)
        column[-1].set_xlabel(name)
        for axis in column:
            axis.grid(alpha=0.3)
        if proven:
            column[0].axhline(model.tol, color="#888888", linestyle="--", label="tol")
    if proven:
        axes[0, 0].set_ylabel("relative gap")
        axes[0, 1].legend(fontsize=8, framealpha=0.9)
    axes[-1, 0].set_ylabel("loss")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    return _png(figure)


def _draw_blocks(model: HERTA, result: FitResult) -> bytes | None:
    """How large the weights of each block of features are: X diffused by each lam, and the rest."""
    lams = result.lam if isinstance(result.lam, list) else [result.lam]
    cuts = [result.features * i for i in range(1, len(lams) + 1)]
    norms = [float(np.linalg.norm(block)) for block in np.split(model.W_, cuts)]
    rest = ["labels"] * (result.label_features > 0) + ["hidden layer"] * (result.hidden > 0)
    if len(lams) + len(rest) < 2 or result.features > len(model.W_):
        return None
    names = [f"lam {lam:g}" for lam in lams] + [" and ".join(rest)] * bool(rest)
    figure, axis = pyplot().subplots(figsize=(6, 3))
    axis.bar(names, norms[: len(names)], color=COLOURS[0])
    axis.set_ylabel("norm of the weights")
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
    if not any(len(points) > 1 for lines in curves.values() for points in lines.values()):
        return None
    plt, size = pyplot(), (max(5.0, 3.6 * len(curves)), 3.8)
    figure, axes = plt.subplots(1, len(curves), figsize=size, sharey=True, squeeze=False)
    for axis, (panel, lines) in zip(axes[0], curves.items()):
        for i, (lam, points) in enumerate(lines.items()):
            colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(lines) - 1))
            axis.plot(*zip(*sorted(points)), "o-", color=colour, markersize=3, label=f"lam {lam}")
        axis.set(xscale="log", xlabel="ridge", title=panel)
        axis.grid(alpha=0.3)
    by_loo = any(c.loo is not None for c in candidates)
    axes[0, 0].set_ylabel(f"{'leave-one-out' if by_loo else 'valid'} {metric}")
    axes[0, -1].legend(fontsize=7, loc="best")
    return _png(figure)


def _png(figure: Any) -> bytes:
    """The figure as a PNG file; it is closed, so that pyplot forgets it."""
    figure.tight_layout()
    file = BytesIO()
    figure.savefig(file, dpi=120, format="png")
    pyplot().close(figure)
    return file.getvalue()
