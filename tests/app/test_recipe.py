"""The recipe's candidates are the models that they name, and no test label chooses among them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from herta_gpu import HERTA, KernelModel
from herta_gpu.app import recipe
from herta_gpu.app.cli import main
from herta_gpu.datasets import load

DATA = load("digits").random_split(0.3)


def quiet(text):
    pass


@pytest.fixture(scope="module")
def found():
    return recipe.search(DATA, report=quiet)


def test_the_scores_are_those_of_the_models_themselves(found):
    """Kernels in the search are float32 on nodes that are not trained on: a node may differ."""
    valid = DATA.split["valid"]
    for name in ("X", "lam", "hops", "wide X", "wide"):
        one = next(c for c in found if c.name == name and c.smooth is None)
        model = (KernelModel if one.wide else HERTA)(**one.params)
        model.fit(DATA.graph, DATA.X, DATA.y, DATA.split["train"])
        assert model.status_ == "certified"
        right = model.predict(DATA.graph, DATA.X, valid) == DATA.y[valid]
        assert abs(right.mean() - one.valid) <= 1.5 / len(valid)
        smoothed = next(c for c in found if c.name == name and c.smooth is not None)
        _, Z = smoothed.fit(DATA)
        right = model.classes_[Z[valid].argmax(axis=1)] == DATA.y[valid]
        assert abs(right.mean() - smoothed.valid) <= 1.5 / len(valid)


def test_no_label_of_a_test_node_is_looked_at(found):
    other = DATA.y.copy()
    test = DATA.split["test"]
    other[test] = np.random.default_rng(0).permutation(other[test])
    again = recipe.search(replace(DATA, y=other), report=quiet)
    assert [(c.name, c.params, c.smooth, c.valid) for c in again] == [
        (c.name, c.params, c.smooth, c.valid) for c in found
    ]


def test_the_best_is_first_and_ties_go_to_the_simpler(found):
    order = ["X", "lam", "hops", "wide X", "wide"]
    keys = [(-c.valid, order.index(c.name), c.smooth is not None) for c in found]
    assert keys == sorted(keys)
    assert {c.name for c in found} == set(order)


def test_many_training_nodes_have_no_kernel(monkeypatch):
    monkeypatch.setattr(recipe, "MANY_ROWS", 100)
    assert {c.name for c in recipe.search(DATA, report=quiet)} == {"X", "lam", "hops"}


def test_the_command_and_what_repeats_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(recipe, "MANY_ROWS", 100)  # a linear winner has a command line
    assert main(["tune", "digits", "--recipe", "--quiet", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("again"))
    command = line.split("herta ", 1)[1].split()
    assert main([*command, "--quiet"]) == 0
    again = capsys.readouterr().out
    for part in ("valid", "test"):
        scores = [
            next(row.split()[-1] for row in text.splitlines() if row.startswith(f"{part} accuracy"))
            for text in (said, again)
        ]
        assert abs(float(scores[0]) - float(scores[1])) < 0.01
    assert (tmp_path / "run" / "model.npz").is_file()


def test_numbers_have_no_recipe():
    with pytest.raises(ValueError, match="one class per node"):
        recipe.search(replace(DATA, y=DATA.y.astype(float)), report=quiet)
