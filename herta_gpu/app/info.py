"""`herta info` and `herta convert`: what is here, and memory-mappable files of OGB's download."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.util import find_spec

from herta_gpu import datasets
from herta_gpu.app.results import CommandOutput, bytes_text, table
from herta_gpu.app.runs import environment
from herta_gpu.backends import get_backend
from herta_gpu.datasets.dataset import cache_dir, data_dirs
from herta_gpu.plumbing.files import load_npy
from herta_gpu.plumbing.progress import Stages

# What may be installed beside NumPy and SciPy: package, extra, what it gives.
_OPTIONAL = (
    ("numba", "fast", "compiled CPU kernels: fits are several times as fast"),
    ("cupy", "cu13", 'device="cuda", on an NVIDIA GPU (cu12 for CUDA 12)'),
    ("nvtx", "cu13", "names of stages and steps in a profiler (cu12 for CUDA 12)"),
    ("cugraph", "cugraph-cu13", "graphs of RAPIDS, without a copy (cugraph-cu12 for CUDA 12)"),
    ("torch", "torch", "the layer for PyTorch, herta_gpu.torch"),
    ("sklearn", "sklearn", "NodeClassifier, NodeRegressor"),
    ("ogb", "ogb", "OGB's datasets, downloaded"),
    ("pandas", "tables", "Parquet files and DataFrames"),
    ("pyarrow", "tables", "Parquet files and DataFrames"),
    ("matplotlib", "plot", "pictures in reports"),
    ("mpi4py", "mpi", "several processes, under mpirun"),
    ("pymetis", "metis", "--partition metis: few edges between processes"),
)


def run(args: argparse.Namespace) -> CommandOutput:
    """herta info"""
    about = environment()
    versions = {k: about[k] for k in ("herta_gpu", "python", "numpy", "scipy")}
    folders, names = os.environ.get("HERTA_DATA", ""), datasets.names(args.data_dir)
    devices = {}
    for device, cores in (("cpu", f"{os.cpu_count()} cores, "), ("cuda", "")):
        try:
            free = bytes_text(get_backend(device).memory_available())
            devices[device] = f"{cores}{free} free"
        except (RuntimeError, ImportError) as error:
            devices[device] = f"no ({error})"
    packages, told = {}, []
    for package, extra, gives in _OPTIONAL:
        there, how = find_spec(package) is not None, f'pip install "herta_gpu[{extra}]"'
        packages[package] = {"installed": there, "gives": gives, "install": how}
        told.append((f"package {package}", f"yes: {gives}" if there else f"no: {how} for {gives}"))
    result = {"versions": versions, "platform": platform.platform(), "devices": devices}
    result |= {"packages": packages, "data_folders": folders, "cache": str(cache_dir())}
    rows = [
        *versions.items(),
        *((f"device {k}", v) for k, v in devices.items()),
        *told,
        ("data folders", folders or "none (HERTA_DATA is not set)"),
        ("cache", str(cache_dir())),
        ("datasets", ", ".join(names)),
    ]
    return CommandOutput({**result, "datasets": names}, table(rows, header=False))


def convert(args: argparse.Namespace) -> CommandOutput:
    """herta convert DATASET: without ogb and torch"""
    stages = Stages(args.verbose)
    with stages("convert"):
        paths = datasets.convert_ogb(args.dataset, data_dirs(args.data_dir), args.features, stages)
    folder, files, rows = str(paths[0].parent), [], [("file", "type", "shape", "size")]
    for path in paths:
        array, size = load_npy(path, "a whole array"), path.stat().st_size
        shape = " x ".join(f"{k:,}" for k in array.shape)
        rows.append((path.name, array.dtype.name, shape, bytes_text(size)))
        about = {"file": path.name, "dtype": array.dtype.name, "shape": array.shape}
        files.append({**about, "bytes": size})
    content = {"dataset": args.dataset, "folder": folder, "files": files}
    text = f"{table(rows)}\n\nThese files of {args.dataset} are in {folder}."
    return CommandOutput(content, text)
