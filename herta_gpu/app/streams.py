"""Standard output and standard error, also where they are closed, full, or read by nobody."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the word that type checkers know, without the time that `typing` takes
if TYPE_CHECKING:
    from typing import Any


def open_streams() -> None:
    """Standard output and error, also where the caller closed them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def say(stream: Any, text: str) -> OSError | None:
    """Write a line; the error if that is impossible: a full device, or nobody who reads."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream)
        return error
    return None


def give_up(stream: Any) -> None:
    """Nothing more goes into a stream that takes nothing: Python would try again when it ends."""
    try:
        at = stream.fileno()
    except (OSError, ValueError):  # no file behind it, as in a test: nothing happens at the end
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
