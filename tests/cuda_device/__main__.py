"""The tests marked `gpu`: on a GPU where there is one, else on the device made of g++.

`python -m tests.cuda_device` runs them on an eager and on a lazy device (`eager` or `lazy` as the
first word: on that one alone, as `make test` does); what follows is handed to pytest.  Where the
device cannot be built it says why, and that is all.  `python -m tests.cuda_device build` only
builds it, and says where.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda_device import NotBuiltError, build, has_gpu


def files_with_tests() -> list[str]:
    """Those that have tests marked `gpu`: the others need not even be collected."""
    folder = Path(__file__).resolve().parents[1]
    files = sorted(folder.rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def main(options: list[str]) -> int:
    modes = ["eager", "lazy"]
    if options[:1] in (["eager"], ["lazy"]):
        modes, options = options[:1], options[1:]
    if has_gpu():
        modes = ["real"]
    else:
        try:
            folder = build()
        except NotBuiltError as error:
            print(f"tests marked gpu are not run: there is no GPU, and {error}")
            return int(options == ["build"])
        if options == ["build"]:
            print(folder)
            return 0
    worst = 0
    for mode in modes:
        print(f"tests marked gpu, on {'a GPU' if mode == 'real' else f'the {mode} device'}:")
        sys.stdout.flush()
        chosen = "gpu and not once" if mode == "lazy" else "gpu"
        command = [sys.executable, "-m", "pytest", "-m", chosen, *files_with_tests(), *options]
        done = subprocess.run(command, env={**os.environ, "CUDA_DEVICE": mode})
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
