"""Dataclasses as JSON and back: every number to its last bit, every type checked, no pickles."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

_NUMBER = "float"  # the key of a number that JSON does not have
_LISTS = (list, tuple, Sequence)


def to_plain(value: Any, lossy: bool = False) -> Any:
    """`value` as what JSON can hold; dataclasses become objects, tuples lists.

    With `lossy` the JSON is for readers that do not know this module: null stands for infinity and
    NaN, and the text of an object for the object.  Without it, `from_plain` gives back all of it.

    Examples
    --------
    >>> from herta_gpu.plumbing.plain import from_plain, to_plain
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
