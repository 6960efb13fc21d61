"""A graph in a folder: what comes back, what is refused, and what is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import Graph, SDDSolver
from herta_gpu.plumbing import building, checks
from herta_gpu.plumbing.files import DataError
from tests.conftest import random_graph
from tests.plumbing.bad_input import rows

ARRAYS = ("indptr", "indices", "weights", "given_degree", "order")


@pytest.fixture(autouse=True)
def _compiled_kernels_are_allowed(monkeypatch):
    monkeypatch.delenv("HERTA_FAST", raising=False)


def assert_same(one: Graph, other: Graph) -> None:
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_saved_comes_back(weighted, ordered, tmp_path):
    g = random_graph(60, 200, weighted=weighted)
    g = g.reordered() if ordered else g
    assert_same(g.save(tmp_path / "new" / "g"), g)
    assert_same(Graph.open(str(tmp_path / "new" / "g")), g)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["g"]


def test_a_graph_without_edges(tmp_path):
    g = Graph.from_edges(np.zeros((2, 0), dtype=int), 5, folder=tmp_path / "g")
    assert g.num_nodes == 5
    assert g.num_edges == 0
    assert g.num_components == 5


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("room", [1, 1 << 40])
def test_built_into_a_folder(fast, weighted, room, tmp_path, monkeypatch):
    """The same graph, also where the memory holds a few rows of it at a time."""
    rng = np.random.default_rng(0)
    edges = np.sort(rng.integers(0, 200, (2, 3000)), axis=0)
    w = rng.random(3000) if weighted else None
    expected = Graph.from_edges(edges, 210, w)
    if fast:
        pytest.importorskip("numba")
        monkeypatch.setattr(building, "COMPILED", 0)
        monkeypatch.setattr(building, "CHUNK", 100)
        monkeypatch.setattr(building, "host_memory", lambda: room)
    assert_same(Graph.from_edges(edges, 210, w, folder=tmp_path / "g"), expected)


def test_weights_that_are_all_1_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "COMPILED", 0)
    g = Graph.from_edges([[0, 1], [1, 2]], edge_weight=[1.0, 1.0], folder=tmp_path / "g")
    assert g.weights is None
    assert sorted(p.name for p in (tmp_path / "g").iterdir()) == [
        "graph.json", "indices.npy", "indptr.npy"
    ]  # fmt: skip


def test_a_folder_is_no_reason_to_need_more_memory(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    edges = np.random.default_rng(0).integers(0, 100, (2, 5000))
    monkeypatch.setattr(building, "COMPILED", 0)
    monkeypatch.setattr(checks, "host_memory", lambda: 10_000)
    with pytest.raises(ValueError, match="are free"):
        Graph.from_edges(edges, 100)
    assert Graph.from_edges(edges, 100, folder=tmp_path / "g").num_nodes == 100


@pytest.mark.parametrize("fast", [0, 1 << 62])
def test_an_error_leaves_nothing(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "COMPILED", fast)
    with pytest.raises(ValueError, match=r"Edge \(0, 1\) has weight 2 but \(1, 0\) has 3"):
        Graph.from_edges([[0, 1], [1, 0]], None, [2.0, 3.0], folder=tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path):
    g = random_graph(20, 40)
    g.save(tmp_path / "g")
    for write in (g.save, lambda at: Graph.from_edges([[0], [1]], folder=at)):
        with pytest.raises(ValueError, match="exists already: name a new folder"):
            write(tmp_path / "g")
    assert_same(Graph.open(tmp_path / "g"), g)


def test_a_full_disk_is_found_first(tmp_path, monkeypatch):
    full = type("usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    with pytest.raises(OSError, match=r"may take .* where .* are free: choose another disk"):
        random_graph(200, 400).save(tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


def cut(path: Path, by: int = 8) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def meta(**changed: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "graph.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def other_array(name: str, array: Any) -> Any:
    """Another array of the size that the folder promises."""

    def change(folder: Path) -> None:
        np.save(folder / f"{name}.npy", array)
        path = folder / "graph.json"
        known = json.loads(path.read_text())
        known["bytes"][name] = (folder / f"{name}.npy").stat().st_size
        path.write_text(json.dumps(known))

    return change


DAMAGE = [
    ("no json", lambda f: (f / "graph.json").unlink(), "holds no graph: it has no graph.json"),
    ("no folder", lambda f: f.rename(f.parent / "away"), "holds no graph"),
    (
        "text",
        lambda f: (f / "graph.json").write_text("hello"),
        "is no whole graph: its graph.json (",
    ),
    (
        "a list",
        lambda f: (f / "graph.json").write_text("[1]"),
        "is no whole graph: its graph.json (",
    ),
    (
        "version",
        meta(version=99),
        "reads 2: update herta_gpu",
    ),
    ("another format", meta(format="dataset"), "it is a dataset of version 2"),
    ("no sizes", meta(bytes={}), "its list of files is not that of a graph"),
    ("nodes", meta(nodes=7), "indptr is int64 of shape (21,)"),
    ("nodes text", meta(nodes="20"), "its sizes are no whole numbers"),
    ("no file", lambda f: (f / "indices.npy").unlink(), "indices.npy is missing"),
    ("cut short", lambda f: cut(f / "indices.npy"), "indices.npy has 440 bytes instead of 448"),
    ("of floats", other_array("indices", np.zeros(80)), "indices is float64 of shape (80,)"),
    ("of nothing", other_array("indptr", np.zeros(21, int)), "indptr does not end with 80"),
    ("a pickle", other_array("indptr", np.array([None] * 21)), "Python objects"),
]


@pytest.mark.parametrize(("damage", "words"), rows(DAMAGE))
def test_damaged_and_foreign_folders(damage, words, tmp_path):
    random_graph(20, 40).save(tmp_path / "g")
    damage(tmp_path / "g")
    with pytest.raises(DataError) as found:
        Graph.open(tmp_path / "g", check=False)
    assert words in str(found.value)
    assert str(found.value).count("\n") == 0


def test_opening_maps_the_files_and_never_changes_them(tmp_path):
    g = random_graph(200, 2000).save(tmp_path / "g")
    assert isinstance(g.indices, np.memmap)
    assert g.indices.mode == "r"
    with pytest.raises(ValueError, match="read-only"):
        g.indices[:] = 0


def test_compiled_kernels_take_a_mapped_graph_for_any_other(tmp_path):
    pytest.importorskip("numba")
    from herta_gpu.backends.cpu.kernels.laplacian import apply

    g = random_graph(50, 100)
    mapped, X = g.save(tmp_path / "g"), np.ones((50, 4), dtype=np.float32)
    SDDSolver(g, lam=1.0, device="cpu").solve(X)
    known = set(apply.signatures)
    SDDSolver(mapped, lam=1.0, device="cpu").solve(X)
    assert set(apply.signatures) == known
