"""The text of the kernels, as a compiler gets it."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.cuda_device.compiler import find_kernels

KERNELS = ROOT / "kernels"


def kernel_text(name: str) -> str:
    """The text of a kernel file, as NVRTC gets it."""
    common, text = (KERNELS / "common.cuh").read_text(), (KERNELS / name).read_text()
    return f'#line 1 "common.cuh"\n{common}\n#line 1 "{name}"\n{text}'


def kernel_names(name: str) -> list[str]:
    """The names of all __global__ functions of a file, macros expanded."""
    return find_kernels(kernel_text(name), ["-std=c++17"])
