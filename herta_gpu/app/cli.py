"""The command line `herta`: from arguments to an exit code, with one sentence for what is wrong.

Exit codes.  0: done.  1: it failed (a damaged file, too little memory, no such device, a diverged
run).  2: it was asked wrongly (an unknown dataset, a negative lam).  3: the fit ended before it was
certified.  130: it was interrupted.

This module imports little at its top.  Everything else is imported inside `main`, once Ctrl-C is
sure to end with a sentence and its exit code.
"""

from __future__ import annotations

import os
import signal
import sys

from herta_gpu.plumbing.machine import launched

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it takes time
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    restore, started = _stop_at_once(), launched()
    _open_streams(silent=started.rank > 0)
    if started.local > 1:  # BLAS reads its share of the cores when it is loaded
        share = str(max(1, (os.cpu_count() or 1) // started.local))
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, share)
    import herta_gpu.app.arguments  # noqa: F401 - late, as the docstring above says

    restore()
    try:
        return _run(argv)
    except KeyboardInterrupt:  # it came before or after the command itself
        _say(sys.stderr, "herta: Interrupted.")
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


# ---- the command ------------------------------------------------------------------------------
def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command that they name, and wait for the other processes."""
    from herta_gpu.app.arguments import parser
    from herta_gpu.app.crew import Crew

    try:
        args = parser().parse_args(argv)
        args.check(args)
    except SystemExit as ended:  # argparse has printed the help, or what is wrong
        Crew().part()
        for stream in (sys.stderr, sys.stdout):
            try:
                stream.flush()
            except OSError as error:
                _give_up(stream)
                if stream is sys.stdout:
                    return _fail_to_write(error)
        raise ended from None
    except OSError as error:
        return _fail_to_write(error)
    args.verbose = not (args.json or args.quiet)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    args.crew = Crew()
    code = _carry_out(args)
    args.crew.part()
    return code


def _carry_out(args: Namespace) -> int:
    from herta_gpu.app.arguments import check_names
    from herta_gpu.app.crew import crew
    from herta_gpu.app.runs import as_json
    from herta_gpu.plumbing.files import DataError

    try:
        args.crew = crew(args.command)
        with args.crew.together():
            check_names(args)
            output = args.run(args)
    except KeyboardInterrupt:
        folder, text = getattr(args, "resume", None) or getattr(args, "out", None), "Interrupted"
        if args.command == "convert":
            text += ": the same command goes on"
        elif args.command in ("train", "tune") and os.path.isfile(f"{folder}/config.json"):
            text += f": herta train --resume {folder} goes on"
        return _fail(args, f"{text}.", 130)
    except (DataError, OSError, RuntimeError, MemoryError, ImportError) as error:
        return _fail(args, error, 1)
    except (ValueError, TypeError) as error:
        return _fail(args, error, 2)
    except Exception as error:  # an error of ours: no input should lead here
        what = f"{type(error).__name__}: {error}"
        return _fail(args, f"An error of herta itself ({what}): --debug shows where.", 1)
    wrong = _say(sys.stdout, as_json(output.content) if args.json else output.text)
    return output.code if wrong is None else _fail_to_write(wrong)


def _fail(args: Namespace, error: Any, code: int) -> int:
    from herta_gpu.app.runs import as_json

    if args.debug:
        raise
    text = " ".join(str(error).split()) or type(error).__name__
    if args.json:
        _say(sys.stdout, as_json({"error": text, "exit_code": code}))
    _say(sys.stderr, f"herta: {text}")
    return code


# ---- streams that may be closed, full, or without a reader ------------------------------------
def _open_streams(silent: bool = False) -> None:
    """Give a closed standard output or error a file that takes everything and keeps nothing.

    So do `silent` processes, for which another one speaks.
    """
    for name in ("stdout", "stderr"):
        if silent or getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _say(stream: Any, text: str) -> OSError | None:
    """Write a line; return the error if the device is full or the reader has left."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        _give_up(stream)
        return error
    return None


def _give_up(stream: Any) -> None:
    """Send the rest of a broken stream nowhere: Python would try to write it when it ends."""
    try:
        at = stream.fileno()
    except (OSError, ValueError):  # it has no file, so Python writes nothing at its end
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, at)
    os.close(nowhere)


def _fail_to_write(error: OSError) -> int:
    """The exit code of a result that could not be written.

    `herta info | head`, where the reader leaves early, is no failure; a full device is one.
    """
    _give_up(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    why = error.strerror or error
    _say(sys.stderr, f"herta: The result could not be written to standard output ({why}).")
    return 1


if __name__ == "__main__":
    sys.exit(main())
