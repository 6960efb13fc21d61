"""Tables as Excel, R, pandas and people write them: read right, or refused in one sentence."""

from __future__ import annotations

import gzip
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.datasets import DataError, from_tables, load, load_tables, sizes

PATH = {(0, 1), (1, 2), (2, 3)}  # the edges of the tables below
X = [[0.5, 2.0], [-1.5, 0.0], [3.0, 1.0], [2.5, 7.0]]
Y = [0, 1, -1, 1]


def write(folder: Path, **content: str | bytes) -> Path:
    """A folder of tables; what is not given is plain."""
    plain = {"edges": "0,1\n1,2\n2,3\n", "features": "0.5,2\n-1.5,0\n3,1\n2.5,7\n"}
    for name, text in {**plain, **content}.items():
        raw = text.encode() if isinstance(text, str) else text
        (folder / (name if "." in name else f"{name}.csv")).write_bytes(raw)
    return folder


def pairs(graph: Graph) -> set[tuple[int, int]]:
    u, v, _ = graph.edges()
    return {(min(a, b), max(a, b)) for a, b in zip(u.tolist(), v.tolist(), strict=True)}


def note(data: Any) -> str:
    return data.metadata["note"]


# ---- edges ------------------------------------------------------------------------------------
EDGES = [
    ("plain", "0,1\n1,2\n2,3\n", "columns 1, 2"),
    ("a byte-order mark", "\ufeff0,1\n1,2\n2,3\n", "columns 1, 2"),
    ("a mark and a header", "\ufeffsource,target\n0,1\n1,2\n2,3\n", "columns source, target"),
    ("Windows", "0,1\r\n1,2\r\n2,3\r\n", "columns 1, 2"),
    ("names", "Source,Target\n0,1\n1,2\n2,3\n", "columns Source, Target"),
    ("another order", "dst,src\n0,1\n1,2\n2,3\n", "columns src, dst"),
    ("longer names", "From Node ID;To Node ID\n0;1\n1;2\n2;3\n", "From Node ID, To Node ID"),
    ("unknown names", "paper,other\n0,1\n1,2\n2,3\n", "columns paper, other"),
    ("a pandas index", ",src,dst\n0,0,1\n1,1,2\n2,2,3\n", "columns src, dst (not used: an index)"),
    ("read and written", "Unnamed: 0,src,dst\n7,0,1\n8,1,2\n9,2,3\n", "not used: Unnamed: 0"),
    ("pandas without names", ",0,1\n0,0,1\n1,1,2\n2,2,3\n", "an index"),
    ("R's write.csv", '"","from","to"\n"1",0,1\n"2",1,2\n"3",2,3\n', "columns from, to"),
    ("R's write.table", '"from" "to"\n"1" 0 1\n"2" 1 2\n"3" 2 3\n', "columns from, to"),
    ("quoted numbers", '"0","1"\n"1","2"\n"2","3"\n', "columns 1, 2"),
    ("floats", "src,dst\n0.0,1.0\n1.0,2.0\n2.0,3.0\n", "columns src, dst"),
    ("empty lines", "\n0,1\n\n1,2\n2,3\n\n\n", "columns 1, 2"),
    ("trailing delimiters", "0,1,\n1,2,\n2,3,\n", "columns 1, 2"),
    ("trailing in the header, too", "src,dst,\n0,1,\n1,2,\n2,3,\n", "columns src, dst"),
    ("trailing, not in the header", "src,dst\n0,1,\n1,2,\n2,3,\n", "columns src, dst"),
    ("an index by name", "index,src,dst\n0,0,1\n1,1,2\n2,2,3\n", "not used: index"),
    ("a fourth column", "src,dst,time\n0,1,9\n1,2,9\n2,3,8\n", "not used: time"),
    ("one of text", "src,dst,kind\n0,1,x\n1,2,y\n2,3,x\n", "not used: kind"),
    ("Excel's hint", "sep=;\nsrc;dst\n0;1\n1;2\n2;3\n", "columns src, dst"),
    ("SNAP", "# a graph\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n2\t3\n", "FromNodeId, ToNodeId"),
    ("spaces", "0  1\n1 2\n2 3 \n", "columns 1, 2"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in EDGES], ids=[r[0] for r in EDGES])
def test_edges(tmp_path, text, words):
    data = load_tables(write(tmp_path, edges=text))
    assert pairs(data.graph) == PATH
    assert data.graph.weights is None
    first, *_ = note(data).split("\n")
    assert first.startswith("edges.csv: 3 edges from column")
    assert words in first


WEIGHTS = [
    ("by position", "0,1,0.5\n1,2,2\n2,3,1.25\n"),
    ("by name", "weight,src,dst\n0.5,0,1\n2,1,2\n1.25,2,3\n"),
    ("with others", "id,to,from,Weight,when\n7,0,1,0.5,1\n8,1,2,2,1\n9,2,3,1.25,1\n"),
    ("decimal commas", "src;dst;weight\n0;1;0,5\n1;2;2\n2;3;1,25\n"),
    ("decimal commas by position", "0;1;0,5\n1;2;2\n2;3;1,25\n"),
    ("decimal commas and tabs", "0\t1\t0,5\n1\t2\t2\n2\t3\t1,25\n"),
    ("unknown ends", "head,weight,tail\n0,0.5,1\n1,2,2\n2,1.25,3\n"),
    ("quoted decimal commas", '"0","1","0,5"\n"1","2","2"\n"2","3","1,25"\n'),
    ("a pandas index", ",src,dst,weight\n0,0,1,0.5\n1,1,2,2.0\n2,2,3,1.25\n"),
]


@pytest.mark.parametrize("text", [row[1] for row in WEIGHTS], ids=[row[0] for row in WEIGHTS])
def test_weights(tmp_path, text):
    graph = load_tables(write(tmp_path, edges=text)).graph
    truth = [[1, 0.5, 0, 0], [0.5, 1, 2, 0], [0, 2, 1, 1.25], [0, 0, 1.25, 1]]
    assert graph.adjacency().toarray().tolist() == truth


# ---- features ---------------------------------------------------------------------------------
FEATURES = [
    ("a byte-order mark", "\ufeff0.5,2\n-1.5,0\n3,1\n2.5,7\n", ""),
    ("names", "f0,f1\n0.5,2\n-1.5,0\n3,1\n2.5,7\n", "2 features from columns f0, f1"),
    ("coordinates", "x,y\n0.5,2\n-1.5,0\n3,1\n2.5,7\n", "columns x, y"),
    ("ids", "node_id,f0,f1\n0,0.5,2\n1,-1.5,0\n2,3,1\n3,2.5,7\n", "f0, f1, rows by node_id"),
    ("ids in another order", "f0,Node,f1\n3,2,1\n0.5,0,2\n2.5,3,7\n-1.5,1,0\n", "rows by Node"),
    ("ids by another name", "paper_id,f0,f1\n2,3,1\n0,0.5,2\n3,2.5,7\n1,-1.5,0\n",
     "rows by paper_id"),
    ("an index by name", "index,f0,f1\n2,3,1\n0,0.5,2\n3,2.5,7\n1,-1.5,0\n", "rows by index"),
    ("a pandas index", ",f0,f1\n0,0.5,2\n1,-1.5,0\n2,3,1\n3,2.5,7\n", "not used: an index"),
    ("a pandas index, no names", ",0,1\n0,0.5,2\n1,-1.5,0\n2,3,1\n3,2.5,7\n", ""),
    ("R counts from 1", '"","a","b"\n"1",0.5,2\n"2",-1.5,0\n"3",3,1\n"4",2.5,7\n', "a, b"),
    ("decimal commas", "f0;f1\n0,5;2\n-1,5;0\n3;1\n2,5;7\n", "f0, f1"),
    ("quoted", '"f0","f1"\n"0.5","2"\n"-1.5","0"\n"3","1"\n"2.5","7"\n', "f0, f1"),
    ("trailing delimiters", "0.5,2,\n-1.5,0,\n3,1,\n2.5,7,\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"), [row[1:] for row in FEATURES], ids=[row[0] for row in FEATURES]
)
def test_features(tmp_path, text, words):
    data = load_tables(write(tmp_path, features=text))
    assert data.X.tolist() == X
    assert words in note(data)


# ---- labels -----------------------------------------------------------------------------------
NAN = float("nan")
TEXT = ["red", "blue", "", "blue"]
LABELS = [
    ("plain", "0\n1\n-1\n1\n", Y, ""),
    ("a byte-order mark", "\ufeff0\n1\n-1\n1\n", Y, ""),
    ("a name", "colour\n0\n1\n-1\n1\n", Y, "2 classes from column colour"),
    ("ids", "node_id,label\n0,0\n1,1\n2,-1\n3,1\n", Y, "column label, rows by node_id"),
    ("in another order", "label,id\n1,3\n-1,2\n0,0\n1,1\n", Y, "column label, rows by id"),
    ("only some", "node_id,y\n3,1\n0,0\n1,1\n", Y, "1 of 4 nodes without"),
    ("missing", "node_id,y\n0,0\n1,1\n2,\n3,1\n", Y, "2 classes from column y"),
    ("missing in R", '"","y"\n"1",0\n"2",1\n"3",NA\n"4",1\n', Y, "column y"),
    ("floats of pandas", "y\n0.0\n1.0\nnan\n1.0\n", Y, "2 classes"),
    ("predictions of ours", "node,prediction\n0,0\n1,1\n2,-1\n3,1\n", Y, "column prediction"),
    ("text", "red\nblue\n\nblue\n", TEXT, ""),
    ("text with a name", "colour\nred\nblue\n\nblue\n", TEXT, "2 classes from column colour"),
    ("text by ids", "label;node\nblue;3\nblue;1\nred;0\n", TEXT, "rows by node"),
    ("text of R", '"","y"\n"1","red"\n"2","blue"\n"3",NA\n"4","blue"\n', TEXT, "column y"),
    ("text predictions", "node,prediction\n0,red\n1,blue\n2,\n3,blue\n", TEXT, "prediction"),
    ("one float", "0.5\n1\n2\n3\n", [0.5, 1, 2, 3], ""),
    ("one float by ids", "id,y\n3,0.5\n0,1.5\n1,2\n2,\n", [1.5, 2, NAN, 0.5], "targets"),
    ("one float, decimal comma", "y\n0,5\n1\n2\n3\n", [0.5, 1, 2, 3], "targets"),
    ("True and False", "y\nFalse\nTrue\n-1\nTrue\n", Y, "2 classes"),
    ("quoted decimal commas", '"0,5"\n"1,0"\n"2,0"\n"3,0"\n', [0.5, 1, 2, 3], ""),
    ("several floats", "a,b\n0.5,1\n1,2\n2,3\n3,4\n", [[0.5, 1], [1, 2], [2, 3], [3, 4]], "a, b"),
    ("predicted targets", "node,target_0,target_1\n1,2,3\n0,0.5,1\n2,4,5\n3,6,7\n",
     [[0.5, 1], [2, 3], [4, 5], [6, 7]], "target_0, target_1, rows by node"),
    ("predicted labels", "node,label_0,label_1\n0,0,1\n1,1,0\n2,1,1\n3,0,0\n",
     [[0, 1], [1, 0], [1, 1], [0, 0]], "label_0, label_1, rows by node"),
    ("predicted floats", "node,prediction,prediction\n1,2,3\n0,0.5,1\n2,4,5\n3,6,7\n",
     [[0.5, 1], [2, 3], [4, 5], [6, 7]], "rows by node"),
    ("several whole ones", "a,b\n0,1\n1,0\n1,1\n0,\n", [[0, 1], [1, 0], [1, 1], [0, -1]], "labels"),
    ("others beside", "id,label,age\n0,0,7\n1,1,8\n2,-1,9\n3,1,9\n", Y, "not used: age"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "truth", "words"), [row[1:] for row in LABELS], ids=[row[0] for row in LABELS]
)
def test_labels(tmp_path, text, truth, words):
    data = load_tables(write(tmp_path, labels=text))
    truth = np.array(truth)
    assert data.y.dtype.kind == truth.dtype.kind
    np.testing.assert_array_equal(data.y, truth)
    assert words in note(data)
    several = text.split("\n")[0].replace("node,", "").split(",") if data.y.ndim == 2 else None
    assert data.metadata.get("label_names") == several


# ---- what is refused --------------------------------------------------------------------------
REFUSED = [
    ("edges: outside", "0,9\n", "names node 9 but there are 4 nodes"),
    ("edges: one column", "0\n1\n", "must have two columns"),
    ("edges: nothing", "", "edges.csv is empty"),
    ("edges: nothing but lines", "\n\n", "edges.csv is empty"),
    ("edges: four columns without names", "0,1,2,3\n", "name them in a first line"),
    ("edges: three unknown names", "a,b,c\n0,1,2\n", "has the columns a, b, c"),
    ("edges: one known name", "src,b\n0,1\n", "name them source and target"),
    ("edges: two weights", "src,dst,weight,w\n0,1,1,2\n", "one thing, 'weight' and 'w'"),
    ("edges: text ids", "src,dst\nann,bob\n", "names nodes by text, like 'ann'"),
    ("edges: text ids without a header", "ann,bob\nbob,eve\n", "names nodes by text, like 'bob'"),
    ("edges: half an id", "0,1.5\n", "integer node ids from 0 on in columns 1, 2"),
    ("edges: no id", "src,dst\n0,1\n1,\n", "integer node ids from 0 on in columns src, dst"),
    ("edges: NA in the first row", "0,NA\n1,2\n", "integer node ids"),
    ("edges: a slip", "0,1\n1,2x\n", "row 2 has '2x' in column 2"),
    ("edges: a slip in the first row", "0,1x\n1,2\n", "both '1x' and numbers"),
    ("edges: an underscore", "0,1\n1,2_0\n", "'2_0'"),
    ("edges: a short row", "0,1,2\n1,2\n", "row 2 has 2 columns, not 3"),
    ("edges: a weight without a name", "src,dst,\n0,1,5\n", "row 1 has 3 columns, not 2"),
    ("edges: ragged", "0,1\n1,2,3,4\n", "row 2 has 4 columns, not 2"),
    ("edges: a thousand or one", '0,1,"1,234"\n', "'1,234' in column 3"),
    ("edges: Matrix Market", "%%MatrixMarket\n3 3 1\n1 2 5\n", "scipy.io.mmread"),
    ("edges: no weight", "src,dst,weight\n0,1,2\n1,2,\n", "edge_weight holds NaN"),
    ("edges: UTF-16", "0,1\n1,2\n".encode("utf-16"), "UTF-16: save it as CSV in UTF-8"),
    ("edges: latin-1", "src,größe\n0,1\n".encode("latin-1"), "is not a table"),
    ("features: text", "1\n2\nthree\n4\n", "not a table of numbers (row 3 has 'three'"),
    ("features: a name twice", "node_id,f\n0,1\n0,2\n1,3\n2,4\n", "names node 0 more than once"),
    ("features: a node missing", "node_id,f\n0,1\n1,2\n2,3\n4,4\n", "there is no row for node 3"),
    ("features: ids from 1 on", "id,f\n1,1\n2,2\n3,3\n4,4\n", "count from 0, in the edges, too"),
    ("features: ids of text", "id,f\na,1\nb,2\nc,3\nd,4\n", "'a' in column id; node ids are whole"),
    ("features: two ids", "id,node_id,f\n0,0,1\n", "two columns for one thing"),
    ("features: an index in another order", ",f\n2,1\n0,2\n1,3\n3,4\n", "call it node_id"),
    ("features: nothing there", "f,g\n1,2\n3,\n5,6\n7,8\n", "row 2 has no number"),
    ("features: nothing there, by R", "f,g\n1,2\n3,NA\n5,6\n7,8\n", "row 2 has no number"),
    ("features: answers by another name", "f,Class\n1,0\n3,1\n5,0\n7,1\n", "Class is no feature"),
    ("features: y without x", "f,y\n1,0\n3,1\n5,0\n7,1\n", "y is no feature"),
    ("features: an empty line", "1\n\n3\n4\n", "row 2 has no number"),
    ("features: a count of the columns", "0,1,2\n1,0,0\n3,1,0\n5,0,0\n", "counts the columns"),
    ("labels: ids and no labels", "node_id\n0\n1\n2\n3\n", "has no column of labels"),
    ("features: the answer", "f,label\n1,0\n3,1\n5,0\n7,1\n", "label is no feature"),
    ("labels: short", "0\n1\n", "each needs one row per node"),
    ("labels: below -1", "0\n1\n-3\n1\n", "classes from 0 on"),
    ("labels: infinite", "y\n0\n1\ninf\n1\n", "classes from 0 on"),
    ("labels: a slip", "0\n1\n1x\n1\n", "row 3 has '1x'"),
    ("labels: a name twice", "node,label\n0,1\n0,1\n1,0\n2,0\n", "names node 0 more than once"),
    ("labels: an unknown node", "node,label\n0,1\n4,1\n1,0\n2,0\n", "names node 4 of 4 nodes"),
    ("labels: an index in another order", ",label\n3,0\n0,1\n1,1\n2,0\n", "call it node_id"),
    ("labels: two texts", "a,b\nx,y\nx,y\nx,y\nx,y\n", "'x' in column a"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "text", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_table_that_is_refused(tmp_path, case, text, words):
    file = case.partition(":")[0]
    with pytest.raises(DataError, match=rf"{file}\.csv") as caught:
        load_tables(write(tmp_path, **{file: text}))
    assert words in str(caught.value)


def test_labels_alone(tmp_path):
    """Where no features say how many nodes there are: ids may leave some out, a name is none."""

    def read(text: str) -> Any:
        write(tmp_path, labels=text)
        (tmp_path / "features.csv").unlink()
        return load_tables(tmp_path).y.tolist()

    assert read("node_id,label\n3,1\n1,0\n") == [-1, 0, -1, 1]
    assert read("y,node\nred,3\nblue,1\n") == ["", "blue", "", "red"]
    assert read("y\n0\n\n1\n1\n\n\n") == [0, -1, 1, 1]
    assert read("red\nblue\nblue\nred\n") == ["red", "blue", "blue", "red"]
    with pytest.raises(DataError, match="species, may be a label or a name"):
        read("species\nred\nblue\nblue\nred\n")
    assert read("id,label\n1,0\n2,1\n3,1\n") == [-1, 0, 1, 1]
    write(tmp_path, edges="1,2\n2,3\n", labels="id,label\n1,0\n2,1\n3,1\n")
    (tmp_path / "features.csv").unlink()
    with pytest.raises(DataError, match="count from 0"):
        load_tables(tmp_path)
    with pytest.raises(DataError, match="names node 9 of 4 nodes"):
        read("id,label\n9,0\n2,1\n3,1\n")


def test_names_that_pandas_counts(tmp_path):
    """A line 0,1,2 before as many rows as there are labels is no node; nor is 0 before those."""
    features, labels = "0,1,2\n1,2,3\n4,5,6\n7,8,9\n0,0,1\n", "label\n0\n1\n1\n0\n"
    named = "source,target\n0,1\n1,2\n2,3\n"
    data = load_tables(write(tmp_path, edges=named, features=features, labels=labels))
    assert data.X.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 1]]
    data = load_tables(write(tmp_path, labels="0\n2\n1\n1\n2\n"))
    assert data.y.tolist() == [2, 1, 1, 2]
    for file, others in (("features", {"edges": named}), ("edges", {})):
        text = "0\n2\n1\n1\n2\n" if file == "features" else labels
        with pytest.raises(DataError, match=rf"{file}\.csv: its first line counts the columns"):
            load_tables(write(tmp_path, features=features, labels=text, **others))


@pytest.mark.parametrize(
    "column",
    [
        [1600000000.0, 1600000001, 1600000002, 0.5],
        [1e39, 0, 0, 1],
        [1e-50, 2e-50, 0, 0],
        [1000000.25, 1000000.5, 1e6, 1e6],
    ],
)
def test_features_beyond_float32(tmp_path, column):
    """Seconds since 1970, or tiny units, keep what tells nodes apart."""
    write(tmp_path, features="".join(f"{v!r}\n" for v in column))
    assert load_tables(tmp_path).X.ravel().tolist() == column


# ---- folders ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["valid", "val", "validation", "Valid"])
def test_a_split(tmp_path, name):
    mask = "test\nFalse\nFalse\nFalse\nTrue\n"
    split = {"train": "node_id\n0\n1\n", name: ",node\n0,2\n", "test": mask}
    data = load_tables(write(tmp_path, **split))
    found = {part: ids.tolist() for part, ids in data.split.items()}
    assert found == {"train": [0, 1], "valid": [2], "test": [3]}


def test_what_a_folder_holds_besides_is_told_or_refused(tmp_path):
    write(tmp_path, **{"nodes": "0\n", "README.md": "this"})
    assert note(load_tables(tmp_path)).endswith("files that are not used: nodes.csv")
    write(tmp_path, valid="2\n", val="3\n")
    with pytest.raises(DataError, match=r"has val\.csv and valid\.csv: remove one"):
        load_tables(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no edges\.csv"):
        load(f"{tmp_path.parent}/")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train.csv", "7\n", "names node 7 but there are 4 nodes"),
        ("features.npz", "PK", "features.npz is not a whole SciPy sparse matrix"),
        ("features.npy", "x", "features.npy is not a whole"),
        ("edges.csv.gz", "no gzip", "edges.csv.gz is not a table"),
        ("edges.parquet", "PAR1", "edges.parquet is not a whole Parquet"),
    ],
)
def test_wrong_files_are_named(tmp_path, file, content, words):
    if file.endswith("parquet"):
        pytest.importorskip("pyarrow")
    write(tmp_path)
    (tmp_path / f"{file.partition('.')[0]}.csv").unlink(missing_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words.replace(".", r"\.")):
        load(f"{tmp_path}/")


def test_training_on_a_folder_says_what_was_read(tmp_path, capsys):
    labels = "node_id,label\n3,1\n0,0\n1,1\n2,0\n"
    write(tmp_path, edges="weight,src,dst\n1,0,1\n2,1,2\n1,2,3\n", labels=labels, train="0\n1\n")
    assert main(["train", f"{tmp_path}/", "--ridge", "0.1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "edges.csv: 3 edges from columns src, dst, weight\n" in out
    assert "labels.csv: 2 classes from column label, rows by node_id\n" in out


def test_predictions_are_labels_again(tmp_path, capsys):
    write(tmp_path, labels="red\nblue\nblue\nred\n", train="0\n1\n2\n")
    folder, run = f"{tmp_path}/", str(tmp_path / "run")
    assert main(["train", folder, "--ridge", "0.1", "--out", run, "--quiet"]) == 0
    (tmp_path / "labels.csv").unlink()
    predicted = tmp_path / "labels.csv"
    assert main(["predict", run, folder, "--to", str(predicted), "--quiet"]) == 0
    capsys.readouterr()
    data = load(folder)
    model = HERTA(ridge=0.1, dtype="float32")
    model.fit(data.graph, data.X, ["red", "blue", "blue", "red"], [0, 1, 2])
    assert data.y.tolist() == model.predict(data.graph, data.X).tolist()


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz", ".parquet"])
@pytest.mark.parametrize("index", [False, True])
def test_pandas_writes_what_is_read(tmp_path, ending, index, capsys):
    pd = pytest.importorskip("pandas")
    tables = {
        "edges": pd.DataFrame({"target": [1, 2, 3], "source": [0, 1, 2]}),
        "features": pd.DataFrame(X, columns=["a", "b"]).assign(node_id=range(4))[::-1],
        "labels": pd.DataFrame({"label": Y}),
        "train": pd.DataFrame({"node": [0, 1]}),
        "valid": pd.DataFrame({"node": [3]}),
    }
    (tmp_path / "mine").mkdir()
    for name, frame in tables.items():
        path = tmp_path / "mine" / f"{name}{ending}"
        if ending == ".parquet":
            pytest.importorskip("pyarrow")
            frame.to_parquet(path, index=index or None)
        else:
            frame.to_csv(path, index=index, sep="\t" if ending == ".tsv" else ",")
    split = {part: tmp_path / "mine" / f"{part}{ending}" for part in ("train", "valid")}
    files = [tmp_path / "mine" / f"{part}{ending}" for part in ("edges", "features", "labels")]
    frames = from_tables(tables["edges"], tables["features"], tables["labels"], split)
    by_name = load("mine", tmp_path)
    for data in (load(str(tmp_path / "mine")), by_name, from_tables(*files, split), frames):
        assert pairs(data.graph) == PATH
        assert data.X.tolist() == X
        assert data.y.tolist() == Y
        assert {part: ids.tolist() for part, ids in data.split.items()} == {
            "train": [0, 1], "valid": [3]
        }  # fmt: skip
    assert load("mine", tmp_path, features=False).X is None
    assert sizes("mine", tmp_path).d == 2
    assert main(["train", str(tmp_path / "mine"), "--ridge", "0.1", "--quiet"]) == 0
    assert "mine: 4 nodes, 3 edges, 2 features, 2 outputs" in capsys.readouterr().out


def test_parquet_by_names_and_wrong_ones(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"w": [1.0, 2.0], "v": [1, 2], "u": [0, 1]})
    frame.to_parquet(tmp_path / "e.parquet")
    assert from_tables(tmp_path / "e.parquet").graph.adjacency().toarray()[2, 1] == 2.0
    frame.set_index(["u", "v"]).to_parquet(tmp_path / "e.parquet")
    assert from_tables(tmp_path / "e.parquet").graph.adjacency().toarray()[2, 1] == 2.0
    frame.assign(when=1).to_parquet(tmp_path / "e.parquet")
    assert "(not used: when)" in from_tables(tmp_path / "e.parquet").metadata["note"]
    frame.astype({"u": str}).to_parquet(tmp_path / "e.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_tables(tmp_path / "e.parquet").graph.num_edges == 2  # quoted numbers
    by_name = pd.DataFrame({"x": [1.0, 2.0, 3.0]}, index=pd.Index([2, 0, 1], name="node_id"))
    by_name.to_parquet(tmp_path / "x.parquet")
    frame.to_parquet(tmp_path / "e.parquet")
    data = from_tables(tmp_path / "e.parquet", tmp_path / "x.parquet")
    assert data.X.tolist() == [[2.0], [3.0], [1.0]]


def test_arrays_beside_a_table_of_edges(tmp_path):
    (tmp_path / "e.txt").write_text("0 1 0.5\n1 2 2.0\n")
    sp.save_npz(tmp_path / "x.npz", sp.csr_array(np.eye(4)))
    np.save(tmp_path / "y.npy", np.arange(8.0).reshape(4, 2))
    data = from_tables(tmp_path / "e.txt", tmp_path / "x.npz", tmp_path / "y.npy")
    assert data.graph.adjacency().toarray()[1].tolist() == [0.5, 1.0, 2.0, 0.0]
    assert (data.X.toarray() == np.eye(4)).all()
    assert data.y.dtype == np.float32  # an array says what it holds
    assert data.y.tolist() == np.arange(8.0).reshape(4, 2).tolist()


def test_a_compressed_table_with_a_mark(tmp_path):
    with gzip.open(tmp_path / "e.csv.gz", "wt", encoding="utf-8-sig") as file:
        file.write("1,2\n0,1\n")
    assert pairs(from_tables(tmp_path / "e.csv.gz").graph) == {(0, 1), (1, 2)}


# ---- arrays and DataFrames in Python ----------------------------------------------------------
def test_a_dataframe_has_one_edge_per_row():
    pd = pytest.importorskip("pandas")
    square = pd.DataFrame([[0, 1], [2, 3]])
    assert pairs(Graph.from_edges(square)) == {(0, 1), (2, 3)}
    named = pd.DataFrame({"weight": [2.0, 3.0], "dst": [1, 3], "src": [0, 2]}, index=[5, 3])
    graph = Graph.from_edges(named)
    assert pairs(graph) == {(0, 1), (2, 3)}
    assert graph.edges()[2].tolist() == [2.0, 3.0]
    assert Graph.from_edges(named, edge_weight=[1.0, 5.0]).edges()[2].tolist() == [1.0, 5.0]
    assert pairs(Graph.from_edges(square.astype(float), 6)) == {(0, 1), (2, 3)}
    with pytest.warns(UserWarning, match="not used: when"):
        Graph.from_edges(named.assign(when=1))
    for wrong, words in (
        (pd.DataFrame(np.arange(10).reshape(2, 5)), "two columns of node ids"),
        (pd.DataFrame({"a": [0], "b": [1], "c": [2]}), "has the columns a, b, c"),
        (pd.DataFrame({"src": ["x"], "dst": ["y"]}), "integer node ids from 0 on in column src"),
        (pd.DataFrame({"src": [0.5], "dst": [1]}), "integer node ids from 0 on in column src"),
    ):
        with pytest.raises(ValueError, match=words):
            Graph.from_edges(wrong)


@pytest.fixture
def fitted() -> tuple[Graph, Any, Any, HERTA]:
    rng = np.random.default_rng(0)
    g = Graph.from_edges(rng.integers(0, 40, (2, 90)), 40)
    X, y = rng.standard_normal((40, 3)), rng.integers(0, 3, 40)
    return g, X, y, HERTA(ridge=0.1).fit(g, X, y)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, object])
def test_one_column_of_whole_numbers_is_classes(fitted, kind):
    """As PyG and OGB have it; it was a regression."""
    g, X, y, model = fitted
    column = y.astype(kind)[:, None]
    again = HERTA(ridge=0.1).fit(g, X, column)
    assert again.classes_.tolist() == [0, 1, 2]
    assert (again.W_ == model.W_).all()
    assert again.score(g, X, column) == model.score(g, X, y)


def test_several_columns_of_whole_numbers_need_bce(fitted):
    g, X, y, _ = fitted
    several = np.eye(3, dtype=int)[y]
    for loss in ("mse", "ce"):
        with pytest.raises(ValueError, match=r'loss="bce"|loss="ce" needs one'):
            HERTA(ridge=0.1, loss=loss).fit(g, X, several)
    HERTA(ridge=0.1, loss="bce").fit(g, X, several)
    assert HERTA(ridge=0.1).fit(g, X, several.astype(float)).classes_ is None


def test_dataframes_of_nodes_by_their_names(fitted):
    pd = pytest.importorskip("pandas")
    g, X, y, model = fitted
    features = pd.DataFrame(X, columns=["a", "b", "c"]).assign(node_id=range(40))
    labels = pd.DataFrame({"label": y, "node_id": range(40)})
    order = np.random.default_rng(1).permutation(40)
    for at in (np.arange(40), order):
        again = HERTA(ridge=0.1).fit(g, features.iloc[at], labels.iloc[at])
        assert (again.W_ == model.W_).all()
        assert again.score(g, features.iloc[at], labels.iloc[at]) == model.score(g, X, y)
    plain = HERTA(ridge=0.1).fit(g, features[["a", "b", "c"]], labels[["label"]])
    assert (plain.W_ == model.W_).all()
    assert (HERTA(ridge=0.1).fit(g, features.set_index("node_id"), labels["label"]).W_
            == model.W_).all()  # fmt: skip
    missing = pd.Series(np.where(order > 20, -1, y)).astype("Int64").replace(-1, pd.NA)
    for given in (missing, missing.to_frame(), missing.to_frame("label").assign(node=range(40))):
        some = HERTA(ridge=0.1).fit(g, X, given)
        assert (some.W_ == HERTA(ridge=0.1).fit(g, X, np.where(order > 20, -1, y)).W_).all()
    for wrong in ((features[["a", "b"]].iloc[order], y), (X, labels["label"].iloc[order])):
        with pytest.raises(ValueError, match="counts the rows in another order: sort_index"):
            HERTA().fit(g, *wrong)
    with pytest.raises(ValueError, match="y, a DataFrame: has columns beside the labels, age"):
        HERTA().fit(g, X, labels.assign(age=1))
    with pytest.raises(ValueError, match="X, a DataFrame: column node_id names node 0 more than"):
        HERTA().fit(g, features.assign(node_id=0), y)


# ---- nodes that are named by text -------------------------------------------------------------
def named(folder, **content):
    """Five nodes a to e in a ring, as R's write.csv quotes them; the features give the order."""
    rows = {"edges": [("source", "target"), *zip("abcde", "bcdea")]}
    rows |= {"features": [("node_id", "f"), *((v, float(i)) for i, v in enumerate("ecadb"))]}
    rows |= {"labels": [("node_id", "label"), ("a", 0), ("b", 1), ("c", 0), ("d", 1)]}
    rows |= {"train": [("node_id",), "a", "b"], **content}
    for name, lines in rows.items():
        quoted = (",".join(f'"{cell}"' for cell in line) for line in lines or ())
        if lines is not None:
            (folder / f"{name}.csv").write_text("\n".join(quoted) + "\n")
    return folder


def test_names_of_nodes_are_mapped_to_numbers_and_kept(tmp_path):
    data = load_tables(named(tmp_path))
    names = data.metadata["node_names"].tolist()
    assert names == list("ecadb")
    u, v, _ = data.graph.edges()
    assert {frozenset((names[a], names[b])) for a, b in zip(u, v)} == {
        frozenset(pair) for pair in zip("abcde", "bcdea")
    }
    assert data.y.tolist() == [-1, 0, 0, 1, 1]
    assert data.split["train"].tolist() == [2, 4]
    (tmp_path / "features.csv").unlink()
    assert load_tables(tmp_path).metadata["node_names"].tolist() == list("abcde")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"labels": [("node_id", "label"), ("z", 1)]}, "labels.csv names node 'z'"),
        ({"edges": [("source", "target"), ("a", "z")]}, "edges.csv names node 'z'"),
        ({"edges": [("a", "b"), ("b", "c")]}, "edges.csv: its first line may name nodes"),
        ({"train": ["a", "b"]}, "train.csv: its first line may name nodes"),
        ({"edges": [("source", "target"), ("a", "b"), ("c", "7")]}, "node ids are whole numbers"),
        ({"features": [("f",), "1", "2", "3", "4", "5"]}, "a column node_id of .*features.csv"),
    ],
)
def test_names_of_nodes_that_do_not_fit(content, words, tmp_path):
    with pytest.raises(DataError, match=words):
        load_tables(named(tmp_path, **content))


def test_predictions_have_the_names_of_the_nodes(tmp_path, capsys):
    place, run = str(named(tmp_path)), str(tmp_path / "run")
    assert main(["train", place, "--quiet", "--out", run]) == 0
    for ending in ("csv", "npz"):
        assert main(["predict", run, place, "--to", f"{run}.{ending}", "--quiet"]) == 0
    assert re.findall("^(.),", Path(f"{run}.csv").read_text(), re.M) == list("ecadb")
    with np.load(f"{run}.npz") as archive:
        assert archive["nodes"].tolist() == list("ecadb")
