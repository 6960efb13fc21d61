"""`herta predict`: apply the model of a run to a dataset."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.experiment import with_features
from herta_gpu.app.metrics import evaluate, metric_of
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.runs import check_new_file, read_config, smoother_of
from herta_gpu.app.text import table
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.more.smoothing import CorrectAndSmooth
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import made_folder, new_file, write_npz
from herta_gpu.plumbing.progress import Stages

_ROWS = 1 << 16  # of a text file, made at a time


def run(args: argparse.Namespace) -> CommandOutput:
    """herta predict RUN DATASET"""
    path = Path(args.to) if args.to else Path(args.run_folder) / "predictions.npz"
    check_choice("The ending of --to", path.suffix, (".npz", ".npy", ".csv"))
    check_new_file(path, args.overwrite)
    config = read_config(args.run_folder)
    model, data = _load(args, config)
    n = data.graph.num_nodes
    result = {"dataset": data.name, "run": args.run_folder, "nodes": n, "file": str(path)}
    rows = [("dataset", f"{data.name}: {n:,} nodes"), ("predictions", str(path))]
    with _predict(model, data, smoother_of(config), path) as (found, Z):
        _write(path, found, Z, _column_names(model, found, config.get("label_names")))
        if model.classes_ is not None:
            result["undecided"] = model.undecided_
        if model.classes_ is not None and model.undecided_:
            rows.append(("too close to call", f"{model.undecided_:,} nodes"))
        outputs = found if model.classes_ is not None else Z
        if data.y is not None and _comparable(data.y, outputs, model.classes_):
            metric = metric_of(data.metric, model.loss, model.classes_, model._flat)
            score = evaluate(metric, data.y, outputs, None)
            result |= {"metric": metric, "score": score}
            rows.append((f"{metric} of all labelled nodes", f"{score:.4f}"))
    return CommandOutput(result, table(rows, header=False))


@contextmanager
def _predict(
    model: HERTA, data: Dataset, smoother: CorrectAndSmooth | None, path: Path
) -> Iterator[tuple[Any, Any]]:
    """Predictions of all nodes, and the outputs behind them where they were computed.

    Labels of classes alone need no outputs but the best so far.  Other outputs wait in a file
    beside `path`, and no array of n x c exists in memory.
    """
    if smoother is not None:  # by the training labels, as the run did it
        if data.y is None:
            raise ValueError(
                "The run corrects and smooths by the labels of its training nodes, but "
                f"{data.name} has none."
            )
        smoother.fit(data.graph, model, data.y, model.train_, X=data.X)
        model.undecided_ = smoother.undecided_
        yield smoother.predict(), smoother.Z_
    elif model.classes_ is not None and path.suffix != ".npz":
        yield model.predict(data.graph, data.X), None
    else:
        place = path.parent
        with made_folder(place), TemporaryDirectory(prefix=f".{path.name}.", dir=place) as folder:
            file = f"{folder}/outputs.npy"
            if model.classes_ is not None:
                labels = model.predict(data.graph, data.X, out=file)
                yield labels, np.load(file, mmap_mode="r")
                return
            Z = model.transform(data.graph, data.X, out=file)
            found = Z
            if model.loss == "bce":  # zeros and ones, in a file as well
                found = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.int8, Z.shape)
                for a in range(0, len(Z), _ROWS):
                    found[a : a + _ROWS] = Z[a : a + _ROWS] > 0
            yield found[:, 0] if model._flat else found, Z


def _column_names(model: HERTA, found: Any, names: list[str] | None) -> list[str]:
    """Those of the labels or targets, as the run knows them, else numbers; of one, "prediction"."""
    count = 1 if found.ndim == 1 else found.shape[1]
    if names is not None and len(names) == count > 1:
        return names
    kind = "label" if model.loss == "bce" else "target"
    return [f"{kind}_{j}" for j in range(count)] if count > 1 else ["prediction"]


def _load(args: argparse.Namespace, config: dict[str, Any]) -> tuple[HERTA, Dataset]:
    """The model of the run, and the dataset with features made as those the run trained on."""
    stored = Path(args.run_folder) / "model.npz"
    if not stored.is_file():
        raise FileNotFoundError(
            f"{args.run_folder} is not finished: herta train --resume {args.run_folder} goes on "
            "with it."
        )
    model = HERTA.load(stored)
    if args.device is not None:
        model.set_params(device=args.device)
    seed = config["params"].get("random_state", model.random_state)
    place, stages = args.data_dir or config.get("data_dir"), Stages(args.verbose)
    data = datasets.load(args.dataset, place, random_state=seed, stages=stages)
    return model, with_features(data, config["normalize"], config["log_degree"])


def _write(path: Path, found: Any, Z: Any, columns: Sequence[str]) -> None:
    """Predictions in the format that the ending names; a .npz file has the outputs, too."""
    if path.suffix == ".npz":
        names = {"columns": np.array(columns)} if found.ndim == 2 else {}
        write_npz(path, {"predictions": found, "scores": Z, **names})
    elif path.suffix == ".csv":
        _write_csv(path, found, columns)
    else:
        with new_file(path) as temporary:
            np.save(temporary, found)


def _write_csv(path: Path, labels: Any, names: Sequence[str]) -> None:
    """A CSV file of the node and its predictions; text is quoted where it has to be."""
    columns = labels[:, None] if labels.ndim == 1 else labels
    with new_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["node", *names])
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
