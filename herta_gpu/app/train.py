"""`herta train`: train a model, prove how good it is, and keep it in a run folder if asked to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from herta_gpu.app.crew import Sharing
from herta_gpu.app.experiment import Source, fit, make_model, make_smoother, tell_of_compilation
from herta_gpu.app.report import write_report
from herta_gpu.app.results import Candidate, CommandOutput, FitResult
from herta_gpu.app.runs import Onlooker, Run, check_free, environment, read_config, smoother_of
from herta_gpu.backends import backend_for
from herta_gpu.datasets import Dataset, check_budget, load, writes_first
from herta_gpu.herta import HERTA
from herta_gpu.more.smoothing import CorrectAndSmooth
from herta_gpu.plumbing.checks import memory_budget
from herta_gpu.plumbing.progress import Stages

_REPEAT = "config.json beside this page holds all that is needed to repeat the run."


@dataclass(frozen=True)
class Job:
    """A model, the data that it is to be trained on, and how they came about."""

    model: HERTA
    data: Dataset
    source: Source
    stages: Stages
    smoother: CorrectAndSmooth | None
    sharing: Sharing
    candidates: Sequence[Candidate] | None = None  # those that `tune` compared


def run(args: argparse.Namespace) -> CommandOutput:
    """herta train DATASET, or herta train --resume RUN"""
    result = _begin(args) if args.resume is None else _resume(args)
    text = result.text(args.out if args.resume is None else args.resume)
    return CommandOutput(result.as_json(), text, result.diverged)


def _begin(args: argparse.Namespace) -> FitResult:
    """Train anew; what is asked wrongly is refused before the data are loaded."""
    model, smoother, crew = make_model(args), make_smoother(args), args.crew
    model._checked(crew if crew.size > 1 else None)
    wish = Sharing(crew, args.ranks_split, args.partition)
    wish.check(smoother is not None)
    if crew.first:
        check_free(args.out, args.overwrite)
    stages = Stages(args.verbose)
    tell_of_compilation(stages)
    job = _load(Source.of(vars(args)), model, smoother, wish, stages)
    return train(job, args.out, args.overwrite)


def _load(
    source: Source, model: HERTA, smoother: CorrectAndSmooth | None, wish: Sharing, stages: Stages
) -> Job:
    """What this process has of a dataset, and how it was shared out."""
    sharing = wish

    def share(data: Dataset) -> Dataset:
        nonlocal sharing
        sharing = wish.decide(data, model, smoother is not None, stages)
        return sharing.share(data)

    with stages("load"):
        where = (source.dataset, source.data_dir)
        check_budget(*where, model.memory_budget)
        if wish.crew.size > 1 and writes_first(*where):
            wish.crew.let_first(lambda: load(*where, True, source.random_state, stages))
        data = source.load(stages, share)
    return Job(model, data, source, stages, smoother, sharing)


def _resume(args: argparse.Namespace) -> FitResult:
    """Go on with a run; everything that it needs stands in its config.json."""
    crew, stages = args.crew, Stages(args.verbose)
    config = crew.agree(read_config(args.resume) if crew.first else None)
    with Run.reopen(args.resume) if crew.first else nullcontext(Onlooker(args.resume)) as folder:
        finished = crew.agree(folder.result() if crew.first else None)
        if finished is not None:  # the run is complete, only its checkpoint may be left
            stages.note(f"{args.resume} is finished: this is its result.")
            return finished
        for what, now in (("threads", environment()["threads"]), ("ranks", crew.size)):
            before = config["environment"].get(what, 1)
            if str(before) != str(now):
                told = f"The run began with {before} {what}: the last bits may differ."
                print(told, file=sys.stderr)
        params = {**HERTA._defaults(), **config["params"], "verbose": args.verbose}
        source = Source.of({**config, "random_state": params["random_state"]})
        # Earlier versions shared out columns only.
        split, partition = config.get("ranks_split") or "columns", config.get("partition")
        wish = Sharing(crew, split if crew.size > 1 else "auto", partition or "blocks")
        job = _load(source, HERTA(**params), smoother_of(config), wish, stages)
        return _train_into(folder, job)


def train(job: Job, out: str | None, overwrite: bool) -> FitResult:
    """Fit, into a run folder if one is asked for."""
    if out is None:
        return _fit(job, None)
    owned = Run.create(out, overwrite) if job.sharing.crew.first else None
    with owned or nullcontext(Onlooker(out)) as folder:
        _write_config(folder, job)
        if job.candidates is not None:
            folder.write_json("tune.json", {"candidates": [asdict(c) for c in job.candidates]})
        return _train_into(folder, job)


def _fit(job: Job, folder: Run | None) -> FitResult:
    """A fit whose plan and result tell what was shared out."""
    record, checkpoint = (None, None) if folder is None else (folder.record, folder.checkpoint)
    result = fit(job.model, job.data, job.stages, record, checkpoint, job.smoother)
    sharing, plan = job.sharing, job.model.plan_
    if sharing.decision is None:
        return result
    job.model.plan_ = replace(plan, decisions=(sharing.decision, *plan.decisions))
    return replace(result, ranks_split=sharing.split, partition=sharing.partitioned)


def _write_config(folder: Run, job: Job) -> None:
    """Everything needed to repeat the run, and to resume it."""
    model, data, source = job.model, job.data, job.source
    if model.memory_budget is None:
        # The budget decides how many columns are solved at once, which decides the last bits:
        # it is stored, so that a repeated run has the same.
        free = backend_for(model.device, data.graph, data.X).memory_everywhere()
        model.set_params(memory_budget=memory_budget(None, free))
    name, place = source.dataset, source.data_dir
    is_path = name.endswith(".npz") or os.sep in name  # absolute, it is found from any folder
    config: dict[str, Any] = {"dataset": os.path.abspath(name) if is_path else name}
    config |= {"split": source.split, "log_degree": source.log_degree}
    config["normalize"] = data.metadata.get("normalize")
    config["data_dir"] = None if place is None else os.path.abspath(place)
    config["label_names"] = data.metadata.get("label_names")
    config["params"] = {**model.get_params(), "verbose": False}
    config["correct_and_smooth"] = None if job.smoother is None else job.smoother.get_params()
    config |= {"ranks_split": job.sharing.split, "partition": job.sharing.partitioned}
    config["environment"] = environment(job.sharing.crew.size)
    folder.write_json("config.json", config)


def _train_into(folder: Run, job: Job) -> FitResult:
    """Train with a run folder that is complete up to the last step at any moment."""
    folder.checkpoint.split = job.data.split
    result = _fit(job, folder)
    if isinstance(folder, Onlooker):
        return result
    place = folder.folder
    job.model.save(place / "model.npz")
    picture = place / "convergence.png"
    write_report(job.model, result, place / "report.html", job.candidates, picture, _REPEAT)
    folder.write_json("result.json", result.as_json())  # last: a run with a result is finished
    folder.checkpoint.delete()
    return result
