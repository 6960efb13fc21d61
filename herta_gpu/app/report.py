"""What a run looks like: tables for the terminal, a picture, one self-contained page."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from herta_gpu.plumbing.files import new_file

NOTHING = "\N{EN DASH}"  # where a table has no number
Rows = Sequence[Sequence[str]]


def table(rows: Rows, header: bool = True) -> str:
    """Columns padded to their widest entry; numbers are the caller's to format.

    Examples
    --------
    >>> from herta_gpu.app.report import table
    >>> print(table([("stage", "seconds"), ("train", "0.5")]))
    stage  seconds
    -----  -------
    train  0.5
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in rows]
    if header:
        lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def bytes_text(size: float) -> str:
    """123.4 MB, 5.6 GB; 1 GB = 2^30 bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1024 or unit == "GB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def bars(values: dict[str, float], unit: str = "s", width: int = 40) -> str:
    """A bar chart for the terminal."""
    top = max([*values.values(), 1e-300])
    name = max(len(key) for key in values)
    return "\n".join(
        f"{key:<{name}}  {'#' * max(1, round(width * v / top)):<{width}}  {v:.3g} {unit}"
        for key, v in values.items()
    )


def pyplot() -> Any:
    """matplotlib without a display."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            f'Pictures are drawn by matplotlib ({error}): pip install "herta_gpu[plot]".'
        ) from None
    return plt


def draw_convergence(
    history: list[dict[str, Any]], tol: float, path: Path, gap: float = math.inf
) -> None:
    """Certified gap and loss, against steps and against seconds.

    `gap` bounds the last loss minus the optimum: with it, the loss of every step is drawn against
    a proven lower bound, also for steps that had no certificate while they ran.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6), sharey="row", sharex="col")
    losses = [h["loss"] for h in history]
    gaps = [h["certificate"] for h in history]
    bound = losses[-1] - gap
    above = [(loss - bound) / bound if bound > 0 else math.inf for loss in losses]
    for column, name in enumerate(("step", "seconds")):
        # Steps on a cheaper model come first; the true ones are counted on from there.
        values = list(range(len(history))) if name == "step" else [h[name] for h in history]
        top, bottom = axes[0, column], axes[1, column]
        drawn = _finite(top, values, above, "-", "#9db7d5", "loss above the proven bound")
        drawn |= _finite(top, values, gaps, "o-", "#1f5fa8", "certificate of the step")
        if len(history) == 1:  # certified where it began: a point with its numbers beside it
            _beside(top, values[0], gaps[0], f"{gaps[0]:.1e}")
            _beside(bottom, values[0], losses[0], f"{losses[0]:.6g}")
        if drawn:
            top.set_yscale("log")
            top.axhline(tol, color="#888888", linestyle="--", linewidth=1, label="tol")
            top.margins(y=0.1)
        else:
            top.text(0.5, 0.5, "no certificate", transform=top.transAxes, ha="center")
            top.set_yticks([])
        bottom.plot(values, losses, _line(losses), color="#b3541e", markersize=4)
        bottom.set_xlabel(name)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    if drawn:
        axes[0, 1].legend(fontsize=8, framealpha=0.9)
    axes[0, 0].set_ylabel("relative gap")
    axes[1, 0].set_ylabel("loss")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    _save(figure, plt, path)


def _line(values: list[Any]) -> str:
    """Points on the line while they can be told apart."""
    return "o-" if len(values) <= 30 else "-"


def _beside(axis: Any, x: float, y: float, text: str) -> None:
    if math.isfinite(y):
        axis.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center")
        axis.set_xlim(0 if x > 0 else -0.1, 2 * x if x > 0 else 1)


def _finite(axis: Any, x: list[Any], y: list[Any], line: str, colour: str, label: str) -> bool:
    """Draw the points that a logarithmic axis can show; whether there were any."""
    kept = [(a, b) for a, b in zip(x, y) if b is not None and 0 < b < math.inf]
    if kept:
        axis.plot(*zip(*kept), line, color=colour, markersize=4, label=label)
    return bool(kept)


def draw_bars(groups: dict[str, dict[str, float]], path: Path) -> None:
    """Seconds per stage, one bar per candidate: {candidate: {stage: seconds}}."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4))
    longest = max(max(seconds.values()) for seconds in groups.values())
    stages = [
        stage
        for stage in next(iter(groups.values()))
        if any(seconds.get(stage, 0.0) > 0.005 * longest for seconds in groups.values())
    ]
    height = 0.8 / len(groups)
    for i, (name, seconds) in enumerate(groups.items()):
        at = [j + i * height for j in range(len(stages))]
        values = [seconds.get(s, 0.0) for s in stages]
        drawn = axis.barh(at, values, height=height, label=name, color=_COLOURS[i % len(_COLOURS)])
        axis.bar_label(drawn, [f"{v:.3g} s" for v in values], padding=3, fontsize=8)
    axis.set_yticks([j + 0.4 - height / 2 for j in range(len(stages))], stages)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="best")
    figure.tight_layout()
    _save(figure, plt, path)


def _save(figure: Any, plt: Any, path: Path) -> None:
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


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
.note { background: #fff6dd; padding: .6rem .9rem; border-left: 4px solid #e0b030; }
summary { cursor: pointer; color: #1f5fa8; } footer { margin-top: 3rem; font-size: .85rem; }
code { background: #f4f6f9; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""
# Tableau's colours: every stage that a fit can have gets one of its own.
_COLOURS = (
    "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7",
    "#9c755f", "#bab0ac",
)  # fmt: skip
_LONG = 20  # rows: a longer table is shown on demand


def page(
    title: str,
    lead: str,
    tiles: list[tuple[str, str]],
    stages: dict[str, float],
    sections: list[tuple[str, Rows]],
    picture: Path | None = None,
    note: str = "",
    foot: str = "",
) -> str:
    """One HTML page without anything to load; `foot` says how it came about."""
    parts = [f"<h1>{html.escape(title)}</h1><p class=lead>{html.escape(lead)}</p>"]
    if note:
        parts.append(f"<p class=note>{html.escape(note)}</p>")
    shown = "".join(
        f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in tiles
    )
    parts.append(f"<div class=tiles>{shown}</div>")
    if picture is not None and picture.is_file():
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        parts.append(
            f'<h2>Convergence</h2><img alt="certified gap and loss against steps and seconds" '
            f'src="data:image/png;base64,{data}">'
        )
    parts.append("<h2>Where the time went</h2>" + _timeline(stages))
    parts += [f"<h2>{html.escape(name)}</h2>{_html_table(rows)}" for name, rows in sections]
    if foot:
        parts.append(f"<footer>{html.escape(foot)}</footer>")
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _timeline(stages: dict[str, float]) -> str:
    """The stages one after the other, as wide as they took."""
    total = sum(stages.values()) or 1.0
    stages = {name: s for name, s in stages.items() if s >= 0.002 * total}
    colours = dict(zip(stages, cycle(_COLOURS)))
    lane = "".join(
        f"<div style='width:{100 * s / total:.3f}%;background:{colours[name]}' "
        f"title='{html.escape(name)} {s:.2f} s'></div>"
        for name, s in stages.items()
    )
    keys = " ".join(
        f"<span class=key><i style='background:{colours[name]}'></i>{html.escape(name)} "
        f"{s:.2f} s</span>"
        for name, s in stages.items()
    )
    return f"<div class=lane>{lane}</div><p>{keys}</p>"


def _html_table(rows: Rows) -> str:
    """Columns of numbers stand to the right; a long table opens on a click."""
    head, *body = rows
    numeric = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(head))]

    def line(cells: Sequence[str], tag: str) -> str:
        marks = (" class=n" if number else "" for number in numeric)
        cell = (f"<{tag}{mark}>{html.escape(c)}</{tag}>" for c, mark in zip(cells, marks))
        return f"<tr>{''.join(cell)}</tr>"

    top = line(head, "th") if any(head) else ""
    made = f"<div class=wide><table>{top}{''.join(line(row, 'td') for row in body)}</table></div>"
    if len(body) <= _LONG:
        return made
    return f"<details><summary>all {len(body):,} rows</summary>{made}</details>"


def _is_number(text: str) -> bool:
    return text == NOTHING or text.replace(",", "").partition(" ")[0].lstrip("-")[:1].isdigit()
