"""`herta train`, and what other commands do like it: model and data from the options, one fit."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from herta_gpu import backends, datasets
from herta_gpu.app.crew import Sharing
from herta_gpu.app.report import write_report
from herta_gpu.app.results import Candidate, CommandOutput, FitResult, nodes_of_split
from herta_gpu.app.runs import Run, check_free, environment, read_config, smoother_of
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.more.labels import CorrectAndSmooth
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.targets import ConvergenceWarning

_REPEAT = "config.json beside this page holds all that is needed to repeat the run."


def run(args: argparse.Namespace) -> CommandOutput:
    """herta train DATASET, or herta train --resume RUN"""
    if args.resume is not None:
        result = _resume(args)
    else:  # what is asked wrongly is refused before the data are loaded
        job, crew = Job.of(args), args.crew
        job.model._settings()  # a small graph asks for neither CuPy nor numba
        if crew.size > 1 or job.model.device.startswith("cuda"):
            job.model._checked(crew if crew.size > 1 else None)
        job.sharing.check(job.smoother is not None)
        if crew.first:
            check_free(args.out, args.overwrite)
        result = job.load().train(args.out, args.overwrite)
    text = result.text(args.resume or args.out)
    if code := result.code(args):
        text += "\nnext: a larger --ridge or --max-iter; --allow-uncertified is content with this"
    elif not {"--lam", "--alpha", "--ridge", "--resume"} & {a.partition("=")[0] for a in args.argv}:
        by = "" if "valid" in result.scores else " --by loo"
        text += f"\nnext: herta tune {args.dataset}{by} chooses lam, ridge and loss"
    return CommandOutput(result.as_json(), text, code)


def _resume(args: argparse.Namespace) -> FitResult:
    """Go on with a run; its config.json stands in for the options."""
    crew = args.crew
    config = crew.agree(read_config(args.resume) if crew.first else None)
    with Run.reopen(args.resume) if crew.first else nullcontext(Run(args.resume)) as folder:
        finished: FitResult | None = crew.agree(folder.result() if crew.first else None)
        if finished is not None:  # the run is complete, only its checkpoint may be left
            Stages(args.verbose).note(f"{args.resume} is finished: this is its result.")
            return finished
        for what, now in (("threads", environment()["threads"]), ("ranks", crew.size)):
            before = config["environment"].get(what, 1)
            if str(before) != str(now):
                told = f"The run began with {before} {what}: the last bits may differ."
                print(told, file=sys.stderr)
        # Earlier versions shared out columns only, and their models had fewer parameters.
        split, partition = config.get("ranks_split") or "columns", config.get("partition")
        config |= {"ranks_split": split if crew.size > 1 else "auto"}
        config |= {
            "partition": partition or "blocks",
            "crew": crew,
            "smoother": smoother_of(config),
        }
        params = {**HERTA._defaults(), "normalize": config["normalize"], **config["params"]}
        config |= {**params, "verbose": args.verbose}
        return Job.of(argparse.Namespace(**config)).load().train_into(folder)


# ---- what the options describe ----------------------------------------------------------------
def make_model(args: argparse.Namespace, **changes: Any) -> HERTA:
    """The estimator that the options describe, with some parameters changed."""
    params = {name: getattr(args, name) for name in HERTA._defaults() if hasattr(args, name)}
    params["normalize"] = params.get("normalize") or "none"  # the data decide, once they are there
    return HERTA(**{**params, **changes})


def make_smoother(args: argparse.Namespace) -> CorrectAndSmooth | None:
    """Correct and Smooth as the options describe it, if they do; checked."""
    lams = getattr(args, "correct_and_smooth", None)
    if hasattr(args, "smoother") or lams is None:
        return getattr(args, "smoother", None)
    how = {"device": args.device, "memory_budget": args.memory_budget}
    made = CorrectAndSmooth(lams[0], lams[1], **how)
    made._checked()
    if args.loss == "bce":
        raise ValueError("Correct and Smooth is for one class per node, not for loss bce.")
    return made


def load_data(
    args: argparse.Namespace, stages: Stages, share: Callable[[Dataset], Dataset]
) -> Dataset:
    """The dataset with a split and with the features as they will be used.

    `share` makes of the whole dataset what this process works on.
    """
    name, seed, how = args.dataset, args.random_state, args.normalize
    data = datasets.load(name, args.data_dir, random_state=seed, stages=stages)
    if data.y is None:
        raise ValueError(f"{name} has no labels to train on.")
    data = data.with_split(args.split, seed)
    if data.X is not None and data.X.shape[1] > 0:
        args.normalize = how = data.normalization(how)  # the features of all nodes decide
        data = share(data)
    return with_features(data, how)


def with_features(data: Dataset, normalize: str | None) -> Dataset:
    """A dataset with the features that the model will normalise."""
    if data.X is None or data.X.shape[1] == 0:
        raise ValueError(f"{data.name} has no features: HERTA needs some to train on.")
    return replace(data, metadata={**data.metadata, "normalize": normalize})


# ---- a fit, and the folder that it goes into --------------------------------------------------
def fit(
    model: HERTA, data: Dataset, stages: Stages, smoother: CorrectAndSmooth | None, **more: Any
) -> FitResult:
    """Train on the training nodes and evaluate on every part; `stages` times all of it.

    A `smoother` corrects and smooths the outputs by the labels of the training nodes; `more` goes
    to `HERTA.fit`.
    """
    train, more["evaluate"] = data.split["train"], nodes_of_split(data.split)
    with warnings.catch_warnings():  # the result tells the status
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(data.graph, data.X, data.y, train, _stages=stages, **more)
    if smoother is not None:
        with stages("correct, smooth"):
            smoother.fit(data.graph, model, data.y, train, X=data.X)
    return FitResult.from_fit(model, data, stages, smoother)


@dataclass(frozen=True)
class Job:
    """A model, the data that it is to be trained on, and how they came about."""

    args: argparse.Namespace  # of the command, or of the run that goes on
    model: HERTA
    smoother: CorrectAndSmooth | None
    sharing: Sharing
    stages: Stages
    data: Any = None  # what this process has of the dataset, once that is loaded
    candidates: Sequence[Candidate] | None = None  # those that `tune` compared

    @classmethod
    def of(cls, args: argparse.Namespace) -> Job:
        """That which the options of a command describe."""
        how = (getattr(args, "ranks_split", "auto"), getattr(args, "partition", "blocks"))
        model, sharing = make_model(args), Sharing(args.crew, *how)
        return cls(args, model, make_smoother(args), sharing, Stages(args.verbose))

    def load(self) -> Job:
        """The same with its data, and how they were shared out."""
        sharing, stages, args = self.sharing, self.stages, self.args
        crew, where = sharing.crew, (args.dataset, args.data_dir)

        def share(data: Dataset) -> Dataset:
            nonlocal sharing
            sharing = sharing.decide(data, self.model, self.smoother is not None, stages)
            return sharing.share(data)

        with stages("load"):
            datasets.check_budget(*where, self.model.memory_budget)
            if crew.size > 1 and datasets.writes_first(*where):
                crew.let_first(lambda: datasets.load(*where, True, args.random_state, stages))
            data = load_data(args, stages, share)
            self.model.set_params(normalize=args.normalize)
        return replace(self, data=data, sharing=sharing)

    def train(self, out: str | None, overwrite: bool) -> FitResult:
        """Fit, into a run folder if one is asked for."""
        if out is None:
            return self._fit()
        first = self.sharing.crew.first
        with Run.create(out, overwrite) if first else nullcontext(Run(out)) as folder:
            _write_config(folder, self)
            if self.candidates is not None:
                told = [asdict(c) for c in self.candidates]
                folder.write_json("tune.json", {"candidates": told})
            return self.train_into(folder)

    def train_into(self, folder: Run) -> FitResult:
        """Train with a run folder that is complete up to the last step at any moment."""
        folder.checkpoint.split = self.data.split
        result = self._fit(callback=folder.record, checkpoint=folder.checkpoint)
        if folder.owned:
            place = folder.folder
            self.model.save(place / "model.npz")
            write_report(self.model, result, place / "report.html", self.candidates, _REPEAT)
            folder.write_json("result.json", result.as_json())  # last: with it a run is finished
            folder.checkpoint.delete()
        return result

    def _fit(self, **kept: Any) -> FitResult:
        """A fit whose plan and result tell what was shared out."""
        result = fit(self.model, self.data, self.stages, self.smoother, **kept)
        sharing, plan = self.sharing, self.model.plan_
        if sharing.decision is None:
            return result
        self.model.plan_ = replace(plan, decisions=(sharing.decision, *plan.decisions))
        return replace(result, ranks_split=sharing.split, partition=sharing.partitioned)


def _write_config(folder: Run, job: Job) -> None:
    """Everything needed to repeat the run, and to resume it."""
    model, data, name, place = job.model, job.data, job.args.dataset, job.args.data_dir
    if model.memory_budget is None:
        # The budget decides how many columns are solved at once, which decides the last bits:
        # it is stored, so that a repeated run has the same.
        backend = backends.backend_for(model.device, data.graph, data.X)
        model.set_params(memory_budget=backend.plan_budget(None))
    config = {
        "dataset": datasets.absolute(name, place),
        "split": job.args.split,
        "normalize": data.metadata.get("normalize"),
        "data_dir": None if place is None else os.path.abspath(place),
        "label_names": data.metadata.get("label_names"),
        "params": {**model.get_params(), "verbose": False},
        "correct_and_smooth": None if job.smoother is None else job.smoother.get_params(),
        "ranks_split": job.sharing.split,
        "partition": job.sharing.partitioned,
        "environment": environment(job.sharing.crew.size),
    }
    folder.write_json("config.json", config)
