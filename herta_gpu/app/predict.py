"""`herta predict`: apply the model of a run to a dataset."""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from herta_gpu.more.smoothing import CorrectAndSmooth
from herta_gpu.plumbing.files import check_target, made_folder, new_file, write_npz
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import check_choice

_ROWS = 1 << 16  # of a text file, made at a time


def run(args: argparse.Namespace) -> CommandOutput:
    """herta predict RUN DATASET"""
    folder = Path(args.run_folder)
    path = Path(args.to) if args.to else folder / "predictions.npz"
    check_choice("The ending of --to", path.suffix, (".npz", ".npy", ".csv"))
    check_target(path)
    model, data, smoother = _model_and_data(args)
    n = data.graph.num_nodes
    result = {"dataset": data.name, "run": args.run_folder, "nodes": n, "file": str(path)}
    rows = [("dataset", f"{data.name}: {n:,} nodes"), ("predictions", str(path))]
    with _written(model, data, path, smoother) as found:
        if model.classes_ is not None:
            result["undecided"] = model.undecided_
        if model.classes_ is not None and model.undecided_:
            rows.append(("too close to call", f"{model.undecided_:,} nodes"))
        if data.y is not None and _comparable(data.y, found, model.classes_):
            score = _score(data, found)
            result |= {"metric": data.metric, "score": score}
            rows.append((f"{data.metric} of all labelled nodes", f"{score:.4f}"))
    return CommandOutput(result, table(rows, header=False))


@contextmanager
def _written(
    model: HERTA, data: Dataset, path: Path, smoother: CorrectAndSmooth | None
) -> Iterator[Any]:
    """The labels of all nodes, or their outputs as a map, once they are in the file `path`.

    Labels alone need no outputs but the best so far.  A .npz file holds the outputs as well: they
    wait in a file beside it, and no array of n x c exists in memory.
    """
    labels = model.classes_ is not None
    if smoother is not None:
        yield _smoothed(model, data, path, smoother)
        return
    if labels and path.suffix != ".npz":
        found = model.predict(data.graph, data.X)
        _write_csv(path, found) if path.suffix == ".csv" else _write_npy(path, found)
        yield found
    elif path.suffix == ".npy":
        yield model.transform(data.graph, data.X, out=path)
    else:
        with made_folder(path.parent), _room_beside(path) as beside:
            found = model.predict(data.graph, data.X, out=f"{beside}/outputs.npy")
            Z = np.load(f"{beside}/outputs.npy", mmap_mode="r")
            found = found if labels else Z
            if path.suffix == ".csv":
                _write_csv(path, found)
            else:
                write_npz(path, {"predictions": found, "scores": Z})
            yield found


def _room_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)


def _smoothed(model: HERTA, data: Dataset, path: Path, smoother: CorrectAndSmooth) -> Any:
    """The labels by outputs corrected and smoothed by the training labels, as the run did it."""
    if data.y is None:
        raise ValueError(
            f"The run corrects and smooths by the labels of its training nodes, but {data.name} "
            "has none."
        )
    smoother.fit(data.graph, model, data.y, model.train_, X=data.X)
    model.undecided_, found = smoother.undecided_, smoother.predict()
    if path.suffix == ".npz":
        write_npz(path, {"predictions": found, "scores": smoother.Z_})
    else:
        _write_csv(path, found) if path.suffix == ".csv" else _write_npy(path, found)
    return found


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


def _write_npy(path: Path, labels: Any) -> None:
    with new_file(path) as temporary:
        np.save(temporary, labels)


def _write_csv(path: Path, labels: Any) -> None:
    """A CSV file with the columns node and prediction; text is quoted where it has to be."""
    columns = labels[:, None] if labels.ndim == 1 else labels
    with new_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["node"] + ["prediction"] * columns.shape[1])
        if columns.dtype.kind == "U":
            writer.writerows(enumerate(columns[:, 0].tolist()))
            return
        for a in range(0, len(columns), _ROWS):
            part = columns[a : a + _ROWS]
            numbered = np.column_stack([np.arange(a, a + len(part)), part])
            np.savetxt(file, numbered, delimiter=",", fmt=["%d"] + ["%.9g"] * part.shape[1])


def _comparable(y: Any, found: Any, classes: Any) -> bool:
    """Whether the labels of a dataset are of the kind that the model predicts."""
    if classes is None:
        return y.dtype.kind != "U" and y.size == found.size
    return y.ndim == 1 and (y.dtype.kind == "U") == (classes.dtype.kind == "U")


def _score(data: Dataset, found: Any) -> float:
    """The metric of all labelled nodes; that of outputs is a mean over them, one at a time."""
    known = data.labelled()
    if found.ndim == 1:
        return evaluate(data.metric, data.y[known], found[known], None)
    y = data.y.reshape(found.shape)
    each = [slice(j, j + 1) for j in range(found.shape[1])]
    scores = [evaluate(data.metric, y[known, J], found[known, J], None) for J in each]
    seen = [score for score in scores if not math.isnan(score)]
    return float(np.mean(seen)) if seen else math.nan
