"""The reader of machine code: loops, chains of loads, fences; and code that must turn it red."""

from __future__ import annotations

import json

import numpy as np
import pytest

from herta_gpu.backends.cuda.device import column_shape
from herta_gpu.planning.forecast import Card
from tests.backends.cuda import sass
from tests.backends.cuda.kernel_sources import kernel_text
from tests.backends.cuda.test_nvrtc import (
    TABLE,
    check_machine_code,
    compiled,
    machine_code,
    nvrtc,
    resources,
)
from tests.conftest import shared

# Two loads at once, then one whose address is the first of them: two latencies a turn, 24 bytes.
# The loop around it and the trap behind it are none of its kind.
GATHER = """
.text.gather:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x4, RZ ;
.L_x_1:
        /*0020*/                   LDG.E R4, [R2.64] ;
        /*0030*/              @!P1 LDG.E R5, [R2.64+0x4] ;
        /*0040*/                   IMAD.WIDE R6, R4, 0x10, R10 ;
        /*0050*/                   LDG.E.128 R12, desc[UR4][R6.64] ;
        /*0060*/                   FFMA.FTZ R20, R5.reuse, R12, R20 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/               @P2 BRA `(.L_x_0) ;
        /*0090*/                   MEMBAR.SC.GPU ;
        /*00a0*/                   STL [R1], R20 ;
        /*00b0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R20 ;
        /*00c0*/                   EXIT ;
.L_x_2:
        /*00d0*/                   BRA `(.L_x_2) ;
"""


def test_a_chain_of_loads() -> None:
    kernel = sass.read(GATHER)["gather"]
    assert kernel.loops == (sass.Loop((4, 4, 16), 2, True),)
    assert (kernel.fences, kernel.local, kernel.float_atomics) == (1, 1, 1)
    assert kernel.under_way(16) == 8.0
    assert kernel.under_way(8) == 0.0


@pytest.mark.parametrize(
    ("body", "latencies"),
    [
        # Four loads, then what uses them: one latency.
        ([*(f"LDG.E.64 R{i}, [R30.64+{i}]" for i in (2, 4, 6, 8)), "DFMA R20, R2, R8, R20"], 1),
        # Each used at once: as many latencies as loads.
        (["LDG.E R2, [R30.64]", "FADD R9, R2, R9", "LDG.E R3, [R30.64]", "FFMA R9, R3, R9, R9"], 2),
        # Its second half is what is used.
        (["LDG.E.64 R2, [R30.64]", "FFMA R9, R3, R9, R9"], 1),
        # A load for the next turn: the wait is there, too.
        (["FFMA R9, R2, R9, R9", "LDG.E R2, [R30.64]"], 1),
        # A store waits for what it stores; a load into a register that is still awaited, as well.
        (["LDG.E R2, [R30.64]", "STG.E [R28.64], R2", "LDG.E R2, [R30.64]", "FMUL R3, R2, R2"], 2),
        # The address comes from memory.
        (["LDG.E.64 R2, [R30.64]", "LDG.E.128 R4, [R2.64]", "FFMA R9, R7, R9, R9"], 2),
    ],
)  # fmt: skip
def test_latencies_of_a_turn(body: list[str], latencies: int) -> None:
    lines = "\n".join(f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(body))
    text = f".text.k:\n.L_x_0:\n{lines}\n        /*0ff0*/  @P0 BRA `(.L_x_0) ;\n"
    (loop,) = sass.read(text)["k"].loops
    assert loop.latencies == latencies


def test_what_the_law_asks_for() -> None:
    """An H100 moves 2 MB in 600 ns: 15 KB of each of its 132 multiprocessors."""
    assert round(sass.wanted(90)) == 15227


@pytest.mark.parametrize(
    "arch", [arch for arch in sass.CARDS if arch != 100]
)  # a B200 asks for more than all but the plain streams have
def test_the_widest_loads_fill_the_memory(arch: int) -> None:
    """From the table: 16 bytes a load, or 8 where neighbours are in float16."""
    table = json.loads(TABLE.read_text())["kernels"]
    widest = {k: row for k, row in table.items() if k.endswith(("f32_v4", "f64_v2", "_v4"))}
    widest |= {k: row for k, row in table.items() if "_f64_" in k and k.endswith("_v2")}
    assert len(widest) > 20
    for kernel, row in widest.items():
        assert row["little"][f"sm_{arch}"] >= 100, kernel


def test_lanes_that_wait_for_the_longest_row_of_their_warp() -> None:
    even, one_hub = np.full(64, 12), np.tile([4, 4, 4, 40], 8)
    assert sass.lanes_busy(even, 8) == 1.0
    assert sass.lanes_busy(one_hub, 8) == (1 + 1 + 1 + 10) / (4 * 10)
    assert sass.lanes_busy(np.sort(one_hub), 8) == 1.0  # rows by degree
    assert sass.lanes_busy(one_hub, 32) == 1.0  # a row has a warp of its own
    assert sass.lanes_busy(np.array([5, 5, 5, 5]), 8, splits=2) == 1.0


def test_a_plan_assumes_no_more_than_lanes_and_latency_allow() -> None:
    """Rows of ogbn-arxiv, 32 columns of float16 or float32: eight lanes each, four rows a warp."""
    graph = shared("ogbn-arxiv").graph
    degrees = np.minimum(np.diff(graph.indptr), 512)  # longer rows are cut
    busy = sass.lanes_busy(degrees, column_shape(32, 4, least=8)[0])
    assert 0.38 < busy < 0.48
    table = json.loads(TABLE.read_text())["kernels"]
    for kernel in ("chebyshev_half_f32_i32_v4", "chebyshev_f32_i32_v4", "apply_H_f32_i32_v4"):
        ceiling = table[kernel]["little"]["sm_90"] / 100 * busy
        assert ceiling >= Card(0).reached, (kernel, ceiling)


MUTANTS = {
    "gathers one by one": (
        "laplacian.cu", "chebyshev_f32_i32_v4",
        "constexpr int kAhead = 4;", "constexpr int kAhead = 1;",
    ),
    "an array that is no register": (
        "cg.cu", "cg_direction_f32_v4", "z.v[i] += a[i] * p.v[i];",
        "volatile T kept[2] = {a[i], b[i]}; z.v[i] += kept[row & 1] * p.v[i];"
    ),
    "a fence for every row": (
        "cg.cu", "cg_direction_f32_v4", "z.v[i] += a[i]", "__threadfence(), z.v[i] += a[i]"
    ),
}  # fmt: skip


@pytest.mark.skipif(
    nvrtc() is None or sass.disassembler() is None,
    reason="NVRTC or nvdisasm is not installed: pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_the_gate_red(name: str) -> None:
    file, kernel, old, new = MUTANTS[name]
    text = kernel_text(file).replace("\nWIDTHS(i64, i64)", "")  # half of the time
    assert text.count(old) == 1
    before = json.loads(TABLE.read_text())["kernels"][kernel]
    log, _, cubin = compiled(file, 80, text.replace(old, new))
    occupancy = resources(log, 80)[kernel]["occupancy"]
    now = machine_code(kernel, sass.disassembled(cubin)[kernel], 80, occupancy)
    with pytest.raises(AssertionError, match=r"in flight|local memory|fences"):
        check_machine_code(kernel, now, before, 80, slack=25)
