"""What looks like bad input and is not: masks, text labels, numbers of other types."""

from __future__ import annotations

import json

import numpy as np
import pytest

from herta_gpu import HERTA, Graph
from herta_gpu.app.cli import main
from herta_gpu.datasets import DataError, Dataset, load, load_npz
from herta_gpu.datasets.dataset import check_split
from tests.plumbing.bad_input import NAMES, D, G, N, X, Y, fit, npz, refused, tables, trained

MASK = np.arange(N) < 15


@pytest.mark.parametrize("mask", [MASK, MASK.astype(int), MASK.astype(float), MASK.astype("u1")])
def test_masks_are_splits(mask, tmp_path, capsys):
    path = npz(tmp_path, drop=("valid",), train=mask, test=1 - mask.astype(mask.dtype))
    data = load_npz(path)
    assert data.split["train"].tolist() == list(range(15))
    assert data.split["test"].tolist() == list(range(15, N))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_train"] == 15
    if mask.dtype.kind in "biu":
        ours = HERTA(ridge=0.1).fit(G, X, Y, train=mask).W_
        assert (ours == HERTA(ridge=0.1).fit(G, X, Y, train=np.arange(15)).W_).all()


def test_sets_and_masks_of_pandas_are_training_nodes():
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(MASK)
    ours = HERTA(ridge=0.1).fit(G, X, Y, train=np.arange(15)).W_
    for train in (
        set(range(15)),
        dict.fromkeys(range(15)).keys(),
        series,
        series.astype("boolean"),
    ):
        assert (ours == HERTA(ridge=0.1).fit(G, X, Y, train=train).W_).all()
    refused(ValueError, "another order", lambda: fit(train=series[::-1]))
    missing = series.astype("boolean").where(MASK)
    refused(ValueError, "without missing ones", lambda: fit(train=missing))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_of_any_kind_are_what_they_hold():
    torch = pytest.importorskip("torch")
    whole = np.round(8 * X)  # numbers that bfloat16 has
    ours = HERTA(ridge=0.1).fit(G, whole, Y).W_
    tensor, y = torch.tensor(whole, dtype=torch.float32), torch.tensor(Y)
    for given in (tensor.requires_grad_(), tensor.bfloat16(), tensor.to_sparse()):
        model = HERTA(ridge=0.1).fit(G, given, y)
        np.testing.assert_allclose(model.W_, ours, rtol=1e-5, atol=1e-6)
        assert type(model.transform(G, given)) is torch.Tensor
    sparse = HERTA(ridge=0.1).fit(G, tensor.detach().to_sparse_csr(), y)
    np.testing.assert_allclose(sparse.W_, ours, rtol=1e-5, atol=1e-6)
    targets = tensor[:, :2]
    flat = HERTA(ridge=0.1).fit(G, whole, targets).W_
    assert (flat == HERTA(ridge=0.1).fit(G, whole, whole[:, :2]).W_).all()
    weights = torch.ones(2, requires_grad=True)
    graph = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3, weights)
    assert graph.num_edges == 2


def test_no_seed_is_a_seed(tmp_path):
    model = HERTA(ridge=0.1, random_state=None).fit(G, X, Y)
    assert (model.W_ == trained().W_).all()
    model.save(tmp_path / "model.npz")
    assert HERTA.load(tmp_path / "model.npz").random_state is None


def test_a_mask_is_told_from_ids_where_it_can_be():
    assert check_split("two", {"train": [0, 1]}, 2)["train"].tolist() == [0, 1]
    assert check_split("two", {"train": [1, 0]}, 3)["train"].tolist() == [1, 0]
    assert check_split("three", {"train": [1, 0, 0]}, 3)["train"].tolist() == [0]


def test_a_split_of_ones_own_may_not_overlap():
    data = Dataset("mine", G, X, Y, {"train": np.arange(5), "test": np.arange(4, 9)})
    refused(DataError, "train and test overlap", lambda: data.with_split("public"))
    refused(DataError, "train and test overlap", lambda: data.with_split(None))


def test_one_column_of_classes_is_classes(tmp_path):
    assert load_npz(npz(tmp_path, labels=Y[:, None])).y.tolist() == Y.tolist()


def test_num_nodes_may_be_a_whole_float_or_be_left_out(tmp_path):
    assert load_npz(npz(tmp_path, num_nodes=30.0)).graph.num_nodes == N
    assert load_npz(npz(tmp_path, num_nodes=[30])).graph.num_nodes == N
    assert load_npz(npz(tmp_path, drop=("num_nodes",))).graph.num_nodes == N


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_matrix_of_numpy_is_an_array():
    ours = HERTA(ridge=0.1).fit(G, np.matrix(X), Y)
    assert (ours.W_ == trained().W_).all()
    assert ours.transform(G, np.matrix(X)).shape == (N, 3)


LABELS = [NAMES, NAMES.astype(object), NAMES.astype("S"), NAMES.tolist()]


@pytest.mark.parametrize("labels", LABELS, ids=["text", "objects", "bytes", "list"])
def test_text_labels_in_python(labels, tmp_path):
    model = HERTA(ridge=0.1).fit(G, X, labels)
    assert model.classes_.tolist() == ["blue", "green", "red"]
    predicted = model.predict(G, X)
    assert (predicted == np.array(["red", "green", "blue"])[trained().predict(G, X)]).all()
    assert model.score(G, X, labels) == trained().score(G, X, Y)
    model.save(tmp_path / "m")
    assert (HERTA.load(tmp_path / "m").predict(G, X) == predicted).all()


@pytest.mark.parametrize("nothing", ["", None, float("nan"), "-1", "  "])
def test_text_that_is_no_label(nothing):
    labels = NAMES.astype(object)
    labels[20:] = nothing
    model = HERTA(ridge=0.1).fit(G, X, labels)
    assert (model.W_ == HERTA(ridge=0.1).fit(G, X, NAMES, train=np.arange(20)).W_).all()
    whole = Y.astype(object)
    whole[20:] = None
    assert HERTA(ridge=0.1).fit(G, X, whole).classes_.tolist() == [0, 1, 2]
    refused(ValueError, "node 25, which has no label", lambda: fit(y=labels, train=[1, 25]))


@pytest.mark.parametrize("kind", ["npz", "csv", "csv with a head", "npy"])
def test_text_labels_on_the_command_line(kind, tmp_path, capsys):
    lines = "\n".join(NAMES) + "\n"
    made = {
        "npz": lambda: npz(tmp_path, labels=NAMES),
        "csv": lambda: tables(tmp_path, labels=lines),
        "csv with a head": lambda: tables(tmp_path, labels="colour\n" + lines),
        "npy": lambda: tables(tmp_path, labels=NAMES),
    }
    data, run = str(made[kind]()), str(tmp_path / "run")
    assert main(["plan", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["c"] == 3
    assert main(["train", data, "--ridge", "0.1", "--out", run, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["predict", run, data, "--to", str(tmp_path / "p.csv"), "--json"]) == 0
    assert "score" in json.loads(capsys.readouterr().out)
    model = HERTA(ridge=0.1, dtype="float32").fit(G, load(data).X, NAMES, train=np.arange(15))
    rows = (tmp_path / "p.csv").read_text().splitlines()
    assert rows == ["node,prediction", *(f"{i},{v}" for i, v in enumerate(model.predict(G, X)))]
    assert answer["scores"]["test"] == model.score(G, X, NAMES, np.arange(20, N))
    assert main(["predict", run, data, "--to", str(tmp_path / "p.npz"), "--quiet"]) == 0
    with np.load(tmp_path / "p.npz", allow_pickle=False) as stored:
        assert (stored["predictions"] == model.predict(G, X)).all()


def test_text_labels_are_tuned_on(tmp_path, capsys):
    argv = ["tune", str(npz(tmp_path, labels=NAMES)), "--lam", "1", "--ridge", "0.1", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert {candidate["loss"] for candidate in found} == {"mse", "ce"}


def test_predictions_for_labels_of_another_kind_have_no_score(tmp_path, capsys, finished):
    data = npz(tmp_path, labels=NAMES)
    argv = ["predict", str(finished), str(data), "--to", str(tmp_path / "p.csv"), "--json"]
    assert main(argv) == 0
    assert "score" not in json.loads(capsys.readouterr().out)


def test_one_float_per_node_is_scored_as_one_column(tmp_path, capsys):
    data = npz(tmp_path, labels=X @ np.arange(1.0, D + 1))
    assert main(["train", str(data), "--lam", "0.001", "--ridge", "1e-6", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["metric"] == "r2"
    assert answer["outputs"] == 1
    assert answer["scores"]["test"] > 0.99
