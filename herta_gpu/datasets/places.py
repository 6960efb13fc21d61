"""Where the files of a download lie: in a folder, or still in the zip as it came."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from herta_gpu.plumbing.files import BROKEN, DataError, why

_IN_MEMORY = 1 << 28  # bytes of an archive that is unpacked into memory
_LOCAL_HEADER = 30  # bytes before the name of a member in a zip


class Place(Protocol):
    """Where the files of a download lie."""

    path: Path

    def has(self, file: str) -> bool: ...

    def named(self, file: str) -> str: ...

    def stamp(self, file: str) -> str: ...

    def open(self, file: str) -> Any: ...


class Folder:
    """Files that were unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, file: str) -> bool:
        return (self.path / file).is_file()

    def named(self, file: str) -> str:
        return str(self.path / file)

    def stamp(self, file: str) -> str:
        about = (self.path / file).stat()
        return f"{about.st_size}-{about.st_mtime_ns}"

    def open(self, file: str) -> Any:
        if not self.has(file):
            raise DataError(f"{self.named(file)} is missing: unpack the download again.")
        return open(self.path / file, "rb")


class Zipped:
    """Files that are still in the zip as it was downloaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        """By their names in the folder that everything lies in."""
        with readable(str(self.path)), zipfile.ZipFile(self.path) as archive:
            return {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def has(self, file: str) -> bool:
        return file in self._members

    def named(self, file: str) -> str:
        return f"{self.path} ({file})"

    def stamp(self, file: str) -> str:
        return member_stamp(self._members[file])

    def open(self, file: str) -> Any:
        if not self.has(file):
            raise DataError(f"{self.path} has no {file}: it is not OGB's download.")
        info = self._members[file]
        if info.compress_type == zipfile.ZIP_STORED:
            return io.BufferedReader(_Window(self.path, self._start(info), info.file_size))
        member = zipfile.ZipFile(self.path).open(info)  # noqa: SIM115 - open as long as its member
        if file.endswith(".gz"):
            return member
        if info.file_size <= _IN_MEMORY:
            with member:
                return io.BytesIO(member.read())
        raise DataError(f"{self.path} holds {file} compressed once more, so that it cannot be read "
                        "in place: unzip it first.")  # fmt: skip

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Where the content of a member begins: its header there has a length of its own."""
        with open(self.path, "rb") as file:
            file.seek(info.header_offset)
            head = file.read(_LOCAL_HEADER)
        return info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", head, 26))


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), max(0, self._size - self._at))
        self._file.seek(self._start + self._at)
        got = self._file.readinto(memoryview(buffer)[:length])
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


def member_stamp(info: zipfile.ZipInfo) -> str:
    return f"{info.file_size}-{info.CRC:08x}"


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
