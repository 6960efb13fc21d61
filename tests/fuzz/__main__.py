"""python -m tests.fuzz: how long, from which seed, or one case again."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import scipy.stats

from tests.fuzz.checks import Outcome, run
from tests.fuzz.problems import KINDS, draw


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    start, outcomes = time.perf_counter(), []
    numbers = itertools.count(args.first) if args.case is None else [args.case]
    for number in numbers:
        spent = time.perf_counter() - start
        if args.case is None and (spent > args.seconds or len(outcomes) >= args.cases):
            break
        outcome = run(draw(args.seed, number, args.kind))
        outcomes.append(outcome)
        for line in told(outcome, args, number):
            print(line, flush=True)
    print(summary(outcomes, time.perf_counter() - start))
    return 1 if any(o.faults for o in outcomes) or too_unlucky(outcomes) else 0


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--cases", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="this one alone, and say all about it")
    parser.add_argument("--kind", choices=list(KINDS), help="of this kind only")
    args = parser.parse_args(argv)
    if args.case is None and math.isinf(args.seconds) and math.isinf(args.cases):
        args.seconds = 60.0
    return args


def told(outcome: Outcome, args: argparse.Namespace, number: int) -> list[str]:
    """A line for a case with faults, with how to repeat it; of a single case, everything."""
    p = outcome.problem
    kind = "" if args.kind is None else f' --kind "{args.kind}"'
    again = f"python -m tests.fuzz --seed {args.seed} --case {number}{kind}"
    faults = "; ".join(outcome.faults)
    lines = [f"FALSE [{p.kind}] {faults}; again: {again}"] if faults else []
    if args.case is not None:
        lines += [f"story: {p.story}", f"params: {p.params}"]
        lines += [f"change: {p.change}, stopped at step {p.stop}"] if p.later else []
        lines += [f"status {outcome.status}, claimed {outcome.claimed:.2e}, true gap at least "
                  f"{outcome.true_gap:.2e}"]  # fmt: skip
    return lines


def too_unlucky(outcomes: list[Outcome]) -> bool:
    """Whether more bounds failed than chance allows, one time in 10,000."""
    expected, failed = sum(o.chance for o in outcomes), sum(o.unlucky for o in outcomes)
    return float(scipy.stats.poisson.sf(failed - 1, expected)) < 1e-4


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """Counts by kind and status, how tight the bounds were, and what chance may have spoiled."""
    lines = [f"{'kind':<16} {'cases':>6} {'certified':>9} {'false':>6}   statuses"]
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_kind[o.problem.kind].append(o)
    for kind, some in [*sorted(by_kind.items()), ("all", outcomes)]:
        statuses = Counter(o.status for o in some)
        words = ", ".join(f"{n} {word}" for word, n in statuses.most_common())
        false = sum(bool(o.faults) for o in some)
        lines.append(f"{kind:<16} {len(some):>6} {statuses['certified']:>9} {false:>6}   {words}")
    loose = [math.log10(o.claimed / o.true_gap) for o in outcomes
             if o.status == "certified" and not o.faults and o.true_gap > 1e-13]  # fmt: skip
    if loose:
        low, middle, high = np.percentile(loose, [5, 50, 95])
        lines.append(
            f"claimed / true gap, certified, {len(loose)} gaps above 1e-13: "
            f"10^{low:.1f} (5%), 10^{middle:.1f} (median), 10^{high:.1f} (95%)"
        )
    expected, unlucky = sum(o.chance for o in outcomes), sum(o.unlucky for o in outcomes)
    verdict = ": MORE THAN CHANCE" if too_unlucky(outcomes) else ""
    lines.append(
        f"bounds that failed once, but not again: {unlucky} (at most {expected:.2g} expected)"
        f"{verdict}"
    )
    return "\n".join([*lines, f"{len(outcomes)} cases in {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
