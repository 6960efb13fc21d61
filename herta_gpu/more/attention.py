"""Attention: weights of edges and weights of features, fitted in turn.

Each round is an ordinary fit, certified as ever, on the graph whose edges weigh gamma_e; its
outputs Z give the next gamma_e = rho'(s_e) (`energy`).  At the end two facts stand apart: W is
certified for its gamma, and `error_` says how far Z is from the minimum of the energy with its W.

Nothing is minimised jointly.  A limit is an equilibrium: W is the optimum for its gamma, and Z the
minimum of E for its W.  One exists where ridge > 0 and rho' is continuous; that it is the only
one, or that rounds lead to it, is not proven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, norm
from herta_gpu.graph import Graph, check_whole
from herta_gpu.herta import HERTA
from herta_gpu.laplacian import block_cg
from herta_gpu.more.energy import Energy
from herta_gpu.more.penalties import Penalty, PseudoHuber
from herta_gpu.plumbing.bundles import takes_bundles
from herta_gpu.plumbing.checks import check_count, check_positive, node_rows
from herta_gpu.plumbing.interop import in_kind_of, on_device, take_rows, to_host
from herta_gpu.plumbing.targets import (
    Estimator,
    accuracy_or_r2,
    check_scored,
    label_accuracy,
    not_fitted,
)
from herta_gpu.prediction import TOL

# What makes outputs that are not H^-1 X W.
_NOT_OF_ONE_H = ("label_features", "hidden", "hops", "row_norm")


class Attention(Estimator):
    """HERTA on a graph some of whose edges it learns to distrust.

    Parameters
    ----------
    model : HERTA
        What is fitted in each round, with one lam; choose lam with attention on.
    penalty : PseudoHuber, Huber or Power
        Without a `delta`, that is its quantile of the distances after the first fit.
    rounds : int
        Fits after the first one, at most.
    tol : float
        Rounds end when `error_` is at most this.

    Attributes
    ----------
    edge_weight_ : array (m,)
        What each edge of `Graph.edges` counts for, from 0 to 1, in the last fit.
    model_, graph_ : HERTA, Graph
        The last fit, and the graph of these weights that it was fitted on.
    delta_ : float
    error_ : float
        ||grad E(Z)|| / ||Z|| of the last fit's Z.
    status_ : str
        "equilibrium": the last fit is certified and `error_` at most tol; "rounds": one is not.
    history_ : list of dict
        One per fit: round, error, status, certificate.
    info_ : EnergyInfo
        How close to the minimum of the energy the last outputs are proven to be.

    Notes
    -----
    The weights have seen the labels of the training nodes: there is no valid leave-one-out, and
    conformal sets must be calibrated on other nodes.  Weights from features alone (`similarity`)
    have neither limit, and help more where features are words.

    Examples
    --------
    >>> from herta_gpu import HERTA, Attention, PseudoHuber
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> model = Attention(HERTA(lam=10.0, ridge=0.3), PseudoHuber(quantile=0.3), rounds=2)
    >>> model = model.fit(data.graph, data.X, data.y, data.split["train"])
    >>> model.model_.status_, model.status_, model.edge_weight_.shape == (data.graph.num_edges,)
    ('certified', 'rounds', True)
    >>> model.score(data.graph, data.X, data.y, data.split["test"]) > 0.9, model.info_.status
    (True, 'converged')
    """

    def __init__(
        self, model: Any = None, penalty: Any = None, rounds: int = 4, tol: float = 1e-2
    ) -> None:
        self.model, self.penalty, self.rounds, self.tol = model, penalty, rounds, tol

    @takes_bundles("train")
    def fit(
        self,
        graph: Graph,
        X: Any = None,
        y: Any = None,
        train: Any = None,
        *,
        sample_weight: Any = None,
        callback: Callable[[dict[str, Any]], None] | None = None,
        loo: bool = False,
    ) -> Attention:
        """Train on the nodes `train`, with the arguments of `HERTA.fit`; `loo` is refused."""
        model, penalty = self._checked(graph, loo)
        more = {"sample_weight": sample_weight, "callback": callback}
        self.history_: list[dict[str, Any]] = []
        self.graph_, self.edge_weight_ = graph, np.ones(graph.num_edges)
        Z: Any = None
        for number in range(self.rounds + 1):
            self.model_ = HERTA(**model.get_params()).fit(self.graph_, X, y, train, **more)
            backend = self.model_._device(graph, X)
            with backend.working():
                F, energy, _ = self._energy(graph, X, penalty)
                gamma = backend.asarray(self.edge_weight_)
                Z = block_cg(energy.on(gamma), F, TOL, Z)[0]
                squares = energy.squares(Z)
                if penalty.delta is None:
                    penalty = energy.penalty = penalty.at(_quantile(energy, squares))
                new, size = energy.weights(squares), norm(Z)
                error = norm(energy.descent(Z, F, new)) / size if size > 0 else 0.0
                # Where the change has stopped falling, half a step: it may go in a circle.
                if number > 0 and error >= self.history_[-1]["error"]:
                    new = np.sqrt(gamma * new)
                proven = self.model_.certificate_.value
            record = {"round": number, "error": error, "status": self.model_.status_}
            self.history_.append({**record, "certificate": proven})
            if error <= self.tol or number == self.rounds:
                break
            self.edge_weight_ = backend.to_numpy(new)
            self.graph_ = graph.reweighted(self.edge_weight_)
        self.delta_, self.error_, self._penalty = penalty.delta, error, penalty
        still = error <= self.tol and self.model_.status_ == "certified"
        self.status_, self.classes_ = "equilibrium" if still else "rounds", self.model_.classes_
        self.n_features_in_ = self.model_.n_features_in_
        return self

    @takes_bundles()
    def transform(self, graph: Graph | Any, X: Any = None, idx: Any = None) -> Any:
        """The minimum of the energy for these features, and the intercept; `info_` says how near.

        For any graph and X: weights of edges follow from the outputs themselves.
        """
        check_whole(graph, "Attention")
        model = self._fitted().model_
        backend = model._device(graph, X)
        with backend.working():
            F, energy, b = self._energy(graph, X, self._penalty)
            # Among several minima that which is reached from the outputs without attention.
            start = None if energy.modulus > 0 else block_cg(energy.H, F, TOL)[0]
            Z, self.info_ = energy.minimize(F, TOL, Z=start)
            Z = take_rows(Z + b, graph.inverse_order(), backend).astype(model.dtype)
            Z = Z if idx is None else Z[backend.asarray(node_rows(to_host(idx, backend), len(Z)))]
            return in_kind_of(Z if on_device(X) else backend.to_numpy(Z), X)

    @takes_bundles()
    def predict(self, graph: Graph | Any, X: Any = None, idx: Any = None) -> Any:
        """Class labels, or the outputs for float targets; of the nodes `idx` or of all."""
        Z, model = self.transform(graph, X, idx), self.model_
        if model.classes_ is None:
            Z = (Z > 0) * 1 if model.loss == "bce" else Z
            return Z[:, 0] if model._flat else Z
        return model.classes_[to_host(Z, model._device(graph, X)).argmax(axis=1)]

    @takes_bundles("idx")
    def score(self, graph: Graph | Any, X: Any = None, y: Any = None, idx: Any = None) -> float:
        """As `HERTA.score`."""
        model = self._fitted().model_
        y, idx = (to_host(a, model._device(graph, X)) for a in (y, idx))
        check_scored(y, graph.num_nodes)
        rows = node_rows(idx, graph.num_nodes)
        predicted = to_host(self.predict(graph, X, rows), model._device(graph, X))
        if model.loss == "bce":
            return label_accuracy(predicted, y, rows)
        return accuracy_or_r2(predicted, y, rows, model.classes_)

    def _energy(self, graph: Graph, X: Any, penalty: Penalty) -> tuple[Array, Energy, Any]:
        """(F = X W as stored, the energy of this graph, the intercept)."""
        outputs, _ = self.model_._outputs(graph, X, None)
        F = outputs.X.times(outputs.W)
        return F, Energy(outputs.H, penalty), 0.0 if outputs.b is None else outputs.b

    def _checked(self, graph: Graph, loo: bool) -> tuple[HERTA, Penalty]:
        """The model and the penalty, or a sentence that says what is wrong."""
        check_whole(graph, "Attention")
        model = HERTA() if self.model is None else self.model
        penalty = PseudoHuber() if self.penalty is None else self.penalty
        if not isinstance(model, HERTA) or not isinstance(penalty, Penalty):
            raise TypeError("model must be a HERTA, and penalty a PseudoHuber, Huber or Power.")
        check_count("rounds", self.rounds, least=0)
        check_positive("tol", self.tol)
        params = model.get_params()
        wrong = [name for name in _NOT_OF_ONE_H if params.get(name)]
        if model._settings().several or wrong:
            name = wrong[0] if wrong else "several lam"
            raise ValueError(f"Attention needs outputs H^-1 X W of one lam: leave out {name}.")
        if loo:
            raise ValueError(
                "Leave-one-out is not valid: the weights have seen the label left out."
            )
        return model, penalty

    def _fitted(self) -> Attention:
        if not hasattr(self, "model_"):
            raise not_fitted(self)
        return self


def _quantile(energy: Energy, squares: Array) -> float:
    """The penalty's quantile of the distances over edges; 1 where there are none."""
    found = energy.backend.to_numpy(np.sqrt(squares / energy.weight))
    delta = float(np.quantile(found, energy.penalty.quantile)) if found.size else 1.0
    if delta > 0:
        return delta
    share = f"{energy.penalty.quantile:.0%} of all edges or more"
    raise ValueError(f"The ends of {share} have equal outputs: give a larger quantile or delta.")
