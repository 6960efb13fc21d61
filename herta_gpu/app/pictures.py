"""Pictures of a fit, drawn by matplotlib, which is optional, as the bytes of PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

# Tableau's colours: every stage that a fit can have gets one of its own.
COLOURS = (
    "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7",
    "#9c755f", "#bab0ac",
)  # fmt: skip


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


def draw_convergence(history: list[dict[str, Any]], tol: float, gap: float = math.inf) -> bytes:
    """Certified gap and loss, against steps and against seconds.

    `gap` bounds the last loss minus the optimum: with it, the loss of every step is drawn against
    a proven lower bound, also for steps that had no certificate while they ran.
    """
    figure, axes = pyplot().subplots(2, 2, figsize=(9.5, 6), sharey="row", sharex="col")
    losses, gaps = ([h[name] for h in history] for name in ("loss", "certificate"))
    bound = losses[-1] - gap
    above = [(loss - bound) / bound if bound > 0 else math.inf for loss in losses]
    for (top, bottom), name in zip(axes.T, ("step", "seconds")):
        # Steps on a cheaper model come first; those of the fit are numbered after them.
        values = list(range(len(history))) if name == "step" else [h[name] for h in history]
        drawn = _finite(
            top, values, above, "-", color="#9db7d5", label="loss above the proven bound"
        )
        drawn |= _finite(top, values, gaps, "o-", color="#1f5fa8", label="certificate of the step")
        if len(history) == 1:  # no step was needed: a point with its numbers beside it
            for axis, y, text in ((top, gaps[0], ".1e"), (bottom, losses[0], ".6g")):
                _note(axis, values[0], y, format(y, text))
        if drawn:
            top.set_yscale("log")
            top.axhline(tol, color="#888888", linestyle="--", linewidth=1, label="tol")
            top.margins(y=0.1)
        else:
            top.text(0.5, 0.5, "no certificate", transform=top.transAxes, ha="center")
            top.set_yticks([])
        style = "o-" if len(losses) <= 30 else "-"  # points that can be told apart
        bottom.plot(values, losses, style, color="#b3541e", markersize=4)
        bottom.set_xlabel(name)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    if drawn:
        axes[0, 1].legend(fontsize=8, framealpha=0.9)
    axes[0, 0].set_ylabel("relative gap")
    axes[1, 0].set_ylabel("loss")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    return _png(figure)


def _note(axis: Any, x: float, y: float, text: str) -> None:
    """A text beside the only point of an axis."""
    if math.isfinite(y):
        axis.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center")
        axis.set_xlim(0 if x > 0 else -0.1, 2 * x if x > 0 else 1)


def _finite(axis: Any, x: Sequence[Any], y: Sequence[Any], line: str, **how: Any) -> bool:
    """Draw the points that a logarithmic axis can show; True if there were any."""
    kept = [(a, b) for a, b in zip(x, y) if b is not None and 0 < b < math.inf]
    if kept:
        axis.plot(*zip(*kept), line, markersize=4, **how)
    return bool(kept)


def draw_path(curves: dict[str, dict[str, list[tuple[float, float]]]], score: str) -> bytes:
    """What each ridge gives: a panel for each kind of model, a line for each lam.

    {panel: {lam: [(ridge, score), ...]}}
    """
    plt, size = pyplot(), (max(5.0, 3.6 * len(curves)), 3.8)
    figure, axes = plt.subplots(1, len(curves), figsize=size, sharey=True, squeeze=False)
    for axis, (panel, lines) in zip(axes[0], curves.items()):
        for i, (lam, points) in enumerate(lines.items()):
            x, y = zip(*sorted(points))
            shown = [max(v, 1e-12) for v in x]  # a ridge of 0 has no place on a logarithmic axis
            colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(lines) - 1))
            axis.plot(shown, y, "o-", color=colour, markersize=3, linewidth=1.2, label=f"lam {lam}")
        axis.set_xscale("log")
        axis.set_xlabel("ridge")
        axis.set_title(panel, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(score)
    axes[0, -1].legend(fontsize=7, loc="best")
    return _png(figure)


def draw_bars(groups: dict[str, dict[str, float]]) -> bytes:
    """Seconds per stage, one bar per candidate: {candidate: {stage: seconds}}."""
    figure, axis = pyplot().subplots(figsize=(8, 4))
    least = 0.005 * max(max(seconds.values()) for seconds in groups.values())
    first, height = next(iter(groups.values())), 0.8 / len(groups)
    stages = [s for s in first if any(spent.get(s, 0.0) > least for spent in groups.values())]
    for i, (name, seconds) in enumerate(groups.items()):
        at, values = (
            [j + i * height for j in range(len(stages))],
            [seconds.get(s, 0.0) for s in stages],
        )
        drawn = axis.barh(at, values, height=height, label=name, color=COLOURS[i % len(COLOURS)])
        axis.bar_label(drawn, [f"{v:.3g} s" for v in values], padding=3, fontsize=8)
    axis.set_yticks([j + 0.4 - height / 2 for j in range(len(stages))], stages)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="best")
    return _png(figure)


def _png(figure: Any) -> bytes:
    """The figure as a PNG file; it is closed, so that pyplot forgets it."""
    figure.tight_layout()
    file = BytesIO()
    figure.savefig(file, dpi=120, format="png")
    pyplot().close(figure)
    return file.getvalue()
