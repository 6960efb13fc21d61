"""OGB's own files, read from front to back a few megabytes at a time, without ogb or torch.

The arrays of a download are members of `raw/data.npz` (ogbn-papers100M) or compressed tables
`raw/*.csv.gz` (ogbn-arxiv, ogbn-products).  `survey` checks whatever the headers allow; the arrays
themselves come as a `Stream` each.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, checked_split
from herta_gpu.datasets.places import Folder, Place, Zipped, member_stamp, readable
from herta_gpu.plumbing.files import DataError

_DOWNLOADS = {  # the folder in OGB's zip, and the split that OGB uses
    "ogbn-arxiv": ("arxiv", "time"),
    "ogbn-products": ("products", "sales_ranking"),
    "ogbn-papers100M": ("papers100M-bin", "time"),
}
FROM_FILES = tuple(_DOWNLOADS)
_CHUNK = 1 << 22  # bytes read together
_LONGEST = 1 << 26  # bytes of one line of a table
_READERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # differs in the names of fields, and has none
}


@dataclass(frozen=True)
class Stream:
    """One array that is read from front to back."""

    name: str  # for an error: the file, and the entry in it
    stamp: str  # changes with the content
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columnwise: bool  # Fortran order, as of edges that are listed in pairs
    runs: Callable[[], Iterator[Any]]  # all values in the order of the file, some at a time


@dataclass(frozen=True)
class Raw:
    """What OGB's files hold."""

    source: str
    n: int
    m: int
    edges: Stream  # (2, m)
    features: Stream  # (n, d)
    labels: Stream  # (n, 1) or (n,)
    split: dict[str, Any]


def find(name: str, folders: Sequence[Path]) -> Place | None:
    """OGB's files of a dataset in the first folder that has them, unpacked or still zipped."""
    download, _ = _DOWNLOADS[name]
    known = (name.replace("-", "_"), download)
    for folder in folders:
        inside = [folder / known[0], folder / known[1]]
        for at in [folder, *inside] if folder.resolve().name in known else inside:
            if any((at / "raw" / file).is_file() for file in ("data.npz", "edge.csv.gz")):
                return Folder(at)
        if (folder / f"{download}.zip").is_file():
            return Zipped(folder / f"{download}.zip")
    return None


def expected(name: str) -> str:
    """Where the files of a dataset are looked for below a root, in words."""
    download, _ = _DOWNLOADS[name]
    return f"{name.replace('-', '_')}/raw, {download}/raw or {download}.zip"


def survey(name: str, place: Place) -> Raw:
    """Everything small, and the shapes of everything large, checked against each other."""
    found = _binary(place) if place.has("raw/data.npz") else _tables(place)
    n, m, edges, features, labels = found
    if n < 1:
        raise DataError(f"{place.path}: the number of nodes is {n}.")
    if edges.shape != (2, m):
        raise DataError(f"{edges.name} must have shape (2, {m}), one column per edge, not "
                        f"{edges.shape}.")  # fmt: skip
    if len(features.shape) != 2 or features.shape[0] != n:
        raise DataError(f"{features.name} has shape {features.shape} but there are {n:,} nodes.")
    if labels.shape not in ((n,), (n, 1)):
        raise DataError(f"{labels.name} has shape {labels.shape} but there are {n:,} nodes.")
    for stream, kinds, what in ((edges, "iu", "integers"), (features, "f", "floats"),
                                (labels, "fiu", "numbers")):  # fmt: skip
        if stream.dtype.kind not in kinds:
            raise DataError(f"{stream.name} must hold {what}, not {stream.dtype}.")
    for stream in (features, labels):
        if stream.columnwise and min(stream.shape) > 1:
            raise DataError(f"{stream.name} is stored column by column (Fortran order): it can "
                            "only be read row by row.")  # fmt: skip
    return Raw(str(place.path), n, m, edges, features, labels, _split(name, place, n))


def _split(name: str, place: Place, n: int) -> dict[str, Any]:
    folder = f"split/{_DOWNLOADS[name][1]}"
    ids = {}
    for part in PARTS:
        file = f"{folder}/{part}.csv.gz"
        runs = list(_numbers(place, file, 1, np.int64))
        ids[part] = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    split = checked_split(place.named(folder), ids, n)
    return {part: np.sort(ids) for part, ids in split.items()}


# ---- raw/data.npz ----------------------------------------------------------------------------


def _binary(place: Place) -> tuple[int, int, Stream, Stream, Stream]:
    data = _Npz(place, "raw/data.npz")
    labels = _Npz(place, "raw/node-label.npz").stream("node_label")
    n, m = data.number("num_nodes_list"), data.number("num_edges_list")
    return n, m, data.stream("edge_index"), data.stream("node_feat"), labels


class _Npz:
    """The arrays in an .npz file, in whichever order and of whichever version they are."""

    def __init__(self, place: Place, file: str) -> None:
        self._place, self._file, self.name = place, file, place.named(file)
        with self._archive() as archive:
            self._members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}

    @contextlib.contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        with (
            readable(self.name),
            self._place.open(self._file) as file,
            zipfile.ZipFile(file) as archive,
        ):
            yield archive

    def stream(self, key: str) -> Stream:
        if key not in self._members:
            held = ", ".join(self._members) or "nothing"
            raise DataError(f"{self.name} has no entry {key} but {held}: it is not OGB's file.")
        info, name = self._members[key], f"{self.name}: {key}"
        with self._archive() as archive, archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version not in _READERS:
                raise DataError(f"{name} is of version {version} of .npy, which is not known.")
            shape, columnwise, dtype = _READERS[version](member)
            start = member.tell()
        if dtype.hasobject:
            raise DataError(f"{name} holds Python objects, which are not read.")
        total = math.prod(shape)
        if start + total * dtype.itemsize != info.file_size or min(shape, default=0) < 0:
            raise DataError(f"{name} is damaged (its {info.file_size:,} bytes do not fit its shape "
                            f"{shape}): download it again.")  # fmt: skip

        def runs() -> Iterator[Any]:
            with self._archive() as archive, archive.open(info) as member:
                member.read(start)
                yield from _values(member, total, dtype)

        return Stream(name, member_stamp(info), shape, dtype, columnwise, runs)

    def number(self, key: str) -> int:
        """The entry of an array that has one; OGB's lists have as many as there are graphs."""
        stream = self.stream(key)
        if math.prod(stream.shape) != 1 or stream.dtype.kind not in "iu":
            raise DataError(f"{stream.name} must be one integer, for one graph, not "
                            f"{stream.dtype} of shape {stream.shape}.")  # fmt: skip
        return int(next(stream.runs())[0])


def _values(member: Any, total: int, dtype: np.dtype[Any]) -> Iterator[Any]:
    """The `total` values up to the end of a member of a zip, an even number at a time.

    With the last of them zipfile compares the CRC.
    """
    most = max(2, _CHUNK // dtype.itemsize & ~1)
    while total:
        count = min(total, most)
        raw = member.read(count * dtype.itemsize)
        if len(raw) != count * dtype.itemsize:
            raise EOFError("it is cut short")
        total -= count
        yield np.frombuffer(raw, dtype)


# ---- raw/*.csv.gz ----------------------------------------------------------------------------


def _tables(place: Place) -> tuple[int, int, Stream, Stream, Stream]:
    n, m = (_one_number(place, f"raw/num-{what}-list.csv.gz") for what in ("node", "edge"))
    edges = _table(place, "raw/edge.csv.gz", m, 2, np.int64, pairs=True)
    d = _first_line(place, "raw/node-feat.csv.gz").count(b",") + 1
    features = _table(place, "raw/node-feat.csv.gz", n, d, np.float64)
    return n, m, edges, features, _table(place, "raw/node-label.csv.gz", n, 1, np.float64)


def _table(
    place: Place, file: str, rows: int, columns: int, kind: type, pairs: bool = False
) -> Stream:
    """A table that must have so many lines; `pairs` are the columns of an array (2, rows)."""
    name = place.named(file)

    def runs() -> Iterator[Any]:
        left = rows * columns
        for run in _numbers(place, file, columns, kind):
            left -= run.shape[0]
            if left < 0:
                break
            yield run
        if left:
            more = "more" if left < 0 else "fewer"
            raise DataError(f"{name} has {more} than the {rows:,} lines that OGB's counts say.")

    if not place.has(file):
        raise DataError(f"{name} is missing: unpack the download again.")
    shape = (columns, rows) if pairs else (rows, columns)
    return Stream(name, place.stamp(file), shape, np.dtype(kind), pairs, runs)


def _first_line(place: Place, file: str) -> bytes:
    name = place.named(file)
    with readable(name), place.open(file) as raw, gzip.GzipFile(fileobj=raw) as text:
        return text.readline(_LONGEST)


def _one_number(place: Place, file: str) -> int:
    values = np.concatenate([np.empty(0, np.int64), *_numbers(place, file, 1, np.int64)])
    if values.shape != (1,):
        raise DataError(f"{place.named(file)} must hold one integer, for one graph, not "
                        f"{values.shape[0]}.")  # fmt: skip
    return int(values[0])


def _numbers(place: Place, file: str, columns: int, kind: type) -> Iterator[Any]:
    """All numbers of a compressed table without a header, whole lines at a time."""
    name, line, rest = place.named(file), 1, b""
    with readable(name), place.open(file) as raw, gzip.GzipFile(fileobj=raw) as text:
        while chunk := text.read(_CHUNK):
            block = rest + chunk
            cut = block.rfind(b"\n") + 1
            rest = block[cut:]
            if len(rest) > _LONGEST:
                raise ValueError("its lines have no end")
            if cut:
                run = _parsed(block[:cut], columns, kind, name, line)
                line += run.shape[0] // columns
                yield run
        if rest:
            yield _parsed(rest + b"\n", columns, kind, name, line)


def _parsed(lines: bytes, columns: int, kind: type, name: str, first: int) -> Any:
    """The numbers in whole lines, of which the first has the number `first` in the file."""
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    if b'"' in lines and kind is np.float64:
        lines = lines.replace(b'""', b"nan")  # as pandas writes a column that has no number there
    text = np.frombuffer(lines, dtype=np.uint8)
    marks = text[(text == ord(",")) | (text == ord("\n"))] == ord("\n")
    fits = marks.shape[0] % columns == 0 and marks.reshape(-1, columns)[:, -1].all()
    if fits and np.count_nonzero(marks) * columns == marks.shape[0]:
        with contextlib.suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the count below says the same
            values: Any = np.fromstring(lines.replace(b"\n", b","), dtype=kind, sep=",")
            if values.shape[0] == marks.shape[0]:
                return values
    for number, line in enumerate(lines.split(b"\n"), first):
        if not _is_row(line, columns, kind):
            shown = line.decode("utf-8", "replace")[:40]
            raise DataError(f"{name}: line {number:,} is {shown!r} instead of {columns} "
                            f"{'integer' if kind is np.int64 else 'number'}"
                            f"{'s' * (columns != 1)}.")  # fmt: skip
    raise DataError(f"{name} is not a table of numbers.")


def _is_row(line: bytes, columns: int, kind: type) -> bool:
    cells = line.split(b",")
    try:
        for cell in cells:
            (int if kind is np.int64 else float)(cell)
    except ValueError:
        return False
    return len(cells) == columns
