"""`herta train`: train a model, prove how good it is, and keep it in a run folder if asked to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from herta_gpu.app.experiment import fit, load_for, make_model, make_smoother, prepared
from herta_gpu.app.report import report
from herta_gpu.app.results import Candidate, CommandOutput, FitResult
from herta_gpu.app.runs import Onlooker, Run, check_free, environment, read_config, smoother_of
from herta_gpu.backends import backend_for
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import memory_budget
from herta_gpu.smoothing import CorrectAndSmooth

_REPEAT = "config.json beside this page holds all that is needed to repeat the run."


def run(args: argparse.Namespace) -> CommandOutput:
    """herta train DATASET, or herta train --resume RUN"""
    result = _new(args) if args.resume is None else _resumed(args)
    text = result.text(args.out if args.resume is None else args.resume)
    return CommandOutput(result.as_json(), text, result.diverged)


def _new(args: argparse.Namespace) -> FitResult:
    model, stages = make_model(args), Stages(args.verbose)
    model._checked()  # wrong parameters are refused before the data are loaded
    smoother = make_smoother(args)
    if args.crew.first:
        check_free(args.out, args.overwrite)
    return train(args, model, load_for(args, stages), stages, smoother=smoother)


def _resumed(args: argparse.Namespace) -> FitResult:
    """Go on with a run; everything that it needs stands in its config.json."""
    crew, stages = args.crew, Stages(args.verbose)
    config = crew.agreed(read_config(args.resume) if crew.first else None)
    with Run.reopen(args.resume) if crew.first else nullcontext(Onlooker(args.resume)) as folder:
        finished = crew.agreed(folder.result() if crew.first else None)
        if finished is not None:  # the run is complete, only its checkpoint may be left
            stages.note(f"{args.resume} is finished: this is its result.")
            return finished
        for what, now in (("threads", environment()["threads"]), ("ranks", crew.size)):
            before = config["environment"].get(what, 1)
            if str(before) != str(now):
                print(
                    f"The run began with {before} {what}: the last bits may differ.",
                    file=sys.stderr,
                )
        params = {**HERTA._defaults(), **config["params"], "verbose": args.verbose}
        with stages("load"):
            data = prepared(
                config["dataset"], config["data_dir"], params["random_state"], config["split"],
                config["normalize"], config["log_degree"], stages,
            )  # fmt: skip
            data = crew.shared(data)
        smoother = smoother_of(config)
        return _train_into(folder, HERTA(**params), data, stages, smoother=smoother)


def train(
    args: argparse.Namespace,
    model: HERTA,
    data: Dataset,
    stages: Stages,
    candidates: Sequence[Candidate] | None = None,
    smoother: CorrectAndSmooth | None = None,
) -> FitResult:
    """Fit, into a run folder if one is asked for; `candidates` are those that `tune` compared."""
    if args.out is None:
        return fit(model, data, stages, smoother=smoother)
    owned = Run.create(args.out, args.overwrite) if args.crew.first else None
    with owned or nullcontext(Onlooker(args.out)) as folder:
        _write_config(folder, args, model, data, smoother)
        if candidates is not None:
            folder.write_json("tune.json", {"candidates": [asdict(c) for c in candidates]})
        return _train_into(folder, model, data, stages, candidates, smoother)


def _write_config(
    folder: Run,
    args: argparse.Namespace,
    model: HERTA,
    data: Dataset,
    smoother: CorrectAndSmooth | None,
) -> None:
    """Everything needed to repeat the run, and to resume it."""
    if model.memory_budget is None:
        # The budget decides how many columns are solved at once, which decides the last bits:
        # it is stored, so that a repeated run has the same.
        free = backend_for(model.device, data.graph, data.X).memory_everywhere()
        model.set_params(memory_budget=memory_budget(None, free))
    config: dict[str, Any] = {"dataset": _anchored(args.dataset), "split": args.split}
    config |= {"log_degree": args.log_degree, "normalize": data.metadata.get("normalize")}
    config["data_dir"] = None if args.data_dir is None else os.path.abspath(args.data_dir)
    config["params"] = {**model.get_params(), "verbose": False}
    config["correct_and_smooth"] = None if smoother is None else smoother.get_params()
    folder.write_json("config.json", {**config, "environment": environment(args.crew.size)})


def _anchored(name: str) -> str:
    """A path made absolute, so that it is found from any folder; a name as it is."""
    return os.path.abspath(name) if name.endswith(".npz") or os.sep in name else name


def _train_into(
    folder: Run,
    model: HERTA,
    data: Dataset,
    stages: Stages,
    candidates: Sequence[Candidate] | None = None,
    smoother: CorrectAndSmooth | None = None,
) -> FitResult:
    """Train with a run folder that is complete up to the last step at any moment."""
    folder.checkpoint.split = data.split
    result = fit(model, data, stages, folder.record, folder.checkpoint, smoother)
    if isinstance(folder, Onlooker):
        return result
    folder.save_model(model)
    report(
        model, data, folder.folder / "report.html", result=result, candidates=candidates,
        picture=folder.folder / "convergence.png", repeat=_REPEAT,
    )  # fmt: skip
    folder.write_json("result.json", result.as_json())  # last: a run with a result is finished
    folder.checkpoint.delete()
    return result
