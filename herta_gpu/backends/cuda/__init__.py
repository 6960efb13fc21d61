"""The primitives on a GPU: the only folder that imports CuPy or cuGraph."""
