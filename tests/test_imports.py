"""Imports go down only: the package is a stack of layers without a cycle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "herta_gpu"

# The layers from the ground up; a name is that of a module, or of a folder with all in it.
LAYERS = [
    ["", "plumbing", "planning", "conformal"],
    ["graph"],
    ["plumbing.bundles"],
    ["backends.base"],
    ["backends.cpu", "backends.cuda", "backends.ranks"],
    ["backends"],
    ["laplacian"],
    ["solver"],
    ["features", "losses"],
    ["factors"],
    ["prediction", "more.sweep"],
    ["coordinates", "problem", "optimizers", "sparsifier"],
    ["diffusion"],
    ["preconditioner"],
    ["certificate"],
    ["more.leave_one_out"],
    ["more.labels"],
    ["more"],
    ["task"],
    ["training"],
    ["herta"],
    ["more.attention", "torch"],
    ["sklearn"],
    ["datasets"],
    ["app", "__main__"],
]

# A module that needs an optional package is imported inside a function, even from a higher layer.
OPTIONAL = {
    ("graph", "backends"),  # edges on a GPU
    ("graph", "backends.cuda.cugraph"),
    ("graph", "backends.ranks.parts"),  # mpi4py
    ("plumbing.building", "backends.cpu.kernels.building"),  # numba
    ("plumbing.building", "backends.cpu.kernels.ordering"),  # numba
    ("backends", "backends.cpu.compiled"),  # numba
    ("backends", "backends.cuda.backend"),  # CuPy
    ("backends", "backends.ranks"),  # mpi4py
    ("backends.cpu.compiled", "backends.ranks.nodes"),  # mpi4py
    ("backends.cuda.backend", "backends.cuda.nodes"),
    ("app.crew", "backends.ranks"),
}
# The command line answers Ctrl-C before the rest of the package is imported.
LIGHT = ("app.cli", "__main__")


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def edges(module: str) -> set[tuple[str, bool]]:
    """(module that is imported, whether that happens inside a function) of one module."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in types_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "herta_gpu":
            base = (node.module or "").removeprefix("herta_gpu").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add((inner if inner in MODULES else base, id(node) in late))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "herta_gpu":
                    found.add((alias.name.removeprefix("herta_gpu").lstrip("."), id(node) in late))
    return found


def layer(module: str) -> int:
    """The layer that names the module, or the nearest folder around it."""
    while True:
        for height, names in enumerate(LAYERS):
            if module in names:
                return height
        module = module.rpartition(".")[0]


def test_no_import_goes_up():
    up = {
        (module, other)
        for module in MODULES
        for other, _ in edges(module)
        if layer(other) > layer(module) and (module, other) not in OPTIONAL
    }
    assert up == set()


def test_late_imports_are_for_optional_packages():
    late = {
        (module, other)
        for module in MODULES
        if module not in LIGHT
        for other, is_late in edges(module)
        if is_late
    }
    assert late == OPTIONAL


def test_there_is_no_cycle():
    graph = {
        module: {other for other, is_late in edges(module) if not is_late and other != module}
        for module in MODULES
    }
    while graph:
        free = {module for module, others in graph.items() if not others & graph.keys()}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {m: others for m, others in graph.items() if m not in free}


def test_the_package_itself_imports_nothing_heavy():
    code = (
        "import sys, herta_gpu; herta_gpu.HERTA; "
        "heavy = {'cupy', 'cugraph', 'ogb', 'torch', 'mpi4py', 'matplotlib', 'numba', 'pandas'}; "
        "sys.exit(len(heavy & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_house_stays_small():
    """20 modules on the ground floor, 8 parameters but for what users call, 40 lines of `fit`."""
    ground = [
        p for name, p in MODULES.items() if p.parent == PACKAGE and name not in ("", "__main__")
    ]
    assert len(ground) <= 20
    crowded = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "kernels" not in name:
                count = len([a for a in node.args.args if a.arg not in ("self", "cls")])
                crowded |= {node.name} if count + len(node.args.kwonlyargs) > 8 else set()
            if isinstance(node, ast.FunctionDef) and (name, node.name) == ("herta", "fit"):
                lines = path.read_text(encoding="utf-8").splitlines()
                body = [line.strip() for line in lines[node.body[0].end_lineno : node.end_lineno]]
                assert len([line for line in body if line and not line.startswith("#")]) <= 40
    assert crowded <= {"__init__", "fit", "label_features"}
