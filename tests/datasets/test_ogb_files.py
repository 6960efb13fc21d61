"""OGB's own files without ogb: small ones of exactly that form, compared with NumPy's readers."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from herta_gpu.app.cli import main
from herta_gpu.datasets import DataError, load, ogb, sizes
from herta_gpu.plumbing.files import lock_path
from herta_gpu.plumbing.progress import Stages

PAPERS = "ogbn-papers100M"
N, M, D = 300, 2000, 8
KEYS = ("edge_index", "num_nodes_list", "num_edges_list", "node_feat", "node_year")
CONVERTED = ("train", "valid", "test", "node_label", "edge_index", "node_feat")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """A cache of its own, and chunks so small that every array has many."""
    monkeypatch.setenv("HERTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HERTA_DATA", raising=False)
    monkeypatch.setattr(ogb, "_CHUNK", 1000)


def contents(seed=0, labels_2d=True):
    """The arrays of a small dataset; three quarters of the nodes have no label."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 5, N).astype(np.float32)
    y[rng.random(N) < 0.75] = np.nan
    known = rng.permutation(np.flatnonzero(~np.isnan(y)))
    return {
        "edge_index": rng.integers(0, N, (2, M)),
        "num_nodes_list": np.array([N]),
        "num_edges_list": np.array([M]),
        "node_feat": rng.standard_normal((N, D)).astype(np.float32),
        "node_year": np.full((N, 1), 2017),
        "node_label": y[:, None] if labels_2d else y,
        "train": known[:30],
        "valid": known[30:40],
        "test": known[40:],
    }


def write_npz(path, arrays, method=zipfile.ZIP_DEFLATED, version=(1, 0)):
    with zipfile.ZipFile(path, "w", method) as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), version)


def write_table(path, rows, fmt="%.9g"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, np.asarray(rows), delimiter=",", fmt=fmt)


def write_split(folder, arrays):
    for part in ("train", "valid", "test"):
        write_table(folder / f"{part}.csv.gz", arrays[part], "%d")


def write_papers(root, arrays, keys=KEYS, folder="papers100M-bin", **form):
    at = root / folder
    (at / "raw").mkdir(parents=True)
    write_npz(at / "raw" / "data.npz", {key: arrays[key] for key in keys if key in arrays}, **form)
    write_npz(at / "raw" / "node-label.npz", {"node_label": arrays["node_label"]}, **form)
    write_split(at / "split" / "time", arrays)
    return at


def converted():
    """The converted arrays as NumPy reads them."""
    folder = ogb.stored_folder(PAPERS)
    return {key: np.load(folder / f"{key}.npy") for key in CONVERTED}


def check(found, arrays):
    assert (found["edge_index"] == arrays["edge_index"]).all()
    assert found["edge_index"].dtype == np.int32
    assert found["edge_index"].flags.c_contiguous
    assert (found["node_feat"] == arrays["node_feat"]).all()
    y = np.ravel(arrays["node_label"])
    assert (found["node_label"] == np.where(np.isnan(y), -1, y)).all()
    for part in ("train", "valid", "test"):
        assert (found[part] == np.sort(arrays[part])).all()


def nothing_left(tmp_path):
    return not list((tmp_path / "cache").rglob("*"))


# ---- every form that the files may have ------------------------------------------------------


def other_types(arrays):
    y = np.nan_to_num(arrays["node_label"], nan=-1).astype(np.int64)
    X = arrays["node_feat"].astype(np.float64)
    return {**arrays, "edge_index": arrays["edge_index"].astype(">i4"), "node_feat": X,
            "node_label": y}  # fmt: skip


def no_edges(arrays):
    return {**arrays, "edge_index": np.empty((2, 0), int), "num_edges_list": np.array([0])}


def fortran(arrays):
    return {**arrays, "edge_index": np.asfortranarray(arrays["edge_index"])}


FORMS = {  # what is written, and how
    "as it is": (dict, {}),
    "stored": (dict, {"method": zipfile.ZIP_STORED, "version": (2, 0)}),
    "in pairs": (fortran, {"version": (3, 0), "folder": "ogbn_papers100M", "keys": KEYS[::-1]}),
    "stored in pairs": (fortran, {"method": zipfile.ZIP_STORED}),
    "flat labels": (lambda a: {**a, "node_label": a["node_label"][:, 0]}, {}),
    "other types": (other_types, {}),
    "no edges": (no_edges, {}),
}


@pytest.mark.parametrize("chunk", [1000, 1 << 22])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_numpy_reads(tmp_path, monkeypatch, form, chunk):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # archives of ZIP64, however small
    monkeypatch.setattr(ogb, "_CHUNK", chunk)
    change, how = FORMS[form]
    arrays = contents()
    at = write_papers(tmp_path, change(arrays), **how)
    # The folder itself is as good as the one around it.
    data = load(PAPERS, at if form == "as it is" else tmp_path)
    with np.load(at / "raw" / "data.npz") as theirs:
        check(converted(), {**arrays, "edge_index": theirs["edge_index"]})
    assert isinstance(data.X, np.memmap)
    truth = np.eye(N, dtype=bool)
    truth[tuple(converted()["edge_index"])] = True
    assert (data.graph.adjacency().toarray() == (truth | truth.T)).all()
    known = np.flatnonzero(~np.isnan(np.ravel(arrays["node_label"])))
    assert data.labelled().tolist() == known.tolist()
    found, m = sizes(PAPERS), data.graph.num_edges
    assert (found.n, found.m, found.d, found.n_train) == (N, m, D, 30)
    assert load(PAPERS, features=False).X is None  # without its files, from now on


# ---- float16 ---------------------------------------------------------------------------------


def convert(tmp_path, features=None):
    return ogb.convert_ogb(PAPERS, [tmp_path], features)


def test_float16_is_numpys_rounding_and_replaces_the_features_alone(tmp_path):
    arrays = contents()
    write_papers(tmp_path, arrays)
    convert(tmp_path)
    folder = ogb.stored_folder(PAPERS)
    before = {key: (folder / f"{key}.npy").stat().st_ino for key in CONVERTED}
    convert(tmp_path, "float16")
    after = {key: (folder / f"{key}.npy").stat().st_ino for key in CONVERTED}
    assert {key for key in CONVERTED if before[key] != after[key]} == {"node_feat"}
    X = load(PAPERS, tmp_path).X
    assert X.dtype == np.float16
    assert (arrays["node_feat"].astype(np.float16) == X).all()
    convert(tmp_path)  # without a wish, what is there stays
    assert load(PAPERS, tmp_path).X.dtype == np.float16


def test_an_overflow_in_float16_names_its_place(tmp_path):
    arrays = contents()
    arrays["node_feat"][5, 1] = np.inf  # infinite before: not the fault of float16
    arrays["node_feat"][217, 3] = -65520.0  # the smallest number that rounds to infinity
    arrays["node_feat"][216, 3] = 65519.0
    write_papers(tmp_path, arrays)
    with pytest.raises(DataError, match=r"row 217, column 3 is -65520, which float16 cannot hold"):
        convert(tmp_path, "float16")
    assert nothing_left(tmp_path)
    convert(tmp_path)
    with pytest.raises(DataError, match="row 217, column 3"):
        convert(tmp_path, "float16")
    check(converted(), arrays)  # what was whole before stays
    assert not list((tmp_path / "cache").rglob("*.part"))
    with pytest.raises(ValueError, match='features must be one of None, "float32", "float16"'):
        convert(tmp_path, "float8")


# ---- killed and resumed ----------------------------------------------------------------------


class Killed(BaseException):
    """As sudden as a signal."""


def stopped_after(monkeypatch, reads, by=Killed):
    """From now on the reader of zips dies after so many reads of a chunk."""
    whole, count = zipfile.ZipExtFile.read, [0]

    def read(self, n=-1):
        count[0] += n > 900
        if count[0] > reads:
            raise by
        return whole(self, n)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)


def files():
    folder = ogb.stored_folder(PAPERS)
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_killed_anywhere_and_resumed_gives_the_same_bytes(tmp_path, monkeypatch, method):
    write_papers(tmp_path, contents(), method=method)
    convert(tmp_path)
    whole = files()
    shutil.rmtree(tmp_path / "cache")
    folder, kept = ogb.stored_folder(PAPERS), {}
    for kills in range(20):  # each run dies a few chunks later than the one before
        with monkeypatch.context() as patch:
            stopped_after(patch, 3 + 4 * kills)
            try:
                convert(tmp_path)
                break
            except Killed:
                assert not ogb.is_stored(PAPERS)
        # What is finished is not made again.
        now = {path.name: path.stat().st_ino for path in folder.glob("*.npy")}
        assert kept.items() <= now.items()
        kept = now
    assert kills > 5
    assert "edge_index.npy" in kept
    assert files() == whole
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_kill_between_two_sources_leaves_no_mixture(tmp_path, monkeypatch):
    write_papers(tmp_path, contents(0))
    convert(tmp_path)
    shutil.rmtree(tmp_path / "papers100M-bin")
    write_papers(tmp_path, contents(1))
    with monkeypatch.context() as patch:
        stopped_after(patch, 40)  # labels and edges are the new ones by then, the features not
        with pytest.raises(Killed):
            convert(tmp_path)
    assert (converted()["edge_index"] == contents(1)["edge_index"]).all()
    assert (converted()["node_feat"] == contents(0)["node_feat"]).all()
    assert not ogb.is_stored(PAPERS)
    load(PAPERS, tmp_path)
    check(converted(), contents(1))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_a_real_kill(tmp_path):
    arrays = contents()
    write_papers(tmp_path, arrays)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from herta_gpu.datasets import ogb\n"
        "ogb._CHUNK = 1000\n"
        "def killing(part, key, *more):\n"
        "    if key == 'node_feat':\n"
        "        part.write_bytes(b'half')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(part, key, *more)\n"
        "write, ogb._write = ogb._write, killing\n"
        "ogb.convert_ogb(sys.argv[1], [Path(sys.argv[2])])\n"
    )
    argv = [sys.executable, "-c", code, PAPERS, str(tmp_path)]
    done = subprocess.run(argv, check=False, timeout=120, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert not ogb.is_stored(PAPERS)
    load(PAPERS, tmp_path)
    check(converted(), arrays)


def test_two_at_once_do_not_write_the_same_files(tmp_path):
    pytest.importorskip("fcntl", reason="locks are of POSIX")
    write_papers(tmp_path, contents())
    folder = ogb.stored_folder(PAPERS)
    folder.mkdir(parents=True)
    with lock_path(folder), pytest.raises(RuntimeError, match="Another process converts"):
        convert(tmp_path)


# ---- bad input -------------------------------------------------------------------------------


def in_pairs(arrays, wrong):
    """Edges in Fortran order, of which one has a wrong end."""
    edges = np.asfortranarray(arrays["edge_index"])
    edges[1, wrong] = N
    return edges


BAD = {
    "no features": (lambda a: a.pop("node_feat"), r"has no entry node_feat but .*not OGB's file"),
    "no edges": (lambda a: a.pop("edge_index"), r"has no entry edge_index but"),
    "no count": (lambda a: a.pop("num_nodes_list"), r"has no entry num_nodes_list but"),
    "two graphs": (lambda a: a.update(num_nodes_list=np.array([N, N])), "must be one integer"),
    "float count": (lambda a: a.update(num_nodes_list=np.array([300.0])), "must be one integer"),
    "no nodes": (lambda a: a.update(num_nodes_list=np.array([0])), "the number of nodes is 0"),
    "wrong n": (lambda a: a.update(num_nodes_list=np.array([N + 1])), r"\(301, 1\), row.*\(300, 1"),
    "wrong m": (lambda a: a.update(num_edges_list=np.array([M - 1])), r"of shape \(2, 1999"),
    "turned": (lambda a: a.update(edge_index=a["edge_index"].T.copy()), r"but .*shape \(2000, 2\)"),
    "float ids": (lambda a: a.update(edge_index=1.0 * a["edge_index"]), "must hold integers of"),
    "text": (lambda a: a.update(node_feat=a["node_feat"].astype("U3")), "must hold floats of"),
    "objects": (lambda a: a.update(node_feat=a["node_feat"].astype(object)), "Python objects"),
    "by columns": (lambda a: a.update(node_feat=a["node_feat"].T.copy().T), "Fortran order"),
    "few labels": (lambda a: a.update(node_label=a["node_label"][:-1]), r"\(300, 1\), .*\(299, 1"),
    "label 1.5": (lambda a: a["node_label"].__setitem__(7, 1.5), "node 7 has the label 1.5"),
    "label -2": (lambda a: a["node_label"].__setitem__(7, -2), "node 7 has the label -2"),
    "label 40000": (lambda a: a["node_label"].__setitem__(7, 40000), "has the label 40000"),
    "node 300": (lambda a: a["edge_index"].__setitem__((1, 1234), N), "edge 1,234 names node 300"),
    "node -1": (lambda a: a["edge_index"].__setitem__((0, 1999), -1), "edge 1,999 names node -1"),
    "split 300": (lambda a: a["test"].__setitem__(0, N), r"split/time: test .*300"),
    "overlap": (lambda a: a["test"].__setitem__(0, a["train"][3]), "train and test overlap"),
    "a pair": (lambda a: a.update(edge_index=in_pairs(a, 1234)), "edge 1,234 names node 300"),
}  # fmt: skip


def change_arrays(change):
    def damage(at):
        arrays = contents()
        change(arrays)
        shutil.rmtree(at)
        write_papers(at.parent, arrays)

    return damage


def cut(file, share):
    def damage(at):
        raw = (at / file).read_bytes()
        (at / file).write_bytes(raw[: int(share * len(raw))])

    return damage


def wrong_checksum(key):
    def damage(at):
        path = at / "raw" / "data.npz"
        with zipfile.ZipFile(path) as archive:
            stored = archive.getinfo(f"{key}.npy").CRC.to_bytes(4, "little")
        path.write_bytes(path.read_bytes().replace(stored, bytes([stored[0] ^ 1]) + stored[1:]))

    return damage


def unknown_version(at):
    with zipfile.ZipFile(at / "raw" / "data.npz", "w") as archive:
        archive.writestr("num_nodes_list.npy", b"\x93NUMPY\x09\x00" + bytes(200))


def foreign(at):
    np.savez(at / "raw" / "data.npz", a=np.arange(3), b=np.arange(4))


DAMAGE = {case: (change_arrays(change), words) for case, (change, words) in BAD.items()}
for file in ("raw/data.npz", "raw/node-label.npz"):
    for share in (0.0, 0.001, 0.5, 0.999):
        DAMAGE[f"{file} cut at {share}"] = (
            cut(file, share), rf"{file} is damaged \(.*\): download it again\.$",
        )  # fmt: skip
for key in ("edge_index", "node_feat"):
    DAMAGE[f"checksum of {key}"] = (wrong_checksum(key), r"data\.npz is damaged \(Bad CRC-32")
for file in ("raw/node-label.npz", "split/time/valid.csv.gz"):
    DAMAGE[f"no {file}"] = (lambda at, file=file: (at / file).unlink(), f"{file} is missing")
DAMAGE["foreign"] = (foreign, r"has no entry num_nodes_list but a, b: it is not OGB's")
DAMAGE["unknown version"] = (unknown_version, r"data\.npz is damaged \(")
DAMAGE["a web page"] = (
    lambda at: (at / "raw" / "data.npz").write_bytes(b"<!DOCTYPE html>" + bytes(1000)),
    r"data\.npz is damaged \(File is not a zip file\)",
)


@pytest.mark.parametrize("case", DAMAGE)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, case):
    damage, sentence = DAMAGE[case]
    damage(write_papers(tmp_path, contents()))
    with pytest.raises(DataError, match=sentence) as told:
        load(PAPERS, tmp_path)
    assert "\n" not in str(told.value)
    assert nothing_left(tmp_path)


def test_damaged_files_of_another_download_leave_nothing_of_the_one_before(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_papers(first, contents())
    convert(first)
    ogb.read_dataset(ogb.stored_folder(PAPERS))  # which builds the graph
    arrays = contents(seed=1)
    arrays["node_label"][0] = 0.5
    write_papers(second, arrays)
    with pytest.raises(DataError, match=r"node 0 has the label 0\.5"):
        convert(second)
    assert not ogb.stored_folder(PAPERS).exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("chunk", [1000, 4096, 1 << 22])
def test_the_checksum_is_compared_whatever_the_chunks(tmp_path, monkeypatch, method, chunk):
    """zipfile compares it at the end of a member only, which the last chunk has to reach."""
    monkeypatch.setattr(ogb, "_CHUNK", chunk)
    wrong_checksum("node_feat")(write_papers(tmp_path, contents(), method=method))
    with pytest.raises(DataError, match=r"data\.npz is damaged \(Bad CRC-32"):
        load(PAPERS, tmp_path)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    arrays = contents()
    write_papers(tmp_path, arrays)
    real = shutil.disk_usage
    need = 4 * N * D + 8 * M + 2 * N  # without splits and headers
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=need))
    with pytest.raises(RuntimeError, match=r"writes 0\.0 GB into .*set HERTA_CACHE"):
        load(PAPERS, tmp_path)
    assert nothing_left(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=need + 10_000))
    load(PAPERS, tmp_path)
    check(converted(), arrays)


def test_a_converted_file_that_is_cut_is_told_and_made_again(tmp_path):
    arrays = contents()
    write_papers(tmp_path, arrays)
    load(PAPERS, tmp_path)
    path = ogb.stored_folder(PAPERS) / "node_feat.npy"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"node_feat\.npy is not a whole array \(.*\): delete"):
        load(PAPERS, tmp_path)
    convert(tmp_path)
    check(converted(), arrays)


# ---- against the real package ----------------------------------------------------------------


def test_the_same_as_through_ogb(tmp_path, monkeypatch):
    """ogb's own reader of the same files."""
    graphs = pytest.importorskip("ogb.io.read_graph_raw", reason="ogb is not installed")
    arrays = contents()
    at = write_papers(tmp_path, fortran(arrays))
    theirs = graphs.read_binary_graph_raw(str(at / "raw"), add_inverse_edge=False)[0]
    load(PAPERS, tmp_path)
    assert (converted()["edge_index"] == theirs["edge_index"]).all()
    assert (converted()["node_feat"] == theirs["node_feat"]).all()


def test_neither_ogb_nor_torch_nor_pandas_is_needed(tmp_path):
    write_papers(tmp_path, contents())
    code = (
        "import sys; sys.modules |= {'torch': None, 'ogb': None, 'pandas': None};"
        "from herta_gpu.datasets import load;"
        "print(*(load(name, sys.argv[1]).X.shape for name in sys.argv[2:]))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), PAPERS]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout == "(300, 8)\n"


# ---- memory ----------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_file(tmp_path):
    """96 MB of features and 32 MB of edges, in less than 32 MB more than Python holds anyway."""
    pytest.importorskip("resource", reason="the peak is told on POSIX only")
    n, m = 196_608, 2_097_152
    arrays = contents()
    at = write_papers(tmp_path, arrays)
    rng = np.random.default_rng(0)
    X, ids = rng.standard_normal(1 << 20).astype(np.float32), rng.integers(0, n, 1 << 20)
    X, ids = X.astype(np.float16).astype(np.float32).tobytes(), ids.tobytes()
    with zipfile.ZipFile(at / "raw" / "data.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as a:
        for key, kind, shape, block, times in (
            ("node_feat", "<f4", (n, 128), X, 24), ("edge_index", "<i8", (2, m), ids, 4),
        ):  # fmt: skip
            with a.open(f"{key}.npy", "w", force_zip64=True) as member:
                about = {"descr": kind, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, about)
                for _ in range(times):
                    member.write(block)
        for key, count in (("num_nodes_list", n), ("num_edges_list", m)):
            with a.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.array([count]))
    write_npz(at / "raw" / "node-label.npz", {"node_label": np.zeros((n, 1), np.float32)})
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from herta_gpu.datasets import ogb\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "ogb.convert_ogb(sys.argv[1], [Path(sys.argv[2])])\n"
        "print((peak() - before) * (1 if sys.platform == 'darwin' else 1024))\n"
    )
    argv = [sys.executable, "-c", code, PAPERS, str(tmp_path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ)
    assert int(done.stdout) < 32 << 20
    found = np.load(ogb.stored_folder(PAPERS) / "node_feat.npy", mmap_mode="r")
    assert found.shape == (n, 128)
    assert found[-8192:].tobytes() == X


# ---- the command line ------------------------------------------------------------------------


def run(capsys, *argv):
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_convert_tells_what_it_wrote_and_where(tmp_path, capsys):
    write_papers(tmp_path, contents())
    code, out, err = run(capsys, "convert", PAPERS, "--root", tmp_path, "--features", "float16")
    folder = ogb.stored_folder(PAPERS)
    assert code == 0
    assert str(folder) in out
    assert "node_feat.npy   float16  300 x 8" in out
    assert f"OGB's files in {tmp_path / 'papers100M-bin'} are converted once, into {folder}" in err
    code, out, err = run(capsys, "convert", PAPERS, "--root", tmp_path, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert [f["file"] for f in answer["files"]] == [f"{key}.npy" for key in CONVERTED]
    assert answer["files"][-1]["dtype"] == "float16"
    assert answer["files"][-1]["bytes"] == (folder / "node_feat.npy").stat().st_size


def test_convert_asked_wrongly(tmp_path, capsys):
    code, _, err = run(capsys, "convert", "cora", "--root", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "ogbn-papers100M, not 'cora'" in err
    code, _, err = run(capsys, "convert", PAPERS, "--root", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "ogbn_papers100M/raw or papers100M-bin/raw (unzip papers100M-bin.zip) in" in err
    code, _, err = run(capsys, "convert", PAPERS)
    assert "in a data folder: set HERTA_DATA" in err


def test_an_interrupted_conversion_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    arrays = contents()
    write_papers(tmp_path, arrays)
    with monkeypatch.context() as patch:
        stopped_after(patch, 28, KeyboardInterrupt)
        code, _, err = run(capsys, "convert", PAPERS, "--root", tmp_path, "--features", "float16")
    assert code == 130
    assert err.endswith("herta: Interrupted: the same command goes on.\n")
    assert run(capsys, "convert", PAPERS, "--root", tmp_path, "--quiet")[0] == 0
    check(converted(), arrays)


def test_train_converts_by_itself_and_says_so(tmp_path, capsys, monkeypatch):
    write_papers(tmp_path, contents())
    monkeypatch.setenv("HERTA_DATA", str(tmp_path))
    argv = ("train", PAPERS, "--ridge", "0.1")
    code, out, err = run(capsys, *argv)
    assert code == 0
    assert "are converted once, into" in err
    assert "certified" in out
    code, _, err = run(capsys, *argv)
    assert "converted" not in err
    shutil.rmtree(tmp_path / "cache")
    code, _, err = run(capsys, *argv, "--quiet")
    assert (code, err) == (0, "")


def test_the_bar_is_for_terminals(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    write_papers(tmp_path, contents())
    stages = Stages(verbose=True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    ogb.convert_ogb(PAPERS, [tmp_path], stages=stages)
    shown = sys.stderr.getvalue()
    assert "node_feat    [########################]  1 of 1 MB" in shown
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    ogb.convert_ogb(PAPERS, [tmp_path], stages=stages)
    assert "[" not in sys.stderr.getvalue()
    assert sys.stderr.getvalue().count("\n") == 1 + len(CONVERTED)
