"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not POSIX: leftovers stay, half files still never look whole
    fcntl = None  # type: ignore[assignment]


class DataError(ValueError):
    """A file that is damaged, truncated, or not what its name says."""


_RECENT = 60.0  # seconds: a temporary that young may not have its lock yet


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds and vanishes if it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
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
def new_folder(path: Path) -> Iterator[Path]:
    """The same for a folder; when another process was faster, its result stays."""
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
    """Remove what a process left behind that was killed while it wrote `path`.

    Whoever writes holds a lock, which the operating system takes back when the process ends.
    """
    for left in path.parent.glob(f".{path.name}.*"):
        try:
            if time.time() - left.stat().st_mtime > _RECENT:
                with _held(left) as free:
                    if free and left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
                    elif free:
                        left.unlink(missing_ok=True)
        except OSError:
            continue  # gone, or not ours: no reason to fail


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold the lock of a file or folder; whether it was free."""
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
