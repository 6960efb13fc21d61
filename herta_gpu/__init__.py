"""Unfolded graph neural networks trained to a certified optimum (HERTA)."""

from herta_gpu.certificate import Certificate
from herta_gpu.graph import Graph
from herta_gpu.herta import HERTA
from herta_gpu.solver import SDDSolver
from herta_gpu.sparsifier import Sparsifier, effective_dimension

__all__ = ["HERTA", "Certificate", "Graph", "SDDSolver", "Sparsifier", "effective_dimension"]
__version__ = "0.1.0"
