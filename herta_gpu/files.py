"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


class DataError(ValueError):
    """A file that is damaged, truncated, or not what its name says."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds and vanishes if it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes files private; a finished one gets the permissions of any other.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The same for a folder; when another process was faster, its result stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
