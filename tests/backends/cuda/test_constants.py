"""Numbers that Python and CUDA share are the same on both sides."""

from __future__ import annotations

import re

import pytest

from herta_gpu.backends import base
from herta_gpu.backends.cuda import algorithm2, device
from herta_gpu.backends.cuda.device import kernel_folder
from herta_gpu.losses import LOSSES
from herta_gpu.planning.settings import LOSS_NAMES


def of(file: str, name: str) -> str:
    """The value of a constant of a kernel file, as it is written there."""
    text = (kernel_folder() / file).read_text(encoding="utf-8")
    found = re.search(rf"constexpr [^;]*\b{name} = ([^;,]+)[,;]", text)
    assert found, f"{file} has no {name}"
    return found[1]


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("sketch.cu", "kStreamIncidence", base.STREAM_INCIDENCE),
        ("sketch.cu", "kStreamIdentity", base.STREAM_IDENTITY),
        ("sampling.cu", "kStreamSample", base.STREAM_SAMPLE),
        ("hadamard.cu", "kStreamSigns", base.STREAM_SIGNS),
        ("hadamard.cu", "kLogRows", device._HADAMARD_LEVELS),
        ("hadamard.cu", "kBlock", 1 << device._HADAMARD_LEVELS),
        ("common.cuh", "kThreads", device.THREADS),
    ],
)
def test_a_constant_is_the_same_on_both_sides(file, name, ours):
    assert int(of(file, name)) == ours


def test_a_tile_of_the_scan_is_what_a_block_takes():
    assert of("sampling.cu", "kTile") == "kThreads * kItems"
    assert int(of("common.cuh", "kThreads")) * int(of("sampling.cu", "kItems")) == (
        algorithm2._SCAN_TILE
    )


def test_every_loss_has_a_name_that_settings_know():
    assert tuple(LOSSES) == LOSS_NAMES
