"""A fit that survives being killed: what was expensive is on disk, whole or not at all.

Blocks of Q are stored as they are solved, Q once it is complete (its blocks then go), and the
state of the loop after its outer steps.  A later fit of the same model on the same data with the
same folder reads instead of computing, and ends with the same bits.
"""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.files import new_file

_STEP = "step.npz"


class Checkpoint:
    """A folder with the state of one fit.

    Parameters
    ----------
    folder : path
        Of this fit alone: nothing checks that the model and the data are the same.
    worth : float
        Seconds of computing below which a block of Q is not stored.
    share : float
        Of the time that may go into storing steps; a step within that is skipped.

    Examples
    --------
    >>> import tempfile
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.checkpoint import Checkpoint
    >>> from herta_gpu.datasets import load
    >>> data, folder = load("digits"), tempfile.mkdtemp() + "/state"
    >>> arguments = (data.graph, data.X, data.y, data.split["train"])
    >>> model = HERTA(lam=5.0, loss="ce", ridge=0.1)
    >>> W = model.fit(*arguments).W_
    >>> def crash(record):
    ...     assert record["step"] < 9
    >>> model.fit(*arguments, callback=crash, checkpoint=Checkpoint(folder, share=1.0))
    Traceback (most recent call last):
    AssertionError
    >>> left = []
    >>> again = model.fit(*arguments, callback=left.append, checkpoint=Checkpoint(folder))
    >>> left[0]["step"], bool((again.W_ == W).all())
    (9, True)
    """

    def __init__(self, folder: str | Path, worth: float = 0.2, share: float = 0.1) -> None:
        self.folder, self.worth, self.share = Path(folder), worth, share
        self._may_save = 0.0  # a moment of the clock

    def on(self, backend: Backend) -> Callable[[str, Callable[[], dict[str, Array]]], Any]:
        """The function `once(name, make)`: what `make` made, now or before the crash."""

        def once(name: str, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
            path = self.folder / f"{name}.npz"
            stored = _read(path)
            if stored is not None:
                return {key: backend.xp.asarray(array) for key, array in stored.items()}
            start = time.perf_counter()
            made = make()
            if time.perf_counter() - start >= self.worth:
                _write(path, {key: backend.to_numpy(array) for key, array in made.items()})
            for part in self.folder.glob(f"{name}-*.npz"):
                part.unlink()  # complete: its parts are not needed any more
            return made

        return once

    def save_step(self, state: dict[str, Any]) -> None:
        """Store the state of the loop, unless storing would take more than its share of time."""
        start = time.perf_counter()
        if start < self._may_save:
            return
        arrays: dict[str, Any] = {}
        about = json.dumps(_packed(state, arrays))
        _write(self.folder / _STEP, {"about": np.array(about), **arrays})
        end = time.perf_counter()
        self._may_save = end + (end - start) * (1 / self.share - 1)

    def last_step(self, backend: Backend | None = None) -> dict[str, Any] | None:
        """What `save_step` stored last."""
        stored = _read(self.folder / _STEP)
        if stored is None:
            return None
        place = np.asarray if backend is None else backend.xp.asarray
        unpacked: dict[str, Any] = _unpacked(json.loads(str(stored["about"])), stored, place)
        return unpacked

    def delete(self) -> None:
        """The fit is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(path: Path, arrays: dict[str, Any]) -> None:
    with new_file(path) as temporary:
        np.savez(temporary, **arrays)


def _read(path: Path) -> dict[str, Any] | None:
    """None when there is nothing, or nothing that can be read: then it is made again."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def _packed(value: Any, arrays: dict[str, Any]) -> Any:
    """JSON, with arrays put aside; floats survive to the last bit."""
    if isinstance(value, dict):
        return {"dict": {key: _packed(inner, arrays) for key, inner in value.items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(inner, arrays) for inner in value]}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "dtype"):
        name = f"a{len(arrays)}"
        arrays[name] = value.get() if hasattr(value, "get") else value  # from a GPU
        return {"array": name}
    return value


def _unpacked(value: Any, arrays: dict[str, Any], place: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "array":
        return place(arrays[inner])
    if kind == "dict":
        return {key: _unpacked(v, arrays, place) for key, v in inner.items()}
    made = [_unpacked(v, arrays, place) for v in inner]
    return tuple(made) if kind == "tuple" else made
