"""`herta predict`: apply the model of a run to a dataset."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.experiment import with_features
from herta_gpu.app.metrics import evaluate
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.runs import load_model, read_config, smoother_of
from herta_gpu.app.text import table
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.files import check_target, new_file, write_npz
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import check_choice
from herta_gpu.smoothing import CorrectAndSmooth


def run(args: argparse.Namespace) -> CommandOutput:
    """herta predict RUN DATASET"""
    folder = Path(args.run_folder)
    path = Path(args.to) if args.to else folder / "predictions.npz"
    check_choice("The ending of --to", path.suffix, (".npz", ".csv"))
    check_target(path)
    model, data, smoother = _model_and_data(args)
    Z = _smoothed(model, data, smoother)
    labels = Z if model.classes_ is None else model.classes_[Z.argmax(axis=1)]
    if path.suffix == ".csv":
        _write_csv(path, labels)
    else:
        write_npz(path, {"predictions": labels, "scores": Z})
    result = {"dataset": data.name, "run": args.run_folder, "nodes": len(labels), "file": str(path)}
    rows = [("dataset", f"{data.name}: {len(labels):,} nodes"), ("predictions", str(path))]
    if data.y is not None and _comparable(data.y, Z, model.classes_):
        known = data.labelled()
        score = evaluate(data.metric, data.y[known], Z[known], model.classes_)
        result |= {"metric": data.metric, "score": score}
        rows.append((f"{data.metric} of all labelled nodes", f"{score:.4f}"))
    return CommandOutput(result, table(rows, header=False))


def _smoothed(model: HERTA, data: Dataset, smoother: CorrectAndSmooth | None) -> Any:
    """The outputs of the model, corrected and smoothed by the training labels if the run was."""
    if smoother is None:
        return model.transform(data.graph, data.X)
    if data.y is None:
        raise ValueError(
            f"The run corrects and smooths by the labels of its training nodes, but {data.name} "
            "has none."
        )
    return smoother.fit(data.graph, model, data.y, model.train_, X=data.X).Z_


def _model_and_data(args: argparse.Namespace) -> tuple[HERTA, Dataset, CorrectAndSmooth | None]:
    """The model of the run, and the dataset with features made as those the run trained on."""
    config, stored = read_config(args.run_folder), Path(args.run_folder) / "model.npz"
    if not stored.is_file():
        raise FileNotFoundError(
            f"{args.run_folder} is not finished: herta train --resume {args.run_folder} goes on "
            "with it."
        )
    model = load_model(stored)
    if args.device is not None:
        model.set_params(device=args.device)
    data_dir = args.data_dir or config.get("data_dir")
    seed = config["params"].get("random_state", model.random_state)
    stages = Stages(args.verbose)
    data = datasets.load(args.dataset, data_dir, random_state=seed, stages=stages)
    data = with_features(data, config["normalize"], config["log_degree"])
    return model, data, smoother_of(config)


def _write_csv(path: Path, labels: Any) -> None:
    """A CSV file with the columns node and prediction; text is quoted where it has to be."""
    columns = labels[:, None] if labels.ndim == 1 else labels
    names = ["node"] + ["prediction"] * columns.shape[1]
    with new_file(path) as temporary:
        if columns.dtype.kind == "U":
            with open(temporary, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(names)
                writer.writerows(enumerate(columns[:, 0].tolist()))
            return
        numbered = np.column_stack([np.arange(len(labels)), columns])
        head = ",".join(names)
        np.savetxt(temporary, numbered, delimiter=",", fmt="%.9g", header=head, comments="")


def _comparable(y: Any, Z: Any, classes: Any) -> bool:
    """Whether the labels of a dataset are of the kind that the model predicts."""
    if classes is None:
        return y.dtype.kind != "U" and y.size == Z.size
    return y.ndim == 1 and (y.dtype.kind == "U") == (classes.dtype.kind == "U")
