"""Unfolded graph neural networks trained to a certified optimum (HERTA)."""

from herta_gpu.graph import Graph
from herta_gpu.solver import SDDSolver

__all__ = ["Graph", "SDDSolver"]
