"""Unfolded graph neural networks trained to a certified optimum (HERTA)."""

TYPE_CHECKING = False  # the word that type checkers know, without the time that `typing` takes
if TYPE_CHECKING:
    from herta_gpu.certificate import Certificate
    from herta_gpu.graph import Graph
    from herta_gpu.herta import HERTA
    from herta_gpu.plumbing.checkpoint import Checkpoint
    from herta_gpu.solver import SDDSolver
    from herta_gpu.sparsifier import Sparsifier, effective_dimension

__all__ = [
    "HERTA", "Certificate", "Checkpoint", "Graph", "SDDSolver", "Sparsifier", "effective_dimension",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "HERTA": "herta", "Certificate": "certificate", "Graph": "graph", "SDDSolver": "solver",
    "Sparsifier": "sparsifier", "effective_dimension": "sparsifier",
    "Checkpoint": "plumbing.checkpoint",
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
