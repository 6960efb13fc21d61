"""Ranks with a GPU each, on the real CuPy and its NCCL, on the device of tests/cuda_device.

``mpirun -n 2 python -m tests.backends.ranks.device_program checks`` prints a line of JSON for each
check, ``waits`` one for each wait of backends/ranks/nccl.py that is dropped; ``hang`` is a
rank that does not come, ``lost`` one that sends another message than the other rank expects.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests import cuda_device

DEVICE = cuda_device.activate()  # before anything imports CuPy

import numpy as np  # noqa: E402

from tests import cupy_standin  # noqa: E402
from tests.backends.ranks import checks, gpu_checks, gpu_mutants  # noqa: E402
from tests.backends.ranks.checks import COMM, RANK, SIZE  # noqa: E402

WAITS = (
    "        self._begun.record(self.xp.cuda.get_current_stream())\n",
    "        self.stream.wait_event(self._begun)\n",
    "        self.xp.cuda.get_current_stream().wait_event(self._arrived)\n",
    "        event.record(stream)\n",
)


def check_a_step_of_cg_asks_for_little() -> None:
    """apply_H, cg_descend, pack_rows, cg_turn, and cg_direction twice; two sums and the halo."""
    edges, X, *_ = gpu_checks.data()
    part, k = gpu_checks.part_of(edges), 8
    backend = gpu_checks.gpu(part)
    with backend.working():
        L = backend.laplacian(part, "float32")
        R = backend.asarray(np.tile(X, 2)[part.nodes, :k].astype("float32"))
        state = backend.cg_start(L, 2.0, R, backend.xp.zeros(k), 1e-6, 1e-7)
        backend.cg_step(L, 2.0, state)  # the first one allocates
        DEVICE.clear()
        backend.cg_step(L, 2.0, state)
        found = DEVICE.ledger()
        backend.synchronize()
    assert found["launches"] == sum(found["kernels"].values()) == 6, found
    assert found["library_calls"] == 3  # all of NCCL's
    assert not any(found[name] for name in ("waits", "copies_in", "copies_out", "copies_on"))


CHECKS = (
    gpu_checks.check_totals_are_added_in_the_order_of_ranks,
    gpu_checks.check_products_and_solves_are_those_of_dense_algebra,
    gpu_checks.check_fits_are_those_of_one_process,
    check_a_step_of_cg_asks_for_little,
)


def drop_waits() -> None:
    """The solves of both kinds with each wait dropped; what the device or dense algebra says."""
    nccl = Path(str(sys.modules["herta_gpu.backends.ranks.nccl"].__file__))
    text, team = nccl.read_text(encoding="utf-8"), checks.ranks_of(COMM)
    import herta_gpu.backends.cuda.nodes  # noqa: F401

    before = {name: sys.modules[name] for name in (gpu_mutants.NCCL, gpu_mutants.NODES)}
    for line in ("", *WAITS):
        assert line == "" or text.count(line) == 1, line
        team.nccl, said = None, ""
        cupy_standin._forget_backends()  # those of the line before
        try:
            with team.together():
                if line:
                    gpu_mutants.with_bug(gpu_mutants.NCCL, line, "        pass\n")
                gpu_mutants.solves()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        sys.modules.update(before)
        gpu_mutants.hand_out(before[gpu_mutants.NCCL])
        said = "; ".join([*DEVICE.refusals(), said])
        said = next((s for s in team.each(said) if s), "")
        if RANK == 0:
            print(json.dumps({"dropped": line.strip(), "found": said}), flush=True)


def leave_the_other_alone(expected: int) -> Any:
    """Rank 0 waits for a sum; rank 1 sleeps, or sends less than is `expected`."""
    backend = gpu_checks.gpu(gpu_checks.part_of(gpu_checks.data()[0]))
    backend.total(backend.xp.ones(3))
    if RANK == 1 and expected == 3:
        time.sleep(1000)
    return backend.total(backend.xp.ones(3 if RANK == 0 else expected)).get()


def main(what: str) -> None:
    DEVICE.set_count(SIZE)
    if what == "checks":
        checks.main({check.__name__: check for check in CHECKS})
    elif what == "waits":
        drop_waits()
    else:
        leave_the_other_alone({"hang": 3, "lost": 2}[what])


if __name__ == "__main__":
    main(*sys.argv[1:])
