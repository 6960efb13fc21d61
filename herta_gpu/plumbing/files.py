"""Files that appear whole or not at all, and sentences on what is wrong with a file."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import pickle
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # not POSIX: files still appear whole, but leftovers of killed writes stay
    fcntl = None  # type: ignore[assignment]


class DataError(ValueError):
    """A file that is damaged, truncated, or not what its name says."""


_RECENT = 60.0  # seconds: a younger temporary file may not have its lock yet


# What NumPy, zipfile and the operating system raise at a file that is not what it should be.
BROKEN = (
    ValueError, TypeError, OSError, EOFError, KeyError, RuntimeError, OverflowError, SyntaxError,
    zipfile.BadZipFile, zlib.error, pickle.UnpicklingError,
)  # fmt: skip
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_target(path: str | Path) -> None:
    """Raise an error, before any work, unless a file can be written to `path`."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it to write to.")
    check_place(path.parent)


def check_place(folder: str | Path) -> None:
    """Raise an error unless the folder is there, or can be made, and may be written into."""
    found = Path(folder).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise ValueError(f"{found} is a file: nothing can be written below it.")
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(f"Nothing may be written into {found}: choose another folder.")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds and vanishes if it does not.

    Folders that had to be made for it vanish with it.
    """
    check_target(path)
    with made_folder(path.parent):
        _sweep(path)
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent
        )
        temporary = Path(name)
        try:
            _lock(handle)
            yield temporary
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
            # mkstemp makes files private; a finished one gets the permissions of any other.
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            os.replace(temporary, path)
        finally:
            os.close(handle)
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; after an error, remove those that are new and empty."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another process has written into it
            for place in new:
                place.rmdir()
        raise


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays into exactly this path, without pickles.

    NumPy gets an open file: to a name without .npz it would add that ending, and the file would
    lie beside the one that was asked for.
    """
    for key, array in arrays.items():
        if np.asarray(array).dtype.hasobject:
            raise TypeError(f"{key} holds Python objects, which are not written to a file.")
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
        try:
            if not zipfile.is_zipfile(path):
                raise DataError(f"{path} is not {what}: {_looks_like(path)}.")
            with zipfile.ZipFile(path) as archive:
                self._members = {m.filename: m for m in archive.infolist()}
        except DataError:
            raise
        except BROKEN as error:
            raise DataError(f"{path} is not {what} ({why(error)}).") from None
        self.keys = [name.removesuffix(".npy") for name in self._members]

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def header(self, key: str) -> tuple[tuple[int, ...], Any]:
        """Shape and type of an entry that can be read: whole, and without Python objects."""
        name = key if key in self._members else f"{key}.npy"
        if name not in self._members:
            raise DataError(f"{self.path} is not {self._what}: it has no entry {key}.")
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(name) as member:
                version = np.lib.format.read_magic(member)
                shape, _, dtype = _HEADERS.get(version, _HEADERS[2, 0])(member)
        except BROKEN as error:
            raise self._damaged(key, why(error)) from None
        if dtype.hasobject:
            raise DataError(
                f"{self.path}: {key} holds Python objects, which are not read: store it as "
                "numbers or as text."
            )
        if min(shape, default=0) < 0:
            raise self._damaged(key, f"its shape is {shape}")
        if math.prod(map(int, shape)) * dtype.itemsize > self._members[name].file_size:
            raise self._damaged(key, "it is cut short")
        return shape, dtype

    def __getitem__(self, key: str) -> Any:
        self.header(key)
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return archive[key]
        except BROKEN as error:
            raise self._damaged(key, why(error)) from None

    def _damaged(self, key: str, reason: str) -> DataError:
        return DataError(f"{self.path} is damaged: its entry {key} cannot be read ({reason}).")


def load_npy(path: Path, what: str, mmap: bool = True) -> Any:
    """The array of a .npy file, mapped into memory unless it is empty; pickles are not read."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            shape, _, _ = _HEADERS.get(version, _HEADERS[2, 0])(file)
        # An array without numbers cannot be mapped.
        return np.load(path, "r" if mmap and 0 not in shape else None, allow_pickle=False)
    except BROKEN as error:
        reason = _looks_like(path) if _no_numpy(path) else why(error)
        raise DataError(f"{path} is not {what} ({reason}).") from None


def why(error: BaseException) -> str:
    """The words of a library's error, unless they advise to load a pickle, which runs its code."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if "pickle" in text.lower() or isinstance(error, pickle.UnpicklingError):
        return "it holds Python objects, or is cut short"
    return text or type(error).__name__


def _no_numpy(path: Path) -> bool:
    with open(path, "rb") as file:
        return not file.read(6).startswith(np.lib.format.MAGIC_PREFIX)


def _looks_like(path: Path) -> str:
    """The kind of a file, told from its first bytes."""
    with open(path, "rb") as file:
        start = file.read(512)
    text = start.lstrip().lower()
    if not start:
        return "it is empty"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, perhaps of a download that failed"
    if text.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, whose file was not fetched"
    if start.startswith(b"PK"):
        return "it is cut short"
    if start.startswith(np.lib.format.MAGIC_PREFIX):
        return "it is a single array"
    return "it is some other kind of file"


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """`new_file` for a folder; when another process was faster, its result stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with _held(temporary):
            yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote `path`.

    A process that writes holds a lock, which the operating system frees when the process ends.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        try:
            if time.time() - left.stat().st_mtime > _RECENT:
                with _held(left) as free:
                    if free and left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
                    elif free:
                        left.unlink(missing_ok=True)
        except OSError:
            continue  # it is gone, or another user's: no reason to fail


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Try to lock a file or folder during the block; gives whether it was free."""
    if fcntl is None:
        yield False
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
