"""Graphs of any size that look like real ones: a degree-corrected block model.

Degrees follow a power law, a share of the edges stays within a class, and features are noise
around the mean of the class.  Everything comes from counter-based random numbers, one stream per
chunk: the same seed gives the same graph whatever the number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from herta_gpu.datasets.dataset import Dataset
from herta_gpu.datasets.storage import cache_dir
from herta_gpu.graph import graph_of_keys
from herta_gpu.plumbing.building import edge_keys
from herta_gpu.plumbing.edge_checks import check_size
from herta_gpu.plumbing.files import new_file

PRESETS = {  # nodes, edges, features, classes, shares of train, valid and test
    "arxiv": (169_343, 1_157_799, 128, 40, (0.537, 0.176, 0.287)),
    "products": (2_449_029, 61_859_140, 100, 47, (0.080, 0.016, 0.904)),
    "papers100M": (111_059_956, 1_615_685_872, 128, 172, (0.0109, 0.0011, 0.0019)),
}
HOMOPHILY = 0.6  # share of the edges drawn within a class
_EXPONENT = 2.5  # P(degree > k) ~ k^(1 - exponent)
_SIGNAL = 0.25  # length of a class mean per feature, against noise of 1
_STUBS = 4  # entries of the list that ends of edges are drawn from, per node
_EDGE_CHUNK, _ROW_CHUNK = 1 << 20, 1 << 16
_ON_DISK = 4 << 30  # bytes of X above which it is written to the cache instead of memory


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


def parse(text: str) -> Spec:
    """The part after "synthetic:": "arxiv", "papers100M@0.01" or "n=1000,m=5000,d=16,c=4".

    Examples
    --------
    >>> from herta_gpu.datasets.blockmodel import parse
    >>> parse("papers100M@0.01").n, parse("n=1e3,m=5e3").m
    (1110599, 5000)
    """
    if "=" in text:
        return _checked(_from_pairs(text), text)
    name, at, share = text.partition("@")
    known = {preset.lower(): values for preset, values in PRESETS.items()}
    if name.lower() not in known:
        raise ValueError(
            f"There is no synthetic dataset {name!r}: use {', '.join(PRESETS)} (also like "
            "papers100M@0.01) or n=...,m=...,d=...,c=..."
        )
    n, m, d, c, split = known[name.lower()]
    spec = Spec(n, m, d, c, split)
    if at:
        scale = _number(share, text)
        if not 0 < scale <= 1:
            raise ValueError(f"The share in synthetic:{text} must lie between 0 and 1.")
        spec = replace(spec, n=int(scale * n), m=int(scale * m))
    return _checked(spec, text)


def _from_pairs(text: str) -> Spec:
    values = {"d": 64, "c": 10}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        if key.strip() not in ("n", "m", "d", "c"):
            raise ValueError(f"synthetic: takes n, m, d and c, not {key.strip()!r}.")
        values[key.strip()] = int(_number(value, text))
    if "n" not in values:
        raise ValueError("synthetic: needs n=..., the number of nodes.")
    values.setdefault("m", 5 * values["n"])
    return Spec(values["n"], values["m"], values["d"], values["c"])


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} in synthetic:{text} is not a number.")
    return number


def _checked(spec: Spec, text: str) -> Spec:
    if min(spec.n, spec.d, spec.c) < 1 or spec.m < 0 or spec.c > spec.n:
        raise ValueError(f"synthetic:{text} needs positive n, d and c, c <= n, and m >= 0.")
    if spec.m > spec.n * (spec.n - 1) // 8:
        raise ValueError(
            f"synthetic:{text} asks for {spec.m:,} edges; {spec.n:,} nodes of a sparse model "
            f"have at most {spec.n * (spec.n - 1) // 8:,}."
        )
    return spec


def synthetic(text: str, random_state: int = 0, features: bool = True) -> Dataset:
    """A degree-corrected block model; see the module for what is in it.

    Examples
    --------
    >>> from herta_gpu.datasets import load
    >>> data = load("synthetic:n=1000,m=4000,d=8,c=3")
    >>> data.graph.num_edges, data.X.shape, data.num_classes
    (4000, (1000, 8), 3)
    """
    spec = parse(text)
    check_size(spec.n, spec.m, "The n of synthetic:")
    # Inside, nodes are sorted by class, so that a class is a range of the stubs.
    rank = _stream(random_state, 0).permutation(spec.n)
    ends = _class_ends(spec)
    stubs = _stubs(spec, random_state)
    keys = _edge_keys(spec, random_state, stubs, ends, rank)
    del stubs
    graph = graph_of_keys(keys, spec.n)
    y = np.empty(spec.n, dtype=np.int64)
    y[rank] = np.repeat(np.arange(spec.c), np.diff(ends))
    X = _features(spec, random_state, y, text) if features else None
    metadata = {"metric": "accuracy", "source": "generated", "homophily": HOMOPHILY}
    split = _split(spec, random_state)
    return Dataset(f"synthetic:{text}", graph, X, y, split, metadata)


def _stream(seed: int, part: int, chunk: int = 0) -> np.random.Generator:
    """An independent stream of random numbers for each chunk of each part."""
    return np.random.Generator(np.random.Philox(key=[seed, (part << 48) + chunk]))


def _class_ends(spec: Spec) -> Any:
    """Classes of falling size, the largest about three times the smallest."""
    share = np.linspace(1.5, 0.5, spec.c)
    extra = np.floor(np.cumsum(share) / share.sum() * (spec.n - spec.c)).astype(np.int64)
    return np.concatenate([[0], extra + np.arange(1, spec.c + 1)])


def _stubs(spec: Spec, seed: int) -> Any:
    """Node ids, each as often as its expected degree asks for; classes stay contiguous.

    Expected degrees are Pareto, capped so that no node takes more than about sqrt(m) edges.  A
    uniform draw from this list costs one look-up where a cumulated sum costs a binary search.
    """
    weight = np.empty(spec.n, dtype=np.float32)
    cap = max(2.0, math.sqrt(max(spec.m, 1)) / max(1.0, spec.m / spec.n))

    def fill(a: int) -> None:
        b = min(a + _EDGE_CHUNK, spec.n)
        uniform = _stream(seed, 1, a // _EDGE_CHUNK).random(b - a)
        weight[a:b] = np.minimum((1 - uniform) ** (-1 / (_EXPONENT - 1)), cap)

    _in_parallel(fill, range(0, spec.n, _EDGE_CHUNK))
    weight *= _STUBS / float(weight.mean(dtype=np.float64))
    weight += _stream(seed, 7).random(spec.n, dtype=np.float32)  # rounds without a bias
    counts = np.maximum(weight.astype(np.int64), 1)
    return np.repeat(np.arange(spec.n, dtype=np.int32 if spec.n < 2**31 else np.int64), counts)


def _edge_keys(spec: Spec, seed: int, stubs: Any, ends: Any, rank: Any) -> Any:
    """Exactly m distinct pairs, as sorted keys."""
    starts = np.searchsorted(stubs, ends).astype(np.float64)
    keys = np.empty(0, dtype=np.int64)
    first = 0
    while keys.shape[0] < spec.m:
        missing = spec.m - keys.shape[0]
        drawn = int(1.05 * missing) + 1000
        fresh = np.empty(drawn, dtype=np.int64)
        chunks = range(0, drawn, _EDGE_CHUNK)

        def fill(a: int, fresh: Any = fresh, drawn: int = drawn, first: int = first) -> None:
            b = min(a + _EDGE_CHUNK, drawn)
            rng = _stream(seed, 2, first + a // _EDGE_CHUNK)
            fresh[a:b] = _pairs(spec, rng, b - a, stubs, starts, rank)

        _in_parallel(fill, chunks)
        first += len(chunks)
        fresh = fresh[fresh >= 0]
        keys = np.concatenate([keys, fresh]) if keys.size else fresh
        del fresh
        keys.sort()
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    surplus = keys.shape[0] - spec.m
    if surplus:
        gone = _stream(seed, 3).choice(keys.shape[0], surplus, replace=False, shuffle=False)
        keys = np.delete(keys, gone)
    return keys


def _pairs(
    spec: Spec, rng: np.random.Generator, count: int, stubs: Any, starts: Any, rank: Any
) -> Any:
    """Keys of `count` random pairs; -1 for a self-loop.  `starts`: of each class in the stubs."""
    at_u = rng.integers(0, stubs.shape[0], count)
    inside = rng.random(count, dtype=np.float32) < HOMOPHILY
    of = np.searchsorted(starts, at_u, side="right") - 1
    low = np.where(inside, starts[of], 0.0)
    high = np.where(inside, starts[of + 1], stubs.shape[0])
    at_v = (low + rng.random(count) * (high - low)).astype(np.int64)
    u, v = stubs[at_u], stubs[at_v]
    return np.where(u == v, -1, edge_keys(rank[u], rank[v], spec.n))


def _features(spec: Spec, seed: int, y: Any, text: str) -> Any:
    """Noise around class means, float32; a very large X goes to a memory-mapped file."""
    means = _stream(seed, 4).standard_normal((spec.c, spec.d), dtype=np.float32) * _SIGNAL

    def fill_all(X: Any) -> None:
        def fill(a: int) -> None:
            b = min(a + _ROW_CHUNK, spec.n)
            rng = _stream(seed, 5, a // _ROW_CHUNK)
            X[a:b] = rng.standard_normal((b - a, spec.d), dtype=np.float32) + means[y[a:b]]

        _in_parallel(fill, range(0, spec.n, _ROW_CHUNK))

    if 4 * spec.n * spec.d <= _ON_DISK:
        X = np.empty((spec.n, spec.d), dtype=np.float32)
        fill_all(X)
        return X
    shape = f"{spec.n}-{spec.m}-{spec.d}-{spec.c}"
    path = cache_dir() / "synthetic" / f"X-{shape}-{seed}.npy"
    if not path.is_file():
        with new_file(path) as temporary:
            mapped = np.lib.format.open_memmap(
                temporary, mode="w+", dtype=np.float32, shape=(spec.n, spec.d)
            )
            fill_all(mapped)
            mapped.flush()
    return np.load(path, mmap_mode="r")


def _split(spec: Spec, seed: int) -> dict[str, Any]:
    nodes = _stream(seed, 6).permutation(spec.n)
    split, start = {}, 0
    for part, share in zip(("train", "valid", "test"), spec.split, strict=True):
        stop = start + max(1, int(share * spec.n))
        split[part] = np.sort(nodes[start:stop])
        start = stop
    return split


def _in_parallel(task: Callable[[int], None], starts: Iterable[int]) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(task, starts):
            pass
