"""What the CUDA backend needs beside launches: the shapes of grids, and a few algorithms in array
operations that keep the host out of their inner loops."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Laplacian

NULL = np.uint64(0)  # a null pointer; not every version of CuPy takes None for one

THREADS = 256  # threads of a block: kThreads of common.cuh
MAX_BLOCKS = 1024  # of rows along x, and of segments: bounds the partial sums of a reduction
MOST_BLOCKS = 2**31 - 1  # of a grid along x
SEGMENT, SHORTEST = 512, 64  # neighbours that a block takes of a long row: at most, and at least
_ENTRIES = 4096  # non-zeros of a graph for each neighbour of its segments
_HADAMARD_LEVELS = 9  # butterflies of one pass: kLogRows of hadamard.cu
_PIVOTS_AT_ONCE = 64  # steps of the pivoted Cholesky between two looks at the pivots


# ---- shapes -----------------------------------------------------------------------------------


def suffix(dtype: Any) -> str:
    """How kernel names spell a type: f32, i64, ..."""
    kind = np.dtype(dtype)
    return f"{kind.kind}{8 * kind.itemsize}"


def vector_width(k: int, dtype: Any) -> int:
    """Columns in one load: 16 bytes when k allows it."""
    widest = 16 // np.dtype(dtype).itemsize
    return next(v for v in (4, 2, 1) if v <= widest and k % v == 0)


def padded(k: int, itemsize: int) -> int:
    """Columns of a block of k with zeros behind them: a row then has whole loads of 16 bytes.

    One or two columns stay as they are: what is gathered of a neighbour is a sector of 32 bytes
    anyway, and the rest of a step would move up to four times as much.
    """
    width = 16 // itemsize
    return k if k <= width // 2 else -(-k // width) * width


def aligned(x: Array) -> bool:
    """Whether every row of x begins where `vector_width` columns may be read at once."""
    if x.ndim != 2 or not x.size:
        return True
    return x.data.ptr % (x.itemsize * vector_width(x.shape[1], x.dtype)) == 0


def column_shape(k: int, width: int, least: int = 1) -> tuple[int, int, int]:
    """(block x, block y, grid y) for k columns, `width` a thread, 256 threads a block."""
    groups = k // width
    tiles = -(-groups // 64)
    x = max(-(-groups // tiles), least)
    return x, THREADS // x, tiles


def blocks(rows: int, per_block: int, summed: bool = False) -> int:
    """Blocks along x; beyond the limit the kernels take several turns.

    Where the sums of blocks are added up they must be few.  Else many end better than few: a card
    holds 500 to 700 at once, and 1,024 of equal work would leave it half empty in the second turn.
    """
    return max(1, min(-(-rows // per_block), MAX_BLOCKS if summed else MOST_BLOCKS))


def hadamard_passes(log_n: int) -> list[int]:
    """How many of the log_n butterfly levels each pass takes: about equal shares."""
    passes = max(1, -(-log_n // _HADAMARD_LEVELS))
    return [(log_n + i) // passes for i in range(passes)]


def segment_length(nnz: int) -> int:
    """How many neighbours a row may have before it is cut, in a graph of `nnz` non-zeros.

    The few lanes of a row take four neighbours at a time and wait for memory twice: roughly a
    quarter of a microsecond each.  Nobody should still be at that when the rest of the card is
    done, which gathers 128 bytes for each non-zero (32 columns) at 2 TB/s.  All of it is estimated.

    >>> segment_length(10_000), segment_length(1_000_000), segment_length(100_000_000)
    (64, 128, 512)
    """
    fitting = 1 << max(1, nnz // _ENTRIES).bit_length() - 1
    return min(max(fitting, SHORTEST), SEGMENT)


def by_precision(x: Array) -> tuple[Any, Any]:
    """(x, None) in float32, (None, x) in float64: what a kernel takes that knows both."""
    return (x, None) if x.dtype == np.float32 else (None, x)


def roundings(neighbours: float, columns: int) -> float:
    """How often a term of a sum over so many neighbours is rounded in laplacian.cu, at most.

    A row of at most `segment` neighbours: the splits of a row take every `splits`-th of them, one
    rounding per addition, and their sums are added in log2(splits) shuffles.  That is most where
    there is one split.  A longer row: y times as many threads share a segment; a tree over y adds
    their sums, every y-th segment is added by the same row of threads, and a tree over y again.
    The sum is rounded once more, to the precision of the block.  In float32 the trees and what
    follows them are in float64 and round far less than is counted here.
    """
    most = 0.0
    # Segments that a graph with such a row may have: its non-zeros are twice as many or more.
    fewest = segment_length(2 * math.ceil(min(neighbours, 2.0**62)))
    lengths = [segment for segment in (64, 128, 256, 512) if segment >= fewest]
    cases = product(("float32", "float64"), {columns, padded(columns, 4)}, lengths)
    for dtype, k, segment in cases:
        width = vector_width(k, dtype)
        x, y, _ = column_shape(k, width, least=8)
        splits = max(1, x >> max(0, (k // width - 1).bit_length()))
        shuffles, tree = math.log2(splits), math.ceil(math.log2(y))
        short = math.ceil(min(neighbours, segment) / splits) + shuffles
        pieces = math.ceil(neighbours / segment)
        long = math.ceil(segment / (y * splits)) + shuffles + math.ceil(pieces / y) + 2 * tree + 1
        most = max(most, short, long if pieces > 1 else 0)
    return min(most, neighbours)


# ---- graphs -----------------------------------------------------------------------------------


@dataclass
class DeviceLaplacian(Laplacian):
    """A Laplacian on the device, with its long rows cut into segments."""

    segment_row: Array  # the row of each segment
    segment_rank: Array  # its place within the row
    long_rows: Array
    cut_rows: Any = None  # segment_row on the host
    edges: tuple[Array, Array, Array, Array | None] | None = None  # first edge, lo, hi, weights
    # (k, stream) -> what a product needs beside its operands; a stream runs one at a time.
    scratch: dict[tuple[int, int], tuple[Array, Array, Array]] = field(default_factory=dict)

    @property
    def segment(self) -> int:
        """Rows with more neighbours are cut."""
        return segment_length(self.nnz)

    def cut_segments(self, rows: slice) -> tuple[int, int]:
        """The segments of these rows: the first, and the one after the last."""
        a, b = np.searchsorted(self.cut_rows, (rows.start, rows.stop)).tolist()
        return a, b

    @property
    def suffix(self) -> str:
        return f"{suffix(self.inv_sqrt_degree.dtype)}_{suffix(self.indices.dtype)}"

    @property
    def csr(self) -> tuple[int, Array, Array]:
        return self.n, self.indptr, self.indices


# ---- algorithms -------------------------------------------------------------------------------


def pivoted_cholesky(xp: Any, P: Array, cut: float) -> tuple[Array, Array]:
    """(L, J) as in `lapack.pivoted_cholesky`, column by column with the pivots on the device."""
    d = P.shape[0]
    number, left = xp.arange(d), xp.diag(P).copy()
    # The columns of L are the rows of U, so that each step reads and writes whole runs of memory.
    U, order, pivots = xp.zeros((d, d)), xp.zeros(d, dtype="int64"), xp.zeros(d + 1)
    for k in range(d):
        if k % _PIVOTS_AT_ONCE == 0 and not float(left.max()) > cut:  # synchronize!
            break
        j = xp.argmax(left)
        pivot, column = xp.take(left, j), xp.take(P, j, axis=0)
        if k:
            column = column - xp.take(U[:k], j, axis=1) @ U[:k]
        # Beyond the rank a pivot is rounding: such columns are cut off below.
        column = column / xp.sqrt(xp.where(pivot > cut, pivot, 1.0))
        U[k], order[k], pivots[k] = column, j, pivot
        left = xp.where(number == j, -xp.inf, left - column * column)
    r = int(xp.argmin(pivots > cut))  # synchronize!  the last entry is 0, so there is one
    J = order[:r]
    return xp.ascontiguousarray(xp.tril(U[:r, J].T)), J


@contextmanager
def tell_if_long(what: str, seconds: float = 1.0) -> Iterator[None]:
    """Tell people at a terminal what goes on in the block, if it takes longer than that."""

    said = {"file": sys.stderr, "flush": True}
    timer = Timer(seconds, print, [f"herta_gpu: {what}"], said)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def named_stream(xp: Any, name: str) -> Any:
    """A new stream that waits for no other, which a profiler shows under this name."""
    stream = xp.cuda.Stream(non_blocking=True)
    if _nvtx() is not None:
        _nvtx().nvtxNameCudaStreamA(ctypes.c_void_p(stream.ptr), name.encode())
    return stream


@cache
def _nvtx() -> Any:
    """NVTX as a library: neither CuPy nor the package nvtx names streams."""
    names = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")  # of CUDA 13, and of CUDA 12
    paths = [(Path(p), name) for name in names for p in sys.path if p]
    found = [str(file) for p, name in paths for file in p.glob(f"nvidia/*/lib/{name}")]
    for name in (*found, *names):
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def source(file: str, wide: int) -> str:
    """The text of a module; where there are two for one file, the one with indices of 64 bits."""
    # Prepended, not included: CuPy's compile cache sees only the text that it is given.
    folder = kernel_folder()
    common, text = ((folder / f).read_text(encoding="utf-8") for f in ("common.cuh", file))
    return f'#define WIDE {wide}\n#line 1 "common.cuh"\n{common}\n#line 1 "{file}"\n{text}'


def kernel_folder() -> Path:
    """Where the CUDA sources are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common.cuh").exists():
            return folder
    raise FileNotFoundError("The CUDA sources are missing: reinstall herta_gpu.")
