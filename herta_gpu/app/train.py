"""`herta train`: train a model, prove how good it is, and keep it in a run folder if asked to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from herta_gpu.app.crew import Crew
from herta_gpu.app.experiment import (
    fit,
    make_model,
    make_smoother,
    prepared,
    tell_of_compilation,
)
from herta_gpu.app.report import write_report
from herta_gpu.app.results import Candidate, CommandOutput, FitResult
from herta_gpu.app.runs import Onlooker, Run, check_free, environment, read_config, smoother_of
from herta_gpu.app.sharing import Sharing
from herta_gpu.backends import backend_for
from herta_gpu.datasets import Dataset, check_budget, load, writes_first
from herta_gpu.herta import HERTA
from herta_gpu.more.smoothing import CorrectAndSmooth
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import memory_budget

_REPEAT = "config.json beside this page holds all that is needed to repeat the run."


def run(args: argparse.Namespace) -> CommandOutput:
    """herta train DATASET, or herta train --resume RUN"""
    result = _new(args) if args.resume is None else _resumed(args)
    text = result.text(args.out if args.resume is None else args.resume)
    return CommandOutput(result.as_json(), text, result.diverged)


def _new(args: argparse.Namespace) -> FitResult:
    model, stages = make_model(args), Stages(args.verbose)
    smoother, crew = make_smoother(args), args.crew
    # Wrong parameters are refused before the data are loaded.
    model._checked(crew if crew.size > 1 else None)
    wish = Sharing(crew, args.ranks_split, args.partition)
    wish.check(smoother is not None)
    if crew.first:
        check_free(args.out, args.overwrite)
    tell_of_compilation(stages)
    how = (args.dataset, args.data_dir, args.random_state, args.split, args.normalize,
           args.log_degree)  # fmt: skip
    data, args.sharing = _loaded(how, wish, model, smoother, stages)
    return train(args, model, data, stages, smoother=smoother)


def _loaded(
    how: tuple[str, str | None, int, str | None, str | None, bool],
    wish: Sharing,
    model: HERTA,
    smoother: CorrectAndSmooth | None,
    stages: Stages,
) -> tuple[Dataset, Sharing]:
    """What this process has of a dataset, and how it was shared out."""
    found = wish

    def share(data: Dataset) -> Dataset:
        nonlocal found
        found = wish.decided(data, model, smoother is not None, stages)
        return found.shared(data)

    with stages("load"):
        check_budget(*how[:2], model.memory_budget)
        if wish.crew.size > 1 and writes_first(*how[:2]):
            wish.crew.prepared_by_first(lambda: load(how[0], how[1], True, how[2], stages))
        return prepared(*how, stages, share), found


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
        how = (config["dataset"], config["data_dir"], params["random_state"], config["split"],
               config["normalize"], config["log_degree"])  # fmt: skip
        model, smoother, wish = HERTA(**params), smoother_of(config), _sharing_of(config, crew)
        data, sharing = _loaded(how, wish, model, smoother, stages)
        return _train_into(folder, model, data, stages, smoother=smoother, sharing=sharing)


def _sharing_of(config: dict[str, Any], crew: Crew) -> Sharing:
    """What the processes of a run shared out; earlier versions had columns only."""
    split, partition = config.get("ranks_split") or "columns", config.get("partition") or "blocks"
    return Sharing(crew, split if crew.size > 1 else "auto", partition)


def train(
    args: argparse.Namespace,
    model: HERTA,
    data: Dataset,
    stages: Stages,
    candidates: Sequence[Candidate] | None = None,
    smoother: CorrectAndSmooth | None = None,
) -> FitResult:
    """Fit, into a run folder if one is asked for; `candidates` are those that `tune` compared."""
    sharing = getattr(args, "sharing", None)
    if args.out is None:
        return _fitted(model, data, stages, None, smoother, sharing)
    owned = Run.create(args.out, args.overwrite) if args.crew.first else None
    with owned or nullcontext(Onlooker(args.out)) as folder:
        _write_config(folder, args, model, data, smoother)
        if candidates is not None:
            folder.write_json("tune.json", {"candidates": [asdict(c) for c in candidates]})
        return _train_into(folder, model, data, stages, candidates, smoother, sharing)


def _fitted(
    model: HERTA,
    data: Dataset,
    stages: Stages,
    folder: Run | None,
    smoother: CorrectAndSmooth | None,
    sharing: Sharing | None,
) -> FitResult:
    """A fit whose plan and result tell what was shared out."""
    record, checkpoint = (None, None) if folder is None else (folder.record, folder.checkpoint)
    result = fit(model, data, stages, record, checkpoint, smoother)
    if sharing is None or sharing.decision is None:
        return result
    model.plan_ = replace(model.plan_, decisions=(sharing.decision, *model.plan_.decisions))
    return replace(result, ranks_split=sharing.split, partition=sharing.partitioned)


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
    config["label_names"] = data.metadata.get("label_names")
    config["params"] = {**model.get_params(), "verbose": False}
    config["correct_and_smooth"] = None if smoother is None else smoother.get_params()
    sharing = getattr(args, "sharing", None) or Sharing(args.crew)
    config |= {"ranks_split": sharing.split, "partition": sharing.partitioned}
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
    sharing: Sharing | None = None,
) -> FitResult:
    """Train with a run folder that is complete up to the last step at any moment."""
    folder.checkpoint.split = data.split
    result = _fitted(model, data, stages, folder, smoother, sharing)
    if isinstance(folder, Onlooker):
        return result
    folder.save_model(model)
    page, picture = folder.folder / "report.html", folder.folder / "convergence.png"
    write_report(model, result, page, candidates, picture, _REPEAT)
    folder.write_json("result.json", result.as_json())  # last: a run with a result is finished
    folder.checkpoint.delete()
    return result
