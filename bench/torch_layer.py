"""What does a training step through H^-1 cost, against the layers that people unroll?

    HERTA_DATA=folder python bench/torch_layer.py [--quick] [pubmed ogbn-arxiv]

One step is Z = layer(F) and the gradient of F, 64 columns, lam = 20, float32, on the CPU.  PyG's
APPNP and an unrolled TWIRLS take as many steps as they need to be within 1e-3 of H^-1 F on this F,
measured against a solve to 1e-9; `UnfoldedLayer` has tol = 1e-3, which it proves for any F.  All
run in turn in one process; each then runs once more in a process of its own for its peak memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import QUICK, Data, Results, race, random_power_law, record

from herta_gpu import Graph, SDDSolver
from herta_gpu.torch import UnfoldedLayer, torch  # after `common`, which tells its threads to sleep

LAM, TOL, COLUMNS = 20.0, 1e-3, 64


def features(graph: Graph) -> Any:
    return torch.from_numpy(
        np.random.default_rng(0).standard_normal((graph.num_nodes, COLUMNS)).astype(np.float32)
    )


def smoothing(graph: Graph) -> Any:
    """S = I - L as a CSR tensor, self-loops included."""
    S = sp.csr_array(sp.eye_array(graph.num_nodes) - graph.to_csr())
    S.sort_indices()
    warnings.filterwarnings("ignore", category=UserWarning)  # CSR tensors are in beta state
    parts = (S.indptr.astype(np.int64), S.indices.astype(np.int64), S.data.astype(np.float32))
    return torch.sparse_csr_tensor(*map(torch.from_numpy, parts), size=S.shape)


def appnp(graph: Graph, steps: int) -> Callable[[Any], Any]:
    from torch_geometric.nn import APPNP

    S, layer = smoothing(graph), APPNP(steps, alpha=1 / (1 + LAM), normalize=False)
    return lambda F: layer(F, S)


def twirls(graph: Graph, steps: int) -> Callable[[Any], Any]:
    """Preconditioned gradient descent on the energy, as TWIRLS unrolls it."""
    S = smoothing(graph)

    def layer(F: Any) -> Any:
        Z = F
        for _ in range(steps):
            Z = (LAM * (S @ Z) + F) / (1 + LAM)
        return Z

    return layer


class SymmetricProduct(torch.autograd.Function):
    """S Z whose backward pass is S dZ, which PyTorch cannot know."""

    @staticmethod
    def forward(ctx: Any, S: Any, Z: Any) -> Any:
        ctx.S = S
        return S @ Z

    @staticmethod
    def backward(ctx: Any, dZ: Any) -> Any:
        return None, ctx.S @ dZ


def symmetric_twirls(graph: Graph, steps: int) -> Callable[[Any], Any]:
    """The same by someone who knows that S is symmetric."""
    S = smoothing(graph)

    def layer(F: Any) -> Any:
        Z = F
        for _ in range(steps):
            Z = (LAM * SymmetricProduct.apply(S, Z) + F) / (1 + LAM)
        return Z

    return layer


def ours(graph: Graph, method: str) -> Callable[[Any], Any]:
    return UnfoldedLayer(graph, LAM, TOL, method)


MAKERS: dict[str, Callable[[Graph, int], Callable[[Any], Any]]] = {
    "UnfoldedLayer": lambda graph, steps: ours(graph, "chebyshev"),
    "UnfoldedLayer, CG": lambda graph, steps: ours(graph, "cg"),
    "PyG APPNP": appnp,
    "unrolled TWIRLS": twirls,
    "unrolled TWIRLS, symmetric backward": symmetric_twirls,
}


def step(layer: Callable[[Any], Any], F: Any) -> Any:
    F = F.detach().requires_grad_()
    layer(F).sum().backward()
    return F.grad


def worst(Z: Any, exact: Any) -> float:
    """The largest relative error of a column."""
    off = torch.linalg.norm(Z.detach().double() - exact, dim=0)
    return float((off / torch.linalg.norm(exact, dim=0)).max())


def steps_needed(graph: Graph, F: Any, exact: Any) -> int:
    """The fewest steps that bring the unrolled layers within TOL on this F."""
    S, Z, count = smoothing(graph), F, 0
    while worst(Z, exact) > TOL:
        Z, count = (LAM * (S @ Z) + F) / (1 + LAM), count + 1
    return count


def status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def peak(name: str, data: str, steps: int) -> float:
    """Megabytes that a step needed at most, beside what was there before it."""
    graph = Data(data).graph
    few = random_power_law(1000, 5000)
    step(MAKERS[name](few, steps), features(few))  # compile
    layer, F = MAKERS[name](graph, steps), features(graph)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = status("VmRSS")
    step(layer, F)
    return status("VmHWM") - before


def memory(name: str, data: str, steps: int) -> float:
    command = [sys.executable, __file__, "--peak", name, data, str(steps)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    if "--peak" in sys.argv:
        name, data, steps = sys.argv[sys.argv.index("--peak") + 1 :]
        print(json.dumps(peak(name, data, int(steps))))
        return
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    names = named or (["pubmed"] if QUICK else ["pubmed", "ogbn-arxiv"])
    results = Results("torch_layer", again=lambda row: row["data"] in names)
    for data in names:
        graph = Data(data).graph
        F = features(graph)
        solver = SDDSolver(graph, LAM, tol=1e-9, dtype="float64")
        exact = torch.from_numpy(solver.solve(F.double().numpy()))
        steps = steps_needed(graph, F, exact)
        layers = {name: make(graph, steps) for name, make in MAKERS.items()}
        runners = {name: (lambda f=f: step(f, F)) for name, f in layers.items()}  # noqa: B023
        found = race(runners, 3 if data == "ogbn-arxiv" else 9, 240)
        for name, row in found.items():
            row["error"], row["bound"] = worst(layers[name](F), exact), None
            if name.startswith("UnfoldedLayer"):
                row["bound"] = layers[name].error_
            row["steps"] = None if name.startswith("UnfoldedLayer") else steps
            row["peak_MB"] = memory(name, data, steps)
        record(results, "step", found, "UnfoldedLayer", data=data)


if __name__ == "__main__":
    main()
