"""Algorithm 1 of the paper: HERTA, in its order, and what a fitted model says.

Where the paper prints something that does not work (masks, ranks, tolerances, the returned
weights), the correction stands beside the line it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from herta_gpu.backends import backend_for, chosen_backend, get_backend, shared
from herta_gpu.backends.base import Array, Backend
from herta_gpu.backends.cpu.lapack import limited
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.certificate import Certificate, Spectrum
from herta_gpu.features import Features, bytes_held
from herta_gpu.graph import Graph, check_graph
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.losses import LOSSES
from herta_gpu.more.hidden import each_draw
from herta_gpu.planning.costs import (
    BLOCK_WIDTH,
    Sizes,
    block_width,
    dealt_width,
    outputs_at_once,
    row_copies,
)
from herta_gpu.planning.forecast import Card
from herta_gpu.planning.plan import Decision, Plan, make_plan
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.bundles import Method, takes_bundles
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.checks import (
    BudgetError,
    check_choice,
    check_columns,
    check_count,
    check_rows,
    check_scale,
    memory_budget,
    node_rows,
    parse_bytes,
)
from herta_gpu.plumbing.files import check_target
from herta_gpu.plumbing.interop import as_array, as_matrix, in_kind_of, on_device, to_host
from herta_gpu.plumbing.models import read_model, write_model
from herta_gpu.plumbing.progress import Stages
from herta_gpu.plumbing.scaling import in_new_units
from herta_gpu.plumbing.targets import (
    Estimator,
    accuracy_or_r2,
    check_scored,
    joint_targets,
    label_accuracy,
    make_targets,
    not_fitted,
    warn_unfinished,
)
from herta_gpu.prediction import Outputs, check_probabilities
from herta_gpu.task import (
    Context,
    Task,
    labels_as_features,
    stored_rows,
    systems_of,
    with_hidden,
)
from herta_gpu.training import Fitted, Journal, Objective, descend, precondition

# What a fit leaves and a file keeps, beside the weights and classes.
_FITTED: dict[str, Any] = {
    "certificate_": Certificate, "status_": str, "plan_": Plan, "spectrum_": Spectrum | None,
    "changes_": list[Decision], "device_": Decision,
    "history_": list[dict[str, Any]], "warm_history_": list[dict[str, Any]],
    "stages_": dict[str, float], "X_reads_": dict[str, Any], "_flat": bool,
}  # fmt: skip
_NOT_IN_FILES = ("outputs_", "loo_", "leverage_", "variance_")


def on_its_device(method: Method) -> Method:
    """A method that runs on the stream of the device that is chosen for its graph and X.

    What fails on one process of the graph fails on all of them, with the same sentence.  Where
    memory runs out, that says which block of columns would have fitted.
    """

    @wraps(method)
    def wrapped(self: HERTA, graph: Graph, X: Any = None, *args: Any, **kwargs: Any) -> Any:
        check_graph(graph)
        backend = self._device(graph, X)
        with graph.together(), backend.working(), limited((getattr(X, "shape", ()) or (0,))[-1]):
            try:
                return method(self, graph, X, *args, **kwargs)
            except MemoryError as error:
                if isinstance(error, BudgetError) or "memory_budget=" in str(error):
                    raise  # it says so already
                budget = memory_budget(self.memory_budget, backend.memory_available()) // 2
                width = max(1, block_width(graph.num_nodes, BLOCK_WIDTH, self.dtype, budget))
                advice = f"Blocks of {width} columns would fit: set memory_budget={budget}."
                raise MemoryError(f"{error} {advice}") from error

    return cast(Method, wrapped)


class HERTA(Estimator):
    _draw = 0  # of the hidden layer
    fixed_: dict[str, Any] = {}  # earlier versions had none
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
    tol, max_iter : float, int
        Stop when the relative suboptimality is certified to be at most tol, or after such steps.
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
    device : {"auto", "cpu", "cuda", "cuda:1", "cpu-scipy"}
        "auto": CUDA where it is usable, but for data so small that the CPU is done before a GPU has
        compiled its kernels; "cpu-scipy": the CPU without compiled kernels.
    dtype : {"float32", "float64"}
        Of the large blocks; everything d x d is float64.
    memory_budget : int or str, optional
        Bytes or "8GB"; by default 80% of what is free.
    random_state : int, optional
        None is 0: whatever is drawn, a fit can be repeated.
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
    hidden : int
        Random ReLU features (`RandomFeatures`) beside X, a nonlinear model that is still convex in
        `W_`: its optimum is the global one, and the certificate covers the exact diffusion, but
        says nothing of how good this draw of the layer is.  0: none.
    hidden_at : {"after", "before"}
        They are made of the diffused features, which is cheaper, or made first and diffused.
    hidden_rank : int or None
        Leading singular vectors of X that the hidden layer sees; None: all columns.
    hidden_draws : int
        Layers, each with a fit of its own; their scores are averaged, and so is leave-one-out.
    normalize : {"none", "row", "unit", "standard"}
        Of X, before anything else: rows of sum 1 (what the command line does to bags of words),
        rows of length 1, or columns of mean 0 (a dense X) and variance 1.
    row_norm : bool
        Scale the rows of each block of diffused features to length 1.
    hops : list of int, optional
        Blocks S^k X of features, S = D^-1/2 (A + I) D^-1/2, which need no solve: [0, 1, 2, 3].
        They stand after the blocks of lam, if any lam but the default is given; else alone.
    class_weight : dict or "balanced", optional
        Weights of the rows of each class in the loss; "balanced": as much of each class.

    Attributes
    ----------
    W_, intercept_ : array (d, c), array (c,)
        With several lam W_ is (len(lam) d, c), block below block.
    train_, labels_ : array (n_train,), array (n_train, c) or None
        The training nodes by their ids, and their labels where those make features.
    classes_ : array (c,) or None for float targets
    history_ : list of dict
        One per outer step: step, loss (the objective), loss_error (it is right up to this much),
        grad_norm, certificate, inner_iterations, seconds.  The first entry is the starting point.
    warm_history_ : list of dict
        The same for steps on a cheaper model that went first (stored rows, or a sampled graph),
        marked by ``warm``; they do not count towards max_iter.
    certificate_ : Certificate
    status_ : str
        "certified": the relative gap is proven to be at most tol, for the problem as given.
        "certified-reduced": the same over fewer features, as the others could not be told from
        combinations of them; see ``certificate_.kept``.  "converged": nothing is left to gain by
        all signs, but that is not proven.  "max_iter", "stagnated" (rounding forbids more) or
        "diverged".
    plan_, device_, changes_ : Plan, (what, choice, why), list of (what, choice, why)
        What was planned, where it was fitted, and what turned out otherwise than planned.
    outputs_ : array (len(evaluate), c)
        Z* at the nodes `evaluate` of the last `fit`, if it was given; no file keeps it.
    loo_, leverage_ : array (n_train, c), array (n_train,)
        After ``fit(..., loo=True)``: for each node of `train_` the outputs of the model that was
        trained without it (NaN where only that node decides some weight), and how much its output
        follows its own target, from 0 to 1; no file keeps them.
    variance_ : array (len(evaluate), c)
        With them, if there is memory for the rows a of H^-1 X at the nodes `evaluate`: the variance
        sigma^2 (1 + a^T P^-1 a) of a target there, sigma^2 that of the residuals.  Infinite (NaN
        where they are 0) for fewer training nodes than features without a ridge.
    spectrum_ : Spectrum or None
        What is known of the preconditioned Hessian; ``kappa`` bounds its condition number.
    stages_, X_reads_ : dict
        Seconds of each stage; of a dense X passes over it, and bytes and seconds of reading it.

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
        random_state: int | None = 0,
        verbose: bool = False,
        learning_rate: float | str | None = None,
        reorder: bool | str = "auto",
        fit_intercept: bool = False,
        class_weight: Mapping[Any, float] | str | None = None,
        label_features: int | bool = 0,
        hidden: int = 0,
        hidden_at: str = "after",
        hidden_rank: int | None = 64,
        hidden_draws: int = 1,
        normalize: str = "none",
        row_norm: bool = False,
        hops: Sequence[int] | None = None,
    ) -> None:
        self.lam, self.alpha, self.loss, self.optimizer = lam, alpha, loss, optimizer
        self.ridge, self.tol, self.max_iter = ridge, tol, max_iter
        self.strategy, self.sparsify, self.sketch = strategy, sparsify, sketch
        self.precondition, self.device, self.dtype = precondition, device, dtype
        self.memory_budget, self.random_state, self.verbose = memory_budget, random_state, verbose
        self.learning_rate, self.reorder = learning_rate, reorder
        self.fit_intercept, self.class_weight = fit_intercept, class_weight
        self.label_features = label_features
        self.hidden, self.hidden_at, self.hidden_rank = hidden, hidden_at, hidden_rank
        self.hidden_draws, self.normalize, self.row_norm = hidden_draws, normalize, row_norm
        self.hops = hops

    @takes_bundles("train")
    @on_its_device
    @each_draw
    def fit(
        self,
        graph: Graph | Any,
        X: Any = None,
        y: Any = None,
        train: Any = None,
        *,
        callback: Callable[[dict[str, Any]], None] | None = None,
        checkpoint: Checkpoint | None = None,
        evaluate: Any = None,
        sample_weight: Any = None,
        loo: bool = False,
        warm_start: HERTA | None = None,
        _stages: Stages | None = None,
    ) -> Self:
        """Train on the nodes `train` (ids, a mask, or None: all labelled ones).

        Of a graph that is split by nodes each process gives its rows of X, y and sample_weight, and
        names nodes by their place among them; `train_`, `labels_` and `loo_` are of all processes.

        Parameters
        ----------
        graph : Graph, or a `Data` of PyG's, or a `Dataset`
            The last two hold X, y and a mask of training nodes as well: `fit(data)` is all.
        X : array or sparse matrix, (n, d)
            Arrays on a GPU (CuPy, or anything with DLPack) and sparse matrices of
            ``cupyx.scipy.sparse`` are used where they are.
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
        _check_helpers(callback, checkpoint, warm_start)
        check_choice("loo", loo, (False, True))
        backend, why = chosen_backend(self.device, graph, X)
        backend, stages = shared(backend, graph), _stages or Stages(self.verbose)
        run = Context(backend, stages, callback, checkpoint)
        task = self._pose(backend, graph, X, y, train, sample_weight, evaluate)
        task = task if not loo else replace(task, settings=task.settings.with_loo())
        task.W_start = _starting_weights(warm_start, task, backend)
        self.device_ = Decision("device", backend.name, why)
        run.begin(self.get_params(), task, y)
        # A fit that is interrupted leaves what it was about to do.
        plan = self.plan_ = task.prepare(run)
        A, Y = task.place(plan, run)  # A = M H^-1 X, and what A W should be

        # L_tilde <- Sparsify(L_hat)
        with stages("sparsify"):
            H_tilde = task.sample(plan.n_samples, run.budget)
        # Q <- SDDSolver(I + lam L_tilde; X); Q' <- Hadamard(R Q); Q_tilde <- s rows of Q';
        # P <- Q_tilde^T Q_tilde; P' <- P^-1/2.  Q is cut to the training rows: with a mask, a P
        # from all rows would miss the Hessian.
        made = precondition(plan, task, H_tilde, A, Y, run)
        # for t = 1..T: u <- X P' w - y_hat, two solves, g <- P' X^T u'', w <- w - eta g
        # Output: W = P^-1/2 w, not w: the loop runs in preconditioned coordinates.
        journal = Journal(Objective.of(task.settings, A, Y), run, task.targets.unit)
        with stages("train"):
            found = descend(journal, plan, made, task)
        self._keep(task, run, journal, found)
        if backend.total(int(evaluate is not None)) and "outputs_" not in vars(self):
            del made, journal, found, A, task.features  # the solve has the memory of the fit
            self.outputs_ = to_host(self.transform(graph, task.X, task.wanted), backend)
        return self

    def _keep(self, task: Task, run: Context, journal: Journal, found: Fitted) -> None:
        """What a fit leaves."""
        backend, targets, unit = run.backend, task.targets, task.targets.unit
        self.W_ = backend.same(backend.to_numpy(found.W), "weights")  # synchronize!
        b = np.zeros(self.W_.shape[1]) if journal.intercept is None else journal.intercept
        self.intercept_, self.train_ = backend.to_numpy(b), targets.nodes  # synchronize!
        self.labels_ = np.asarray(targets.Y) if task.extra is not None else None
        self.fixed_ = {**task.units, **task.fixed}
        self.classes_, self._flat = targets.classes, targets.flat
        self.history_, self.warm_history_ = journal.history(), journal.history(warm=True)
        gap = unit * journal.certificate.gap
        warn_unfinished(journal.status, self.tol, self.max_iter)
        self.certificate_, self.status_ = replace(journal.certificate, gap=gap), str(journal.status)
        self.changes_, self.n_features_in_ = run.changes, task.X.shape[1]
        self.stages_, reads = run.stages.since(run.before), task.features.reads
        self.X_reads_ = {} if reads is None else reads.counts()
        self.spectrum_ = found.spectrum
        for name in _NOT_IN_FILES:
            self.__dict__.pop(name, None)  # those of another fit
        if self.plan_.beside and found.outputs is not None:
            self.outputs_ = found.outputs + self.intercept_.astype(found.outputs.dtype)
        if found.left_out is not None:
            self.loo_, self.leverage_ = found.left_out.outputs, found.left_out.leverage
            if (spread := found.left_out.spread) is not None:
                self.variance_ = (1 + spread / unit)[:, None] * (unit * found.left_out.noise)

    def _pose(
        self, backend: Backend, graph: Graph, X: Any, y: Any, train: Any, weight: Any, evaluate: Any
    ) -> Task:
        """What is to be fitted, or a sentence that says what is wrong."""
        settings = self._settings()
        why_not = None if backend.whole else works_by_nodes(self, backend)
        if why_not is not None:
            name = why_not.partition(" ")[0]
            raise ValueError(f'{why_not}: use split="columns", or leave {name} out.')
        X, units = as_matrix(X, backend), dict[str, Any]()
        extent = check_rows("X", X, graph)
        if settings.normalize != "none" and X.shape[1]:
            X, units = in_new_units(X, settings.normalize, backend)
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
        return Task(settings, graph, X, targets, wanted, units=units, draw=self._draw)

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
        counts = {"n": n, "m": m, "d": d, "c": c, "n_train": n_train, "X_nonzeros": X_nonzeros}
        sizes, budget = self._outline(device_memory, mapped_graph, **counts)
        return make_plan(sizes, settings, budget)

    def _outline(
        self, device_memory: int | str | None = None, mapped: bool = False, **counts: Any
    ) -> tuple[Sizes, int]:
        """Sizes of data that are not there, and the bytes that a plan may use for them."""
        for name, value in counts.items():
            if value is not None or name != "X_nonzeros":
                check_count(name, value, least=0 if name in ("m", "X_nonzeros") else 1)
        names = ("n", "m", "d", "c", "n_train", "X_nonzeros")
        n, m, d, c, n_train, nonzeros = (counts[name] for name in names)
        if n_train > n:
            raise ValueError(f"n_train is {n_train:,} but there are {n:,} nodes.")
        settings = self._settings()
        word, X_bytes = np.dtype(settings.dtype).itemsize, 24 * (nonzeros or 0)
        sizes = Sizes(
            n, m, settings.features(d, c), c, n_train, word, X_bytes, nonzeros=nonzeros,
            copies=row_copies(settings, settings.weighted), top=1 + 2 * settings.lam,
            curvature=LOSSES[settings.loss].start_curvature(c),
        )  # fmt: skip
        if device_memory is None:
            backend = self._checked()
            if backend.xp is np:
                return replace(sizes, mapped=mapped), backend.plan_budget(settings.memory_budget)
            device_memory = backend.memory_free()
        card = Card(parse_bytes(device_memory))
        budget = card.budget(settings.memory_budget)
        X_bytes = X_bytes or card.X_bytes(n, d, budget)
        return replace(sizes, X_bytes=X_bytes, half=word == 4, card=True), budget

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
        Z, rows = self._outputs(graph, X, idx)
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
        outputs, rows = self._outputs(graph, X, idx)
        backend = outputs.H.backend
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
        return in_kind_of(LOSSES[self.loss].activation(xp, Z), X)

    def _outputs(self, graph: Graph, X: Any, idx: Any) -> tuple[Outputs, Array | None]:
        """(Z* of this graph and these features, not computed yet; where the graph stores the nodes
        `idx`, None: all rows, as they are stored).

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
        if settings.normalize != "none":
            X, _ = in_new_units(X, settings.normalize, backend, self.fixed_)
        H = RegularizedLaplacian(graph, settings.lam, backend, settings.dtype)
        budget = memory_budget(self.memory_budget, backend.memory_everywhere())
        c = self.W_.shape[1]
        features = Features(X, backend, graph.order, budget)
        labels = settings.features(0, c)
        word, held = np.dtype(settings.dtype).itemsize, bytes_held(X, backend, budget)
        sizes = Sizes(graph.num_nodes, graph.num_edges, X.shape[1], c, 0, word, held)
        width = -int(backend.largest(-outputs_at_once(sizes, budget, X.shape[1], labels)))
        width = dealt_width(c, width, backend.ranks if backend.whole else 1)
        systems = systems_of(H, settings)
        features, hidden = with_hidden(features, self.fixed_, settings)
        extras: list[Any] = [] if hidden is None else [hidden.solve(systems)]
        W, b = backend.asarray(self.W_), backend.asarray(self.intercept_)
        if settings.label_folds:
            if int(self.train_.max()) >= graph.nodes_of_all:
                raise ValueError(
                    "The model has features of labels, which belong to nodes that are not in this "
                    "graph: give the graph that it was fitted on, or that graph with more nodes."
                )
            rows = graph.rows_of(self.train_)
            backend.train_on(rows)
            extras.append(labels_as_features(H, rows, self.labels_, settings))
        floor = float(self.fixed_.get("row_floor", 0.0))
        b = b if self.fit_intercept else None
        outputs = Outputs(systems, features, W, width, b, extras, floor)
        if idx is None and graph.order is None:
            return outputs, None
        nodes = node_rows(to_host(idx, backend), graph.num_nodes)
        return outputs, stored_rows(graph, nodes, backend)

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


def works_by_nodes(model: HERTA, backend: Backend) -> str | None:
    """Why a fit with these parameters needs split="columns" on ranks; None: it does not."""
    if type(backend) is CPUBackend:
        return "nodes are shared out on GPUs and on the compiled CPU backend: install numba"
    settings, split = model._settings(), "work{} on a graph that is split by nodes"
    if settings.hidden or settings.row_norm or settings.hops:
        name = "hidden" if settings.hidden else "row_norm" if settings.row_norm else "hops"
        return f"{name} does not {split.format('')}"
    if settings.reorder.when == "always":
        return f"reorder does not {split.format('')}"
    sampled = settings.sparsify.when == "always" or settings.mixed
    if sampled and backend.name == "cuda":  # Algorithm 2's kernels
        return f"sparsify does not {split.format(' on GPUs')}"
    return None


def _check_helpers(callback: Any, checkpoint: Any, previous: Any) -> None:
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function, not {type(callback).__name__}.")
    if not isinstance(checkpoint, (Checkpoint, type(None))):
        raise TypeError(f"checkpoint must be a Checkpoint, not {type(checkpoint).__name__}.")
    if previous is None:
        return
    if not isinstance(previous, HERTA) or not hasattr(previous, "W_"):
        raise TypeError("warm_start must be a fitted HERTA.")
    wrong = ""
    if not np.isfinite(previous.W_).all():
        wrong = "warm_start has weights that are not finite: fit it anew, or start without it."
    elif checkpoint is not None:
        wrong = "A checkpoint has weights of its own: leave out warm_start."
    if wrong:
        raise ValueError(wrong)


def _starting_weights(model: HERTA | None, task: Task, backend: Backend) -> Array | None:
    """The weights of a fitted model, or a sentence that says why they do not fit."""
    if model is None:
        return None
    c, found = task.targets.Y.shape[1], model.W_.shape
    if (shape := (task.settings.features(task.X.shape[1], c), c)) != found:
        raise ValueError(f"warm_start has weights of shape {found}, but these data need {shape}.")
    then, now = (() if k is None else tuple(k) for k in (model.classes_, task.targets.classes))
    if then != now:
        raise ValueError("warm_start was fitted to other classes than y has.")
    return backend.asarray(model.W_)
