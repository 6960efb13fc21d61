"""The command line `herta`: exit codes, and errors in one sentence.

0: done.  1: it failed (a damaged file, too little memory, no such device, a diverged run).  2: it
was asked wrongly (an unknown dataset, a negative lam).  130: it was interrupted.

Whatever takes time to import is imported inside `main`, where Ctrl-C has its sentence.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # the word that type checkers know, without the time that `typing` takes
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    Command = Callable[[argparse.Namespace], tuple[dict[str, Any], str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    restore = _stop_at_once()
    _open_streams()
    from herta_gpu.app import profile as measure  # noqa: F401
    from herta_gpu.app.arguments import parser

    restore()
    try:
        try:
            args = parser().parse_args(argv)
        except SystemExit as ended:  # the help was printed, or what is wrong
            return _ended(ended)
        except OSError as error:
            return _unwritten(error)
        return _run(args)
    except KeyboardInterrupt:  # between two sentences of our own
        _say(sys.stderr, "herta: Interrupted.")
        return 130


def _run(args: argparse.Namespace) -> int:
    from herta_gpu.app.arguments import check_names
    from herta_gpu.plumbing.files import DataError

    if hasattr(args, "check"):
        args.check(args)
    args.verbose = not (args.json or args.quiet)
    try:
        check_names(args)
        result, text = _command(args.command)(args)
    except KeyboardInterrupt:
        return _failed(args, _interrupted(args), 130)
    except (DataError, OSError, RuntimeError, MemoryError, ImportError) as error:
        return _failed(args, error, 1)
    except (ValueError, TypeError) as error:
        return _failed(args, error, 2)
    except Exception as error:  # ours: nothing that a user does should come here
        what = f"{type(error).__name__}: {error}"
        return _failed(args, f"An error of herta itself ({what}): --debug shows where.", 1)
    if args.json:
        text = _as_json(result)
    wrong = _say(sys.stdout, text)
    return int(_diverged(result)) if wrong is None else _unwritten(wrong)


def _ended(ended: SystemExit) -> int:
    """Pass on how argparse ended, once all that it printed is written."""
    try:
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    raise ended


def _unwritten(error: OSError) -> int:
    """`herta info | head` is no failure, a full device is one."""
    _give_up(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    said = f"herta: The result could not be written to standard output ({error.strerror or error})."
    _say(sys.stderr, said)
    return 1


def _diverged(result: dict[str, Any]) -> bool:
    """Whether this run, or one of those that were compared, has no result worth the name."""
    runs = [result, *result.get("runs", {}).values()]
    return any(run.get("status") == "diverged" for run in runs)


def _as_json(result: dict[str, Any]) -> str:
    import json

    from herta_gpu.app.runs import jsonable

    return json.dumps(jsonable(result), indent=1)


def _command(name: str) -> Command:
    from herta_gpu.app import commands, compare
    from herta_gpu.app import profile as measure

    module = {"train": commands, "tune": commands, "predict": commands, "compare": compare}
    command: Command = getattr(module.get(name, measure), name)
    return command


def _interrupted(args: argparse.Namespace) -> str:
    from pathlib import Path

    run = getattr(args, "resume", None) or getattr(args, "out", None)
    begun = args.command in ("train", "tune") and run and Path(run, "config.json").is_file()
    return f"Interrupted: herta train --resume {run} goes on." if begun else "Interrupted."


def _failed(args: argparse.Namespace, error: Any, code: int) -> int:
    if args.debug:
        raise
    text = " ".join(str(error).split()) or type(error).__name__
    if args.json:
        _say(sys.stdout, _as_json({"error": text, "exit_code": code}))
    _say(sys.stderr, f"herta: {text}")
    return code


# ---- standard output, standard error and Ctrl-C ---------------------------------------------
def _say(stream: Any, text: str) -> OSError | None:
    """Write a line; the error if that is impossible: a full device, or nobody who reads."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        _give_up(stream)
        return error
    return None


def _give_up(stream: Any) -> None:
    """Nothing more into a stream that takes nothing: Python would try again when it ends."""
    import os

    try:
        at = stream.fileno()
    except (OSError, ValueError):  # no file behind it, as in a test: nothing happens at the end
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, at)
    os.close(nowhere)


def _open_streams() -> None:
    """Standard output and error, also where the caller closed them."""
    import os

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _stop_at_once() -> Callable[[], object]:
    """Let Ctrl-C end the process there and then, until the function given back is called.

    While modules are imported there is nothing to clean up, and an exception in the middle of an
    import may be printed, or taken for a missing module, by whoever imports.
    """
    import os
    import signal

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
