"""Kernel ridge on diffused features with the kernel of an infinitely wide net (`wide_kernel`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from herta_gpu.backends import backend_for
from herta_gpu.backends.base import unit_roundoff
from herta_gpu.certificate import Certificate, judge
from herta_gpu.features import Features
from herta_gpu.graph import Graph, check_graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.random_features import FLOOR, Layer
from herta_gpu.more.wide_kernel import Diffused, kernel_ridge, wide_kernel
from herta_gpu.planning.settings import NORMALIZATIONS, check_hops
from herta_gpu.plumbing.bundles import takes_bundles
from herta_gpu.plumbing.checks import (
    BudgetError,
    check_choice,
    check_count,
    check_lam,
    check_not_negative,
    check_positive,
    check_rows,
    memory_budget,
    node_rows,
)
from herta_gpu.plumbing.files import Archive, explained, write_npz
from herta_gpu.plumbing.interop import as_matrix, to_host
from herta_gpu.plumbing.models import check_params, from_plain, to_plain
from herta_gpu.plumbing.scaling import in_new_units
from herta_gpu.plumbing.targets import Estimator, accuracy_or_r2, make_targets, not_fitted

_UNIT, _ROWS = unit_roundoff(), 512
_CERTIFIED = 1e-6  # relative gap


class KernelModel(Estimator):
    """Kernel ridge with the kernel of an infinitely wide net: `HERTA(hidden=...)` without draws.

    For up to some 12,000 training nodes: it stores two n_train x n_train matrices of float64.

    Parameters
    ----------
    hops : list of int
        Blocks S^k X, S = D^-1/2 (A + I) D^-1/2.
    lam : list of float
        Further blocks H^-1 X.
    ridge : float
        Relative to the mean diagonal of the kernel.
    rank : int or None
        Leading singular vectors of X that the net sees, whitened; None: X as it is.
    linear : float
        Share of the linear kernel of the blocks of X.
    normalize : {"unit", "none", "row", "standard"}
        Of X, before anything else.
    device, memory_budget, random_state
        As in `HERTA`; the kernel itself is on the host.

    Attributes
    ----------
    a_ : array (n_train, c)
        The outputs are K(., train) a + the mean of Y.
    certificate_ : Certificate
        Of the exact kernel: rounding, hops and solves included.
    loo_ : array (n_train, c)
        Outputs of the models that left each training node out.

    Examples
    --------
    >>> from herta_gpu import KernelModel
    >>> from herta_gpu.datasets import load
    >>> data = load("digits").random_split(0.3)
    >>> model = KernelModel(hops=[0, 1], rank=None, ridge=0.01)
    >>> model = model.fit(data.graph, data.X, data.y, data.split["train"])
    >>> model.status_, model.score(data.graph, data.X, data.y, data.split["test"]) > 0.95
    ('certified', True)
    """

    def __init__(
        self,
        hops: Sequence[int] = (0, 1, 2, 3),
        lam: Sequence[float] = (),
        ridge: float = 0.03,
        rank: int | None = 64,
        linear: float = 0.3,
        normalize: str = "unit",
        device: str = "auto",
        memory_budget: int | str | None = None,
        random_state: int = 0,
    ) -> None:
        self.hops, self.lam, self.ridge, self.rank, self.linear = hops, lam, ridge, rank, linear
        self.normalize, self.device = normalize, device
        self.memory_budget, self.random_state = memory_budget, random_state

    @takes_bundles("train")
    def fit(
        self, graph: Graph, X: Any = None, y: Any = None, train: Any = None, *, evaluate: Any = None
    ) -> KernelModel:
        """Train on the nodes `train`; with `evaluate`, `outputs_` are those of these nodes."""
        H, F, self.fixed_ = self._begin(graph, X)
        t = make_targets(y, train, graph.num_nodes, "mse")
        wanted = node_rows([] if evaluate is None else evaluate, graph.num_nodes)
        n, Y, d = t.rows.shape[0], np.asarray(t.Y), F.shape[1]
        budget = memory_budget(self.memory_budget, H.backend.memory_available())
        wide = (len(self.hops) + len(self.lam)) * (d * (self.linear > 0) + min(self.rank or d, d))
        need = 8 * (2 * n * n + 12 * _ROWS * n + (n + wanted.size) * wide + 2 * F.shape[0] * d)
        if need > budget:
            raise BudgetError(
                f"The kernel of {n:,} training nodes needs {-(-need >> 20):,} MB but the budget is "
                f"{budget >> 20:,} MB: raise memory_budget, or use HERTA(hidden=...)."
            )
        layer = Layer.draw(F, 1, self.rank, self.random_state)
        usual = float((F.column_norms**2).sum() / max(1, F.shape[0])) ** 0.5
        known = {"V": layer.V, "floors": np.array([layer.floor, FLOOR * usual or FLOOR])}
        self.fixed_ |= {name: to_host(a, H.backend) for name, a in known.items()}
        D = Diffused(H, F, self.hops, self.lam, self.fixed_)
        Z, off = D.inputs(np.concatenate([graph.stored(a) for a in (t.rows, wanted)]))
        K, E = np.empty((n, n)), 0.0
        for i in range(0, n, _ROWS):
            K[i : i + _ROWS], error = wide_kernel(
                Z[i : min(i + _ROWS, n)], Z[:n], i, (off[i : min(i + _ROWS, n)], off[:n])
            )
            E = math.hypot(E, error)
        scale = float(np.trace(K)) / n
        K, E, share = K / scale, E / scale, 1.0
        if self.linear:
            B, left = D.linear(graph.stored(t.rows))
            C, size = B - B.mean(axis=0), float(np.linalg.norm(B))
            share = max(float((C * C).sum()) / n, 1e-300) / self.linear
            E += 4 * size * (left + (B.shape[1] + n + 8) * _UNIT * size) / share
            for i in range(0, n, _ROWS):
                K[i : i + _ROWS] += (C[i : i + _ROWS] @ C.T) / share
        E += 4 * _UNIT * float(np.linalg.norm(K))
        self.b_ = Y.mean(axis=0)
        self.a_, self.loo_, self.certificate_ = self._solve(K, Y, E)
        self.status_ = str(judge(self.certificate_, _CERTIFIED, stuck=True))
        self.fixed_ |= {"Z": Z[:n], "scale": np.array(scale), "W": np.zeros((0, Y.shape[1]))}
        if self.linear:
            W = C.T @ self.a_ / share
            self.fixed_ |= {"W": W, "level": B.mean(axis=0) @ W}
        self.train_, self.classes_, self._flat, self.n_features_in_ = t.rows, t.classes, t.flat, d
        if evaluate is not None:
            self.outputs_ = self._outputs(D, graph.stored(wanted), Z[n:])
        return self

    def _solve(self, K: Any, Y: Any, E: float) -> tuple[Any, Any, Certificate]:
        try:
            return kernel_ridge(K, self.ridge * float(np.trace(K)) / len(K), Y, E)
        except np.linalg.LinAlgError:
            raise ValueError(
                f"The kernel and a ridge of {self.ridge:g} are not positive: raise the ridge."
            ) from None

    def _begin(self, graph: Graph, X: Any) -> tuple[RegularizedLaplacian, Features, dict[str, Any]]:
        """H, the features in their units, and what tells these; or a sentence."""
        check_graph(graph)
        check_whole(graph, "The kernel model")
        hops, lams = check_hops(list(self.hops) or None, tuple(self.lam)), [*self.lam]
        for lam in lams:
            check_lam(lam)
        if not (hops or lams):
            raise ValueError("hops and lam are empty: give at least one, like hops=[0, 1, 2, 3].")
        check_positive("ridge", self.ridge)
        check_not_negative("linear", self.linear)
        check_choice("normalize", self.normalize, NORMALIZATIONS)
        if self.rank is not None:
            check_count("rank", self.rank)
        backend = backend_for(self.device, graph, X)
        X = as_matrix(X, backend)
        check_rows("X", X, graph)
        if X.shape[1] == 0:
            raise ValueError("X has no columns: give at least one feature.")
        units: dict[str, Any] = {}
        if self.normalize != "none":
            X, units = in_new_units(X, self.normalize, backend, vars(self).get("_known"))
        H = RegularizedLaplacian(graph, 1.0, backend, "float64")
        return H, Features(X, backend, graph.order), units

    def _outputs(self, D: Diffused, at: Any, Z: Any = None) -> Any:
        """Outputs of the stored rows `at`, some of them at a time."""
        Z = D.inputs(at)[0] if Z is None else Z
        out = np.tile(self.b_, (len(at), 1))
        for i in range(0, len(at), _ROWS):
            T = wide_kernel(Z[i : i + _ROWS], self.fixed_["Z"])[0]
            out[i : i + _ROWS] += T @ self.a_ / self.fixed_["scale"]
        if self.linear:
            W = self.fixed_["W"]
            out += D.linear(at, W) - self.fixed_["level"]
        return out

    @takes_bundles()
    def transform(self, graph: Graph, X: Any = None, idx: Any = None) -> Any:
        """Outputs (n, c) of the nodes `idx`, or of all; the graph may be another one."""
        if not hasattr(self, "a_"):
            raise not_fitted(self)
        self._known = self.fixed_
        H, F, _ = self._begin(graph, X)
        if F.shape[1] != self.n_features_in_:
            wanted = f"the model was fitted with {self.n_features_in_:,}"
            raise ValueError(f"X has {F.shape[1]:,} features but {wanted}.")
        D = Diffused(H, F, self.hops, self.lam, self.fixed_)
        return self._outputs(D, graph.stored(node_rows(idx, graph.num_nodes)))

    @takes_bundles()
    def predict(self, graph: Graph, X: Any = None, idx: Any = None) -> Any:
        """Class labels, or outputs for float targets."""
        Z = self.transform(graph, X, idx)
        if self.classes_ is not None:
            return self.classes_[Z.argmax(axis=1)]
        return Z[:, 0] if self._flat else Z

    @takes_bundles("idx")
    def score(self, graph: Graph, X: Any = None, y: Any = None, idx: Any = None) -> float:
        """Accuracy on the labelled nodes of `idx`, or R^2 for float targets."""
        rows = node_rows(idx, graph.num_nodes)
        return accuracy_or_r2(self.predict(graph, X, rows), y, rows, self.classes_)

    def save(self, path: str | Path) -> None:
        """Write the fitted model to exactly this path, without pickles."""
        if not hasattr(self, "a_"):
            raise not_fitted(self)
        about = {
            "params": to_plain({**self.get_params(), "hops": [*self.hops], "lam": [*self.lam]})
        }
        about |= {"flat": self._flat, "status": self.status_, "d": self.n_features_in_}
        about["certificate"] = to_plain(self.certificate_)
        arrays = {"about": np.array(json.dumps(about)), "a": self.a_, "mean_Y": self.b_}
        arrays |= {"train": self.train_, **self.fixed_}
        arrays |= {} if self.classes_ is None else {"classes": self.classes_}
        write_npz(Path(path), arrays, "kernel model")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted model that `save` wrote; a damaged file is a `DataError` that says so."""
        stored = Archive(Path(path), "a whole kernel model")
        stored.check_format("kernel model")
        with explained(f"{path} is not a whole kernel model"):
            about = json.loads(str(stored["about"]))
            check_params(cls, about["params"])
            model = cls(**about["params"])
            model.a_, model.b_, model.train_ = (stored[name] for name in ("a", "mean_Y", "train"))
            held = {name: stored[name] for name in stored.keys}
            model.classes_ = held.get("classes")
            names = ("V", "floors", "Z", "scale", "W", "level", "mean", "deviation")
            model.fixed_ = {name: held[name] for name in names if name in held}
            model.certificate_ = from_plain(Certificate, about["certificate"])
            model.status_, model._flat = about["status"], bool(about["flat"])
            model.n_features_in_ = int(about["d"])
            if len(model.a_) != len(model.train_) or len(model.a_) != len(model.fixed_["Z"]):
                raise ValueError("its weights and training nodes do not belong together")
        return model
