"""The block model: same seed same graph, power-law degrees, classes that help."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA
from herta_gpu.datasets import (
    DataError,
    Dataset,
    blockmodel,
    graph_at_hand,
    load,
    writes_first,
)


def digest(*arrays: Any) -> str:
    whole = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))
    return whole.hexdigest()[:16]


def same(one: Dataset, other: Dataset) -> bool:
    """Whether two data sets hold the same numbers."""
    pairs = [
        *((getattr(one.graph, a), getattr(other.graph, a)) for a in ("indptr", "indices")),
        *((one.split[part], other.split[part]) for part in one.split),
        *[(one.graph.degree, other.graph.degree), (one.X, other.X), (one.y, other.y)],
    ]
    return all(np.array_equal(a, b) for a, b in pairs)


def test_same_seed_same_graph_whatever_the_threads(monkeypatch):
    text = "n=3000,m=20000,d=7,c=4"
    monkeypatch.setattr(blockmodel, "_EDGE_CHUNK", 1 << 12)
    monkeypatch.setattr(blockmodel, "_ROW_CHUNK", 1 << 8)
    first = load(f"synthetic:{text}", random_state=5)
    monkeypatch.setenv("HERTA_NUM_THREADS", "1")
    again = load(f"synthetic:{text}", random_state=5)
    other = load(f"synthetic:{text}", random_state=6)
    assert same(first, again)
    assert (first.graph.indices[:100] != other.graph.indices[:100]).any()


# Of the code that sorted all edges at once: whoever has used a seed gets the same data for ever.
KNOWN = {
    ("n=1000,m=4000,d=8,c=3", 0): ("ced95ac3fd64f5d2", "015d177fa3ffab4f", "2435fa26fd681c75"),
    ("n=300,m=11000,d=3,c=5", 1): ("c5899c9f6c092236", "94d4de6ccd895e27", "2d204c3cd836f077"),
    ("n=150000,m=1200000,d=4,c=12", 3): (
        *("66bc1aac234ace53", "e5419503717b1b05", "f6a98bfb88dd5169"),
    ),
    ("n=5,m=0,d=2,c=2", 0): ("17b0761f87b081d5", "d68f2016196e90c7", "c18dd87fb0f74f73"),
    ("arxiv@0.1", 7): ("ddd078771048f6fc", "498f6d919b902c8b", "478c757168e097b0"),
}


@pytest.mark.parametrize("ranges", ["one range", "many ranges"])
@pytest.mark.parametrize(("text", "seed"), KNOWN)
def test_a_seed_keeps_its_data(text, seed, ranges, monkeypatch):
    if ranges == "many ranges":
        monkeypatch.setattr(blockmodel, "_RANGE", 1 << 11)
        monkeypatch.setattr(blockmodel, "_SLAB", 100)
    data = load(f"synthetic:{text}", random_state=seed)
    graph = digest(data.graph.indptr.astype("<i8"), data.graph.indices.astype("<i4"))
    labels = [data.y, *data.split.values()]
    found = (graph, digest(data.X.astype("<f4")), digest(*(a.astype("<i8") for a in labels)))
    assert found == KNOWN[text, seed]


def test_synthetic_is_a_power_law_with_classes():
    data = load("synthetic:n=20000,m=100000,d=16,c=5")
    degree = np.diff(data.graph.indptr)
    assert data.graph.num_edges == 100000
    assert degree.max() > 12 * degree.mean()
    # The tail of P(degree > k) ~ k^-1.5: Hill's estimator on the upper tenth, cap aside.
    tail = np.sort(degree)[-2000:-100].astype(float)
    assert 0.9 < 1 / np.mean(np.log(tail / tail[0])) < 2.6
    u, v, _ = data.graph.edges()
    chance = np.sum((np.bincount(data.y) / 20000) ** 2)
    expected = blockmodel.HOMOPHILY + (1 - blockmodel.HOMOPHILY) * chance
    assert abs(np.mean(data.y[u] == data.y[v]) - expected) < 0.02
    means = np.stack([data.X[data.y == k].mean(axis=0) for k in range(5)])
    assert np.linalg.norm(means[0] - means[1]) > 0.5


def test_the_graph_helps_on_synthetic_data():
    data = load("synthetic:n=2000,m=12000,d=16,c=4")
    score = {}
    for lam in (1e-3, 10.0):
        model = HERTA(lam=lam, ridge=1e-2).fit(data.graph, data.X, data.y, data.split["train"])
        score[lam] = model.score(data.graph, data.X, data.y, data.split["test"])
    assert score[10.0] > score[1e-3] + 0.05


# ---- large ones

TEXT = "n=500,m=1000,d=9,c=3"


@pytest.fixture
def in_cache(monkeypatch, tmp_path):
    """Everything counts as large; where it is kept."""
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path))
    monkeypatch.setattr(blockmodel, "_ON_DISK", 0)
    monkeypatch.setattr(blockmodel, "_ROW_CHUNK", 64)
    monkeypatch.setattr(blockmodel, "_RANGE", 100)
    return tmp_path / "synthetic"


@pytest.fixture
def in_memory(monkeypatch):
    """The same from memory."""
    with monkeypatch.context() as patch:
        patch.setattr(blockmodel, "_ROW_CHUNK", 64)
        return load(f"synthetic:{TEXT}")


def test_a_large_one_is_mapped_from_the_cache(in_memory, in_cache, monkeypatch):
    data = load(f"synthetic:{TEXT}")
    assert same(data, in_memory)
    assert isinstance(data.X, np.memmap)
    assert data.X.dtype == np.float32
    assert data.y.dtype == np.int16
    assert data.metadata == in_memory.metadata
    assert data.name == in_memory.name
    (folder,) = in_cache.iterdir()
    assert not list(folder.rglob(".*"))  # nothing temporary

    def fail(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(blockmodel, "_without_features", fail)
    monkeypatch.setattr(blockmodel, "_make_features", fail)
    assert same(load(f"synthetic:{TEXT}"), in_memory)
    assert load("synthetic:n=5e2,m=1e3,d=9,c=3", features=False).X is None


def test_a_graph_is_at_hand_once_it_is_in_the_cache(in_memory, in_cache):
    name = f"synthetic:{TEXT}"
    assert writes_first(name)  # of several processes, one makes the files
    assert graph_at_hand(name) is None
    load(name)
    assert (graph_at_hand(name).indices == in_memory.graph.indices).all()
    assert not writes_first("digits")
    assert graph_at_hand("digits").num_nodes == 1797


def test_the_cache_tells_specs_and_seeds_apart(in_cache):
    load(f"synthetic:{TEXT}")
    load(f"synthetic:{TEXT}", random_state=1)
    n, m = 16934, 115779  # of arxiv@0.1, whose split is another one
    one, other = (
        load(f"synthetic:{text}", features=False)
        for text in ("arxiv@0.1", f"n={n},m={m},d=128,c=40")
    )
    assert len(list(in_cache.iterdir())) == 4
    assert one.split["train"].shape != other.split["train"].shape


def test_X_joins_a_graph_that_is_there(in_memory, in_cache):
    assert load(f"synthetic:{TEXT}", features=False).X is None
    assert same(load(f"synthetic:{TEXT}"), in_memory)
    assert len(list(in_cache.iterdir())) == 1


def test_a_very_large_X_is_float16(in_memory, in_cache, monkeypatch):
    monkeypatch.setattr(blockmodel, "_HALF", 0)
    X = load(f"synthetic:{TEXT}").X
    np.testing.assert_array_equal(X, in_memory.X.astype(np.float16))
    assert blockmodel.parse("papers100M@0.1").X_dtype == np.float16  # _HALF is 0
    monkeypatch.undo()
    kinds = [blockmodel.parse(f"papers100M{at}").X_dtype for at in ("@0.1", "")]
    assert kinds == [np.float32, np.float16]


def test_a_fit_on_a_large_one_is_the_fit_in_memory(in_memory, in_cache):
    data = load(f"synthetic:{TEXT}")
    weights = [
        HERTA(ridge=0.1, device="cpu-scipy").fit(d.graph, d.X, d.y, d.split["train"]).W_
        for d in (in_memory, data)
    ]
    np.testing.assert_array_equal(*weights)


KILLED = """
import os
from herta_gpu.datasets import blockmodel, load
blockmodel._ON_DISK, blockmodel._ROW_CHUNK = 0, 64
blockmodel.{at} = lambda *_, **__: os._exit(9)
load("synthetic:{text}")
"""


@pytest.mark.parametrize("at", ["_make_features", "Graph.from_edges"])
def test_after_a_kill_it_is_made_again(in_memory, in_cache, at):
    code = KILLED.format(at=at, text=TEXT)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert same(load(f"synthetic:{TEXT}"), in_memory)


def test_an_error_leaves_nothing_that_looks_whole(in_memory, in_cache, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blockmodel, "_make_features", full)
        with pytest.raises(OSError, match="No space"):
            load(f"synthetic:{TEXT}")
    (folder,) = in_cache.iterdir()
    assert not [path for path in folder.iterdir() if "X" in path.name]
    assert same(load(f"synthetic:{TEXT}"), in_memory)


def test_a_full_disk_is_one_sentence_before_any_work(in_cache, monkeypatch):
    monkeypatch.setattr(blockmodel, "_without_features", None)
    free = shutil.disk_usage(in_cache.parent)._replace(free=5 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        ValueError, match=r"papers100M needs 4\d\.\d GB of disk.*5\.0 GB.*HERTA_CACHE"
    ):
        load("synthetic:papers100M")
    assert not in_cache.exists()


def test_a_damaged_X_is_one_sentence(in_cache):
    load(f"synthetic:{TEXT}")
    (path,) = in_cache.rglob("X.npy")
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"X\.npy.*[Dd]elete .* and load again"):
        load(f"synthetic:{TEXT}")


def test_a_large_one_tells_what_it_does(in_cache, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(f"synthetic:{TEXT}")
    said = capsys.readouterr().err
    assert "edges drawn  [########################]  1 of 1 chunks" in said
    assert "features   [########################]  8 of 8 chunks" in said
    load(f"synthetic:{TEXT}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    ["nope", "arxiv@2", "arxiv@x", "n=10,m=99", "k=3", "m=5", "n=a", "n=2,c=3,m=0", "n=9,scale=1"],
)
def test_wrong_synthetic_names_are_one_sentence(text):
    with pytest.raises(ValueError, match="synthetic"):
        load(f"synthetic:{text}")
