"""Text tables: CSV and its relatives, as Excel, R, pandas and people write them."""

from __future__ import annotations

import csv
import gzip
import re
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.plumbing.columns import has_known_name, is_index, is_numbered
from herta_gpu.plumbing.files import BROKEN, DataError, why

_MISSING = ("", "na", "nan", "n/a", "#n/a", "null", "none")  # as pandas, R and Excel write it
_MARK = re.compile(r"sep=(.)\s*")  # a line by which Excel learns the delimiter
_BEFORE = 1000  # lines of comments before the first row, at most


def is_missing(cell: Any) -> bool:
    return cell is None or cell != cell or str(cell).strip().lower() in _MISSING


def as_number(cell: Any) -> float | None:
    """A cell as a number, NaN where it is missing, None where it is text."""
    if is_missing(cell):
        return float("nan")
    text = str(cell).strip().lower()
    if text in ("true", "false"):
        return float(text == "true")
    try:
        return None if "_" in text else float(text)  # Python reads 1_2 as 12
    except ValueError:
        return None


def is_numeric(cell: str) -> bool:
    """Whether a cell is a number or was meant as one, like 1,234 or 1.234,5."""
    return as_number(cell) is not None or re.fullmatch(r"[-+]?[\d.,' ]+", cell) is not None


def read_text(path: Path) -> tuple[list[str] | None, Any]:
    """Names of the columns, if the first line has some, and rows of numbers, or of text (objects).

    Columns end at tabs, semicolons, commas or spaces, whichever comes first in this list.  Where
    that is no comma, 0,5 is a number.  Comments (#, %) and empty lines are left out.
    """
    try:
        with _open(path) as file:
            head = list(islice(file, _BEFORE))
        skip, mark = _first_row(path, head)
        cells = next(csv.reader([head[skip].strip()], delimiter=mark, skipinitialspace=True))
        names = _names(path, cells, mark, head[skip - 1] if skip else "")
        skip += names is cells
        while names is not None and len(names) > 1 and not names[-1].strip():
            names = names[:-1]
        values = _numbers(path, mark, skip)
        if values is None or values.shape[1] != len(names or cells):
            names, values = _cells(path, mark, skip, names)
    except DataError:
        raise
    except (*BROKEN, csv.Error) as error:  # gzip's own errors are of these kinds
        raise DataError(f"{path} is not a table ({why(error)}).") from None
    names = None if names is None else [name.strip() for name in names]
    return (None, values) if names is not None and is_numbered(names) else (names, values)


def _open(path: Path) -> Any:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path} is text in UTF-16: save it as CSV in UTF-8.")
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def _first_row(path: Path, head: list[str]) -> tuple[int, str]:
    """How many lines come before the first row, and what parts its columns."""
    mark = ""
    for skip, line in enumerate(head):
        if told := _MARK.fullmatch(line):
            mark = told[1]
        elif line.startswith("%%MatrixMarket"):
            raise DataError(
                f"{path} is in the format Matrix Market: read it by scipy.io.mmread and use "
                "from_scipy."
            )
        elif line.strip() and line[0] not in "#%":
            second = next((other for other in head[skip + 1 :] if other.strip()), line).strip()
            return skip, mark or _delimiter(line, second)
    raise DataError(f"{path} is empty.")


def _delimiter(first: str, second: str) -> str:
    mark = next((mark for mark in "\t;," if mark in first), None)
    if mark is not None:
        return mark
    # Spaces may be part of a text: they part numbers, and what is quoted.
    numbers = all(as_number(part.strip('"')) is not None for part in second.split())
    return " " if " " in second and (numbers or re.search(r'"\s', second)) else ";"


def _names(path: Path, cells: list[str], mark: str, before: str) -> list[str] | None:
    """The names of the columns: the first row, or the comment before it, or none."""
    filled = [cell for cell in cells if not is_missing(cell)]
    text = [cell for cell in filled if not is_numeric(cell)]
    if filled and (len(text) == len(filled) or has_known_name(text)):
        return cells
    if is_index(cells) and is_numbered(cells[1:]):  # as pandas writes columns without names
        return cells
    if text:
        raise DataError(
            f"{path}: its first line has both {text[0]!r} and numbers, so that it is neither a "
            "row of numbers nor one of names: name every column."
        )
    comment = next(csv.reader([before.lstrip("#% ").strip()], delimiter=mark), [])
    return comment if len(comment) == len(cells) and has_known_name(comment) else None


def _numbers(path: Path, mark: str, skip: int) -> Any:
    """Rows of numbers by NumPy, which is fast; None where it cannot read them all."""
    how: dict[str, Any] = {"delimiter": None if mark == " " else mark, "skiprows": skip}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header without a row
            values = np.loadtxt(
                path, ndmin=2, comments=None, quotechar='"', encoding="utf-8-sig", **how
            )
    except ValueError:
        return None
    if values.shape[1] == 1:  # where an empty line is a missing number, which NumPy leaves out
        with _open(path) as file:
            lines = [line.strip() for line in islice(file, skip, None)]
        if "" in lines[: len(values)]:
            return None
    return values


def _cells(path: Path, mark: str, skip: int, names: list[str] | None) -> tuple[Any, Any]:
    """The names and an array of the cells as text."""
    with _open(path) as file:
        lines = [line.strip(" \r\n") for line in islice(file, skip, None)]
    rows = list(csv.reader(lines, delimiter=mark, skipinitialspace=mark == " "))
    if max(map(len, rows), default=0) > 1:  # in one column, nothing is a missing value
        rows = [row for row in rows if any(cell.strip() for cell in row)]
    width = len(names or (rows[0] if rows else []))
    # R's write.table has names for the rows, and no name for those.
    if names is not None and mark != "," and all(len(row) == width + 1 and row[-1] for row in rows):
        names, width = ["", *names], width + 1
    for i, row in enumerate(rows, 1):
        if 1 < width > len(row) or any(cell.strip() for cell in row[width:]):
            raise DataError(
                f"{path} is not a table of numbers (row {i} has {len(row)} columns, not {width})."
            )
    cells = np.empty((len(rows), width), dtype=object)
    for i, row in enumerate(rows):
        cells[i] = [_with_point(cell.strip(), mark) for cell in (row or [""])[:width]]
    empty = [j for j in range(width) if not any(cells[:, j]) and not (names and names[j].strip())]
    kept = [j for j in range(width) if j not in empty or width == 1]
    return None if names is None else [names[j] for j in kept], cells[:, kept]


def _with_point(cell: str, mark: str) -> str:
    """A number with a decimal comma with a point; 1,234 may be that, or be a thousand and more."""
    decimal = re.fullmatch(r"\s*[-+]?\d*,(\d+)([eE][-+]?\d+)?\s*", cell)
    sure = decimal is not None and (mark != "," or len(decimal[1]) != 3)
    return cell.replace(",", ".") if sure else cell
