"""The command line `herta`: it begins here, before anything that takes time to import is there.

Exit codes.  0: done.  1: it failed (a damaged file, too little memory, no such device, a diverged
run).  2: it was asked wrongly (an unknown dataset, a negative lam).  130: it was interrupted.

This module must stay light.  Everything else is imported inside `main`, where Ctrl-C already has
its sentence and its exit code.
"""

from __future__ import annotations

import os
import signal
import sys

from herta_gpu.app.streams import open_streams, say

TYPE_CHECKING = False  # the word that type checkers know, without the time that `typing` takes
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
    except KeyboardInterrupt:  # between two sentences of our own
        say(sys.stderr, "herta: Interrupted.")
        return 130


def _stop_at_once() -> Callable[[], object]:
    """Let Ctrl-C end the process there and then, until the function given back is called.

    While modules are imported there is nothing to clean up, and an exception in the middle of an
    import may be printed, or taken for a missing module, by whoever imports.
    """

    def stop(*_: object) -> None:
        os.write(2, b"herta: Interrupted.\n")
        os._exit(130)

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread, which gets the signals
        return lambda: None
    return lambda: signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
