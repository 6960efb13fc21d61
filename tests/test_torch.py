"""The layer for PyTorch against dense algebra, and in the company that layers keep."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_error
from tests.conftest import dense_H, random_graph

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from herta_gpu.torch import UnfoldedLayer, polynomial  # noqa: E402


def block(n: int, k: int = 3, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, k))).to(dtype)


def exact(graph: Graph, lam: float, F: Any) -> Any:
    return np.linalg.solve(dense_H(graph, lam), F.detach().double().numpy())


def relative(Z: Any, truth: Any) -> float:
    """The largest relative error of a column, in the 2-norm."""
    off = np.linalg.norm(Z.detach().double().numpy() - truth, axis=0)
    return float((off / np.linalg.norm(truth, axis=0)).max())


# ---- the error and its bound -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["chebyshev", "cg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [0.1, 20.0, 2000.0])
@pytest.mark.parametrize("tol", [0.3, 1e-3, 1e-6])
def test_the_error_is_below_its_bound_forward_and_backward(method, dtype, lam, tol):
    n = 300
    hub = np.stack([np.zeros(n - 1, int), np.arange(1, n)])  # the worst case of rounding
    for graph in (random_graph(n, 900, weighted=True), Graph.from_edges(hub, n)):
        layer = UnfoldedLayer(graph, lam, tol, method)
        F = block(n, 6, dtype=dtype)
        F[:, 0] = torch.from_numpy(np.sqrt(graph.degree))  # in the kernel of L: Z = F
        F.requires_grad_()
        Z = layer(F)
        G = block(n, 6, 1, dtype)
        Z.backward(G)
        assert Z.dtype == F.grad.dtype == dtype
        assert relative(Z, exact(graph, lam, F)) <= layer.error_ * (1 + 1e-6)
        assert relative(F.grad, exact(graph, lam, G)) <= layer.backward_error_ * (1 + 1e-6)
        assert max(layer.error_, layer.backward_error_) <= tol


def in_units(A: Any) -> tuple[Any, Any]:
    """Columns of a tensor in float64, each times a power of two that makes its largest entry 1."""
    A = A.detach().double().numpy().astype(np.longdouble)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(A).max(axis=0), np.longdouble(2) ** -1100))))
    return (A / unit).astype(float), unit


def worst(graph: Graph, lam: float, F: Any, Z: Any) -> float:
    """The largest relative error of a column of Z = H^-1 F, where squares may not underflow."""
    A, unit = in_units(F)
    truth = np.linalg.solve(dense_H(graph, lam), A)
    found = (Z.detach().double().numpy().astype(np.longdouble) / unit).astype(float)
    off, size = (np.linalg.norm(a, axis=0) for a in (found - truth, truth))
    return float(np.where(size > 0, off / np.where(size > 0, size, 1.0), off).max())


# Powers of two: usual units, entries that are subnormal, results that vanish, the largest numbers.
UNITS = {
    torch.float16: [0, -12, -20, -24, 14, 15],
    torch.bfloat16: [0, -120, -130, -133, 120, 127],
    torch.float32: [0, -130, -145, -149, 100, 127],
    torch.float64: [0, -1000, -1060, -1074, 600, 1023],
}


@pytest.mark.parametrize("method", ["chebyshev", "cg"])
@pytest.mark.parametrize("dtype", list(UNITS))
@pytest.mark.parametrize("tol", [1e-2, 1e-6])
def test_the_bounds_hold_in_every_precision_unit_and_direction(method, dtype, tol):
    """Rounding to the precision of F and of dF is counted, and so is what under- or overflows."""
    n, lam = 60, 20.0
    star = np.stack([np.zeros(n - 1, int), np.arange(1, n)])
    for graph in (random_graph(n, 180, weighted=True), Graph.from_edges(star, n)):
        for power in UNITS[dtype]:
            layer = UnfoldedLayer(graph, lam, tol, method)
            data = [block(n, 4, seed).clamp(-1.9, 1.9) for seed in range(3)]
            data[1] = data[1].abs()  # at the hub of a star such columns add up
            for A in data:
                A[:, 1:] *= 2.0 ** (power // 2) * 2.0 ** (power - power // 2)
            data[0][:, 2], data[1][:, 2] = 0.0, 1.0
            F, G, C = (A.to(dtype) for A in data)
            F, G = F.requires_grad_(), G.requires_grad_()
            Z = layer(F)
            claimed = layer.error_
            (dF,) = torch.autograd.grad(Z, F, G, create_graph=True)
            claimed_backward = layer.backward_error_
            (dG,) = torch.autograd.grad(dF, G, C)
            assert Z.dtype == dF.dtype == dG.dtype == dtype
            slack = 1 + 1e-6
            assert not worst(graph, lam, F, Z) > claimed * slack + 1e-15
            assert not worst(graph, lam, G, dF) > claimed_backward * slack + 1e-15
            assert not worst(graph, lam, C, dG) > layer.backward_error_ * slack + 1e-15
            if power == 0:  # and they are no larger than they have to be
                most = tol + torch.finfo(dtype).eps
                assert max(claimed, claimed_backward, layer.backward_error_) <= most


def test_a_result_that_overflows_or_is_none_has_no_bound():
    n = 60
    star = Graph.from_edges(np.stack([np.zeros(n - 1, int), np.arange(1, n)]), n)
    layer, F = UnfoldedLayer(star, 1000.0), torch.full((n, 2), 6e4, dtype=torch.float16)
    assert layer(F).isinf().any()
    assert layer.error_ == float("inf")
    F[0, 0] = float("nan")
    for method in ("chebyshev", "cg"):
        layer = UnfoldedLayer(star, 5.0, method=method)
        with np.errstate(invalid="ignore"):
            layer(F.float())
        assert layer.error_ == float("inf")


def test_a_tolerance_beyond_the_precision_is_said():
    graph = random_graph(100, 300)
    layer, F = UnfoldedLayer(graph, 20.0, tol=1e-9), block(100, 2, dtype=torch.float32)
    assert relative(layer(F), exact(graph, 20.0, F)) <= layer.error_
    assert 1e-9 < layer.error_ < 1.01 * 2.0**-24 + 1e-9


def test_float32_is_left_only_where_that_is_cheaper_or_needed():
    graph = Graph.from_edges(np.stack([np.zeros(19_999, int), np.arange(1, 20_000)]), 20_000)
    for tol in (1e-2, 1e-3, 1e-5):
        H = RegularizedLaplacian(graph, 20.0, get_backend("cpu"), "float32")
        p = polynomial(H, 64, tol)
        assert chebyshev_error(H, p.degree) < p.error <= tol
        assert p.dtype == ("float64" if tol < 1e-4 else p.dtype)


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["chebyshev", "cg"])
@pytest.mark.parametrize("order", [None, "rcm"])
def test_gradients_of_both_orders_against_differences(method, order):
    graph = random_graph(12, 25, weighted=True)
    graph = graph if order is None else graph.reordered(order)
    lam = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    layer = UnfoldedLayer(graph, lam, 1e-13, method)
    F = block(12, 2).requires_grad_()

    def function(F: Any, lam: Any) -> Any:
        return torch.func.functional_call(layer, {"lam": lam}, (F,))

    assert torch.autograd.gradcheck(function, (F, lam))
    assert torch.autograd.gradgradcheck(function, (F, lam))
    assert torch.autograd.gradcheck(layer, (block(12, 1)[:, 0].requires_grad_(),))


def test_chebyshev_has_its_exact_adjoint_at_any_tolerance():
    graph = random_graph(200, 700)
    layer = UnfoldedLayer(graph, 20.0, tol=0.3)
    F, G = block(200, 4).requires_grad_(), block(200, 4, 1)
    Z = layer(F)
    Z.backward(G)
    assert relative(Z, exact(graph, 20.0, F)) > 1e-3  # far from the true inverse
    assert (Z * G).sum().item() == pytest.approx((F * F.grad).sum().item(), rel=1e-12)


def test_nothing_is_kept_for_the_backward_pass_but_for_lam():
    graph, kept = random_graph(50, 150), []
    F = block(50).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        UnfoldedLayer(graph, 20.0)(F)
        assert not kept
        lam = nn.Parameter(torch.tensor(20.0))
        UnfoldedLayer(graph, lam)(F)
        assert {t.shape for t in kept} == {(), (50, 3)}
        kept.clear()
        lam.requires_grad_(False)
        UnfoldedLayer(graph, lam)(F).sum().backward()
        assert not kept


def test_a_learned_lam_finds_the_one_that_made_the_data():
    graph, F = random_graph(80, 240), block(80, 5, dtype=torch.float32)
    truth = torch.from_numpy(exact(graph, 7.0, F)).float()
    layer = UnfoldedLayer(graph, nn.Parameter(torch.tensor(1.0)), tol=1e-5)
    torch.nn.utils.parametrize.register_parametrization(layer, "lam", nn.Softplus())
    optimizer = torch.optim.LBFGS(layer.parameters(), line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((layer(F) - truth) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert layer.lam.item() == pytest.approx(7.0, rel=1e-3)


# ---- in company --------------------------------------------------------------------------------


def network(graph: Graph, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    layer = UnfoldedLayer(graph, kwargs.pop("lam", 5.0), **kwargs)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), layer, nn.Linear(8, 2))


def test_memory_is_shared_with_numpy(monkeypatch):
    graph, seen = random_graph(100, 300), []
    layer, F = UnfoldedLayer(graph, 5.0), block(100, 8, dtype=torch.float32)
    original = type(get_backend("cpu")).chebyshev

    def chebyshev(self, L, lam, B, *args):
        Z = original(self, L, lam, B, *args)
        seen.append((B.ctypes.data, Z.ctypes.data))
        return Z

    monkeypatch.setattr(type(get_backend("cpu")), "chebyshev", chebyshev)
    before = F.clone()
    Z = layer(F)
    assert seen == [(F.data_ptr(), Z.data_ptr())]
    assert torch.equal(F, before)


def test_in_a_sequence_compiled_or_not():
    graph = random_graph(60, 180)
    model, X = network(graph), block(60, 6, dtype=torch.float32)
    model(X).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    Z = compiled(X)
    Z.sum().backward()
    assert torch.allclose(Z, model(X))
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("method", ["chebyshev", "cg"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_with_and_without_autocast(half, method):
    graph, X = random_graph(60, 180), block(60, 6, dtype=torch.float32)
    model = network(graph, method=method)
    layer = model[2]
    with torch.autocast("cpu", dtype=half):
        out = model(X)
        F = model[:2](X)
        Z = layer(F)
    assert F.dtype == half
    assert (Z.dtype, out.dtype) == (torch.float32, half)
    assert relative(Z, exact(graph, 5.0, F)) <= layer.error_ <= 1e-3
    out.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    model = model.to(half)
    F = model[:2](X.to(half))
    Z = layer(F)
    assert Z.dtype == half
    assert relative(Z, exact(graph, 5.0, F)) <= layer.error_ <= 1e-3 + torch.finfo(half).eps
    model(X.to(half)).float().sum().backward()


@pytest.mark.parametrize("method", ["chebyshev", "cg"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_overflowed_are_seen_by_whoever_scales_them(method, bad):
    graph = random_graph(60, 180)
    F = block(60, 6, dtype=torch.float32).requires_grad_()
    layer = UnfoldedLayer(graph, 5.0, method=method)
    dZ = torch.ones(60, 6)
    dZ[3, 2] = bad
    with np.errstate(invalid="ignore"):
        layer(F).backward(dZ)
    assert not bool(F.grad[:, 2].isfinite().all())
    assert bool(F.grad[:, 0].isfinite().all())


def test_state_copies_pickles_and_moves():
    graph, X = random_graph(60, 180), block(60, 6, dtype=torch.float32)
    model = network(graph, lam=nn.Parameter(torch.tensor(5.0)))
    other = network(graph, lam=nn.Parameter(torch.tensor(1.0)))
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.lam", "3.weight", "3.bias"}
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    assert twin[2].graph is graph
    assert twin[2].lam is not model[2].lam
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again_too = pickle.loads(pickle.dumps(model))
    for one in (other, twin, again, again_too):
        assert torch.equal(one(X), model(X))
    assert model.double()[2].lam.dtype == torch.float64
    assert model(X.double()).dtype == torch.float64
    assert set(network(graph).state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_no_columns_no_edges_and_views():
    graph = Graph.from_edges(np.zeros((2, 0), int), 5)
    F = block(5, 3).requires_grad_()
    assert torch.equal(UnfoldedLayer(graph, 20.0)(F), F)
    graph, layer = random_graph(40, 100), UnfoldedLayer(random_graph(40, 100), 5.0, tol=1e-10)
    assert layer(torch.zeros(40, 0)).shape == (40, 0)
    F = block(3, 40).T  # not contiguous
    assert relative(layer(F), exact(graph, 5.0, F)) <= 1e-10
    layer(block(40, 3).requires_grad_()).sum().backward()  # a gradient that is one number, expanded


@pytest.mark.parametrize(
    ("F", "sentence"),
    [
        (np.zeros((40, 2)), "F must be a torch.Tensor, not ndarray"),
        (torch.zeros(30, 2), "F has 30 rows but the graph has 40 nodes"),
        (torch.zeros(40, 2, 2), "F must have one or two dimensions"),
        (torch.zeros(40, 2, dtype=torch.long), "F must hold real floats, not torch.int64"),
        (torch.zeros(40, 2, dtype=torch.complex64), "F must hold real floats"),
        (torch.zeros(40, 2).to_sparse(), "F is sparse"),
        (torch.zeros(40, 2, device="meta"), "F is on meta"),
    ],
)
def test_what_is_no_block_is_refused(F, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        UnfoldedLayer(random_graph(40, 100))(F)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lam": -1.0}, "lam must be a positive number"),
        ({"lam": nn.Parameter(torch.tensor(-1.0))}, "lam must be a positive number"),
        ({"lam": nn.Parameter(torch.ones(2))}, "lam must be one number"),
        ({"lam": torch.tensor(1.0)}, "lam is a tensor: give a float, or an nn.Parameter"),
        ({"tol": 0.0}, "tol must be a positive number"),
        ({"method": "jacobi"}, "method must be one of"),
        ({"graph": np.eye(3)}, "graph must be a herta_gpu.Graph"),
    ],
)
def test_what_makes_no_layer_is_refused(arguments, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        UnfoldedLayer(**{"graph": random_graph(40, 100), **arguments})


def test_a_lam_that_left_its_range_says_so():
    layer = UnfoldedLayer(random_graph(40, 100), nn.Parameter(torch.tensor(1.0)))
    with torch.no_grad():
        layer.lam -= 2.0
    with pytest.raises(ValueError, match="lam must be a positive number, not -1"):
        layer(block(40))


# ---- on the device, with a fake one ------------------------------------------------------------


class DeviceTensor:
    """An imitation of a CUDA tensor: `detach` and the rest of what the layer asks of it."""

    is_cuda, device = True, SimpleNamespace(type="cuda", index=0)

    def __init__(self, memory: Any) -> None:  # an array of CuPy
        self.ndim, self.dtype = memory.ndim, torch.float32
        self.__dlpack__, self.__dlpack_device__ = memory.__dlpack__, memory.__dlpack_device__

    def detach(self) -> DeviceTensor:
        return self

    contiguous = detach


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["chebyshev", "cg"])
def test_a_device_tensor_is_worked_on_where_it_is_and_on_its_stream(
    method, device, backend, monkeypatch
):
    cuda = backend.xp.cuda
    graph, F = random_graph(60, 180), block(60, 4, dtype=torch.float32)
    stream, used = cuda.Stream(), []
    with stream:
        there = backend.xp.asarray(F.numpy())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=stream.ptr)
    )

    def from_dlpack(array: Any) -> Any:
        used.append(cuda.get_current_stream().ptr == stream.ptr)
        return array  # CuPy's

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    layer = UnfoldedLayer(graph, 5.0, method=method)
    layer._inverse.solve(DeviceTensor(there), 5.0)  # the graph goes up
    device.clear()
    Z, error = layer._inverse.solve(DeviceTensor(there), 5.0)
    assert device.ledger()["bytes_in"] < there.nbytes  # F did not travel
    LZ = layer._inverse.laplacian_times(DeviceTensor(there))
    assert used == [True] * 3
    assert cuda.get_current_stream().ptr != stream.ptr
    stream.synchronize()
    assert relative(torch.from_numpy(Z.get()), exact(graph, 5.0, F)) <= error <= 1e-3
    expected = (dense_H(graph, 1.0) - np.eye(60)) @ F.numpy()
    np.testing.assert_allclose(LZ.get(), expected, atol=1e-5)
    elsewhere = DeviceTensor(there)
    elsewhere.device = SimpleNamespace(type="cuda", index=1)
    with pytest.raises(RuntimeError, match="on cuda:1, but herta_gpu works on cuda:0"):
        layer._inverse.solve(elsewhere, 5.0)
