"""Files that appear whole or not at all, and sentences on what is wrong with a file."""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import math
import os
import pickle
import shutil
import struct
import tempfile
import time
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.plumbing.machine import host_memory, num_threads

try:
    import fcntl
except ImportError:  # not POSIX: files still appear whole, but leftovers of killed writes stay
    fcntl = None  # type: ignore[assignment]


class DataError(ValueError):
    """A file that is damaged, truncated, or not what its name says."""


_RECENT = 60.0  # seconds: a younger temporary file may not have its lock yet
_SUM_BYTES = 1 << 24  # bytes of each sum within a checksum
_FORMAT, _VERSION = "format", 1  # the entry that describes a file of ours, and how it does

# What NumPy, zipfile and the operating system raise at a file that is not what it should be.
BROKEN = (
    ValueError, TypeError, OSError, EOFError, KeyError, RuntimeError, OverflowError, SyntaxError,
    zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, struct.error, tokenize.TokenError,
    csv.Error,
)  # fmt: skip
_SMALL = 1 << 12  # bytes: of an array that need not be mapped
_LOOKS = (  # how a file begins that is not what it should be, in small letters
    ((b"<!doctype", b"<html", b"<?xml"), "a web page, perhaps of a download that failed"),
    ((b"version https://git-lfs",), "a pointer of Git LFS, whose file was not fetched"),
    ((np.lib.format.MAGIC_PREFIX.lower(),), "a single array"),
)


def check_target(path: str | Path) -> None:
    """Raise an error, before any work, unless a file can be written to `path`."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it to write to.")
    check_place(path.parent)


def check_place(folder: str | Path) -> None:
    """Raise an error unless the folder is there, or can be made, and may be written into."""
    found = _that_exists(folder)
    if not found.is_dir():
        raise ValueError(f"{found} is a file: nothing can be written below it.")
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(f"Nothing may be written into {found}: choose another folder.")


def check_room(folder: Path, need: int, kind: type[Exception], sentence: str) -> None:
    """An error of a kind unless so many bytes have room; its sentence tells {need} and {free}."""
    free = shutil.disk_usage(_that_exists(folder)).free
    if need > free:
        for name, size in (("{need}", need), ("{free}", free)):
            sentence = sentence.replace(name, f"{size / 2**30:,.1f} GB")
        raise kind(sentence)


def _that_exists(folder: str | Path) -> Path:
    """The folder, or the first of those around it that is there."""
    found = Path(folder).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds and vanishes if it does not.

    Folders that had to be made for it vanish with it.
    """
    check_target(path)
    with made_folder(path.parent), _temporary(path, folder=False) as temporary:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes files private; a finished one gets the permissions of any other.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """`new_file` for a folder; when another process was faster, its result stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path, folder=True) as temporary:
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise


@contextlib.contextmanager
def _temporary(path: Path, folder: bool) -> Iterator[Path]:
    """A hidden file or folder beside `path`; those of processes that were killed are removed first.

    A process that writes holds a lock, which the operating system frees when the process ends.
    """

    def remove(temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)

    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's: no reason to fail
            if time.time() - left.stat().st_mtime > _RECENT:
                with lock_path(left) as free:
                    if free:
                        remove(left)
    prefix = f".{path.name}."
    if folder:
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    else:
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
    try:
        with lock_path(temporary):
            yield temporary
    finally:
        remove(temporary)


@contextlib.contextmanager
def lock_path(path: Path) -> Iterator[bool]:
    """Try to lock a file or folder during the block; gives whether it was free."""
    if fcntl is None:
        yield False
        return
    handle, free = os.open(path, os.O_RDONLY), False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free
    finally:
        os.close(handle)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; after an error, remove those that are new and empty."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another process has written into it
            for place in filter(Path.exists, new):
                place.rmdir()
        raise


def checksum(array: Any) -> str:
    """The checksum of the type, the shape and the numbers of an array, in C order.

    It is the CRC-32 of the CRC-32 of each 16 MB: several threads sum large arrays at several GB/s,
    and whatever is altered within 32 bits is noticed for sure.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    chunks = [data[a : a + _SUM_BYTES] for a in range(0, data.size, _SUM_BYTES)]
    with ThreadPoolExecutor(num_threads()) as pool:
        sums = list((map if len(chunks) < 2 else pool.map)(zlib.crc32, chunks))
    about = f"{np.dtype(array.dtype).str}{tuple(array.shape)}".encode()
    return f"{zlib.crc32(np.array(sums, '<u4'), zlib.crc32(about)):08x}"


def write_npz(path: Path, arrays: dict[str, Any], kind: str | None = None) -> None:
    """Write arrays into exactly this path, without pickles.

    A file of a `kind` of ours also gets an entry `format`: its version, and the checksum of every
    other entry by its name.  NumPy gets an open file: to a name without .npz it would add that
    ending, and the file would lie beside the one that was asked for.
    """
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    for key, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"{key} holds Python objects, which are not written to a file.")
    if kind is not None:
        sums = {name: checksum(array) for name, array in arrays.items()}
        about = {"format": f"herta_gpu {kind}", "version": _VERSION, "sums": sums}
        # The first entry: a damaged list of entries may end early, but then it has this one.
        arrays = {_FORMAT: np.array(json.dumps(about)), **arrays}
    with new_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


class Archive:
    """The entries of a .npz file: shapes and kinds from the headers, arrays when asked for."""

    def __init__(self, path: Path, what: str) -> None:
        """`what` says what the file should be; the sentence of an error needs it."""
        self.path, self._what = path, what
        if path.is_dir():
            raise DataError(f"{path} is a folder, not {what}.")
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        with explained(f"{path} is not {what}"):
            if not zipfile.is_zipfile(path):
                raise self._wrong(_looks_like(path))
            # Open as long as this object lives: all entries are of one file, even if another one
            # takes its name.
            self._zip = zipfile.ZipFile(path)
            members = self._zip.infolist()
        names = [m.filename.removesuffix(".npy") for m in members]
        self._members = dict(zip(names, members))
        self.keys = list(self._members)
        self._sums: dict[str, str] = {}
        if any(m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for m in members):
            raise self._wrong("it is packed in a way that NumPy does not use")
        if len(names) > len(self.keys):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._wrong(f"it has an entry {twice!r} twice")

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def header(self, key: str) -> tuple[tuple[int, ...], Any]:
        """Shape and type of an entry that can be read: whole, and without Python objects."""
        if key not in self._members:
            raise self._wrong(f"it has no entry {key}")
        with self._opened(key) as member:
            shape, _, dtype = read_header(member)
        if dtype.hasobject:
            raise DataError(
                f"{self.path}: {key} holds Python objects, which are not read: store it as "
                "numbers or as text."
            )
        size = self._members[key].file_size
        if min(shape, default=0) < 0 or math.prod(map(int, shape)) * dtype.itemsize > size:
            what = "it is cut short" if min(shape, default=0) >= 0 else f"its shape is {shape}"
            raise DataError(f"{self.path} is damaged: its entry {key} cannot be read ({what}).")
        if size > host_memory():
            raise DataError(
                f"{self.path}: its entry {key} takes {bytes_text(size)} unpacked, and "
                f"{bytes_text(host_memory())} of memory are free."
            )
        return shape, dtype

    def __getitem__(self, key: str) -> Any:
        self.header(key)
        with self._opened(key) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):  # and the CRC of the archive is compared at the end
                raise ValueError("it is longer than its array")
        if key in self._sums and checksum(array) != self._sums[key]:
            raise DataError(
                f"{self.path} is damaged: its entry {key} was altered, for its checksum differs."
            )
        return array

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[Any]:
        what = f"{self.path} is damaged: its entry {key} cannot be read"
        with explained(what), self._zip.open(self._members[key]) as member:
            yield member

    @property
    def unpacked(self) -> int:
        """The bytes that the compressed entries take unpacked, as the archive declares them."""
        return sum(m.file_size for m in self._members.values() if m.compress_type)

    def check_format(self, kind: str) -> None:
        """An error unless the entries are those that `write_npz` listed for this kind of file.

        From here on each entry that is read is compared with its checksum.
        """
        if sum(m.file_size for m in self._members.values()) > self.path.stat().st_size:
            raise self._wrong("its entries would unpack to more than the file holds")
        if _FORMAT not in self:
            raise self._wrong(f"it has no entry {_FORMAT}; files of the first version are not read")
        with explained(f"{self.path} is not {self._what}: its entry {_FORMAT}"):
            about = json.loads(str(self[_FORMAT]))
            found, version, sums = about["format"], about["version"], about["sums"]
            if found != f"herta_gpu {kind}":
                raise ValueError(f"it is a {found}")
            check_version(self.path, version, _VERSION)
            self._sums = dict(sums)
        missing = [name for name in self._sums if name not in self]
        if missing or not self._sums:
            raise self._wrong(f"it has no entry {', '.join(missing)}")
        for name in self.keys:
            if name not in (_FORMAT, *self._sums):
                raise self._wrong(f"it has an entry {name!r}, which it does not list")

    def _wrong(self, reason: str) -> DataError:
        return DataError(f"{self.path} is not {self._what}: {reason}.")


def check_version(path: Path, version: Any, newest: int) -> None:
    """An error unless the version of a format is the one that we write."""
    if type(version) is not int or version < 1:
        raise ValueError(f"version {version!r}")
    if version != newest:
        remedy = "update herta_gpu" if version > newest else "save it again"
        raise DataError(f"{path} has version {version}, this herta_gpu reads {newest}: {remedy}.")


def read_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order (True: Fortran's) and type of the array in an open .npy file."""
    old = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, Any] = read(file)
    return found


def load_npy(path: Path, what: str, small: int = 0) -> Any:
    """The array of a .npy file, mapped if it has more than `small` bytes; pickles are not read."""
    with open(path, "rb") as file:
        numpys = file.read(6).startswith(np.lib.format.MAGIC_PREFIX)
    with explained(f"{path} is not {what}"):
        if not numpys:
            raise ValueError(_looks_like(path))
        with open(path, "rb") as file:
            shape, _, dtype = read_header(file)
        mapped = math.prod(shape) * dtype.itemsize > small  # one without numbers cannot be mapped
        return np.load(path, "r" if mapped else None, allow_pickle=False)


def save_arrays(folder: Path, arrays: dict[str, Any]) -> dict[str, str]:
    """Write each array into a file of its own; their checksums."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    return {name: checksum(array) for name, array in arrays.items()}


def open_array(path: Path, remedy: str, size: int | None = None, expected: Any = None) -> Any:
    """An array that `save_arrays` wrote, mapped unless it is small; else an error with a `remedy`.

    Its file must have the `size`, and its numbers the checksum `expected`, as far as they are told.
    """
    found = path.stat().st_size if path.is_file() else None
    if found is None or size not in (None, found):
        what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
        raise DataError(f"{path} {what}: {remedy}.")
    try:
        array = load_npy(path, "a whole array", _SMALL)
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}: {remedy}.") from None
    if expected is not None and checksum(array) != expected:
        raise DataError(f"{path} was altered, for its checksum differs: {remedy}.")
    return array


@contextlib.contextmanager
def explained(what: str, remedy: str = "") -> Iterator[None]:
    """A DataError, "WHAT (REASON).", for all that libraries raise at a damaged file."""
    try:
        yield
    except DataError:
        raise
    except (*BROKEN, RecursionError) as error:
        raise DataError(f"{what} ({why(error)}){remedy}.") from None


def bytes_text(size: float) -> str:
    """A number of bytes as 123.4 MB or 5.6 GB, where 1 GB is 2^30 bytes."""
    for unit in ("B", "KB", "MB"):
        if abs(size) < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GB"


def why(error: BaseException) -> str:
    """The words of a library's error, unless they advise to load a pickle, which runs its code."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if "pickle" in text.lower() or isinstance(error, pickle.UnpicklingError):
        return "it holds Python objects, or is cut short"
    return text or type(error).__name__


def _looks_like(path: Path) -> str:
    """The kind of a file, told from its first bytes."""
    with open(path, "rb") as file:
        start = file.read(512)
    if not start or start.startswith(b"PK"):
        return "it is cut short" if start else "it is empty"
    text = start.lstrip().lower()
    found = (kind for heads, kind in _LOOKS if text.startswith(heads))
    return f"it is {next(found, 'some other kind of file')}"


# ---- graphs ------------------------------------------------------------------------------
# A folder of plain .npy files, which is opened without being read; `graph.json` says what belongs
# to it.  It is written beside its final place and renamed at the end, so an interrupted write
# leaves nothing that looks finished.
GRAPH_VERSION = 2  # the first one had no sums, and is not read
_GRAPH = "herta_gpu graph"
_GRAPH_KINDS = {  # in the order of the results of `open_graph`
    "indptr": ("int64",),
    "indices": ("int32", "int64"),
    "weights": ("float64",),
    "degree": ("float64",),
    "order": ("int64",),
}


class GraphWriter:
    """Writes a graph into a new folder; its rows may come in parts."""

    def __init__(self, folder: str | os.PathLike[str], n: int, entries: int, weighted: bool):
        """An error unless there is room for so many entries in a folder that does not exist."""
        self.folder = Path(folder)
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists already: name a new folder for the graph.")
        check_place(self.folder.parent)
        need = 24 * n + entries * ((4 if n < 2**31 else 8) + (8 if weighted else 0))
        where = f"in {self.folder}, where {{free}} are free: choose another disk."
        check_room(self.folder, need, OSError, "The graph may take {need} " + where)
        self._types: dict[str, Any] = {}  # of what came in parts
        self._entries = 0

    def __enter__(self) -> GraphWriter:
        self._new = new_folder(self.folder)
        self.at = self._new.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._new.__exit__(*error)

    def append(self, indices: Any, weights: Any) -> None:
        """The entries of further rows."""
        for name, part in (("indices", indices), ("weights", weights)):
            if part is not None:
                with (self.at / f"{name}.npy").open("ab") as file:
                    if name not in self._types:
                        _write_header(file, part.dtype, 0)
                    part.tofile(file)
                self._types[name] = part.dtype
        self._entries += indices.shape[0]

    def finish(self, indptr: Any, degree: Any, weighted: bool, order: Any = None) -> None:
        """Everything else; weights that all turned out to be 1 are dropped."""
        if not weighted and self._types.pop("weights", None) is not None:
            (self.at / "weights.npy").unlink()
        for name, dtype in self._types.items():
            with (self.at / f"{name}.npy").open("rb+") as file:
                _write_header(file, dtype, self._entries)
        rest = {"indptr": indptr, "degree": degree, "order": order}
        save_arrays(self.at, {name: array for name, array in rest.items() if array is not None})
        files = sorted(self.at.glob("*.npy"))
        meta = {"format": _GRAPH, "version": GRAPH_VERSION, "nodes": indptr.shape[0] - 1}
        meta |= {"edges": self._entries // 2, "bytes": {p.stem: p.stat().st_size for p in files}}
        meta["sums"] = {path.stem: checksum(load_npy(path, "a whole array")) for path in files}
        (self.at / "graph.json").write_text(json.dumps(meta, indent=1))

    def write(
        self, indptr: Any, indices: Any, weights: Any, degree: Any, order: Any = None
    ) -> None:
        """A whole graph at once."""
        with self:
            self.append(indices, weights)
            self.finish(indptr, degree, weights is not None, order)


def _write_header(file: Any, dtype: Any, length: int) -> None:
    """That of a vector, which NumPy pads so that a longer one has room."""
    known = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, known)


def open_graph(folder: str | os.PathLike[str], check: bool = True) -> list[Any]:
    """[indptr, indices, weights, degree, order] of a folder, as memory maps.

    With `check` they are read once, and compared with their checksums.
    """
    folder, remedy = Path(folder), "delete the folder and save the graph again"
    path = folder / "graph.json"
    if not path.is_file():
        raise DataError(f"{folder} holds no graph: it has no graph.json, as Graph.save writes it.")
    with explained(f"{folder} is no whole graph: its graph.json"):
        meta = json.loads(path.read_text())
        if meta["format"] != _GRAPH:
            raise ValueError(f"it is a {meta['format']} of version {meta['version']}")
        check_version(folder, meta["version"], GRAPH_VERSION)
        sizes, sums, n, edges = meta["bytes"], meta.get("sums"), meta["nodes"], meta["edges"]
        if not {"indptr", "indices"} <= set(sizes) <= set(_GRAPH_KINDS):
            raise ValueError("its list of files is not that of a graph")
        if not all(type(size) is int and size >= 0 for size in (n, edges)):
            raise ValueError("its sizes are no whole numbers")
        if set(sums or ()) != set(sizes):
            raise ValueError("it has no sums of its files")
    lengths, found = {"indptr": n + 1, "indices": 2 * edges, "weights": 2 * edges}, {}
    for name, size in sizes.items():
        known = sums[name] if check else None
        array = found[name] = open_array(folder / f"{name}.npy", remedy, size, known)
        if array.shape != (lengths.get(name, n),) or str(array.dtype) not in _GRAPH_KINDS[name]:
            shown = f"{name} is {array.dtype} of shape {array.shape}"
            raise DataError(f"{folder} is no whole graph ({shown}): {remedy}.")
    if found["indptr"][0] != 0 or found["indptr"][-1] != 2 * edges:
        shown = f"indptr does not end with {2 * edges:,}"
        raise DataError(f"{folder} is no whole graph ({shown}): {remedy}.")
    return [found.get(name) for name in _GRAPH_KINDS]
