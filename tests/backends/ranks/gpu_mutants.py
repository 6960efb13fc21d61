"""Bugs put into what GPUs of several ranks do, and programs that end badly.

``mpirun -n 2 python -m tests.backends.ranks.gpu_mutants bugs`` prints a line of JSON for each bug:
its name, and how it was found, or nothing.  It runs in the debug mode, in which ranks that went
different ways notice it at once.  ``waits`` drops each wait of backends/ranks/nccl.py; ``hang`` is
a rank that does not come, ``lost`` one that sends another message than the other rank expects, and
``herta`` the command line on so many GPUs as GPUS says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np

from herta_gpu.app.cli import main as herta
from herta_gpu.backends import backend_for
from herta_gpu.backends.ranks import nccl, ranks_of
from herta_gpu.laplacian import RegularizedLaplacian, block_cg, chebyshev
from tests.backends.ranks.checks import COMM, RANK, SIZE
from tests.backends.ranks.gpu_checks import LAM, N, data, dense_H, forget, part_of
from tests.cuda_device.active import DEVICE

NODES, NCCL = "herta_gpu.backends.cuda.nodes", "herta_gpu.backends.ranks.nccl"
TEAMS = "herta_gpu.backends.ranks.teams"  # between them: it has what it imported from NCCL
LOCAL = "self.xp.stack([{0}, *[0.0 * {0}] * (self.ranks - 1)])"
MUTANTS = {
    "send outside of a group": (NCCL, "            nccl.groupStart()\n", ""),
    "a sum over the rows of one rank": (
        NCCL, "class Nccl(Channel):\n",
        "class Nccl(Channel):\n    total = staticmethod(lambda x: x)\n",
    ),
    "a halo of the step before": (
        NODES, "if L.halo.size:\n            # Nobody", "if 0:\n            # Nobody"
    ),
    "no halo": (NODES, "        L.halo.fetched(Z)\n", ""),
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
KERNELS = {
    "the last rank left out of a sum": ("r < ranks; ++r", "r < ranks - 1; ++r"),
    "the sums of one rank only": (
        "s.turn(c, step, over_ranks(dots, ranks, k, c));", "s.turn(c, step, dots[c]);"
    ),
    "rows packed one further": ("store(out + i * k", "store(out + (m - 1 - i) * k"),
}  # fmt: skip
WAITS = (
    "        self._begun.record(self.xp.cuda.get_current_stream())\n",
    "        self.stream.wait_event(self._begun)\n",
    "        self.xp.cuda.get_current_stream().wait_event(self._arrived)\n",
    "        event.record(stream)\n",
)


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


def faced(change: tuple[str, str, str] | None, kernel: tuple[str, str] | None = None) -> str:
    """What the device, NCCL or dense algebra says of the solves with a bug; "": nothing."""
    team, said = ranks_of(COMM), ""
    forget()
    team.debug = True
    before = {module: sys.modules[module] for module in (NCCL, TEAMS, NODES)}
    try:
        with team.together(), DEVICE.changed(*kernel) if kernel else nullcontext():
            if change is not None:
                with_bug(*change)
            solves()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        sys.modules.update(before)
        hand_out(nccl)
    said = "; ".join([*DEVICE.refusals(), said])
    return next((s for s in team.each(said) if s), "")


def tell(name: str, found: str) -> None:
    if RANK == 0:
        print(json.dumps({"name": name, "found": found}), flush=True)


def leave_the_other_alone(expected: int) -> None:
    """Rank 0 waits for a sum; rank 1 sleeps, or sends less than is `expected`."""
    backend = backend_for("cuda", part_of(data()[0]), None)
    backend.total(backend.xp.ones(3))
    if RANK == 1 and expected == 3:
        time.sleep(1000)
    backend.total(backend.xp.ones(3 if RANK == 0 else expected)).get()


def main(what: str, *asked: str) -> None:
    DEVICE.set(devices=int(os.environ.get("GPUS", SIZE)))
    import herta_gpu.backends.cuda.nodes  # noqa: F401

    if what == "herta":
        sys.exit(herta([*asked]))
    if what in ("hang", "lost"):
        leave_the_other_alone({"hang": 3, "lost": 2}[what])
        return
    assert (SIZE, N % SIZE) == (2, 0)
    tell("none", faced(None))
    if what == "waits":
        for line in WAITS:
            tell(line.strip(), faced((NCCL, line, "        pass\n")))
        return
    for name, bug in MUTANTS.items():
        tell(name, faced(bug))
    for name, change in KERNELS.items():
        tell(name, faced(None, change))


if __name__ == "__main__":
    main(*sys.argv[1:])
