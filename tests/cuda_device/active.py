"""For programs: importing this sets the device up, and CuPy, which must come later, is here."""

from __future__ import annotations

from tests.cuda_device import activate

DEVICE = activate()

import cupy  # noqa: E402
import cupy.cuda.nccl  # noqa: E402

__all__ = ["DEVICE", "cupy"]
