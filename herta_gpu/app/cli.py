"""The command line `herta` begins here, before anything is imported that takes time.

Exit codes.  0: done.  1: it failed (a damaged file, too little memory, no such device, a diverged
run).  2: it was asked wrongly (an unknown dataset, a negative lam).  130: it was interrupted.

This module imports little.  Everything else is imported inside `main`, once Ctrl-C is sure to end
with a sentence and its exit code.
"""

from __future__ import annotations

import os
import signal
import sys

from herta_gpu.app.streams import open_streams, say

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it takes time
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    restore = _stop_at_once()
    open_streams()
    from herta_gpu.app.dispatch import dispatch  # late, as the docstring above says

    restore()
    try:
        return dispatch(argv)
    except KeyboardInterrupt:  # it came before or after the command itself
        say(sys.stderr, "herta: Interrupted.")
        return 130


def _stop_at_once() -> Callable[[], object]:
    """Let Ctrl-C end the process at once, until the function that is returned is called.

    While modules are imported there is nothing to clean up, and the code that imports might print
    an exception, or take it for a missing module.
    """

    def stop(*_: object) -> None:
        os.write(2, b"herta: Interrupted.\n")
        os._exit(130)

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # only the main thread gets signals, and this is another one
        return lambda: None
    return lambda: signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
