"""Algorithm 1 of the paper: HERTA, in its order.

Where the paper prints something that does not work (masks, ranks, tolerances, the returned
weights), the correction stands beside the line it concerns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Self

import numpy as np

from herta_gpu.backends import get_backend
from herta_gpu.backends.base import Array, Backend
from herta_gpu.certificate import Certificate
from herta_gpu.diffusion import Recall
from herta_gpu.direct import Proof, StoredProblem
from herta_gpu.features import Features
from herta_gpu.graph import Graph, check_graph
from herta_gpu.losses import LOSSES
from herta_gpu.planning.costs import Outline, Sizes, sizes_of, stored_order
from herta_gpu.planning.plan import (
    Chosen,
    Decision,
    Plan,
    make_plan,
    orthonormal,
    tighter,
    with_less_left,
)
from herta_gpu.planning.recipe import Recipe
from herta_gpu.planning.settings import Settings, strength
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.estimator import (
    Estimator,
    Targets,
    accuracy_or_r2,
    check_scored,
    make_targets,
)
from herta_gpu.plumbing.fingerprint import fingerprint
from herta_gpu.plumbing.interop import as_matrix, in_kind_of, on_device, take_rows, to_host
from herta_gpu.plumbing.models import read_model, write_model
from herta_gpu.plumbing.stages import Stages
from herta_gpu.plumbing.validation import (
    BudgetError,
    check_count,
    check_rows,
    check_scale,
    node_rows,
)
from herta_gpu.preconditioner import (
    Preconditioner,
    build,
    lowered,
    made_anew,
    no_preconditioner,
)
from herta_gpu.solver import BLOCK_WIDTH, RegularizedLaplacian, block_width
from herta_gpu.sparsifier import sparsified
from herta_gpu.spectrum import Spectrum, choose_spectrum
from herta_gpu.training import Training
from herta_gpu.unfolded import DenseMap, UnfoldedMap

_TRANSFORM_TOL = 1e-6
_CHEAP_STEPS = 20  # steps on stored rows, without a solve, that count as one of max_iter
_ATTEMPTS = 4  # how often Q is solved for more tightly when a certificate asks for it
# What a fit leaves and a file keeps, beside the weights and classes.
_FITTED: dict[str, Any] = {
    "certificate_": Certificate, "status_": str, "plan_": Plan, "spectrum_": Spectrum | None,
    "changes_": list[Decision],
    "history_": list[dict[str, Any]], "warm_history_": list[dict[str, Any]],
    "stages_": dict[str, float], "_flat": bool,
}  # fmt: skip


def _names_what_fits(fit: Callable[..., HERTA]) -> Callable[..., HERTA]:
    """A fit that runs out of memory says which block of columns would have fitted."""

    @wraps(fit)
    def wrapped(self: HERTA, graph: Graph, *args: Any, **kwargs: Any) -> HERTA:
        try:
            return fit(self, graph, *args, **kwargs)
        except BudgetError:
            raise  # it says so already
        except MemoryError as error:
            budget = self._settings().budget(get_backend(self.device).memory_available()) // 2
            width = max(1, block_width(graph.num_nodes, BLOCK_WIDTH, self.dtype, budget))
            advice = f"Blocks of {width} columns would fit: set memory_budget={budget}."
            raise MemoryError(f"{error} {advice}") from error

    return wrapped


class HERTA(Estimator):
    """Train the unfolded GNN Z*(W) = (I + lam L_hat)^-1 X W to a certified optimum.

    Parameters
    ----------
    lam : float
        Weight of the graph in the energy (equation 4.1).
    alpha : float, optional
        APPNP's teleport probability in place of lam: lam = 1/alpha - 1.
    loss : {"mse", "ce"}
        1/2 ||Z - Y||^2 or cross entropy, summed over the training rows.
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
        many samples.  "degree": always, by scores that the degrees give for nothing, as "auto"
        does.  "mixed" is the appendix's rule: it also iterates on a sampled graph when
        n_lambda / tol <= m log(1 / tol), and finishes on the full one.
    sketch : "auto", bool or int
        Build P from an SRHT of Q: if memory asks for it, always, never, or with so many rows.
    precondition : bool
        False is the standard training that the paper compares with.
    device : {"auto", "cpu", "cuda", "cpu-scipy"}
        "auto": CUDA where it is usable; "cpu-scipy": the CPU without compiled kernels.
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

    Attributes
    ----------
    W_ : array (d, c)
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
    plan_ : Plan
    changes_ : list of (what, choice, why)
        What turned out otherwise than planned.
    spectrum_ : Spectrum or None
        What is known of the preconditioned Hessian; ``kappa`` bounds its condition number.
    stages_ : dict of stage to seconds

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
        lam: float = 1.0,
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
    ) -> None:
        self.lam, self.alpha, self.loss, self.optimizer = lam, alpha, loss, optimizer
        self.ridge, self.tol, self.max_iter = ridge, tol, max_iter
        self.strategy, self.sparsify, self.sketch = strategy, sparsify, sketch
        self.precondition, self.device, self.dtype = precondition, device, dtype
        self.memory_budget, self.random_state, self.verbose = memory_budget, random_state, verbose
        self.learning_rate, self.reorder = learning_rate, reorder

    @_names_what_fits
    def fit(
        self,
        graph: Graph,
        X: Any,
        y: Any,
        train: Any = None,
        callback: Callable[[dict[str, Any]], None] | None = None,
        checkpoint: Checkpoint | None = None,
        stages: Stages | None = None,
    ) -> HERTA:
        """Train on the nodes `train` (ids, a mask, or None: all labelled ones).

        Parameters
        ----------
        graph : Graph
        X : array or SciPy sparse matrix, (n, d)
            Arrays on a GPU (CuPy, or anything with DLPack) are used where they are.
        y : array
            (n,) whole numbers, -1 for unlabelled; (n,) text, "" (or None) for unlabelled, and
            then `classes_` and `predict` are text, too; or floats, (n,) or (n, c).
        train : optional
        callback : function of one dict, optional
            Called with each entry of `warm_history_` and `history_` as soon as it exists.
        checkpoint : Checkpoint, optional
            A folder to go on from after a crash, to the same bits; a state that was made from
            other data or by another model is refused.
        stages : Stages, optional
            A timer of the caller's that times the stages of this fit as well, and shows them if
            it is verbose; by default the fit has its own.
        """
        _check_helpers(callback, checkpoint, stages)
        settings, backend = self._settings(), self._checked()
        X, targets = self._checked_data(graph, X, y, train, backend)
        stages = Stages(self.verbose) if stages is None else stages
        before = dict(stages.seconds)
        if checkpoint is not None:
            with stages("checkpoint"):
                data = (graph, X, y, targets.rows, checkpoint.split)
                checkpoint.begin(fingerprint(self.get_params(), backend, *data))
        with stages("order"):
            given, graph = graph, stored_order(graph, X, targets.Y.shape[1], settings, backend)
        H = RegularizedLaplacian(graph, settings.lam, backend, settings.dtype)  # I + lam L_hat
        with stages("plan"):
            budget = settings.budget(backend.memory_available())
            sizes = sizes_of(graph, X, targets, settings.dtype, backend, budget)
            plan = make_plan(H, sizes, settings, budget, reordered=graph is not given)
            self.plan_ = plan  # a fit that is interrupted leaves what it was about to do
        if checkpoint is not None:
            checkpoint.claim()  # nothing can be refused any more
        with stages("features"):
            features = Features(X, backend, graph.order, budget)
        inverse = graph.inverse_order()
        rows = backend.asarray(targets.rows if inverse is None else inverse[targets.rows])
        Y = backend.asarray(targets.Y)

        # L_tilde <- Sparsify(L_hat)
        with stages("sparsify"):
            H_tilde = _sampled(H, plan.n_samples, settings, budget)
        # Q <- SDDSolver(I + lam L_tilde; X); Q' <- Hadamard(R Q); Q_tilde <- s rows of Q';
        # P <- Q_tilde^T Q_tilde; P' <- P^-1/2.  Q is cut to the training rows: with a mask, a P
        # from all rows would miss the Hessian.
        A = UnfoldedMap(H, features, rows, plan.solve_width)
        recall = made_anew if checkpoint is None else checkpoint.on(backend, plan.identity)
        made = _preconditioned(plan, settings, H_tilde, A, Y, stages, recall)
        # for t = 1..T: u <- X P' w - y_hat, two solves, g <- P' X^T u'', w <- w - eta g
        run = Training(
            settings, made.recipe, backend, Y, made.P, made.spectrum, features, stages, callback,
            checkpoint, plan.identity,
        )  # fmt: skip
        with stages("train"):
            if plan.stored:
                made, W = _on_stored_rows(run, plan, made, settings, A, Y, recall)
            else:
                w, Z = _start(run, plan, settings, made.P, A, budget)
                # Output: W = P^-1/2 w, not w: the loop ran in preconditioned coordinates.
                W = run.loop(A, w, certified=True, Z=Z).W

        self.W_ = backend.to_numpy(W)  # synchronize!
        self.classes_, self._flat = targets.classes, targets.flat
        self.history_, self.certificate_, self.status_ = run.history, run.certificate, run.status
        self.warm_history_, self.changes_ = run.warm_history, made.changes
        self.stages_, self.n_features_in_ = stages.since(before), X.shape[1]
        self.spectrum_ = made.spectrum
        return self

    def _checked_data(
        self, graph: Graph, X: Any, y: Any, train: Any, backend: Backend
    ) -> tuple[Any, Targets]:
        """X as a matrix and the training rows, or a sentence that says what is wrong."""
        check_graph(graph)
        X = as_matrix(X, backend)
        check_rows("X", X, graph)
        if X.shape[1] == 0:
            raise ValueError("X has no columns: give at least one feature.")
        check_scale(X)
        y, train = to_host(y, backend), to_host(train, backend)
        return X, make_targets(y, train, graph.num_nodes, self.loss)

    def plan(
        self, n: int, m: int, d: int, c: int, n_train: int, X_nonzeros: int | None = None
    ) -> Plan:
        """What `fit` would do with data of this size, before any of it is loaded.

        Parameters
        ----------
        n, m, d, c, n_train : int
            Nodes, undirected edges, features, outputs and training nodes.
        X_nonzeros : int, optional
            Of a sparse X; None: X is dense.

        Examples
        --------
        >>> from herta_gpu import HERTA
        >>> plan = HERTA(lam=20.0, memory_budget="64GB").plan(10**6, 10**7, 128, 40, 5 * 10**5)
        >>> plan.strategy, plan.memory["Q"]
        ('direct', 512000000)
        """
        for name, value in (("n", n), ("d", d), ("c", c), ("n_train", n_train)):
            check_count(name, value)
        check_count("m", m, least=0)
        if X_nonzeros is not None:
            check_count("X_nonzeros", X_nonzeros, least=0)
        if n_train > n:
            raise ValueError(f"n_train is {n_train:,} but there are {n:,} nodes.")
        settings, backend = self._settings(), self._checked()
        word, X_bytes = np.dtype(settings.dtype).itemsize, 24 * (X_nonzeros or 0)
        sizes = Sizes(n, m, d, c, n_train, word, X_bytes, nonzeros=X_nonzeros)
        budget = settings.budget(backend.memory_available())
        return make_plan(Outline(n, settings.lam), sizes, settings, budget)

    def transform(self, graph: Graph, X: Any) -> Any:
        """Z* = H^-1 X W (n, c), to a relative H-norm error of 1e-6; on a GPU if X is."""
        return in_kind_of(self._output(graph, X), X)

    def _output(self, graph: Graph, X: Any) -> Array:
        """Z* as an array of the device that X is on."""
        self._check_fitted()
        backend = get_backend(self.device)
        check_graph(graph)
        X = as_matrix(X, backend)
        check_rows("X", X, graph)
        if X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]:,} features but the model was fitted with "
                f"{self.n_features_in_:,}."
            )
        check_scale(X, fitted=True)
        settings = self._settings()
        H = RegularizedLaplacian(graph, settings.lam, backend, settings.dtype)
        everything = backend.xp.arange(graph.num_nodes)
        budget = settings.budget(backend.memory_available())
        width = max(1, block_width(graph.num_nodes, self.W_.shape[1], settings.dtype, budget))
        features = Features(X, backend, graph.order, budget)
        A = UnfoldedMap(H, features, everything, width)
        # Not from the fit's Z, near as it is: a model that was stored and read again gives the same
        # bits as this one.
        Z = A.forward(backend.asarray(self.W_), _TRANSFORM_TOL).value
        if not bool(backend.xp.isfinite(Z).all()):  # synchronize!
            raise ValueError("H^-1 X W overflows: give X in the units the model was fitted with.")
        Z = Z if on_device(X) else backend.to_numpy(Z)  # synchronize!
        return take_rows(Z, graph.inverse_order(), backend).astype(self.dtype)

    def predict(self, graph: Graph, X: Any) -> Any:
        """Class labels, or the model's output for float targets."""
        Z = self._output(graph, X)
        if self.classes_ is None:
            return in_kind_of(Z[:, 0] if self._flat else Z, X)
        best, backend = Z.argmax(axis=1), get_backend(self.device)
        if self.classes_.dtype.kind == "U":
            return self.classes_[to_host(best, backend)]  # neither a GPU nor a tensor holds text
        classes = backend.asarray(self.classes_) if on_device(Z) else self.classes_
        return in_kind_of(classes[best], X)

    def score(self, graph: Graph, X: Any, y: Any, idx: Any = None) -> float:
        """Accuracy on the labelled nodes of `idx` (default all), or R^2 for float targets."""
        self._check_fitted()
        check_graph(graph)
        backend = get_backend(self.device)
        y, idx = (to_host(a, backend) for a in (y, idx))
        check_scored(y, graph.num_nodes)  # before the solve
        predicted = to_host(self.predict(graph, X), backend)
        return accuracy_or_r2(predicted, y, node_rows(idx, graph.num_nodes), self.classes_)

    def save(self, path: str | Path) -> None:
        """Write the fitted model to exactly this path, in NumPy's .npz format and without pickles.

        `load` gives back everything that `fit` left: weights, parameters, certificate, status,
        plan, histories, spectrum and stages.

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
        self._check_fitted()
        write_model(self, path, _FITTED)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted model that `save` wrote; a damaged file is a `DataError` that says so."""
        return read_model(cls, path, _FITTED)

    def _lam(self) -> float:
        return strength(self.lam, self.alpha)

    def _settings(self) -> Settings:
        """The parameters, checked; a sentence says what is wrong with them."""
        return Settings.of(self.get_params())

    def _checked(self) -> Backend:
        """The device, if the parameters are right and it is there."""
        return get_backend(self._settings().device)

    def _check_fitted(self) -> None:
        if not hasattr(self, "W_"):
            raise RuntimeError("This HERTA is not fitted yet: call fit first.")


# ---- the parts of fit ------------------------------------------------------------------------
def _check_helpers(callback: Any, checkpoint: Any, stages: Any) -> None:
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function, not {type(callback).__name__}.")
    if not isinstance(checkpoint, (Checkpoint, type(None))):
        raise TypeError(f"checkpoint must be a Checkpoint, not {type(checkpoint).__name__}.")
    if not isinstance(stages, (Stages, type(None))):
        raise TypeError(f"stages must be a Stages, not {type(stages).__name__}.")


def _sampled(
    H: RegularizedLaplacian, n_samples: int | None, settings: Settings, budget: int
) -> RegularizedLaplacian:
    """I + lam L_tilde: Algorithm 2 when it was asked for, its cheap relative otherwise."""
    if n_samples is None:
        return H
    faithful = settings.scores == "sketch"
    found = sparsified(H, n_samples, 0.0, settings.scores, faithful, settings.seed, budget)
    return H.on(found.graph)


@dataclass(frozen=True)
class _Made:
    """P, what is known of the Hessian in its coordinates, and how P came about in the end."""

    P: Preconditioner
    spectrum: Spectrum | None
    recipe: Recipe
    changes: list[Decision]  # what turned out otherwise than planned


def _preconditioned(
    plan: Plan,
    settings: Settings,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    Y: Array,
    stages: Stages,
    recall: Recall,
) -> _Made:
    """P^-1/2 and bounds of the Hessian it leaves; without any, Q is solved tighter once."""
    recipe = plan.recipe
    changes: list[Decision] = []
    if not settings.precondition:
        none = no_preconditioner(A.H.backend, A.X.shape[1], Y.shape[1])
        return _Made(none, None, recipe, changes)
    while True:
        with stages("preconditioner"):
            P = build(recipe, H_tilde, A, Y, settings.ridge, recall)
        with stages("spectrum"):
            spectrum = choose_spectrum(plan.certificate, P, A, settings.ridge, settings.seed)
        missed = spectrum is not None and spectrum.kind == "estimate"
        rough = H_tilde is not A.H or recipe.sketch_rows is not None  # on purpose
        alike = P.kept < P.features and not recipe.whiten and not rough
        if alike:
            recipe, why = orthonormal(recipe)
        elif missed and not rough and not recipe.exact:
            recipe, why = tighter(recipe, A.H)
        else:
            return _Made(P.for_training(A.H.backend), spectrum, recipe, changes)
        changes.append(why)


def _on_stored_rows(
    run: Training,
    plan: Plan,
    made: _Made,
    settings: Settings,
    A: UnfoldedMap,
    Y: Array,
    recall: Recall,
) -> tuple[_Made, Array]:
    """W from the stored rows of Q, solved for more tightly while that helps to prove it.

    Where it does not, the true model has the last word, if there is memory for it.
    """
    backend, loss, ridge = A.H.backend, LOSSES[settings.loss], settings.ridge
    X_norm = A.X.norm_bound() if ridge > 0 else math.inf
    P, recipe, changes = made.P, made.recipe, list(made.changes)
    u = None
    for _ in range(min(_ATTEMPTS, settings.max_iter)):
        problem = StoredProblem(backend, loss, P, Y, ridge, X_norm)
        u = problem.minimised(settings.tol, u, _CHEAP_STEPS * settings.max_iter, run.warm)
        proof = run.direct(problem, u)
        again = _again(run, proof, P, recipe, settings)
        if again is None:
            break
        recipe = again.value
        changes.append(again.decision)
        P = lowered(P, recipe, A, Y, ridge, recall)
    made = replace(made, P=P, recipe=recipe, changes=changes)
    if run.status != "stagnated" or not plan.may_look or len(run.history) > settings.max_iter:
        return made, problem.basis.weights(u)
    made.changes.append(Decision("proof", "true gradients", "Q alone could not prove the fit"))
    kind = "spectral-deterministic" if loss.quadratic else plan.certificate
    spectrum = choose_spectrum(kind, P, A, ridge, settings.seed)
    run.P, run.spectrum = P, spectrum
    point = run.loop(A, P.inner.unhalf(u), certified=True)
    return replace(made, spectrum=spectrum), point.W


def _again(
    run: Training, proof: Proof, P: Preconditioner, recipe: Recipe, settings: Settings
) -> Chosen | None:
    """How to solve for Q again so that stored rows prove more; None if they do, or never will."""
    certified, kept = run.status.startswith("certified"), recipe.keep_residual
    if (certified and (proof.enough(settings.tol) or not kept)) or run.status == "converged":
        return None
    if run.status == "max_iter":
        return None
    worst = None if P.diffusion is None else P.diffusion.worst
    again = with_less_left(recipe, worst, proof.wanted(0.7 * settings.tol))
    if again is not None or certified or recipe.whiten or worst is None:
        return again
    return orthonormal(recipe)


def _start(
    run: Training,
    plan: Plan,
    settings: Settings,
    P: Preconditioner,
    A: UnfoldedMap,
    budget: int,
) -> tuple[Array, Array | None]:
    """Where the loop starts, and what is known of Z there: a cheaper model may go first."""
    warm = LOSSES[settings.loss].quadratic
    w = P.w_start if warm else A.H.backend.xp.zeros_like(P.w_start)
    if plan.strategy == "direct" and P.rows is not None:
        rows = P.rows if P.basis is None else P.basis.rows(P.rows)
        return run.loop(DenseMap(rows, A.H.backend), w, certified=False).w, None
    if plan.loop_samples is not None:
        H_loop = _sampled(A.H, plan.loop_samples, settings, budget)
        A_loop = UnfoldedMap(H_loop, A.X, A.train, A.width)
        return run.loop(A_loop, w, certified=False).w, None
    return w, P.Z_start if warm else None
