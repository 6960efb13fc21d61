"""What is fitted: the data that a fit is given, and the numbers that its plan depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Backend
from herta_gpu.features import bytes_held, has_hidden_columns
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.planning.costs import BLOCK_WIDTH, Sizes, row_copies, worth_reordering
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.reading import mapping_of
from herta_gpu.plumbing.targets import Targets
from herta_gpu.sparsifier import degree_scores


def order_for_work(graph: Graph, X: Any, c: int, settings: Settings, backend: Backend) -> Graph:
    """`graph` in the order in which it is worked on."""
    if not backend.whole:
        return graph
    if settings.reorder.when != "auto":
        return graph.reordered("communities") if settings.reorder.when == "always" else graph
    # Rows of X on disk are read in their own order.
    pays = worth_reordering(settings, X.shape[1], c, backend.order_columns)
    if isinstance(X, np.memmap) or not pays:
        return graph
    return graph.in_local_order(backend.communities)


def count_sizes(
    H: RegularizedLaplacian,
    X: Any,
    targets: Targets,
    settings: Settings,
    budget: int,
    evaluated: int = 0,
) -> Sizes:
    """The numbers that a plan depends on; outputs of `evaluated` further nodes are wanted."""
    backend, c = H.backend, targets.Y.shape[1]
    return Sizes(
        n=int(backend.total(H.n)),
        m=H.graph.num_edges,
        d=settings.features(X.shape[1], c),
        c=c,
        n_train=targets.Y.shape[0],
        word=np.dtype(settings.dtype).itemsize,
        X_bytes=int(backend.total(bytes_held(X, backend, budget))),
        hidden=has_hidden_columns(X, targets.rows, backend),
        nonzeros=int(backend.total(X.nnz)) if sp.issparse(X) else None,
        X_bytes_at=lambda other: bytes_held(X, backend, other),
        beside=int(backend.total(evaluated)),
        copies=row_copies(settings, targets.weights is not None),
        card=backend.xp is not np,
        weighted=H.graph.weights is not None,
        mapped=backend.xp is np and mapping_of(H.graph.indices) is not None,
        half=settings.dtype == "float32" and backend.half_pays(H.laplacian(), BLOCK_WIDTH),
        ranks=backend.ranks if backend.whole else 1,
        parts=1 if backend.whole else backend.ranks,
        curvature=LOSSES[settings.loss].start_curvature(c),
        top=H.lambda_max,
        can_sample=backend.samples,
        effective=lambda: float(backend.total(float(degree_scores(H.graph, H.lam).sum()))),
    )
