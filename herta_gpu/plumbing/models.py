"""A fitted estimator in one file: weights and classes as arrays, everything else as JSON.

The file is in NumPy's .npz format and holds no pickle.  What is wrong with a file that is not ours
is said in one sentence, before anything of it is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from herta_gpu.plumbing.estimator import Estimator
from herta_gpu.plumbing.files import Archive, DataError, write_npz
from herta_gpu.plumbing.plain import from_plain, to_plain
from herta_gpu.plumbing.validation import as_labels, check_dtype

Model = TypeVar("Model", bound=Estimator)
_MEMBERS = ("W", "about", "intercept", "train", "classes", "labels")


def write_model(model: Any, path: str | Path, fitted: dict[str, Any]) -> None:
    """Write a fitted model to exactly `path`; `fitted` names its attributes and their types."""
    params = {**model.get_params(), "dtype": check_dtype(model.dtype)}
    about = {_entry(name): to_plain(getattr(model, name)) for name in fitted}
    arrays = {"W": model.W_, "about": np.array(json.dumps({"params": to_plain(params), **about}))}
    arrays |= {"intercept": model.intercept_, "train": model.train_}
    if model.classes_ is not None:
        arrays["classes"] = model.classes_
    if model.labels_ is not None:
        arrays["labels"] = model.labels_
    write_npz(Path(path), arrays, "model")


def read_model(made: type[Model], path: str | Path, fitted: dict[str, Any]) -> Model:
    """The model that `write_model` wrote, as one of the class `made`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no trained model at {path}.")
    stored = Archive(path, "a whole model file")
    stored.check_format("model", _MEMBERS)
    try:
        about = _about(stored, fitted)
        W, classes = _weights(stored)
        check_params(made, about["params"])
        model: Any = made(**_with_labels(about["params"], classes))
        settings = model._settings()
        blocks, of_labels = len(settings.lams), settings.features(0, W.shape[1])
        d, left = divmod(W.shape[0] - of_labels, blocks)
        if left or d < 1:
            raise ValueError(f"W has {W.shape[0]} rows for {blocks} lam")
        model.intercept_, model.train_ = _constants(stored, W.shape[1])
        model.labels_ = stored["labels"] if settings.label_folds else None
        if of_labels and model.labels_.shape != (model.train_.shape[0], W.shape[1]):
            raise ValueError(f"its labels have shape {model.labels_.shape}")
        for name, kind in fitted.items():
            setattr(model, name, from_plain(kind, about[_entry(name)], _entry(name)))
    except DataError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a whole model file ({without_stop(error)}).") from None
    model.W_, model.classes_, model.n_features_in_ = W, classes, d
    result: Model = model
    return result


def check_params(made: type[Estimator], params: dict[str, Any]) -> None:
    """Raise an error that names the first parameter that the estimator does not have."""
    known = made._defaults()
    wrong = [name for name in params if name not in known]
    if wrong:
        raise ValueError(f"there is no parameter {wrong[0]!r}")


def _with_labels(params: dict[str, Any], classes: Any) -> dict[str, Any]:
    """Parameters whose weights by class have the labels that JSON made text of."""
    given = params.get("class_weight")
    if not isinstance(given, dict) or classes is None or classes.dtype.kind == "U":
        return params
    return {**params, "class_weight": {int(name): value for name, value in given.items()}}


def _constants(stored: Archive, c: int) -> tuple[Any, Any]:
    """The intercept and the training nodes; files of earlier versions hold neither."""
    b = stored["intercept"] if "intercept" in stored else np.zeros(c)
    train = stored["train"] if "train" in stored else np.zeros(0, dtype=np.int64)
    if b.shape != (c,) or b.dtype.kind != "f" or not np.isfinite(b).all():
        raise ValueError(f"its intercept is {b.dtype} of shape {b.shape}, not {c} finite numbers")
    if train.ndim != 1 or train.dtype.kind not in "iu":
        raise ValueError("its training nodes are no ids")
    return b, train


def without_stop(error: BaseException) -> str:
    """The words of an error without the full stop, to stand within a sentence."""
    return str(error).rstrip(".") or type(error).__name__


def _entry(name: str) -> str:
    """The entry of an attribute: that of `status_` is "status"."""
    return name.strip("_")


def _about(stored: Archive, fitted: dict[str, Any]) -> dict[str, Any]:
    """What a model file says of the model; all of it must be there."""
    shape, kind = stored.header("about")
    if shape != () or kind.kind != "U":
        raise ValueError("its entry about is no text")
    about = json.loads(str(stored["about"]))
    if not isinstance(about, dict):
        raise ValueError(f"it is a {type(about).__name__}, not an object with entries")
    missing = [name for name in ("params", *map(_entry, fitted)) if name not in about]
    if missing:
        raise ValueError(f"it has no entry {missing[0]}")
    if not isinstance(about["params"], dict):
        raise ValueError(f"its entry params is {about['params']!r}")
    return dict(about)


def _weights(stored: Archive) -> tuple[Any, Any]:
    """W and the classes; an error unless a model can predict with them."""
    W = stored["W"]
    if W.ndim != 2 or W.size == 0 or W.dtype.kind != "f":
        raise ValueError(f"W is {W.dtype} of shape {W.shape}, not a matrix of floats")
    if not np.isfinite(W).all():
        raise ValueError("W holds NaN or infinity")
    if "classes" not in stored:
        return W, None
    classes = stored["classes"]
    if classes.shape != (W.shape[1],):
        raise ValueError(f"W has {W.shape[1]} columns for classes of shape {classes.shape}")
    as_labels("classes", classes)
    if classes.dtype.kind not in "iubU" or np.unique(classes).shape != classes.shape:
        raise ValueError("its classes are not distinct numbers or text")
    return W, classes
