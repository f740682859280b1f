"""Start of a job in which members hop: rules, the state that earlier jobs left, and workers of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetctl.methods.hopper.hop_events import HopProgress
from hetctl.methods.hopper.state_machine import HopperState
from hetctl.model.hops import Visit, gpus_in


@dataclass(frozen=True)
class HopRules:
    """Rules of a job in which members hop.

    Parameters
    ----------
    partitions : int
        Number of partitions of the data.
    replay : sequence of Visit
        Visits to repeat, in the order of their starts; empty: the planner's.
    first_number : int
        Number of the job's first visit, larger than those of earlier jobs.
    least_members : int
        Least number of members that hop; fewer end the hops, each after its epoch. 0: hop to the end.
    """

    partitions: int
    seed: int = 0
    replay: Sequence[Visit] = ()
    first_number: int = 0
    least_members: int = 0


def at_workers(visits: Sequence[Visit], homes: Mapping[str, Sequence[str]]) -> tuple[Visit, ...]:
    """Return visits at the present workers: those of the same names, or others like them.

    A worker is like another one if it has the partitions and as many GPUs.

    Parameters
    ----------
    homes : mapping of str to sequence of str
        Partitions by worker.
    """
    visited: dict[str, set[str]] = {}
    for visit in visits:
        visited.setdefault(visit.worker, set()).add(visit.partition)
    places = {worker: worker for worker in visited if visited[worker].issubset(homes.get(worker, ()))}
    for worker in visited.keys() - places.keys():
        free = (
            w
            for w in homes
            if w not in places.values()
            and visited[worker].issubset(homes[w])
            and len(gpus_in(w)) == len(gpus_in(worker))
        )
        places[worker] = next(free, worker)
    return tuple(replace(visit, worker=places[visit.worker]) for visit in visits)


def state_at_start(rules: HopRules, progress: Iterable[HopProgress], names: Sequence[str]) -> HopperState:
    """Return the hopper's state at the start of a job, with the visits of the present epochs done."""
    log, configs = [], {}
    for each in progress:
        name, epoch = each.member.name, 2 * len(each.history)
        trained = range(rules.partitions) if each.evaluating else each.visited
        evaluated = each.visited if each.evaluating else ()
        log += [Visit(-1, name, epoch, names[number], "") for number in trained]
        log += [Visit(-1, name, epoch + 1, names[number], "") for number in evaluated]
        configs[name] = epoch + each.evaluating
    return HopperState(
        partitions=tuple(names),
        seed=rules.seed,
        configs=configs,
        log=tuple(log),
        started=rules.first_number,
    )
