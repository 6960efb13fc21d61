"""What the machine code of a kernel says of its speed, read from the disassembler's text.

A multiprocessor reaches the bandwidth of its memory only if enough bytes are under way (Little's
law): bandwidth x latency / multiprocessors.  A thread executes in order and stops at the first
instruction that needs a load which is not back yet.  So a turn of a loop takes as many latencies as
its longest chain of loads, and what a thread has under way on average is the bytes of a turn over
those latencies; the resident threads together must reach what the law asks for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Bytes a second and multiprocessors of a card of each architecture: A100 80 GB, H100 SXM, B200 and
# RTX 5090, by their data sheets.
CARDS = {80: (2.04e12, 108), 90: (3.35e12, 132), 100: (8.0e12, 148), 120: (1.79e12, 170)}
# Seconds of a load from memory that is busy: an assumption.  Idle memory answers in about half.
LATENCY = 600e-9
TURNS = 4  # of a loop, of which the last counts: a load may be used a turn later


def lanes_busy(degrees: Any, lanes: int, splits: int = 1, ahead: int = 4) -> float:
    """The share of the lanes that gather, where a row has so many and a warp waits for its longest.

    In the order of the rows; `splits` of a row's lanes share its neighbours, `ahead` a turn.
    """
    turns = -(-np.asarray(degrees) // (splits * ahead))
    rows = max(1, 32 // lanes)
    turns = np.append(turns, np.zeros(-turns.shape[0] % rows, int)).reshape(-1, rows)
    return float(turns.sum() / (rows * turns.max(axis=1)).sum())


class Instruction(NamedTuple):
    at: int  # its place in the kernel
    name: str  # with its modifiers: LDG.E.128
    writes: frozenset[int]  # registers
    reads: frozenset[int]
    target: str  # label of a branch, else empty


class Loop(NamedTuple):
    loads: tuple[int, ...]  # bytes of each load from global memory in a turn
    latencies: int  # of a turn
    multiplies: bool  # whether it holds a fused multiply-add

    def under_way(self, size: int) -> float:
        """Bytes that a thread has under way on average, of the loads of this size."""
        return sum(b for b in self.loads if b == size) / max(1, self.latencies)


class Kernel(NamedTuple):
    fences: int  # that threads execute, wherever they stand in the text
    local: int  # loads and stores of local memory: spills, or arrays that are no registers
    float_atomics: int
    loops: tuple[Loop, ...]  # the innermost ones that load from global memory

    def under_way(self, size: int) -> float:
        """Of the worst main loop that multiplies, if one does; remainders go one by one."""
        loops = [loop for loop in self.loops if size in loop.loads]
        loops = [loop for loop in loops if loop.multiplies] or loops
        most = max((loop.loads.count(size) for loop in loops), default=0)
        return min((x.under_way(size) for x in loops if x.loads.count(size) == most), default=0.0)


def wanted(arch: int) -> float:
    """Bytes that a multiprocessor must have under way."""
    bandwidth, processors = CARDS[arch]
    return bandwidth * LATENCY / processors


@cache
def disassembler() -> str | None:
    """nvdisasm of the pip package or of a toolkit."""
    roots = [Path(p) / "nvidia" for p in sys.path if p]
    found = [p for root in roots for p in sorted(root.glob("*/bin/nvdisasm"))]
    return str(found[0]) if found else shutil.which("nvdisasm")


def disassembled(cubin: bytes) -> dict[str, Kernel]:
    """The kernels of a cubin by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler()), "--print-code", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def read(text: str) -> dict[str, Kernel]:
    """The kernels of a disassembly."""
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.M)
    return {name: _kernel(code) for name, code in zip(parts[1::2], parts[2::2], strict=True)}


# A label, or an instruction with its place, the condition that it is under, and its operands.
_LINE = re.compile(
    r"^(?:(\.L_\w+):|\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*))$", re.M
)
_REGISTER = re.compile(r"(?<![A-Z\w])R(\d+)(\.64)?")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


def _kernel(code: str) -> Kernel:
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for label, name, operands in _LINE.findall(code):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(_instruction(len(instructions), name, operands))
    names = [i.name for i in instructions]
    return Kernel(
        fences=sum(name.startswith("MEMBAR") for name in names),
        local=sum(name.startswith(("LDL", "STL")) for name in names),
        float_atomics=sum(bool(re.match(r"(ATOM|RED).*\.F(16|32|64)", name)) for name in names),
        loops=tuple(_loops(instructions, labels)),
    )


def _instruction(at: int, name: str, operands: str) -> Instruction:
    """It writes its first operand, unless it stores, compares or jumps, and reads the others."""
    first, _, rest = operands.partition(",")
    target = _TARGET.search(operands)
    writes: set[int] = set()
    if name.split(".")[0] in ("STG", "STS", "STL", "BRA", "RED", "EXIT", "BAR", "ISETP", "FSETP"):
        rest = operands
    else:
        found = _REGISTER.match(first.strip())
        rest = operands if found is None else rest
        wide = _width(name) // 4 if name.startswith("LD") else 2 if _is_double(name) else 1
        writes = set() if found is None else {int(found[1]) + i for i in range(wide)}
    reads = {int(r) + i for r, pair in _REGISTER.findall(rest) for i in range(2 if pair else 1)}
    return Instruction(at, name, frozenset(writes), frozenset(reads), target[1] if target else "")


def _is_double(name: str) -> bool:
    return name.startswith(("DFMA", "DADD", "DMUL", "IMAD.WIDE", "F2F.F64"))


def _width(name: str) -> int:
    """Bytes of a load or store: 4 unless its name says otherwise, a register at least."""
    found = re.search(r"\.(128|64|U16|S16|U8|S8)\b", name)
    return {"128": 16, "64": 8}.get(found[1], 4) if found else 4


def _bytes(name: str) -> int:
    """The same, of global memory."""
    found = re.search(r"\.[US](16|8)\b", name)
    return int(found[1]) // 8 if found else _width(name)


def _loops(instructions: list[Instruction], labels: dict[str, int]) -> list[Loop]:
    backward = [(labels[i.target], i.at) for i in instructions if labels.get(i.target, i.at) < i.at]
    inner = [
        (a, b)
        for a, b in set(backward)
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in backward)
    ]
    bodies = (instructions[a : b + 1] for a, b in sorted(inner))
    return [_loop(body) for body in bodies if any(i.name.startswith("LDG") for i in body)]


def _loop(body: list[Instruction]) -> Loop:
    """Executed in order, with loads that take one unit of time and nothing else that takes any."""
    ready: dict[int, int] = {}
    now = before = 0
    for _ in range(TURNS):
        before = now
        for i in body:
            now = max([now, *(ready.get(r, 0) for r in i.reads | i.writes)])
            for r in i.writes:
                ready[r] = now + 1 if i.name.startswith("LDG") else now
    loads = tuple(_bytes(i.name) for i in body if i.name.startswith("LDG"))
    multiplies = any(i.name.startswith(("FFMA", "DFMA", "FMUL", "DMUL")) for i in body)
    return Loop(loads, now - before, multiplies)
