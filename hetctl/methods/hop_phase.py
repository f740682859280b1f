"""Time of a phase in which members hop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetctl.methods.hopper import SearchOptions
from hetctl.methods.hopper.hop_plans import planned_visits
from hetctl.methods.hopper.schedule import UnitTimes
from hetctl.methods.hopper.simulate import simulate_hops
from hetctl.methods.hopper.worker_groups import group_size, hop_workers, visit_times
from hetctl.methods.parallelism import JobTime, PhaseRun
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline
from hetctl.scheduling.simulate.scenario import JobTiming

RANDOMIZED = "randomized"
"""Name of the scheduler that draws visits."""
MOST_VISITS = 30_000
"""Most visits in one simulation, which then takes a few seconds."""


Homes = Mapping[str, Collection[int]]
"""Numbers of the partitions that each node has, by its name."""


def unit_times(
    members: Sequence[Workload],
    partitions: int,
    cluster: Cluster,
    homes: Homes | None = None,
    *,
    evaluates: bool = False,
) -> UnitTimes:
    """Return the time of each member on each partition, by worker: GPU, or group of GPUs.

    Every GPU of a node reads the partitions there. Groups are those that a job would form. A unit is a
    partition's share of an epoch, and a hop: a checkpoint is written, then read on the next GPU. Reading is
    assumed to take as long as writing.

    Parameters
    ----------
    homes : mapping of str to collection of int or None
        Partitions by node; None: they are assigned to the nodes in turn.
    evaluates : bool
        True for the times of evaluation instead of those of training.

    Raises
    ------
    BadInputError
        If the number of samples per epoch of a member is unknown.
    InfeasibleError
        If a partition is on no node.
    """
    size, names, at = _groups(members, partitions, cluster, homes)
    workers = hop_workers(cluster.nodes, at, size)
    hop_s = {member.name: 2 * member.checkpoint_s for member in members}
    return visit_times(members, names, workers, hop_s, evaluates=evaluates)


def size_of_groups(
    members: Sequence[Workload], partitions: int, cluster: Cluster, homes: Homes | None = None
) -> int:
    """Return the number of GPUs that train a member of a job together while all of `members` are left."""
    return _groups(members, partitions, cluster, homes)[0]


def _groups(
    members: Sequence[Workload], partitions: int, cluster: Cluster, homes: Homes | None
) -> tuple[int, list[str], dict[str, set[str]]]:
    """Return the size of groups, the names of all partitions, and the names of each node's partitions."""
    names = [f"p{number}" for number in range(partitions)]
    nodes = cluster.nodes
    if homes is None:
        homes = {node.name: range(index, partitions, len(nodes)) for index, node in enumerate(nodes)}
    at = {node.name: {f"p{number}" for number in homes.get(node.name, ())} for node in nodes}
    return group_size(members, names, nodes, at), names, at


def hop_phase(
    members: Sequence[Workload],
    train: UnitTimes,
    evaluate: UnitTimes,
    timing: JobTiming,
    search: SearchOptions,
    scheduler: str = "best",
) -> PhaseRun:
    """Simulate members that hop until the work of each is done; members that are done leave.

    Parameters
    ----------
    train, evaluate : UnitTimes
        Times of the members' visits.
    scheduler : str
        Name of the scheduler; with ``randomized`` visits are drawn when they are due, as in a run.

    Raises
    ------
    BadInputError
        As in `planned_visits`.
    InfeasibleError
        If a job is too short for a visit to a partition.
    """
    (training, evaluation), epochs = _with_longer_epochs(
        (train, evaluate), {member.name: EpochTimeline(member, 1.0).count for member in members}
    )
    drawn = scheduler == RANDOMIZED
    trace = simulate_hops(
        training,
        plan=() if drawn else planned_visits(training, evaluation, epochs, search, scheduler),
        seed=search.seed,
        epochs={name: 2 * count for name, count in epochs.items()},
        evaluate=evaluation,
    )
    visits_s = np.concatenate([units.seconds[np.isfinite(units.seconds)] for units in (train, evaluate)])
    startup_s = max(member.startup_s for member in members)
    time = JobTime(timing, startup_s, float(visits_s.max()), float(visits_s.mean()))
    ends: dict[str, float] = {}
    spent: dict[str, float] = dict.fromkeys(epochs, 0.0)
    for record in trace.records:
        config = record.visit.config
        ends[config] = max(ends.get(config, 0.0), record.end_s)
        spent[config] += record.end_s - record.start_s
    done_s = {config: time.elapsed_s(end_s) for config, end_s in ends.items()}
    return PhaseRun(time.elapsed_s(trace.makespan_s), done_s, spent)


def _with_longer_epochs(
    both: Sequence[UnitTimes], epochs: Mapping[str, int]
) -> tuple[tuple[UnitTimes, ...], dict[str, int]]:
    """Return fewer, proportionally longer epochs if there are more than `MOST_VISITS` visits to simulate."""
    visits = len(both) * len(both[0].partitions) * sum(epochs.values())
    fewer = {name: max(1, round(count * min(1.0, MOST_VISITS / visits))) for name, count in epochs.items()}
    factors = np.array([epochs[name] / fewer[name] for name in both[0].configs])
    return tuple(replace(units, seconds=units.seconds * factors[:, None, None]) for units in both), fewer
