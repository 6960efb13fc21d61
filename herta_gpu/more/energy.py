"""The energy of a graph whose edges may be distrusted, and its minimum with a proven distance.

TWIRLS puts a concave penalty rho on each edge (F = X W as before, s_e is a squared distance):

    E(Z) = 1/2 ||Z - F||^2 + lam/2 sum_e w_e rho(s_e),   s_e = ||z_u/sqrt(d_u) - z_v/sqrt(d_v)||^2.

With gamma_e = rho'(s_e), at most 1, its gradient is H_gamma Z - F: H_gamma is I + lam L of the same
graph with weights w_e gamma_e and its degrees kept, as `Graph.reweighted` has it.  -kappa being the
least curvature of r -> rho(r^2) / 2,

    mu = 1 - lam kappa lambda_max(L) > 0   makes   ||Z - Z*|| <= ||grad E(Z)|| / mu,
                                                   E(Z) - E(Z*) <= ||grad E(Z)||^2 / (2 mu),

which is what is reported, with all that rounding may have done.  Else a solve ends at a stationary
point, and says no more.

The way there is nonlinear conjugate gradients (Polak-Ribiere).  Along Z + t D the scalars s_e are
parabolas, so the line search has no product with the graph in it; each of its steps is the minimum
of a quadratic above E, as rho is concave: E falls for every penalty.  A convex energy takes about
as many products as one linear solve by CG.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array, norm, unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.penalties import Penalty
from herta_gpu.plumbing.checks import check_count, check_lam, check_positive, check_rows
from herta_gpu.plumbing.interop import as_matrix, in_kind_of, on_device, take_rows

_RESTART, _REFRESH = 50, 20  # steps after which directions and the s_e begin anew
_LINE_STEPS = 6


@dataclass
class EnergyInfo:
    """What a minimisation reached.

    Attributes
    ----------
    iterations : int
        Steps, each with one product with the graph and two passes over the edges.
    gradient : float
        ||grad E(Z)||_F, rounding included.
    distance, gap : float
        Proven bounds of ||Z - Z*||_F and E(Z) - E(Z*); infinite where nothing is proven.
    modulus : float
        mu.
    status : str
        "converged": the distance is proven to be at most tol ||Z*||.  "stationary": the gradient is
        at most tol ||Z||, but the energy may have other minima.  "stagnated" (rounding forbids
        more) or "max_iter".
    """

    iterations: int
    gradient: float
    distance: float
    gap: float
    modulus: float
    status: str


class Energy:
    """E of one graph on one device; blocks are float64, rows as the graph stores them."""

    def __init__(self, H: RegularizedLaplacian, penalty: Penalty) -> None:
        if H.dtype != "float64":
            H = RegularizedLaplacian(H.graph, H.lam, H.backend, "float64")
        self.H, self.penalty, self.backend = H, penalty, H.backend
        weight = H.graph.edges(stored=True)[2]
        self.weight = 1.0 if weight is None else H.backend.asarray(weight)
        self.top = self.H.laplacian().lambda_max
        self.modulus = 1.0 - H.lam * penalty.concavity * self.top

    def squares(self, Z: Array) -> Array:
        """(m,) w_e s_e."""
        return 0.5 * self.backend.edge_scores(self.H.laplacian(), Z, Z, 1.0)

    def weights(self, squares: Array) -> Array:
        """(m,) gamma_e."""
        return self.penalty.weight(np.sqrt(squares / self.weight))

    def on(self, weights: Array) -> RegularizedLaplacian:
        """H_gamma."""
        return self.H.on(self.backend.sampled_graph(self.H.graph, weights))

    def descent(self, Z: Array, F: Array, weights: Array) -> Array:
        """-grad E."""
        return self.on(weights).residual(F, Z)[0]

    def value(self, Z: Array, F: Array) -> float:
        """E(Z)."""
        rho = self.penalty.value(np.sqrt(self.squares(Z) / self.weight))
        return 0.5 * norm(Z - F) ** 2 + 0.5 * self.H.lam * float((self.weight * rho).sum())

    def rounding(self, columns: int) -> float:
        """||computed gradient - grad E|| <= this ||Z||: that of the product, and of the weights.

        A difference over an edge is off by 4 u (|a| + |b|), a and b its ends, and so is r, beside
        (k + 1) u r for the sum of k squares.  As r gamma(r) changes by no more than r does, the
        pull of the edge is off by at most twice that and a few u of its own.
        """
        u = unit_roundoff()
        return self.H.rounding(columns) + u * (2 * columns + 32) * self.H.lam * self.top

    def minimize(
        self, F: Array, tol: float, max_iter: int = 1000, Z: Array | None = None
    ) -> tuple[Array, EnergyInfo]:
        """(Z, what is known of it): nonlinear CG from Z, or from F."""
        xp, mu, step, fresh = self.backend.xp, self.modulus, 0, True
        Z = xp.array(F if Z is None else Z, dtype="float64", order="C")
        lost, least = self.rounding(F.shape[1]), 4 * unit_roundoff() * self.H.lambda_max
        share = 0.9 * tol / (1 + tol) * mu if mu > 0 else tol
        squares = self.squares(Z)
        R = self.descent(Z, F, self.weights(squares))
        D, old, best, since = R.copy(), R, math.inf, 0
        while True:
            size, length = norm(R), norm(Z)
            best, since = (size, 0) if size < best else (best, since + 1)
            enough = not size > max((share - lost) * length, least * length)  # NaN is
            if enough or since > _RESTART or step >= max_iter:
                if fresh:
                    break
                squares, fresh = self.squares(Z), True  # they had been carried on
                R = self.descent(Z, F, self.weights(squares))
                continue
            if step % _RESTART == 0:
                D = R.copy()
            else:
                beta = float((R * (R - old)).sum()) / norm(old) ** 2
                D = R + max(0.0, beta) * D
                D = D if float((D * R).sum()) > 0 else R.copy()
            t, bend, steep = self._line(Z, F, D, squares)
            Z += t * D
            step, old = step + 1, R
            fresh = step % _REFRESH == 0
            squares = (
                self.squares(Z) if fresh else xp.maximum(squares + t * (2 * bend + t * steep), 0)
            )
            R = self.descent(Z, F, self.weights(squares))
        gradient = (size + lost * length) * (1 + (F.size + 8) * unit_roundoff())
        distance, gap = (gradient / mu, gradient**2 / (2 * mu)) if mu > 0 else (math.inf, math.inf)
        status = "max_iter" if step >= max_iter else "stagnated"
        if mu > 0 and distance <= tol * (length - distance):
            status = "converged"
        elif mu <= 0 and gradient <= tol * length:
            status = "stationary"
        return Z, EnergyInfo(step, gradient, distance, gap, mu, status)

    def products(self, Z: Array, D: Array, squares: Array) -> tuple[Array, Array]:
        """(m,) b and c of s_e(t) = s_e + 2 b_e t + c_e t^2 along Z + t D, times w_e."""
        steep, size, length = self.squares(D), norm(D), norm(Z)
        # Of Z + unit D both parts are of one size, and their product is not lost in the sum.
        unit = 2.0 ** round(math.log2(length / size)) if length > 0 and size > 0 else 1.0
        return (self.squares(Z + unit * D) - squares - unit**2 * steep) / (2 * unit), steep

    def _line(self, Z: Array, F: Array, D: Array, squares: Array) -> tuple[float, Array, Array]:
        """(a good step t along D, and `products` of it)."""
        (bend, steep), lam = self.products(Z, D, squares), self.H.lam
        first, second, t = float(((Z - F) * D).sum()), norm(D) ** 2, 0.0
        for _ in range(_LINE_STEPS):
            along = squares + t * (2 * bend + t * steep)
            gamma = self.weights(self.backend.xp.maximum(along, 0.0))
            push = first + t * second + lam * float((gamma * (bend + t * steep)).sum())
            move = -push / (second + lam * float((gamma * steep).sum()))
            t += move
            if abs(move) <= 1e-3 * abs(t):
                break
        return t, bend, steep


class AttentionSolver:
    """The minimum of the energy with a penalty on every edge, and how far from it one is.

    Parameters
    ----------
    graph, lam, max_iter, device
        As in `HERTA`.  All of the work is in float64.
    penalty : PseudoHuber, Huber or Power
        With a `delta`.
    tol : float
        Bound of ||Z - Z*||_F relative to ||Z*||_F.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import AttentionSolver, Graph, PseudoHuber
    >>> path = Graph.from_edges([[0, 1, 2], [1, 2, 3]])
    >>> solver = AttentionSolver(path, lam=10.0, penalty=PseudoHuber(delta=0.1), tol=1e-8)
    >>> Z = solver.solve(np.array([1.0, 1.2, 9.0, 9.1]))  # no edge smooths out the jump
    >>> Z.round(1).tolist(), solver.info_.status, solver.info_.distance < 1e-6
    ([1.2, 1.6, 9.0, 8.4], 'converged', True)
    >>> solver.weights(Z).round(2).tolist()
    [0.94, 0.02, 0.13]
    """

    def __init__(
        self,
        graph: Graph,
        lam: float = 1.0,
        penalty: Penalty | None = None,
        tol: float = 1e-6,
        max_iter: int = 1000,
        device: str = "auto",
    ) -> None:
        check_whole(graph, "AttentionSolver")
        check_lam(lam)
        check_positive("tol", tol)
        check_count("max_iter", max_iter)
        if not isinstance(penalty, Penalty) or penalty.delta is None:
            raise ValueError("penalty must have a delta, as PseudoHuber(delta=0.1) has.")
        self.graph, self.penalty, self.tol, self.max_iter = graph, penalty, tol, max_iter
        self.H = RegularizedLaplacian(graph, lam, get_backend(device), "float64")
        self.info_: EnergyInfo | None = None

    def solve(self, F: Any, guess: Any = None) -> Any:
        """The minimum for F, (n,) or (n, k), from `guess` or from F; see `info_`."""
        with (backend := self.H.backend).working():
            B, Z = self._stored(F), None if guess is None else self._stored(guess)
            # In units of a power of two nothing is rounded, and no square leaves float64's range.
            size = float(abs(B).max()) if B.size else 0.0
            unit = 2.0 ** (math.frexp(size)[1] - 1)
            energy = Energy(self.H, self.penalty.at(self.penalty.delta / unit))
            start = None if Z is None else Z / unit
            Z, i = energy.minimize(B / unit, self.tol, self.max_iter, start)
            self.info_ = replace(
                i, gradient=unit * i.gradient, distance=unit * i.distance, gap=unit * (unit * i.gap)
            )
            Z = take_rows(Z * unit, self.graph.inverse_order(), backend)
            Z = Z if on_device(F) else backend.to_numpy(Z)
            return in_kind_of(Z[:, 0] if np.ndim(F) == 1 else Z, F)

    def weights(self, Z: Any) -> Any:
        """(m,) what each edge of `Graph.edges` counts for where the outputs are Z."""
        energy = Energy(self.H, self.penalty)
        return self.H.backend.to_numpy(energy.weights(energy.squares(self._stored(Z))))

    def _stored(self, A: Any) -> Array:
        A = as_matrix(A, self.H.backend)
        check_rows("F", A, self.graph)
        A = A.toarray() if hasattr(A, "toarray") else A
        return self.H.backend.asarray(take_rows(A, self.graph.order, self.H.backend), "float64")
