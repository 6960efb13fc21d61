"""What several commands do alike: the model and the data that the options describe, and a fit."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herta_gpu import backends, datasets
from herta_gpu.app.results import FitResult, nodes_of_split
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.more.smoothing import CorrectAndSmooth
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import check_rows
from herta_gpu.plumbing.progress import Stages

PARAMETERS = tuple(HERTA._defaults())  # each parameter of the estimator is an option


def make_model(args: argparse.Namespace, **changes: Any) -> HERTA:
    """The estimator that the options describe, with some parameters changed."""
    params = {name: getattr(args, name) for name in PARAMETERS if hasattr(args, name)}
    return HERTA(**{**params, **changes})


def make_smoother(args: argparse.Namespace) -> CorrectAndSmooth | None:
    """Correct and Smooth as the options describe it, if they do; checked."""
    if args.correct_and_smooth is None:
        return None
    first, second = args.correct_and_smooth
    made = CorrectAndSmooth(first, second, device=args.device, memory_budget=args.memory_budget)
    made._checked()
    if args.loss == "bce":
        raise ValueError("Correct and Smooth is for one class per node, not for loss bce.")
    return made


@dataclass(frozen=True)
class Source:
    """Where the data come from, and how they are prepared for training."""

    dataset: str
    data_dir: str | None
    split: str | None
    normalize: str | None
    log_degree: bool
    random_state: int

    @classmethod
    def of(cls, about: dict[str, Any]) -> Source:
        """That of the options of a command, or of the configuration of a run."""
        return cls(**{name: about[name] for name in cls.__dataclass_fields__})

    def load(
        self, stages: Stages | None = None, share: Callable[[Dataset], Dataset] | None = None
    ) -> Dataset:
        """The dataset with a split and with the features as they will be used.

        `share` makes of the whole dataset what this process works on.
        """
        name, seed = self.dataset, self.random_state
        data = datasets.load(name, self.data_dir, random_state=seed, stages=stages)
        if data.y is None:
            raise ValueError(f"{name} has no labels to train on.")
        data, normalize = data.with_split(self.split, seed), self.normalize
        if share is not None and data.X is not None:
            normalize = data.normalization(normalize)  # the features of all nodes decide
            data = share(data)
        return with_features(data, normalize, self.log_degree)


def load_for(args: argparse.Namespace, stages: Stages) -> Dataset:
    """The dataset that the options describe, ready to train on."""
    tell_of_compilation(stages)
    with stages("load"):
        datasets.check_budget(args.dataset, args.data_dir, args.memory_budget)
        return Source.of(vars(args)).load(stages)


def tell_of_compilation(stages: Stages) -> None:
    """Say that the first fit ever compiles the CPU kernels, which takes half a minute."""
    folder = Path(backends.__file__).parent / "cpu" / "kernels" / "__pycache__"
    elsewhere = "NUMBA_CACHE_DIR" in os.environ or not os.access(folder, os.W_OK)
    if backends.compiled_kernels() and not elsewhere and not any(folder.glob("laplacian*.nbi")):
        stages.note("The first run compiles the CPU kernels: up to a minute, once.", stays=True)


def with_features(data: Dataset, normalize: str | None, log_degree: bool) -> Dataset:
    """A dataset with the features as they will be used."""
    if data.X is None or data.X.shape[1] == 0:
        raise ValueError(f"{data.name} has no features: HERTA needs some to train on.")
    if normalize != "none":
        check_rows("X", data.X, data.graph)  # NaN would spread over whole rows and columns
    data = data.normalized(normalize)
    return data.with_log_degree() if log_degree else data


def fit(
    model: HERTA,
    data: Dataset,
    stages: Stages,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    checkpoint: Checkpoint | None = None,
    smoother: CorrectAndSmooth | None = None,
) -> FitResult:
    """Train on the training nodes and evaluate on every part; `stages` times all of it.

    A `smoother` corrects and smooths the outputs by the labels of the training nodes.
    """
    train, nodes = data.split["train"], nodes_of_split(data.split)
    model.fit(data.graph, data.X, data.y, train, callback, checkpoint, stages, nodes)
    if smoother is not None:
        with stages("correct, smooth"):
            smoother.fit(data.graph, model, data.y, train, X=data.X)
    return FitResult.from_fit(model, data, stages, smoother)
