"""A fuzz of the certificates: random problems against an optimum from independent algebra.

    python -m tests.fuzz --seconds 600 --seed 0

`problems` draws them, `reference` finds the optimum in extended precision without any code of the
package, `checks` says what must hold, and `__main__` is the program.
"""
