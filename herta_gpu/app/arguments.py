"""The options of the command line `herta`, and the function that each command runs.

The options stand here as their help shows them: a flag, what follows it (words in braces are the
only ones allowed, nothing is a switch), a colon between spaces, and the help.  What follows a flag
tells its type (`_TYPES`).  A parameter of the estimator has the same default there and here, which
its help tells in place of `{}`; but for --ridge, with which small data are certified, too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from herta_gpu import __version__
from herta_gpu.app import compare, info, plan, predict, selftest, train, tune
from herta_gpu.app.crew import SPLITS
from herta_gpu.app.tune import LAMS, RIDGES
from herta_gpu.datasets.ogb import FEATURES, PAPERS
from herta_gpu.herta import HERTA
from herta_gpu.planning.settings import (
    DEVICES,
    LABEL_FOLDS,
    LOSS_NAMES,
    NORMALIZATIONS,
    OPTIMIZER_NAMES,
)

# Options beside --resume.
_FREE = ("command", "resume", "json", "quiet", "debug", "run", "check", "allow_uncertified")


class _Parser(argparse.ArgumentParser):
    """A parser that raises an error when its help cannot be written, instead of keeping quiet."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is sys.stderr:
            super()._print_message(message, file)
        else:
            file.write(message)


class _Split(argparse.Action):
    """--split is that of the data or, of `train`, what several processes share out."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        work = values in SPLITS and hasattr(namespace, "ranks_split")
        setattr(namespace, "ranks_split" if work else "split", values)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,5,10") from None


def _lam(text: str) -> float | list[float]:
    one, *more = _numbers(text)
    return [one, *more] if more else one


def _hops(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0,1,2") from None


def _two(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 20,5: one lam for each step")
    return found


def _words(allowed: tuple[str, ...], text: str) -> tuple[str, ...]:
    for word in text.split(","):
        if word not in allowed:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
    return tuple(text.split(","))


def _value(text: str) -> bool | float | str:
    """A word, yes or no, or a number: the estimator says what it does not take."""
    known = {"yes": True, "true": True, "no": False, "false": False}
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return known.get(text.lower(), text)


def _listed(numbers: Iterable[float]) -> str:
    return ",".join(f"{v:g}" for v in numbers)


def _one_of(words: Iterable[str]) -> str:
    return "{" + ",".join(words) + "}"


_LABELS = f"--label-features FOLDS : %s; {LABEL_FOLDS} folds unless told otherwise"
_OPTIMIZERS = f"--optimizer {_one_of(OPTIMIZER_NAMES)}"
_DIR = "--data-dir DIR : where to look; default $HERTA_DATA"
_OVER = "--overwrite : replace the file if it exists"
_ALLOW = "--allow-uncertified : exit with 0, not 3, after a fit that ended before it was certified"
_PARTITION = """--partition blocks|metis|FILE : of the nodes: ranges of ids, few cut edges
    (pymetis), or a .npy file with the rank of each; default blocks"""
# Groups of options in brackets, then commands with their options and the [groups] that they have.
_TEXT = f"""
== [data]
dataset : a name, the path of a .npz file, or a folder of tables; see herta --help
{_DIR}
--split public|random:0.8 : default public if there is
--normalize {_one_of(NORMALIZATIONS)} : default row for bags of words, else none
== [model]
--lam L|L,L,... : strength of the graph; several make blocks of features, 0 is X itself; {{}}
--alpha A : APPNP's teleport: lam = 1/alpha - 1
--loss {_one_of(LOSS_NAMES)} : {{}}
--ridge R : adds R/2 ||W||^2 to the loss; default 0.01
--fit-intercept : a constant per output, undiffused
--class-weight {{balanced}} : as much of each class
{_LABELS % "features of the labels of other folds"}
--correct-and-smooth L,L : both steps after the fit, by the training labels; 0,L smooths only;
    default 20,20
--hidden N : random ReLU features behind the diffusion; {{}}
--hidden-at {{after,before}} : or made first and diffused; {{}}
--hidden-rank N : singular vectors of X that they see; {{}}
--hidden-draws N : layers, whose scores are averaged; {{}}
--row-norm : rows of each diffused block have length 1
--hops K,K,... : blocks S^k X without a solve, in place of the default lam
{_OPTIMIZERS} : {{}}
--learning-rate RATE|spectral : default by the optimizer
== [computing]
--tol GAP : certified gap to reach; {{}}
--max-iter N : outer steps; {{}}
--strategy {{auto,herta,direct}} : auto: cheapest; {{}}
--sparsify auto|degree|mixed|yes|no|COUNT : sample edges for the preconditioner
--sketch auto|yes|no|COUNT : sample rows for the preconditioner
--no-precondition : for comparison: slow
--device auto|cpu|cuda|cuda:N : auto: cuda if usable; {{}}
--reorder auto|yes|no : store the graph by community while fitting; {{}}
--dtype {{float32,float64}} : {{}}
--memory-budget 8GB : default 80%% of what is free
--seed N : {{}}
== [several processes, under mpirun]
--split auto|columns|nodes, beside that of the data, tells what they share out: columns, and each
    has the graph, or nodes, and each has its own; auto, the default, decides by memory and
    predicted seconds.
{_PARTITION}
== [output]
--json : the result as JSON on standard output
--quiet : no progress on standard error
--debug : show the traceback of an error
== train : train, certify and evaluate a model
[data]
[several processes, under mpirun]
[model]
[computing]
--out RUN : a folder for the model and its report
--overwrite : replace the run in that folder
--resume RUN : go on with a run that was killed
{_ALLOW}
== plan : memory, cost and strategy, before anything is loaded
dataset :
{_DIR}
[model]
[computing]
--normalize {_one_of(NORMALIZATIONS)} : default none
--device-memory 80GB : plan for a GPU of this size, which need not be here
--ranks N : and for so many processes under mpirun
{_PARTITION}
== tune : choose lam, ridge and loss on the validation nodes, or by leave-one-out
[data]
--lam L,L,... : default {_listed(LAMS)}
--ridge R,R,... : default {_listed(RIDGES)}
--loss mse,ce|bce : default both for classes, mse for numbers and by leave-one-out, bce for several
    labels of 0 or 1
--by {{valid,loo}} : the validation nodes, or leave-one-out, which needs none; default valid
--several L,L,... : try blocks of several lam, too (0 is X itself), the usual ones or these; may be
    repeated
{_LABELS % "try features of labels, too"}
--correct-and-smooth : try it after the best of the others
--recipe : in place of all these: X, lam and hops with rows of length 1, and kernels of wide nets,
    each with Correct and Smooth; the most accurate, in minutes
{_OPTIMIZERS} : of the final fit
[computing]
--out RUN : a folder for the model and its report
--overwrite : replace the run in that folder
{_ALLOW}
== predict : apply a trained run to a dataset
run_folder : the folder that --out wrote
dataset :
{_DIR}
--device auto|cpu|cuda|cuda:N :
--to FILE : .npz (with all outputs), .npy, .csv or .parquet; default RUN/predictions.npz
{_OVER}
== compare : do two devices or precisions agree?
[data]
[model]
[computing]
--devices A,B : default cpu,cuda; cpu-scipy is the CPU without compiled kernels
{_ALLOW}
== profile : where the time goes, with a trace to open
[data]
[model]
[computing]
--out FILE.json : default herta-trace.json
{_OVER}
{_ALLOW}
== convert : make memory-mappable files of what OGB's download holds
dataset : {PAPERS}
--root --data-dir DIR : where OGB's folder or zip lies; default $HERTA_DATA
--features {_one_of(FEATURES)} : default float32; float16 halves the largest file
== selftest : check a device against the CPU and time its kernels, for a report
--device auto|cpu|cuda|cuda:N :
--quick : fewer checks, a small graph
--dataset NAME : what is timed and fitted; default {selftest.FULL.dataset}, or
    {selftest.QUICK.dataset} with --quick
{_DIR}
--out FILE.json : default herta-selftest.json; or a folder, for comparison and profile, too
{_OVER}
== info : devices, versions, extras, datasets
{_DIR}
"""
_RUN: dict[str, Any] = {
    "train": train.run,
    "plan": plan.run,
    "tune": tune.run,
    "predict": predict.run,
    "compare": compare.run,
    "profile": compare.profile,
    "convert": info.convert,
    "selftest": selftest.run,
    "info": info.run,
}
# The type of what follows a flag; text, where it is not named here.
_TYPES: dict[str, Any] = {
    "L|L,L,...": _lam,
    "K,K,...": _hops,
    "L,L,...": _numbers,
    "R,R,...": _numbers,
    "L,L": _two,
    "A": float,
    "R": float,
    "N": int,
    "FOLDS": int,
    "A,B": partial(_words, DEVICES),
    "RATE|spectral": _value,
    "mse,ce|bce": partial(_words, LOSS_NAMES),
}
# What argparse has to know beyond the text, by flag, or by command and flag.
_MORE: dict[str, dict[str, Any]] = {
    "--split": {"action": _Split},
    "--partition": {"default": "blocks"},
    "--ridge": {"default": 0.01},
    "--label-features": {"nargs": "?", "const": LABEL_FOLDS, "default": 0},
    "--correct-and-smooth": {"nargs": "?", "const": (20.0, 20.0)},
    "--sparsify": {"type": _value, "default": "auto"},
    "--sketch": {"type": _value, "default": "auto"},
    "--reorder": {"type": _value},
    "--no-precondition": {"dest": "precondition", "action": "store_false"},
    "--seed": {"dest": "random_state"},
    "--ranks": {"default": 1},
    "--devices": {"default": ("cpu", "cuda")},
    "train dataset": {"nargs": "?"},
    "train --split": {
        "action": _Split,
        "metavar": "public|random:0.8|auto|columns|nodes",
        "help": "default public if there is; of the work of several processes: see below",
    },
    "tune --lam": {"dest": "lams", "default": LAMS},
    "tune --ridge": {"dest": "ridges", "default": RIDGES},
    "tune --loss": {"dest": "losses"},
    "tune --by": {"default": "valid"},
    "tune --several": {"nargs": "?", "action": "append"},
    "tune --correct-and-smooth": {"dest": "smooth", "action": "store_true"},
    "predict run_folder": {"metavar": "run"},
    "convert --root": {"dest": "data_dir"},
    "selftest --device": {"default": "auto"},
}


def parser() -> argparse.ArgumentParser:
    """The command line.

    What it parses has `run`, the function of the command, and `check` of the arguments.
    """
    made = _Parser(
        prog="herta",
        description="Train unfolded graph neural networks to a certified optimum.",
        epilog="Datasets: digits, synthetic:arxiv, synthetic:n=1e5,m=1e6,d=64,c=10, cora, "
        "citeseer, pubmed, ogbn-arxiv, ..., NAME for a NAME.npz in a data folder, the path of "
        "a .npz file, or a folder with edges.csv (or .parquet), features and labels. "
        "`herta info` lists them.",
    )
    made.add_argument("--version", action="version", version=f"herta_gpu {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sections = dict(re.findall(r"== (.*)\n((?:(?!==).+\n)+)", _TEXT))
    for name, run in _RUN.items():
        title = next(title for title in sections if title.startswith(f"{name} :"))
        command = commands.add_parser(name, help=title.partition(" : ")[2])
        for entry in (*_entries(sections[title]), "[output]"):
            if not entry.startswith("["):
                _add(command, name, entry)
                continue
            entries = _entries(sections[entry])
            about = entries.pop(0) if " : " not in entries[0] else None  # of the whole group
            group = command.add_argument_group(entry[1:-1], about)
            either = group.add_mutually_exclusive_group() if entry == "[model]" else group
            for one in entries:
                _add(either if one.startswith(("--lam", "--alpha")) else group, name, one)
        command.set_defaults(run=run, check=partial(_check, command))
    commands.choices["train"].set_defaults(ranks_split="auto")
    commands.choices["selftest"].set_defaults(parse=made.parse_args)  # it runs other commands
    return made


def _entries(text: str) -> list[str]:
    """The entries of a text; what is indented belongs to the line above it."""
    return [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", text)]


def _add(place: Any, command: str, entry: str) -> None:
    """Add the option that an entry describes, to a command or to a group of its options."""
    left, _, about = entry.partition(" :")
    words = left.split()
    flags = [word for word in words if word.startswith("--")] or words[:1]
    more: dict[str, Any] = {"help": about.strip() or None}
    if words[-1].startswith("{"):
        more["choices"] = tuple(words[-1][1:-1].split(","))
    elif len(words) > len(flags):
        more["metavar"] = words[-1]
        more["type"] = _TYPES.get(words[-1])
    elif flags[0].startswith("--"):
        more["action"] = "store_true"
    more |= _MORE.get(f"{command} {flags[0]}") or _MORE.get(flags[0], {})
    if "{}" in about:
        name = more.setdefault("dest", flags[0][2:].replace("-", "_"))
        value = more["default"] = HERTA._defaults()[name]
        shown = f"default {value:g}" if isinstance(value, float) else f"default {value}"
        more["type"] = more.get("type") or type(value)
        more["help"] = about.strip().format(shown)
    place.add_argument(*flags, **more)


def check_names(args: argparse.Namespace) -> None:
    """Refuse an empty name, which an unset shell variable gives: it would mean this folder."""
    shown = {"dataset": "DATASET", "run_folder": "RUN"}
    files = ("out", "to", "resume", "data_dir", "split", "partition", "memory_budget")
    for name in (*shown, *files):
        if getattr(args, name, None) == "":
            flag = shown.get(name, "--" + name.replace("_", "-"))
            raise ValueError(f"{flag} is empty: give a name, or leave it out.")


def _check(command: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that would be ignored: --device of compare, all others beside --resume."""
    if args.command == "compare" and args.device != command.get_default("device"):
        command.error("compare takes --devices A,B instead of --device")
    if args.command != "train":
        return
    if args.resume is None and args.dataset is None:
        command.error("a DATASET is needed, or --resume RUN")
    flags = {a.dest: max(a.option_strings, default="DATASET", key=len) for a in command._actions}
    flags["ranks_split"] = flags["split"]
    for name, value in vars(args).items() if args.resume is not None else ():
        if name not in _FREE and value != command.get_default(name):
            command.error(f"--resume takes everything from the run: leave out {flags[name]}")
