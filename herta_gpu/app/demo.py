"""`make demo`: a graph model trained to its proven optimum, beside gradient descent and Adam."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from herta_gpu import HERTA, SDDSolver
from herta_gpu.app.report import pyplot
from herta_gpu.datasets import Dataset, digits
from herta_gpu.losses import softmax
from herta_gpu.plumbing.progress import Stages

_LAM, _RIDGE = 20.0, 1e-2
_SECONDS = 2.0  # that gradient descent and Adam are followed, beyond the time of the certified fit
_PICTURE = "herta-demo.png"
_ABOUT = """\
herta_gpu predicts labels or numbers of the nodes of a graph.  It trains the linear models of the
SGC / APPNP / TWIRLS family to their optimum, and proves it: no learning rate, no epochs.
"""

Curve = list[tuple[float, float, float]]  # seconds, objective and test accuracy after each step


def main() -> None:
    """Handwritten digits, a tenth of them labelled; neighbours are digits that look alike."""
    print(_ABOUT, flush=True)
    stages = Stages(verbose=True)
    with stages("load"):
        data = digits()
    print(f"digits: {data.graph}, {data.X.shape[1]} features, {len(data.split['train'])} labelled")
    model = HERTA(lam=_LAM, loss="ce", ridge=_RIDGE)
    fit = (data.graph, data.X, data.y, data.split["train"])
    with stages("first steps"):  # what is loaded once is loaded before any race begins
        model.fit(*fit)
        for way in (_descent, _adam):
            _follow(data, way, 0.0)
    start = time.perf_counter()
    model.fit(*fit)
    spent, proof = time.perf_counter() - start, model.certificate_
    score, best = model.score(data.graph, data.X, data.y, data.split["test"]), model.history_[-1]
    print(f"\n{model.status_} after {spent:.2f} s: {proof}")
    print(f"\nafter {spent:.2f} s         loss above the optimum   test accuracy")
    print(f"{'herta_gpu':<18}{f'<= {proof.value:.1e} of it':>26}{score:>16.3f}")
    curves = {"herta_gpu": [(spent, proof.value)]}
    for name, way in (("gradient descent", _descent), ("Adam", _adam)):
        curve = [
            (s, loss / best["loss"] - 1, a) for s, loss, a in _follow(data, way, spent + _SECONDS)
        ]
        _, gap, score = max(row for row in curve if row[0] <= spent or row is curve[0])
        print(f"{name:<18}{f'{gap:.1e} of it':>26}{score:>16.3f}")
        curves[name] = [row[:2] for row in curve]
    try:
        _draw(curves, spent)
        print(f"\nWhat happens in {spent + _SECONDS:.1f} s: {_PICTURE}")
    except ImportError as error:
        print(error, file=sys.stderr)
    print("Data of your own: herta train FOLDER --lam 10 --ridge 0.01; README.md has the rest.")


def _follow(data: Dataset, way: Any, seconds: float) -> Curve:
    """Weights trained through the network for so long, as a loop in any library would."""
    train, test = data.split["train"], data.split["test"]
    # SciPy's kernels, as a fit of so small a graph takes: nothing need be compiled.
    solver = SDDSolver(data.graph, _LAM, tol=1e-4, device="cpu-scipy")
    Y = np.eye(10)[data.y[train]]
    W = np.zeros((data.X.shape[1], 10))
    curve: Curve = []
    step, start = way(solver, data, train), time.perf_counter()
    while not curve or curve[-1][0] < seconds:
        Z = solver.solve(data.X @ W)
        P, U = softmax(np, Z[train]), np.zeros(Z.shape)
        loss = -np.log(P[Y == 1]).sum() + _RIDGE / 2 * (W**2).sum()
        U[train] = P - Y
        now = time.perf_counter() - start  # what these outputs took
        curve.append((now, float(loss), float((Z[test].argmax(1) == data.y[test]).mean())))
        W = step(W, data.X.T @ solver.solve(U) + _RIDGE * W)
    return curve


def _descent(solver: SDDSolver, data: Dataset, train: Any) -> Any:
    """The largest step that is safe, which nobody is charged for."""
    rate = 1 / (np.linalg.norm(solver.solve(data.X)[train], 2) ** 2 / 2 + _RIDGE)
    return lambda W, gradient: W - rate * gradient


def _adam(*_: Any) -> Any:
    m, v, t = 0.0, 0.0, 0

    def step(W: Any, gradient: Any) -> Any:
        nonlocal m, v, t
        m, v, t = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, t + 1
        return W - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return step


def _draw(curves: dict[str, Any], spent: float) -> None:
    figure, axis = pyplot().subplots(figsize=(8, 4))
    for name, curve in curves.items():
        axis.loglog(*zip(*curve), "o-", markersize=4, label=name)
    axis.axvline(spent, color="#888888", linestyle="--", linewidth=1)
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss above the optimum, relative")
    axis.legend()
    figure.tight_layout()
    figure.savefig(_PICTURE, dpi=120)


if __name__ == "__main__":
    main()
