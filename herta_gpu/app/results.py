"""Results of the commands: of a fit, of a search, and how they are shown as text.

A `FitResult` is plain data: it needs neither the model nor the dataset any more, goes to
result.json and comes back from there.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from herta_gpu.app.metrics import confusion, evaluate, label_scores, metric_of
from herta_gpu.backends import SMALL
from herta_gpu.certificate import Certificate
from herta_gpu.datasets import Dataset
from herta_gpu.graph import Graph
from herta_gpu.herta import HERTA
from herta_gpu.more.labels import CorrectAndSmooth
from herta_gpu.planning.settings import LABEL_FOLDS, strengths
from herta_gpu.plumbing.files import bytes_text
from herta_gpu.plumbing.models import check_entries, to_plain
from herta_gpu.plumbing.progress import SHORTEST, Stages

try:
    import resource
except ImportError:  # it is part of Python on POSIX only
    resource = None  # type: ignore[assignment]

NOTHING = "\N{EN DASH}"  # stands where a table has no number
Rows = Sequence[Sequence[str]]
_MOST_CLASSES = 100  # of which a table is kept


@dataclass(frozen=True)
class CommandOutput:
    """What a command gives back to the command line."""

    content: dict[str, Any]  # for --json
    text: str  # for people
    code: int = 0  # to exit with: 1 where the fit is useless or a check failed, 3: not certified


@dataclass(frozen=True)
class Candidate:
    """One point of the grid of `tune`, with its metric on the training and validation nodes."""

    lam: float | tuple[float, ...]  # several: blocks of features
    ridge: float
    loss: str
    train: float
    valid: float  # nan where none was looked at
    loo: float | None = None  # by leave-one-out
    fit_intercept: bool = False
    label_features: int = 0  # folds
    smooth: tuple[float, float] | None = None  # both lam of Correct and Smooth

    @property
    def lams(self) -> tuple[float, ...]:
        return self.lam if isinstance(self.lam, tuple) else (self.lam,)

    @property
    def score(self) -> float:
        """What it is chosen by."""
        return self.valid if self.loo is None else self.loo


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What there is to say about a fit; the names of the fields are the keys of result.json."""

    dataset: str
    nodes: int
    edges: int
    features: int
    outputs: int
    lam: float | list[float]  # several: blocks of features
    ridge: float
    loss_function: str
    status: str
    steps: int
    warm_steps: int = 0  # steps on a cheaper model that went first
    loss: float
    certificate: Certificate
    metric: str
    scores: dict[str, float]  # per part of the split; nan where there is nothing to score
    more_scores: dict[str, dict[str, float]] | None = None  # of several labels: by metric and part
    confusion: dict[str, Any] | None = None  # of classes: how often each was taken for each
    wall_seconds: float | None = None  # by the clock, since the command began to load
    seconds: dict[str, float]  # per stage
    peak_memory_bytes: int
    strategy: str
    dtype: str
    device: str
    normalize: str | None = None
    X_reads: dict[str, float] | None = None  # `HERTA.X_reads_`; earlier versions have none
    ranks: list[dict[str, float]] | None = None  # seconds of each process, if there were several
    ranks_split: str | None = None  # what they shared out: columns or nodes
    partition: str | None = None  # of the nodes
    fit_intercept: bool = False
    label_features: int = 0  # folds
    hidden: int = 0  # units of a hidden layer
    correct_and_smooth: list[float] | None = None  # both lam
    base_scores: dict[str, float] | None = None  # before these two steps
    output_error: float | None = None  # of the smoothed outputs: a proven bound
    undecided: int = 0  # nodes whose label that leaves open
    note: str

    @classmethod
    def from_fit(
        cls,
        model: HERTA,
        data: Dataset,
        stages: Stages | None = None,
        smoother: CorrectAndSmooth | None = None,
    ) -> FitResult:
        """Evaluate a fitted model on every part of the split, and gather what there is to say.

        `stages` is the timer that the fit had; by default the seconds are those of the model.
        A fitted `smoother` has the last word; what the model itself says is kept beside it.
        """
        model._fitted()
        timed = stages is not None
        stages = Stages(seconds=dict(model.stages_)) if stages is None else stages
        metric = metric_of(data.metric, model.loss, model.classes_, model._flat)
        more: dict[str, Any] = {}
        with stages("evaluate"):
            parts = _parts(model, data)
            scores = {part: evaluate(metric, *both) for part, both in parts.items()}
            if model.loss == "bce" and not model._flat:
                each = {part: label_scores(y, Z) for part, (y, Z, _) in parts.items()}
                names = [n for n in ("micro F1", "macro F1", "label accuracy") if n != metric]
                more["more_scores"] = {n: {p: s[n] for p, s in each.items()} for n in names}
            if smoother is not None:
                more |= {"correct_and_smooth": list(smoother._checked()), "base_scores": scores}
                more["output_error"] = float(smoother.error_.max())
                more["undecided"] = smoother.undecided_
                parts = _parts(model, data, smoother.transform)
                scores = {part: evaluate(metric, *both) for part, both in parts.items()}
        if model.classes_ is not None:
            part = next((name for name in ("test", "valid") if name in parts), next(iter(parts)))
            found = confusion(*parts[part])
            known = {"part": part, "classes": model.classes_.tolist(), "counts": found.tolist()}
            more["confusion"] = known if len(found) <= _MOST_CLASSES else None
        graph, team, lams = data.graph, data.graph.team, strengths(model.lam, model.alpha)
        folds, peak = model.label_features, peak_memory()
        more |= {"dataset": data.name, "nodes": graph.nodes_of_all, "edges": graph.num_edges}
        more |= {"features": data.X.shape[1], "outputs": model.W_.shape[1]}
        more |= {
            name: getattr(model, name) for name in ("ridge", "dtype", "fit_intercept", "hidden")
        }
        return cls(
            **more,
            lam=lams[0] if len(lams) == 1 else list(lams),
            loss_function=model.loss,
            status=model.status_,
            steps=len(model.history_) - 1,
            warm_steps=max(0, len(model.warm_history_) - 1),
            loss=model.history_[-1]["loss"],
            certificate=model.certificate_,
            metric=metric,
            scores=scores,
            seconds=dict(stages.seconds),
            wall_seconds=time.perf_counter() - stages.started if timed else None,
            peak_memory_bytes=peak if team is None else int(team.largest(peak)),
            strategy=model.plan_.strategy,
            device=model.device_.choice,
            normalize=data.metadata.get("normalize"),
            X_reads=model.X_reads_,
            ranks=None if team is None else team.seconds(),
            label_features=LABEL_FOLDS if folds is True else folds,
            note="\n".join(filter(None, (data.metadata.get("note", ""), _slow(model, graph)))),
        )

    @classmethod
    def from_json(cls, content: Any) -> FitResult:
        """The result that `as_json` wrote; a ValueError says what is wrong with it."""
        hints = get_type_hints(cls) | {"certificate": dict, "lam": (float, int, list)}
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        check_entries(content, {name: get_origin(hints[name]) or hints[name] for name in needed})
        known = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        certificate = content["certificate"]
        check_entries(certificate, {"value": float, "kind": str})
        found = {f.name: certificate[f.name] for f in fields(Certificate) if f.name in certificate}
        lost = {name: math.inf for name in ("value", "gap") if found.get(name, math.inf) is None}
        known["certificate"] = Certificate(**{**found, **lost})
        known |= {name: _numbers(known[name]) for name in ("loss", "scores")}
        if known.get("more_scores"):
            known["more_scores"] = _numbers(known["more_scores"])
        return cls(**known)

    def as_json(self) -> dict[str, Any]:
        """The content of result.json, in types that JSON has."""
        found = self.certificate
        certificate = {**vars(found), "reduced": found.reduced, "text": str(found)}
        made: dict[str, Any] = to_plain({**vars(self), "certificate": certificate}, lossy=True)
        return made

    def code(self, args: argparse.Namespace) -> int:
        """What the command exits with: 1 after nonsense, 3 after a fit that ended too early."""
        early = self.status in ("max_iter", "stagnated") and not args.allow_uncertified
        return 1 if self.status == "diverged" else 3 * early

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def size_text(self) -> str:
        return (
            f"{self.nodes:,} nodes, {self.edges:,} edges, {self.features:,} features, "
            f"{self.outputs:,} outputs"
        )

    @property
    def model_text(self) -> str:
        lam = lams_text(self.lam if isinstance(self.lam, list) else [self.lam])
        text = f"lam {lam}, ridge {self.ridge:g}, loss {self.loss_function}"
        text += ", intercept" * self.fit_intercept
        text += f", label features of {self.label_features} folds" * (self.label_features > 0)
        text += f", hidden layer of {self.hidden:,}" * (self.hidden > 0)
        if self.correct_and_smooth is not None:
            text += f", Correct and Smooth {lams_text(self.correct_and_smooth, ', ')}"
        return text

    def rows(self) -> list[tuple[str, str]]:
        """What was found and what it took, as (name, value)."""
        proof = self.certificate
        reduced = f" ({proof.kept:,} of {proof.features:,} features)" * proof.reduced
        warm = f" and {count_text(self.warm_steps, 'cheap one')}" * (self.warm_steps > 0)
        steps = count_text(self.steps, "outer step")
        rows = [
            ("status", f"{self.status}{reduced} after {steps}{warm}"),
            ("loss", f"{self.loss:.8g}"),
            ("certificate", str(proof)),
            *((f"{part} {self.metric}", f"{score:.4f}") for part, score in self.scores.items()),
            *((name, _parts_text(parts)) for name, parts in (self.more_scores or {}).items()),
        ]
        if self.correct_and_smooth is not None and self.base_scores is not None:
            left = count_text(self.undecided, "label")
            proven = f"off by at most {self.output_error:.1e}; {left} left open by that"
            rows.append((f"{self.metric} before smoothing", _parts_text(self.base_scores)))
            rows.append(("smoothed outputs", proven))
        shown = {stage: s for stage, s in self.seconds.items() if s >= SHORTEST}
        spent = ", ".join(f"{stage} {s:.2f}" for stage, s in shown.items())
        rows.append(("seconds", f"{self.total_seconds:.2f} ({spent})"))
        if self.ranks:
            times = {what: [seconds[what] for seconds in self.ranks] for what in self.ranks[0]}
            told = (f"{what} {min(s):.2f} to {max(s):.2f} s" for what, s in times.items())
            by = "" if self.ranks_split is None else f" by {self.ranks_split}"
            by += "" if self.partition is None else f" ({self.partition})"
            rows.append(("ranks", f"{len(self.ranks)}{by}: {', '.join(told)}"))
        reads, pages = self.X_reads or {}, ""
        if reads.get("bytes_read"):  # how often X was read from its file, and how fast
            rate = reads["bytes_read"] / max(reads["seconds"], 1e-9)
            rows.append(("passes over X", f"{reads['passes']:,.0f}, {rate / 1e9:.1f} GB/s"))
            # Pages of mapped files are the system's to take back, but it counts them as ours.
            pages = ", pages of mapped files included"
        return [*rows, ("peak memory", bytes_text(self.peak_memory_bytes) + pages)]

    def text(self, folder: str | None = None) -> str:
        """The table that `herta train` prints; `folder` is that of the run, if there is one."""
        computed = f"strategy {self.strategy}, {self.dtype} on {self.device}"
        rows = [("dataset", f"{self.dataset}: {self.size_text}")]
        rows += [("model", f"{self.model_text}, {computed}"), *self.rows()]
        rows += [("note", line) for line in self.note.splitlines()]
        if folder is not None:
            rows.append(("run", f"{folder} (report.html, model.npz, metrics.jsonl, config.json)"))
        return table(rows, header=False)


def _slow(model: HERTA, graph: Graph) -> str:
    """What a fit without compiled kernels, which nobody asked for, has to say."""
    plain = find_spec("numba") is None and model.device_.choice == "cpu"
    plain &= 2 * graph.num_edges + 4 * graph.num_nodes > SMALL  # else SciPy is taken anyway
    told = 'without numba a fit takes several times as long: pip install "herta_gpu[fast]"'
    return told * (plain and model.device != "cpu-scipy")


def nodes_of_split(split: dict[str, Any]) -> Any:
    """The nodes that a result speaks of, part after part."""
    return np.concatenate([np.asarray(ids) for ids in split.values()])


def _parts(
    model: HERTA, data: Dataset, outputs: Callable[[Any], Any] | None = None
) -> dict[str, tuple[Any, Any, Any]]:
    """(targets, outputs or labels, classes) of every part; without a split, of all labelled nodes.

    `outputs` of nodes are those of the model by default.  Where each process has nodes of its own,
    targets and outputs of all of them are put together.
    """
    if data.y is None:
        raise ValueError(f"The dataset {data.name} has no labels to score against.")
    split, graph, classes = data.split or {"all": data.labelled()}, data.graph, model.classes_
    nodes, y, team = nodes_of_split(split), np.asarray(data.y), None
    if graph.by_nodes:
        team = graph.team
    Z: Any = getattr(model, "outputs_", None) if outputs is None else outputs(nodes)
    known = Z is not None and len(Z) == len(nodes)
    if not (known if team is None else all(team.each(known))):
        # Labels take the best output so far; no metric of classes asks for all outputs.
        Z = (model.transform if classes is None else model.predict)(graph, data.X, nodes)
    if team is not None and Z.ndim == 2 and classes is not None:
        Z = classes[Z.argmax(axis=1)]  # labels are less to send
    found, start = {}, 0
    for part, ids in split.items():
        pair = y[ids], Z[start : start + len(ids)]
        truth, guess = pair if team is None else (team.gather(rows)[0] for rows in pair)
        found[part] = (truth, guess, classes)
        start += len(ids)
    return found


def _numbers(found: Any) -> Any:
    """Numbers from JSON, where None stands for infinity and for NaN, at any depth."""
    if isinstance(found, dict):
        return {name: _numbers(inner) for name, inner in found.items()}
    return math.nan if found is None else found


def peak_memory() -> int:
    """The most memory this process ever held, in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.is_file():
        # On Linux ru_maxrss includes the process that started this one; VmHWM does not.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:
            return 1024 * int(lines["VmHWM"].split()[0])
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# ---- text -------------------------------------------------------------------------------------
def candidate_rows(candidates: Sequence[Candidate], metric: str) -> Rows:
    """A table of candidates, with its head; columns in which nothing differs are left out."""
    by_loo = any(c.loo is not None for c in candidates)
    rows = [
        {
            "lam": lams_text(c.lams),
            "ridge": f"{c.ridge:g}",
            "loss": c.loss,
            "intercept": "yes" if c.fit_intercept else "no",
            "label folds": f"{c.label_features}",
            "correct, smooth": "none" if c.smooth is None else lams_text(c.smooth, ", "),
            f"train {metric}": f"{c.train:.4f}",
            f"{'leave-one-out' if by_loo else 'valid'} {metric}": f"{c.score:.4f}",
        }
        for c in candidates
    ]
    plain = {"intercept": "no", "label folds": "0", "correct, smooth": "none"}
    shown = [k for k in rows[0] if k not in plain or any(row[k] != plain[k] for row in rows)]
    return [shown, *([row[k] for k in shown] for row in rows)]


def lams_text(lams: Sequence[float], comma: str = ",") -> str:
    return comma.join(f"{lam:g}" for lam in lams)


def _parts_text(scores: dict[str, float]) -> str:
    return ", ".join(f"{part} {score:.4f}" for part, score in scores.items())


def table(rows: Rows, header: bool = True) -> str:
    """Rows of text with every column padded to its widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in rows]
    if header:
        lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def count_text(number: int, what: str) -> str:
    """A number with its noun, which gets an s unless there is exactly one of it."""
    return f"{number:,} {what}{'s' * (number != 1)}"
