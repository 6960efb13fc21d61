"""The device of tests/cuda_device itself: it refuses what a GPU would get wrong without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from herta_gpu.backends import get_backend
from tests.conftest import ROOT
from tests.cuda_device.__main__ import run
from tests.cuda_device.compiler import compile_module

pytestmark = [pytest.mark.gpu, pytest.mark.once]

KERNELS = """
extern "C" __global__ void scale(int n, float factor, const float* x, float* y) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = factor * x[i];
}
extern "C" __global__ void dynamic(double* y) {
    extern __shared__ double shared[];
    if (threadIdx.x == 0) y[0] = shared[1];
}
"""


@pytest.fixture
def xp(device: Any) -> Any:
    import cupy

    return cupy


def refused(device: Any, action: Callable[[], Any], *words: str) -> str:
    """What the device says to an action, which must fail."""
    with pytest.raises(Exception, match=r".") as error:
        action()
    said = "; ".join(device.refusals()) or str(error.value)
    assert all(word in said for word in words), said
    return said


def behind(xp: Any, stream: Any) -> Any:
    """The stream, behind an event of the current one."""
    done = xp.cuda.Event()
    done.record(xp.cuda.get_current_stream())
    stream.wait_event(done)
    return stream


# ---- clocks -------------------------------------------------------------------------------------


def test_two_streams_in_one_array_are_a_race_that_names_both(device: Any, xp: Any) -> None:
    x, other = xp.zeros(3), xp.cuda.Stream(non_blocking=True)
    here = device.stream_number(xp.cuda.get_current_stream())
    there = device.stream_number(other)
    with other:
        refused(device, lambda: x + 1.0, "race", f"stream {here}", f"stream {there}", "24 bytes")


def test_an_event_or_a_wait_orders_two_streams(device: Any, xp: Any) -> None:
    x, other = xp.zeros(3), xp.cuda.Stream(non_blocking=True)
    with behind(xp, other):
        x += 1.0
    refused(device, lambda: x + 1.0, "race")  # but not the other way round
    other.synchronize()
    assert x.get().tolist() == [1.0] * 3


def test_an_event_orders_what_came_before_it_only(device: Any, xp: Any) -> None:
    x, y, other = xp.zeros(3), xp.zeros(4), xp.cuda.Stream(non_blocking=True)
    done = xp.cuda.Event()
    done.record(xp.cuda.get_current_stream())
    y += 1.0
    other.wait_event(done)
    with other:
        x += 1.0
        refused(device, lambda: y + 1.0, "race", "32 bytes")
    other.synchronize()


def test_order_is_handed_on_from_stream_to_stream(device: Any, xp: Any) -> None:
    x, streams = xp.zeros(3), [xp.cuda.Stream(non_blocking=True) for _ in range(3)]
    with behind(xp, streams[0]), behind(xp, streams[1]), behind(xp, streams[2]):
        x += 1.0
        assert x.get().tolist() == [1.0] * 3


def test_streams_that_wait_for_the_default_one_need_no_event(device: Any, xp: Any) -> None:
    x = xp.zeros(3)
    with xp.cuda.Stream():  # blocking, as CUDA calls it
        x += 1.0
    assert (x * 2.0).get().tolist() == [2.0] * 3


def test_memory_of_another_library_has_a_clock_too(device: Any, xp: Any) -> None:
    class Foreign:
        __cuda_array_interface__ = {
            "shape": (3,), "typestr": "<f8", "version": 3, "strides": None,
        }  # fmt: skip

    theirs, mine = np.ones(3), xp.cuda.Stream(non_blocking=True)
    Foreign.__cuda_array_interface__["data"] = (theirs.ctypes.data, False)
    with device.foreign(theirs, mine):
        x = xp.asarray(Foreign())  # a view: nothing is copied
        refused(device, lambda: x + 1.0, "race")
        with mine:
            y = x + 1.0
            assert y.get().tolist() == [2.0] * 3
        y = None


def test_memory_is_not_handed_out_again_before_its_last_use(device: Any, xp: Any) -> None:
    x, other = xp.zeros(3), xp.cuda.Stream(non_blocking=True)
    with behind(xp, other):
        x += 1.0
    del x  # goes back to the pool of the first stream, while the other one still works on it
    refused(device, lambda: xp.zeros(3), "race", "handed out again")
    other.synchronize()
    xp.zeros(3)


def test_a_lazy_device_does_what_a_wait_orders_and_no_more(device: Any, xp: Any) -> None:
    x = xp.zeros(3)
    x.get()
    assert device.pending() == 0
    first, second = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    for stream in (first, second):
        with stream:
            stream.y = xp.ones(3) * 2.0
    waiting = device.pending()
    assert waiting > 0
    first.synchronize()
    assert 0 < device.pending() < waiting
    second.synchronize()
    assert device.pending() == 0


def test_the_host_must_not_change_what_a_copy_has_still_to_read(device: Any, xp: Any) -> None:
    pinned = xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(24), 0)
    source, x, stream = np.ndarray(3, buffer=pinned), xp.zeros(3), xp.cuda.get_current_stream()
    source[:] = 2.0
    x.set(source, stream=stream)
    stream.synchronize()
    x.set(source, stream=stream)
    source[:] = 3.0
    stream.synchronize()
    assert device.refusals() == ["the host changed memory that a copy had still to read"]
    x.set(source, stream=stream)
    del source, pinned
    assert "pinned memory is given back" in device.refusals()[0]


def test_a_graph_of_freed_memory_is_refused(device: Any, xp: Any) -> None:
    x, y = xp.ones(3), xp.empty(3)
    xp.add(x, 1.0, out=y)
    xp.cuda.get_current_stream().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        xp.add(x, 1.0, out=y)
        graph = stream.end_capture()
        graph.launch()
        assert y.get().tolist() == [2.0] * 3
        stream.synchronize()
        del y
        refused(device, graph.launch, "memory that was freed")


# ---- launches ------------------------------------------------------------------------------------


def test_launches_with_wrong_arguments_are_refused(device: Any, xp: Any) -> None:
    scale = xp.RawModule(code=KERNELS).get_function("scale")
    x, y = xp.ones(4, dtype="f4"), xp.zeros(4, dtype="f4")
    good = (np.int32(4), np.float32(2), x, y)
    scale((1,), (4,), good)
    assert y.get().tolist() == [2.0] * 4
    for i, wrong in (
        *[(0, 4), (0, np.int64(4)), (1, 2.0), (1, np.float64(2))],
        *[(2, x.astype("f8")), (2, xp.ones((2, 4), dtype="f4")[:, ::2]), (2, np.ones(4, "f4"))],
        *[(3, None), (3, np.uint64(8)), (3, x.view("i4"))],
    ):
        with pytest.raises(TypeError, match=f"scale, argument {i}"):
            scale((1,), (4,), (*good[:i], wrong, *good[i + 1 :]))
    with pytest.raises(TypeError, match="takes 4 arguments, not 3"):
        scale((1,), (4,), good[:3])


def test_shapes_and_pointers_beyond_the_device_are_refused(device: Any, xp: Any) -> None:
    module = compile_module(KERNELS)
    x, y = xp.ones(4, dtype="f4"), xp.zeros(4, dtype="f4")
    scale, dynamic = module.get_function("scale"), module.get_function("dynamic")
    args = (np.int32(4), np.float32(2), x, y)
    for grid, block in (
        *[((1,), (1025,)), ((1,), (32, 33)), ((1,), (1, 1, 65)), ((1, 65536), (1,))],
        ((1, 1, 65536), (1,)),
    ):
        refused(device, lambda g=grid, b=block: scale(g, b, args), "scale: a grid of")
    refused(device, lambda: dynamic((1,), (1,), (xp.zeros(1),), 50_000), "of shared memory")
    host = np.ones(4, "f4").ctypes.data
    refused(device, lambda: scale((1,), (4,), (*args[:3], np.uint64(host))), "no memory of the")
    out = xp.zeros(1)
    dynamic((1,), (1,), (out,), 48_000)
    assert np.isnan(out.get()[0])  # poison


BROKEN = {
    "divergent barrier": "if (threadIdx.x < 3) { __syncthreads(); } else {\n __syncthreads(); }",
    "threads left the kernel": "if (threadIdx.x == 5) return; __syncthreads();",
    "has left": "if (threadIdx.x == 5) return; __syncwarp();",
    "not in the mask": "__syncwarp(0xff);",
    "outside the mask": "if (threadIdx.x < 8) out[0] = __shfl_sync(0xffu, 1, 9);",
    "divergent warp": "if (threadIdx.x & 1) { __syncwarp(); } else {\n __ballot_sync(~0u, 1); }",
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_kernel_that_breaks_a_rule_is_named(device: Any, xp: Any, words: str) -> None:
    text = f'extern "C" __global__ void broken(int* out) {{ {BROKEN[words]} }}'
    kernel, out = xp.RawModule(code=text).get_function("broken"), xp.zeros(32, dtype="i4")
    xp.cuda.get_current_stream().synchronize()
    for order in range(3):
        with device.having(order=order):
            kernel((1,), (32,), (out,))
            with pytest.raises(xp.cuda.runtime.CUDARuntimeError):
                xp.cuda.get_current_stream().synchronize()
            (said,) = device.refusals()
            assert said.startswith("broken: block (0, 0, 0): ")
            assert words in said or "deadlock" in said


def test_shared_memory_is_poisoned_before_each_block(device: Any, xp: Any) -> None:
    text = """template <class T> __device__ T peek() {
        __shared__ T x[7];
        const T found = x[3];
        x[3] = 1;
        return found;
    }
    extern "C" __global__ void poison(double* out) { out[blockIdx.x] = peek<double>(); }"""
    out = xp.zeros(3)
    xp.RawModule(code=text).get_function("poison")((3,), (1,), (out,))
    assert np.isnan(out.get()).all()


def test_what_the_device_does_not_know_is_refused_by_name(device: Any, xp: Any) -> None:
    x = xp.eye(3, dtype="complex64")
    refused(device, lambda: x @ x, "this device does not know it")


def test_nvrtc_is_not_loaded(device: Any) -> None:
    get_backend("cuda")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert "libnvrtc" not in maps.read()


# ---- variants of kernels -------------------------------------------------------------------------


def test_bytes_that_kernels_move_are_counted(device: Any, xp: Any) -> None:
    """What a warp reads twice counts once, shared memory and what is on the stack not at all."""
    scale = xp.RawModule(code=KERNELS).get_function("scale")
    x, y = xp.ones(100, dtype="f4"), xp.zeros(100, dtype="f4")
    device.clear()
    scale((1,), (32,), (np.int32(100), np.float32(2), x, y))
    with device.counting():
        scale((2,), (32,), (np.int32(100), np.float32(2), x, y))  # both blocks do the same
    y.get()
    assert device.ledger()["traffic"] == {"scale": [800, 800]}


def test_a_bug_can_be_put_into_a_kernel_and_taken_out_again(device: Any, xp: Any) -> None:
    scale = xp.RawModule(code=KERNELS).get_function("scale")
    x, y, found = xp.ones(1, dtype="f4"), xp.zeros(1, dtype="f4"), []
    for _ in range(2):
        scale((1,), (1,), (np.int32(1), np.float32(2), x, y))
        found.append(float(y[0]))
        with device.changed("factor * x", "3 * factor * x"):
            scale((1,), (1,), (np.int32(1), np.float32(2), x, y))
        found.append(float(y[0]))
    assert found == [2.0, 6.0] * 2


def test_the_last_blocks_of_a_grid_can_run_alone(device: Any, xp: Any) -> None:
    text = """extern "C" __global__ void mark(int* out) {
        out[blockIdx.x + blockIdx.y * gridDim.x] = 1;
    }"""
    mark = xp.RawModule(code=text).get_function("mark")
    for some, expected in ((1, [4, 9]), (3, [0, 1, 4, 9]), (0, [*range(10)])):
        out = xp.zeros(10, dtype="i4")
        with device.having(last_blocks=some):
            mark((5, 2), (1,), (out,))
        assert np.flatnonzero(out.get()).tolist() == expected


# ---- the ledger ----------------------------------------------------------------------------------


def test_the_ledger_counts_what_was_asked_for(device: Any, xp: Any) -> None:
    host = np.arange(6.0)
    x = xp.asarray(host) + 1.0  # what is compiled first is not counted again
    device.clear()
    x = xp.asarray(host)
    y = x + 1.0
    del x
    z = y.reshape(2, 3) @ y.reshape(3, 2)
    z.get()
    y.fill(0.0)
    xp.cuda.get_current_stream().synchronize()
    found = device.ledger()
    assert found["copies_in"], found["bytes_in"] == (1, 48)
    assert (found["copies_out"], found["bytes_out"], found["largest_out"]) == (1, 32, 32)
    assert found["frees"] >= 1
    assert found["allocations"] - found["frees"] == 2 - 1  # y is new, z is; an old x was given up
    assert found["waits"] == 2
    assert found["library_calls"] == 1
    assert found["kernels"]["cupy_add__float64_float_float64"] == 1
    assert found["launches"] == sum(found["kernels"].values())


def test_replayed_steps_are_one_launch_and_all_their_kernels(device: Any, xp: Any) -> None:
    x = xp.ones(3)
    x *= 2.0
    xp.cuda.get_current_stream().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for _ in range(3):
            x *= 2.0
        graph = stream.end_capture()
        device.clear()
        graph.launch()
        graph.launch()
        found = device.ledger()
        assert (found["launches"], found["graph_launches"]) == (0, 2)
        assert found["kernels"] == {"cupy_multiply__float64_float_float64": 6}
        assert x.get().tolist() == [128.0] * 3


# ---- memory and devices --------------------------------------------------------------------------


def test_memory_of_the_card_is_all_there_is(device: Any, xp: Any) -> None:
    """With CuPy's own pool, which gives back what it holds before it gives up."""
    with xp.cuda.using_allocator(xp.cuda.MemoryPool().malloc):
        free, total = xp.cuda.runtime.memGetInfo()
        device.set(memory=total - free + (1 << 20))
        try:
            x = xp.empty(1 << 19, dtype="i1")
            del x
            y = xp.empty((1 << 20) - 512, dtype="i1")
            with pytest.raises(MemoryError, match="Out of memory allocating 1,024 bytes"):
                xp.empty(1024, dtype="i1")
            del y
        finally:
            device.set(memory=total)


def test_memory_right_behind_an_array_is_not_the_arrays(device: Any, xp: Any) -> None:
    """Allocators without headers, as that of ThreadSanitizer, give such memory to the host."""
    both = np.zeros(512)
    with device.foreign(both[:256]):
        xp.ones(256).get(out=both[256:])
    assert both.tolist() == [0.0] * 256 + [1.0] * 256


def test_memory_of_another_device_is_refused(device: Any, xp: Any) -> None:
    x, runtime = xp.zeros(3), xp.cuda.runtime
    device.set(devices=2)
    try:
        runtime.setDevice(1)
        stream, here = runtime.streamCreateWithFlags(1), runtime.malloc(24)
        runtime.memsetAsync(here, 0, 24, stream)
        refused(
            device,
            lambda: runtime.memsetAsync(x.data.ptr, 0, 24, stream),
            "runs on device 1 and uses memory of device 0",
        )
        runtime.free(here)
        runtime.streamDestroy(stream)
    finally:
        runtime.setDevice(0)
        device.set(devices=1)


@pytest.mark.parametrize(
    ("mode", "codes", "worst"),
    [("guarded", [-signal.SIGSEGV], 11), ("asan", [0, 5, -signal.SIGABRT], 6), ("lazy", [0], 0)],
)
def test_a_mode_that_dies_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, mode: str, codes: list[int], worst: int
) -> None:
    ended = iter(codes)
    monkeypatch.setattr(
        "tests.cuda_device.__main__.subprocess.run",
        lambda *_, **__: SimpleNamespace(returncode=next(ended, 0)),
    )
    monkeypatch.setattr("tests.cuda_device.__main__.under_sanitizer", lambda kind: [])
    assert run(mode, []) == worst


STRAY = """
import numpy as np
from tests.cuda_device.active import DEVICE, cupy
text = 'extern "C" __global__ void set(int n, float* x) { x[n] = 1; }'
kernel, x = cupy.RawModule(code=text).get_function("set"), cupy.zeros(4, dtype="f4")
for n in (3, 4):
    kernel((1,), (1,), (np.int32(n), x))
    print(n, float(x[3]), flush=True)
"""


@pytest.mark.long
def test_a_stray_access_ends_a_guarded_device(device: Any) -> None:
    settings = {**os.environ, "CUDA_DEVICE_GUARD": "1", "CUDA_DEVICE": "eager"}
    command = [sys.executable, "-c", STRAY]
    done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == "3 1.0\n"
