"""Compiles kernel files as a user's first call does: by CuPy's own program, options and headers.

Run as a program, away from the device of tests/cuda_device: names of files in, one line each out.
Only the question for the architecture is answered here, since it needs a device.
"""

from __future__ import annotations

import sys
from typing import Any

from cupy._core import core
from cupy.cuda import compiler

from tests.backends.cuda.kernel_sources import kernel_names, kernel_text

ARCH = "80"


def compiled(file: str) -> int:
    """Bytes of the cubin, which holds every kernel of the file."""
    asks: Any = compiler
    asks._get_arch_for_options_for_nvrtc = lambda arch=None: (f"-arch=sm_{arch}", "cubin")
    headers = (*core._get_cccl_include_options(), f"-I{core._get_header_dir_path()}")
    options = ("-std=c++17", *headers, "-ftz=true")
    cubin, _ = compiler.compile_using_nvrtc(kernel_text(file), options, ARCH, file)
    missing = [name for name in kernel_names(file) if name.encode() not in cubin]
    assert not missing, missing
    return len(cubin)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, compiled(name))
