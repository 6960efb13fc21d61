"""Parameters of names of the installed CuPy: ``module:name`` in, JSON out, False if there is none.

Run as a program, so that the real CuPy never meets its stand-in.  Where CuPy is compiled, the first
line of the docstring tells the signature; what needs a library that is not there is read from the
source file, or from the strings of the compiled one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
from functools import reduce
from pathlib import Path
from typing import Any


def from_docstring(thing: Any) -> list[str] | None:
    found = re.match(r"[\w.]+\((.*?)\)( ->|\n|$)", thing.__doc__ or "", re.DOTALL)
    if not found:
        return None
    words = [part.split("=")[0].split() for part in found[1].split(",")]
    return [word[-1] for word in words if word and word[-1] not in ("self", "*")]


def from_source(module: str, name: str) -> list[str] | bool:
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    if not spec.origin.endswith(".py"):
        return False
    for file in sorted(Path(spec.origin).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return [a.arg for a in node.args.args + node.args.kwonlyargs]
    return False


def from_binary(module: str, name: str) -> list[str] | bool | None:
    """The docstring within a compiled module; None for a constant, whose name is all there is."""
    package, _, stem = module.rpartition(".")
    spec = importlib.util.find_spec(package)
    folder = Path(next(iter(spec.submodule_search_locations or [])) if spec else ".")
    content = b"\0".join(file.read_bytes() for file in sorted(folder.glob(f"{stem}.*so")))
    found = re.search(rb"\0(%s\([\w ,=]*\))(?: -> \w+)?[\0\n]" % name.encode(), content)
    if found:
        return from_docstring(type("Documented", (), {"__doc__": found[1].decode() + "\n"}))
    return None if b"\0" + name.encode() + b"\0" in content else False


def of_class(module: str, name: str) -> list[str] | bool | None:
    """`from_binary` of a method, or of anything else."""
    found = from_binary(module, name)
    return from_binary(module, name.rpartition(".")[2]) if found is False else found


def parameters(dotted: str) -> list[str] | bool | None:
    module, _, name = dotted.partition(":")
    try:
        thing = reduce(getattr, name.split("."), importlib.import_module(module))
    except AttributeError:
        # Without libnccl, CuPy's module of that name is all but empty.
        return (
            of_class("cupy_backends.cuda.libs.nccl", name) if module == "cupy.cuda.nccl" else False
        )
    except ImportError:
        return from_source(module, name) or from_binary(module, name)
    try:
        return [p for p in inspect.signature(thing).parameters if p != "self"]
    except (TypeError, ValueError):
        return from_docstring(thing)


if __name__ == "__main__":
    print(json.dumps({name: parameters(name) for name in json.load(sys.stdin)}))
