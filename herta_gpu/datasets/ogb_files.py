"""OGB's own files, read from front to back a few megabytes at a time, without ogb or torch.

The arrays of a download are members of `raw/data.npz` (ogbn-papers100M) or compressed tables
`raw/*.csv.gz` (ogbn-arxiv, ogbn-products), in a folder or still in the zip as it came.  `survey`
checks whatever the headers allow; the arrays themselves come as a `Stream` each.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, check_split
from herta_gpu.plumbing.files import DataError, explained, read_header

_DOWNLOADS = {  # the folder in OGB's zip, and the split that OGB uses
    "ogbn-arxiv": ("arxiv", "time"),
    "ogbn-products": ("products", "sales_ranking"),
    "ogbn-papers100M": ("papers100M-bin", "time"),
}
FROM_FILES = tuple(_DOWNLOADS)
_CHUNK = 1 << 22  # bytes read together
_IN_MEMORY = 1 << 28  # bytes of an archive that is unpacked into memory
_LOCAL_HEADER = 30  # bytes before the name of a member in a zip


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


class Download:
    """The files of a download, in a folder or still in the zip as it came."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo] | None:
        """Those of the zip, by their names in the folder that everything lies in."""
        if self.path.is_dir():
            return None
        with _readable(str(self.path)), zipfile.ZipFile(self.path) as archive:
            return {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def has(self, file: str) -> bool:
        return (self.path / file).is_file() if self._members is None else file in self._members

    def name(self, file: str) -> str:
        return str(self.path / file) if self._members is None else f"{self.path} ({file})"

    def stamp(self, file: str) -> str:
        if self._members is not None:
            return _stamp(self._members[file])
        about = (self.path / file).stat()
        return f"{about.st_size}-{about.st_mtime_ns}"

    def open(self, file: str) -> Any:
        """The content of a file, to be read and, unless it is a .gz file, sought."""
        if not self.has(file):
            raise DataError(f"{self.name(file)} is missing: unpack the download again.")
        if self._members is None:
            return open(self.path / file, "rb")
        info = self._members[file]
        if info.compress_type == zipfile.ZIP_STORED:
            return _Window(self.path, info)
        member = zipfile.ZipFile(self.path).open(info)  # noqa: SIM115 - open as long as its member
        if file.endswith(".gz") or info.file_size <= _IN_MEMORY:
            return member if file.endswith(".gz") else io.BytesIO(member.read())
        raise DataError(
            f"{self.path} holds {file} compressed once more, so that it cannot be read in place: "
            "unzip it first."
        )


class _Window:
    """A stored member of a zip as a file that can be sought."""

    def __init__(self, path: Path, info: zipfile.ZipInfo) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self.close = self._file.close
        self._file.seek(info.header_offset)
        head = self._file.read(_LOCAL_HEADER)  # it says how long the names before the content are
        self._start = self._file.tell() + sum(struct.unpack_from("<HH", head, 26))
        self._size = info.file_size
        self.seek(0)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("a place before the beginning of the file")
        return self._file.seek(self._start + at) - self._start

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self.tell())
        return self._file.read(left if count < 0 else min(count, left))


def find_download(name: str, folders: Sequence[Path]) -> Download | None:
    """OGB's files of a dataset in the first folder that has them, unpacked or still zipped."""
    download, _ = _DOWNLOADS[name]
    known = (name.replace("-", "_"), download)
    for folder in folders:
        inside = [folder / known[0], folder / known[1]]
        for at in [folder, *inside] if folder.resolve().name in known else inside:
            if any((at / "raw" / file).is_file() for file in ("data.npz", "edge.csv.gz")):
                return Download(at)
        if (folder / f"{download}.zip").is_file():
            return Download(folder / f"{download}.zip")
    return None


def places_text(name: str) -> str:
    """Where the files of a dataset are looked for below a root."""
    download, _ = _DOWNLOADS[name]
    return f"{name.replace('-', '_')}/raw, {download}/raw or {download}.zip"


def survey(name: str, download: Download) -> Raw:
    """Everything small, and the shapes of everything large, checked against each other."""
    read = _members if download.has("raw/data.npz") else _tables
    found = read(download)
    n, m = (_one(found[key]) for key in ("nodes", "edges"))
    edges, features, labels = (found[key] for key in ("edge_index", "node_feat", "node_label"))
    if n < 1:
        raise DataError(f"{download.path}: the number of nodes is {n}.")
    if edges.shape != (2, m):
        raise DataError(
            f"{edges.name} must have shape (2, {m}), one column per edge, not {edges.shape}."
        )
    for stream, fits in (
        (features, len(features.shape) == 2 and features.shape[0] == n),
        (labels, labels.shape in ((n,), (n, 1))),
    ):
        if not fits:
            raise DataError(f"{stream.name} has shape {stream.shape} but there are {n:,} nodes.")
        if stream.columnwise and min(stream.shape) > 1:
            raise DataError(
                f"{stream.name} is stored column by column (Fortran order): it can only be read "
                "row by row."
            )
    kinds = ((edges, "iu", "integers"), (features, "f", "floats"), (labels, "fiu", "numbers"))
    for stream, kind, what in kinds:
        if stream.dtype.kind not in kind:
            raise DataError(f"{stream.name} must hold {what}, not {stream.dtype}.")
    folder = f"split/{_DOWNLOADS[name][1]}"
    ids = {
        part: np.concatenate(
            [np.empty(0, np.int64), *_numbers(download, f"{folder}/{part}.csv.gz", 1, np.int64)]
        )
        for part in PARTS
    }
    split = check_split(download.name(folder), ids, n)
    split = {part: np.sort(ids) for part, ids in split.items()}
    return Raw(str(download.path), n, m, edges, features, labels, split)


def _one(stream: Stream) -> int:
    """The integer of an array that has one; OGB's lists have as many as there are graphs."""
    if math.prod(stream.shape) != 1 or stream.dtype.kind not in "iu":
        raise DataError(
            f"{stream.name} must be one integer, for one graph, not {stream.dtype} of shape "
            f"{stream.shape}."
        )
    return int(next(stream.runs())[0])


# ---- raw/data.npz ----------------------------------------------------------------------------
def _members(download: Download) -> dict[str, Stream]:
    keys = {"nodes": "num_nodes_list", "edges": "num_edges_list"}
    keys |= {key: key for key in ("edge_index", "node_feat")}
    found = {name: _member(download, "raw/data.npz", key) for name, key in keys.items()}
    return {**found, "node_label": _member(download, "raw/node-label.npz", "node_label")}


def _member(download: Download, file: str, key: str) -> Stream:
    """An array of an .npz file, of whichever version it is."""
    name = f"{download.name(file)}: {key}"
    with _open(download, file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if key not in members:
            held = ", ".join(members) or "nothing"
            raise DataError(
                f"{download.name(file)} has no entry {key} but {held}: it is not OGB's file."
            )
        info = members[key]
        with archive.open(info) as member:
            shape, columnwise, dtype = read_header(member)
            start = member.tell()
    if dtype.hasobject:
        raise DataError(f"{name} holds Python objects, which are not read.")
    total = math.prod(shape)
    if start + total * dtype.itemsize != info.file_size or min(shape, default=0) < 0:
        raise DataError(
            f"{name} is damaged (its {info.file_size:,} bytes do not fit its shape {shape}): "
            "download it again."
        )

    def runs() -> Iterator[Any]:
        """An even number of values at a time; with the last ones zipfile compares the CRC."""
        left, most = total, max(2, _CHUNK // dtype.itemsize & ~1)
        with _open(download, file) as archive, archive.open(info) as member:
            member.read(start)
            while left:
                count = min(left, most)
                raw = member.read(count * dtype.itemsize)
                if len(raw) != count * dtype.itemsize:
                    raise EOFError("it is cut short")
                left -= count
                yield np.frombuffer(raw, dtype)

    return Stream(name, _stamp(info), shape, dtype, columnwise, runs)


def _stamp(info: zipfile.ZipInfo) -> str:
    return f"{info.file_size}-{info.CRC:08x}"


# ---- raw/*.csv.gz ----------------------------------------------------------------------------
def _tables(download: Download) -> dict[str, Stream]:
    found = {
        f"{what}s": _table(download, f"raw/num-{what}-list.csv.gz", 1, 1, np.int64)
        for what in ("node", "edge")
    }
    n, m = map(_one, found.values())
    with _open(download, "raw/node-feat.csv.gz") as text:
        d = text.readline().count(b",") + 1
    wanted: Any = {"edge_index": ("edge", m, 2, np.int64), "node_feat": ("node-feat", n, d, float)}
    wanted |= {"node_label": ("node-label", n, 1, float)}
    for key, (file, *shape) in wanted.items():
        found[key] = _table(download, f"raw/{file}.csv.gz", *shape)
    return found


def _table(download: Download, file: str, rows: int, columns: int, kind: type) -> Stream:
    """A table that must have so many lines; pairs of integers are the columns of (2, rows)."""
    name, pairs = download.name(file), kind is np.int64

    def runs() -> Iterator[Any]:
        left = rows * columns
        for run in _numbers(download, file, columns, kind):
            left -= run.shape[0]
            if left < 0:
                break
            yield run
        if left:
            more = "more" if left < 0 else "fewer"
            raise DataError(f"{name} has {more} than the {rows:,} lines that OGB's counts say.")

    if not download.has(file):
        raise DataError(f"{name} is missing: unpack the download again.")
    shape = (columns, rows) if pairs else (rows, columns)
    return Stream(name, download.stamp(file), shape, np.dtype(kind), pairs, runs)


def _numbers(download: Download, file: str, columns: int, kind: type) -> Iterator[Any]:
    """All numbers of a compressed table without a header, whole lines at a time."""
    first = 1
    with _open(download, file) as text:
        while lines := text.readlines(_CHUNK):
            values = _parse(lines, columns, kind)
            if values is None:
                bad = next(
                    i for i, line in enumerate(lines) if _parse([line], columns, kind) is None
                )
                shown = lines[bad].decode("utf-8", "replace").rstrip("\r\n")[:40]
                what = ("integer" if kind is np.int64 else "number") + "s" * (columns != 1)
                raise DataError(
                    f"{download.name(file)}: line {first + bad:,} is {shown!r} instead of "
                    f"{columns} {what}."
                )
            first += len(lines)
            yield values


def _parse(lines: list[bytes], columns: int, kind: type) -> Any:
    """The numbers in whole lines; None unless each line holds so many."""
    if kind is float:  # as pandas writes a column that has no number there
        lines = [line.replace(b'""', b"nan") for line in lines]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty line
            values: Any = np.loadtxt(lines, kind, delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return values.ravel() if values.shape == (len(lines), columns) else None


@contextlib.contextmanager
def _open(download: Download, file: str) -> Iterator[Any]:
    """A file of the download, unpacked: an archive of arrays, or text."""
    unpack: Any = zipfile.ZipFile if file.endswith(".npz") else partial(gzip.open, mode="rb")
    with (
        _readable(download.name(file)),
        contextlib.closing(download.open(file)) as raw,
        unpack(raw) as opened,
    ):
        yield opened


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """A DataError for whatever the libraries say of a damaged file, but not for a failing disk."""
    failed = None
    with explained(f"{name} is damaged", ": download it again"):
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            failed = error
    if failed is not None:
        raise failed
