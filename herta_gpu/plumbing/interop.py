"""Arrays of other libraries in, results of the same kind out.

Whatever lives on a GPU and says so (DLPack or ``__cuda_array_interface__``: CuPy, PyTorch, ...) is
used where it is, without a copy; so is a tensor on the host, and a sparse matrix of CuPy's.  NumPy
in gives NumPy out, CuPy gives CuPy, a tensor of PyTorch gives a tensor on the same side.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.plumbing.columns import is_frame, rows_of_frame

Array = Any  # NumPy's or CuPy's
Backend = Any  # a `backends.base.Backend`, whose module imports this one

_DLPACK_CUDA = 2  # kDLCUDA


def on_device(x: Any) -> bool:
    """Whether `x` is an array or a sparse matrix in the memory of a GPU."""
    if _of_torch(x):  # asked like others, a tensor with a gradient raises
        return bool(x.is_cuda)
    if hasattr(x, "__cuda_array_interface__") or _of_cupyx(x):
        return True
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and where()[0] == _DLPACK_CUDA


def is_sparse(x: Any) -> bool:
    """Whether `x` is a sparse matrix, of SciPy's or of CuPy's."""
    return sp.issparse(x) or _of_cupyx(x)


def as_array(name: str, x: Any, backend: Backend) -> Any:
    """`x` as an array of the device it is on: NumPy's on the host; sparse matrices by rows."""
    x = plain(x)
    if isinstance(x, np.matrix):
        return np.asarray(x)  # `*` of a np.matrix is the product of matrices
    if sp.issparse(x):
        return sp.csr_array(x)
    if isinstance(x, np.ndarray):
        return x
    if x is None:
        raise ValueError(f"{name} is None: give one row of numbers per node.")
    if is_frame(x):
        return rows_of_frame(name, x)
    if not on_device(x):
        bare = hasattr(x, "__dlpack__") and not hasattr(x, "__array__")
        try:
            return np.from_dlpack(x) if bare else np.asarray(x)
        except ValueError:
            raise ValueError(f"{name} is no matrix: its rows differ in length.") from None
    if backend.xp is np:
        raise TypeError(f'{name} is on a GPU but the computation is not: use device="cuda".')
    return x.tocsr() if is_sparse(x) else backend.asarray(x)


def as_matrix(X: Any, backend: Backend) -> Any:
    """X with rows and columns: a CSR matrix without repeats, or an array of the device it is on."""
    if is_sparse(X) and X.ndim != 2:
        raise ValueError(f"A sparse X must have two dimensions, not {X.ndim}.")
    try:
        X = as_array("X", X, backend)
        if sp.issparse(X):
            X.check_format(full_check=True)
    except (ValueError, IndexError) as error:
        if not sp.issparse(X):
            raise
        raise ValueError(f"X is no whole sparse matrix ({error}).") from None
    if not is_sparse(X):
        return X[:, None] if X.ndim == 1 else X
    if _of_cupyx(X) and X.nnz:
        ends = [int(x) for x in (X.indices.min(), X.indices.max())]  # synchronize!
        if ends[0] < 0 or ends[1] >= X.shape[1] or int(X.indptr[-1]) != X.nnz:
            raise ValueError("X is no whole sparse matrix (an index is out of its range).")
    if not X.has_canonical_format:  # an entry that is listed twice is a sum
        X = X.copy()
        X.sum_duplicates()
    return X


def to_host(x: Any, backend: Backend) -> Any:
    """`x` as an array on the host, where labels and node ids are worked on."""
    x = plain(x)
    if on_device(x):
        return backend.to_numpy(backend.asarray(x))  # synchronize!
    return np.asarray(x) if _of_torch(x) else x


def plain(x: Any) -> Any:
    """A tensor of PyTorch's as NumPy and CuPy read it: without a gradient, and not in bfloat16.

    One that is sparse, or of torch_sparse, becomes a SciPy matrix; all else stays what it is.
    """
    if hasattr(x, "coo") and hasattr(x, "sizes"):
        row, column, value = x.coo()
        return _of_parts(row, column, value, x.sizes())
    if not (_of_torch(x) and hasattr(x, "layout")):
        return x
    x = x.detach()
    if "sparse" in str(x.layout):
        x = x.to_sparse_coo().coalesce()
        row, column = x.indices()
        return _of_parts(row, column, x.values(), x.shape)
    return x.float() if str(x.dtype) == "torch.bfloat16" else x


def _of_parts(row: Any, column: Any, value: Any, shape: Any) -> sp.csr_array:
    row, column = row.cpu().numpy(), column.cpu().numpy()
    value = np.ones(row.size) if value is None else plain(value).cpu().numpy()
    return sp.csr_array((value, (row, column)), shape=tuple(int(k) for k in shape))


def take_rows(x: Array, rows: Any, backend: Backend) -> Array:
    """x[rows] for host ids `rows` and an `x` on either side; None: all of them."""
    if rows is None:
        return x
    return x[backend.asarray(rows)] if on_device(x) else x[rows]


def in_kind_of(result: Array, given: Any) -> Any:
    """`result` in the kind of `given`: a tensor where a tensor came in, of the same memory."""
    return sys.modules["torch"].from_dlpack(result) if _of_torch(given) else result


def of_scipy(x: Any) -> Any:
    """A sparse matrix of CuPy's as one of SciPy's; anything else as it is."""
    return x.get() if _of_cupyx(x) else x


def _of_cupyx(x: Any) -> bool:
    return type(x).__module__.startswith("cupyx.scipy.sparse")


def _of_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch"
