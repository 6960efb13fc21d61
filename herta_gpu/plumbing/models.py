"""A fitted estimator in one file: weights and classes as arrays, everything else as JSON.

The file is in NumPy's .npz format and holds no pickle.  What is wrong with a file that is not ours
is said in one sentence, before anything of it is used.  Dataclasses become JSON and come back with
every number to its last bit and every type checked.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from herta_gpu.plumbing.checks import as_labels, check_dtype
from herta_gpu.plumbing.files import Archive, DataError, why, write_npz
from herta_gpu.plumbing.targets import Estimator

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
        raise DataError(f"{path} is not a whole model file ({why(error)}).") from None
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


# ---- dataclasses as JSON and back --------------------------------------------------------
_NUMBER = "float"  # the key of a number that JSON does not have
_LISTS = (list, tuple, Sequence)


def to_plain(value: Any, lossy: bool = False) -> Any:
    """`value` as what JSON can hold; dataclasses become objects, tuples lists.

    With `lossy` the JSON is for readers that do not know this module: null stands for infinity and
    NaN, and the text of an object for the object.  Without it, `from_plain` gives back all of it.

    Examples
    --------
    >>> from herta_gpu.plumbing.models import from_plain, to_plain
    >>> to_plain({"gap": float("inf"), "rows": (1, 2)})
    {'gap': {'float': 'inf'}, 'rows': [1, 2]}
    >>> from_plain(dict[str, float], to_plain({"gap": float("inf")}))
    {'gap': inf}
    >>> to_plain({"gap": float("inf")}, lossy=True)
    {'gap': None}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name), lossy) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner, lossy) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner, lossy) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if lossy else {_NUMBER: str(value)}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if lossy:
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON.")


def from_plain(kind: Any, value: Any, name: str = "it") -> Any:
    """The value of type `kind` that `to_plain` was given; a ValueError names what does not fit."""
    if kind is Any:
        return _any(value)
    if is_dataclass(kind):
        return _made(kind, value, name)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = tuple(get_type_hints(kind).values())
        return kind(*from_plain(tuple[hints], value, name))  # type: ignore[valid-type]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, name)
    if origin is Literal:
        return _checked(value in inner, value, name)
    if origin in _LISTS:
        return _several(origin, inner, _checked(isinstance(value, list), value, name), name)
    if origin in (dict, Mapping):
        _checked(isinstance(value, dict), value, name)
        key, of = inner or (str, Any)
        return {key(k): from_plain(of, v, f"{name}.{k}") for k, v in value.items()}
    if kind is float:
        number = _any(value)
        whole = isinstance(number, (int, float)) and not isinstance(number, bool)
        return float(_checked(whole, number, name))
    allowed = type(None) if kind is None else kind
    return _checked(type(value) is allowed, value, name)


def check_entries(content: Any, types: dict[str, Any]) -> None:
    """Raise a ValueError unless `content`, from lossy JSON, has these entries of these types."""
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object with entries")
    for name, kind in types.items():
        if name not in content:
            raise ValueError(f"it has no entry {name}")
        value = content[name]
        number = kind is float and isinstance(value, int)
        # Lossy JSON has None for infinity and NaN: where a number should be, it is no error.
        if not isinstance(value, kind) and not number and not (kind is float and value is None):
            raise ValueError(f"its entry {name} is {value!r}")


def _any(value: Any) -> Any:
    """The value of an unknown type: numbers that JSON lacks are restored, at any depth."""
    if isinstance(value, list):
        return [_any(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_NUMBER} and value[_NUMBER] in ("inf", "-inf", "nan"):
        return float(value[_NUMBER])
    return {key: _any(inner) for key, inner in value.items()}


def _made(kind: Any, value: Any, name: str) -> Any:
    """A dataclass from its fields; those without a default must be there."""
    _checked(isinstance(value, dict), value, name)
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise ValueError(f"{name} has an unknown entry {unknown}")
    for key, field in known.items():
        needed = field.default is MISSING and field.default_factory is MISSING
        if key not in value and needed:
            raise ValueError(f"{name} has no entry {key}")
    return kind(**{key: from_plain(hints[key], v, f"{name}.{key}") for key, v in value.items()})


def _one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """The value as the first of several types that fits it."""
    for kind in kinds:
        try:
            return from_plain(kind, value, name)
        except ValueError as error:
            last = error
    raise last


def _several(origin: Any, inner: tuple[Any, ...], value: list[Any], name: str) -> Any:
    """A list or a tuple, of one type for all entries or of one type for each."""
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        _checked(len(value) == len(inner), value, name)
        kinds = inner
    else:
        kinds = (inner[0] if inner else Any,) * len(value)
    made = [from_plain(of, v, f"{name}[{i}]") for i, (of, v) in enumerate(zip(kinds, value))]
    return made if origin is list else tuple(made)


def _checked(fits: bool, value: Any, name: str) -> Any:
    if not fits:
        raise ValueError(f"its entry {name} is {value!r}")
    return value
