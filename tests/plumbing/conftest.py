"""What several tests of bad input start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plumbing.bad_input import a_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, beside the data.npz that it was trained on; tests change copies of it."""
    return a_run(tmp_path_factory.mktemp("finished"))
