"""One interface, one backend per kind of device."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from herta_gpu.backends.base import Backend


@cache
def _cpu(fast: bool) -> Backend:
    if fast:
        from herta_gpu.backends.fast import FastCPUBackend

        return FastCPUBackend()
    from herta_gpu.backends.cpu import CPUBackend

    return CPUBackend()


def _fast() -> bool:
    """Compiled kernels, unless numba is missing or ``HERTA_FAST=0`` asks for plain SciPy."""
    return os.environ.get("HERTA_FAST", "1") != "0" and find_spec("numba") is not None


def get_backend(device: str) -> Backend:
    """The backend for ``"cpu"``, ``"cuda"`` or ``"auto"``; never a silent fallback."""
    if device == "cpu":
        return _cpu(_fast())
    if device == "auto":
        # There is no CUDA backend yet, so "auto" has one device to choose from.
        return _cpu(_fast())
    if device == "cuda":
        raise RuntimeError(
            'device="cuda" is not available in this version: use device="cpu" or "auto".'
        )
    raise ValueError(f'device must be "auto", "cpu" or "cuda", not {device!r}.')


def kernel_folder() -> Path:
    """Where the CUDA sources are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common.cuh").exists():
            return folder
    raise FileNotFoundError("The CUDA sources are missing: reinstall herta_gpu.")
