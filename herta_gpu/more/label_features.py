"""Labels of other nodes as features, cross-fitted: no label speaks for itself.

The training nodes are cut into k folds at random, whatever their labels.  A node of fold j gets its
row of H^-1 M_(-j)^T Y, to which the labels of its own fold add nothing; a node outside the training
nodes gets the mean over the folds, which is (k - 1)/k of H^-1 M^T Y: what a node sees is of the
same size on both sides.  Every lam gives such a block of c columns, all of them from one sequence
of products (`sweep`).

They are appended to the rows of the features *after* these were diffused: another diffusion would
carry a label home.  So the problem stays convex in W, and the certificate of the fit is as before:
a fit makes them in float64, and what they may be off by counts as what the solves for Q leave does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends import get_backend
from herta_gpu.graph import Graph, check_whole
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.sweep import Series, inverse_rows
from herta_gpu.planning.settings import LABEL_FOLDS, LABEL_LAMS, LABEL_WIDTH
from herta_gpu.plumbing.checks import check_count, check_dtype, check_lam, check_positive
from herta_gpu.plumbing.targets import make_targets


class LabelFeatures(NamedTuple):
    """The columns and what is known of them."""

    columns: Any  # n x (lams c) in the caller's order: block after block, one for each lam
    folds: Any  # (n,) the fold of each training node, -1 elsewhere
    error: float  # no column is further than this from its exact one, in the 2-norm
    classes: Any | None = None


def label_features(
    graph: Graph,
    y: Any,
    train: Any = None,
    lams: Sequence[float] = LABEL_LAMS,
    folds: int = LABEL_FOLDS,
    tol: float = 1e-6,
    random_state: int = 0,
    device: str = "auto",
    dtype: str = "float32",
) -> LabelFeatures:
    """Cross-fitted features of the labels of the nodes `train`, for every node.

    Parameters
    ----------
    graph : Graph
    y, train
        As in `HERTA.fit`; nothing of y is looked at outside `train`.
    lams : sequence of float
        One block of c columns for each.
    folds : int
        At least 2, at most one for each training node.
    tol : float
        Bound of the error of a column, relative to that of its labels, in the 2-norm; rounding
        comes on top of it in `error`.
    random_state : int
        Of the folds.
    device, dtype : str
        As in `HERTA`.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.datasets import load
    >>> from herta_gpu.more.label_features import label_features
    >>> data = load("digits")
    >>> found = label_features(data.graph, data.y, data.split["train"], lams=[5.0, 50.0])
    >>> found.columns.shape, found.folds[data.split["test"]].max(), found.error < 0.05
    ((1797, 20), np.int64(-1), True)
    """
    check_whole(graph, "label_features (but not that of HERTA)")
    check_count("folds", folds, least=2)
    check_positive("tol", tol)
    if len(lams) == 0:
        raise ValueError("lams is empty: give at least one lam for the label features.")
    for lam in lams:
        check_lam(lam)
    targets = make_targets(y, train, graph.num_nodes, "mse")
    H = RegularizedLaplacian(graph, 1.0, get_backend(device), check_dtype(dtype))
    Y = np.asarray(targets.Y)
    found = cross_fit(H, targets.rows, Y, lams, folds, tol, random_state)
    return found._replace(classes=targets.classes)


def cross_fit(
    H: RegularizedLaplacian,
    rows: Any,
    Y: Any,
    lams: Sequence[float] = LABEL_LAMS,
    folds: int = LABEL_FOLDS,
    tol: float = 1e-6,
    seed: int = 0,
) -> LabelFeatures:
    """The features for targets Y of the nodes `rows`; the lam of H is not used.

    A fold is a block of columns of its own: no bit of it depends on the labels of that fold.
    """
    graph, backend, (count, c) = H.graph, H.backend, Y.shape
    if folds > count:
        raise ValueError(f"There are {count} training nodes but {folds} folds: use fewer folds.")
    # The worst lam; rounding, and that of the sum over folds, included.
    series = [Series.of(lam, H.laplacian().lambda_max, tol) for lam in lams]
    width, unit = min(c, LABEL_WIDTH), float(np.finfo(H.dtype).eps)
    worst = max(s.truncation + s.rounding(H, H.dtype, width) for s in series) + 8 * unit
    error = float(np.sqrt((Y * Y).sum(axis=0).max())) * worst
    # Sizes of folds differ by one at most; labels play no part.
    drawn = np.random.default_rng([seed, 5]).permutation(np.arange(count) % folds)
    n, fold_of, Y = graph.num_nodes, backend.own(drawn), backend.own(Y)
    everyone = np.full(n, -1)
    everyone[rows] = fold_of
    at = graph.stored(np.arange(n))
    out = np.zeros((n, len(lams), c), dtype=H.dtype)
    for j in range(folds):
        own, outside = everyone == j, everyone < 0
        B = np.zeros((n, c), dtype=H.dtype)
        B[at[rows[fold_of != j]]] = Y[fold_of != j]
        for J in (slice(a, min(a + LABEL_WIDTH, c)) for a in range(0, c, LABEL_WIDTH)):
            block = backend.asarray(np.ascontiguousarray(B[:, J]))
            found = backend.to_numpy(inverse_rows(H, lams, block, None, tol))
            for i, F in enumerate(found):
                out[own, i, J] = F[at[own]]
                out[outside, i, J] += F[at[outside]] / folds
            del found, F  # as large as all that the next block needs
    return LabelFeatures(out.reshape(n, len(lams) * c), everyone, error)
