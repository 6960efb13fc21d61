"""The tests marked `gpu`: on a GPU where there is one, else on the device made of g++.

`python -m tests.cuda_device` runs them on an eager and on a lazy device, as `make test` does.  The
modes can be named as the first words, more than one of them; what follows is handed to pytest:

    eager, lazy     all but those marked `long`; on a lazy device without those marked `once`, which
                    set it up by themselves
    long            all, on an eager device with threads in random order
    guarded, random, asan, tsan
                    what need not set the device up by itself: behind every array a page that nobody
                    may touch; threads and blocks in random order; our kernels under a sanitizer
    build           builds the device, and says where

Where the device cannot be built it says why, and that is all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_device import NotBuiltError, build, has_gpu
from tests.cuda_device.build import compiler

MODES: dict[str, tuple[str, dict[str, str]]] = {  # which tests, settings of the environment
    "eager": ("gpu and not long", {}),
    "lazy": ("gpu and not long and not once", {"CUDA_DEVICE": "lazy"}),
    "long": ("gpu", {"CUDA_DEVICE_ORDER": "random"}),
    "guarded": ("gpu and not long and not once", {"CUDA_DEVICE_GUARD": "1"}),
    "random": ("gpu and not long and not once", {"CUDA_DEVICE_ORDER": "random"}),
    "asan": ("gpu and not long and not once", {"CUDA_DEVICE_SANITIZE": "asan"}),
    "tsan": ("gpu and not long and not once", {"CUDA_DEVICE_SANITIZE": "tsan"}),
}


def files_with_tests() -> list[str]:
    """Those that have tests marked `gpu`: the others need not even be collected."""
    folder = Path(__file__).resolve().parents[1]
    files = [f for f in sorted(folder.rglob("test_*.py")) if f.stem != "__main__"]
    marks = ("mark.gpu", "@on_device")
    return [str(f) for f in files if any(m in f.read_text(encoding="utf-8") for m in marks)]


def under_sanitizer(kind: str) -> list[str]:
    """How a command begins that has the runtime of a sanitizer."""
    named = [str(compiler()), f"-print-file-name=lib{kind}.so"]
    runtime = Path(subprocess.run(named, capture_output=True, text=True).stdout.strip())
    if not runtime.is_absolute() or not runtime.exists():
        raise NotBuiltError(f"lib{kind} is not installed")
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # TSan needs fixed addresses
    settings = {
        "CUDA_DEVICE_SANITIZE": kind,
        "LD_PRELOAD": str(runtime.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        "HERTA_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return [*fixed, "env", *(f"{name}={value}" for name, value in settings.items())]


def run(mode: str, options: list[str]) -> int:
    """The worst exit code. Under a sanitizer each file has a process: what all load is too much."""
    chosen, settings = MODES[mode]
    command, files = [sys.executable, "-m", "pytest", "-m", chosen], [files_with_tests()]
    if "CUDA_DEVICE_SANITIZE" in settings:
        command = [*under_sanitizer(settings["CUDA_DEVICE_SANITIZE"]), *command]
        command += ["-s", "-p", "no:xdist"]  # or the report is lost
        files = [[file] for file in files[0]]
    env, codes = {**os.environ, **settings}, []
    for some in files:
        codes.append(subprocess.run([*command, *some, *options], env=env).returncode)
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED
    return max(0 if code == nothing else abs(code) for code in codes)  # -11: it died


def main(words: list[str]) -> int:
    named = [word for word in words if word in MODES]
    modes, options = named or ["eager", "lazy"], [word for word in words if word not in MODES]
    try:
        folder = None if has_gpu() else build()
    except NotBuiltError as error:
        print(f"tests marked gpu are not run: there is no GPU, and {error}")
        return int(options == ["build"])
    if options == ["build"]:
        print(folder)
        return 0
    worst = 0
    for mode in modes if folder else ["eager"]:
        print(f"tests marked gpu, on {f'the {mode} device' if folder else 'a GPU'}:", flush=True)
        worst = max(worst, run(mode, options))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
