"""Features in other units: rows of sum or length 1, columns of mean 0 and variance 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.plumbing.interop import on_device, to_host


def scaled_rows(X: Any, how: str) -> Any:
    """Rows divided by the sum of their absolute values ("row") or by their length ("unit").

    Empty rows stay zero.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.plumbing.scaling import scaled_rows
    >>> X = np.array([[3.0, -4.0], [0.0, 0.0]])
    >>> scaled_rows(X, "row").round(3).tolist(), scaled_rows(X, "unit").round(2).tolist()
    ([[0.429, -0.571], [0.0, 0.0]], [[0.6, -0.8], [0.0, 0.0]])
    """
    sparse = sp.issparse(X)
    if how == "row":
        total = abs(X).sum(axis=1) if sparse else abs(X).sum(axis=1, dtype="float64")
    else:
        wide = X.astype("float64")
        total = ((wide.multiply(wide) if sparse else wide * wide).sum(axis=1)) ** 0.5
    total = np.asarray(total).ravel() if sparse else total
    total = total + (total == 0)
    if sparse:
        return sp.csr_array(sp.diags_array(1.0 / total) @ X)
    return (X / total[:, None]).astype(float_of(X))


def column_units(X: Any, total: Any, n: int) -> tuple[Any, Any]:
    """(mean, deviation) of each column over n rows, of which X may be a part; `total` adds up.

    The mean of a sparse X is not taken away (0 here): that would fill it with numbers.
    """

    def mean_of(numbers: Any) -> Any:
        own = numbers.sum(axis=0)
        return total(np.asarray(own).ravel() if sp.issparse(numbers) else own) / n

    if sp.issparse(X):
        wide = sp.csr_array(X, dtype=np.float64)
        variance = mean_of(wide.multiply(wide)) - mean_of(wide) ** 2
        deviation = np.sqrt(np.maximum(variance, 0.0))
        return np.zeros(X.shape[1]), np.where(deviation > 0, deviation, 1.0)
    wide = X.astype("float64")
    mean = mean_of(wide)
    deviation = mean_of((wide - mean) ** 2) ** 0.5
    # A constant column is kept: it is the intercept.
    constant = deviation <= 1e-12 * abs(mean).clip(1e-300, None)
    return mean * ~constant, deviation * ~constant + constant


def in_units(X: Any, mean: Any, deviation: Any) -> Any:
    """X less the mean of its columns, over their deviation."""
    if sp.issparse(X):
        return sp.csr_array(X @ sp.diags_array(1.0 / deviation))
    return ((X - mean) / deviation).astype(float_of(X))


def in_new_units(
    X: Any, how: str, backend: Any, known: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """X normalised, and what tells how: mean and deviation of columns, unless they are `known`."""
    if how != "standard":
        return scaled_rows(X, how), {}
    if not known or "mean" not in known:
        n = int(backend.total(X.shape[0]))
        mean, deviation = column_units(X, backend.total, n)
        known = {
            name: to_host(a, backend) for name, a in (("mean", mean), ("deviation", deviation))
        }
    units = [known[name] for name in ("mean", "deviation")]
    made = in_units(X, *(backend.asarray(a) if on_device(X) else a for a in units))
    return made, {name: known[name] for name in ("mean", "deviation")}


def float_of(X: Any) -> Any:
    return X.dtype if X.dtype in (np.float32, np.float64) else np.float32
