"""Values that JSON can hold, and checks of what was read from JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def jsonable(value: Any) -> Any:
    """The same value in plain types: JSON has no NumPy, and None stands for inf and NaN."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def check_entries(content: Any, types: dict[str, Any]) -> None:
    """A ValueError unless `content` is an object that has at least these entries."""
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object with entries")
    for name, kind in types.items():
        if name not in content:
            raise ValueError(f"it has no entry {name}")
        value = content[name]
        number = kind is float and isinstance(value, int)
        # JSON has no infinity: None stands for it, also where a number should be.
        if not isinstance(value, kind) and not number and not (kind is float and value is None):
            raise ValueError(f"its entry {name} is {value!r}")
