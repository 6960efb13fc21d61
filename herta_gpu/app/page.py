"""One self-contained HTML page about a fit: it has nothing to load and needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from herta_gpu.app.pictures import COLOURS
from herta_gpu.app.text import NOTHING, Rows

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
code { background: #f4f6f9; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Page:
    """What stands on the page, from top to bottom; every text is escaped when it is written."""

    title: str
    lead: str
    tiles: list[tuple[str, str]]  # (name, value) of the numbers in large type
    seconds: dict[str, float]  # per stage, drawn as one bar
    sections: list[tuple[str, Rows]]  # heading and table, whose first row is its head
    picture: bytes | None = None  # a PNG file, of the convergence
    path: bytes | None = None  # another one, of what was chosen from
    ranks: list[dict[str, float]] | None = None  # seconds of each process, a bar for each
    note: str = ""
    foot: str = ""  # how the page was made

    def html(self) -> str:
        """The whole file."""
        parts = [f"<h1>{html.escape(self.title)}</h1><p class=lead>{html.escape(self.lead)}</p>"]
        if self.note:
            parts.append(f"<p class=note>{html.escape(self.note)}</p>")
        shown = "".join(
            f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
            for name, value in self.tiles
        )
        parts.append(f"<div class=tiles>{shown}</div>")
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode("ascii")
            parts.append(
                f'<h2>Convergence</h2><img alt="certified gap and loss against steps and seconds" '
                f'src="data:image/png;base64,{data}">'
            )
        if self.path is not None:
            data = base64.b64encode(self.path).decode("ascii")
            parts.append(
                f'<h2>What was chosen from</h2><img alt="score against ridge, a line for each lam" '
                f'src="data:image/png;base64,{data}">'
            )
        parts.append("<h2>Where the time went</h2>" + _timeline(self.seconds))
        if self.ranks:
            parts.append("<h2>Time per rank</h2>" + _rank_bars(self.ranks))
        parts += [f"<h2>{html.escape(name)}</h2>{_table(rows)}" for name, rows in self.sections]
        if self.foot:
            parts.append(f"<footer>{html.escape(self.foot)}</footer>")
        body = "\n".join(parts)
        return (
            f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            f"<meta name=viewport content='width=device-width'><title>{html.escape(self.title)}"
            f"</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
        )


def _timeline(stages: dict[str, float]) -> str:
    """A bar of all stages, each as wide as its share of the time."""
    total = sum(stages.values()) or 1.0
    stages = {name: s for name, s in stages.items() if s >= 0.002 * total}
    colours = dict(zip(stages, cycle(COLOURS)))
    keys = {name: f"{s:.2f} s" for name, s in stages.items()}
    return f"{_lane(stages, total, colours)}<p>{_keys(keys, colours)}</p>"


def _rank_bars(ranks: list[dict[str, float]]) -> str:
    """A bar for each process: what it worked, waited for others, and spent on messages."""
    longest = max(max(sum(seconds.values()) for seconds in ranks), 1e-9)
    colours = dict(zip(ranks[0], (COLOURS[0], COLOURS[-1], COLOURS[1])))
    bars = "".join(
        f"<tr><td>rank {r}</td><td class=bar>{_lane(seconds, longest, colours)}</td>"
        + "".join(f"<td class=n>{s:.2f} s</td>" for s in seconds.values())
        + "</tr>"
        for r, seconds in enumerate(ranks)
    )
    head = "<tr><th></th><th></th>" + "".join(f"<th class=n>{name}</th>" for name in ranks[0])
    keys = _keys(dict.fromkeys(ranks[0], ""), colours)
    return f"<div class=wide><table class=ranks>{head}</tr>{bars}</table></div><p>{keys}</p>"


def _lane(seconds: dict[str, float], total: float, colours: dict[str, str]) -> str:
    """One bar, in which each part is as wide as its share of `total`."""
    parts = "".join(
        f"<div style='width:{100 * s / total:.3f}%;background:{colours[name]}' "
        f"title='{html.escape(name)} {s:.2f} s'></div>"
        for name, s in seconds.items()
    )
    return f"<div class=lane>{parts}</div>"


def _keys(values: dict[str, str], colours: dict[str, str]) -> str:
    """What the colours of a bar stand for."""
    return " ".join(
        f"<span class=key><i style='background:{colours[name]}'></i>"
        f"{html.escape(f'{name} {value}'.strip())}</span>"
        for name, value in values.items()
    )


def _table(rows: Rows) -> str:
    """A table, with columns of numbers aligned to the right; a long one opens on a click."""
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
