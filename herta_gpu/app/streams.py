"""Writing to standard output and error, even if they are closed, full, or have no reader."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it takes time
if TYPE_CHECKING:
    from typing import Any


def open_streams(silent: bool = False) -> None:
    """Give a closed standard output or error a file that takes everything and keeps nothing.

    So do `silent` processes, for which another one speaks.
    """
    for name in ("stdout", "stderr"):
        if silent or getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def say(stream: Any, text: str) -> OSError | None:
    """Write a line; return the error if the device is full or the reader has left."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream)
        return error
    return None


def give_up(stream: Any) -> None:
    """Send the rest of a broken stream nowhere: Python would try to write it when it ends."""
    try:
        at = stream.fileno()
    except (OSError, ValueError):  # it has no file, so Python writes nothing at its end
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, at)
    os.close(nowhere)


def unwritten(error: OSError) -> int:
    """The exit code of a result that could not be written.

    `herta info | head`, where the reader leaves early, is no failure; a full device is one.
    """
    give_up(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    said = f"herta: The result could not be written to standard output ({error.strerror or error})."
    say(sys.stderr, said)
    return 1
