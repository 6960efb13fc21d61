"""`herta tune NAME --recipe`: five convex candidates, chosen on the validation nodes.

    X        linear, without the graph        lam       linear, rows of H^-1 X of length 1
    hops     linear, unit rows of S^k X       wide X    the kernel of a wide net on hops of X
    wide     that kernel on hops of the leading singular vectors of X, and a share of the linear one

All are kernel ridge or ridge, solved in closed form for six strengths each; then Correct and Smooth
after the best of each: together they tie tuned GNNs (bench/README.md).  Ties go to the earlier
candidate and to none.  The winner is trained again with its certificate.  Labels of test nodes are
looked at by nobody here.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg

from herta_gpu.app.metrics import evaluate
from herta_gpu.app.results import CommandOutput, table
from herta_gpu.app.runs import check_free
from herta_gpu.app.train import Job
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.features import Features
from herta_gpu.herta import HERTA
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.more.kernel import KernelModel
from herta_gpu.more.labels import CorrectAndSmooth, enlargement
from herta_gpu.more.random_features import FLOOR, Layer
from herta_gpu.more.sweep import all_rows
from herta_gpu.more.wide_kernel import Diffused, wide_kernel
from herta_gpu.planning.costs import BLOCK_WIDTH
from herta_gpu.plumbing.interop import as_matrix
from herta_gpu.plumbing.targets import make_targets

HOPS, LAMS = (0, 1, 2, 3), (1.0, 5.0, 20.0)
WIDE_RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
RIDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MANY_ROWS = 12_000  # training nodes beyond which there is no kernel
FEW_LABELS = 3000  # training nodes below which linear models try a large ridge as well
RANK, LINEAR = 64, 0.3
SMOOTH = ((0.0, 0.25), (0.0, 1.0), (5.0, 0.25), (5.0, 1.0), (20.0, 0.25), (20.0, 1.0), (20.0, 5.0))
_ROWS, _TOL = 512, 1e-4


@dataclass(frozen=True)
class Scored:
    """A candidate, its scores on validation nodes and its outputs on all nodes."""

    name: str
    params: dict[str, Any]  # of `HERTA`, or of `KernelModel` for a wide one
    valid: float
    smooth: tuple[float, float] | None = None
    Z: Any = field(default=None, repr=False)

    @property
    def wide(self) -> bool:
        return self.name.startswith("wide")

    @property
    def command(self) -> str:
        """What repeats it: a command line, or Python where the command line has no such model."""
        p, how = self.params, "" if self.smooth is None else " --correct-and-smooth {:g},{:g}"
        how = how.format(*(self.smooth or ()))
        if self.wide:
            given = ", ".join(f"{name}={value!r}" for name, value in p.items())
            steps = "" if self.smooth is None else f", then CorrectAndSmooth{self.smooth}"
            return f"KernelModel({given}).fit(...){steps}"
        block = f"--lam {p['lam']:g}" if "lam" in p else f"--hops {','.join(map(str, p['hops']))}"
        return f"--normalize unit --row-norm --fit-intercept {block} --ridge {p['ridge']:g}{how}"

    def fit(self, data: Dataset, device: str = "auto") -> tuple[Any, Any]:
        """(the model, trained to its certificate; its outputs on all nodes)."""
        made = KernelModel if self.wide else HERTA
        model: Any = made(**self.params, device=device)
        train, X = data.split["train"], data.X
        model.fit(data.graph, X, data.y, train)
        if self.smooth is None:
            return model, model.transform(data.graph, X)
        smoother = CorrectAndSmooth(*self.smooth, device=device)
        smoother.fit(data.graph, model, data.y, train, X=X)
        return model, smoother.Z_


def run(args: argparse.Namespace) -> CommandOutput:
    """herta tune DATASET --recipe"""
    check_free(args.out, args.overwrite)
    job = Job.of(args).load()
    data, started = job.data, time.perf_counter()
    with job.stages("tune"):
        found = search(data, args.device, args.random_state, job.stages.note)
    best = found[0]
    with job.stages("train"):
        model, Z = best.fit(data, args.device)
    scores = {part: score(data, ids, Z, model.classes_) for part, ids in data.split.items()}
    if args.out is not None:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        model.save(Path(args.out) / "model.npz")
    seconds = time.perf_counter() - started
    again = best.command if best.wide else f"herta train {args.dataset} {best.command}"
    rows = [("status", model.status_), ("certificate", str(model.certificate_))]
    rows += [(f"{part} {data.metric}", f"{value:.4f}") for part, value in scores.items()]
    rows += [("seconds", f"{seconds:.1f}"), ("again", again)]
    content: dict[str, Any] = {
        "winner": best.name,
        "params": best.params,
        "smooth": best.smooth,
        "again": again,
    }
    content |= {"scores": scores, "status": model.status_, "seconds": seconds}
    content |= {"certificate": model.certificate_.value}
    code = 0 if model.status_.startswith("certified") or args.allow_uncertified else 3
    return CommandOutput(content, f"{shown(found)}\n\n{table(rows, header=False)}", code)


def search(
    data: Dataset, device: str = "auto", seed: int = 0, report: Callable[[str], None] = print
) -> list[Scored]:
    """Every candidate, the best on the validation nodes first.

    Examples
    --------
    >>> from herta_gpu.app.recipe import search
    >>> from herta_gpu.datasets import load
    >>> found = search(load("digits").random_split(0.3), report=lambda text: None)
    >>> found[0].valid > 0.95, len({one.name for one in found})
    (True, 5)
    """
    t = make_targets(data.y, data.split["train"], data.graph.num_nodes, "mse")
    if t.classes is None:
        raise ValueError("The recipe is for one class per node: use the grid of herta tune.")
    valid, Y = np.asarray(data.split["valid"]), np.asarray(t.Y)
    if valid.size == 0:
        raise ValueError(f"{data.name} has no validation nodes to choose on: use --split.")
    found: list[Scored] = []
    best_of: dict[str, Scored] = {}
    for name, made in _candidates(data, replace(t, Y=Y), device, seed):
        report(name)
        scored = [Scored(name, p, score(data, valid, Z, t.classes), None, Z) for p, Z in made]
        best = max(scored, key=lambda one: one.valid)  # the first of equals
        best_of[name] = best
        found += [replace(one, Z=None) for one in scored]
    report("correct and smooth")
    for one in best_of.values():
        for pair, Z in _smoothed(data, t.rows, Y, one.Z, device):
            found.append(replace(one, valid=score(data, valid, Z, t.classes), smooth=pair, Z=None))
    order = list(best_of)

    def rank(one: Scored) -> tuple[Any, ...]:
        return -one.valid, order.index(one.name), one.smooth is not None

    return sorted(found, key=rank)


def score(data: Dataset, nodes: Any, Z: Any, classes: Any) -> float:
    """The metric of the data set; of two classes the area under the curve, where that is it."""
    if data.metric == "rocauc" and Z.shape[1] == 2:
        return evaluate("rocauc", data.y[nodes] == classes[1], Z[nodes, 1:] - Z[nodes, :1], None)
    return evaluate("accuracy", data.y[nodes], Z[nodes], classes)


Outcomes = Iterator[tuple[dict[str, Any], Any]]  # parameters, and outputs on all nodes


def _candidates(data: Dataset, t: Any, device: str, seed: int) -> Iterator[tuple[str, Outcomes]]:
    backend, graph = get_backend("cpu" if device == "auto" else device), data.graph
    H = RegularizedLaplacian(graph, 1.0, backend, "float64")
    unit = data.normalized("unit").X
    F, at = Features(as_matrix(unit, backend), backend, graph.order), graph.stored(np.arange(H.n))
    usual = float((F.column_norms**2).sum() / max(1, F.shape[0])) ** 0.5
    d, few = F.shape[1], t.rows.shape[0] < FEW_LABELS
    fixed = {"V": np.eye(d), "floors": np.array([FLOOR, FLOOR * usual])}
    D = Diffused(H, F, HOPS, (), fixed)
    B = D.linear(at)[0]
    ridges = (*RIDGES, 10.0) if few else RIDGES
    same: dict[str, Any] = {"normalize": "unit", "row_norm": True, "fit_intercept": True}
    yield "X", _linear(B[:, :d], t, ridges, {**same, "hops": [0]})

    def of_lam() -> Outcomes:
        for lam in LAMS:
            Q = Diffused(H, F, (), (lam,), fixed).linear(at)[0]
            yield from _linear(Q, t, ridges, {**same, "lam": lam})

    yield "lam", of_lam()
    yield "hops", _linear(B, t, ridges, {**same, "hops": [*HOPS]})
    if t.rows.shape[0] > MANY_ROWS:
        return
    wide = np.hstack([B / 2, np.full((len(B), 1), 0.5)])
    yield "wide X", _wide(wide, None, t, {"rank": None, "linear": 0.0})
    layer = Layer.draw(F, 1, RANK, seed)
    D.fixed = {**fixed, "V": layer.V, "floors": np.array([layer.floor, FLOOR * usual])}
    yield "wide", _wide(D.inputs(at)[0], B, t, {"random_state": seed})


def _linear(A: Any, t: Any, ridges: Sequence[float], params: dict[str, Any]) -> Outcomes:
    """Ridge with an intercept, by the smaller of the two Gram matrices."""
    mean, level, rows = A[t.rows].mean(axis=0), t.Y.mean(axis=0), A[t.rows]
    rows = rows - mean
    few = rows.shape[0] < rows.shape[1]
    G = rows @ rows.T if few else rows.T @ rows
    usual = float(np.trace(G)) / min(rows.shape)
    for r in ridges:
        P = G.copy()
        P[np.diag_indices_from(P)] += r * usual
        factor = scipy.linalg.cho_factor(P, overwrite_a=True, check_finite=False)
        T = t.Y - level
        W = scipy.linalg.cho_solve(factor, T if few else rows.T @ T)
        W = rows.T @ W if few else W
        yield {**params, "ridge": r * usual}, A @ W + (level - mean @ W)


def _wide(Z: Any, B: Any, t: Any, params: dict[str, Any]) -> Outcomes:
    """The kernel of a wide net on the rows Z, and LINEAR of the linear one of B, for each ridge."""
    n, level, mine = t.rows.shape[0], t.Y.mean(axis=0), Z[t.rows]
    K, everywhere = np.empty((n, n)), np.empty((len(Z), n), dtype=np.float32)
    C = np.zeros((len(Z), 0)) if B is None else B - B[t.rows].mean(axis=0)
    most = float((C[t.rows] ** 2).sum()) / n
    share = LINEAR / most if most > 0 else 0.0
    scale = float(np.mean([wide_kernel(row[None], row[None], 0)[0][0, 0] for row in mine[:100]]))
    place = np.full(len(Z), -1)
    place[t.rows] = np.arange(n)
    for i in range(0, len(Z), _ROWS):
        part = slice(i, min(i + _ROWS, len(Z)))
        T = wide_kernel(Z[part], mine)[0] / scale + share * (C[part] @ C[t.rows].T)
        trained = place[part] >= 0
        K[place[part][trained]] = T[trained]
        everywhere[part] = T
    at, weights = np.arange(n), []
    usual, diagonal = float(np.trace(K)) / n, K[at, at].copy()
    for r in WIDE_RIDGES:
        P = K.copy(order="F")
        P[at, at] = diagonal + r * usual
        factor = scipy.linalg.cho_factor(P, overwrite_a=True, check_finite=False)
        weights.append(scipy.linalg.cho_solve(factor, t.Y - level))
    outputs = np.split(everywhere @ np.hstack(weights).astype(np.float32), len(weights), axis=1)
    for r, F in zip(WIDE_RIDGES, outputs):
        yield {**params, "ridge": r}, F + level


def _smoothed(
    data: Dataset, rows: Any, Y: Any, Z: Any, device: str
) -> Iterator[tuple[tuple[float, float], Any]]:
    """Outputs that were corrected and smoothed, for each pair of lam."""
    backend = get_backend("cpu" if device == "auto" else device)
    H, c = RegularizedLaplacian(data.graph, 1.0, backend, "float32"), Z.shape[1]
    E = np.zeros(Z.shape)
    E[rows] = Y - Z[rows]
    sigma, sides = np.abs(E).sum() / rows.shape[0], []
    firsts, seconds = (sorted({pair[i] for pair in SMOOTH}) for i in range(2))
    for lam, E_hat in zip(firsts, all_rows(H, firsts, E, _TOL, BLOCK_WIDTH)):
        G = Z + enlargement(E_hat, sigma)[:, None] * E_hat if lam > 0 else Z.copy()
        G[rows] = Y
        sides.append(G)
    found = all_rows(H, seconds, np.hstack(sides), _TOL, BLOCK_WIDTH)
    for first, second in SMOOTH:
        i, j = firsts.index(first), seconds.index(second)
        yield (first, second), found[j][:, i * c : (i + 1) * c]


def shown(found: Sequence[Scored], count: int = 10) -> str:
    """The best candidates, a line each."""
    lines = [f"{'candidate':<10} {'ridge':>9}  {'correct, smooth':<16} valid"]
    for one in found[:count]:
        pair = "-" if one.smooth is None else "{:g}, {:g}".format(*one.smooth)
        score = "nan" if math.isnan(one.valid) else f"{one.valid:.4f}"
        lines.append(f"{one.name:<10} {one.params['ridge']:>9.3g}  {pair:<16} {score}")
    return "\n".join(lines)
