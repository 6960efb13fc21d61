"""Altered files are refused in a sentence, or hold the same to the last bit."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.datasets import load_npz
from herta_gpu.plumbing import files
from herta_gpu.plumbing.files import Archive, DataError, checksum, write_npz
from tests.conftest import random_graph
from tests.plumbing.bad_input import EDGES, N, X, Y, check_text, refused, rows, trained

MEMBERS = ["W", "about", "classes", "format", "intercept", "train"]


def same(one: HERTA, other: HERTA) -> bool:
    """Whether two models agree in every attribute, bit by bit."""
    if set(vars(one)) != set(vars(other)):
        return False
    for name, value in vars(one).items():
        there = getattr(other, name)
        if isinstance(value, np.ndarray):
            equal = value.dtype == there.dtype and value.shape == there.shape
            if not equal or value.tobytes() != there.tobytes():
                return False
        elif isinstance(there, np.ndarray) or value != there:
            return False
    return True


def alter_bytes(path: Path, load: Any, is_same: Any, wanted: Any = None) -> float:
    """The share of bytes whose change is refused, in one sentence; the others must load the same.

    The file is as before in the end.
    """
    content, refusals = bytearray(path.read_bytes()), 0
    wanted = range(len(content)) if wanted is None else wanted
    flips = np.random.default_rng(0).integers(1, 256, len(wanted)).tolist()
    for at, flip in zip(wanted, flips):
        content[at] ^= flip
        path.write_bytes(content)
        content[at] ^= flip
        try:
            assert is_same(load())
        except DataError as error:
            check_text(str(error), str(path.parent))
            refusals += 1
    path.write_bytes(content)
    return refusals / len(wanted)


def test_every_byte_of_a_model_file(tmp_path):
    path = tmp_path / "model.npz"
    trained().save(path)
    whole, size = HERTA.load(path), path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        about = archive.getinfo("about.npy")
    start, end = about.header_offset + 300, about.header_offset + about.file_size
    # Of the long text, whose bytes are all alike to the archive, every tenth.
    wanted = [at for at in range(size) if not (start < at < end and at % 10)]
    assert alter_bytes(path, lambda: HERTA.load(path), lambda m: same(m, whole), wanted) > 0.8


def entries(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def with_format(arrays: dict[str, Any], **change: Any) -> dict[str, Any]:
    about = json.loads(str(arrays["format"]))
    return {**arrays, "format": np.array(json.dumps({**about, **change}))}


def without(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name not in names}


ALTERED = [
    ("renamed", lambda a: {**without(a, "intercept"), "Intercept": a["intercept"]},
     "has no entry intercept"),
    ("missing", lambda a: without(a, "train"), "has no entry train"),
    ("extra", lambda a: {**a, "bias": np.ones(3)}, "has an entry 'bias', which it does not list"),
    ("newer", lambda a: with_format(a, version=2), "update herta_gpu"),
    ("a version that is none", lambda a: with_format(a, version="1"), "version '1'"),
    ("another kind", lambda a: with_format(a, format="herta_gpu checkpoint"), "checkpoint"),
    ("no sums", lambda a: with_format(a, sums=None), "its entry format"),
    ("another type", lambda a: {**a, "W": a["W"].astype(np.float32)}, "entry W was altered"),
    ("another shape", lambda a: {**a, "W": a["W"].T.copy()}, "entry W was altered"),
    ("another bit", lambda a: {**a, "W": np.nextafter(a["W"], 9)}, "entry W was altered"),
    ("two swapped", lambda a: {**a, "W": a["W"][::-1]}, "entry W was altered"),
    ("the first version", lambda a: without(a, "format"), "no entry format; files of the first"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), rows(ALTERED))
def test_altered_members_of_a_model_file(change, words, tmp_path):
    path = tmp_path / "model.npz"
    trained().save(path)
    assert sorted(entries(path)) == MEMBERS
    np.savez(path, **change(entries(path)))
    refused(DataError, words, lambda: HERTA.load(path))


def test_a_member_that_is_there_twice(tmp_path):
    path = tmp_path / "model.npz"
    trained().save(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("W.npy", archive.read("W.npy"))
    refused(DataError, "'W' twice", lambda: HERTA.load(path))


# ---- graphs ---------------------------------------------------------------------------------
def test_sums_depend_on_order_type_and_shape(monkeypatch):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**31, 5000, dtype=np.int32)
    others = [a[::-1], a.astype(np.int64), a.reshape(2, 2500), a[:-1], np.roll(a, 1), a ^ 1]
    found = {checksum(x) for x in (a, *others)}
    assert len(found) == 1 + len(others)
    assert checksum(a.copy()) == checksum(a)
    assert checksum(np.zeros(0)) != checksum(np.zeros(1))
    strided = np.zeros((5000, 2), np.int32)
    strided[:, 0] = a
    assert checksum(strided[:, 0]) == checksum(a)
    monkeypatch.setattr(files, "_SUM_BYTES", 1000)
    whole = checksum(a)
    assert {checksum(a[:250]), checksum(a[:251])}.isdisjoint({whole})
    crcs = [zlib.crc32(a.tobytes()[at : at + 1000]) for at in range(0, a.nbytes, 1000)]
    assert whole == f"{zlib.crc32(np.array(crcs, '<u4'), zlib.crc32(b'<i4(5000,)')):08x}"


def altered_graph(folder: Path, name: str, at: int, value: Any) -> Any:
    path = folder / f"{name}.npy"
    array = np.load(path)
    array[at] = value
    np.save(path, array)


@pytest.mark.parametrize("way", ["save", "from_edges", "from_edges compiled"])
@pytest.mark.parametrize(
    ("name", "at", "value"), [("indices", 5, 0), ("indptr", 3, 4), ("weights", 7, 0.5),
                              ("degree", 2, 9.0)],
)  # fmt: skip
def test_values_in_range_that_were_altered(way, name, at, value, tmp_path, monkeypatch):
    folder, rng = tmp_path / "g", np.random.default_rng(1)
    edges, weight = np.sort(rng.integers(0, 30, (2, 90)), axis=0), rng.random(90)
    if way == "save":
        Graph.from_edges(edges, 30, weight).save(folder)
    else:
        if way == "from_edges compiled":
            monkeypatch.setattr("herta_gpu.plumbing.building.COMPILED", 0)
        Graph.from_edges(edges, 30, weight, folder=folder)
    altered_graph(folder, name, at, value)
    with pytest.raises(DataError) as found:
        Graph.open(folder)
    check_text(str(found.value), f"{name}.npy was altered")
    assert getattr(Graph.open(folder, check=False), name)[at] == value


def test_graphs_of_the_first_format_are_refused(tmp_path):
    g = random_graph(30, 90)
    g.save(tmp_path / "g")
    path = tmp_path / "g" / "graph.json"
    about = json.loads(path.read_text())
    del about["sums"]
    path.write_text(json.dumps(about))
    refused(DataError, "has no sums", lambda: Graph.open(tmp_path / "g"))
    path.write_text(json.dumps({**about, "version": 1}))
    refused(DataError, "reads 2: save it again", lambda: Graph.open(tmp_path / "g"))


def test_every_byte_of_a_graph(tmp_path):
    g = random_graph(12, 20, weighted=True)
    g.save(tmp_path / "g")
    names = ("indptr", "indices", "weights", "given_degree")

    def is_same(found: Graph) -> bool:
        return all((getattr(found, name) == getattr(g, name)).all() for name in names)

    for path in sorted((tmp_path / "g").iterdir()):
        assert alter_bytes(path, lambda: Graph.open(tmp_path / "g"), is_same) > 0.5


def test_a_cached_dataset_that_was_altered(tmp_path):
    from herta_gpu.datasets.ogb import read_dataset, write_dataset

    data = load_npz(_data(tmp_path, np.savez))
    write_dataset(tmp_path / "kept", data)
    assert (read_dataset(tmp_path / "kept").graph.indices == data.graph.indices).all()
    altered_graph(tmp_path / "kept" / "graph", "indices", 3, 0)
    refused(DataError, "indices.npy was altered", lambda: read_dataset(tmp_path / "kept"))


# ---- more than there is room for ------------------------------------------------------------
def _data(folder: Path, save: Any = np.savez_compressed, **change: Any) -> Path:
    arrays = {"edge_index": EDGES, "num_nodes": N, "features": X, "labels": Y}
    save(folder / "data.npz", **{**arrays, "train": np.arange(15), **change})
    return folder / "data.npz"


def bomb(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Add an entry of zeros, deflated."""
    content = io.BytesIO()
    np.save(content, np.zeros(shape))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", content.getvalue())


def test_no_more_is_unpacked_than_memory_is_free(tmp_path, monkeypatch):
    path = _data(tmp_path, features=np.zeros((N, 10_000)))
    monkeypatch.setattr(files, "host_memory", lambda: 1_000_000)
    monkeypatch.setattr(np.lib.format, "read_array", _only_small(1_000_000))
    refused(DataError, "features takes 2.3 MB unpacked", lambda: load_npz(path))


def _only_small(limit: int) -> Any:
    read = np.lib.format.read_array

    def checked(member: Any, **more: Any) -> Any:
        array = read(member, **more)
        assert array.nbytes < limit
        return array

    return checked


def test_a_budget_holds_for_what_is_unpacked(tmp_path, capsys, monkeypatch):
    path = _data(tmp_path, features=np.zeros((N, 100_000)))
    monkeypatch.setattr(np.lib.format, "read_array", _only_small(1_000_000))
    for command in (["train", "--out", str(tmp_path / "run")], ["tune"]):
        argv = [command[0], str(path), *command[1:], "--memory-budget", "10MB", "--quiet"]
        assert main(argv) == 1
        check_text(capsys.readouterr().err, "raise memory_budget")


def test_a_model_file_is_never_larger_inside(tmp_path, monkeypatch):
    """`save` does not compress: what would unpack to more than the file was not written by it."""
    path = tmp_path / "model.npz"
    trained().save(path)
    arrays = entries(path)
    np.savez(path, **without(arrays, "W"))
    bomb(path, "W", (10_000, 100))
    monkeypatch.setattr(np.lib.format, "read_array", _only_small(1_000_000))
    refused(DataError, "more than the file holds", lambda: HERTA.load(path))


# ---- what reads and writes them -------------------------------------------------------------
def test_what_was_written_is_read(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3).T, "text": np.array("x"), "none": np.zeros((0, 3))}
    write_npz(tmp_path / "f", arrays, "thing")
    stored = Archive(tmp_path / "f", "a whole thing")
    stored.check_format("thing")
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[name], array, strict=True)
    assert sorted(stored.keys) == ["a", "format", "none", "text"]


def test_predictions_have_no_format(tmp_path):
    """They are for other programs."""
    write_npz(tmp_path / "f", {"a": np.ones(2)})
    assert list(entries(tmp_path / "f")) == ["a"]


def test_a_checkpoint_that_was_altered_is_made_again(tmp_path):
    """Bytes of a stored block that changed are not believed, whichever they are."""
    from herta_gpu.plumbing.checkpoint import read, write

    path = tmp_path / "Q.npz"
    arrays = {"Q": np.random.default_rng(0).standard_normal((6, 2)), "left": np.ones(2)}
    write(path, "key", arrays)

    def is_same(found: dict[str, Any] | None) -> bool:
        if found is None:  # it is made again
            return True
        return all(checksum(found[name]) == checksum(a) for name, a in arrays.items())

    assert is_same(read(path, "key"))
    assert alter_bytes(path, lambda: read(path, "key"), is_same) == 0


def test_files_of_labels_are_checked_alike(tmp_path):
    from herta_gpu import LabelPropagation

    model = LabelPropagation().fit(Graph.from_edges(EDGES), Y)
    model.save(tmp_path / "m")
    assert (LabelPropagation.load(tmp_path / "m").Z_ == model.Z_).all()
    arrays = entries(tmp_path / "m")
    with open(tmp_path / "m", "wb") as file:
        np.savez(file, **{**arrays, "Z": arrays["Z"] + 1})
    refused(DataError, "entry Z was altered", lambda: LabelPropagation.load(tmp_path / "m"))
    shutil.rmtree(tmp_path)
