"""What the commands of `herta` do: each takes the parsed arguments and returns (result, text)."""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu import backends, datasets
from herta_gpu.app.metrics import evaluate
from herta_gpu.app.report import NOTHING, Rows, bytes_text, draw_convergence, page, table
from herta_gpu.app.runs import Run, check_free, environment, load_model, read_config
from herta_gpu.app.tune import Candidate
from herta_gpu.app.tune import tune as search
from herta_gpu.backends import get_backend
from herta_gpu.datasets import Dataset
from herta_gpu.herta import HERTA
from herta_gpu.plumbing.checkpoint import Checkpoint
from herta_gpu.plumbing.files import check_target, new_file, write_npz
from herta_gpu.plumbing.stages import SHORTEST, Stages
from herta_gpu.plumbing.validation import check_choice, check_ridge, check_rows

Answer = tuple[dict[str, Any], str]

PARAMETERS = tuple(HERTA._defaults())  # those of the signature: each is an option


# ---- train and predict ----------------------------------------------------------------------
def train(args: argparse.Namespace) -> Answer:
    """herta train DATASET"""
    if args.resume is not None:
        return _resume(args)
    model, stages = make_model(args), Stages(args.verbose)
    model._checked()  # a wrong parameter, or a folder in use, is told before a long load
    check_free(args.out, args.overwrite)
    data = load_for(args, stages)
    result = _train(args, model, data, stages)
    return result, _train_text(result, args.out)


def _train(
    args: argparse.Namespace,
    model: HERTA,
    data: Dataset,
    stages: Stages,
    candidates: list[Candidate] | None = None,
) -> dict[str, Any]:
    """Fit, into a run folder if there is to be one; `candidates` are what the model won against."""
    more = {} if candidates is None else {"candidates": [asdict(c) for c in candidates]}
    if args.out is None:
        return {**fit(model, data, stages), **more}
    with Run.create(args.out, args.overwrite) as run:
        _write_config(run, args, model, data)
        if candidates is not None:
            run.write_json("tune.json", more)
        return {**_train_into(run, model, data, stages, candidates), **more}


def _resume(args: argparse.Namespace) -> Answer:
    """herta train --resume RUN: everything else stands in its config.json."""
    config, stages = read_config(args.resume), Stages(args.verbose)
    with Run.reopen(args.resume) as run:
        finished = run.result()
        if finished is not None:  # killed after its last write, or asked once too often
            stages.note(f"{args.resume} is finished: this is its result.")
            return finished, _train_text(finished, args.resume)
        before = config["environment"].get("threads")
        if str(before) != str(environment()["threads"]):
            print(
                f"The run began with {before} threads: the last bits may differ.", file=sys.stderr
            )
        options = (config[name] for name in ("data_dir", "split", "normalize", "log_degree"))
        data_dir, split, normalize, log_degree = options
        params = {**HERTA._defaults(), **config["params"], "verbose": args.verbose}
        with stages("load"):
            data = prepared(
                config["dataset"], data_dir, params["random_state"], split, normalize, log_degree
            )
        model = HERTA(**params)
        result = _train_into(run, model, data, stages)
    return result, _train_text(result, args.resume)


def make_model(args: argparse.Namespace, **changes: Any) -> HERTA:
    """The estimator that the options describe."""
    params = {name: getattr(args, name) for name in PARAMETERS if hasattr(args, name)}
    return HERTA(**{**params, **changes})


def load_for(args: argparse.Namespace, stages: Stages) -> Dataset:
    """The dataset that the options describe, ready to train on."""
    _tell_of_compilation(stages)
    with stages("load"):
        return prepared(
            args.dataset, args.data_dir, args.random_state, args.split, args.normalize,
            args.log_degree,
        )  # fmt: skip


def _tell_of_compilation(stages: Stages) -> None:
    """The first fit ever compiles the CPU kernels: half a minute nobody should wonder about."""
    folder = Path(backends.__file__).parent / "cpu" / "kernels" / "__pycache__"
    elsewhere = "NUMBA_CACHE_DIR" in os.environ or not os.access(folder, os.W_OK)
    if backends._fast() and not elsewhere and not any(folder.glob("laplacian*.nbi")):
        stages.note("The first run compiles the CPU kernels: up to a minute, once.", stays=True)


def prepared(
    name: str,
    data_dir: str | None,
    random_state: int,
    split: str | None,
    normalize: str | None,
    log_degree: bool,
) -> Dataset:
    """A dataset with a split and with the features as they will be used."""
    data = datasets.load(name, data_dir, random_state=random_state)
    if data.y is None:
        raise ValueError(f"{name} has no labels to train on.")
    data = data.with_split(split, random_state)
    return with_features(data, normalize, log_degree)


def with_features(data: Dataset, normalize: str | None, log_degree: bool) -> Dataset:
    """A dataset with the features as they will be used."""
    if data.X is None or data.X.shape[1] == 0:
        raise ValueError(f"{data.name} has no features: HERTA needs some to train on.")
    if normalize != "none":
        check_rows("X", data.X, data.graph)  # NaN would spread over whole rows and columns
    data = data.normalized(normalize)
    return data.with_log_degree() if log_degree else data


def fit(
    model: HERTA,
    data: Dataset,
    stages: Stages,
    callback: Any = None,
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:
    """Train, evaluate on every part of the split, and gather what there is to say."""
    model.fit(data.graph, data.X, data.y, data.split["train"], callback, checkpoint)
    with stages("evaluate"):
        Z = model.transform(data.graph, data.X)
        scores = {
            part: evaluate(data.metric, data.y[ids], Z[ids], model.classes_)
            for part, ids in data.split.items()
        }
    before = {k: v for k, v in stages.seconds.items() if k != "evaluate"}
    seconds = {**before, **model.stages_, "evaluate": stages.seconds["evaluate"]}
    return {
        "dataset": data.name,
        "nodes": data.graph.num_nodes,
        "edges": data.graph.num_edges,
        "features": data.X.shape[1],
        "outputs": model.W_.shape[1],
        "lam": model._lam(),
        "ridge": model.ridge,
        "loss_function": model.loss,
        "status": model.status_,
        "steps": len(model.history_) - 1,
        "warm_steps": max(0, len(model.warm_history_) - 1),
        "loss": model.history_[-1]["loss"],
        "certificate": {
            **vars(model.certificate_),
            "reduced": model.certificate_.reduced,
            "text": str(model.certificate_),
        },
        "metric": data.metric if model.classes_ is not None or data.metric == "rocauc" else "r2",
        "scores": scores,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory(),
        "strategy": model.plan_.strategy,
        "dtype": model.dtype,
        "device": get_backend(model.device).name,
        "normalize": data.metadata.get("normalize"),
        "note": data.metadata.get("note", ""),
    }


def _write_config(run: Run, args: argparse.Namespace, model: HERTA, data: Dataset) -> None:
    """Everything needed to repeat the run, and to resume it."""
    if model.memory_budget is None:
        # The budget decides how many columns are solved at once, and so the last bits: fix it.
        free = get_backend(model.device).memory_available()
        model.set_params(memory_budget=int(0.8 * free))
    config: dict[str, Any] = {"dataset": _anchored(args.dataset), "split": args.split}
    config |= {"log_degree": args.log_degree, "normalize": data.metadata.get("normalize")}
    config["data_dir"] = None if args.data_dir is None else os.path.abspath(args.data_dir)
    config["params"] = {**model.get_params(), "verbose": False}
    run.write_json("config.json", {**config, "environment": environment()})


def _anchored(name: str) -> str:
    """A path as it is found from any folder; a name as it is."""
    return os.path.abspath(name) if name.endswith(".npz") or os.sep in name else name


def _train_into(
    run: Run,
    model: HERTA,
    data: Dataset,
    stages: Stages,
    candidates: list[Candidate] | None = None,
) -> dict[str, Any]:
    """Train with a run folder that is complete up to the last step at any moment."""
    run.checkpoint.split = data.split
    result = fit(model, data, stages, callback=run.record, checkpoint=run.checkpoint)
    run.save_model(model)
    write_report(run, model, result, candidates)
    run.write_json("result.json", result)  # last: a run with a result is finished
    run.checkpoint.delete()
    return result


def write_report(
    run: Run, model: HERTA, result: dict[str, Any], candidates: list[Candidate] | None = None
) -> None:
    """convergence.png, if matplotlib is there, and report.html."""
    picture: Path | None = run.folder / "convergence.png"
    try:
        gap = model.certificate_.gap
        steps = model.warm_history_ + model.history_
        draw_convergence(steps, model.tol, run.folder / "convergence.png", gap)
    except ImportError as error:
        print(error, file=sys.stderr)
        picture = None
    lead = (
        f"{result['nodes']:,} nodes, {result['edges']:,} edges, {result['features']:,} features, "
        f"{result['outputs']:,} outputs; lam {result['lam']:g}, ridge {result['ridge']:g}, "
        f"loss {result['loss_function']}"
    )
    tiles = [(f"{part} {result['metric']}", f"{s:.3f}") for part, s in result["scores"].items()]
    gap, over = result["certificate"]["value"], model.certificate_.over
    tiles.append((f"certified relative gap{over}", f"{gap:.1e}" if gap < math.inf else "none"))
    tiles.append((f"outer step{'s' * (result['steps'] != 1)}", str(result["steps"])))
    tiles.append(("total", f"{sum(result['seconds'].values()):.1f} s"))
    memory = [(k, bytes_text(v)) for k, v in model.plan_.memory.items()]
    sections: list[tuple[str, Any]] = [
        ("Result", [("", ""), *_result_rows(result)]),
        ("Plan", [("", "decision", "why"), *model.plan_.decisions]),
        ("Memory planned", [("for", "size"), *memory]),
        ("Steps", _step_rows(model.warm_history_ + model.history_)),
        ("Parameters", [("name", "value"), *((k, str(v)) for k, v in model.get_params().items())]),
    ]
    if candidates is not None:
        sections.insert(1, ("Candidates", _candidate_rows(candidates, result["metric"])))
    made = page(
        f"HERTA on {result['dataset']}", lead, tiles, result["seconds"], sections, picture,
        result["note"], _foot(result),
    )  # fmt: skip
    run.write_text("report.html", made)


def _step_rows(history: list[dict[str, Any]]) -> Rows:
    head = ("step", "loss", "gradient norm", "certified gap", "inner iterations", "seconds")
    return [head] + [
        (f"{'warm ' * h['warm']}{h['step']}", f"{h['loss']:.8g}", f"{h['grad_norm']:.2e}",
         f"{h['certificate']:.2e}" if h["certificate"] < math.inf else NOTHING,
         str(h["inner_iterations"]), f"{h['seconds']:.3f}")
        for h in history
    ]  # fmt: skip


def _foot(result: dict[str, Any]) -> str:
    about = environment()
    return (
        f"Made by herta_gpu {about['herta_gpu']} with Python {about['python']}, NumPy "
        f"{about['numpy']} and SciPy {about['scipy']}; {result['dtype']} on {result['device']}, "
        f"{_count(int(about['threads']), 'thread')}. config.json beside this page holds all that "
        "is needed to repeat the run."
    )


def _result_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("status", _status_text(result)),
        ("loss", f"{result['loss']:.8g}"),
        ("certificate", result["certificate"]["text"]),
    ]
    scores = {part: math.nan if s is None else s for part, s in result["scores"].items()}
    rows += [(f"{part} {result['metric']}", f"{s:.4f}") for part, s in scores.items()]
    shown = {stage: s for stage, s in result["seconds"].items() if s >= SHORTEST}
    spent = ", ".join(f"{stage} {s:.2f}" for stage, s in shown.items())
    rows.append(("seconds", f"{sum(result['seconds'].values()):.2f} ({spent})"))
    rows.append(("peak memory", bytes_text(result["peak_memory_bytes"])))
    return rows


def _status_text(result: dict[str, Any]) -> str:
    found = result["certificate"]
    reduced = f" ({found['kept']:,} of {found['features']:,} features)" * found["reduced"]
    warm = f" and {_count(result['warm_steps'], 'cheap one')}" * (result["warm_steps"] > 0)
    return f"{result['status']}{reduced} after {_count(result['steps'], 'outer step')}{warm}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _train_text(result: dict[str, Any], out: str | None) -> str:
    rows = [
        ("dataset", f"{result['dataset']}: {result['nodes']:,} nodes, {result['edges']:,} edges, "
         f"{result['features']:,} features, {result['outputs']:,} outputs"),
        ("model", f"lam {result['lam']:g}, ridge {result['ridge']:g}, loss "
         f"{result['loss_function']}, strategy {result['strategy']}, {result['dtype']} on "
         f"{result['device']}"),
        *_result_rows(result),
    ]  # fmt: skip
    if result["note"]:
        rows.append(("note", result["note"]))
    if out is not None:
        rows.append(("run", f"{out} (report.html, model.npz, metrics.jsonl, config.json)"))
    return table(rows, header=False)


def peak_memory() -> int:
    """The most memory this process ever held, in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Linux hands ru_maxrss on from the process that started this one; VmHWM begins anew.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:
            return 1024 * int(lines["VmHWM"].split()[0])
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def predict(args: argparse.Namespace) -> Answer:
    """herta predict RUN DATASET"""
    path = Path(args.to) if args.to else Path(args.run) / "predictions.npz"
    check_choice("The ending of --to", path.suffix, (".npz", ".csv"))
    check_target(path)
    config, stored = read_config(args.run), Path(args.run) / "model.npz"
    if not stored.is_file():
        raise FileNotFoundError(
            f"{args.run} is not finished: herta train --resume {args.run} goes on with it."
        )
    model = load_model(stored)
    if args.device is not None:
        model.set_params(device=args.device)
    data_dir = args.data_dir or config.get("data_dir")
    seed = config["params"].get("random_state", model.random_state)
    data = datasets.load(args.dataset, data_dir, random_state=seed)
    data = with_features(data, config["normalize"], config["log_degree"])
    Z = model.transform(data.graph, data.X)
    labels = Z if model.classes_ is None else model.classes_[Z.argmax(axis=1)]
    if path.suffix == ".csv":
        _write_csv(path, labels)
    else:
        write_npz(path, {"predictions": labels, "scores": Z})
    result = {"dataset": data.name, "run": str(args.run), "nodes": len(labels), "file": str(path)}
    rows = [("dataset", f"{data.name}: {len(labels):,} nodes"), ("predictions", str(path))]
    if data.y is not None and _comparable(data.y, Z, model.classes_):
        known = data.labelled()
        score = evaluate(data.metric, data.y[known], Z[known], model.classes_)
        result |= {"metric": data.metric, "score": score}
        rows.append((f"{data.metric} of all labelled nodes", f"{score:.4f}"))
    return result, table(rows, header=False)


def _write_csv(path: Path, labels: Any) -> None:
    """node,prediction; text is quoted where it has to be."""
    columns = labels[:, None] if labels.ndim == 1 else labels
    names = ["node"] + ["prediction"] * columns.shape[1]
    with new_file(path) as temporary:
        if columns.dtype.kind == "U":
            with open(temporary, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(names)
                writer.writerows(enumerate(columns[:, 0].tolist()))
            return
        numbered = np.column_stack([np.arange(len(labels)), columns])
        head = ",".join(names)
        np.savetxt(temporary, numbered, delimiter=",", fmt="%.9g", header=head, comments="")


def _comparable(y: Any, Z: Any, classes: Any) -> bool:
    """Whether labels that a dataset brings along are of the kind that the model predicts."""
    if classes is None:
        return y.dtype.kind != "U" and y.size == Z.size
    return y.ndim == 1 and (y.dtype.kind == "U") == (classes.dtype.kind == "U")


# ---- tune -----------------------------------------------------------------------------------
def tune(args: argparse.Namespace) -> Answer:
    """herta tune DATASET"""
    stages = Stages(args.verbose)
    for lam in args.lams:  # each checked before a long load
        for loss in args.losses:
            make_model(args, lam=lam, loss=loss, optimizer="cg")._checked()
    for ridge in args.ridges:
        check_ridge(ridge)
    check_free(args.out, args.overwrite)
    data = load_for(args, stages)
    for loss in args.losses:  # before the search, which takes long
        check = make_model(args, lam=args.lams[0], loss=loss, optimizer="cg")
        check._checked_data(data.graph, data.X, data.y, data.split["train"], check._checked())
    with stages("tune"):
        found = search(
            data, args.lams, args.ridges, args.losses, args.device, args.memory_budget,
            report=stages.note,
        )  # fmt: skip
    best = found[0]
    optimizer = args.optimizer or ("cg" if best.loss == "mse" else "lbfgs")
    chosen = {"lam": best.lam, "ridge": best.ridge, "loss": best.loss, "optimizer": optimizer}
    model = make_model(args, **chosen)
    result = _train(args, model, data, stages, found)
    text = _tune_text(found, data.metric) + "\n\n" + _train_text(result, args.out)
    return result, text


def _tune_text(found: list[Candidate], metric: str, shown: int = 12) -> str:
    left = len(found) - shown
    more = f"\n... and {left} more, none better" if left > 0 else ""
    return table(_candidate_rows(found[:shown], metric)) + more


def _candidate_rows(found: list[Candidate], metric: str) -> Rows:
    head = ("lam", "ridge", "loss", f"train {metric}", f"valid {metric}")
    return [head] + [
        (f"{c.lam:g}", f"{c.ridge:g}", c.loss, f"{c.train:.4f}", f"{c.valid:.4f}") for c in found
    ]
