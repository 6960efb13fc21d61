"""Tables and pictures from the JSON lines: results/tables.md, SVG files, the tables of the READMEs.

    python bench/plot.py [--quick]

With --quick it takes the short runs of `make bench` and leaves the READMEs alone.
"""

from __future__ import annotations

from typing import Any

from common import QUICK, RESULTS, read
from summary import convergence, large, regret, scaling, table, update_readmes


def primitives(rows: list[dict[str, Any]]) -> str:
    kept = [r for r in rows if "ratio" in r]
    return table(
        ["primitive", "graph", "columns", "runner", "ms", "quartiles", "ratio to herta",
         "ratio of processor time"],
        [[r["what"], r.get("graph"), r.get("k"), r["runner"], 1e3 * r["seconds"],
          f"{1e3 * r['low']:.3g}-{1e3 * r['high']:.3g}", r["ratio"], r["cpu_ratio"]]
         for r in kept],
    )  # fmt: skip


def time_to_accuracy(rows: list[dict[str, Any]]) -> str:
    return table(
        ["data", "lam", "loss", "gap wanted", "method", "seconds", "gap reached", "ratio to auto"],
        [[r["data"], r["lam"], r["loss"], r["level"], r["method"],
          (">= " if r.get("at_least") else "") + f"{r['seconds']:.3g}", r["gap"], r.get("ratio")]
         for r in rows],
    )  # fmt: skip


def sparsify(rows: list[dict[str, Any]]) -> str:
    return table(
        ["degree", "d", "lam", "choice", "seconds", "steps", "best", "auto's regret"],
        [[r["degree"], r["d"], r["lam"], r["choice"], r["seconds"], r["steps"], r["best"],
          r["regret"]] for r in rows],
    )  # fmt: skip


def devices(rows: list[dict[str, Any]]) -> str:
    return table(
        ["what", "device", "seconds"], [[r["what"], r["device"], r["seconds"]] for r in rows]
    )


def draw_convergence(rows: list[dict[str, Any]], plt: Any) -> None:
    panels = sorted({(r["data"], r["loss"], r["lam"]) for r in rows})
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.6 * lines), squeeze=False)
    for axis, (data, loss, lam) in zip(axes.flat, panels, strict=False):
        for r in rows:
            if (r["data"], r["loss"], r["lam"]) == (data, loss, lam):
                points = [(s + 1, g) for s, g in r["curve"] if g > 1e-12]
                axis.loglog(*zip(*points, strict=True), marker=".", ms=3, label=r["method"])
        axis.set_title(f"{data}, {loss}, lam {lam:g}", fontsize=8)
        axis.set_xlabel("steps + 1", fontsize=7)
        axis.set_ylabel("loss / optimum - 1", fontsize=7)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    save(figure, "convergence")


def draw_apply(rows: list[dict[str, Any]], plt: Any) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.2))
    kept = [r for r in rows if r["what"] == "apply_H" and r["graph"] == "ogbn-arxiv"]
    for runner in dict.fromkeys(r["runner"] for r in kept):
        points = [(r["k"], 1e3 * r["seconds"] / r["k"]) for r in kept if r["runner"] == runner]
        axis.loglog(*zip(*points, strict=True), marker="o", ms=3, label=runner)
    axis.set_xlabel("columns")
    axis.set_ylabel("ms per column")
    axis.set_title("H times a block, ogbn-arxiv graph, float32", fontsize=9)
    axis.legend(fontsize=7)
    save(figure, "apply_H")


def draw_scaling(rows: list[dict[str, Any]], plt: Any) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.2))
    sizes = [r for r in rows if "seconds" in r]
    axis.loglog([r["m"] for r in sizes], [r["seconds"] for r in sizes], "o-")
    axis.set_xlabel("edges")
    axis.set_ylabel("seconds")
    save(figure, "scaling")


def draw_large(rows: list[dict[str, Any]], plt: Any) -> None:
    """Memory while a fit runs, beside what one array on all nodes would take."""
    fits = {r["share"]: r for r in rows if r["what"] == "fit"}
    curves = sorted((r for r in rows if r["what"] == "memory"), key=lambda r: r["share"])
    if not curves:
        return
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.2), squeeze=False)
    for axis, r in zip(axes.flat, curves, strict=True):
        fit = fits[r["share"]]
        seconds, anonymous, mapped = zip(*r["curve"], strict=True)
        for values, line, label in ((anonymous, "-", "allocated"), (mapped, ":", "mapped files")):
            axis.plot(seconds, [v / 2**30 for v in values], line, label=label)
        for columns, color in (("d", "C2"), ("c", "C3")):
            size = 4 * fit["n"] * fit[columns] / 2**30
            axis.axhline(size, color=color, lw=0.8, label=f"one n x {columns} array (float32)")
        axis.set_xlim(left=0.0)
        axis.set_ylim(bottom=0.0)
        axis.set_xlabel("seconds since the fit began", fontsize=8)
        axis.set_ylabel("GB", fontsize=8)
        axis.set_title(f"{fit['n']:,} nodes, {fit['m']:,} edges", fontsize=9)
    axes.flat[0].legend(fontsize=6)
    save(figure, "large")


def draw_time_to_accuracy(rows: list[dict[str, Any]], plt: Any) -> None:
    panels = sorted({(r["data"], r["loss"], r["lam"]) for r in rows})
    figure, axes = plt.subplots(2, 4, figsize=(12.8, 5.2), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        at = [r for r in rows if (r["data"], r["loss"], r["lam"]) == panel and r["level"] == 1e-6]
        at = [r for r in at if r["method"] not in ("herta_gpu herta", "herta_gpu direct")]
        names = [("> " if r.get("at_least") else "") + r["method"] for r in at]
        ours = [r["method"].startswith("herta_gpu") for r in at]
        axis.barh(names, [r["seconds"] for r in at], color=["C3" if o else "C0" for o in ours])
        axis.set_xscale("log")
        axis.set_xlim(left=0.1)
        axis.invert_yaxis()
        axis.tick_params(labelsize=6)
        axis.set_title("{}, {}, lam {:g}".format(*panel), fontsize=8)
        axis.set_xlabel("seconds to 1e-6", fontsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    save(figure, "time_to_accuracy")


def draw_sparsify(rows: list[dict[str, Any]], plt: Any) -> None:
    """The paper's reductions by degree and d: seconds over those of P from all edges and rows."""
    ways = ("herta, degree scores", "herta, Algorithm 2", "herta, sketched")
    lams = sorted({r["lam"] for r in rows})
    figure, axes = plt.subplots(1, len(lams), figsize=(5.2 * len(lams) + 1, 3.4), squeeze=False)
    for axis, lam in zip(axes.flat, lams, strict=True):
        at = {(r["d"], round(r["degree"]), r["choice"]): r["seconds"]
              for r in rows if r["lam"] == lam}  # fmt: skip
        for d in sorted({d for d, _, _ in at}):
            for way, line in zip(ways, ("-", "--", ":"), strict=True):
                points = sorted((k, t / at[e, k, "herta"]) for (e, k, w), t in at.items()
                                if (e, w) == (d, way))  # fmt: skip
                if points:
                    shown = {"color": f"C{d.bit_length() // 2}", "label": f"d {d}, {way[7:]}"}
                    axis.loglog(*zip(*points, strict=True), line, marker=".", ms=4, **shown)
        axis.axhline(1.0, color="black", lw=0.8)
        axis.set_xlabel("average degree", fontsize=8)
        axis.set_ylabel("seconds / those of the full graph", fontsize=8)
        axis.set_title(f"lam {lam:g}; below the line a reduction pays", fontsize=9)
    axes.flat[-1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    save(figure, "sparsify")


def draw_regret(rows: list[dict[str, Any]], plt: Any) -> None:
    names = list(dict.fromkeys(f"{r['data']}, lam {r['lam']:g}" for r in rows))
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for i, strategy in enumerate(("direct", "herta")):
        at = [r for r in rows if r["strategy"] == strategy]
        places = [j + 0.2 * (2 * i - 1) for j in range(len(at))]
        axis.barh(places, [r["seconds"] for r in at], 0.4, label=strategy)
        picked = [(r["seconds"], y) for r, y in zip(at, places, strict=True)
                  if r["picked"] == strategy]  # fmt: skip
        if picked:
            axis.plot(*zip(*picked, strict=True), "k<", ms=4, label="auto" if i else None)
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(left=0.1)
    axis.set_xlabel("seconds")
    axis.legend(fontsize=7)
    save(figure, "regret")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


TABLES = {
    "primitives": primitives, "convergence": convergence, "time_to_accuracy": time_to_accuracy,
    "scaling": scaling, "large": large, "sparsify": sparsify, "regret": regret,
    "devices": devices,
}  # fmt: skip
PICTURES = {
    "primitives": draw_apply, "convergence": draw_convergence,
    "time_to_accuracy": draw_time_to_accuracy, "scaling": draw_scaling, "large": draw_large,
    "sparsify": draw_sparsify, "regret": draw_regret,
}  # fmt: skip


def main() -> None:
    try:
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams["svg.hashsalt"] = "herta"
        import matplotlib.pyplot as plt
    except ImportError:
        plt = None
    parts = []
    for name, make in TABLES.items():
        if not (RESULTS / f"{name}.jsonl").exists():
            continue
        where, rows = read(name)
        about = f"{where['cpu']}, {where['cores']} cores, load {where['load']:.1f} at the start"
        about += f" ({where['note']})" if "note" in where else ""
        parts.append(f"## {name}\n\n{about}\n\n{make(rows)}\n")
        if plt is not None and name in PICTURES and rows:
            PICTURES[name](rows, plt)
    text = "\n".join(parts)
    (RESULTS / "tables.md").write_text(text)
    print(text)
    if not QUICK:
        update_readmes()


if __name__ == "__main__":
    main()
