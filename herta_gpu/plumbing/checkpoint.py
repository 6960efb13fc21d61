"""A fit that survives being killed: what was expensive is on disk, whole or not at all.

Blocks of Q are stored as they are solved, Q once it is complete (its blocks then go), and blocks
of outputs once they are trained.  A later fit of the same model on the same data with the same
folder reads them instead of computing, takes the steps of its loop again, and ends with the same
bits.  The file `made-from.json` is written first and says which data and parameters the state
belongs to; every other file holds a hash of it.

Where processes have rows of their own, each keeps its arrays in a folder `part-r-of-P`, and what
one of them cannot read is made again by all.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from herta_gpu.plumbing.files import Archive, DataError, new_file, write_npz
from herta_gpu.plumbing.fingerprint import Fingerprint, differences, key
from herta_gpu.plumbing.interop import Array, Backend

_MADE_FROM = "made-from.json"


class Checkpoint:
    """A folder with the state of one fit.

    Parameters
    ----------
    folder : path
        The folder of this fit alone.  A fit of other data or of a model with other parameters is
        refused in a sentence that names them, and the state stays as it is; `max_iter`, `verbose`
        and `memory_budget` may differ.  X, y, the training nodes and the graph are compared whole;
        a memory-mapped X is compared by some thousand rows and by its file's size and time of
        change.
    worth : float
        Seconds of computing below which a block is not stored.

    Examples
    --------
    >>> import tempfile
    >>> from herta_gpu import HERTA, Checkpoint
    >>> from herta_gpu.datasets import load
    >>> data, folder = load("digits"), tempfile.mkdtemp() + "/state"
    >>> arguments = (data.graph, data.X, data.y, data.split["train"])
    >>> model = HERTA(lam=5.0, loss="ce", ridge=0.1, strategy="herta")
    >>> W = model.fit(*arguments).W_
    >>> def crash(record):
    ...     assert record["step"] < 9
    >>> model.fit(*arguments, callback=crash, checkpoint=Checkpoint(folder, worth=0.0))
    Traceback (most recent call last):
    AssertionError
    >>> again = model.fit(*arguments, checkpoint=Checkpoint(folder))  # Q is read
    >>> bool((again.W_ == W).all())
    True

    The state of one fit is not believed to be that of another.

    >>> model.set_params(ridge=0.2).fit(*arguments, checkpoint=Checkpoint(folder))
    Traceback (most recent call last):
    ValueError: ... was made from something else: ridge (0.1 then, 0.2 now) changed; ...

    Attributes
    ----------
    split : dict of name to node ids, or None
        Validation and test nodes, which must be the same as well: the scores of a run depend on
        them.
    """

    def __init__(self, folder: str | Path, worth: float = 0.2) -> None:
        self.folder, self.worth = Path(folder), worth
        self.split: dict[str, Any] | None = None
        self._made_from = ""  # the fingerprint's hash; `begin` sets it before any file is read
        self._fingerprint: Fingerprint = {}

    def begin(self, made_from: Fingerprint) -> None:
        """Refuse a state that was made from something else, before anything of it is read."""
        then = _read_json(self.folder / _MADE_FROM)
        if then is None and self._holds_state():
            self._refuse("does not say what it was made from (it is older, or damaged)")
        changed = [] if then is None else differences(then, made_from)
        if changed:
            what = " and ".join(filter(None, [", ".join(changed[:-1]), changed[-1]]))
            self._refuse(f"was made from something else: {what} changed")
        self._fingerprint, self._made_from = made_from, key(made_from)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"The checkpoint in {self.folder} {why}; it was left as it is: choose another folder, "
            "or begin anew with checkpoint.delete() (--overwrite on the command line)."
        )

    def _holds_state(self) -> bool:
        """Whether the folder holds a finished file; a killed write leaves hidden ones only."""
        return any(not path.name.startswith(".") for path in self.folder.glob("*.npz"))

    def on(self, backend: Backend, plan: str = "") -> Callable[..., Any]:
        """A function `cache(name, make)` that reads from disk what `make` made before a crash.

        Where there is nothing to read, it calls `make`.  `plan` names the way in which things are
        made; it depends on free memory, and files that were made in another way are not read.
        Where several processes make a thing `together`, the first one reads and stores it; where
        they have rows of their own, each its own.
        """
        plan += backend.rows_key

        def cache(
            name: str, make: Callable[[], dict[str, Array]], together: bool = False
        ) -> dict[str, Array]:
            path, made_from = self._place(backend) / f"{name}.npz", self._made_from + plan
            stored = _read(path, made_from)
            if not backend.whole:
                stored = None if backend.largest(int(stored is None)) else stored
            elif together:
                stored = backend.agreed(stored)
            if stored is not None:
                return {k: _restored(array, backend) for k, array in stored.items()}
            start = time.perf_counter()
            made = make()
            if together and backend.whole and backend.rank > 0:
                return made
            # Without rows of their own processes work alone here, and the clocks of all count.
            seconds = time.perf_counter() - start
            seconds = seconds if backend.whole else float(backend.largest(seconds))
            if seconds >= self.worth:
                arrays = {
                    k: v if isinstance(v, str) else backend.to_numpy(v) for k, v in made.items()
                }
                self.claim()
                _write(path, made_from, arrays)
            backend.largest(0)  # all have theirs
            for part in path.parent.glob(f"{name}-*.npz"):
                part.unlink(missing_ok=True)  # its parts are in the whole
            return made

        return cache

    def _place(self, backend: Backend) -> Path:
        """Where this process keeps what it alone has."""
        if backend.whole:
            return self.folder
        return self.folder / f"part-{backend.rank}-of-{backend.ranks}"

    def claim(self) -> None:
        """Write into the folder what its state belongs to; called before the long work begins."""
        about = self.folder / _MADE_FROM
        if self._fingerprint and not about.is_file():
            with new_file(about) as temporary:
                text = json.dumps(self._fingerprint, indent=1) + "\n"
                temporary.write_text(text, encoding="utf-8")

    def delete(self) -> None:
        """Remove the folder, which a finished fit does not need."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _restored(array: Any, backend: Backend) -> Any:
    """An array on the device, or a text."""
    return str(array) if array.dtype.kind == "U" else backend.xp.asarray(array)


def _write(path: Path, made_from: str, arrays: dict[str, Any]) -> None:
    write_npz(path, {"made_from": np.array(made_from), **arrays}, "checkpoint")


def _read(path: Path, made_from: str) -> dict[str, Any] | None:
    """The arrays of a file, or None if it is missing, damaged, or from another fit.

    What is None is computed again.
    """
    if not path.is_file():
        return None
    try:
        stored = Archive(path, "a whole file of a checkpoint")
        stored.check_format("checkpoint", ())
        if str(stored["made_from"]) != made_from:
            return None
        names = [name for name in stored.keys if name not in ("made_from", "format")]
        return {name: stored[name] for name in names}
    except DataError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
