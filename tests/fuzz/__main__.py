"""python -m tests.fuzz: how long, from which seed, or one case again."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter

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
    parser.add_argument("--lost", action="store_true", help="name lost certificates, too")
    args = parser.parse_args(argv)
    if args.case is None and math.isinf(args.seconds) and math.isinf(args.cases):
        args.seconds = 60.0
    return args


def told(outcome: Outcome, args: argparse.Namespace, number: int) -> list[str]:
    """A line for a case with faults, with how to repeat it; of a single case, everything."""
    p = outcome.problem
    kind = "" if args.kind is None else f' --kind "{args.kind}"'
    again = f"again: python -m tests.fuzz --seed {args.seed} --case {number}{kind}"
    faults = "; ".join(outcome.faults)
    lines = [f"FALSE [{p.kind}] {faults}; {again}"] if faults else []
    if outcome.lost and args.lost:
        lines.append(f"LOST [{p.kind}] {outcome.status} {outcome.claimed:.1e}; {again}")
    if args.case is not None:
        lines += [f"story: {p.story}", f"params: {p.params}"]
        lines += [f"change: {p.change}, stopped at step {p.stop}"] if p.later else []
        truth = f"true gap at least {outcome.true_gap:.2e}, noise {outcome.noise:.1e}"
        lines.append(f"status {outcome.status}, claimed {outcome.claimed:.2e}, {truth}")
    return lines


def too_unlucky(outcomes: list[Outcome]) -> bool:
    """Whether more bounds failed than chance allows, one time in 10,000."""
    expected, failed = sum(o.chance for o in outcomes), sum(o.unlucky for o in outcomes)
    return float(scipy.stats.poisson.sf(failed - 1, expected)) < 1e-4


def looseness(outcomes: list[Outcome]) -> str:
    """Claimed over true gap (median, 90%), where the reference can tell the latter from 0."""
    told = [o for o in outcomes if o.status == "certified" and not o.faults]
    found = [o.claimed / o.true_gap for o in told if o.true_gap > max(1e-15, 4 * o.noise)]
    return "{:.3g}, {:.3g}".format(*np.percentile(found, [50, 90])) if found else "-"


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """By kind: what came of it, how tight the bounds were, and which proofs were lost."""
    head = ("cases", "certified", "violations", "looseness", "lost")
    row = "{:<18}{:>7}{:>11}{:>12}{:>20}{:>6}   {}"
    lines = [row.format("kind", *head, "statuses")]
    kinds = sorted({o.problem.kind for o in outcomes})
    for kind in [*kinds, "all"]:
        some = [o for o in outcomes if kind in (o.problem.kind, "all")]
        statuses = Counter(o.status for o in some)
        words = ", ".join(f"{n} {word}" for word, n in statuses.most_common())
        false, lost = sum(bool(o.faults) for o in some), sum(o.lost for o in some)
        numbers = (len(some), statuses["certified"], false, looseness(some), lost)
        lines.append(row.format(kind, *numbers, words))
    expected, unlucky = sum(o.chance for o in outcomes), sum(o.unlucky for o in outcomes)
    verdict = ": MORE THAN CHANCE" if too_unlucky(outcomes) else ""
    chance = f"bounds that failed once, but not again: {unlucky} (at most {expected:.2g} expected)"
    return "\n".join([*lines, chance + verdict, f"{len(outcomes)} cases in {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
