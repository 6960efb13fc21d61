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
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, check_split
from herta_gpu.plumbing.files import BROKEN, DataError, why

_DOWNLOADS = {  # the folder in OGB's zip, and the split that OGB uses
    "ogbn-arxiv": ("arxiv", "time"),
    "ogbn-products": ("products", "sales_ranking"),
    "ogbn-papers100M": ("papers100M-bin", "time"),
}
FROM_FILES = tuple(_DOWNLOADS)
_CHUNK = 1 << 22  # bytes read together
_LONGEST = 1 << 26  # bytes of one line of a table
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
        with readable(str(self.path)), zipfile.ZipFile(self.path) as archive:
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
    read = _survey_binary if download.has("raw/data.npz") else _survey_tables
    n, m, edges, features, labels = read(download)
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
    ids = {part: _column(download, f"{folder}/{part}.csv.gz") for part in PARTS}
    split = check_split(download.name(folder), ids, n)
    split = {part: np.sort(ids) for part, ids in split.items()}
    return Raw(str(download.path), n, m, edges, features, labels, split)


# ---- raw/data.npz ----------------------------------------------------------------------------
def _survey_binary(download: Download) -> tuple[int, int, Stream, Stream, Stream]:
    def number(key: str) -> int:
        """The entry of an array that has one; OGB's lists have as many as there are graphs."""
        stream = _member(download, "raw/data.npz", key)
        if math.prod(stream.shape) != 1 or stream.dtype.kind not in "iu":
            raise DataError(
                f"{stream.name} must be one integer, for one graph, not {stream.dtype} of shape "
                f"{stream.shape}."
            )
        return int(next(stream.runs())[0])

    n, m = number("num_nodes_list"), number("num_edges_list")
    edges, features = (_member(download, "raw/data.npz", k) for k in ("edge_index", "node_feat"))
    return n, m, edges, features, _member(download, "raw/node-label.npz", "node_label")


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
            version = np.lib.format.read_magic(member)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise DataError(f"{name} is of version {version} of .npy, which is not known.")
            read = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
            shape, columnwise, dtype = getattr(np.lib.format, read)(member)
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
def _survey_tables(download: Download) -> tuple[int, int, Stream, Stream, Stream]:
    counts = []
    for what in ("node", "edge"):
        file = f"raw/num-{what}-list.csv.gz"
        found = _column(download, file)
        if found.shape != (1,):
            raise DataError(
                f"{download.name(file)} must hold one integer, for one graph, not {found.shape[0]}."
            )
        counts.append(int(found[0]))
    n, m = counts
    with _open(download, "raw/node-feat.csv.gz") as text:
        d = text.readline(_LONGEST).count(b",") + 1
    edges = _table(download, "raw/edge.csv.gz", m, 2, np.int64)
    features = _table(download, "raw/node-feat.csv.gz", n, d, np.float64)
    return n, m, edges, features, _table(download, "raw/node-label.csv.gz", n, 1, np.float64)


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


def _column(download: Download, file: str) -> Any:
    """A table of one integer per line, which is small."""
    return np.concatenate([np.empty(0, np.int64), *_numbers(download, file, 1, np.int64)])


def _numbers(download: Download, file: str, columns: int, kind: type) -> Iterator[Any]:
    """All numbers of a compressed table without a header, whole lines at a time."""
    line, rest = 1, b""
    with _open(download, file) as text:
        while True:
            chunk = text.read(_CHUNK)
            block = rest + chunk if chunk or not rest else rest + b"\n"
            cut = block.rfind(b"\n") + 1
            rest = block[cut:]
            if len(rest) > _LONGEST:
                raise ValueError("its lines have no end")
            if cut:
                run = _parse(block[:cut], columns, kind, download.name(file), line)
                line += run.shape[0] // columns
                yield run
            if not chunk:
                return


def _parse(lines: bytes, columns: int, kind: type, name: str, first: int) -> Any:
    """The numbers in whole lines, of which the first has the number `first` in the file."""
    lines = lines.replace(b"\r\n", b"\n")
    if kind is np.float64:
        lines = lines.replace(b'""', b"nan")  # as pandas writes a column that has no number there
    values = _load(lines, columns, kind)
    if values is not None:
        return values
    for number, line in enumerate(lines.split(b"\n"), first):
        if _load(line + b"\n", columns, kind) is None:
            shown = line.decode("utf-8", "replace")[:40]
            what = ("integer" if kind is np.int64 else "number") + "s" * (columns != 1)
            raise DataError(f"{name}: line {number:,} is {shown!r} instead of {columns} {what}.")
    raise DataError(f"{name} is not a table of numbers.")


def _load(lines: bytes, columns: int, kind: type) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty line
            values: Any = np.loadtxt(io.BytesIO(lines), kind, delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return values.ravel() if values.shape == (lines.count(b"\n"), columns) else None


@contextlib.contextmanager
def _open(download: Download, file: str) -> Iterator[Any]:
    """A file of the download, unpacked: an archive of arrays, or text."""
    unpack: Any = zipfile.ZipFile if file.endswith(".npz") else _unzip
    with (
        readable(download.name(file)),
        contextlib.closing(download.open(file)) as raw,
        unpack(raw) as opened,
    ):
        yield opened


def _unzip(raw: Any) -> gzip.GzipFile:
    return gzip.GzipFile(fileobj=raw)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """A DataError for whatever the libraries say of a damaged file, but not for a failing disk."""
    try:
        yield
    except DataError:
        raise
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{name} is damaged ({why(error)}): download it again.") from None
