"""A run is a folder: what was asked, every step as it happened, the model, a page to look at.

`config.json`, `metrics.jsonl`, `model.npz`, `result.json`, `convergence.png`, `report.html`.
Files appear whole or not at all; `metrics.jsonl` grows line by line while training runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from herta_gpu.certificate import Certificate
from herta_gpu.checkpoint import Checkpoint
from herta_gpu.files import DataError, new_file
from herta_gpu.herta import HERTA

_EXTRAS = ("convergence.png", "tune.json", "predictions.npz")
_FILES = ("config.json", "metrics.jsonl", "model.npz", "result.json", "report.html")


class Run:
    """A run folder that this process owns; use `Run.create`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoint = folder, Checkpoint(folder / "checkpoint")
        self._reopened = False

    @classmethod
    @contextlib.contextmanager
    def create(cls, folder: str | Path, overwrite: bool = False) -> Iterator[Run]:
        """Own `folder` until the block ends; it must not hold a run yet."""
        path = Path(folder)
        check_free(path, overwrite)
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            check_free(path, overwrite)  # again, now that nobody else can write
            for name in (*_FILES, *_EXTRAS):
                (path / name).unlink(missing_ok=True)
            run = cls(path)
            run.checkpoint.delete()
            yield run

    @classmethod
    @contextlib.contextmanager
    def reopen(cls, folder: str | Path) -> Iterator[Run]:
        """Own the folder of a run that was killed; nothing is lost before it really goes on."""
        path = Path(folder)
        with _locked(path):
            run = cls(path)
            if run.result() is not None:
                run.checkpoint.delete()
                yield run
                return
            run._reopened = True
            for left in path.glob(".*.*.*"):  # what a write was at when the process was killed
                left.unlink()
            yield run

    def result(self) -> dict[str, Any] | None:
        """result.json, which a run has when it is finished."""
        path = self.folder / "result.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(jsonable(content), indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        with new_file(self.folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def record(self, step: dict[str, Any]) -> None:
        """One more line of metrics.jsonl, on disk before training goes on."""
        if self._reopened:
            self._go_back(step["step"], step["warm"])
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(jsonable(step)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _go_back(self, step: int, warm: bool) -> None:
        """Cut the metrics to what stands before `step`, with which a killed run goes on."""
        self._reopened, state = False, self.checkpoint.last_step()
        steps = []
        if state is not None:
            steps = state["warm_history"][: step if warm else None]
            steps += [] if warm else state["history"][:step]
        self.write_text("metrics.jsonl", "".join(json.dumps(jsonable(s)) + "\n" for s in steps))

    def save_model(self, model: HERTA) -> None:
        save_model(model, self.folder / "model.npz")


def check_free(folder: str | Path | None, overwrite: bool = False) -> None:
    """An error unless a new run may go into `folder`; None: there is to be no run."""
    if folder is None:
        return
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: --out needs a folder.")
    held = next((name for name in _FILES if (path / name).exists()), None)
    if held is None or overwrite:
        return
    unfinished = not (path / "result.json").exists()
    or_resume = f", go on with it (herta train --resume {path})" if unfinished else ""
    raise ValueError(
        f"{path} already holds a run ({held}): choose another folder{or_resume} or give "
        "--overwrite."
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The operating system frees the lock when the process ends, however it ends."""
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # not POSIX: no lock, and still no half files
        except OSError:
            raise RuntimeError(
                f"Another process is writing a run into {folder}: choose another folder."
            ) from None
        yield


def environment() -> dict[str, Any]:
    """What else a result depends on."""
    from herta_gpu import __version__

    return {
        "herta_gpu": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "platform": platform.platform(),
        "threads": os.environ.get("OMP_NUM_THREADS") or os.cpu_count(),
        "command": sys.argv,
    }


def jsonable(value: Any) -> Any:
    """JSON has no infinity and no NumPy: None and plain numbers instead."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def save_model(model: HERTA, path: str | Path) -> None:
    """Write a fitted model to a .npz file without pickles.

    Examples
    --------
    >>> import tempfile
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.runs import load_model, save_model
    >>> data = load("digits")
    >>> model = HERTA(lam=5.0, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    >>> path = tempfile.mkdtemp() + "/model.npz"
    >>> save_model(model, path)
    >>> bool((load_model(path).W_ == model.W_).all())
    True
    """
    certificate = vars(model.certificate_)
    about = {
        "params": model.get_params(),
        "certificate": {k: v for k, v in certificate.items() if v != math.inf},
        "status": model.status_,
        "flat": bool(model._flat),
    }
    arrays = {"W": model.W_, "about": np.array(json.dumps(jsonable(about)))}
    if model.classes_ is not None:
        arrays["classes"] = model.classes_
    with new_file(Path(path)) as temporary:
        np.savez(temporary, **arrays)


def load_model(path: str | Path) -> HERTA:
    """The fitted model that `save_model` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no trained model at {path}.")
    try:
        with np.load(path, allow_pickle=False) as stored:
            about = json.loads(str(stored["about"]))
            W = stored["W"]
            classes = stored.get("classes")
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole model file ({error}).") from None
    model = HERTA(**about["params"])
    model.W_, model.classes_, model._flat = W, classes, about["flat"]
    model.n_features_in_, model.status_ = W.shape[0], about["status"]
    model.certificate_ = Certificate(**{"value": math.inf, "kind": "none", **about["certificate"]})
    return model


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a run."""
    path = Path(folder) / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is no run: it has no config.json.") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}).") from None
