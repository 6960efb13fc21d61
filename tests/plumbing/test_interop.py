"""Arrays of other libraries: PyTorch's own tensors on the host, imitated ones on a device."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph, SDDSolver
from herta_gpu.backends import get_backend
from herta_gpu.features import Features
from herta_gpu.plumbing.interop import as_array, as_matrix, on_device
from tests.conftest import random_graph


def data() -> tuple[Graph, Any, Any, Any]:
    rng = np.random.default_rng(0)
    X, labels, target = rng.standard_normal((60, 12)), rng.integers(4, 7, 60), rng.random(60)
    return random_graph(60, 200), X, labels, target


# ---- on the host, with the real PyTorch -------------------------------------------------------


def test_tensors_in_give_tensors_out() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    g, X, y, _ = data()
    train = np.arange(60) % 2 == 0
    tensors = torch.from_numpy(X), torch.from_numpy(y), torch.from_numpy(train)
    plain = HERTA(lam=5.0, device="cpu").fit(g, X, y, train)
    model = HERTA(lam=5.0, device="cpu").fit(g, *tensors)
    np.testing.assert_array_equal(model.W_, plain.W_)
    for method in ("transform", "predict"):
        found, expected = getattr(model, method)(g, tensors[0]), getattr(plain, method)(g, X)
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, np.ndarray)
        np.testing.assert_array_equal(found.numpy(), expected)
        assert torch.equal(torch.from_dlpack(expected), found)  # NumPy's arrays have DLPack, too
    assert model.score(g, *tensors) == plain.score(g, X, y, train)
    W = torch.from_dlpack(model.W_)
    assert W.data_ptr() == model.W_.ctypes.data


def test_tensors_as_edges_targets_and_right_hand_sides() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    g, X, _, target = data()
    u, v, _ = g.edges()
    again = Graph.from_edges(torch.from_numpy(np.stack([u, v])), 60)
    np.testing.assert_array_equal(again.indices, g.indices)
    model = HERTA(device="cpu").fit(g, torch.from_numpy(X), torch.from_numpy(target))
    found = model.predict(g, torch.from_numpy(X))
    assert found.shape == (60,)
    np.testing.assert_array_equal(found.numpy(), model.predict(g, X))
    solver = SDDSolver(g, lam=3.0, device="cpu")
    for B in (X, X[:, 0], X.astype("float32")):
        Z = solver.solve(torch.from_numpy(B))
        assert isinstance(Z, torch.Tensor)
        np.testing.assert_array_equal(Z.numpy(), solver.solve(B))


def test_a_tensor_is_not_copied() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = torch.arange(6.0).reshape(2, 3)
    taken = as_array("X", X, get_backend("cpu"))
    assert taken.ctypes.data == X.data_ptr()
    assert not on_device(X)


def test_what_speaks_only_dlpack_is_understood() -> None:
    g, X, y, _ = data()
    bare = SimpleNamespace(__dlpack__=X.__dlpack__, __dlpack_device__=X.__dlpack_device__)
    assert np.shares_memory(as_array("X", bare, get_backend("cpu")), X)
    model = HERTA(device="cpu").fit(g, bare, y)
    np.testing.assert_array_equal(model.W_, HERTA(device="cpu").fit(g, X, y).W_)


def test_an_entry_that_is_listed_twice_is_a_sum() -> None:
    """Norms of columns, which certificates count in, were those of its parts."""
    g, X, y, _ = data()
    row, col = np.nonzero(X)
    halves = (np.concatenate([0.25 * X[row, col], 0.75 * X[row, col]]), np.tile(col, 2))
    order = np.argsort(np.tile(row, 2), kind="stable")
    indptr = 2 * np.searchsorted(row, np.arange(X.shape[0] + 1))
    twice = sp.csr_array((halves[0][order], halves[1][order], indptr), shape=X.shape)
    backend, given = get_backend("cpu"), twice.copy()
    features = Features(as_matrix(twice, backend), backend)
    np.testing.assert_allclose(features.column_norms, np.linalg.norm(X, axis=0), rtol=1e-14)
    found = HERTA(device="cpu").fit(g, twice, y).W_
    np.testing.assert_allclose(found, HERTA(device="cpu").fit(g, sp.csr_array(X), y).W_, rtol=1e-12)
    assert twice.nnz == given.nnz  # the caller's is as it was
    assert np.array_equal(twice.data, given.data)


# ---- on the device, with a fake one -----------------------------------------------------------


class Tensor:
    """An imitation of a CUDA tensor: it has DLPack, and tells its device but no numbers."""

    is_cuda = True

    def __init__(self, memory: Any) -> None:  # an array of CuPy
        self.memory = memory
        self.__dlpack__, self.__dlpack_device__ = memory.__dlpack__, memory.__dlpack_device__


Tensor.__module__ = "torch"


def from_dlpack(ext: Any, /) -> Tensor:
    assert ext.__dlpack_device__() == (2, 0)
    assert type(ext.__dlpack__(stream=1)).__name__ == "PyCapsule"
    return Tensor(ext)


@pytest.mark.gpu
def test_device_tensors_in_give_device_tensors_out(
    device: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ModuleType("torch")
    torch.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    g, X, y, _ = data()
    xp = backend.xp
    X_there, y_there = Tensor(xp.asarray(X)), Tensor(xp.asarray(y))
    expected = HERTA(device="cuda").fit(g, X, y)
    device.clear()
    model = HERTA(device="cuda").fit(g, X_there, y_there)
    assert device.ledger()["bytes_in"] < X.nbytes  # X did not travel
    np.testing.assert_array_equal(model.W_, expected.W_)
    for method in ("transform", "predict"):
        found = getattr(model, method)(g, X_there)
        assert isinstance(found, Tensor)
        np.testing.assert_array_equal(found.memory.get(), getattr(expected, method)(g, X))
        there = getattr(model, method)(g, X_there.memory)
        assert isinstance(there, xp.ndarray)  # CuPy's stays CuPy's
        np.testing.assert_array_equal(there.get(), found.memory.get())
    assert model.score(g, X_there, y_there) == expected.score(g, X, y)
    solver = SDDSolver(g, lam=3.0, device="cuda")
    Z = solver.solve(X_there)
    assert isinstance(Z, Tensor)
    np.testing.assert_array_equal(Z.memory.get(), solver.solve(X))
