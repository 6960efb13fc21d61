"""Compiled loops, named like the CUDA sources that they mirror."""
