"""The gradient through the minimum of the energy: gradcheck, dense algebra, and the layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize

from herta_gpu import Graph, Huber, Power, PseudoHuber
from herta_gpu.backends import get_backend
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.adjoint import adjoint
from herta_gpu.more.energy import Energy
from tests.conftest import dense_H, random_graph
from tests.more.test_energy import Dense

torch = pytest.importorskip("torch")
layers = pytest.importorskip("herta_gpu.torch")

SMOOTH = [PseudoHuber(0.3), Power(0.3, p=1.3), Power(0.3, p=0.6)]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def convex_lam(graph, penalty):
    return 3.0 if penalty.concavity == 0 else 0.6 / penalty.concavity / graph.lambda_max_bound


@pytest.mark.parametrize("penalty", SMOOTH)
@pytest.mark.parametrize("weighted", [False, True])
def test_V_solves_the_system_of_the_dense_hessian(penalty, weighted):
    g, rng = random_graph(20, 45, weighted=weighted), np.random.default_rng(0)
    lam = convex_lam(g, penalty)
    energy = Energy(RegularizedLaplacian(g, lam, get_backend("cpu"), "float64"), penalty)
    for scale in (1e-6, 1.0, 1e6):  # of G beside Z
        Z, G = rng.standard_normal((20, 2)), scale * rng.standard_normal((20, 2))
        dense = Dense(g, lam, penalty, Z)
        hessian = scipy.optimize.approx_fprime(Z.ravel(), dense.gradient, 1e-7)
        V = np.linalg.solve(0.5 * (hessian + hessian.T), G.ravel()).reshape(20, 2)
        for tol in (1e-2, 1e-9):
            found = adjoint(energy, Z, G, tol)
            off = np.linalg.norm(found.V - V) / np.linalg.norm(V)
            assert off <= found.error + 1e-5  # of the differences
            assert found.error <= tol
        r = np.sqrt(((dense.B @ Z) ** 2).sum(axis=1))
        L = dense.B.T @ ((dense.w * penalty.weight(r))[:, None] * dense.B)
        assert found.dlam == pytest.approx(-(V * (L @ Z)).sum(), rel=1e-4)


@pytest.mark.parametrize("penalty", SMOOTH)
@pytest.mark.parametrize("k", [1, 3])
def test_gradcheck(penalty, k):
    g = random_graph(12, 25, weighted=True).reordered("rcm")
    lam = torch.nn.Parameter(torch.tensor(convex_lam(g, penalty), dtype=torch.float64))
    F = torch.randn(12, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = layers.UnfoldedLayer(g, lam, tol=1e-11, penalty=penalty)

    def of(F, lam):
        return layers._Minimum.apply(F, lam, layer)

    assert torch.autograd.gradcheck(of, (F.requires_grad_(), lam), eps=1e-6, atol=1e-6)
    assert layer.error_ <= 1e-11
    assert layer.backward_error_ <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_passes_are_within_what_they_state(dtype):
    g, penalty = random_graph(30, 70), PseudoHuber(0.2)
    layer = layers.UnfoldedLayer(g, 5.0, tol=1e-5, penalty=penalty)
    F = torch.randn(30, 2, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    Z = layer(F)
    assert Z.dtype == dtype
    exact = F.detach().double().numpy()
    best = Dense(g, 5.0, penalty, exact).minimum(exact)
    off = np.linalg.norm(Z.detach().double().numpy() - best) / np.linalg.norm(best)
    unit = torch.finfo(dtype).eps
    assert off <= layer.error_ <= 1e-5 + unit
    assert off > 0
    Z.sum().backward()
    assert F.grad.dtype == dtype
    assert layer.backward_error_ <= 1e-5 + 2 * unit
    flat = layers.UnfoldedLayer(g, 5.0, tol=1e-5, penalty=penalty)(F.detach()[:, 0])
    assert flat.shape == (30,)


def test_without_attention_it_is_the_linear_layer():
    g = random_graph(40, 100)
    F = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = layers.UnfoldedLayer(g, 7.0, tol=1e-10, penalty=PseudoHuber(1e9))
    G = torch.randn(40, 3, dtype=torch.float64)
    (dF,) = torch.autograd.grad(layer(F), F, G)
    np.testing.assert_allclose(dF, np.linalg.solve(dense_H(g, 7.0), G), atol=1e-8)


def test_frozen_weights_would_give_another_gradient():
    """The part of eta is there: without it the gradient is off by a few per cent."""
    g, F = random_graph(30, 90), torch.randn(30, 2, dtype=torch.float64, requires_grad=True)
    penalty = PseudoHuber(0.2)
    layer = layers.UnfoldedLayer(g, 10.0, tol=1e-10, penalty=penalty)
    Z, G = layer(F), torch.randn(30, 2, dtype=torch.float64)
    (dF,) = torch.autograd.grad(Z, F, G)
    dense = Dense(g, 10.0, penalty, F.detach().numpy())
    r = np.sqrt(((dense.B @ Z.detach().numpy()) ** 2).sum(axis=1))
    H = np.eye(30) + 10.0 * dense.B.T @ (penalty.weight(r)[:, None] * dense.B)
    frozen = np.linalg.solve(H, G.numpy())
    assert np.linalg.norm(frozen - dF.numpy()) > 0.01 * np.linalg.norm(frozen)


def test_kinks_are_no_obstacle():
    g = random_graph(30, 90)
    layer = layers.UnfoldedLayer(g, 5.0, tol=1e-10, penalty=Huber(0.2))
    F = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    F.requires_grad_()
    G, P = (torch.randn(30, 2, dtype=torch.float64) for _ in range(2))
    (dF,) = torch.autograd.grad(layer(F), F, G)
    with torch.no_grad():
        rise = ((layer(F + 1e-6 * P) - layer(F - 1e-6 * P)) * G).sum() / 2e-6
    assert float((dF * P).sum()) == pytest.approx(float(rise), rel=1e-3, abs=1e-4)


def test_what_is_wrong_is_said_and_what_is_odd_ends():
    g = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match="have a delta"):
        layers.UnfoldedLayer(g, penalty=PseudoHuber())
    with pytest.raises(ValueError, match="have a delta"):
        layers.UnfoldedLayer(g, penalty="huber")
    layer = layers.UnfoldedLayer(g, 50.0, penalty=Power(0.1, p=0.0))
    with pytest.raises(ValueError, match="not convex"):
        layer(torch.ones(4, 1))
    layer = layers.UnfoldedLayer(g, 5.0, penalty=PseudoHuber(0.1))
    assert "penalty=PseudoHuber(delta=0.1" in repr(layer)
    F = torch.zeros(4, 2, requires_grad=True)
    layer(F).sum().backward()
    assert layer.error_ == 0
    np.testing.assert_allclose(F.grad, np.linalg.solve(dense_H(g, 5.0), np.ones((4, 2))), rtol=1e-3)
    assert torch.isnan(layer(torch.full((4, 1), math.nan))).all()
    assert layer.error_ == math.inf
