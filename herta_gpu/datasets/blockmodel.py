"""Graphs of any size that look like real ones: a degree-corrected block model.

Degrees follow a power law, a share of the edges stays within a class, and features are noise
around the mean of the class.  Everything comes from counter-based random numbers, one stream per
chunk: the same seed gives the same graph whatever the number of threads.

A large one is made once, into the cache, and mapped from there.  Its edges are sorted outside of
memory: each chunk is sorted, and all are cut at the same keys, so that the n-th pieces of all
chunks together are a range that memory holds: the ranges, sorted one by one, are the sorted list.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import PARTS, Dataset, again, cache_dir
from herta_gpu.graph import Graph
from herta_gpu.plumbing.building import distinct, edge_keys, worth_compiling
from herta_gpu.plumbing.checks import KEY_BYTES, check_size
from herta_gpu.plumbing.files import (
    check_place,
    check_room,
    new_file,
    new_folder,
    open_array,
)
from herta_gpu.plumbing.machine import num_threads
from herta_gpu.plumbing.progress import Stages, Tell

PRESETS: dict[str, tuple[Any, ...]] = {  # nodes, edges, features, classes, shares of the split
    "arxiv": (169_343, 1_157_799, 128, 40, (0.537, 0.176, 0.287)),
    "products": (2_449_029, 61_859_140, 100, 47, (0.080, 0.016, 0.904)),
    "papers100M": (111_059_956, 1_615_685_872, 128, 172, (0.0109, 0.0011, 0.0019)),
}
_PRESETS = {name.lower(): values for name, values in PRESETS.items()}
HOMOPHILY = 0.6  # share of the edges drawn within a class
_EXPONENT = 2.5  # P(degree > k) ~ k^(1 - exponent)
_SIGNAL = 0.25  # length of a class mean per feature, against noise of 1
_STUBS = 4  # entries of the list that ends of edges are drawn from, per node
_EDGE_CHUNK, _ROW_CHUNK = 1 << 20, 1 << 16  # of one stream of random numbers
_SLAB = 8 << 20  # bytes of X that a thread makes at once
_RANGE = 1 << 22  # keys of edges that are sorted at once
_ON_DISK = 4 << 30  # bytes of X and the edges above which they are kept in the cache
_HALF = 16 << 30  # bytes of X in float32 above which it is float16
_FORMAT = 3  # of what lies in the cache
_GRAPH = "graph"  # the folder of the graph there
_METADATA = {"metric": "accuracy", "source": "generated", "homophily": HOMOPHILY}


@dataclass(frozen=True)
class Spec:
    """What to generate."""

    n: int
    m: int
    d: int
    c: int
    split: tuple[float, float, float] = (0.5, 0.25, 0.25)

    @property
    def n_train(self) -> int:
        return max(1, int(self.split[0] * self.n))

    @property
    def large(self) -> bool:
        """Whether it lives in the cache instead of memory."""
        return 4 * self.n * self.d + 8 * self.m > _ON_DISK

    @property
    def X_dtype(self) -> Any:
        return np.dtype(np.float16 if 4 * self.n * self.d > _HALF else np.float32)


def parse(text: str) -> Spec:
    """The part after "synthetic:": "arxiv", "papers100M@0.01" or "n=1000,m=5000,d=16,c=4".

    Examples
    --------
    >>> from herta_gpu.datasets.blockmodel import parse
    >>> parse("papers100M@0.01").n, parse("n=1e3,m=5e3").m
    (1110599, 5000)
    """
    name, _, share = text.lower().partition("@")
    pairs = text.split(",") if "=" in text else [f"scale={share or 1}"]
    given: dict[str, float] = {}
    for key, _, value in (pair.partition("=") for pair in pairs):
        with suppress(ValueError):
            given[key.strip()] = float(value)
        if not math.isfinite(given.get(key.strip(), math.nan)):
            raise ValueError(f"{value!r} in synthetic:{text} is not a number.")
    spec = None
    if "=" in text:
        n = int(given.pop("n", 0))
        m, d, c = (int(given.pop(key, k)) for key, k in (("m", 5 * n), ("d", 64), ("c", 10)))
        spec = Spec(n, m, d, c)
    elif name in _PRESETS and 0 < (scale := given.pop("scale")) <= 1:
        n, m, *rest = _PRESETS[name]
        spec = Spec(int(scale * n), int(scale * m), *rest)
    if spec is None or given:
        raise ValueError(
            f"There is no dataset synthetic:{text}: use {', '.join(PRESETS)} (also a share of one, "
            "like papers100M@0.01) or n=1e5,m=1e6,d=64,c=10."
        )
    most = spec.n * (spec.n - 1) // 8
    if min(spec.n, spec.d, spec.c) < 1 or spec.c > spec.n or not 0 <= spec.m <= most:
        raise ValueError(
            f"synthetic:{text} needs positive n, d and c, c <= n, and 0 <= m <= n (n - 1) / 8: "
            f"{spec.n:,} nodes of a sparse model have at most {most:,} edges."
        )
    return spec


def synthetic(text: str, random_state: int = 0, features: bool = True) -> Dataset:
    """A degree-corrected block model; see the module for what is in it.

    Above 4 GB it is kept in the cache folder (HERTA_CACHE), and a second call opens it from there.

    Examples
    --------
    >>> from herta_gpu.datasets import load
    >>> data = load("synthetic:n=1000,m=4000,d=8,c=3")
    >>> data.graph.num_edges, data.X.shape, data.num_classes
    (4000, (1000, 8), 3)
    """
    spec, name = parse(text), f"synthetic:{text}"
    if spec.large:
        return _open_large(spec, random_state, features, name)
    data = _without_features(spec, random_state, None, Stages())
    X = np.empty((spec.n, spec.d), dtype=np.float32) if features else None
    if features:
        _make_features(spec, random_state, data.y, lambda: X)
    return replace(data, name=name, X=X)


def kept_graph(text: str, random_state: int = 0) -> Graph | None:
    """The graph of a large one that is in the cache already."""
    folder = _folder(parse(text), random_state) / _GRAPH
    return Graph.open(folder) if folder.is_dir() else None


def _folder(spec: Spec, seed: int) -> Path:
    """Where a large one is kept."""
    shares = "-".join(f"{share:g}" for share in spec.split)
    key = f"{spec.n}-{spec.m}-{spec.d}-{spec.c}-{shares}-{seed}-v{_FORMAT}"
    return cache_dir() / "synthetic" / key


def _open_large(spec: Spec, seed: int, features: bool, name: str) -> Dataset:
    """The same from the cache, where what is missing is put first, if there is room."""
    folder, stages = _folder(spec, seed), Stages(verbose=True)  # it takes minutes
    path = folder / "X.npy"
    no_graph, no_X = not folder.is_dir(), features and not path.is_file()
    if no_graph or no_X:
        check_place(folder)
        X_bytes = spec.n * spec.d * spec.X_dtype.itemsize
        # For a while: the drawn edges and their sorted list, then the list and the graph.
        kept, most = 8 * spec.m + 32 * spec.n, 17 * spec.m + 32 * spec.n
        need = max(no_graph * kept + no_X * X_bytes, no_graph * most)
        where = f"{cache_dir()} has {{free}} free: set HERTA_CACHE to a folder with more room."
        check_room(folder, need, ValueError, f"{name} needs {{need}} of disk, but {where}")
    if no_graph:
        with new_folder(folder) as at:
            made = _without_features(spec, seed, at, stages)
            for part, array in {"y": made.y, **made.split}.items():
                np.save(at / f"{part}.npy", array)
            del made
    found = {part: open_array(folder / f"{part}.npy", again(folder)) for part in ("y", *PARTS)}
    y = found.pop("y")
    if no_X:
        with stages("features"), new_file(path) as new_X:
            np.lib.format.open_memmap(new_X, "w+", spec.X_dtype, (spec.n, spec.d))
            tell = stages.progress("features", "chunks")
            # A map of a slab at a time: more would count as memory.
            _make_features(spec, seed, y, lambda: np.load(new_X, "r+"), tell)
    X = open_array(path, again(folder)) if features else None
    return Dataset(name, Graph.open(folder / _GRAPH), X, y, found, dict(_METADATA))


def _without_features(spec: Spec, seed: int, folder: Path | None, stages: Stages) -> Dataset:
    """Graph, labels and split; with a folder, the graph and what leads to it are files there."""
    held = (
        0 if folder is not None else 17
    )  # bytes an edge, if the loops that join them are compiled
    held = held if worth_compiling(spec.n + spec.m) else KEY_BYTES[1]
    check_size(spec.n, spec.m, "The n of synthetic:", KEY_BYTES[0], held)
    # Inside, nodes are sorted by class, so that a class is a range of the stubs.
    rank, sizes = _stream(seed, 0).permutation(spec.n), np.linspace(1.5, 0.5, spec.c)
    # Classes of falling size, the largest about three times the smallest.
    extra = np.floor(np.cumsum(sizes) / sizes.sum() * (spec.n - spec.c)).astype(np.int64)
    ends = np.concatenate([[0], extra + np.arange(1, spec.c + 1)])
    # A large one takes no more than its classes ask for.
    y = np.empty(spec.n, np.int64 if not spec.large else np.int16 if spec.c < 2**15 else np.int32)
    y[rank] = np.repeat(np.arange(spec.c, dtype=y.dtype), np.diff(ends))
    with stages("edges"):
        stubs = _stubs(spec, seed)
        starts = np.searchsorted(stubs, ends).astype(np.float64)
        for a in range(0, stubs.shape[0], _EDGE_CHUNK):  # from here on in the caller's order
            stubs[a : a + _EDGE_CHUNK] = rank[stubs[a : a + _EDGE_CHUNK]]
        del rank
        edges = _edges(spec, seed, stubs, starts, folder, stages)
        del stubs
    with stages("graph"):
        place = None if folder is None else folder / _GRAPH
        graph = Graph.from_edges(edges, spec.n, folder=place)
        del edges
    nodes, split, start = _stream(seed, 6).permutation(spec.n), {}, 0
    for part, share in zip(PARTS, spec.split, strict=True):
        split[part] = np.sort(nodes[start : start + max(1, int(share * spec.n))])
        start += len(split[part])
    return Dataset("synthetic", graph, None, y, split, dict(_METADATA))


def _stream(seed: int, part: int, chunk: int = 0) -> np.random.Generator:
    """An independent stream of random numbers for each chunk of each part."""
    return np.random.Generator(np.random.Philox(key=[seed, (part << 48) + chunk]))


def _stubs(spec: Spec, seed: int) -> Any:
    """Node ids, each as often as its expected degree asks for; classes stay contiguous.

    Expected degrees are Pareto, capped so that no node takes more than about sqrt(m) edges.
    """
    weight = np.empty(spec.n, dtype=np.float32)
    cap = max(2.0, math.sqrt(max(spec.m, 1)) / max(1.0, spec.m / spec.n))
    for a in range(0, spec.n, _EDGE_CHUNK):
        part = weight[a : a + _EDGE_CHUNK]
        uniform = _stream(seed, 1, a // _EDGE_CHUNK).random(part.shape[0])
        part[:] = np.minimum((1 - uniform) ** (-1 / (_EXPONENT - 1)), cap)
    weight *= _STUBS / float(weight.mean(dtype=np.float64))
    weight += _stream(seed, 7).random(spec.n, dtype=np.float32)  # rounds without a bias
    counts = np.maximum(weight.astype(np.int32), 1)
    return np.repeat(np.arange(spec.n, dtype=np.int32 if spec.n < 2**31 else np.int64), counts)


def _edges(
    spec: Spec, seed: int, stubs: Any, starts: Any, folder: Path | None, stages: Stages
) -> Any:
    """Exactly m distinct pairs, (2, m), sorted; `starts`: of each class in the stubs.

    A few more than m are drawn, for some are loops or repeats; what is too many then goes.
    """
    # Keys begin with the smaller of two nodes: a share x of the nodes holds 1 - (1 - x)^2 of them,
    # if hubs have no preferred ids.
    ranges = max(1, -(-spec.m // _RANGE))
    share = np.arange(1, ranges + 1) / ranges
    ends = ((1 - np.sqrt(1 - share)) * spec.n).astype(np.int64) * spec.n
    runs: list[tuple[Any, Any]] = []  # sorted keys, and where each range begins and ends in them
    before, first = np.zeros(ranges + 1, dtype=np.int64), 0

    def room(dtype: Any, shape: tuple[int, ...]) -> Any:
        """In memory, or mapped from a file without a name, which is gone with the process."""
        if folder is None or 0 in shape:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=folder) as file:
            return np.memmap(file, dtype, "w+", shape=shape)

    def sorted_range(i: int) -> Any:
        pieces = (keys[cuts[i] : cuts[i + 1]] for keys, cuts in runs)
        found = np.concatenate([np.empty(0, np.int64), *pieces])
        found.sort()
        return distinct(np, found)

    def draw(keys: Any, chunk: int) -> tuple[Any, Any]:
        """Keys of random pairs, -1 for a self-loop, sorted and cut."""
        rng, count = _stream(seed, 2, chunk), keys.shape[0]
        at_u = rng.integers(0, stubs.shape[0], count)
        inside = rng.random(count, dtype=np.float32) < HOMOPHILY
        of = np.searchsorted(starts, at_u, side="right") - 1
        low = np.where(inside, starts[of], 0.0)
        high = np.where(inside, starts[of + 1], stubs.shape[0])
        at_v = (low + rng.random(count) * (high - low)).astype(np.int64)
        u, v = stubs[at_u], stubs[at_v]
        keys[:] = np.where(u == v, -1, edge_keys(u, v, spec.n))
        keys.sort()
        return keys, np.searchsorted(keys, [0, *ends])

    while (found := int(before[-1])) < spec.m:
        drawn = int(1.05 * (spec.m - found)) + 1000
        keys = room(np.int64, (drawn,))
        starts_at = range(0, drawn, _EDGE_CHUNK)
        parts = [(keys[a : a + _EDGE_CHUNK], first + i) for i, a in enumerate(starts_at)]
        tell = stages.progress("edges drawn", "chunks")
        runs += _in_parallel(lambda part: draw(*part), parts, tell)
        first += len(parts)
        tell = stages.progress("edges sorted", "ranges")
        before[1:] = np.cumsum(_in_parallel(lambda i: sorted_range(i).size, range(ranges), tell))
    gone = np.sort(_stream(seed, 3).choice(found, found - spec.m, replace=False, shuffle=False))
    edges = room(np.int32 if spec.n < 2**31 else np.int64, (2, spec.m))

    def write(i: int) -> None:
        a, b = np.searchsorted(gone, before[i : i + 2])
        keys, at = np.delete(sorted_range(i), gone[a:b] - before[i]), before[i] - a
        edges[:, at : at + keys.shape[0]] = np.divmod(keys, spec.n)

    _in_parallel(write, range(ranges), stages.progress("edges listed", "ranges"))
    return edges


def _make_features(
    spec: Spec, seed: int, y: Any, open_X: Callable[[], Any], tell: Tell | None = None
) -> None:
    """X, noise around the class means, some rows at a time by each thread."""
    means = _stream(seed, 4).standard_normal((spec.c, spec.d), dtype=np.float32) * _SIGNAL
    step = max(1, _SLAB // (4 * spec.d))

    def fill(a: int) -> None:
        rng, stop = _stream(seed, 5, a // _ROW_CHUNK), min(a + _ROW_CHUNK, spec.n)
        for i in range(a, stop, step):
            at = slice(i, min(i + step, stop))
            rows = rng.standard_normal((at.stop - i, spec.d), dtype=np.float32)
            rows += means[y[at]]
            open_X()[at] = rows

    _in_parallel(fill, range(0, spec.n, _ROW_CHUNK), tell)


def _in_parallel(
    task: Callable[[Any], Any], given: Sequence[Any], tell: Tell | None = None
) -> list[Any]:
    """The task for each of the given, by all threads; `tell` hears how many are done."""
    results = []
    with ThreadPoolExecutor(num_threads()) as pool:
        for result in pool.map(task, given):
            results.append(result)
            if tell is not None:
                tell(len(results), len(given))
    return results
