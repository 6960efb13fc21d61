"""The options of the command line `herta`, and the function that each command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from herta_gpu import __version__
from herta_gpu.app import compare, convert, info, plan, predict, profile, selftest, train, tune
from herta_gpu.app.crew import SPLITS
from herta_gpu.app.tune import LAMS, RIDGES, SEVERAL
from herta_gpu.datasets.dataset import NORMALIZATIONS
from herta_gpu.datasets.ogb import FEATURES
from herta_gpu.datasets.ogb_files import FROM_FILES
from herta_gpu.herta import HERTA
from herta_gpu.losses import LOSSES
from herta_gpu.planning.settings import DEVICES, LABEL_FOLDS, OPTIMIZER_NAMES

_DEFAULTS = HERTA._defaults()
_NAMES = ("dataset", "run_folder", "out", "to", "resume", "data_dir", "split", "partition",
          "memory_budget")  # fmt: skip

_POSITIONAL = {"dataset": "DATASET", "run_folder": "RUN"}


class _Parser(argparse.ArgumentParser):
    """A parser that raises an error when its help cannot be written, instead of keeping quiet."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is sys.stderr:
            super()._print_message(message, file)
        else:
            file.write(message)


def check_names(args: argparse.Namespace) -> None:
    """Refuse an empty name, which an unset shell variable gives: it would mean this folder."""
    for name in _NAMES:
        if getattr(args, name, None) == "":
            shown = _POSITIONAL.get(name, "--" + name.replace("_", "-"))
            raise ValueError(f"{shown} is empty: give a name, or leave it out.")


def parser() -> argparse.ArgumentParser:
    """The command line.

    What it parses has `run`, the function of the command, and `check`, a further check of the
    arguments, if there is one.
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
    _add_train(commands)
    _add_plan(commands)
    _add_tune(commands)
    _add_predict(commands)
    _add_compare(commands)
    _add_profile(commands)
    _add_convert(commands)
    _add_selftest(commands)
    _add_info(commands)
    return made


def _add_train(commands: Any) -> None:
    command = commands.add_parser("train", help="train, certify and evaluate a model")
    _add_data(command, optional=True)
    _add_ranks(command)
    _add_model(command)
    _add_run(command)
    command.add_argument("--resume", metavar="RUN", help="go on with a run that was killed")
    command.set_defaults(run=train.run, check=lambda args: _check_resume(command, args))


def _add_plan(commands: Any) -> None:
    about = "memory, cost and strategy, before anything is loaded"
    command = commands.add_parser("plan", help=about)
    command.add_argument("dataset")
    _add_data_dir(command)
    _add_model(command)
    command.add_argument(
        "--device-memory",
        metavar="80GB",
        help="plan for a GPU of this size, which need not be here",
    )
    command.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="and for so many processes under mpirun"
    )
    _add_partition(command)
    _add_output(command)
    command.set_defaults(run=plan.run)


def _add_tune(commands: Any) -> None:
    about = "choose lam, ridge and loss on the validation nodes, or by leave-one-out"
    command = commands.add_parser("tune", help=about)
    _add_data(command)
    command.add_argument(
        "--lam", dest="lams", type=_numbers, default=LAMS, metavar="L,L,...",
        help=f"default {','.join(f'{v:g}' for v in LAMS)}",
    )  # fmt: skip
    command.add_argument(
        "--ridge", dest="ridges", type=_numbers, default=RIDGES, metavar="R,R,...",
        help=f"default {','.join(f'{v:g}' for v in RIDGES)}",
    )  # fmt: skip
    command.add_argument(
        "--loss", dest="losses", type=_words(tuple(LOSSES)), metavar="mse,ce|bce",
        help="default both for classes, mse for numbers and by leave-one-out, bce for several "
        "labels of 0 or 1",
    )  # fmt: skip
    command.add_argument(
        "--by", choices=("valid", "loo"), default="valid",
        help="the validation nodes, or leave-one-out, which needs none; default valid",
    )  # fmt: skip
    command.add_argument(
        "--several", nargs="?", action=_Sets, default=(), metavar="L,L,...",
        help="try blocks of several lam, too (0 is X itself), the usual ones or these; may be "
        "repeated",
    )  # fmt: skip
    _add_label_features(command, "try features of labels, too")
    command.add_argument(
        "--correct-and-smooth", action="store_true", help="try it after the best of the others"
    )
    command.add_argument("--optimizer", choices=OPTIMIZER_NAMES, help="of the final fit")
    _add_computing(command)
    _add_run(command)
    command.set_defaults(run=tune.run)


def _add_predict(commands: Any) -> None:
    command = commands.add_parser("predict", help="apply a trained run to a dataset")
    command.add_argument("run_folder", metavar="run", help="the folder that --out wrote")
    command.add_argument("dataset")
    _add_data_dir(command)
    command.add_argument("--device", choices=("auto", "cpu", "cuda"))
    command.add_argument(
        "--to",
        metavar="FILE",
        help=".npz (with all outputs), .npy or .csv; default RUN/predictions.npz",
    )
    _add_overwrite(command)
    _add_output(command)
    command.set_defaults(run=predict.run)


def _add_compare(commands: Any) -> None:
    command = commands.add_parser("compare", help="do two devices or precisions agree?")
    _add_data(command)
    _add_model(command)
    _add_output(command)
    command.add_argument(
        "--devices", type=_words(DEVICES), default=("cpu", "cuda"), metavar="A,B",
        help="default cpu,cuda; cpu-scipy is the CPU without compiled kernels",
    )  # fmt: skip
    command.add_argument("--out", metavar="FILE.png", help="draw the seconds per stage")
    _add_overwrite(command)
    command.set_defaults(run=compare.run, check=lambda args: _check_devices(command, args))


def _add_profile(commands: Any) -> None:
    command = commands.add_parser("profile", help="where the time goes, with a trace to open")
    _add_data(command)
    _add_model(command)
    _add_output(command)
    command.add_argument("--out", metavar="FILE.json", help="default herta-trace.json")
    _add_overwrite(command)
    command.set_defaults(run=profile.run)


def _add_convert(commands: Any) -> None:
    about = "make memory-mappable files of what OGB's download holds"
    command = commands.add_parser("convert", help=about)
    command.add_argument("dataset", help=", ".join(FROM_FILES))
    command.add_argument(
        "--root", "--data-dir", dest="data_dir", metavar="DIR",
        help="where OGB's folder or zip lies; default $HERTA_DATA",
    )  # fmt: skip
    command.add_argument(
        "--features", choices=FEATURES, help="default float32; float16 halves the largest file"
    )
    _add_output(command)
    command.set_defaults(run=convert.run)


def _add_selftest(commands: Any) -> None:
    about = "check a device against the CPU and time its kernels, for a report"
    command = commands.add_parser("selftest", help=about)
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--quick", action="store_true", help="fewer checks, a small graph")
    command.add_argument(
        "--dataset", metavar="NAME",
        help=f"what is timed and fitted; default {selftest.FULL.dataset}, "
        f"or {selftest.QUICK.dataset} with --quick",
    )  # fmt: skip
    _add_data_dir(command)
    command.add_argument("--out", metavar="FILE.json", help="default herta-selftest.json")
    _add_overwrite(command)
    _add_output(command)
    command.set_defaults(run=selftest.run)


def _add_info(commands: Any) -> None:
    command = commands.add_parser("info", help="devices, versions, extras, datasets")
    _add_data_dir(command)
    _add_output(command)
    command.set_defaults(run=info.run)


def _check_devices(command: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.device != command.get_default("device"):
        command.error("compare takes --devices A,B instead of --device")


def _check_resume(command: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse other options beside --resume, which takes them from the run, and neither of both."""
    if args.resume is None:
        if args.dataset is None:
            command.error("a DATASET is needed, or --resume RUN")
        return
    free = ("command", "resume", "json", "quiet", "debug", "run", "check")
    flags = {action.dest: max(action.option_strings, default="DATASET", key=len)
             for action in command._actions}  # fmt: skip
    flags["ranks_split"] = flags["split"]
    for name, value in vars(args).items():
        if name not in free and value != command.get_default(name):
            command.error(f"--resume takes everything from the run: leave out {flags[name]}")


def _add_data(command: argparse.ArgumentParser, optional: bool = False) -> None:
    group = command.add_argument_group("data")
    group.add_argument(
        "dataset",
        nargs="?" if optional else None,
        help="a name, the path of a .npz file, or a folder of tables; see herta --help",
    )
    _add_data_dir(group)
    group.add_argument(
        "--split", action=_Split, metavar="public|random:0.8" + "|auto|columns|nodes" * optional,
        help="default public if there is" + "; of the work of several processes: see below"
        * optional,
    )  # fmt: skip
    group.add_argument(
        "--normalize", choices=NORMALIZATIONS, help="default row for bags of words, else none"
    )
    group.add_argument("--log-degree", action="store_true", help="as one more feature")


def _add_ranks(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "several processes, under mpirun",
        "--split auto|columns|nodes, beside that of the data, tells what they share out: columns, "
        "and each has the graph, or nodes, and each has its own; auto, the default, decides by "
        "memory and predicted seconds.",
    )
    _add_partition(group)
    command.set_defaults(ranks_split="auto")


def _add_partition(command: Any) -> None:
    command.add_argument(
        "--partition", default="blocks", metavar="blocks|metis|FILE",
        help="of the nodes: ranges of ids, few cut edges (pymetis), or a .npy file with the rank "
        "of each; default blocks",
    )  # fmt: skip


def _add_data_dir(command: Any) -> None:
    command.add_argument("--data-dir", metavar="DIR", help="where to look; default $HERTA_DATA")


def _add_model(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("model")
    strength = group.add_mutually_exclusive_group()
    strength.add_argument(
        "--lam", type=_lam, metavar="L|L,L,...",
        **_default("lam", "strength of the graph; several make blocks of features, 0 is X itself"),
    )  # fmt: skip
    strength.add_argument(
        "--alpha", type=float, metavar="A", help="APPNP's teleport: lam = 1/alpha - 1"
    )
    group.add_argument("--loss", choices=tuple(LOSSES), **_default("loss"))
    group.add_argument(
        "--ridge", type=float, metavar="R", **_default("ridge", "adds R/2 ||W||^2 to the loss")
    )
    group.add_argument(
        "--fit-intercept", action="store_true", help="a constant per output, undiffused"
    )
    group.add_argument("--class-weight", choices=("balanced",), help="as much of each class")
    _add_label_features(group, "features of the labels of other folds")
    group.add_argument(
        "--correct-and-smooth", nargs="?", type=_two, const=(20.0, 20.0), metavar="L,L",
        help="both steps after the fit, by the training labels; 0,L smooths only; default 20,20",
    )  # fmt: skip
    group.add_argument("--optimizer", choices=OPTIMIZER_NAMES, **_default("optimizer"))
    group.add_argument(
        "--learning-rate", type=_rate, metavar="RATE|spectral", help="default by the optimizer"
    )
    _add_computing(command)


def _add_label_features(command: Any, about: str) -> None:
    command.add_argument(
        "--label-features", nargs="?", type=int, const=LABEL_FOLDS, default=0, metavar="FOLDS",
        help=f"{about}; {LABEL_FOLDS} folds unless told otherwise",
    )  # fmt: skip


def _add_computing(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("computing")
    group.add_argument(
        "--tol", type=float, metavar="GAP", **_default("tol", "certified gap to reach")
    )
    group.add_argument("--max-iter", type=int, metavar="N", **_default("max_iter", "outer steps"))
    group.add_argument(
        "--strategy", choices=("auto", "herta", "direct"), **_default("strategy", "auto: cheapest")
    )
    group.add_argument(
        "--sparsify", type=_wish, default="auto", metavar="auto|degree|mixed|yes|no|COUNT",
        help="sample edges for the preconditioner",
    )  # fmt: skip
    group.add_argument(
        "--sketch", type=_wish, default="auto", metavar="auto|yes|no|COUNT",
        help="sample rows for the preconditioner",
    )  # fmt: skip
    group.add_argument(
        "--no-precondition", dest="precondition", action="store_false", help="for comparison: slow"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), **_default("device", "auto: cuda if usable")
    )
    group.add_argument(
        "--reorder", type=_wish, metavar="auto|yes|no",
        **_default("reorder", "store the graph by community while fitting"),
    )  # fmt: skip
    group.add_argument("--dtype", choices=("float32", "float64"), **_default("dtype"))
    group.add_argument("--memory-budget", metavar="8GB", help="default 80%% of what is free")
    group.add_argument(
        "--seed", dest="random_state", type=int, metavar="N", **_default("random_state")
    )


def _default(name: str, about: str = "") -> dict[str, Any]:
    """The default of an option, which is that of the estimator, and its help, which tells it."""
    value = _DEFAULTS[name]
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return {"default": value, "help": f"{about}; default {shown}" if about else f"default {shown}"}


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", metavar="RUN", help="a folder for the model and its report")
    command.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    _add_output(command)


def _add_overwrite(command: argparse.ArgumentParser) -> None:
    command.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def _add_output(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,5,10") from None


def _lam(text: str) -> float | list[float]:
    found = _numbers(text)
    return found[0] if len(found) == 1 else list(found)


def _two(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 20,5: one lam for each step")
    return found


class _Split(argparse.Action):
    """--split is that of the data or, of `train`, what several processes share out."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        work = values in SPLITS and hasattr(namespace, "ranks_split")
        setattr(namespace, "ranks_split" if work else "split", values)


class _Sets(argparse.Action):
    """--several 0,1,20 adds a set of lam, --several alone the usual ones."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        try:
            more = SEVERAL if values is None else (_numbers(values),)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *more))


def _words(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        wrong = [word for word in words if word not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(allowed)}")
        return words

    return parse


def _wish(text: str) -> bool | int | str:
    """The value of --sparsify, --sketch or --reorder: a word, yes or no, or a count."""
    simple: dict[str, bool] = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() in simple:
        return simple[text.lower()]
    return int(text) if text.isdigit() else text


def _rate(text: str) -> float | str:
    try:
        return text if text == "spectral" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor "spectral"') from None
