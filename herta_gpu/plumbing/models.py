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
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from herta_gpu.plumbing.checks import as_labels, check_dtype
from herta_gpu.plumbing.files import Archive, explained, write_npz
from herta_gpu.plumbing.targets import Estimator

Model = TypeVar("Model", bound=Estimator)
_FIXED = ("V", "R", "b", "floor", "scale", "row_floor", "mean", "deviation")


def write_model(model: Any, path: str | Path, fitted: dict[str, Any]) -> None:
    """Write a fitted model to exactly `path`; `fitted` names its attributes and their types."""
    params = {**model.get_params(), "dtype": check_dtype(model.dtype)}
    about = {name.strip("_"): to_plain(getattr(model, name)) for name in fitted}
    text = np.array(json.dumps({"params": to_plain(params), **about}))
    arrays = {"W": model.W_, "about": text, "intercept": model.intercept_, "train": model.train_}
    arrays |= {"classes": model.classes_, "labels": model.labels_}
    arrays |= {name: np.asarray(value) for name, value in model.fixed_.items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write_npz(Path(path), arrays, "model")


def read_model(made: type[Model], path: str | Path, fitted: dict[str, Any]) -> Model:
    """The model that `write_model` wrote, as one of the class `made`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no trained model at {path}.")
    stored = Archive(path, "a whole model file")
    stored.check_format("model")
    with explained(f"{path} is not a whole model file"):
        shape, kind = stored.header("about")
        if shape != () or kind.kind != "U":
            raise ValueError("its entry about is no text")
        about = json.loads(str(stored["about"]))
        check_entries(about, {"params": dict, **{name.strip("_"): object for name in fitted}})
        W, params = stored["W"], about["params"]
        if W.ndim != 2 or W.size == 0 or W.dtype.kind != "f":
            raise ValueError(f"W is {W.dtype} of shape {W.shape}, not a matrix of floats")
        if not np.isfinite(W).all():
            raise ValueError("W holds NaN or infinity")
        classes = _classes(stored["classes"], W.shape[1]) if "classes" in stored else None
        check_params(made, params)
        by_class = params.get("class_weight")
        if isinstance(by_class, dict) and classes is not None and classes.dtype.kind != "U":
            # JSON has made text of the labels.
            params = {**params, "class_weight": {int(k): value for k, value in by_class.items()}}
        model: Any = made(**params)
        settings = model._settings()
        blocks, made_rows = settings.blocks, settings.features(0, W.shape[1])
        d, left = divmod(W.shape[0] - made_rows, blocks)
        if left or d < 1:
            raise ValueError(f"W has {W.shape[0]} rows for {blocks} lam")
        model.fixed_ = _fixed(stored, settings, d)
        model.intercept_, model.train_ = _constants(stored, W.shape[1])
        model.labels_ = stored["labels"] if settings.label_folds else None
        if settings.label_folds and model.labels_.shape != (model.train_.shape[0], W.shape[1]):
            raise ValueError(f"its labels have shape {model.labels_.shape}")
        for name, of in fitted.items():
            entry = name.strip("_")  # that of `status_` is "status"
            setattr(model, name, from_plain(of, about[entry], entry))
    model.W_, model.classes_, model.n_features_in_ = W, classes, d
    result: Model = model
    return result


def check_params(made: type[Estimator], params: dict[str, Any]) -> None:
    """Raise an error that names the first parameter that the estimator does not have."""
    wrong = [name for name in params if name not in made._defaults()]
    if wrong:
        raise ValueError(f"there is no parameter {wrong[0]!r}")


def _fixed(stored: Archive, settings: Any, d: int) -> dict[str, Any]:
    """What W is for beside X: a hidden layer, lengths of rows, units of columns."""
    found = {name: stored[name] for name in _FIXED if name in stored}
    k, inputs = found["V"].shape[-1] if "V" in found else 0, 1
    inputs = settings.blocks if settings.hidden_after else 1
    w = settings.hidden * settings.hidden_draws
    wanted: dict[str, tuple[int, ...]] = {}
    if w:
        wanted |= {"V": (d, k), "R": (inputs * k, w), "b": (w,), "floor": (), "scale": ()}
    if settings.row_norm:
        wanted["row_floor"] = ()
    if settings.normalize == "standard":
        wanted |= {"mean": (d,), "deviation": (d,)}
    if wanted.keys() != found.keys():
        raise ValueError(f"it holds {', '.join(found)}, but {', '.join(wanted)} are needed")
    for name, shape in wanted.items():
        a = found[name]
        if a.shape != shape or a.dtype.kind != "f" or not np.isfinite(a).all():
            raise ValueError(f"its {name} is {a.dtype} of shape {a.shape}, not {shape} and finite")
        if name in ("floor", "scale", "row_floor", "deviation") and not (a > 0).all():
            raise ValueError(f"its {name} is not above 0")
    return {name: a if a.ndim else float(a) for name, a in found.items()}


def _classes(classes: Any, c: int) -> Any:
    if classes.shape != (c,):
        raise ValueError(f"W has {c} columns for classes of shape {classes.shape}")
    as_labels("classes", classes)
    if classes.dtype.kind not in "iubU" or np.unique(classes).shape != classes.shape:
        raise ValueError("its classes are not distinct numbers or text")
    return classes


def _constants(stored: Archive, c: int) -> tuple[Any, Any]:
    """The intercept and the training nodes."""
    b, train = stored["intercept"], stored["train"]
    if b.shape != (c,) or b.dtype.kind != "f" or not np.isfinite(b).all():
        raise ValueError(f"its intercept is {b.dtype} of shape {b.shape}, not {c} finite numbers")
    if train.ndim != 1 or train.dtype.kind not in "iu":
        raise ValueError("its training nodes are no ids")
    return b, train


# ---- dataclasses as JSON and back --------------------------------------------------------
_NUMBER = "float"  # the key of a number that JSON does not have


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
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        of_fields = tuple(get_type_hints(kind).values())
        return kind(*from_plain(tuple[of_fields], value, name))  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):  # the first of several types that fits it
        for of in inner[:-1]:
            with suppress(ValueError):
                return from_plain(of, value, name)
        return from_plain(inner[-1], value, name)
    if kind in (float, Any):
        value = _numbers_restored(value)
    if is_dataclass(kind) and isinstance(value, dict):
        hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
        for key in value:
            if key not in known:
                raise ValueError(f"{name} has an unknown entry {key}")
        for key, field in known.items():
            if key not in value and field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{name} has no entry {key}")
        made = {key: from_plain(hints[key], v, f"{name}.{key}") for key, v in value.items()}
        return kind(**made)  # type: ignore[operator]
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        several = origin is tuple and bool(inner) and inner[-1] is not Ellipsis
        if not several or len(value) == len(inner):
            kinds = inner if several else (inner[0] if inner else Any,) * len(value)
            all_of = enumerate(zip(kinds, value))
            found = [from_plain(of, v, f"{name}[{i}]") for i, (of, v) in all_of]
            return found if origin is list else tuple(found)
    if origin in (dict, Mapping) and isinstance(value, dict):
        key, of = inner or (str, Any)
        return {key(k): from_plain(of, v, f"{name}.{k}") for k, v in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    fits = value in inner if origin is Literal else isinstance(kind, type) and type(value) is kind
    if not (fits or kind is Any or (kind is None and value is None)):
        raise ValueError(f"its entry {name} is {value!r}")
    return value


def check_entries(content: Any, types: dict[str, Any]) -> None:
    """Raise a ValueError unless `content`, from lossy JSON, has these entries of these types."""
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object with entries")
    for name, kind in types.items():
        if name not in content:
            raise ValueError(f"it has no entry {name}")
        # Lossy JSON has None for infinity and NaN: where a number should be, it is no error.
        kinds = (float, int, type(None)) if kind is float else kind
        if not isinstance(content[name], kinds):
            raise ValueError(f"its entry {name} is {content[name]!r}")


def _numbers_restored(value: Any) -> Any:
    """A value of an unknown type with the numbers that JSON lacks, at any depth."""
    if isinstance(value, list):
        return [_numbers_restored(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_NUMBER} and value[_NUMBER] in ("inf", "-inf", "nan"):
        return float(value[_NUMBER])
    return {key: _numbers_restored(inner) for key, inner in value.items()}
