"""The primitives on the CPU: a reference in NumPy and SciPy, and compiled kernels."""
