"""The gradient through a minimum: V = (grad^2 E(Z))^-1 G, by conjugate gradients.

Where Z is the minimum of the energy for F, a loss of gradient G there has the gradient V in F, and
-<V, L_gamma Z> in lam.  With gamma_e = rho'(s_e) the second derivative is

    grad^2 E [V] = H_gamma V + lam L_eta Z,   eta_e = 2 rho''(s_e) <BZ, BV>_e,

three products of graphs with other weights, as eta has both signs, and no array of m x k numbers.
It couples the columns, so that CG has one step for all of them, and it is at least mu, as the
energy is: ||V - V*|| <= ||residual|| / mu.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from herta_gpu.backends.base import Array, norm
from herta_gpu.more.energy import Energy


class Adjoint(NamedTuple):
    """What the backward pass needs."""

    V: Array
    dlam: float
    error: float  # of V, relative, from its residual


def adjoint(energy: Energy, Z: Array, G: Array, tol: float, max_iter: int = 1000) -> Adjoint:
    """V and its parts for G, at the outputs Z of a convex energy."""
    xp, size, length = energy.backend.xp, norm(G), norm(Z)
    squares = energy.squares(Z)
    r = np.sqrt(squares / energy.weight)
    H, bent = energy.on(energy.penalty.weight(r)), 2 * energy.penalty.slope(r) / energy.weight

    def times(V: Array) -> Array:
        eta, Y = bent * energy.products(Z, V, squares)[0], H.apply(V)
        for sign in (1.0, -1.0):
            part = xp.maximum(sign * eta, 0.0)
            Y += sign * (energy.on(part).apply(Z) - Z)
        return Y

    V = xp.zeros_like(G)
    if not (size > 0 and math.isfinite(size)):
        return Adjoint(V + G, -0.0 * size, 0.0 if size == 0 else math.inf)
    unit = length / size if length > 0 else 1.0  # V is of the size of Z, and nothing is lost to it
    G = unit * G
    R, goal = G, 0.5 * tol * energy.modulus / (1 + tol)
    D, rho, step = R, norm(R) ** 2, 0
    while rho**0.5 > goal * norm(V) and step < max_iter:
        HD = times(D)
        alpha = rho / float((D * HD).sum())
        V, R, step = V + alpha * D, R - alpha * HD, step + 1
        before, rho = rho, norm(R) ** 2
        D = R + (rho / before) * D
    left = norm(G - times(V)) / energy.modulus
    error = left / (norm(V) - left) if left < norm(V) else math.inf
    dlam = -float((V * (H.apply(Z) - Z)).sum()) / energy.H.lam
    return Adjoint(V / unit, dlam / unit, error)
