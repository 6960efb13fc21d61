"""Unfolded graph neural networks trained to a certified optimum (HERTA).

The ground floor is the paper; every other concern has a room with a name.

    herta            Algorithm 1, in the paper's order: the place to begin reading; `task` has what
                     is fitted and where
    sparsifier       Algorithm 2: scores, sampling, L_tilde
    solver           SDDSolver; `laplacian` has H = I + lam L, block CG and Chebyshev
    preconditioner   P from Q, which `diffusion` solves for or sketches; `factors` makes P^-1/2
                     and cheaper forms of it
    problem          Z*(W) and its gradient through two solves; `prediction` has the outputs of a
                     fitted model, a block of columns at a time
    losses           a new loss goes here; `optimizers` the steps, `training` the loop
    certificate      what is known of the Hessian, and what is proven of a fit
    graph, features  from an edge list to a Graph; X behind three products

The strategy "direct", which needs no array of n x d or n x c numbers, in the order of its work:

    coordinates      those in which the columns of X are orthonormal, or of norm 1
    diffusion        the training rows of Q in these, with a proven bound of their error; blocks
                     of columns for several lam
    optimizers       the optimum of cross entropy on stored rows, and second derivatives on the way
    certificate      what the stored rows prove of the true problem; `more.leave_one_out` what
                     they say of models without a row

More from the same solver, each in a module of its own:

    more/            LabelPropagation and CorrectAndSmooth (labels), labels of other folds as
                     features (label_features), several lam from one sequence of products (sweep);
                     edges that may be distrusted: by the features of their ends (similarity), by
                     outputs (attention, penalties), the energy's minimum (energy);
                     personalised PageRank with a bound of every number (pagerank)
    conformal        prediction sets that hold the truth with a stated probability

What other libraries' users know it by:

    torch            Z = H^-1 F as a layer for PyTorch
    sklearn          NodeClassifier and NodeRegressor, which hold graph and X

    planning/        from numbers to a frozen plan: settings (the caller's wishes), costs, memory,
                     plan; forecast (GPUs and processes that are not there)
    backends/        the primitives: base.py, cpu/ (reference and compiled), cuda/ (CuPy), ranks/
                     (several processes: MPI)
    datasets/        one module per source of data
    app/             the command line, one module per command
    plumbing/        checks, files, checkpoints, timers, scikit-learn manners

Imports go down only; tests/test_imports.py holds the order.
"""

TYPE_CHECKING = False  # the word that type checkers know, without the time that `typing` takes
if TYPE_CHECKING:
    from herta_gpu.certificate import Certificate
    from herta_gpu.graph import Graph
    from herta_gpu.herta import HERTA
    from herta_gpu.more.attention import Attention
    from herta_gpu.more.energy import AttentionSolver
    from herta_gpu.more.kernel import KernelModel
    from herta_gpu.more.label_features import label_features
    from herta_gpu.more.labels import CorrectAndSmooth, LabelPropagation
    from herta_gpu.more.pagerank import personalized_pagerank
    from herta_gpu.more.penalties import Huber, Power, PseudoHuber
    from herta_gpu.more.random_features import RandomFeatures
    from herta_gpu.more.similarity import similarity
    from herta_gpu.plumbing.checkpoint import Checkpoint
    from herta_gpu.plumbing.targets import ConvergenceWarning
    from herta_gpu.sklearn import NodeClassifier, NodeRegressor
    from herta_gpu.solver import SDDSolver
    from herta_gpu.sparsifier import Sparsifier, effective_dimension

__all__ = [
    "HERTA", "Attention", "AttentionSolver", "Certificate", "Checkpoint", "ConvergenceWarning",
    "CorrectAndSmooth", "Graph", "Huber", "KernelModel", "LabelPropagation", "NodeClassifier",
    "NodeRegressor",
    "Power", "PseudoHuber", "RandomFeatures", "SDDSolver", "Sparsifier", "effective_dimension",
    "label_features", "personalized_pagerank", "similarity",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "HERTA": "herta", "Certificate": "certificate", "Graph": "graph", "SDDSolver": "solver",
    "Sparsifier": "sparsifier", "effective_dimension": "sparsifier",
    "Checkpoint": "plumbing.checkpoint", "ConvergenceWarning": "plumbing.targets",
    "NodeClassifier": "sklearn", "NodeRegressor": "sklearn", "LabelPropagation": "more.labels",
    "CorrectAndSmooth": "more.labels", "label_features": "more.label_features",
    "Attention": "more.attention", "AttentionSolver": "more.energy",
    "Huber": "more.penalties", "Power": "more.penalties", "PseudoHuber": "more.penalties",
    "personalized_pagerank": "more.pagerank", "similarity": "more.similarity",
    "RandomFeatures": "more.random_features", "KernelModel": "more.kernel",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """What is asked for is imported then: the command line begins before NumPy is there."""
    import importlib

    if name in _HOMES:
        found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    if name in _HOMES.values():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
