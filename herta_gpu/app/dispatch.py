"""From arguments to an exit code: parse, run the command, say in one sentence what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herta_gpu.app.arguments import check_names, parser
from herta_gpu.app.crew import Crew, crew
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.streams import give_up, say, unwritten
from herta_gpu.plumbing.files import DataError
from herta_gpu.plumbing.plain import to_plain


def dispatch(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as ended:  # argparse has printed the help, or what is wrong
        Crew().part()
        return _ended(ended)
    except OSError as error:
        return unwritten(error)
    if hasattr(args, "check"):
        args.check(args)
    args.verbose = not (args.json or args.quiet)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    args.crew = Crew()
    code = _carried_out(args)
    args.crew.part()
    return code


def _carried_out(args: argparse.Namespace) -> int:
    """The exit code of the command, whose output is printed."""
    try:
        args.crew = crew(args.command)
        with args.crew.together():
            check_names(args)
            output: CommandOutput = args.run(args)
    except KeyboardInterrupt:
        return _failed(args, _interrupted(args), 130)
    except (DataError, OSError, RuntimeError, MemoryError, ImportError) as error:
        return _failed(args, error, 1)
    except (ValueError, TypeError) as error:
        return _failed(args, error, 2)
    except Exception as error:  # an error of ours: no input should lead here
        what = f"{type(error).__name__}: {error}"
        return _failed(args, f"An error of herta itself ({what}): --debug shows where.", 1)
    wrong = say(sys.stdout, _as_json(output.content) if args.json else output.text)
    return int(output.diverged) if wrong is None else unwritten(wrong)


def _ended(ended: SystemExit) -> int:
    """Write all that argparse printed, then end as it did."""
    try:
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError as error:
        return unwritten(error)
    raise ended


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(to_plain(content, lossy=True), indent=1)


def _interrupted(args: argparse.Namespace) -> str:
    """What to say after Ctrl-C: how to go on, if there is a run that has begun."""
    if args.command == "convert":
        return "Interrupted: the same command goes on."
    folder = getattr(args, "resume", None) or getattr(args, "out", None)
    begun = args.command in ("train", "tune") and folder and Path(folder, "config.json").is_file()
    return f"Interrupted: herta train --resume {folder} goes on." if begun else "Interrupted."


def _failed(args: argparse.Namespace, error: Any, code: int) -> int:
    if args.debug:
        raise
    text = " ".join(str(error).split()) or type(error).__name__
    if args.json:
        say(sys.stdout, _as_json({"error": text, "exit_code": code}))
    say(sys.stderr, f"herta: {text}")
    return code
