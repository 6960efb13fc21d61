"""`HERTA` as scikit-learn wants an estimator: samples are node ids; graph and X stay as they are.

>>> from sklearn.model_selection import GridSearchCV
>>> from herta_gpu import NodeClassifier
>>> from herta_gpu.datasets import load
>>> data = load("digits")
>>> train = data.split["train"]
>>> search = GridSearchCV(NodeClassifier(data.graph, data.X), {"lam": [1.0, 5.0]}, cv=3)
>>> search = search.fit(train, data.y[train])
>>> search.best_estimator_.score(data.split["test"], data.y[data.split["test"]]) > 0.9
True

Without a graph there are no edges, H = I, and samples are rows of features: a linear model like
those of scikit-learn, with a certificate.  scikit-learn itself is imported by whoever calls `fit`,
not with this module.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from herta_gpu.graph import Graph, check_graph
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.checks import check_choice, node_rows
from herta_gpu.plumbing.targets import Estimator, not_fitted
from herta_gpu.prediction import check_probabilities

_PARAMETERS = """Parameters
    ----------
    graph : Graph, optional
        None: no edges.
    X : array or SciPy sparse matrix, (n, d), optional
        Features of all nodes of the graph; samples are node ids then.  None, without a graph:
        samples are rows of features.
    **params
        Those of `HERTA`.

    Attributes
    ----------
    model_ : HERTA
        The fitted model, with its certificate.
    n_features_in_ : int
"""


class _NodeModel(Estimator):
    """What classifier and regressor have in common."""

    loss: str  # parameters are attributes
    class_weight: Any

    def __init_subclass__(cls) -> None:
        cls.__doc__ = (cls.__doc__ or "").replace("{parameters}", _PARAMETERS)

    def __init__(self, graph: Graph | None = None, X: Any = None, **params: Any) -> None:
        self.graph, self.X = graph, X
        unknown = params.keys() - HERTA._defaults().keys()
        if unknown:
            known = ", ".join(HERTA._defaults())
            raise TypeError(f"There is no parameter {min(unknown)!r}; there are: {known}.")
        for name, value in {**HERTA._defaults(), **params}.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        model = repr(HERTA(**self._model_params())).removeprefix("HERTA(").removesuffix(")")
        graph = "" if self.graph is None else repr(self.graph)
        X = "" if self.X is None else f"X {' x '.join(map(str, np.shape(self.X)))}"
        return f"{type(self).__name__}({', '.join(filter(None, (graph, X, model)))})"

    def __sklearn_clone__(self) -> Self:
        return type(self)(self.graph, self.X, **copy.deepcopy(self._model_params()))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def _model_params(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in HERTA._defaults()}

    def _check(self, samples: Any, y: Any, **how: Any) -> tuple[Any, Any]:
        """Samples and targets, by scikit-learn's own checks where samples are rows of features."""
        try:
            from sklearn.utils import check_consistent_length
            from sklearn.utils.validation import check_array, validate_data
        except ImportError as error:
            advice = f'needs scikit-learn ({error}): pip install "herta_gpu[sklearn]".'
            raise ImportError(f"{type(self).__name__} {advice}") from None

        if self.graph is not None:
            check_graph(self.graph)
            if self.X is None:
                raise ValueError(
                    "There is a graph but no X: give the features of all nodes to the constructor, "
                    "and node ids to fit."
                )
        if y is None:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None.")
        if self.X is None:
            samples, y = validate_data(self, samples, y, accept_sparse="csr", **how)
            return samples, y
        check_consistent_length(samples, y)
        return samples, check_array(y, ensure_2d=False, dtype=None, input_name="y")

    def _fit(self, samples: Any, y: Any, sample_weight: Any, **changed: Any) -> Self:
        """Train on rows of features, or on nodes, with some parameters `changed`."""
        from sklearn.utils.validation import _check_sample_weight

        graph, X, rows = self._locate(samples)
        n, weight = graph.num_nodes, sample_weight
        weight = None if weight is None else _check_sample_weight(weight, y)
        y, rows, weight = _each_node_once(y, rows, weight)
        rows = node_rows(rows, n, "samples")
        target = np.full((n, *y.shape[1:]), -1, dtype=y.dtype)
        target[rows] = y
        if weight is not None:
            weight = np.bincount(rows, weight, minlength=n)
        model = HERTA(**{**self._model_params(), **changed})
        self.model_ = model.fit(graph, X, target, rows, sample_weight=weight)
        self.n_iter_ = max(1, len(self.model_.history_) - 1)
        if self.X is not None:
            self.n_features_in_ = self.model_.n_features_in_
        return self

    def _locate(self, samples: Any) -> tuple[Graph, Any, Any]:
        """(graph, features of its nodes, the nodes that the samples are)."""
        X = samples if self.X is None else self.X
        n, no_edges = np.shape(X)[0], np.zeros((2, 0), dtype=np.int64)
        graph = Graph.from_edges(no_edges, n) if self.graph is None else self.graph
        if self.X is None:
            return graph, X, np.arange(n)
        nodes = np.asarray(samples)
        nodes = nodes[:, 0] if nodes.ndim == 2 and nodes.shape[1] == 1 else nodes
        if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
            raise ValueError(
                "Samples must be node ids, one whole number each, as graph and X were given to "
                f"the constructor, but they are {nodes.dtype} of shape {nodes.shape}."
            )
        return graph, X, nodes

    def _outputs(self, method: str, samples: Any) -> Any:
        if not hasattr(self, "model_"):
            raise not_fitted(self)
        if self.X is None:
            from sklearn.utils.validation import validate_data

            samples = validate_data(self, samples, accept_sparse="csr", reset=False)
        graph, X, nodes = self._locate(samples)
        # Each node once: a 0 or 1 for every node would be taken for a mask.
        rows, at = np.unique(nodes, return_inverse=True)
        return getattr(self.model_, method)(graph, X, rows)[at]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of a classifier; R^2 of a regressor, the mean over the outputs."""
        from sklearn.metrics import accuracy_score, r2_score

        measure = accuracy_score if hasattr(self, "classes_") else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))  # type: ignore[attr-defined]


# scikit-learn and people look for the parameters of `HERTA` in the signature.
_own, _of_model = (inspect.signature(kind).parameters for kind in (_NodeModel.__init__, HERTA))
_NodeModel.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_own["self"], _own["graph"], _own["X"], *_of_model.values()]
)


class NodeClassifier(_NodeModel):
    """A classifier of nodes for `GridSearchCV`, `cross_val_score` and their like.

    {parameters}    classes_ : array (c,)

    Notes
    -----
    `clone` shares graph and X with the original.  Labels may be what scikit-learn takes for labels:
    -1 is one, too.  `predict_proba` is there for loss="ce" only.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import Graph, NodeClassifier
    >>> rng = np.random.default_rng(0)
    >>> graph = Graph.from_edges(rng.integers(0, 300, (2, 900)), num_nodes=300)
    >>> X = rng.standard_normal((300, 5))
    >>> y = np.where(X[:, 0] > 0, "yes", "no")
    >>> model = NodeClassifier(graph, X, lam=0.1).fit(np.arange(200), y[:200])
    >>> model.classes_.tolist(), model.decision_function([250, 251, 252]).shape
    (['no', 'yes'], (3,))
    """

    _estimator_type = "classifier"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on the nodes X (or, without a graph, on these rows of features)."""
        samples, y = self._check(X, y)
        from sklearn.utils.multiclass import check_classification_targets, type_of_target
        from sklearn.utils.validation import column_or_1d

        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if type_of_target(y) == "continuous":
            raise ValueError("Unknown label type: continuous. Classes are not real numbers.")
        self.classes_, codes = np.unique(y, return_inverse=True)
        by_class = self.class_weight
        if isinstance(by_class, Mapping):  # the model knows classes by their numbers
            by_class = {k: by_class.get(name, 1.0) for k, name in enumerate(self.classes_.tolist())}
        codes = codes.astype(np.int64)
        return self._fit(samples, codes, sample_weight, class_weight=by_class)

    def predict(self, X: Any) -> Any:
        """The class of each sample."""
        codes = self._outputs("predict", X)
        return self.classes_[codes]

    def decision_function(self, X: Any) -> Any:
        """Scores (n_samples, c); of two classes (n_samples,), positive for the second one."""
        return self._outputs("decision_function", X)

    @property
    def predict_proba(self) -> Any:
        """Probabilities (n_samples, c), for loss="ce"; other scores are none."""
        try:
            check_probabilities(self.loss)
        except ValueError as error:
            raise AttributeError(str(error)) from None

        def predict_proba(X: Any) -> Any:  # scikit-learn's scorers ask for it by this name again
            return self._outputs("predict_proba", X)

        return predict_proba


class NodeRegressor(_NodeModel):
    """A regressor of nodes for `GridSearchCV`, `cross_val_score` and their like.

    {parameters}
    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.model_selection import cross_val_score
    >>> from herta_gpu import Graph, NodeRegressor
    >>> rng = np.random.default_rng(0)
    >>> graph = Graph.from_edges(rng.integers(0, 300, (2, 900)), num_nodes=300)
    >>> X = rng.standard_normal((300, 5))
    >>> nodes, y = np.arange(300), X @ [1.0, 2.0, 3.0, 4.0, 5.0]
    >>> scores = cross_val_score(NodeRegressor(graph, X, lam=0.01), nodes, y)
    >>> bool(scores.min() > 0.99)
    True
    """

    _estimator_type = "regressor"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on the nodes X (or, without a graph, on these rows of features)."""
        check_choice("loss", self.loss, ("mse",))
        samples, y = self._check(X, y, multi_output=True, y_numeric=True)
        return self._fit(samples, np.asarray(y, dtype=np.float64), sample_weight)

    def predict(self, X: Any) -> Any:
        """The output of each sample, shaped as y was."""
        return self._outputs("predict", X)


def _each_node_once(y: Any, rows: Any, weight: Any) -> tuple[Any, Any, Any]:
    """A node that was drawn several times, as a bootstrap does, counts as often: by its weight."""
    nodes, first, times = np.unique(rows, return_index=True, return_inverse=True)
    if nodes.shape[0] == rows.shape[0]:
        return y[first], nodes, None if weight is None else weight[first]
    if not np.array_equal(y, y[first][times]):
        raise ValueError("A node is given twice, with different targets: give one of them.")
    total = np.bincount(times, np.ones(rows.shape[0]) if weight is None else weight)
    return y[first], nodes, total
