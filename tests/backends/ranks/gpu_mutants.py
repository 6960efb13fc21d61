"""Bugs put into what GPUs of several ranks do, which must be found on the stand-ins.

``mpirun -n 2 python -m tests.backends.ranks.gpu_mutants`` prints a line of JSON for each: its name,
and how it was found, or nothing.  It runs in the debug mode, in which ranks that went different
ways notice it at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import nccl, ranks_of
from herta_gpu.laplacian import RegularizedLaplacian, block_cg, chebyshev
from tests import cupy_standin
from tests.backends.ranks.checks import COMM, RANK, SIZE
from tests.backends.ranks.gpu_checks import LAM, N, data, dense_H, part_of

NODES, NCCL = "herta_gpu.backends.cuda.nodes", "herta_gpu.backends.ranks.nccl"
TEAMS = "herta_gpu.backends.ranks.teams"  # between them: it has what it imported from NCCL
LOCAL = "self.xp.stack([{0}, *[0.0 * {0}] * (self.ranks - 1)])"
MUTANTS = {
    "no wait for the messages": (
        NCCL, "self.xp.cuda.get_current_stream().wait_event(self._arrived)", "pass"
    ),
    "messages that do not wait for what they send": (
        NCCL, "self.stream.wait_event(self._begun)", "pass"
    ),
    "send outside of a group": (NCCL, "            nccl.groupStart()\n", ""),
    "a sum over the rows of one rank": (
        NCCL, "return add_up(self.xp, self.team.size, x, self.of_ranks, self._exchange)", "return x"
    ),
    "a halo of the step before": (
        NODES, "if L.halo.size:\n            # Nobody", "if 0:\n            # Nobody"
    ),
    "no halo": (NODES, "            L.halo.fetched(Z)\n", ""),
    "rows of neighbours on their way": (
        NODES, "        self.nccl.finish()\n        if L.halo.size:", "        if L.halo.size:"
    ),
    "local pHp": (NODES, 'self.nccl.of_ranks(s.pHp, "pHp")', LOCAL.format("s.pHp")),
    "local rho": (NODES, 'self.nccl.of_ranks(s.dots, "rho")', LOCAL.format("s.dots")),
    "own scales only": (NODES, "graph.exact()[0]", "1.0 / np.sqrt(graph.degree)"),
    "all ranks on the first GPU": (
        NCCL, "device = hosts[: team.rank].count(hosts[team.rank]) % count", "device = 0"
    ),
}  # fmt: skip


def solves() -> None:
    """Both ways to solve, on a part, against dense algebra."""
    edges, X, *_ = data()
    part, exact = part_of(edges), np.linalg.solve(dense_H(edges), X)
    backend = backend_for("cuda", part, None)
    with backend.working():
        H, B = RegularizedLaplacian(part, LAM, backend, "float64"), backend.asarray(X[part.nodes])
        Z, info = block_cg(H, B, 1e-7)
        both = Z.get(), chebyshev(H, B, 40).get()
    assert info.status == "converged"
    for found in both:
        assert np.abs(found - exact[part.nodes]).max() < 1e-6


def with_bug(where: str, old: str, new: str) -> None:
    """Replace a module by one with a bug in it, and what was made with the other."""
    for name in dict.fromkeys([where, TEAMS, NODES]):
        real = sys.modules[name]
        text = Path(str(real.__file__)).read_text(encoding="utf-8")
        if name == where:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        made = ModuleType(name)
        made.__file__ = real.__file__
        sys.modules[name] = made
        exec(compile(text, name, "exec"), made.__dict__)
    hand_out(sys.modules[NCCL])


def hand_out(module: ModuleType) -> None:
    """Give those who took functions of nccl.py when they were imported the ones of `module`."""
    sys.modules["herta_gpu.backends.ranks"].take_gpu = module.take_gpu
    sys.modules["herta_gpu.backends.ranks.teams"].nccl_of = module.nccl_of


def main() -> None:
    team, asked = ranks_of(COMM), sys.argv[1:]
    assert (SIZE, N % SIZE) == (2, 0)
    cupy_standin.GPUS[0] = SIZE
    for name, bug in [("none", None), *MUTANTS.items()]:
        if asked and name not in asked:
            continue
        found = ""
        with cupy_standin.installed():
            team.nccl, team.debug = None, True
            import herta_gpu.backends.cuda.nodes  # noqa: F401

            before = {module: sys.modules[module] for module in (NCCL, TEAMS, NODES)}
            try:
                with team.together():
                    if bug is not None:
                        with_bug(*bug)
                    solves()
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            finally:
                sys.modules.update(before)
                hand_out(nccl)
        if RANK == 0:
            print(json.dumps({"mutant": name, "found": found}), flush=True)


if __name__ == "__main__":
    main()
