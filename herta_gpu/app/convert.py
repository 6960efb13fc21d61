"""`herta convert`: memory-mappable files of what OGB's download holds, without ogb and torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from herta_gpu import datasets
from herta_gpu.app.results import CommandOutput
from herta_gpu.app.text import bytes_text, table
from herta_gpu.datasets.dataset import data_dirs
from herta_gpu.plumbing.files import load_npy
from herta_gpu.plumbing.progress import Stages


def run(args: argparse.Namespace) -> CommandOutput:
    """herta convert DATASET"""
    stages = Stages(args.verbose)
    with stages("convert"):
        paths = datasets.convert_ogb(args.dataset, data_dirs(args.data_dir), args.features, stages)
    folder, files = str(paths[0].parent), [_about(path) for path in paths]
    rows = [
        (f["file"], f["dtype"], " x ".join(f"{k:,}" for k in f["shape"]), bytes_text(f["bytes"]))
        for f in files
    ]
    text = table([("file", "type", "shape", "size"), *rows])
    content = {"dataset": args.dataset, "folder": folder, "files": files}
    return CommandOutput(content, f"{text}\n\nThese files of {args.dataset} are in {folder}.")


def _about(path: Path) -> dict[str, Any]:
    array, size = load_npy(path, "a whole array"), path.stat().st_size
    return {"file": path.name, "dtype": array.dtype.name, "shape": array.shape, "bytes": size}
