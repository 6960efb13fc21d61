"""Algorithm 1 of the paper: HERTA, in its order.

Where the paper prints something that does not work (masks, ranks, tolerances, the returned
weights), the correction stands beside the line it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from herta_gpu.backends import chosen_backend, shared
from herta_gpu.backends.base import Array, Backend
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.blockwise import trained
from herta_gpu.graph import Graph
from herta_gpu.model import Model, on_its_device
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.planning.memory import block_width
from herta_gpu.planning.plan import Decision
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.bundles import takes_bundles
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import (
    BudgetError,
    check_choice,
    check_columns,
    check_rows,
    check_scale,
    node_rows,
)
from herta_gpu.plumbing.interop import as_matrix, to_host
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.targets import (
    joint_targets,
    make_targets,
)
from herta_gpu.steps import (
    at_zero,
    on_stored_rows,
    preconditioned,
    sampled,
    start,
)
from herta_gpu.task import Context, Task
from herta_gpu.training import Preconditioned, Training

_WITH_THE_FIT = ("outputs_", "loo_", "leverage_", "variance_")  # no file keeps them


def _names_what_fits(fit: Callable[..., HERTA]) -> Callable[..., HERTA]:
    """A fit that runs out of memory says which block of columns would have fitted."""

    @wraps(fit)
    def wrapped(self: HERTA, graph: Graph, X: Any = None, *args: Any, **kwargs: Any) -> HERTA:
        try:
            return fit(self, graph, X, *args, **kwargs)
        except BudgetError:
            raise  # it says so already
        except MemoryError as error:
            budget = self._settings().budget(self._device(graph, X).memory_available()) // 2
            width = max(1, block_width(graph.num_nodes, BLOCK_WIDTH, self.dtype, budget))
            advice = f"Blocks of {width} columns would fit: set memory_budget={budget}."
            raise MemoryError(f"{error} {advice}") from error

    return wrapped


class HERTA(Model):
    """Train the unfolded GNN Z*(W) = (I + lam L_hat)^-1 X W to a certified optimum.

    Parameters
    ----------
    lam : float or list of floats
        Weight of the graph in the energy (equation 4.1).  Several, like [0, 1, 20], make blocks of
        features [X, H_1^-1 X, H_20^-1 X], each with weights of its own: 0 is X itself.
    alpha : float, optional
        APPNP's teleport probability in place of lam: lam = 1/alpha - 1.
    loss : {"mse", "ce", "bce"}
        1/2 ||Z - Y||^2, cross entropy, or binary cross entropy for several labels of 0 or 1 per
        node; summed over the training rows.
    optimizer : {"cg", "gd", "momentum", "adam", "lbfgs"}
        On preconditioned weights; "gd" is the paper's loop.
    ridge : float
        Adds ridge/2 ||W||^2 to the objective.
    tol : float
        Stop when the relative suboptimality is certified to be at most this.
    max_iter : int
        Outer steps.
    strategy : {"auto", "herta", "direct"}
        "herta" iterates with two block solves per gradient; "direct" solves tightly once for
        H^-1 X (or H^-1 M^T) and trains on that; "auto" takes the cheaper.
    sparsify : "auto", bool, int, "degree" or "mixed"
        Build P on a sampled graph: if that is cheaper, always (Algorithm 2), never, or with so
        many samples (for more than 100 per edge the graph itself is taken, which says as much).
        "degree": always, by scores that the degrees give for nothing, as "auto" does.  "mixed" is
        the appendix's rule: it also iterates on a sampled graph when
        n_lambda / tol <= m log(1 / tol), and finishes on the full one.
    sketch : "auto", bool or int
        Build P from an SRHT of Q: if memory asks for it, always, never, or with so many rows.
    precondition : bool
        False is the standard training that the paper compares with.
    device : {"auto", "cpu", "cuda", "cpu-scipy"}
        "auto": CUDA where it is usable, but for data so small that the CPU is done before a GPU has
        compiled its kernels; "cpu-scipy": the CPU without compiled kernels.
    dtype : {"float32", "float64"}
        Of the large blocks; everything d x d is float64.
    memory_budget : int or str, optional
        Bytes or "8GB"; by default 80% of what is free.
    random_state : int
    verbose : bool
        Show stages and steps on standard error.
    learning_rate : float or "spectral", optional
        For "gd" instead of exact line search ("spectral": 2/(a+b) from Lanczos), for "adam"
        (default 0.01) and "momentum" (default: optimal for the estimated spectrum).
    reorder : "auto" or bool
        Store the graph by community while fitting: if that saves time, always, or never.  It
        changes nothing but rounding.
    fit_intercept : bool
        Add a constant to each output, undiffused and without a ridge: a column of ones in X would
        be diffused, and H^-1 1 is not 1.
    label_features : int or bool
        Folds (True: 5) of features that the labels of the training nodes make, for lam 1, 5, 20
        and 100, cross-fitted so that no label speaks for itself (`herta_gpu.more.label_features`).
        They stand beside the diffused X, as the last rows of `W_`.  0: none.
    class_weight : dict or "balanced", optional
        Weights of the rows of each class in the loss; "balanced": as much of each class.

    Attributes
    ----------
    W_ : array (d, c)
        With several lam (len(lam) d, c), block below block.
    intercept_ : array (c,)
        Zeros without `fit_intercept`.
    train_ : array (n_train,)
        The training nodes, in the order of their ids.
    labels_ : array (n_train, c) or None
        Their labels, where those make features.
    classes_ : array (c,) or None for float targets
    history_ : list of dict
        One per outer step: step, loss (the objective), loss_error (it is right up to this much),
        grad_norm, certificate, inner_iterations, seconds.  The first entry is the starting point.
    warm_history_ : list of dict
        The same for steps on a cheaper model that went first (a stored A, or a sampled graph);
        they are marked by ``warm`` and count neither as outer steps nor towards max_iter.
    certificate_ : Certificate
    status_ : str
        "certified": the relative gap is proven to be at most tol, for the problem as given.
        "certified-reduced": the same over fewer features, as the others could not be told from
        combinations of them; see ``certificate_.kept``.  "converged": nothing is left to gain by
        all signs, but that is not proven.  "max_iter", "stagnated" (rounding forbids more) or
        "diverged".
    device_ : (what, choice, why)
        Where it was fitted, and why there.
    plan_ : Plan
    changes_ : list of (what, choice, why)
        What turned out otherwise than planned.
    outputs_ : array (len(evaluate), c)
        Z* at the nodes `evaluate` of the last `fit`, if it was given; no file keeps it.
    loo_ : array (n_train, c)
        After ``fit(..., loo=True)``: for each node of `train_` the outputs of the model that was
        trained without it (NaN where only that node decides some weight); no file keeps it.
    leverage_ : array (n_train,)
        With it: how much the output of each training node follows its own target, from 0 to 1.
    variance_ : array (len(evaluate), c)
        With it, if there is memory for the rows a of H^-1 X at the nodes `evaluate`:
        sigma^2 (1 + a^T P^-1 a), sigma^2 the variance of the residuals: of a target at these
        nodes, if the model is right.  Infinite (NaN where
        the residuals are 0) for fewer training nodes than features without a ridge.
    spectrum_ : Spectrum or None
        What is known of the preconditioned Hessian; ``kappa`` bounds its condition number.
    stages_ : dict of stage to seconds
    X_reads_ : dict
        Of a dense X: passes over it, and bytes and seconds of reading it from its file (0 if it
        was in memory).

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu import HERTA, Graph
    >>> rng = np.random.default_rng(0)
    >>> g = Graph.from_edges(rng.integers(0, 300, (2, 900)), num_nodes=300)
    >>> X, y = rng.standard_normal((300, 5)), rng.integers(0, 3, 300)
    >>> model = HERTA(lam=20.0).fit(g, X, y, train=np.arange(200))
    >>> model.status_, model.certificate_.value <= 1e-6, model.W_.shape
    ('certified', True, (5, 3))
    """

    def __init__(
        self,
        lam: float | Sequence[float] = 1.0,
        alpha: float | None = None,
        loss: str = "mse",
        optimizer: str = "cg",
        ridge: float = 0.0,
        tol: float = 1e-6,
        max_iter: int = 100,
        strategy: str = "auto",
        sparsify: bool | int | str = "auto",
        sketch: bool | int | str = "auto",
        precondition: bool = True,
        device: str = "auto",
        dtype: str = "float32",
        memory_budget: int | str | None = None,
        random_state: int = 0,
        verbose: bool = False,
        learning_rate: float | str | None = None,
        reorder: bool | str = "auto",
        fit_intercept: bool = False,
        class_weight: Mapping[Any, float] | str | None = None,
        label_features: int | bool = 0,
    ) -> None:
        self.lam, self.alpha, self.loss, self.optimizer = lam, alpha, loss, optimizer
        self.ridge, self.tol, self.max_iter = ridge, tol, max_iter
        self.strategy, self.sparsify, self.sketch = strategy, sparsify, sketch
        self.precondition, self.device, self.dtype = precondition, device, dtype
        self.memory_budget, self.random_state, self.verbose = memory_budget, random_state, verbose
        self.learning_rate, self.reorder = learning_rate, reorder
        self.fit_intercept, self.class_weight = fit_intercept, class_weight
        self.label_features = label_features

    @takes_bundles("train")
    @on_its_device
    @_names_what_fits
    def fit(
        self,
        graph: Graph,
        X: Any = None,
        y: Any = None,
        train: Any = None,
        callback: Callable[[dict[str, Any]], None] | None = None,
        checkpoint: Checkpoint | None = None,
        stages: Stages | None = None,
        evaluate: Any = None,
        sample_weight: Any = None,
        loo: bool = False,
        warm_start: HERTA | None = None,
    ) -> HERTA:
        """Train on the nodes `train` (ids, a mask, or None: all labelled ones).

        Of a graph that is split by nodes each process gives its rows of X, y and sample_weight, and
        names nodes by their place among them; `train_`, `labels_` and `loo_` are of all processes.

        Parameters
        ----------
        graph : Graph, or a `Data` of PyG's, or a `Dataset`
            The last two hold X, y and a mask of training nodes as well: `fit(data)` is all.
        X : array or SciPy sparse matrix, (n, d)
            Arrays on a GPU (CuPy, or anything with DLPack) are used where they are.
        y : array
            (n,) whole numbers, -1 for unlabelled; (n,) text, "" (or None) for unlabelled, and
            then `classes_` and `predict` are text, too; or floats, (n,) or (n, c).  For
            loss="bce" (n, c) zeros and ones, -1 or NaN where it is not known.
        train : optional
        callback : function of one dict, optional
            Called with each entry of `warm_history_` and `history_` as soon as it exists.
        checkpoint : Checkpoint, optional
            A folder to go on from after a crash, to the same bits; a state that was made from
            other data or by another model is refused.
        stages : Stages, optional
            A timer of the caller's that times the stages of this fit as well, and shows them if
            it is verbose; by default the fit has its own.
        evaluate : optional
            Ids (or a mask) of other nodes whose outputs are wanted, in `outputs_`.  Where rows of
            H^-1 X are stored (strategy "direct") they come with the fit, otherwise from a solve
            after it, as of `transform`.
        sample_weight : array (n,), optional
            Weights of the nodes in the loss; only those of training nodes count, and a node of
            weight 0 is none.
        loo : bool
            Leave-one-out with the fit, for loss="mse" (and strategy="direct"): `loo_`,
            `leverage_`, and `variance_` of the nodes `evaluate`.
        warm_start : HERTA, optional
            A fitted model of the same features and outputs, as after edges or nodes were added.
            Its weights are where training starts, unless the problem's own P gives a start
            already (loss="mse" with the strategy "herta").
        """
        _check_helpers(callback, checkpoint, stages)
        check_choice("loo", loo, (False, True))
        _check_previous(warm_start, checkpoint)
        backend, why = chosen_backend(self.device, graph, X)
        backend, stages = shared(backend, graph), Stages(self.verbose) if stages is None else stages
        run = Context(backend, stages, callback, checkpoint)
        task = self._pose(backend, graph, X, y, train, sample_weight, evaluate)
        task = task if not loo else replace(task, settings=_leaving_out(task.settings))
        task.W_start = _starting_weights(warm_start, task, backend)
        self.device_ = Decision("device", backend.name, why)
        run.begin(self.get_params(), task, y)
        # A fit that is interrupted leaves what it was about to do.
        plan = self.plan_ = task.prepare(run)
        A, Y = task.place(plan, run)  # A = M H^-1 X, and what A W should be

        # L_tilde <- Sparsify(L_hat)
        with stages("sparsify"):
            H_tilde = sampled(task.H, plan.n_samples, task.settings, run.budget)
        # Q <- SDDSolver(I + lam L_tilde; X); Q' <- Hadamard(R Q); Q_tilde <- s rows of Q';
        # P <- Q_tilde^T Q_tilde; P' <- P^-1/2.  Q is cut to the training rows: with a mask, a P
        # from all rows would miss the Hessian.
        made = preconditioned(plan, task, H_tilde, A, Y, run)
        # for t = 1..T: u <- X P' w - y_hat, two solves, g <- P' X^T u'', w <- w - eta g
        loop = Training(task, run, made, A, Y)
        with stages("train"):
            if loop.nothing_to_learn:
                made, W = at_zero(loop, plan, made, task, A, Y, run)
            elif plan.stored:  # one tight Q instead of two solves per step
                made, W = on_stored_rows(loop, plan, made, task, A, Y, run)
            else:
                w, Z = start(loop, plan, made.P, task, A, run)
                # Output: W = P^-1/2 w, not w: the loop ran in preconditioned coordinates.
                W = loop.settle(trained(loop, A, Y, w, plan.outputs, run.cache, Z))
        self._keep(task, run, loop, made, W)
        if backend.total(int(evaluate is not None)) and "outputs_" not in vars(self):
            del made, loop, A, task.features  # the solve has the memory of the fit
            self.outputs_ = to_host(self.transform(graph, task.X, task.wanted), backend)
        return self

    def _keep(
        self, task: Task, run: Context, loop: Training, made: Preconditioned, W: Array
    ) -> None:
        """What a fit leaves."""
        backend, targets = run.backend, task.targets
        self.W_ = backend.same(backend.to_numpy(W), "weights")  # synchronize!
        self.intercept_, self.train_ = loop.constants(), targets.nodes
        self.labels_ = np.asarray(targets.Y) if task.extra is not None else None
        self._keep_evaluated(made, W if task.eval_nodes.size > 0 else None, targets.unit)
        self.classes_, self._flat = targets.classes, targets.flat
        self.history_, self.certificate_, self.status_ = loop.result()
        self.warm_history_, self.changes_ = loop.warm_history, [*made.changes, *loop.changes]
        self.stages_, self.n_features_in_ = run.stages.since(run.before), task.X.shape[1]
        reads = task.features.reads
        self.X_reads_, self.spectrum_ = {} if reads is None else reads.counts(), made.spectrum

    def _keep_evaluated(self, made: Preconditioned, W: Array | None, unit: float) -> None:
        """Outputs of the nodes `evaluate` (if W is given), and what leave-one-out says."""
        for name in _WITH_THE_FIT:
            self.__dict__.pop(name, None)  # those of another fit
        outputs = None if W is None else made.outputs(W)
        if outputs is not None:
            self.outputs_ = outputs + self.intercept_.astype(outputs.dtype)
        if made.left_out is None:
            return
        self.loo_, self.leverage_ = made.left_out.outputs, made.left_out.leverage
        if made.spread is not None:
            noise = unit * made.left_out.noise
            self.variance_ = (1 + made.spread / unit)[:, None] * noise

    def _pose(
        self, backend: Backend, graph: Graph, X: Any, y: Any, train: Any, weight: Any, evaluate: Any
    ) -> Task:
        """What is to be fitted, or a sentence that says what is wrong."""
        settings = self._settings()
        if not backend.whole:
            _check_split_by_nodes(settings, backend)
        X = as_matrix(X, backend)
        extent = check_rows("X", X, graph)
        if X.shape[1] == 0:
            raise ValueError("X has no columns: give at least one feature.")
        backend.same(self.get_params(), "parameters", always=True)
        backend.same(X.shape[not backend.whole :], "shape of X", always=True)
        check_scale(float(backend.largest(extent.largest)))
        check_columns(X, extent.least, backend)
        y, train, weight = (to_host(a, backend) for a in (y, train, weight))
        given = (y, train, graph.num_nodes, self.loss, weight, self.class_weight)
        if backend.whole:
            targets = make_targets(*given)
            backend.same(targets.rows, "training nodes", always=True)
        else:
            targets = joint_targets(*given, backend)
        wanted = node_rows([] if evaluate is None else to_host(evaluate, backend), graph.num_nodes)
        settings = replace(settings, ridge=settings.ridge / targets.unit)
        return Task(settings, graph, X, targets, wanted)


# ---- the parts of fit ------------------------------------------------------------------------
def _check_helpers(callback: Any, checkpoint: Any, stages: Any) -> None:
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function, not {type(callback).__name__}.")
    if not isinstance(checkpoint, (Checkpoint, type(None))):
        raise TypeError(f"checkpoint must be a Checkpoint, not {type(checkpoint).__name__}.")
    if not isinstance(stages, (Stages, type(None))):
        raise TypeError(f"stages must be a Stages, not {type(stages).__name__}.")


def _leaving_out(settings: Settings) -> Settings:
    """Settings of a fit with leave-one-out."""
    if settings.label_folds:
        raise ValueError(
            "Leave-one-out is not valid with label features, which hold the label left out: "
            "choose on validation nodes."
        )
    return settings.with_loo()


def _check_split_by_nodes(settings: Settings, backend: Backend) -> None:
    """Say what works only where each process has all rows."""
    sampled = settings.sparsify.when == "always" or settings.mixed
    asked = {
        "reorder": settings.reorder.when == "always",
        "sparsify": sampled and backend.name == "cuda",  # on GPUs: Algorithm 2's kernels
    }
    for name, wanted in asked.items():
        if wanted:
            where = " on GPUs" * (name == "sparsify")
            raise ValueError(
                f"{name} does not work{where} on a graph that is split by nodes: use "
                f'split="columns", or leave {name} out.'
            )


def works_by_nodes(model: HERTA, backend: Backend) -> str | None:
    """Why a fit with these parameters needs split="columns" on ranks; None: it does not."""
    if type(backend) is CPUBackend:
        return "nodes are shared out on GPUs and on the compiled CPU backend: install numba"
    try:
        _check_split_by_nodes(model._settings(), backend)
    except ValueError as error:
        return str(error).partition(":")[0]
    return None


def _check_previous(previous: Any, checkpoint: Any) -> None:
    if previous is None:
        return
    if not isinstance(previous, HERTA) or not hasattr(previous, "W_"):
        raise TypeError("warm_start must be a fitted HERTA.")
    if not np.isfinite(previous.W_).all():
        raise ValueError(
            "warm_start has weights that are not finite: fit it anew, or start without it."
        )
    if checkpoint is not None:
        raise ValueError("A checkpoint has weights of its own: leave out warm_start.")


def _starting_weights(model: HERTA | None, task: Task, backend: Backend) -> Array | None:
    """The weights of a fitted model, or a sentence that says why they do not fit."""
    if model is None:
        return None
    targets = task.targets
    shape = (task.settings.features(task.X.shape[1], targets.Y.shape[1]), targets.Y.shape[1])
    if model.W_.shape != shape:
        raise ValueError(
            f"warm_start has weights of shape {model.W_.shape}, but these data need {shape}."
        )
    of = [
        () if names is None else tuple(names.tolist())
        for names in (targets.classes, model.classes_)
    ]
    if of[0] != of[1]:
        raise ValueError("warm_start was fitted to other classes than y has.")
    return backend.asarray(model.W_)
