"""What is fitted (`Task`), and where and how that is done (`Context`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.backends.cpu.lapack import blas_threads
from herta_gpu.diffusion import Cache, no_cache
from herta_gpu.features import Features, bytes_held, has_hidden_columns
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.more.hidden import Before, Behind
from herta_gpu.more.label_features import cross_fit
from herta_gpu.more.random_features import FLOOR, Layer
from herta_gpu.planning.costs import BLOCK_WIDTH, Sizes, row_copies, worth_reordering
from herta_gpu.planning.plan import Chosen, Decision, Plan, make_plan
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.checkpoint import Checkpoint, fingerprint
from herta_gpu.plumbing.interop import is_sparse
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.reading import mapping_of
from herta_gpu.plumbing.targets import OneHot, Targets
from herta_gpu.problem import UnfoldedMap
from herta_gpu.sparsifier import degree_scores, sparsify

_LABEL_TOL = 1e-12  # relative error of features that labels make, in float64


@dataclass
class Context:
    """Where a fit runs, what it may use, and who hears of it."""

    backend: Backend
    stages: Stages
    callback: Callable[[dict[str, Any]], None] | None = None
    checkpoint: Checkpoint | None = None
    budget: int = 0  # bytes; 0 until there is a plan
    cache: Cache = no_cache  # what was stored before a crash, once there is a plan
    changes: list[Decision] = field(default_factory=list)  # what turned out otherwise than planned

    def __post_init__(self) -> None:
        self.before, self.stages.wait = dict(self.stages.seconds), self.backend.synchronize

    def begin(self, params: dict[str, Any], task: Task, y: Any) -> None:
        """Refuse a checkpoint of anything else, before any work."""
        if self.checkpoint is not None:
            with self.stages("checkpoint"):
                nodes, weights = task.targets.nodes, task.targets.weights
                data = (task.given, task.X, y, nodes, self.checkpoint.split, weights)
                self.checkpoint.begin(fingerprint(params, self.backend, *data))

    def change(self, chosen: Chosen) -> Any:
        """The value chosen, which turned out otherwise than planned."""
        self.changes.append(chosen.decision)
        return chosen.value


@dataclass
class Task:
    """min over W of loss(M H^-1 X W) + ridge/2 ||W||^2, rows in the order in which they are stored.
    `prepare` adds what the plan decides of: the graph in the order in which it is worked on, H, the
    features on the device."""

    settings: Settings
    given: Graph  # the caller's
    X: Any
    targets: Targets
    wanted: Any  # nodes whose outputs are asked for beside those of training
    W_start: Array | None = None  # weights of another model
    units: dict[str, Any] = field(default_factory=dict)  # mean and deviation of given columns
    draw: int = 0  # of a hidden layer

    def prepare(self, run: Context) -> Plan:
        """What will be done; H, the budget and what a checkpoint holds are there from now on."""
        backend, s, c = run.backend, self.settings, self.targets.Y.shape[1]
        with run.stages("order"):
            self.graph, wish = self.given, s.reorder.when
            if backend.whole and wish == "always":
                self.graph = self.given.reordered("communities")
            # Rows of X on disk are read in their own order.
            elif backend.whole and wish == "auto" and not isinstance(self.X, np.memmap):
                pays = worth_reordering(s, self.X.shape[1], c, backend.order_columns)
                self.graph = self.given.in_local_order(backend.communities) if pays else self.given
        self.H = RegularizedLaplacian(self.graph, s.lam, backend, s.dtype)  # I + lam L_hat
        with run.stages("plan"):
            run.budget = backend.plan_budget(s.memory_budget)
            sizes = count_sizes(self.H, self.X, self.targets, s, run.budget, self.wanted.size)
            plan = make_plan(sizes, s, run.budget, reordered=self.graph is not self.given)
            backend.same(plan, "plan")
            threads = Decision(
                "BLAS", f"{blas_threads(sizes.d)} threads", "by features; its threads spin"
            )
            plan = replace(plan, decisions=(*plan.decisions, threads))
        if plan.recipe.way != "factor":
            self.H.factor = None
        self.eval_nodes = self.wanted[: plan.beside]  # all of them, or none
        if run.checkpoint is not None:
            run.checkpoint.claim()  # nothing can be refused any more
            # Blocks of Q hold the rows of these nodes, too: those made for others are not read.
            run.cache = run.checkpoint.on(backend, plan.identity, self.eval_nodes)
        return plan

    def place(self, plan: Plan, run: Context) -> tuple[UnfoldedMap, Any]:
        """A = M H^-1 X and Y on the device; Y need not be whole if runs of it are looked at."""
        s, t, H, backend = self.settings, self.targets, self.H, run.backend
        with run.stages("features"):
            self.features = Features(self.X, backend, self.graph.order, run.budget)
            self.fixed = fixed_parts(self.features, s, self.draw)
            self.features, hidden = with_hidden(self.features, self.fixed, s, t.Y.shape[0])
            self.extra = labels_as_features(H, t.rows, t.Y, s)
        whole = not plan.stored and plan.outputs >= t.Y.shape[1]
        Y = t.Y.on(backend) if isinstance(t.Y, OneHot) and not whole else backend.asarray(t.Y)
        weights = None if t.weights is None else backend.asarray(t.weights)
        loss = LOSSES[s.loss].bind(weights, s.fit_intercept)
        rows = stored_rows(self.graph, t.rows, backend)
        known = (systems_of(H, s) if s.several else None, self.extra)
        A = UnfoldedMap(H, self.features, rows, plan.solve_width, loss, *known)
        A.hidden, A.row_floor = hidden, float(self.fixed.get("row_floor", 0.0))
        return A, Y

    def sample(self, n_samples: int | None, budget: int) -> RegularizedLaplacian:
        """I + lam L_tilde: Algorithm 2 when it was asked for, its cheap relative otherwise."""
        H, s = self.H, self.settings
        if n_samples is None:
            return H
        faithful = s.scores == "sketch"
        return H.on(sparsify(H, n_samples, 0.0, s.scores, faithful, s.seed, budget).graph)


def stored_rows(graph: Graph, nodes: Any, backend: Backend) -> Array:
    """The rows in which the graph stores these nodes of the caller's."""
    inverse = graph.inverse_order()
    return backend.asarray(nodes if inverse is None else inverse[nodes])


def systems_of(H: RegularizedLaplacian, settings: Settings) -> list[RegularizedLaplacian]:
    """What stands for each block of features."""
    made = [H.at(lam) for lam in settings.lams] + [H.power(k) for k in settings.hops]
    return made if settings.several else [H]


def fixed_parts(X: Features, settings: Settings, draw: int = 0) -> dict[str, Any]:
    """What a model holds beside W that is chosen before it is trained, and never changed."""
    found: dict[str, Any] = {}
    if settings.hidden:
        blocks = settings.blocks if settings.hidden_after else 1
        shape = (settings.hidden, settings.hidden_rank, settings.seed, draw, blocks)
        found = vars(Layer.draw(X, *shape)).copy()
    if settings.row_norm:
        squares = float((X.column_norms**2).sum())  # synchronize!
        usual = math.sqrt(squares / max(1, X.shape[0]))
        found["row_floor"] = np.array(FLOOR * (usual or 1.0))
    return found


def with_hidden(
    X: Features, fixed: dict[str, Any], settings: Settings, count: int = 1
) -> tuple[Features, Behind | None]:
    """The features with their hidden layer, if it is before the diffusion; that behind it."""
    if not settings.hidden:
        return X, None
    layer = Layer(**{name: fixed[name] for name in Layer.__dataclass_fields__})
    if settings.hidden_after:
        return X, Behind(layer, X, count)
    return Before(X, layer), None


def labels_as_features(
    H: RegularizedLaplacian, rows: Any, Y: Any, settings: Settings
) -> Features | None:
    """Features that the labels Y of the nodes `rows` make, as they are in storage."""
    if not settings.label_folds:
        return None
    Y = np.asarray(Y)
    Y = np.maximum(Y, 0.0) if settings.loss == "bce" else Y  # -1 there is not known
    exact = RegularizedLaplacian(H.graph, H.lam, H.backend, "float64")
    folds = settings.label_folds
    found = cross_fit(exact, rows, Y, folds=folds, tol=_LABEL_TOL, seed=settings.seed)
    features = Features(found.columns, H.backend, H.graph.order)
    features.off = found.error  # part of what is proven of the fit
    return features


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
        nonzeros=int(backend.total(X.nnz)) if is_sparse(X) else None,
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
        slowness=backend.slowness,
        probe=H.probe if backend.xp is np and backend.whole else None,
        factored=H.factored if backend.xp is np and backend.whole else None,
        effective=lambda: float(backend.total(float(degree_scores(H.graph, H.lam).sum()))),
    )
