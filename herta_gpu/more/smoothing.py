"""Correct and Smooth (Huang et al. 2021): two solves after any base model, with error bounds.

B are scores of the base model, n x c (probabilities, or the outputs of least squares), Y the known
labels, E = M^T (Y - B) what the model got wrong where the labels are known.

    correct    E_hat = H_1^-1 E, scaled node by node, is added to B; or "fixed": the known rows of
               E_hat are E, and the others solve H_UU E_U = lam S_UL E_L (a Dirichlet problem)
    smooth     G = B with the known rows set to Y;   Z = H_2^-1 G

The original takes a fixed number of steps towards these solutions, clips after each, and has no
self-loops.  Its alpha is lam / (1 + lam).

The error bounds are those of `labels`, carried through both solves: what the first one leaves is a
change of the right-hand side of the second, and H_2^-1 enlarges nothing in the same norm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from herta_gpu.backends.base import unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_degree, chebyshev_steps
from herta_gpu.losses import softmax
from herta_gpu.more.labels import NodeOutputs, degrees, entry_bound, propagate, spread_rows
from herta_gpu.plumbing.checks import (
    as_labels,
    check_choice,
    check_dtype,
    check_lam,
    check_not_negative,
    check_number,
    check_positive,
    check_rows,
    has_label,
    part_ids,
    train_rows,
)
from herta_gpu.plumbing.targets import OneHot

_MOST = 1000.0  # a node's correction is not enlarged by more than this: it is left as it is then
_UNIT = unit_roundoff()
_SHARPER = 0.01  # the first solve aims lower, since its errors are enlarged with the correction


class CorrectAndSmooth(NodeOutputs):
    """Correct the scores of a base model by its errors on the training nodes, then smooth them.

    Parameters
    ----------
    correct_lam, smooth_lam : float
        Weight of the graph in the two solves; a `correct_lam` of 0 leaves the first step out.
    correct_alpha, smooth_alpha : float, optional
        In place of these the alpha of the paper: lam = alpha / (1 - alpha).  (The alpha of
        `HERTA` and `LabelPropagation` is that of APPNP, 1 minus this one.)  alpha = 1 is refused:
        components without a label would have no solution.
    correct : {"autoscale", "fixed", "none"}
        "autoscale" gives the correction of every node the mean size of the training errors;
        "fixed" keeps the errors of the training nodes as they are and multiplies the correction
        by `scale`; "none" only smooths.
    scale : float
        Of "fixed".
    tol : float
        Bound of the relative error of the solves, in the H-norm of every column.
    device, dtype, memory_budget
        As in `HERTA`.

    Attributes
    ----------
    Z_ : array (n, c)
        The smoothed scores, in the caller's order of the nodes.
    error_ : array (n,)
        No number of a row of `Z_` is further than this from what exact solves give.
    undecided_ : int
        Nodes whose two best classes are closer than their errors; all other labels are proven.
    classes_ : array (c,)
    on_the_edge_ : int
        Nodes at which the solve leaves open whether their correction is enlarged; the bound
        `error_` allows for both.

    Examples
    --------
    >>> from herta_gpu import HERTA, CorrectAndSmooth
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> train, test = data.split["train"], data.split["test"]
    >>> base = HERTA(lam=1.0, ridge=1.0).fit(data.graph, data.X, data.y, train)
    >>> model = CorrectAndSmooth(20.0, 20.0).fit(data.graph, base, data.y, train, X=data.X)
    >>> better = model.score(data.y, test) > base.score(data.graph, data.X, data.y, test)
    >>> better, model.undecided_, bool(model.error_.max() < 1e-4)
    (True, 0, True)
    """

    _KEPT = ("undecided_", "_flat", "on_the_edge_")

    def __init__(
        self,
        correct_lam: float = 20.0,
        smooth_lam: float = 20.0,
        correct_alpha: float | None = None,
        smooth_alpha: float | None = None,
        correct: str = "autoscale",
        scale: float = 1.0,
        tol: float = 1e-6,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
    ) -> None:
        self.correct_lam, self.smooth_lam = correct_lam, smooth_lam
        self.correct_alpha, self.smooth_alpha = correct_alpha, smooth_alpha
        self.correct, self.scale, self.tol = correct, scale, tol
        self.device, self.dtype, self.memory_budget = device, dtype, memory_budget

    def fit(
        self, graph: Graph, base: Any, y: Any, train: Any = None, valid: Any = None, X: Any = None
    ) -> CorrectAndSmooth:
        """Correct and smooth the scores of `base` by the labels of the nodes `train`.

        Parameters
        ----------
        graph : Graph
        base : array (n, c), or a fitted `HERTA`
            Scores of every node from any model, a column for each class in the order of
            `np.unique(y[train])`, or for the classes 0 to c - 1.  A `HERTA` gives its outputs of
            `X`, as probabilities if its loss is cross entropy.
        y : array (n,)
            Class labels as in `HERTA.fit`; none is looked at outside `train` and `valid`.
        train : ids or a mask, optional
            None: every node with a label.
        valid : ids or a mask, optional
            Further nodes whose labels are to be used.  Never by default: scores on the validation
            nodes mean nothing afterwards.
        X : array or SciPy sparse matrix, optional
            Features for a `base` that is a model.
        """
        lams = self._checked()
        check_whole(graph, type(self).__name__)
        scores, classes = _scores(graph, base, X)
        rows, codes, classes = _known(y, train, valid, classes, scores)
        Y = OneHot(codes, scores.shape[1])
        B, off, self.on_the_edge_ = self._corrected(graph, lams[0], scores, rows, Y)
        B[rows], off[rows] = Y[:], 0.0
        stored, root = B.astype(self.dtype), np.sqrt(degrees(graph))
        Z, tau, _ = propagate(self._solver(graph, lams[1], self.tol), stored)
        off += np.abs(B - stored).max(axis=1)  # one more change of the right-hand side
        self._keep(Z, root * (tau.max() + (off / root).max()), classes, True)
        return self

    def _corrected(
        self, graph: Graph, lam: float, B: Any, rows: Any, Y: OneHot
    ) -> tuple[Any, Any, int]:
        """B plus the scaled correction, how far each row may be off, and the rows in doubt."""
        if lam == 0:
            return B, np.zeros(graph.num_nodes), 0
        E = Y[:] - B[rows]
        root = np.sqrt(degrees(graph))
        if self.correct == "fixed":
            carried_E, tau = self._clamped(graph, lam, rows, E)
            return B + self.scale * carried_E, self.scale * tau.max() * root, 0
        solver = self._solver(graph, lam, _SHARPER * self.tol)
        E_hat, tau, _ = propagate(solver, spread_rows(E, rows, graph.num_nodes))
        sizes = np.abs(E_hat).sum(axis=1, dtype=np.float64)
        sigma = np.abs(E).sum() / rows.shape[0]
        factors = enlargement(E_hat, sigma)
        tau = tau + _UNIT * np.abs(E).max() / root.min()  # E itself is rounded
        # With v the true row of E_hat and v' = v + delta: every entry of sigma v / |v| - sigma
        # v' / |v'| is at most (|delta_j| + sum |delta|) sigma / |v'|.
        total = root * tau.sum()  # of |delta|, in each row
        off = factors * (root * tau.max() + total) + 8 * _UNIT * (np.abs(B).max(axis=1) + sigma)
        edge = (sigma > 0) & (np.abs(sizes - sigma / _MOST) <= total)
        off[edge] += 1.01 * sigma + total[edge]  # the lengths of the row, enlarged and as it is
        return B + factors[:, None] * E_hat, off, int(np.count_nonzero(edge))

    def _clamped(self, graph: Graph, lam: float, rows: Any, E: Any) -> tuple[Any, Any]:
        """The Dirichlet problem by Chebyshev's steps, with the known rows put back after each."""
        solver = self._solver(graph, lam, self.tol)
        H, inverse = solver.H, graph.inverse_order()
        at = solver.backend.asarray(rows if inverse is None else inverse[rows])
        Z = solver.backend.to_numpy(dirichlet(H, at, solver.backend.asarray(E), self.tol))
        Z = Z if inverse is None else Z[inverse]
        free = np.ones(graph.num_nodes, dtype=bool)
        free[rows] = False
        return Z, entry_bound(H, np.zeros_like(Z), Z, free)

    def _checked(self) -> tuple[float, float]:
        """Both lam, the first 0 for no correction; a sentence says what is wrong with them."""
        check_choice("correct", self.correct, ("autoscale", "fixed", "none"))
        check_not_negative("scale", self.scale)
        check_positive("tol", self.tol)
        check_dtype(self.dtype)
        smooth = _lam("smooth", self.smooth_lam, self.smooth_alpha)
        none = check_number("correct_lam", self.correct_lam) == 0 and self.correct_alpha is None
        if none or self.correct == "none":
            return 0.0, smooth
        return _lam("correct", self.correct_lam, self.correct_alpha), smooth


def enlargement(E_hat: Any, sigma: float) -> Any:
    """(n,) what "autoscale" multiplies each row by: that makes it as long as the mean error."""
    sizes = np.abs(E_hat).sum(axis=1, dtype=np.float64)
    factors = sigma / np.where(sizes > 0, sizes, 1.0)
    factors[(sizes == 0) | (factors > _MOST)] = 1.0
    return factors


def dirichlet(H: RegularizedLaplacian, at: Any, E: Any, tol: float) -> Any:
    """Z in float64 with the rows `at` equal to E and (H Z)_i = 0 in all others, stored order.

    The spectrum of the part of H between the other nodes lies within that of H.  What is left of
    the residual there is at most `tol` times what it was.
    """
    backend, xp = H.backend, H.backend.xp
    L = H.laplacian("float64")
    zero = xp.zeros((H.n, E.shape[1]))
    Z_prev, Z = backend.zeros(zero.shape, "float64"), backend.zeros(zero.shape, "float64")
    Z[at] = E
    first, steps = chebyshev_steps(H, chebyshev_degree(H, tol) + 1)
    for c1, c2 in [(0.0, first), *steps]:
        backend.chebyshev_step(L, H.lam, Z, Z_prev, zero, c1, c2)
        Z_prev[at] = E
        Z, Z_prev = Z_prev, Z
    return Z


def _lam(step: str, lam: Any, alpha: Any) -> float:
    """lam of a step, or the paper's alpha in place of it."""
    if alpha is not None:
        check_positive(f"{step}_alpha", alpha)
        if alpha > 1:
            raise ValueError(f"{step}_alpha must lie between 0 and 1, not {alpha!r}.")
        lam = float(alpha) / (1.0 - float(alpha)) if alpha < 1 else math.inf
    if check_number(f"{step}_lam", lam) == math.inf:
        raise ValueError(
            f"{step}_alpha = 1 is lam = infinity, which has no solution on components without a "
            f"label: choose {step}_alpha below 1, or a large {step}_lam."
        )
    check_lam(lam)
    return float(lam)


def _scores(graph: Graph, base: Any, X: Any) -> tuple[Any, Any]:
    """(n x c float64 scores of the base, its classes if it knows them)."""
    classes = None
    if hasattr(base, "transform"):
        if X is None:
            raise ValueError("X is missing: the base is a model, which needs the features.")
        classes = getattr(base, "classes_", None)
        if classes is None:
            raise ValueError("The base predicts numbers, not classes: there is nothing to correct.")
        base, loss = base.transform(graph, X), getattr(base, "loss", "mse")
        base = softmax(np, np.asarray(base, dtype=np.float64)) if loss == "ce" else base
    B = np.array(base, dtype=np.float64)  # a copy, which is written to
    if B.ndim != 2:
        raise ValueError(
            f"The scores must have a row per node and a column per class, not {B.shape}."
        )
    check_rows("The array of scores", B, graph)
    return B, classes


def _known(y: Any, train: Any, valid: Any, classes: Any, B: Any) -> tuple[Any, Any, Any]:
    """(nodes whose labels are used, the columns of these labels, the classes)."""
    n, c = B.shape
    y = as_labels("y", y)
    if y.shape != (n,) or y.dtype.kind not in "iubU":
        raise ValueError("y must hold one class label per node: whole numbers or text.")
    rows = train_rows(train, has_label(y), n)
    if valid is not None:
        further = part_ids("valid", valid, n)
        rows = np.union1d(rows, further[has_label(y)[further]])
    seen = np.unique(y[rows])
    if classes is None:
        counted = y.dtype.kind != "U" and seen.shape[0] < c and int(seen[-1]) < c
        classes = np.arange(c) if counted else seen
    if classes.shape[0] != c:
        raise ValueError(
            f"The scores have {c} columns but there are {classes.shape[0]} classes: give a column "
            "for each class."
        )
    codes = np.minimum(np.searchsorted(classes, seen), c - 1)
    if (classes[codes] != seen).any():
        bad = seen[classes[codes] != seen][0]
        raise ValueError(f"y holds the class {bad!s}, which the base model does not know.")
    return rows, np.searchsorted(classes, y[rows]), classes
