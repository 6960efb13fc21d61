"""Ranks with a GPU each: CuPy's own NCCL between processes, on the device of tests/cuda_device."""

from __future__ import annotations

from typing import Any

import pytest

from tests import cuda_device
from tests.backends.ranks.launch import needs_ranks, on_ranks
from tests.backends.ranks.test_nccl import said
from tests.conftest import missing_device

pytestmark = [
    pytest.mark.gpu, pytest.mark.once, needs_ranks, pytest.mark.xdist_group("ranks")
]  # fmt: skip
PROGRAM = ("-m", "tests.backends.ranks.device_program")


@pytest.fixture(autouse=True)
def _on_the_device() -> None:
    if cuda_device.active() is None:
        pytest.skip(missing_device[0] if missing_device else "a GPU is there, and no emulated one")


def test_what_holds_on_two_ranks() -> None:
    found = said(2, *PROGRAM, "checks", CUDA_DEVICE="lazy")
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join(f"{name}\n{text}" for name, text in wrong.items())
    assert len(found) == 4


def test_a_wait_for_messages_that_is_dropped_is_found() -> None:
    found = said(2, *PROGRAM, "waits", CUDA_DEVICE="lazy")
    assert found.pop("") == "", found
    assert len(found) == 4
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("hang", "The ranks have waited 3 s for rank 1, at total (NCCL)"),
        ("lost", "NCCL has lost another rank ("),
    ],
)
def test_a_device_that_waits_for_ever_ends_the_job(what: str, sentence: str) -> None:
    settings: dict[str, Any] = {"HERTA_TIMEOUT": "3" if what == "hang" else "100"}
    done = on_ranks(2, *PROGRAM, what, **settings)
    assert done.returncode != 0
    assert sentence in done.stderr, done.stderr
