"""Labels carried along the graph, with an error bound of every number; Correct and Smooth.

Label propagation, personalised PageRank and the posterior mean of a graph Gaussian process are all
F = H^-1 M^T Y: H^-1 = (1 - a) (I - a S)^-1 with a = lam / (1 + lam), S = D^-1/2 (A + I) D^-1/2.  It
is c more right-hand sides for the solver of the features.

D^-1/2 H D^1/2 = I + lam (I - D^-1 (A + I)) has rows that sum to 1 and nothing positive off its
diagonal, so no entry of its inverse is negative and no row of that sums to more than 1.  With the
residual R = B - H Z that makes a bound of each number, sharp where 2-norms over all nodes are not:

    |Z - H^-1 B|_ij <= sqrt(d_i) tau_j,   tau_j = max_l |R_lj| / sqrt(d_l).

Correct and Smooth (Huang et al. 2021) are two such solves after any base model.  B are its scores,
n x c (probabilities, or the outputs of least squares), Y the known labels, E = M^T (Y - B) what it
got wrong where the labels are known.

    correct    E_hat = H_1^-1 E, scaled node by node, is added to B; or "fixed": the known rows of
               E_hat are E, and the others solve H_UU E_U = lam S_UL E_L (a Dirichlet problem)
    smooth     G = B with the known rows set to Y;   Z = H_2^-1 G

The original takes a fixed number of steps towards these solutions, clips after each, and has no
self-loops.  Its alpha is lam / (1 + lam).  The bounds are carried through both solves: what the
first one leaves is a change of the right-hand side of the second, and H_2^-1 enlarges nothing in
the same norm.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_degree, chebyshev_steps
from herta_gpu.losses import softmax
from herta_gpu.planning.settings import strengths
from herta_gpu.plumbing.building import distinct
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
    node_rows,
    part_ids,
    train_rows,
)
from herta_gpu.plumbing.files import Archive, explained, write_npz
from herta_gpu.plumbing.interop import take_rows
from herta_gpu.plumbing.models import check_params, to_plain
from herta_gpu.plumbing.targets import (
    Estimator,
    OneHot,
    accuracy_or_r2,
    check_scored,
    make_targets,
    not_fitted,
)
from herta_gpu.solver import SDDSolver

_UNIT = unit_roundoff()
_CHUNK = 1 << 19  # numbers of the residual that exist at a time
_MOST = 1000.0  # a node's correction is not enlarged by more than this: it is left as it is then
_SHARPER = 0.01  # the first solve aims lower, since its errors are enlarged with the correction


def propagate(solver: SDDSolver, B: Any, known: Any = None) -> tuple[Any, Any]:
    """(H^-1 B, tau) for an n x k block of the caller's, dense or SciPy sparse, in its order.

    No number of the result is off by more than sqrt(d_i) tau_j, rounding included.  With nodes
    `known` these rows are those of B, and the others solve the Dirichlet problem; theirs alone
    count in tau, for the rows of the part of H between them sum to at least 1 in the same
    coordinates.
    """
    H, graph, backend = solver.H, solver.graph, solver.backend
    order = np.arange(H.n) if graph.order is None else graph.order
    free = np.ones(H.n, dtype=bool)
    if known is None:
        found = solver.solve(B)
        Z = backend.asarray(found[order])
    else:
        free[known] = False
        at, E = np.flatnonzero(~free[order]), sp.csr_array(B)
        E = backend.asarray(E[order[at]].toarray(), "float64")
        Z, B = dirichlet(H, backend.asarray(at), E, solver.tol), sp.csr_array(B.shape)
        found = take_rows(backend.to_numpy(Z), graph.inverse_order(), backend)
    step, root = max(1, _CHUNK // max(1, Z.shape[1])), 1.0 / np.sqrt(graph.degree)
    largest = np.zeros(Z.shape[1])
    for a in range(0, H.n, step):
        nodes = order[a : a + step]
        given = B[nodes].toarray() if sp.issparse(B) else B[nodes]
        R = backend.to_numpy(H.residual_rows(backend.asarray(given, "float64"), Z, a))
        R = (np.abs(R) * root[a : a + step, None])[free[nodes]]
        largest = np.maximum(largest, R.max(axis=0, initial=0.0))
    # What the residual itself is rounded by: each term a few times, relative to |H| |Z|.
    size = np.abs(backend.to_numpy(Z).astype(np.float64) * root[:, None]).max(axis=0, initial=0.0)
    rounded = _UNIT * (H.most_neighbours + 16) * (1 + 2 * H.lam) * size
    return found, (largest + rounded) * (1 + 1e-12)


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


def degrees(graph: Graph) -> Any:
    """(n,) D in the caller's order."""
    return graph.degree[graph.stored(slice(None))]


def spread_rows(Y: Any, rows: Any, n: int) -> Any:
    """M^T Y as a sparse matrix: the rows of Y at the nodes `rows`, zeros elsewhere."""
    if isinstance(Y, OneHot):
        ones = np.ones(rows.shape[0], dtype=np.float32)  # as exact as in float64
        return sp.csr_array((ones, (rows, Y.codes)), shape=(n, Y.shape[1]))
    at = np.repeat(rows, Y.shape[1]), np.tile(np.arange(Y.shape[1]), rows.shape[0])
    return sp.csr_array((np.asarray(Y).ravel(), at), shape=(n, Y.shape[1]))


class NodeOutputs(Estimator, ABC):
    """Outputs of the nodes of one graph, kept by `fit`, and what they say of each node."""

    Z_: Any
    error_: Any
    classes_: Any
    device: Any
    dtype: Any
    memory_budget: Any
    _flat: bool
    _KEPT: tuple[str, ...] = ("undecided_", "_flat")  # what a file holds beside the arrays

    def _solver(self, graph: Graph, lam: float, tol: float) -> SDDSolver:
        how = {"device": self.device, "dtype": self.dtype, "memory_budget": self.memory_budget}
        return SDDSolver(graph, lam, tol=tol, **how)

    def _keep(self, Z: Any, error: Any, classes: Any, flat: bool) -> None:
        self.Z_, self.error_, self.classes_, self._flat = Z, error, classes, flat
        self.undecided_ = 0
        if classes is not None and Z.shape[1] > 1:
            best = np.partition(Z, Z.shape[1] - 2, axis=1)[:, -2:].astype(np.float64)
            self.undecided_ = int(np.count_nonzero(best[:, 1] - best[:, 0] <= 2 * error))

    def transform(self, idx: Any = None) -> Any:
        """The outputs of the nodes `idx` (ids or a mask; None: all)."""
        Z = self._fitted().Z_
        return Z if idx is None else Z[node_rows(idx, Z.shape[0])]

    def predict(self, idx: Any = None) -> Any:
        """Class labels, or the outputs for float targets; of the nodes `idx` or of all."""
        Z = self.transform(idx)
        if self.classes_ is None:
            return Z[:, 0] if self._flat else Z
        return self.classes_[Z.argmax(axis=1)]

    def score(self, y: Any, idx: Any = None) -> float:
        """Accuracy on the labelled nodes of `idx` (default all), or R^2 for float targets."""
        n = self._fitted().Z_.shape[0]
        check_scored(y, n)
        rows = node_rows(idx, n)
        return accuracy_or_r2(self.predict(rows), y, rows, self.classes_)

    def save(self, path: str | Path) -> None:
        """Write what `fit` left to exactly this path, in NumPy's .npz format, without pickles."""
        self._fitted()
        about = {name: to_plain(getattr(self, name)) for name in self._KEPT}
        about["params"] = to_plain({**self.get_params(), "dtype": check_dtype(self.dtype)})
        arrays = {"Z": self.Z_, "error": self.error_, "about": np.array(json.dumps(about))}
        if self.classes_ is not None:
            arrays["classes"] = self.classes_
        write_npz(Path(path), arrays, "labels")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted object that `save` wrote; a damaged file is a `DataError` that says so."""
        what = f"a whole file of a {cls.__name__}"
        stored = Archive(Path(path), what)
        stored.check_format("labels")
        with explained(f"{path} is not {what}"):
            about = json.loads(str(stored["about"]))
            check_params(cls, about["params"])
            made = cls(**about["params"])
            made._checked()
            made.Z_, made.error_ = Z, error = stored["Z"], stored["error"]
            made.classes_ = classes = None
            if "classes" in stored:
                made.classes_ = classes = stored["classes"]
            if Z.ndim != 2 or error.shape != Z.shape[:1]:
                raise ValueError(f"Z has shape {Z.shape}, error {error.shape}")
            if classes is not None and classes.shape != Z.shape[1:]:
                raise ValueError(f"Z has {Z.shape[1]} columns for {classes.size} classes")
            for name in cls._KEPT:
                setattr(made, name, about[name])
        return made

    @abstractmethod
    def _checked(self) -> Any:
        """The parameters as numbers; a sentence says what is wrong with them."""

    def _fitted(self) -> Self:
        if not hasattr(self, "Z_"):
            raise not_fitted(self)
        return self


class LabelPropagation(NodeOutputs):
    """F = H^-1 M^T Y: labels spread over the graph, features or none, to a stated accuracy.

    Parameters
    ----------
    lam : float
        Weight of the graph; large: labels travel far.
    alpha : float, optional
        The probability to restart instead, as in `HERTA`: lam = 1/alpha - 1.  What label
        propagation usually calls alpha is 1 minus this.
    tol : float
        Bound of the relative H-norm error of every column.
    device, dtype, memory_budget
        As in `HERTA`.
    clamp : bool
        Keep the rows of the training nodes as they are known, and solve for those of all others.

    Attributes
    ----------
    Z_ : array (n, c)
        F, in the caller's order of the nodes.
    error_ : array (n,)
        No number of a row of F is further than this from the exact one, rounding included.
    classes_ : array (c,) or None for float targets
    undecided_ : int
        Nodes whose two best classes are closer than their errors; all other labels are proven.
    unreached_ : int
        Nodes that no label reaches: they get the most frequent class of the training nodes.
    iterations_ : int
        Products with H.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph, LabelPropagation
    >>> path = Graph.from_edges([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    >>> y = np.array([0, -1, -1, -1, -1, 1])  # the two ends are known
    >>> model = LabelPropagation(lam=10.0).fit(path, y)
    >>> model.predict().tolist(), model.undecided_, bool(model.error_.max() < 1e-5)
    ([0, 0, 0, 1, 1, 1], 0, True)
    """

    _KEPT = ("undecided_", "_flat", "unreached_", "iterations_", "_common")

    def __init__(
        self,
        lam: float = 20.0,
        alpha: float | None = None,
        tol: float = 1e-6,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
        clamp: bool = False,
    ) -> None:
        self.lam, self.alpha, self.tol = lam, alpha, tol
        self.device, self.dtype, self.memory_budget = device, dtype, memory_budget
        self.clamp = clamp

    def fit(self, graph: Graph, y: Any, train: Any = None) -> LabelPropagation:
        """Spread the labels of the nodes `train` (ids, a mask, or None: all labelled ones).

        y is as in `HERTA.fit`; nothing of it is looked at outside `train`.
        """
        lam = self._checked()
        check_whole(graph, "LabelPropagation")
        targets = make_targets(y, train, graph.num_nodes, "mse")
        solver = self._solver(graph, lam, self.tol)
        known = targets.rows if self.clamp else None
        F, tau = propagate(solver, spread_rows(targets.Y, targets.rows, graph.num_nodes), known)
        self.iterations_ = chebyshev_degree(solver.H, self.tol) + 1
        if solver.info_ is not None:
            self.iterations_ = int(solver.info_.iterations.max(initial=0))
        error = np.sqrt(degrees(graph)) * tau.max()
        if self.clamp:
            error[targets.rows] = 0.0
        self._keep(F, error, targets.classes, targets.flat)
        self.unreached_, self._common = 0, 0
        if targets.classes is not None:
            reached = graph.connected_to(graph.stored(targets.rows))
            self.unreached_ = int(np.count_nonzero(~reached))
            self.undecided_ -= self.unreached_ * (F.shape[1] > 1)  # there the zeros are exact
            self._common = int(np.bincount(targets.Y.codes).argmax())
        return self

    def predict(self, idx: Any = None) -> Any:
        """Class labels, or F for float targets; of the nodes `idx` or of all."""
        labels = super().predict(idx)
        if self.classes_ is not None:
            labels[~self.transform(idx).any(axis=1)] = self.classes_[self._common]
        return labels

    def _checked(self) -> float:
        if self.alpha is None:
            check_number("lam", self.lam)  # one, not several
        (lam,) = strengths(self.lam, self.alpha)
        check_positive("tol", self.tol)
        check_dtype(self.dtype)
        check_choice("clamp", self.clamp, (False, True))
        return lam


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
        Z, tau = propagate(self._solver(graph, lams[1], self.tol), stored)
        off += np.abs(B - stored).max(axis=1)  # one more change of the right-hand side
        self._keep(Z, root * (tau.max() + (off / root).max()), classes, True)
        return self

    def _corrected(
        self, graph: Graph, lam: float, B: Any, rows: Any, Y: OneHot
    ) -> tuple[Any, Any, int]:
        """B plus the scaled correction, how far each row may be off, and the rows in doubt."""
        if lam == 0:
            return B, np.zeros(graph.num_nodes), 0
        E, root, fixed = Y[:] - B[rows], np.sqrt(degrees(graph)), self.correct == "fixed"
        solver = self._solver(graph, lam, self.tol if fixed else _SHARPER * self.tol)
        spread = spread_rows(E, rows, graph.num_nodes)
        E_hat, tau = propagate(solver, spread, rows if fixed else None)
        if fixed:
            return B + self.scale * E_hat, self.scale * tau.max() * root, 0
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
        rows = distinct(np, np.sort(np.concatenate([rows, further[has_label(y)[further]]])))
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
