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
from herta_gpu.plumbing.machine import launched

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it takes time
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    restore, started = _stop_at_once(), launched()
    open_streams(silent=started.rank > 0)
    if started.local > 1:
        _share_cores(started.local)
    from herta_gpu.app.dispatch import dispatch  # late, as the docstring above says

    restore()
    try:
        return dispatch(argv)
    except KeyboardInterrupt:  # it came before or after the command itself
        say(sys.stderr, "herta: Interrupted.")
        return 130


def _share_cores(processes: int) -> None:
    """Give BLAS, which reads this when it is loaded, its share of the cores."""
    share = str(max(1, (os.cpu_count() or 1) // processes))
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, share)


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
