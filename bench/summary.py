"""The speed tables of bench/README.md and README.md; `bench/plot.py` puts them in place."""

from __future__ import annotations

from typing import Any

from common import RESULTS, ROOT, read

Rows = list[dict[str, Any]]


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, r)) + " |" for r in rows])


def cell(x: Any) -> str:
    if x is None or x != x:
        return "-"
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def primitives(rows: Rows) -> str:
    peers = ("scipy", "mkl", "torch")
    products = [r for r in rows if r["what"] == "apply_H"]
    lines = []
    for graph, k in dict.fromkeys((r["graph"], r["k"]) for r in products):
        at = {r["runner"]: r for r in products if (r["graph"], r["k"]) == (graph, k)}
        ratios = [at[p]["ratio"] if p in at else None for p in peers]
        lines.append([graph, k, 1e3 * at["herta"]["seconds"], *ratios])
    text = table(["H times a block", "columns", "ms", *(f"x {p}" for p in peers)], lines)
    others = [
        [r["what"], r["runner"], r["seconds"], r["ratio"]]
        for r in rows
        if "ratio" in r and r["what"] != "apply_H" and r["runner"] != "herta"
    ]
    return text + "\n\n" + table(["primitive", "peer", "its seconds", "over ours"], others)


def time_to_accuracy(rows: Rows) -> str:
    lines = []
    for key in dict.fromkeys((r["data"], r["loss"], r["lam"]) for r in rows):
        at = [r for r in rows if (r["data"], r["loss"], r["lam"]) == key and r["level"] == 1e-6]
        ours = next(r for r in at if r["method"] == "herta_gpu auto")
        for r in at:
            if not r["method"].startswith("herta_gpu"):
                more = "> " if r.get("at_least") else ""
                lines.append(
                    [*key, ours["seconds"], r["method"], f"{more}{r['seconds']:.3g}",
                     f"{more}{r['ratio']:.3g}"]
                )  # fmt: skip
    return table(["data", "loss", "λ", "seconds", "peer", "its seconds", "ratio"], lines)


def headline(rows: Rows) -> str:
    """One line per problem: seconds to 1e-6, ours and those of every peer."""
    peers = ("torch adam", "torch gd", "CGLS", "splu + Cholesky", "Q given + LogisticRegression")
    lines = []
    for key in dict.fromkeys((r["data"], r["loss"], r["lam"]) for r in rows):
        at = {r["method"]: r for r in rows
              if (r["data"], r["loss"], r["lam"]) == key and r["level"] == 1e-6}  # fmt: skip
        data, loss, lam = key
        lines.append([data, loss, lam, *(_seconds(at.get(p)) for p in ("herta_gpu auto", *peers))])
    return table(["data", "loss", "λ", "herta_gpu", *peers], lines)


def _seconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    seconds = row["seconds"]
    text = f"{seconds:.2f}" if seconds < 10 else f"{seconds:,.0f}"
    return ("> " if row.get("at_least") else "") + text


def regret(rows: Rows) -> str:
    lines = []
    for key in dict.fromkeys((r["data"], r["lam"]) for r in rows):
        at = {r["strategy"]: r for r in rows if (r["data"], r["lam"]) == key}
        direct, herta = at["direct"], at["herta"]
        lines.append(
            [*key, direct["seconds"], herta["seconds"], direct["picked"],
             f"{100 * direct['regret']:.0f}%"]
        )  # fmt: skip
    return table(["data", "λ", "direct (s)", "herta (s)", "auto picks", "regret"], lines)


def sparsify(rows: Rows) -> str:
    """By degree, d and lam: the best way, the others as multiples of it, and auto's regret."""
    ways = ("direct", "herta", "herta, degree scores", "herta, Algorithm 2", "herta, sketched")
    lines = []
    for key in dict.fromkeys((r["degree"], r["d"], r["lam"]) for r in rows):
        at = {r["choice"]: r for r in rows if (r["degree"], r["d"], r["lam"]) == key}
        auto = at["auto"]
        best = at[auto["best"]]["seconds"]
        ratios = [at[w]["seconds"] / best if w in at else None for w in ways]
        degree, d, lam = key
        lines.append([round(degree), d, lam, best, *ratios, f"{100 * auto['regret']:.0f}%"])
    return table(["degree", "d", "λ", "best (s)", *ways, "auto's regret"], lines)


def scaling(rows: Rows) -> str:
    lines = [
        [f"{r['m']:,}", r["seconds"], r["columns"], r["peak_MB"] / 1024, r["status"]]
        for r in rows
        if "seconds" in r
    ]
    text = table(["edges", "seconds", "columns times H", "peak GB", "status"], lines)
    for r in rows:
        if "exponent" in r:
            text += f"\n\nExponent from {r['fitted_from']:.0e} edges on: "
            text += f"{r['exponent']:.2f} in time, {r['exponent_cpu']:.2f} in processor time, "
            text += f"{r['exponent_work']:.2f} in counted work."
    return text


def large(rows: Rows) -> str:
    """Fits that were measured, and plans for cards that were not there."""
    fits = [
        [f"{r['n']:,}", f"{r['m']:,}", r["budget"], round(r["seconds"]), round(r["cpu_seconds"]),
         r["peak_anonymous"] / 2**30, r["certificate"], r["kind"], r["products"], r["blocks"],
         r["passes"], r["bytes_read"] / 1e9 / r["read_seconds"] if r["bytes_read"] else None,
         f"{r['load']:.1f}"]
        for r in sorted(rows, key=lambda r: r.get("n", 0)) if r["what"] == "fit"
    ]  # fmt: skip
    plans = [
        [r["card"], r["lam"], "yes" if r["fits"] else "no", r["total_bytes"] / 2**30, r["columns"],
         r["products_bytes"] / 2**40, r["passes"], r["X_bytes"] / 2**40]
        for r in rows if r["what"] == "plan"
    ]  # fmt: skip
    measured = table(
        ["nodes", "edges", "budget", "seconds", "processor seconds", "allocated at most (GB)",
         "certified gap", "kind", "products with H per column", "blocks of columns",
         "passes over X", "X read (GB/s)", "load at the end"],
        fits,
    )  # fmt: skip
    planned = table(
        ["card", "λ", "fits", "memory (GB)", "columns at once", "moved by products (TB)",
         "passes over X", "moved by these (TB)"],
        plans,
    )  # fmt: skip
    return f"{measured}\n\nPlanned by `herta plan synthetic:papers100M`, not run:\n\n{planned}"


def convergence(rows: Rows) -> str:
    lines = [
        [r["data"], r["loss"], r["lam"], r["method"],
         *(f"> {r['taken']}" if s is None else s for s in r["steps"].values())]
        for r in rows
    ]  # fmt: skip
    levels = list(rows[0]["steps"]) if rows else []
    return table(["data", "loss", "λ", "method", *(f"steps to {x}" for x in levels)], lines)


BLOCKS = {
    "primitives": primitives, "time_to_accuracy": time_to_accuracy, "headline": headline,
    "regret": regret, "scaling": scaling, "large": large, "convergence": convergence,
    "sparsify": sparsify,
}  # fmt: skip
SOURCES = {"headline": "time_to_accuracy"}  # where a block's rows are, if not under its own name
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")


def update_readmes() -> None:
    """Replace what stands between <!-- bench NAME --> and <!-- end --> by today's table."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for name, make in BLOCKS.items():
            mark, source = f"<!-- bench {name} -->", SOURCES.get(name, name)
            if mark not in text or not (RESULTS / f"{source}.jsonl").exists():
                continue
            where, rows = read(source)
            before, rest = text.split(mark, 1)
            after = rest.split("<!-- end -->", 1)[1]
            about = f"{where['cpu']}, {where['cores']} cores, load {where['load']:.1f} at the start"
            text = f"{before}{mark}\n{about}:\n\n{make(rows)}\n<!-- end -->{after}"
        path.write_text(text, encoding="utf-8")
