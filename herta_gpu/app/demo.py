"""`make demo`: train on embedded real data, and show what was proven."""

from __future__ import annotations

from herta_gpu import HERTA
from herta_gpu.app.results import count_text
from herta_gpu.datasets import digits


def main() -> None:
    """Handwritten digits, a tenth of them labelled."""
    data = digits()
    print(f"digits: {data.graph}, {data.X.shape[1]} features, {len(data.split['train'])} labelled")
    model = HERTA(
        lam=20.0, loss="ce", optimizer="lbfgs", ridge=1e-2, strategy="herta", verbose=True
    )
    model.fit(data.graph, data.X, data.y, train=data.split["train"])
    print(f"\n{model.plan_}\n")
    print(f"status       {model.status_} after {count_text(len(model.history_) - 1, 'outer step')}")
    print(f"certificate  {model.certificate_}")
    print(f"objective    {model.history_[-1]['loss']:.6f}")
    for part, nodes in data.split.items():
        print(f"accuracy     {part:<6} {model.score(data.graph, data.X, data.y, nodes):.3f}")
    without = HERTA(lam=1e-3, ridge=1e-3).fit(data.graph, data.X, data.y, train=data.split["train"])
    blind = without.score(data.graph, data.X, data.y, data.split["test"])
    print(f"             test   {blind:.3f} when the graph is switched off (lam = 0.001)")
    print("seconds      " + ", ".join(f"{k} {v:.2f}" for k, v in model.stages_.items()))


if __name__ == "__main__":
    main()
