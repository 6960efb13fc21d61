"""A fuzz of the certificates: random problems against an optimum from independent algebra.

    python -m tests.fuzz --seconds 600 --seed 0

`problems` draws them, `reference` finds the optimum in extended precision without any code of the
package, `checks` says what must hold, and `__main__` is the program.
"""

import os

# As in the tests: with one thread of BLAS many small problems take a fraction of the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
