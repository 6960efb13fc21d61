"""One interface, one backend per kind of device."""

from __future__ import annotations

import os
import warnings
from functools import cache, partial
from importlib.util import find_spec
from math import prod
from typing import Any

from herta_gpu.backends.base import Backend
from herta_gpu.backends.cpu.reference import CPUBackend
from herta_gpu.backends.cuda.graphs import DeviceGraph
from herta_gpu.planning.settings import check_device
from herta_gpu.plumbing.interop import on_device

SMALL = 1 << 15  # neighbours plus four per node: with fewer, SciPy is done before numba is there
FEW = 10_000_000  # numbers of a graph and its X: Cora, Citeseer and Pubmed have fewer


@cache
def _cpu(compiled: bool, small: bool = False) -> Backend:
    if compiled and not small:
        from herta_gpu.backends.cpu.compiled import CompiledBackend

        return CompiledBackend()
    return CPUBackend(partial(_cpu, True) if compiled else None)


def compiled_kernels() -> bool:
    """Compiled kernels, unless numba is missing or ``HERTA_FAST=0`` asks for plain SciPy."""
    return os.environ.get("HERTA_FAST", "1") != "0" and find_spec("numba") is not None


def _cuda_kind() -> type[Backend]:
    """The CUDA backend, if CuPy and a GPU are there."""
    try:
        from herta_gpu.backends.cuda.backend import CUDABackend
    except ImportError as error:
        raise RuntimeError(
            'device="cuda" needs CuPy, which cannot be imported: install herta_gpu[cu13] (for '
            f"CUDA 13) or herta_gpu[cu12] ({_first_line(error)})."
        ) from error
    try:
        CUDABackend.look()
    except RuntimeError as error:  # CuPy's own errors are of this kind, too
        raise RuntimeError(
            f'device="cuda" needs an NVIDIA GPU and its driver ({_first_line(error)}): '
            'check nvidia-smi, or use device="cpu".'
        ) from error
    return CUDABackend


@cache
def _cuda(team: Any) -> Any:
    """The CUDA backend; on each of several processes (`team`) on a GPU of its own."""
    kind = _cuda_kind()
    if team is not None:
        from herta_gpu.backends.ranks import take_gpu

        take_gpu(team, kind.xp, used=_cuda.cache_info().currsize > 0)
    made: Any = kind()
    try:
        made.try_out()
    except Exception as error:  # a missing library is an ImportError, an OSError or CuPy's own
        raise UnusableDeviceError(
            f'device="cuda" found a GPU that cannot compute ({_first_line(error)}): install '
            "herta_gpu[cu13] (for CUDA 13) or herta_gpu[cu12], which bring the libraries of the "
            'toolkit, or use device="cpu".'
        ) from error
    return made


def _take(number: int) -> None:
    """Make the GPU of this number the current one; its backend is made once, and stays there."""
    cuda: Any = _cuda_kind().xp.cuda
    count, here = cuda.runtime.getDeviceCount(), cuda.runtime.getDevice()
    if number >= count:
        raise ValueError(f'device="cuda:{number}": there are {count} GPUs, from cuda:0 on.')
    if number != here and _cuda.cache_info().currsize:
        raise ValueError(
            f'device="cuda:{number}": this process works on cuda:{here} already; take one GPU in '
            "each process, or let CUDA_VISIBLE_DEVICES name it."
        )
    cuda.Device(number).use()


class UnusableDeviceError(RuntimeError):
    """A GPU is there, and CuPy, but not what they need to compute."""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def get_backend(device: str, *data: Any) -> Backend:
    """The backend of a name of `DEVICES`, for these data where they are known.

    ``"auto"`` is CUDA where it is usable, else the CPU; it warns, once, where there is a GPU that
    cannot compute.  ``"cuda"`` is never replaced by anything else: without a usable device it is an
    error.  ``"cpu-scipy"`` is the reference on the CPU, without compiled kernels, also where numba
    is installed.  Given `data`, ``"auto"`` leaves what is small to the CPU, where it is done before
    the kernels of a GPU are compiled.
    """
    return chosen_backend(device, *data)[0]


def chosen_backend(device: str, *data: Any) -> tuple[Backend, str]:
    """`get_backend`, and why it is that one.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import chosen_backend
    >>> backend, why = chosen_backend("auto", np.zeros((1000, 50)))
    >>> backend.name, why
    ('cpu', '50,000 numbers are few: the CPU is done before a GPU has compiled its kernels')
    """
    number = check_device(device)
    cpu = partial(_cpu, device != "cpu-scipy" and compiled_kernels(), any(map(_small, data)))
    if device in ("cpu", "cpu-scipy"):
        return cpu(), "as asked"
    team = next((x.team for x in data if getattr(x, "team", None) is not None), None)
    if device.startswith("cuda"):
        if number is not None:
            _take(number)
        return _cuda(team), "as asked"
    few = _few(data)
    few = few if team is None else team.agree(few)  # of rows that each process has, say
    if few is None and _cuda_is_usable(team):  # small data do not even try the device out
        return _cuda(team), "a GPU is there"
    return cpu(), few or "there is no usable GPU"


def backend_for(device: str, graph: Any, X: Any) -> Backend:
    """The backend of a name, for work on these data that the processes of `graph` share."""
    return shared(get_backend(device, graph, X), graph)


def shared(backend: Backend, graph: Any) -> Backend:
    """The same backend, working with the other processes of `graph`, if there are any."""
    team = getattr(graph, "team", None)
    if team is not None and graph.by_nodes:
        return backend.on_part(graph)
    if team is None or team.size == 1:
        return backend
    from herta_gpu.backends.ranks import Columns

    return backend.with_team(Columns(team, backend))


def backend_of_rows(device: str, graph: Any) -> Backend:
    """The backend of a name, shared with other processes only where they have other rows."""
    backend = get_backend(device)
    return shared(backend, graph) if graph.by_nodes else backend


def _small(x: Any) -> bool:
    """Whether x is a graph that compiled kernels would win nothing on."""
    return hasattr(x, "by_nodes") and not x.by_nodes and 2 * x.num_edges + 4 * x.num_nodes <= SMALL


def _few(data: tuple[Any, ...]) -> str | None:
    """Why ``"auto"`` leaves these graphs and arrays to the CPU; None: it does not."""
    if not data or any(on_device(x) or isinstance(x, DeviceGraph) for x in data):
        return None  # what is on the device already is worked on there
    count = 0
    for x in data:
        if hasattr(x, "num_edges"):
            count += int(x.num_nodes + 2 * x.num_edges)
        else:
            count += int(x.nnz if hasattr(x, "nnz") else prod(getattr(x, "shape", (0,))))
    if count > FEW:
        return None
    return f"{count:,} numbers are few: the CPU is done before a GPU has compiled its kernels"


@cache
def _cuda_is_usable(team: Any = None) -> bool:
    """Whether every process has a GPU that can compute; it warns where only that is missing."""
    if team is None:
        return _usable_here(lambda: _cuda(None))
    # A process that cannot even look would not come to where GPUs are dealt out.
    return all(team.each(_usable_here(_cuda_kind))) and all(
        team.each(_usable_here(lambda: _cuda(team)))
    )


def _usable_here(found: Any) -> bool:
    try:
        found()
    except (UnusableDeviceError, ValueError) as error:
        warnings.warn(f'device="auto" goes on with the CPU: {error}', RuntimeWarning, stacklevel=4)
        return False
    except RuntimeError:  # no GPU, no driver or no CuPy: that is what most machines are like
        return False
    return True
