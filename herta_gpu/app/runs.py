"""A run is a folder: what was asked for, every step as it happened, the model, and a page.

`config.json`, `metrics.jsonl`, `model.npz`, `result.json`, `report.html`.
Files appear whole or not at all; `metrics.jsonl` grows line by line while training runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy

from herta_gpu import __version__
from herta_gpu.app.results import FitResult
from herta_gpu.herta import HERTA
from herta_gpu.more.labels import CorrectAndSmooth
from herta_gpu.planning.settings import NORMALIZATIONS
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import BudgetError, check_choice
from herta_gpu.plumbing.files import DataError, check_place, check_target, lock_path, new_file, why
from herta_gpu.plumbing.models import check_entries, check_params, to_plain

_FILES = (
    *("config.json", "metrics.jsonl", "model.npz", "result.json", "report.html"),
    *("convergence.png", "tune.json", "predictions.npz"),  # the first is of earlier versions
)
_OWN = (*_FILES, "checkpoint")  # all that a run may hold
T = TypeVar("T")
_REPLACED = ".replaced"  # where --overwrite keeps the old run until the new one has begun
_CONFIG: dict[str, Any] = {"dataset": str, "params": dict, "environment": dict}
_CONFIG |= dict.fromkeys(("split", "normalize", "data_dir"), (str, type(None)))


class Run:
    """A run folder.  `Run.create` and `Run.reopen` own it; another process of an owner looks on:

    it writes nothing but blocks of the checkpoint.
    """

    def __init__(self, folder: str | Path, owned: bool = False) -> None:
        self.folder, self.owned = Path(folder), owned
        self.checkpoint, self._again = Checkpoint(self.folder / "checkpoint"), False

    @classmethod
    @contextlib.contextmanager
    def create(cls, folder: str | Path, overwrite: bool = False) -> Iterator[Run]:
        """Own `folder` until the block ends; it must not hold a run yet.

        If the run is refused before its first step, the folder is as it was before, with the run
        that was to be replaced.
        """
        path = Path(folder)
        check_free(path, overwrite)
        new = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
        run, old = cls(path, owned=True), path / _REPLACED
        try:
            with _lock(path):
                run._remove_unfinished()
                if not (path / "config.json").exists():
                    _move(old, path)  # a process was killed before its run had begun
                check_free(path, overwrite)  # again, now that nobody else can write
                _move(path, old)
                try:
                    yield run
                except BaseException as error:
                    if not run._begun(error):
                        for name in _FILES:
                            (path / name).unlink(missing_ok=True)
                        run.checkpoint.delete()
                        _move(old, path)
                    raise
                finally:
                    shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            if new and not any(name != ".lock" for name in os.listdir(path)):
                (path / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for place in new:
                        place.rmdir()
            raise

    @classmethod
    @contextlib.contextmanager
    def reopen(cls, folder: str | Path) -> Iterator[Run]:
        """Own the folder of a killed run; its files stay as they are until the fit goes on."""
        path = Path(folder)
        with _lock(path):
            run = cls(path, owned=True)
            run._again = run.result() is None
            if run._again:
                run._remove_unfinished()
                shutil.rmtree(path / _REPLACED, ignore_errors=True)
            else:
                run.checkpoint.delete()
            yield run

    def _remove_unfinished(self) -> None:
        """Remove what a process that was killed had not written to its end."""
        for name in _FILES:
            for left in self.folder.glob(f".{name}.*"):
                left.unlink()

    def _begun(self, error: BaseException) -> bool:
        """Whether the run has come far enough to be resumed."""
        if not (self.folder / "config.json").exists():
            return False
        refused = isinstance(error, (ValueError, TypeError, BudgetError))
        held = (self.folder / "metrics.jsonl", self.checkpoint.folder)
        return not refused or any(place.exists() for place in held)

    def result(self) -> FitResult | None:
        """The content of result.json, which a run has when it is finished."""
        path = self.folder / "result.json"
        return _read_json(path, FitResult.from_json) if path.is_file() else None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        if self.owned:
            write_json(self.folder / name, content)

    def record(self, step: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl; it is on disk before training goes on."""
        if not self.owned:
            return
        if self._again:  # the loop of a killed run begins again
            self._again = False
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(to_plain(step, lossy=True)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def as_json(content: dict[str, Any]) -> str:
    return json.dumps(to_plain(content, lossy=True), indent=1)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(as_json(content) + "\n", "utf-8")


def check_free(folder: str | Path | None, overwrite: bool = False) -> None:
    """Raise an error unless a new run may go into `folder`; None means that no run is wanted."""
    if folder is None:
        return
    if not str(folder):
        raise ValueError("--out is empty: name a folder, or leave it out.")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: --out needs a folder.")
    check_place(path)
    held = next((name for name in _OWN if (path / name).exists()), None)
    if held is None or (overwrite and is_run(path)):
        return
    if not is_run(path):
        raise ValueError(
            f"{path} holds {held} but is no run, and --overwrite replaces only a run: choose "
            "another folder."
        )
    resume = f", go on with it (herta train --resume {path})"
    resume *= not (path / "result.json").exists()
    raise ValueError(
        f"{path} already holds a run ({held}): choose another folder{resume} or give --overwrite."
    )


def is_run(folder: Path) -> bool:
    """Whether a folder is a run: its config.json has the entries that ours have."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and set(_CONFIG) <= set(content)


def check_new_file(path: str | Path, overwrite: bool = False) -> None:
    """Raise an error, before any work, unless a command may write its result to `path`."""
    check_target(path)
    path = Path(path)
    if path.name in _OWN and path.name != "predictions.npz" and is_run(path.parent):
        raise ValueError(f"{path} belongs to the run in {path.parent}: name another file.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: name another file, or give --overwrite.")


def _move(source: Path, target: Path) -> None:
    """Move all that a run may hold from one folder to another: out of the way, or back."""
    held = [name for name in _OWN if (source / name).exists()]
    if held and target.name == _REPLACED:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    for name in held:
        os.replace(source / name, target / name)
    if source.name == _REPLACED:
        shutil.rmtree(source, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder; the operating system frees it when the process ends, however it ends."""
    (folder / ".lock").touch()
    with lock_path(folder / ".lock") as free:
        if not free and os.name == "posix":  # elsewhere, files still appear whole
            raise RuntimeError(
                f"Another process is writing a run into {folder}: choose another folder."
            )
        yield


def environment(ranks: int = 1) -> dict[str, Any]:
    """Versions, platform, threads and processes, on which a result depends, too."""
    return {
        "herta_gpu": __version__,
        "date": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "platform": platform.platform(),
        "threads": os.environ.get("OMP_NUM_THREADS") or os.cpu_count(),
        "ranks": ranks,
        "command": sys.argv,
    }


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of config.json, from which a run can be repeated."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no run: it has no config.json.")

    def check(content: Any) -> dict[str, Any]:
        check_entries(content, _CONFIG)
        check_params(HERTA, content["params"])
        HERTA(**content["params"])._settings()
        smoother_of(content)
        check_choice("normalize", content["normalize"], (None, *NORMALIZATIONS))
        return dict(content)

    return _read_json(path, check)


def smoother_of(config: dict[str, Any]) -> CorrectAndSmooth | None:
    """Correct and Smooth as the run had it; earlier versions have no such entry."""
    params = config.get("correct_and_smooth")
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ValueError(f"its entry correct_and_smooth is {params!r}")
    check_params(CorrectAndSmooth, params)
    made = CorrectAndSmooth(**params)
    made._checked()
    return made


def _read_json(path: Path, read: Callable[[Any], T]) -> T:
    """What `read` makes of the content of a JSON file; its ValueError says what is damaged."""
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({why(error)}).") from None
