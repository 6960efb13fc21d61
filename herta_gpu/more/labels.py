"""Labels carried along the graph: F = H^-1 M^T Y, with an error bound of every number.

Label propagation, personalised PageRank and the posterior mean of a graph Gaussian process are all
this product: H^-1 = (1 - a) (I - a S)^-1 with a = lam / (1 + lam), S = D^-1/2 (A + I) D^-1/2.  It
is c more right-hand sides for the solver of the features.

D^-1/2 H D^1/2 = I + lam (I - D^-1 (A + I)) has rows that sum to 1 and nothing positive off its
diagonal, so no entry of its inverse is negative and no row of that sums to more than 1.  With the
residual R = B - H Z that makes a bound of each number, sharp where 2-norms over all nodes are not:

    |Z - H^-1 B|_ij <= sqrt(d_i) tau_j,   tau_j = max_l |R_lj| / sqrt(d_l).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import unit_roundoff
from herta_gpu.graph import Graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.planning.settings import strengths
from herta_gpu.plumbing.checks import check_dtype, check_number, check_positive, node_rows
from herta_gpu.plumbing.files import Archive, DataError, why, write_npz
from herta_gpu.plumbing.models import check_params, to_plain
from herta_gpu.plumbing.targets import (
    Estimator,
    OneHot,
    accuracy_or_r2,
    check_scored,
    make_targets,
)
from herta_gpu.solver import SDDSolver

_UNIT = unit_roundoff()
_CHUNK = 1 << 19  # numbers of the residual that exist at a time


class Propagated(NamedTuple):
    """Z of H Z = B in the caller's order, and how far off its numbers may be."""

    Z: Any  # n x k
    tau: Any  # (k,): no number of Z is off by more than sqrt(d_i) tau_j
    iterations: int


def propagate(solver: SDDSolver, B: Any) -> Propagated:
    """H^-1 B for an n x k block of the caller's, dense or SciPy sparse, with its bound."""
    Z = solver.solve(B)
    assert solver.info_ is not None
    tau = entry_bound(solver.H, B, Z)
    return Propagated(Z, tau, int(solver.info_.iterations.max(initial=0)))


def entry_bound(H: RegularizedLaplacian, B: Any, Z: Any, free: Any = None) -> Any:
    """(k,) tau of the module's bound, rounding included; B and Z in the caller's order.

    Where only the rows `free` (a mask) are solved for, the others given, theirs alone count: the
    rows of the part of H between free nodes sum to at least 1 in the same coordinates.
    """
    graph, backend = H.graph, H.backend
    order = np.arange(H.n) if graph.order is None else graph.order
    Z = backend.asarray(Z[order])
    width, root = max(1, Z.shape[1]), 1.0 / np.sqrt(graph.degree)
    largest = np.zeros(Z.shape[1])
    for a in range(0, H.n, max(1, _CHUNK // width)):
        rows = slice(a, min(a + max(1, _CHUNK // width), H.n))
        given = B[order[rows]]
        given = given.toarray() if sp.issparse(given) else given
        R = backend.to_numpy(H.residual_rows(backend.asarray(given, "float64"), Z, a))
        R = np.abs(R) * root[rows, None]
        if free is not None:
            R = R[free[order[rows]]]
        largest = np.maximum(largest, R.max(axis=0, initial=0.0))
    # What the residual itself is rounded by: each term a few times, relative to |H| |Z|.
    size = np.abs(backend.to_numpy(Z).astype(np.float64) * root[:, None]).max(axis=0, initial=0.0)
    rounded = _UNIT * (H.most_neighbours + 16) * (1 + 2 * H.lam) * size
    return (largest + rounded) * (1 + 1e-12)


def degrees(graph: Graph) -> Any:
    """(n,) D in the caller's order."""
    inverse = graph.inverse_order()
    return graph.degree if inverse is None else graph.degree[inverse]


def spread_rows(Y: Any, rows: Any, n: int) -> Any:
    """M^T Y as a sparse matrix: the rows of Y at the nodes `rows`, zeros elsewhere."""
    if isinstance(Y, OneHot):
        ones = np.ones(rows.shape[0], dtype=np.float32)  # as exact as in float64
        return sp.csr_array((ones, (rows, Y.codes)), shape=(n, Y.shape[1]))
    at = np.repeat(rows, Y.shape[1]), np.tile(np.arange(Y.shape[1]), rows.shape[0])
    return sp.csr_array((np.asarray(Y).ravel(), at), shape=(n, Y.shape[1]))


class NodeOutputs(Estimator, ABC):
    """Outputs of the nodes of one graph, kept by `fit`, and what they say of each node.

    Attributes
    ----------
    Z_ : array (n, c)
        The outputs, in the caller's order of the nodes.
    error_ : array (n,)
        No number of a row of `Z_` is further than this from what exact solves give.
    classes_ : array (c,) or None for float targets
    undecided_ : int
        Nodes whose two best outputs are closer than their errors; of all others the label is
        proven.  0 for float targets.
    """

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
        stored = Archive(Path(path), f"a whole file of a {cls.__name__}")
        stored.check_format("labels", ("Z", "error", "about", "classes"))
        try:
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
        except DataError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as wrong:
            reason = why(wrong)
            raise DataError(f"{path} is not a whole file of a {cls.__name__} ({reason}).") from None
        return made

    @abstractmethod
    def _checked(self) -> Any:
        """The parameters as numbers; a sentence says what is wrong with them."""

    def _fitted(self) -> Self:
        if not hasattr(self, "Z_"):
            name = type(self).__name__
            raise RuntimeError(f"This {name} is not fitted yet: call fit first.")
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
    ) -> None:
        self.lam, self.alpha, self.tol = lam, alpha, tol
        self.device, self.dtype, self.memory_budget = device, dtype, memory_budget

    def fit(self, graph: Graph, y: Any, train: Any = None) -> LabelPropagation:
        """Spread the labels of the nodes `train` (ids, a mask, or None: all labelled ones).

        y is as in `HERTA.fit`; nothing of it is looked at outside `train`.
        """
        lam = self._checked()
        check_whole(graph, "LabelPropagation")
        targets = make_targets(y, train, graph.num_nodes, "mse")
        solver = self._solver(graph, lam, self.tol)
        F, tau, self.iterations_ = propagate(
            solver, spread_rows(targets.Y, targets.rows, graph.num_nodes)
        )
        self._keep(F, np.sqrt(degrees(graph)) * tau.max(), targets.classes, targets.flat)
        self.unreached_, self._common = 0, 0
        if targets.classes is not None:
            inverse = graph.inverse_order()
            at = targets.rows if inverse is None else inverse[targets.rows]
            self.unreached_ = int(np.count_nonzero(~graph.connected_to(at)))
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
        return lam
