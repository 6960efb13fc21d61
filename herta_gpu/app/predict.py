"""`herta predict`: apply the model of a run to a dataset."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from herta_gpu import datasets
from herta_gpu.app.metrics import evaluate, metric_of
from herta_gpu.app.results import CommandOutput, count_text, table
from herta_gpu.app.runs import check_new_file, read_config, smoother_of
from herta_gpu.app.train import with_features
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.more.labels import CorrectAndSmooth
from herta_gpu.plumbing.checks import check_choice
from herta_gpu.plumbing.files import made_folder, new_file, write_npz
from herta_gpu.plumbing.progress import Stages

_ROWS = 1 << 16  # of a text file, made at a time


def run(args: argparse.Namespace) -> CommandOutput:
    """herta predict RUN DATASET"""
    folder = args.run_folder
    path = Path(args.to) if args.to else Path(folder) / "predictions.npz"
    check_choice("The ending of --to", path.suffix, (".npz", ".npy", ".csv", ".parquet"))
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ImportError('Parquet needs pyarrow: pip install "herta_gpu[tables]".')
    check_new_file(path, args.overwrite)
    config = read_config(folder)
    stored = Path(folder) / "model.npz"
    if not stored.is_file():
        raise FileNotFoundError(
            f"{folder} is not finished: herta train --resume {folder} goes on with it."
        )
    model = HERTA.load(stored)
    if args.device is not None:
        model.set_params(device=args.device)
    place = (args.data_dir or config.get("data_dir"), True, model._settings().seed)
    data = datasets.load(args.dataset, *place, Stages(args.verbose))
    if "normalize" not in config["params"]:  # of earlier versions, whose models did not know
        model.set_params(normalize=config["normalize"] or "none")
    data = with_features(data, config["normalize"])
    n, y, classes = data.graph.num_nodes, data.y, model.classes_
    result = {"dataset": data.name, "run": folder, "nodes": n, "file": str(path)}
    rows = [("dataset", f"{data.name}: {n:,} nodes"), ("predictions", str(path))]
    with _predict(model, data, smoother_of(config), path) as (found, Z):
        columns, names = 1 if found.ndim == 1 else found.shape[1], config.get("label_names")
        if names is None or columns == 1 or len(names) != columns:
            kind = "label" if model.loss == "bce" else "target"
            names = [f"{kind}_{j}" for j in range(columns)] if columns > 1 else ["prediction"]
        _write(path, found, Z, names, data.metadata.get("node_names"))
        outputs, comparable = Z, y is not None
        if classes is not None:
            outputs, result["undecided"] = found, model.undecided_
            if model.undecided_:
                rows.append(("too close to call", count_text(model.undecided_, "node")))
            comparable &= y is not None and y.ndim == 1
            comparable = comparable and (y.dtype.kind == "U") == (classes.dtype.kind == "U")
        elif comparable:
            comparable = y.dtype.kind != "U" and y.size == Z.size
        if comparable:
            metric = metric_of(data.metric, model.loss, classes, model._flat)
            score = evaluate(metric, y, outputs, None)
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
            found = Z = model.transform(data.graph, data.X, out=file)
            if model.loss == "bce":  # zeros and ones, in a file as well
                found = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.int8, Z.shape)
                for a in range(0, len(Z), _ROWS):
                    found[a : a + _ROWS] = Z[a : a + _ROWS] > 0
            yield found[:, 0] if model._flat else found, Z


def _write(path: Path, found: Any, Z: Any, columns: Sequence[str], nodes: Any) -> None:
    """Predictions in the format that the ending names; a .npz file has the outputs, too.

    .csv and .parquet files have the `nodes` as well, by their names if they have any.
    """
    if path.suffix == ".npz":
        names = {"columns": np.array(columns)} if found.ndim == 2 else {}
        names |= {} if nodes is None else {"nodes": nodes}
        write_npz(path, {"predictions": found, "scores": Z, **names})
        return
    with new_file(path) as temporary:
        if path.suffix == ".npy":
            np.save(temporary, found)
            return
        if path.suffix == ".parquet":
            import pyarrow
            from pyarrow.parquet import write_table

            values = found.reshape(len(found), -1).T
            ids = np.arange(len(found)) if nodes is None else nodes
            named = {"node": ids, **dict(zip(columns, values, strict=True))}
            write_table(pyarrow.table(named), temporary)
            return
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["node", *columns])
            if nodes is not None or found.dtype.kind == "U":
                ids = range(len(found)) if nodes is None else nodes
                rows = found.reshape(len(found), -1)
                writer.writerows((node, *row.tolist()) for node, row in zip(ids, rows))
                return
            for a in range(0, len(found), _ROWS):
                part = found[a : a + _ROWS].reshape(-1, len(columns))
                numbered = np.column_stack([np.arange(a, a + len(part)), part])
                np.savetxt(file, numbered, delimiter=",", fmt=["%d"] + ["%.9g"] * len(columns))
