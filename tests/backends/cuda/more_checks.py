"""What the tests ask of a device beyond `herta selftest`: odd blocks, transfer, and more fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import scipy.sparse as sp

import herta_gpu
from tests.backends.cuda import primitive_checks as checks

FITS: dict[str, tuple[str, dict[str, Any]]] = (
    checks.FITS
    | {
        f"{loss} {optimizer} {strategy}": (
            "plain",
            # A rough P for MSE: with the exact one there is nothing left to optimise.
            {"loss": loss, "optimizer": optimizer, "strategy": strategy, "max_iter": 5}
            | ({"ridge": 0.1} if loss == "ce" else {"sketch": 16}),
        )
        for loss in ("mse", "ce")
        for optimizer in ("cg", "gd", "lbfgs", "adam", "momentum")
        for strategy in ("herta", "direct")
    }
    | {
        "Algorithm 2 on a weighted graph": ("weighted", {"sparsify": True}),
        "few samples": ("weighted", {"sparsify": 100, "max_iter": 8}),
        "dependent columns": ("dependent weighted", {"strategy": "herta"}),
        "no preconditioner": ("plain", {"precondition": False, "optimizer": "gd", "max_iter": 5}),
        "fewer rows than columns, no ridge": ("wide", {"strategy": "direct"}),
        "cross entropy with both": (
            "plain",
            {"class_weight": "balanced", "fit_intercept": True, "loss": "ce", "ridge": 0.1},
        ),
    }
)


def changed_backend(file: str, change: Callable[[str], str], patch: Any) -> Any:
    """The CUDA backend with one of its files changed: a bug, on purpose."""
    folder = Path(herta_gpu.__file__).parent / "backends" / "cuda"
    for name in dict.fromkeys([file, "backend"]):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        module = ModuleType(f"herta_gpu.backends.cuda.{name}")
        patch.setitem(sys.modules, module.__name__, module)
        text = change(text) if name == file else text
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module.CUDABackend()


def check_empty(backend: Any) -> None:
    """No columns, no edges: nothing to launch, nothing to fail."""
    L = backend.laplacian(checks.graph("one"), "float32")
    none = backend.asarray(np.zeros((1, 0), "float32"))
    assert backend.apply_H(L, checks.LAM, none).shape == (1, 0)
    assert backend.column_dots(none, none).shape == (0,)
    assert backend.residual_rows(L, checks.LAM, none, none.astype("float64"), 0).shape == (1, 0)
    assert backend.srht(none, 1, 0).shape == (1, 0)
    state = backend.cg_start(L, checks.LAM, none, backend.asarray(np.zeros(0)), 0.1, 0.1)
    backend.cg_step(L, checks.LAM, state)
    assert backend.cg_active(state) == 0
    one = backend.asarray(np.ones((1, 4), "float32"))
    assert backend.edge_scores(L, one, one, checks.LAM).shape == (0,)
    for shape in ((0,), (0, 3), (2, 0)):
        C, B = (backend.asarray(np.zeros(s)) for s in ((shape[0], shape[0]), shape))
        assert backend.solve_triangular(C, B, trans=True).shape == shape


def check_unaligned(backend: Any) -> None:
    """A block of the caller that does not begin where 16 bytes may be read at once."""
    L, X = backend.laplacian(checks.graph("tail"), "float32"), checks.block(33, 4, "float32")
    flat = backend.asarray(np.concatenate([np.zeros(1, "float32"), X.ravel()]))
    taken = backend.asarray(flat[1:].reshape(L.n, 4))
    expected = checks.CPU.apply_H(
        checks.CPU.laplacian(checks.graph("tail"), "float32"), checks.LAM, X
    )
    checks.close(backend, backend.apply_H(L, checks.LAM, taken), expected, "float32")
    for rows in (backend.asarray(checks.block(5, 1, "float64"))[1:], backend.asarray(X)[3:]):
        assert backend.asarray(rows) is rows  # these may begin anywhere: no copy


def check_streaming(backend: Any) -> None:
    """A matrix that stays on the host comes through whole, in any parts, and a second time.

    Three columns of twenty are cut out of whole rows on the device, one is gathered on the host.
    """
    order = np.random.default_rng(0).permutation(103)
    with TemporaryDirectory() as folder:
        for dtype, order_or_none, in_file in (
            *[("float32", None, False), ("float64", order, False)],
            *[("float32", order, True), ("int64", None, True)],
        ):
            X = (100 * checks.block(103, 20, "float64")).astype(dtype)
            expected = X if order_or_none is None else X[order_or_none]
            if in_file:
                path = Path(folder) / dtype
                X.tofile(path)
                X = np.memmap(path, dtype, "r", shape=X.shape)
            blocks = backend.host_blocks(X, order_or_none)
            for rows, columns in ((10, slice(0, 20)), (40, slice(2, 5)), (60, slice(6, 7))):
                cuts = [slice(a, min(a + rows, 103)) for a in range(0, 103, rows)]
                wanted = [(at, columns) for at in cuts]
                for _ in blocks.parts(wanted[::-1]):
                    break  # a caller that stops early leaves nothing broken behind
                found = backend.xp.zeros((103, columns.stop - columns.start))
                for at, part in blocks.parts(wanted):
                    found[at] = part * 2.0
                assert np.array_equal(backend.to_numpy(found), 2.0 * expected[:, columns])
            assert list(blocks.parts([])) == []


def check_upload(backend: Any, chunk: int = 100) -> None:
    """In chunks: whole, of any layout, as another type, and from a file."""
    if backend.xp is np:
        return  # nothing is uploaded here
    X, transfer = checks.block(31, 6, "float64"), sys.modules["herta_gpu.backends.cuda.transfer"]
    with TemporaryDirectory() as folder, mock.patch.object(transfer, "CHUNK_BYTES", chunk):
        path = Path(folder) / "X"
        X.tofile(path)
        for x in (X, X[:, ::2], X.T, X[3], np.memmap(path, "float64", "r", shape=X.shape)):
            for dtype in (None, "float32"):
                found = backend.asarray(x, dtype)
                assert found.flags.c_contiguous
                assert np.array_equal(backend.to_numpy(found), x.astype(dtype or x.dtype))
        M = sp.random_array((40, 30), density=0.3, rng=np.random.default_rng(0), format="csr")
        assert np.array_equal(backend.csr(M).get().toarray(), M.toarray())


def check_no_factor(backend: Any) -> None:
    """Where LAPACK stops half-way and leaves numbers that look like a factor."""
    assert backend.cholesky(backend.asarray(np.array([[1.0, 2.0], [2.0, 1.0]]))) is None


def check_all(backend: Any) -> None:
    """Every primitive, once or twice: what a mutant has to face."""
    checks.check_kernels(backend)
    check_empty(backend)
    check_no_factor(backend)
    check_unaligned(backend)
    check_streaming(backend)
    check_upload(backend)
    for dtype in ("float32", "float64"):
        checks.check_reference(backend, checks.graph("hub", True), dtype)
        checks.check_reference(backend, checks.graph("tail").reordered("degree"), dtype)
