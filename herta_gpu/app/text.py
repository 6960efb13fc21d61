"""Text for the terminal: tables, bars, and numbers with their units."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "\N{EN DASH}"  # stands where a table has no number
Rows = Sequence[Sequence[str]]


def table(rows: Rows, header: bool = True) -> str:
    """Rows of text with every column padded to its widest entry.

    Examples
    --------
    >>> from herta_gpu.app.text import table
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
    """A number of bytes as 123.4 MB or 5.6 GB, where 1 GB is 2^30 bytes."""
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


def count_text(number: int, what: str) -> str:
    """A number with its noun, which gets an s unless there is exactly one of it."""
    return f"{number:,} {what}{'s' * (number != 1)}"
