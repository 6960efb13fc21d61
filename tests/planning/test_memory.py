"""`memory_budget` against the resident memory of a real fit, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_FIT = """
import gc, json, sys
import numpy as np
from herta_gpu import HERTA, Graph

def resident(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

n, m, d, c, budget, options, mapped, share, more = json.loads(sys.argv[1])
rng = np.random.default_rng(0)

def graph(n, m):
    return Graph.from_edges(np.unique(np.sort(rng.integers(0, n, (2, m)), axis=0), axis=1), n)

small, g = graph(9_000, 9_000), graph(n, m)  # the small one is compiled for, too
X = rng.standard_normal((n, d), dtype=np.float32)
if mapped:
    np.save(sys.argv[2], X.astype(np.float16))
    X = np.load(sys.argv[2], mmap_mode="r")
y, train = rng.integers(0, c, n), rng.permutation(n)[: n // share]
first = {**more, "evaluate": [0, 1]} if "evaluate" in more else more
# compile, load what is loaded once
HERTA(**options).fit(small, np.asarray(X[:9_000, :4]), np.arange(9_000) % c, **first)
gc.collect()
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before, pages = resident("VmRSS"), resident("RssFile")
model = HERTA(memory_budget=budget, **options).fit(g, X, y, train, **more)
pages = resident("RssFile") - pages  # of files, which the system takes back at will
print(json.dumps({
    "used": resident("VmHWM") - before - pages, "status": model.status_,
    "width": model.plan_.solve_width, "sketch": model.plan_.sketch_rows,
    "outputs": model.plan_.outputs, "planned": sum(model.plan_.memory.values()),
}))
"""

MB = 1 << 20
CE = {"loss": "ce", "ridge": 1.0, "optimizer": "lbfgs", "max_iter": 8}
CASES = {
    "roomy": (400 * MB, {}, False),
    "too little for R": (170 * MB, {}, False),
    "blocks of outputs": (130 * MB, {"strategy": "herta"}, False),
    "cross entropy, herta": (240 * MB, {**CE, "strategy": "herta"}, False),
    "float16 X on disk, by community": (300 * MB, {"reorder": True}, True),
}


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory"
)


@needs_proc
@pytest.mark.parametrize("case", CASES)
def test_a_fit_stays_within_its_budget(case: str, tmp_path: Path) -> None:
    budget, options, mapped = CASES[case]
    arguments = [200_000, 800_000, 64, 8, budget, {"lam": 1.0, **options}, mapped, 2, {}]
    found = measured(arguments, tmp_path)
    assert 0.2 * budget < found["used"] <= budget, found  # it did measure the fit
    if "max_iter" not in options:
        assert found["status"] == "certified"
    if case == "blocks of outputs":
        assert 0 < found["outputs"] < 8


# Nodes, features, classes, one training node of so many; parameters; arguments of `fit`.
NEWER = {
    "label features": (40_000, 8, 20, 2, {"label_features": 2}, {}),
    "several lam, few rows": (40_000, 600, 4, 100, {"lam": [0.5, 1.0]}, {}),
    "leave-one-out": (40_000, 400, 4, 50, {"ridge": 0.1}, {"loo": True, "evaluate": 2000}),
}


@needs_proc
@pytest.mark.parametrize("case", NEWER)
def test_what_newer_options_allocate_is_planned(case: str, tmp_path: Path) -> None:
    """The plan is an upper bound of the measured peak, and not a wild one."""
    n, d, c, share, options, more = NEWER[case]
    more = {**more, "evaluate": list(range(more["evaluate"]))} if more else more
    arguments = [n, 3 * n, d, c, 400 * MB, {"lam": 1.0, **options}, False, share, more]
    found = measured(arguments, tmp_path)
    assert 0.4 * found["planned"] <= found["used"] <= found["planned"] <= 400 * MB, found


def measured(arguments: list[Any], tmp_path: Path) -> dict[str, Any]:
    """What a fit in a process of its own took."""
    command = [sys.executable, "-c", _FIT, json.dumps(arguments), str(tmp_path / "X.npy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


_LARGE = """
import gc, json, sys, threading
import numpy as np
from herta_gpu import HERTA
from herta_gpu.datasets import load

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

small = load("synthetic:n=400,m=1200,d=8,c=3")
HERTA(lam=1.0).fit(small.graph, small.X.astype(np.float16), small.y, small.split["train"])
data = load("synthetic:papers100M@0.01")
np.save(sys.argv[1], data.X.astype(np.float16))
X, (n, d) = np.load(sys.argv[1], mmap_mode="r"), data.X.shape
graph, y, train = data.graph, data.y, data.split["train"]
del data
gc.collect()
before, most, done = anonymous(), [0], threading.Event()

def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = HERTA(lam=1.0, memory_budget=int(sys.argv[2])).fit(graph, X, y, train)
done.set()
watcher.join()
print(json.dumps({
    "used": most[0] - before, "status": model.status_, "value": model.certificate_.value,
    "n": n, "strategy": model.plan_.strategy, "width": model.plan_.recipe.width,
    "features": n * d * 4, "outputs": n * model.W_.shape[1] * 4,
}))
"""


@needs_proc
@pytest.mark.long
def test_a_hundredth_of_papers100M_in_800_MB(tmp_path: Path) -> None:
    """No array of n x d or n x c fits: 568 and 764 MB of float32, with a graph of 290 MB."""
    budget = 800 * MB
    command = [sys.executable, "-c", _LARGE, str(tmp_path / "X.npy"), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["n"] > 10**6
    assert 0.2 * budget < found["used"] <= budget, found  # it did measure the fit
    assert found["used"] < found["features"] + found["outputs"]
    assert found["strategy"] == "direct"
    assert found["status"] == "certified"
    assert found["value"] <= 1e-6
