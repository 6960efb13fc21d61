"""What a model says before its fit (a plan) and after it: outputs, labels, scores, a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Self

import numpy as np

from herta_gpu.backends import backend_for, get_backend
from herta_gpu.backends.base import Array, Backend
from herta_gpu.certificate import Certificate, Spectrum
from herta_gpu.features import Features, bytes_held
from herta_gpu.graph import Graph, check_graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.planning.costs import Sizes, row_copies
from herta_gpu.planning.forecast import Card
from herta_gpu.planning.memory import dealt_width, outputs_at_once
from herta_gpu.planning.plan import Decision, Plan, make_plan
from herta_gpu.planning.settings import Settings, strengths
from herta_gpu.plumbing.bundles import takes_bundles
from herta_gpu.plumbing.checks import (
    check_count,
    check_rows,
    check_scale,
    node_rows,
    parse_bytes,
)
from herta_gpu.plumbing.files import check_target
from herta_gpu.plumbing.interop import as_array, as_matrix, in_kind_of, on_device, to_host
from herta_gpu.plumbing.models import read_model, write_model
from herta_gpu.plumbing.targets import (
    Estimator,
    accuracy_or_r2,
    check_scored,
    label_accuracy,
    not_fitted,
)
from herta_gpu.prediction import Outputs, check_probabilities, probabilities
from herta_gpu.task import labels_as_features, stored_rows

# What a fit leaves and a file keeps, beside the weights and classes.
_FITTED: dict[str, Any] = {
    "certificate_": Certificate, "status_": str, "plan_": Plan, "spectrum_": Spectrum | None,
    "changes_": list[Decision], "device_": Decision,
    "history_": list[dict[str, Any]], "warm_history_": list[dict[str, Any]],
    "stages_": dict[str, float], "X_reads_": dict[str, Any], "_flat": bool,
}  # fmt: skip


def on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs on the stream of the device that is chosen for its graph and X.

    What fails on one process of the graph fails on all of them, with the same sentence.
    """

    @wraps(method)
    def wrapped(self: Model, graph: Graph, X: Any = None, *args: Any, **kwargs: Any) -> Any:
        check_graph(graph)
        with graph.together(), self._device(graph, X).working():
            return method(self, graph, X, *args, **kwargs)

    return wrapped


class Model(Estimator):
    """Everything of `HERTA` but its fit."""

    lam: Any
    alpha: float | None
    loss: str
    device: str
    dtype: str
    fit_intercept: bool
    W_: Any
    intercept_: Any
    classes_: Any
    train_: Any
    labels_: Any
    n_features_in_: int
    _flat: bool

    def plan(
        self,
        n: int,
        m: int,
        d: int,
        c: int,
        n_train: int,
        X_nonzeros: int | None = None,
        device_memory: int | str | None = None,
        mapped_graph: bool = False,
    ) -> Plan:
        """What `fit` would do with data of this size, before any of it is loaded.

        Parameters
        ----------
        n, m, d, c, n_train : int
            Nodes, undirected edges, features, outputs and training nodes.
        X_nonzeros : int, optional
            Of a sparse X; None: X is dense.
        device_memory : int or str, optional
            Plan for a GPU with so many bytes (or "80GB"), which need not be there.
        mapped_graph : bool
            The graph comes from `Graph.open`; on the CPU its neighbours may then stay on disk.

        Examples
        --------
        >>> from herta_gpu import HERTA
        >>> plan = HERTA(lam=20.0, memory_budget="64GB").plan(10**6, 10**7, 128, 40, 5 * 10**5)
        >>> plan.strategy, plan.memory["Q"]
        ('direct', 512000000)
        """
        settings = self._settings()
        sizes, free = self._outlined(n, m, d, c, n_train, X_nonzeros, device_memory, mapped_graph)
        return make_plan(sizes, settings, settings.budget(free))

    def _outlined(
        self,
        n: int,
        m: int,
        d: int,
        c: int,
        n_train: int,
        X_nonzeros: int | None,
        device_memory: int | str | None,
        mapped: bool = False,
    ) -> tuple[Sizes, int]:
        """Sizes of data that are not there, and the bytes that are free for them."""
        for name, value in (("n", n), ("d", d), ("c", c), ("n_train", n_train)):
            check_count(name, value)
        check_count("m", m, least=0)
        if X_nonzeros is not None:
            check_count("X_nonzeros", X_nonzeros, least=0)
        if n_train > n:
            raise ValueError(f"n_train is {n_train:,} but there are {n:,} nodes.")
        settings = self._settings()
        word, X_bytes = np.dtype(settings.dtype).itemsize, 24 * (X_nonzeros or 0)
        sizes = Sizes(
            n, m, settings.features(d, c), c, n_train, word, X_bytes, nonzeros=X_nonzeros,
            copies=row_copies(settings, settings.weighted), top=1 + 2 * settings.lam,
            curvature=LOSSES[settings.loss].start_curvature(c),
        )  # fmt: skip
        if device_memory is None:
            backend = self._checked()
            mapped = mapped and backend.xp is np
            return replace(sizes, mapped=mapped), backend.memory_available()
        card = Card(parse_bytes(device_memory))
        X_bytes = X_bytes or card.X_bytes(n, d, settings.budget(card.memory))
        return replace(sizes, X_bytes=X_bytes, half=word == 4, card=True), card.memory

    @takes_bundles()
    @on_its_device
    def transform(
        self, graph: Graph | Any, X: Any = None, idx: Any = None, out: str | Path | None = None
    ) -> Any:
        """Z* = H^-1 X W (n, c) and the intercept, to a relative H-norm error of 1e-6.

        On a GPU if X is.

        Parameters
        ----------
        graph, X
            As in `fit`; the graph may be another one.
        idx : ids or a mask, optional
            The nodes to give the rows of; no array of (n, c) is made then.
        out : path, optional
            A new .npy file for outputs that do not fit into memory; it is given back as a map.
        """
        if out is not None:
            check_target(out)
        Z = self._outputs(graph, X)
        rows = self._stored_rows(graph, idx, Z.H.backend)
        if out is not None:
            return Z.write(rows, Path(out), self.dtype)
        found = Z.of(rows, self.dtype)
        return in_kind_of(found if on_device(X) else to_host(found, Z.H.backend), X)

    @takes_bundles()
    @on_its_device
    def predict(
        self, graph: Graph | Any, X: Any = None, idx: Any = None, out: str | Path | None = None
    ) -> Any:
        """Class labels, or the model's output for float targets; of the nodes `idx` or of all.

        For loss="bce" zeros and ones.  Labels need no array of (n, c).  `out` is a new .npy file
        that takes the outputs as they come, as in `transform`.  `undecided_` counts the nodes whose
        two best classes are closer than the error of the solve.
        """
        classes = self._fitted().classes_
        if classes is None:
            Z = self.transform(graph, X, idx, out)
            Z = (Z > 0) * 1 if self.loss == "bce" else Z
            return Z[:, 0] if self._flat else Z
        if out is not None:
            check_target(out)
        outputs = self._outputs(graph, X)
        backend = outputs.H.backend
        rows = self._stored_rows(graph, idx, backend)
        with nullcontext() if out is None else outputs.file(rows, Path(out), self.dtype) as scores:
            best, self.undecided_ = outputs.labels(rows, self.dtype, scores)
        if classes.dtype.kind == "U":
            return classes[to_host(best, backend)]  # neither a GPU nor a tensor holds text
        found = backend.asarray(classes)[best] if on_device(X) else classes[to_host(best, backend)]
        return in_kind_of(found, X)

    @takes_bundles()
    def decision_function(self, graph: Graph | Any, X: Any = None, idx: Any = None) -> Any:
        """The scores by which `predict` decides, (n, c); of two classes their difference, (n,).

        A positive difference is the second one of `classes_`, as in scikit-learn.
        """
        Z = self.transform(graph, X, idx)
        if self.classes_ is None:
            return Z[:, 0] if self._flat else Z
        return Z[:, 1] - Z[:, 0] if Z.shape[1] == 2 else Z

    @takes_bundles()
    @on_its_device
    def predict_proba(self, graph: Graph | Any, X: Any = None, idx: Any = None) -> Any:
        """Probabilities of the classes, (n, c), for cross entropy, in the order of `classes_`.

        For loss="bce" each label's own.

        Examples
        --------
        >>> from herta_gpu import HERTA
        >>> from herta_gpu.datasets import load
        >>> data = load("digits")
        >>> model = HERTA(lam=5.0, loss="ce", ridge=0.1)
        >>> model = model.fit(data.graph, data.X, data.y, data.split["train"])
        >>> model.predict_proba(data.graph, data.X, [0, 1]).sum(axis=1).round(4).tolist()
        [1.0, 1.0]
        """
        self._fitted()
        check_probabilities(self.loss)
        backend = self._device(graph, X)
        Z = as_array("Z", self.transform(graph, X, idx), backend)
        xp = backend.xp if on_device(Z) else np
        return in_kind_of(probabilities(xp, Z, self.loss), X)

    def _outputs(self, graph: Graph, X: Any) -> Outputs:
        """Z* of this graph and these features, not computed yet.

        Never from the fit's Z, near as it is: a model that was stored and read again gives the same
        bits as this one.
        """
        self._fitted()
        backend, settings = self._device(graph, X), self._settings()
        X = as_matrix(X, backend)
        largest = check_rows("X", X, graph).largest
        if X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]:,} features but the model was fitted with "
                f"{self.n_features_in_:,}."
            )
        check_scale(largest, fitted=True)
        H = RegularizedLaplacian(graph, settings.lam, backend, settings.dtype)
        budget, c = settings.budget(backend.memory_everywhere()), self.W_.shape[1]
        features = Features(X, backend, graph.order, budget)
        labels = settings.features(0, c)
        word, held = np.dtype(settings.dtype).itemsize, bytes_held(X, backend, budget)
        sizes = Sizes(graph.num_nodes, graph.num_edges, X.shape[1], c, 0, word, held)
        width = -int(backend.largest(-outputs_at_once(sizes, budget, X.shape[1], labels)))
        width = dealt_width(c, width, backend.ranks if backend.whole else 1)
        systems = [H.at(lam) for lam in settings.lams] if settings.several else [H]
        W, b = backend.asarray(self.W_), backend.asarray(self.intercept_)
        extra = None
        if settings.label_folds:
            if int(self.train_.max()) >= graph.nodes_of_all:
                raise ValueError(
                    "The model has features of labels, which belong to nodes that are not in this "
                    "graph: give the graph that it was fitted on, or that graph with more nodes."
                )
            rows = graph.rows_of(self.train_)
            backend.train_on(rows)
            extra = labels_as_features(H, rows, self.labels_, settings)
        return Outputs(systems, features, W, width, b if self.fit_intercept else None, extra)

    def _stored_rows(self, graph: Graph, idx: Any, backend: Backend) -> Array | None:
        """Where the graph stores the nodes `idx`; None: all rows, as they are stored."""
        if idx is None and graph.order is None:
            return None
        return stored_rows(graph, node_rows(to_host(idx, backend), graph.num_nodes), backend)

    @takes_bundles("idx")
    @on_its_device
    def score(self, graph: Graph | Any, X: Any = None, y: Any = None, idx: Any = None) -> float:
        """Accuracy on the labelled nodes of `idx` (default all), or R^2 for float targets.

        `score(data)` of a PyG `Data`, or of a `Dataset`, is that of its test nodes, if it has any.

        For loss="bce" the share of right labels among all that are known.
        """
        self._fitted()
        backend = self._device(graph, X)
        y, idx = (to_host(a, backend) for a in (y, idx))
        check_scored(y, graph.num_nodes)  # before the solve
        rows = node_rows(idx, graph.num_nodes)
        predicted = to_host(self.predict(graph, X, rows), backend)
        if self.loss == "bce":
            return label_accuracy(predicted, y, rows, backend.total)
        return accuracy_or_r2(predicted, y, rows, self.classes_, backend.total)

    def save(self, path: str | Path) -> None:
        """Write the fitted model to exactly this path, in NumPy's .npz format and without pickles.

        `load` gives back everything that `fit` left: weights, parameters, certificate, status,
        plan, histories, spectrum, stages and passes over X.

        Examples
        --------
        >>> import tempfile
        >>> from herta_gpu import HERTA
        >>> from herta_gpu.datasets import load
        >>> data = load("digits")
        >>> model = HERTA(lam=5.0, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
        >>> path = tempfile.mkdtemp() + "/model.npz"
        >>> model.save(path)
        >>> again = HERTA.load(path)
        >>> again, bool((again.W_ == model.W_).all()), again.history_ == model.history_
        (HERTA(lam=5.0, ridge=0.1), True, True)
        """
        self._fitted()
        write_model(self, path, _FITTED)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted model that `save` wrote; a damaged file is a `DataError` that says so."""
        return read_model(cls, path, _FITTED)

    def _lams(self) -> tuple[float, ...]:
        return strengths(self.lam, self.alpha)

    def _settings(self) -> Settings:
        """The parameters, checked; a sentence says what is wrong with them."""
        return Settings.of(self.get_params())

    def _checked(self, crew: Any = None) -> Backend:
        """The device, if the parameters are right and it is there; each process of a `crew` has
        its own."""
        return get_backend(self._settings().device, *([] if crew is None else [crew]))

    def _device(self, graph: Graph, X: Any) -> Backend:
        """The device for these data, if the parameters are right and it is there."""
        return backend_for(self._settings().device, graph, X)

    def __getattr__(self, name: str) -> Any:
        """Say how to get what only some fits leave."""
        if name in ("loo_", "leverage_", "variance_"):
            raise AttributeError(f"There is no {name}: fit with loo=True (and strategy direct).")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _fitted(self) -> Self:
        if not hasattr(self, "W_"):
            raise not_fitted(self)
        return self
