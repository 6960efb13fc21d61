"""What the workers of a test run make once: the first one makes it, the others wait for it."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # it is part of Python on POSIX only: elsewhere each worker makes its own
    fcntl = None  # type: ignore[assignment]


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it, however the process ends."""
    with open(path, "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_folder(name: str) -> Path:
    """A folder of this user that outlives the run."""
    owner = os.getuid() if hasattr(os, "getuid") else ""
    folder = Path(tempfile.gettempdir()) / f"herta-{name}-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache  # a second lock for the same kernel would wait for the first one for ever
def compile_kernels_once() -> None:
    """Make workers that need the same compiled kernel share it.

    numba keeps machine code on disk and knows nothing of other processes: two that need the same
    kernel compile it twice, and two that store at the same moment can lose what one has stored.
    """
    try:
        from numba.core.caching import IndexDataCacheFile
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    compile_, save, folder = Dispatcher.compile, IndexDataCacheFile.save, cache_folder("numba")

    def lock(*names: Any) -> Path:
        return folder / f"{zlib.crc32(repr(names).encode()):08x}.lock"

    def compile_once(self: Any, signature: Any) -> Any:
        if self._cache.cache_path is None:  # not kept on disk: a part of some kernel
            return compile_(self, signature)
        with exclusive(lock(self.py_func.__module__, self.py_func.__name__, str(signature))):
            return compile_(self, signature)  # which looks on the disk first

    def save_alone(self: Any, key: Any, data: Any) -> None:
        with exclusive(lock(self._index_path)):
            save(self, key, data)

    Dispatcher.compile, IndexDataCacheFile.save = compile_once, save_alone
