"""Z = H^-1 F as a layer for PyTorch: gradients through it, and a proven bound of its error.

F = f(X; theta) is the output of any module, H = I + lam L.  The default method is Chebyshev: p(H)
is linear and symmetric, so that the product of the backward pass, dF = p(H) dZ, is the exact
adjoint of the forward one at any tolerance.  No intermediate step is kept for it, and the gradient
of lam is

    dlam = -<V, L Z>,   V = H^-1 dZ.

The last linear layer of a trained network is then trained to its certified optimum by `HERTA`, on
the features of the layer before it.  All of it in one script:

>>> import torch
>>> from torch import nn
>>> from herta_gpu import HERTA
>>> from herta_gpu.datasets import load
>>> from herta_gpu.torch import UnfoldedLayer
>>> data, _ = load("digits"), torch.manual_seed(0)
>>> X, y = torch.tensor(data.X, dtype=torch.float32), torch.tensor(data.y)
>>> train, test = (torch.tensor(data.split[part]) for part in ("train", "test"))
>>> hidden = nn.Sequential(nn.Linear(X.shape[1], 64), nn.ReLU())
>>> layer = UnfoldedLayer(data.graph, lam=5.0, tol=1e-3)
>>> model = nn.Sequential(hidden, nn.Linear(64, 10), layer)
>>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
>>> for epoch in range(30):
...     optimizer.zero_grad()
...     loss = nn.functional.cross_entropy(model(X)[train], y[train])
...     loss.backward()
...     optimizer.step()
>>> layer.error_ <= 1e-3  # proven, for every column, forward and backward
True
>>> features = hidden(X).detach()
>>> last = HERTA(lam=5.0, loss="ce", ridge=1e-2).fit(data.graph, features, y, train)
>>> last.status_, last.score(data.graph, features, y, test) > 0.9
('certified', True)

Tensors come and go without a copy: as views of NumPy on the CPU, through DLPack on a GPU, on the
stream that PyTorch works on.  On the CPU the threads of PyTorch go on spinning for a while after
each of its own operations, beside ours: `torch.set_num_threads(1)`, or OMP_WAIT_POLICY=passive in
the environment before PyTorch is loaded, can halve the time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise ImportError("herta_gpu.torch needs PyTorch: install herta_gpu[torch].") from error

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array, Backend, unit_roundoff
from herta_gpu.graph import Graph, check_graph, check_whole
from herta_gpu.laplacian import (
    RegularizedLaplacian,
    block_cg,
    chebyshev,
    chebyshev_degree,
    chebyshev_error,
    chebyshev_rounding,
)
from herta_gpu.more.adjoint import adjoint
from herta_gpu.more.energy import Energy
from herta_gpu.more.penalties import Penalty
from herta_gpu.plumbing.checks import check_choice, check_lam, check_positive
from herta_gpu.plumbing.interop import take_rows

_HALVES = (torch.bfloat16, torch.float16)
_INVERSE, _LAPLACIAN = "H^-1", "L"  # what `_Map` multiplies by
_SOLVED = {torch.float32: "float32", torch.float64: "float64"}
_CG_TRIES = 4  # CG aims lower as long as a column misses the bound
_RANGE = 2.0**40  # columns whose largest entry is within this, or one over it, are not scaled


class UnfoldedLayer(nn.Module):
    """Z = (I + lam L)^-1 F for F of shape (n, k) or (n,), to a proven accuracy.

    Parameters
    ----------
    graph : Graph
    lam : float or nn.Parameter
        Weight of the graph; a parameter of one number is learned.  It must stay positive:
        `torch.nn.utils.parametrize.register_parametrization(layer, "lam", nn.Softplus())` sees to
        that.
    tol : float
        Bound of the relative error of every column, ||z - H^-1 f|| <= tol ||H^-1 f||.
    method : {"chebyshev", "cg"}
        Chebyshev is a linear map with an exact adjoint, and its bound is known before it starts.
        CG adapts to each column: its backward pass is the adjoint up to tol only.
    penalty : PseudoHuber, Huber or Power, optional
        With a `delta`: Z is the minimum of the energy with this penalty on every edge
        (`AttentionSolver`), which must be convex, and the gradient is that through the minimum.
        Columns depend on each other then: tol, `error_` and `backward_error_` (which is of the
        system that the outputs give, before rounding) are of all of them together, `method` does
        not matter, and there are no second derivatives.

    Attributes
    ----------
    error_ : float or None
        What is proven of the last forward pass, rounding included; above tol only where the
        precision of F cannot hold tol, infinite where a column of Z overflows or F has NaN.
    backward_error_ : float or None
        The same of dF = H^-1 dZ in the last backward pass.

    Notes
    -----
    Z has the precision of F; half precision is solved for in float32, which is also what comes out
    under `torch.autocast`.  The layer is not traced by `torch.compile`, and what stands around it
    is.  Copies share the graph; neither it nor lam, unless that is a parameter, is part of
    `state_dict`.  The layer can be differentiated twice.

    Examples
    --------
    >>> import torch
    >>> from herta_gpu import Graph
    >>> from herta_gpu.torch import UnfoldedLayer
    >>> layer = UnfoldedLayer(Graph.from_edges([[0, 1, 2], [1, 2, 3]]), lam=20.0, tol=1e-6)
    >>> F = torch.eye(4, dtype=torch.float64, requires_grad=True)
    >>> Z = layer(F)
    >>> Z.sum().backward()
    >>> layer, layer.error_ <= 1e-6, torch.allclose(Z.sum(dim=1), F.grad[:, 0])
    (UnfoldedLayer(4 nodes, lam=20, tol=1e-06, method=chebyshev), True, True)
    """

    def __init__(
        self,
        graph: Graph,
        lam: float | nn.Parameter = 1.0,
        tol: float = 1e-3,
        method: str = "chebyshev",
        penalty: Penalty | None = None,
    ) -> None:
        super().__init__()
        check_graph(graph)
        if penalty is not None:
            check_whole(graph, "A penalty")
            if not isinstance(penalty, Penalty) or penalty.delta is None:
                raise ValueError("penalty must have a delta, as PseudoHuber(delta=0.1) has.")
        check_positive("tol", tol)
        check_choice("method", method, ("chebyshev", "cg"))
        if isinstance(lam, Tensor) and not isinstance(lam, nn.Parameter):
            raise TypeError("lam is a tensor: give a float, or an nn.Parameter if it is learned.")
        self.lam = lam
        _number(lam)
        self.tol, self.method, self.penalty = float(tol), method, penalty
        self._inverse, self._errors = _Inverse(graph, self.tol, method), dict[str, Any]()

    @property
    def graph(self) -> Graph:
        return self._inverse.graph

    @property
    def error_(self) -> float | None:
        return self._error("forward")

    @property
    def backward_error_(self) -> float | None:
        return self._error("backward")

    def _error(self, which: str) -> float | None:
        found = self._errors.get(which)
        if found is None:
            return None
        return math.inf if math.isnan(found) else float(found)  # synchronize!

    @torch.compiler.disable
    def forward(self, F: Tensor) -> Tensor:
        """H^-1 F in the precision of F."""
        _check(F, self.graph.num_nodes)
        _number(self.lam)
        wide = F if F.dtype in _SOLVED else _Map.apply(F, None, self, torch.float32, "")
        if self.penalty is None:
            Z: Tensor = _Map.apply(wide, self.lam, self, _INVERSE, "forward")
        else:
            Z = _Minimum.apply(wide, self.lam, self)
        if Z.dtype == F.dtype or torch.is_autocast_enabled(F.device.type):
            return Z
        narrow: Tensor = _Map.apply(Z, None, self, F.dtype, "forward")
        return narrow

    def extra_repr(self) -> str:
        n, lam = self.graph.num_nodes, _number(self.lam)
        how = f"method={self.method}" if self.penalty is None else f"penalty={self.penalty}"
        return f"{n:,} nodes, lam={lam:g}, tol={self.tol:g}, {how}"


class _Map(torch.autograd.Function):
    """A linear map of F: H^-1, L, or the conversion to another precision (`what`).

    Its backward pass is such a map again, and so can be differentiated as well: H^-1 and L are
    symmetric, and a conversion goes back to the precision of F.  The error of H^-1 is kept for the
    pass `which`, and what a conversion changes is added to it.
    """

    @staticmethod
    def forward(F: Tensor, lam: Any, layer: UnfoldedLayer, what: Any, which: str) -> Any:
        errors, inverse = layer._errors, layer._inverse
        if what == _LAPLACIAN:
            return inverse.laplacian_times(F)
        if what == _INVERSE:
            Z, errors[which] = inverse.times(F, _number(lam))
        elif what in _SOLVED:
            Z = F.to(what)
        else:
            Z, moved = _round(F, what)
            errors[which] = _add_error(errors[which], moved)
        return Z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        F, lam, ctx.layer, what, _ = inputs
        ctx.back = F.dtype if isinstance(what, torch.dtype) else what
        ctx.lam = _number(lam) if what == _INVERSE else None
        ctx.save_for_backward(*((lam, output) if ctx.needs_input_grad[1] else ()))

    @staticmethod
    def backward(ctx: Any, dZ: Tensor) -> Any:
        lam, Z = ctx.saved_tensors or (ctx.lam, None)
        V, dlam = _Map.apply(dZ, lam, ctx.layer, ctx.back, "backward"), None
        if Z is not None:
            dlam = -(V * _Map.apply(Z, None, ctx.layer, _LAPLACIAN, "")).sum()
            dlam = dlam.to(lam).reshape(lam.shape)
        return V, dlam, None, None, None


class _Minimum(torch.autograd.Function):
    """The minimum of the energy with a penalty, in float64, and the gradient through it."""

    @staticmethod
    def forward(ctx: Any, F: Tensor, lam: Any, layer: UnfoldedLayer) -> Any:
        assert layer.penalty is not None
        with _working(F) as backend:
            H, B = layer._inverse._on(backend, F.double(), _number(lam))
            energy = Energy(H, layer.penalty)
            if not energy.modulus > 0:
                raise ValueError(
                    "The energy is not convex with this penalty and lam, and the gradient through "
                    "a minimum needs one: take a larger p, or a smaller lam."
                )
            Z, info = energy.minimize(B, layer.tol)
            size = float(np.sqrt((Z * Z).sum()))
            error = info.distance / (size - info.distance) if info.distance < size else math.inf
            found, moved = _as(layer._inverse._tensor(Z.copy(), F, backend), F.dtype)
        layer._errors["forward"] = _add_error(0.0 if size == 0 else error, moved)
        ctx.layer, ctx.energy, ctx.Z, ctx.lam = layer, energy, Z, lam
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dZ: Tensor) -> Any:
        layer, lam = ctx.layer, ctx.lam
        with _working(dZ) as backend:
            G = layer._inverse._on(backend, dZ.double(), ctx.energy.H.lam)[1]
            made = adjoint(ctx.energy, ctx.Z, G, layer.tol)
            V, moved = _as(layer._inverse._tensor(made.V, dZ, backend), dZ.dtype)
        layer._errors["backward"] = _add_error(made.error, moved)
        dlam = None
        if ctx.needs_input_grad[1]:
            dlam = torch.full_like(lam, made.dlam)
        return V, dlam, None


class _Inverse:
    """H^-1 of one graph, for tensors of either device and precision; copies of a layer share it."""

    def __init__(self, graph: Graph, tol: float, method: str) -> None:
        self.graph, self.tol, self.method = graph, tol, method
        self._known: dict[tuple[str, str], RegularizedLaplacian] = {}
        self._rows = graph.inverse_order()

    def __deepcopy__(self, memo: Any) -> _Inverse:
        return self

    def __reduce__(self) -> Any:
        return _Inverse, (self.graph, self.tol, self.method)

    def times(self, F: Tensor, lam: float) -> tuple[Tensor, Any]:
        """(H^-1 F in the precision of F, proven relative error of every column)."""
        size, power = torch.maximum(F.amax(dim=0), -F.amin(dim=0)), None
        odd = (size != 0) & ~((size > 1 / _RANGE) & (size < _RANGE))
        if bool(odd.any()):  # synchronize!
            # In units of a power of two nothing is rounded, and H^-1 is linear.
            power = torch.where(odd & size.isfinite(), torch.frexp(size).exponent, 0)
            F = _times_power(F, -power)
        Z, error = self.solve(F, lam)
        if power is None and Z.dtype == F.dtype:
            return Z, error
        Z, moved = _round(Z, F.dtype, power)
        return Z, _add_error(error, moved)

    def solve(self, F: Tensor, lam: float) -> tuple[Tensor, float]:
        """The same in float32 or float64, whichever was needed, for columns in usual units."""
        with _working(F) as backend:
            H, B = self._on(backend, F, lam)
            unit = unit_roundoff(H.dtype)
            goal = max(self.tol - 2 * unit, 0.5 * self.tol)  # a float64 result is rounded at last
            if self.method == "cg":
                Z, error = _by_cg(H, B, goal)
            else:
                p = polynomial(H, B.shape[1], goal)
                Z, error = chebyshev(H, backend.asarray(B, p.dtype), p.degree), p.error
            return self._tensor(Z, F, backend), error

    def laplacian_times(self, Z: Tensor) -> Tensor:
        with _working(Z) as backend:
            H, B = self._on(backend, Z, 1.0)
            Y = H.apply(B)  # (I + L) Z
            Y -= B
            return self._tensor(Y, Z, backend)

    def _on(self, backend: Backend, F: Tensor, lam: float) -> tuple[RegularizedLaplacian, Array]:
        """H, and F as a block of the backend's in its own memory, rows where the graph has them."""
        key = (backend.name, _SOLVED[F.dtype])
        if key not in self._known:
            self._known[key] = RegularizedLaplacian(self.graph, lam, backend, key[1])
            assert self._known[key].most_neighbours >= 0  # counted once, for every lam
        F = F.detach().contiguous()
        B = backend.asarray(F if F.is_cuda else F.numpy())
        B = take_rows(B[:, None] if F.ndim == 1 else B, self.graph.order, backend)
        return self._known[key].at(lam), B

    def _tensor(self, Z: Array, F: Tensor, backend: Backend) -> Tensor:
        Z = take_rows(Z, self._rows, backend)
        return torch.from_dlpack(Z[:, 0] if F.ndim == 1 else Z)


# ---- the two methods -------------------------------------------------------------------------


class Polynomial(NamedTuple):
    """How far Chebyshev goes, and what that is worth."""

    dtype: str  # of the numbers it works on
    degree: int
    error: float  # proven: ||z - H^-1 b|| <= error ||H^-1 b|| for every b, rounding included


def polynomial(H: RegularizedLaplacian, columns: int, tol: float) -> Polynomial:
    """The cheapest polynomial of error tol for such blocks; where rounding forbids it, the best.

    In float32 a part of tol is for rounding, so the degree is a little higher; float64, at twice
    the time of a step, is taken where float32 does not reach tol, or not as soon.
    """
    found = []
    for dtype in dict.fromkeys((H.dtype, "float64")):
        degree, wanted = 0, chebyshev_degree(H, tol)
        for _ in range(9):  # what rounding does grows with the degree, a little
            if wanted <= degree:
                break
            degree, rounding = wanted, chebyshev_rounding(H, dtype, columns, wanted)
            wanted = chebyshev_degree(H, max(tol - rounding, 0.01 * tol, 0.1 * rounding))
        found.append(Polynomial(dtype, degree, chebyshev_error(H, degree) + rounding))
    reached = [p for p in found if p.error <= tol]
    return min(reached, key=lambda p: p.degree * np.dtype(p.dtype).itemsize, default=found[-1])


def _by_cg(H: RegularizedLaplacian, B: Array, tol: float) -> tuple[Array, float]:
    """CG stops by the H-norm; what a column lacks in the 2-norm is made up for from there on."""
    Z: Any = None
    backend, goal = H.backend, tol
    for _ in range(_CG_TRIES):
        Z, info = block_cg(H, B, goal, Z)
        # ||z - H^-1 b|| <= ||r||, relative to ||H^-1 b|| >= ||z|| - ||r||.
        squares = (backend.to_numpy(backend.column_dots(M, M)) for M in (B, Z))  # synchronize!
        b, z = map(np.sqrt, squares)
        r, unit = info.residuals + H.rounding(B.shape[1]) * z, np.where(b == 0, 1.0, b)
        errors = np.where(b == 0, 0.0, r / np.maximum(z - r, unit / H.lambda_max))
        worst = float(errors.max(initial=0.0))
        if worst <= tol or info.status != "converged":
            break
        goal *= 0.5 * tol / worst
    if not np.isfinite(worst):  # F had such numbers, and whoever scales gradients looks for them
        Z[:, backend.asarray(~np.isfinite(errors))] = np.nan
    return Z, worst


# ---- tensors and numbers ---------------------------------------------------------------------


def _round(Z: Tensor, dtype: torch.dtype, power: Any = None) -> tuple[Tensor, Tensor]:
    """(Z 2^power in `dtype`, the largest relative change of a column by that: it is measured).

    So what under- or overflows on the way counts as well.
    """
    found = (Z if power is None else _times_power(Z, power)).to(dtype)
    back = found.to(Z.dtype)
    back = back if power is None else _times_power(back, -power)
    off, size = (torch.linalg.vector_norm(A, dim=0, dtype=torch.float64) for A in (back.sub_(Z), Z))
    moved = torch.where(off == 0, 0.0, off / size).nan_to_num(math.inf, math.inf).reshape(-1)
    # The norms are sums of n squares in float64.
    return found, torch.cat([moved, moved.new_zeros(1)]).max() * (1 + 1e-6)


def _as(Z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """`_round` of what nobody else reads, if it is in another precision."""
    return (Z, 0.0) if Z.dtype == dtype else _round(Z, dtype)


def _add_error(error: Any, moved: Any) -> Any:
    """The relative error after a further change, which is relative to what is off already."""
    return error + moved * (1 + error)


def _times_power(A: Tensor, power: Tensor) -> Tensor:
    """A 2^power, column by column; in two steps, as 2^power may be beyond the range of A."""
    half = torch.div(power, 2, rounding_mode="floor")
    two = torch.full_like(half, 2, dtype=A.dtype)
    return A * two**half * two ** (power - half)


@contextmanager
def _working(F: Tensor) -> Iterator[Backend]:
    """The backend of the tensor's device; on a GPU it works on the stream that PyTorch works on."""
    backend = get_backend("cuda" if F.is_cuda else "cpu")
    stream = torch.cuda.current_stream(F.device).cuda_stream if F.is_cuda else 0
    with backend.on_stream(stream, F.device.index):
        yield backend


def _check(F: Any, n: int) -> None:
    if not isinstance(F, Tensor):
        raise TypeError(f"F must be a torch.Tensor, not {type(F).__name__}: torch.as_tensor(F).")
    if F.device.type not in ("cpu", "cuda"):
        raise ValueError(f"F is on {F.device}: herta_gpu works on the CPU and on CUDA devices.")
    if F.layout != torch.strided:
        raise ValueError("F is sparse, but H^-1 F is not: give F.to_dense().")
    if F.dtype not in (*_HALVES, *_SOLVED):
        raise ValueError(f"F must hold real floats, not {F.dtype}: give F.float().")
    if F.ndim not in (1, 2):
        raise ValueError(f"F must have one or two dimensions, (n, k), not {F.ndim}.")
    if F.shape[0] != n:
        rows = f"F has {F.shape[0]:,} rows but the graph has {n:,} nodes"
        raise ValueError(f"{rows}: give one row per node.")


def _number(lam: Any) -> float:
    if isinstance(lam, Tensor):
        if lam.numel() != 1:
            shape = tuple(lam.shape)
            raise ValueError(f"lam must be one number, not a parameter of shape {shape}.")
        lam = float(lam.detach())  # synchronize!
    check_lam(lam)
    return float(lam)
