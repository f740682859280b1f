"""Schedules from the dual bound by list scheduling, and their improvement.

The search time is the sum of the estimated times of its steps, and not measured, so that the same
request gives the same result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from hetctl.perf.allotments import Allotments
from hetctl.scheduling.planners.static_nodes import improve_nodes
from hetctl.scheduling.planners.static_schedule import (
    Placed,
    PlacedRuns,
    Problem,
    Run,
    in_order,
    is_even,
    list_schedule,
)

STRETCHES = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.4, 1.7)
"""Makespans to aim at, as multiples of the bound; allotments are chosen to end by then."""
MEAN_STRETCHES = (0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""The same for the mean time, where members that end early count."""
NODE_S, PART_S = 2e-6, 5e-6
"""Approximate seconds for each node, and for each part of a run on a node, in scheduling a list."""
LISTS_SHARE, LIST_SHARE, NODES_SHARE = 0.2, 0.15, 0.65
"""Shares of the effort for lists from the bound, for improving the best of them, and for the nodes."""
DESCENTS = 4
"""Number of lists whose nodes are improved."""

Order = Callable[[Run], tuple[float, ...]]


def search(problem: Problem, lists: Iterable[Sequence[Run]], seconds: float, seed: int) -> PlacedRuns:
    """Return the best schedule found with an effort of about `seconds`.

    Parameters
    ----------
    lists : iterable of sequences of Run
        Lists to try besides those from the dual bound; the result is no worse than any of them.
    """
    draw = random.Random(seed)
    found = [_Listed(problem, runs) for runs in lists]
    _add_lists(problem, found, LISTS_SHARE * seconds)
    found.sort(key=lambda listed: listed.cost)
    share = LIST_SHARE + NODES_SHARE if problem.mean else LIST_SHARE
    found.insert(0, _improved(problem, found[0], share * seconds, draw))
    best = in_order(found[0].placed, problem.heads)
    for listed in () if problem.mean else _of_different_lengths(found):
        if problem.is_solved(problem.cost(best)):
            break
        trial = improve_nodes(problem, listed.runs, NODES_SHARE * seconds / DESCENTS, draw)
        best = min(best, trial, key=problem.cost)
    return best


class _Listed:
    """A list of runs with the schedule that it gives."""

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.placed, _ = list_schedule(runs, problem.heads)
        self.cost = problem.cost(self.placed)


def _of_different_lengths(found: Sequence[_Listed]) -> list[_Listed]:
    """Return the best list for each length of the longest run, which a descent seldom gives more GPUs."""
    best: dict[float, _Listed] = {}
    for listed in found:
        best.setdefault(max(run.seconds for run in listed.runs), listed)
    return list(best.values())[:DESCENTS]


def _add_lists(problem: Problem, found: list[_Listed], seconds: float) -> None:
    """Add lists for a growing makespan: each member on the fewest GPU-seconds that end by then.

    Each list comes twice: with any numbers of GPUs, and with only those that pack well.
    """
    stretches, orders = (MEAN_STRETCHES, _MEAN_ORDERS) if problem.mean else (STRETCHES, _ORDERS)
    evenly = [_even(member, problem.node_size) for member in problem.members]
    for stretch, order, members in product(stretches, orders, (problem.members, evenly)):
        limit_s = problem.bound_s * stretch
        runs = [_cheapest_run(i, member, limit_s) for i, member in enumerate(members)]
        found.append(_Listed(problem, sorted(runs, key=order)))
        # Estimated, not measured, so that the same request gives the same result on any machine.
        seconds -= _effort_s(problem, found[-1])
        if seconds <= 0 or problem.is_solved(found[-1].cost):
            return


def _even(member: Allotments, node_size: int) -> Allotments:
    seconds = dict(zip(member.gpus, member.seconds, strict=True))
    even = {gpus: t for gpus, t in seconds.items() if is_even(gpus, node_size)}
    return Allotments.of(even) if even else member


def _cheapest_run(number: int, member: Allotments, limit_s: float) -> Run:
    at = member.within(limit_s)
    return Run(number, member.gpus[at], member.seconds[at])


def _effort_s(problem: Problem, listed: _Listed) -> float:
    """Return the approximate seconds that a list took to schedule."""
    parts = sum(len(placed.parts) for placed in listed.placed)
    return PART_S * parts + NODE_S * len(problem.heads)


_ORDERS: tuple[Order, ...] = (
    lambda run: (-run.seconds,),
    lambda run: (-run.gpus * run.seconds,),
    lambda run: (-run.gpus, -run.seconds),
)
_MEAN_ORDERS: tuple[Order, ...] = (
    lambda run: (run.gpus * run.seconds,),
    lambda run: (run.seconds,),
)


def _improved(problem: Problem, listed: _Listed, seconds: float, draw: random.Random) -> _Listed:
    """Change a member's GPUs or place in the list at random, as long as the cost does not rise.

    For the makespan, half of the changes concern the last member to end.
    """
    best = listed
    while seconds > 0 and not problem.is_solved(best.cost):
        last = None if problem.mean or draw.random() < 0.5 else max(best.placed, key=_end).run
        trial = _Listed(problem, _changed(problem, best.runs, last, draw))
        seconds -= _effort_s(problem, trial)
        # Equal costs are accepted: the search may have to cross a plateau.
        if trial.cost <= best.cost:
            best = trial
    return best


def _end(placed: Placed) -> float:
    return placed.start_s + placed.run.seconds


def _changed(problem: Problem, runs: Sequence[Run], which: Run | None, draw: random.Random) -> list[Run]:
    changed = list(runs)
    at = draw.randrange(len(runs)) if which is None else changed.index(which)
    run = changed.pop(at)
    if draw.random() < 0.6:
        run = problem.run(run.member, draw.randrange(len(problem.members[run.member].gpus)))
    changed.insert(at if draw.random() < 0.4 else draw.randrange(len(runs)), run)
    return changed
