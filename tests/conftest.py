"""Graphs, data and independent references that the tests compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# BLAS gets one thread: it reads this when it is loaded, and programs that tests start inherit it.
# Its threads go on spinning after each of the many small products of a test; with two of them a
# test took up to five times the time of the processor, and two workers share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from herta_gpu import Graph
from herta_gpu.app.device_checks import random_graph as random_graph
from herta_gpu.backends import get_backend
from herta_gpu.planning.plan import Recipe
from tests import cuda_device
from tests.sharing import compile_kernels_once, exclusive

ROOT = Path(__file__).resolve().parents[1]  # the folder of the repository

# A P of all columns, as exact as solves are: tests replace what they are about.
RECIPE = Recipe(
    degree=200, width=3, exact=True, sketch_rows=None, by_rows=False, row_tol=1e-10,
    all_rows=False, keep_rows=False, whiten=False, goal=None, curvature=1.0, symmetric=False,
    seed=0,
)  # fmt: skip

if "PYTEST_XDIST_WORKER" in os.environ:
    compile_kernels_once()

# hypothesis draws the same examples in every run: a test that fails, fails for everybody.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.load_profile("fixed")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Programs and helpers are not searched for doctests: some set MPI or a device up."""
    return True if collection_path.suffix == ".py" and collection_path.name[:5] != "test_" else None


def pytest_configure(config: pytest.Config) -> None:
    """``pytest -m gpu`` gets the device of tests/cuda_device where there is no GPU."""
    if not config.getoption("markexpr").startswith("gpu") or cuda_device.has_gpu():
        return
    try:
        cuda_device.activate()
    except cuda_device.NotBuiltError as error:
        missing_device.append(f"there is no GPU, and {error}")


missing_device: list[str] = []  # why there is none


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    """On the device of tests/cuda_device: what it refuses fails the test that asked for it."""
    yield
    device = cuda_device.active()
    refused = [] if device is None else device.refusals()
    assert not refused, "the device refused: " + "; ".join(refused)


def users_environment() -> dict[str, str]:
    """The environment of a program that a user starts: BLAS has all of its threads."""
    return {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}


def dense_H(graph: Graph, lam: float) -> Any:
    """I + lam L from the definition, without the package's own products."""
    u, v, w = graph.edges()
    n = graph.num_nodes
    A = np.zeros((n, n))
    A[u, v] = 1.0 if w is None else w
    A += A.T
    order = np.arange(n) if graph.order is None else graph.inverse_order()
    D = graph.degree[order]
    return np.eye(n) + lam * (np.diag(A.sum(axis=1)) - A) / np.sqrt(np.outer(D, D))


def least_squares(A: Any, Y: Any, ridge: float = 0.0) -> tuple[Any, float]:
    """(W, optimum) of 1/2 ||A W - Y||^2 + ridge/2 ||W||^2 by an SVD in float64, cut at 1e-6."""
    U, s, Vt = np.linalg.svd(A, full_matrices=False)
    keep = s > 1e-6 * s[0]
    U, s, Vt = U[:, keep], s[keep], Vt[keep]
    W = Vt.T @ ((s / (s**2 + ridge))[:, None] * (U.T @ Y))
    return W, 0.5 * float(((A @ W - Y) ** 2).sum() + ridge * (W**2).sum())


def problem(n: int = 200, d: int = 8, c: int = 3, seed: int = 0, weighted: bool = False) -> Any:
    """(graph, X, labels, training nodes), all at random; every second node is for training."""
    g = random_graph(n, 3 * n, seed, weighted)
    rng = np.random.default_rng(seed)
    return g, rng.standard_normal((n, d)), rng.integers(0, c, n), np.arange(0, n, 2)


def closed_form(
    g: Graph, X: Any, Y: Any, train: Any, lam: float, ridge: float = 0.0
) -> tuple[Any, float]:
    """(W, optimum) of MSE on the rows `train` by dense algebra."""
    return least_squares(np.linalg.solve(dense_H(g, lam), X)[train], Y, ridge)


def minimum(A: Any, Y: Any, loss: str, ridge: float) -> float:
    """The optimum by the closed form (MSE) or by SciPy's L-BFGS (cross entropy)."""
    if loss == "mse":
        return least_squares(A, Y, ridge)[1]

    def objective(w: Any) -> tuple[float, Any]:
        W = w.reshape(A.shape[1], -1)
        F = A @ W
        top = F.max(axis=1, keepdims=True)
        S = np.exp(F - top)
        total = S.sum(axis=1, keepdims=True)
        value = np.log(total).sum() + (top - F)[Y > 0].sum() + 0.5 * ridge * (W**2).sum()
        return value, (A.T @ (S / total - Y) + ridge * W).ravel()

    start = np.zeros(A.shape[1] * Y.shape[1])
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    return found.fun


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The preconditioner that the last fit built."""
    import herta_gpu.training as module

    seen: dict[str, Any] = {}
    real = module.build

    def build(*args: Any, **kwargs: Any) -> Any:
        seen["P"] = real(*args, **kwargs)
        return seen["P"]

    monkeypatch.setattr(module, "build", build)
    return seen


_folder: list[Path] = []  # the folder that all workers of this run share


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    _folder.append(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


def made_once(name: str, make: Callable[[], Any]) -> Any:
    """An array that the workers of a run share: the first one makes it, the others wait for it."""
    path = _folder[-1] / f"{name}.npy"
    with exclusive(path.with_suffix(".lock")):
        if not path.exists():
            part = path.with_suffix(".part")
            with open(part, "wb") as file:
                np.save(file, make())
            part.rename(path)
        return np.load(path)


class Shared:
    """A real data set: graph, row-normalised features, labels, 80% random training rows."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as f:
            self.graph = Graph.from_edges(f["edge_index"], int(f["num_nodes"]))
            X = sp.csr_array(
                (f["feature_data"].astype(float), f["feature_indices"], f["feature_indptr"]),
                shape=tuple(f["feature_shape"]),
            )
            self.y = f["labels"].astype(int)
        sums = np.asarray(abs(X).sum(axis=1)).ravel()
        self.X = sp.csr_array(sp.diags_array(1 / np.where(sums > 0, sums, 1)) @ X)
        n = self.graph.num_nodes
        self.train = np.sort(np.random.default_rng(0).permutation(n)[: int(0.8 * n)])
        self.Y = np.eye(self.y.max() + 1)[self.y[self.train]]
        self.name = path.stem

    @cache  # noqa: B019  one instance per data set and session
    def A(self, lam: float) -> Any:
        """M H^-1 X by a sparse LU with one step of refinement."""
        return made_once(f"{self.name}-A-{lam:g}", lambda: self._map(lam))

    def _map(self, lam: float) -> Any:
        H = sp.csc_array(sp.eye_array(self.graph.num_nodes) + lam * self.graph.to_csr())
        # SuperLU's order for symmetric matrices: 5 times faster than its default.
        symmetric = {"SymmetricMode": True}
        lu = sla.splu(H, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=symmetric)
        X = self.X.toarray()
        Q = lu.solve(X)
        Q += lu.solve(X - H @ Q)
        return Q[self.train]

    @cache  # noqa: B019  one instance per data set and session
    def optimum(self, lam: float) -> float:
        def make() -> Any:
            return np.array(least_squares(self.A(lam), self.Y)[1])

        return float(made_once(f"{self.name}-optimum-{lam:g}", make))


@cache
def _load(name: str) -> Shared | None:
    folder = os.environ.get("HERTA_DATA", "")
    path = Path(folder) / f"{name}.npz"
    return Shared(path) if folder and path.exists() else None


def shared(name: str) -> Shared:
    """A shared data set, or a skip that says what is missing."""
    data = _load(name)
    if data is None:
        pytest.skip(f"{name}.npz is not there: set HERTA_DATA to the folder that holds it")
    return data


def on_device(test: Any) -> Any:
    """Marks a test that needs the fixtures below."""
    return pytest.mark.gpu(pytest.mark.once(test))


@pytest.fixture
def device() -> Iterator[Any]:
    """The device of tests/cuda_device, lazy, and with a clock for every array."""
    found = cuda_device.active()
    if found is None:
        pytest.skip(missing_device[0] if missing_device else "a GPU is there, and no emulated one")
    with cuda_device.clocked(found):
        yield found


@pytest.fixture
def backend(device: Any) -> Iterator[Any]:
    """The CUDA backend on that device."""
    found = get_backend("cuda")
    found.synchronize()
    yield found
    found.capture = None
    found.synchronize()
