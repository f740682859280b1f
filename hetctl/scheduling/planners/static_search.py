"""Schedules from the dual bound by list scheduling, and their improvement by simulated annealing.

The search time is the sum of the estimated times of its steps, and not measured, so that the same
request gives the same result.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from operator import attrgetter

from hetctl.perf.epoch_timeline import Allotments
from hetctl.scheduling.planners.static_schedule import (
    Placed,
    PlacedRuns,
    Problem,
    Run,
    in_order,
    is_even,
    list_schedule,
    occupy,
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
    """Return the best list for each length of the longest run, as a descent seldom changes that."""
    best: dict[float, _Listed] = {}
    for listed in found:
        best.setdefault(max(run.seconds for run in listed.runs), listed)
    return list(best.values())[:DESCENTS]


def _add_lists(problem: Problem, found: list[_Listed], seconds: float) -> None:
    """Add lists for growing makespans: each member with the fewest GPU-seconds that end in time.

    Each list comes twice: with any numbers of GPUs, and with only those that pack well.
    """
    stretches, orders = (MEAN_STRETCHES, _MEAN_ORDERS) if problem.mean else (STRETCHES, _ORDERS)
    evenly = [_even(member, problem.node_size) for member in problem.members]
    for stretch, order, members in product(stretches, orders, (problem.members, evenly)):
        limit_s = problem.bound_s * stretch
        runs = [_cheapest_run(i, member, limit_s) for i, member in enumerate(members)]
        found.append(_Listed(problem, sorted(runs, key=order)))
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
    """Change a member's GPUs or place in the list at random; keep what does not raise the cost.

    For the makespan, half of the changes concern the last member to end.
    """
    best = listed
    while seconds > 0 and not problem.is_solved(best.cost):
        last = None if problem.mean or draw.random() < 0.5 else max(best.placed, key=attrgetter("end_s")).run
        trial = _Listed(problem, _changed(problem, best.runs, last, draw))
        seconds -= _effort_s(problem, trial)
        # Equal costs are accepted: the search may have to cross a plateau.
        if trial.cost <= best.cost:
            best = trial
    return best


def _changed(problem: Problem, runs: Sequence[Run], which: Run | None, draw: random.Random) -> list[Run]:
    changed = list(runs)
    at = draw.randrange(len(runs)) if which is None else changed.index(which)
    run = changed.pop(at)
    if draw.random() < 0.6:
        run = problem.run(run.member, draw.randrange(len(problem.members[run.member].gpus)))
    changed.insert(at if draw.random() < 0.4 else draw.randrange(len(runs)), run)
    return changed


STEP_S, RUN_S = 2e-6, 0.5e-6
"""Approximate seconds of a step, and of each run on its two nodes, on a slow machine."""
MOST_NODES = 1000
"""Largest number of nodes for annealing: each better schedule needs a pass over all of them."""
FIRST_TEMPERATURE, LAST_TEMPERATURE = 3e-3, 1e-4
"""First and last temperature, as a share of the bound."""
TARGET_POSITION = 0.3
"""Position of the target between the best makespan (0) and the bound (1)."""
IDLE_WEIGHT = 0.02
"""Weight of a node's mean busy time; its end after the target has weight 1."""
WORST_SHARE, RESIZE_SHARE, SWAP_SHARE = 0.3, 0.3, 0.5
"""Shares of steps at the node that ends last, of steps that change GPUs, and of those that swap members."""

Change = tuple[int, list[Run], list[float], float]
"""A node with its new runs, the times when its GPUs are free after them, and its cost."""


def improve_nodes(problem: Problem, runs: Sequence[Run], seconds: float, draw: random.Random) -> PlacedRuns:
    """Return the best schedule found in about `seconds`, from a list with wide members first.

    Members on more than one node stay where the list puts them.
    """
    annealing = _Annealing(problem, runs, draw)
    if len(problem.heads) <= MOST_NODES:
        annealing.go(int(seconds / (STEP_S + RUN_S * 2 * len(runs) / len(problem.heads))))
    return annealing.schedule()


class _Annealing:
    """Annealing over placements: a change concerns one or two nodes, and only they are evaluated."""

    def __init__(self, problem: Problem, runs: Sequence[Run], draw: random.Random) -> None:
        self._problem, self._draw = problem, draw
        size = problem.node_size
        self._wide, self._heads = list_schedule([run for run in runs if run.gpus > size], problem.heads)
        local, _ = list_schedule([run for run in runs if run.gpus <= size], self._heads)
        self._nodes: list[list[Run]] = [[] for _ in self._heads]
        for placed in local:
            self._nodes[placed.parts[0][0]].append(placed.run)
        self._choices = [
            [problem.run(i, at) for at, gpus in enumerate(member.gpus) if gpus <= size]
            for i, member in enumerate(problem.members)
        ]
        free = [_after(head, runs) for head, runs in zip(self._heads, self._nodes, strict=True)]
        self._ends = [after[-1] for after in free]
        self._keep()

    def _keep(self) -> None:
        """Store the nodes as the best so far, and set a better target."""
        self._best, self._best_nodes = max(self._ends), list(self._nodes)
        bound_s = self._problem.bound_s
        self._target = self._best - TARGET_POSITION * (self._best - bound_s)
        self._costs = [
            self._cost(_after(head, runs)) for head, runs in zip(self._heads, self._nodes, strict=True)
        ]

    def _cost(self, free: Sequence[float]) -> float:
        late = max(free[-1] - self._target, 0.0)
        return (late + IDLE_WEIGHT * sum(free) / len(free)) / self._problem.bound_s

    def go(self, steps: int) -> None:
        """Try `steps` changes; accept fewer and fewer that make the schedule worse."""
        if not any(self._nodes):
            return
        cooling = (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (1 / max(steps, 1))
        temperature = FIRST_TEMPERATURE
        for _ in range(steps):
            if self._problem.is_solved(self._best):
                return
            temperature *= cooling
            changes = self._proposed()
            worse = sum(cost - self._costs[node] for node, _, _, cost in changes)
            if changes and (worse <= 0 or self._draw.random() < math.exp(-worse / temperature)):
                self._make(changes)

    def _make(self, changes: Sequence[Change]) -> None:
        for node, runs, free, cost in changes:
            self._nodes[node], self._ends[node], self._costs[node] = runs, free[-1], cost
        if max(self._ends) < self._best:
            self._keep()

    def _proposed(self) -> list[Change]:
        """Return a random change; empty if it is not possible."""
        chance = self._draw.random
        count = len(self._nodes)
        node = self._ends.index(max(self._ends)) if chance() < WORST_SHARE else int(chance() * count)
        other = int(chance() * count)
        if not self._nodes[node]:
            return []
        runs = list(self._nodes[node])
        at = int(chance() * len(runs))
        run = self._perhaps_resized(runs[at])
        if other == node:
            del runs[at]
            runs.insert(int(chance() * (len(runs) + 1)), run)
            return self._priced([(node, runs)])
        others = list(self._nodes[other])
        if others and chance() < SWAP_SHARE:
            back = int(chance() * len(others))
            runs[at], others[back] = others[back], run
        else:
            del runs[at]
            others.insert(int(chance() * (len(others) + 1)), run)
        return self._priced([(node, runs), (other, others)])

    def _perhaps_resized(self, run: Run) -> Run:
        if self._draw.random() >= RESIZE_SHARE:
            return run
        choices = self._choices[run.member]
        return choices[int(self._draw.random() * len(choices))]

    def _priced(self, changed: Sequence[tuple[int, list[Run]]]) -> list[Change]:
        changes = []
        for node, runs in changed:
            head = self._heads[node]
            if any(run.gpus > len(head) for run in runs):
                return []
            free = _after(head, runs)
            changes.append((node, runs, free, self._cost(free)))
        return changes

    def schedule(self) -> PlacedRuns:
        """Return the best schedule so far."""
        placed = list(self._wide)
        for node, runs in enumerate(self._best_nodes):
            free = list(self._heads[node])
            for run in runs:
                start_s = free[run.gpus - 1]
                occupy(free, run.gpus, start_s, start_s + run.seconds)
                placed.append(Placed(start_s, run, ((node, run.gpus),)))
        return in_order(placed, self._problem.heads)


def _after(head: Sequence[float], runs: Sequence[Run]) -> list[float]:
    """Return the times when a node's GPUs are free after runs that each take the first free ones."""
    free = list(head)
    for _, gpus, seconds in runs:
        if gpus == 1:
            insort(free, free.pop(0) + seconds)
        else:
            end_s = free[gpus - 1] + seconds
            del free[:gpus]
            at = bisect_right(free, end_s)
            free[at:at] = [end_s] * gpus
    return free
