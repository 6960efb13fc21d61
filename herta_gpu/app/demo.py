"""`make demo`: a graph model trained to its proven optimum, beside gradient descent and Adam."""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import suppress
from typing import Any

from herta_gpu import HERTA
from herta_gpu.app.report import pyplot
from herta_gpu.datasets import Dataset, digits
from herta_gpu.plumbing.progress import Stages

_MODEL: dict[str, Any] = {"lam": 20.0, "loss": "ce", "ridge": 1e-2}
_PLAIN: dict[str, Any] = {"precondition": False, "strategy": "herta"}  # through the network
_PICTURE = "herta-demo.png"
_ABOUT = """\
herta_gpu predicts labels or numbers of the nodes of a graph.  It trains the linear models of the
SGC / APPNP / TWIRLS family to their optimum, and proves it: no learning rate, no epochs.
"""


class _Over(Exception):  # noqa: N818 - no error
    """The time of a fit is over."""


def main() -> None:
    """Handwritten digits, a tenth of them labelled; neighbours are digits that look alike."""
    print(_ABOUT, flush=True)
    stages = Stages(verbose=True)
    with stages("load"):
        data = digits()
    print(f"digits: {data.graph}, {data.X.shape[1]} features, {len(data.split['train'])} labelled")
    ways = {"herta_gpu": {}, "gradient descent": {"optimizer": "gd"}, "Adam": {"optimizer": "adam"}}
    ways = {name: {**_MODEL, **(_PLAIN if more else {}), **more} for name, more in ways.items()}
    with stages("first fits"):  # they compile, or read, the kernels that all of them need
        for params in ways.values():
            _fit(data, max_iter=2, **params)
    start = time.perf_counter()
    best = _fit(data, **ways["herta_gpu"])
    limit, curves = time.perf_counter() - start, {}
    proof, end = best.certificate_, best.history_[-1]["loss"]
    print(f"\nherta_gpu    {best.status_} after {limit:.2f} s: {proof}")
    print(f"\n{f'after {limit:.2f} s':<18}{'loss above the optimum':>24}{'test accuracy':>16}")
    for name, params in ways.items():
        model = best
        if name != "herta_gpu":
            curves[name] = _curve(data, 20 * limit, **params)
            taken = sum(s <= limit for s, _ in curves[name])
            model = _fit(data, **{**params, "max_iter": max(1, taken - 1)})
        above = max(model.history_[-1]["loss"] - end, proof.gap) / end
        score = model.score(data.graph, data.X, data.y, data.split["test"])
        print(f"{name:<18}{'<= ' * (model is best) + f'{above:.1e} of it':>24}{score:>16.3f}")
    curves = {name: [(s, loss / end - 1) for s, loss in curve] for name, curve in curves.items()}
    curves["herta_gpu"] = [(limit, proof.value)]
    try:
        _draw(curves, limit)
        print(f"\nThe same over {20 * limit:.1f} s: {_PICTURE}")
    except ImportError as error:
        print(error, file=sys.stderr)
    print("Next: herta train NAME --lam 10 --ridge 0.01 on data of your own; README.md")


def _fit(data: Dataset, callback: Any = None, **params: Any) -> HERTA:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that few steps were not enough is what is shown here
        model = HERTA(**params)
        return model.fit(data.graph, data.X, data.y, data.split["train"], callback=callback)


def _curve(data: Dataset, limit: float, **params: Any) -> list[tuple[float, float]]:
    """(seconds, loss) of each step, for so many seconds."""
    found: list[tuple[float, float]] = []
    start = time.perf_counter()

    def note(step: dict[str, Any]) -> None:
        found.append((time.perf_counter() - start, step["loss"]))
        if found[-1][0] > limit:
            raise _Over

    with suppress(_Over):
        _fit(data, note, max_iter=10**6, **params)
    return found


def _draw(curves: dict[str, list[tuple[float, float]]], limit: float) -> None:
    figure, axis = pyplot().subplots(figsize=(8, 4))
    for name, curve in curves.items():
        axis.loglog(*zip(*curve), "o-", markersize=4, label=name)
    axis.axvline(limit, color="#888888", linestyle="--", linewidth=1)
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss above the optimum, relative")
    axis.legend()
    figure.tight_layout()
    figure.savefig(_PICTURE, dpi=120)


if __name__ == "__main__":
    main()
