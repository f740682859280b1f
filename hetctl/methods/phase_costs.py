"""Time of a phase in which members hop, or in which they train one after another as pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetctl.methods.hopper import SearchOptions
from hetctl.methods.hopper.portfolio import best
from hetctl.methods.hopper.schedule import Visit, visits_of
from hetctl.methods.hopper.simulate import simulate_hops
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline
from hetctl.scheduling.simulate.scenario import JobTiming

SHRUNK = 0.75
"""Largest share of the configurations of a schedule that may remain before a new schedule is made."""


MOST_VISITS = 30_000
"""Most visits in one simulation, which then takes a few seconds."""


@dataclass(frozen=True)
class PhaseRun:
    """Result of a phase; times in seconds from its start.

    Parameters
    ----------
    done_s, training_s : mapping of str to float
        Time at which the work of each member was done, and time for which it trained.
    """

    seconds: float
    done_s: Mapping[str, float]
    training_s: Mapping[str, float]


@dataclass(frozen=True)
class JobTime:
    """Conversion of training time to wall-clock time, over as many jobs as necessary.

    Parameters
    ----------
    startup_s : float
        Start-up time of each job.
    longest_s, mean_s : float
        Longest and mean time of a step that is not interrupted. A job that is near its time limit starts
        no further step, so each job loses one mean step time.
    """

    clock: JobTiming
    startup_s: float = 0.0
    longest_s: float = 0.0
    mean_s: float = 0.0

    def elapsed_s(self, training_s: float) -> float:
        """Return the wall-clock time at which the given training time has been reached.

        Raises
        ------
        InfeasibleError
            If a job is too short for the longest step that is not interrupted.
        """
        room_s = self.clock.usable_s - self.startup_s
        if training_s <= room_s:
            return self.startup_s + training_s
        useful_s = room_s - self.mean_s
        if room_s < self.longest_s or useful_s <= 0:
            raise InfeasibleError(
                f"a job has {self.clock.usable_s:.0f} s for training, but start-up and a visit to a partition"
                f" take {self.startup_s + self.longest_s:.0f} s",
                "raise --time, or have more partitions",
            )
        jobs = math.ceil(training_s / useful_s)
        between_s = self.mean_s + self.clock.job_overhead_s
        return training_s + jobs * self.startup_s + (jobs - 1) * between_s


def unit_times(members: Sequence[Workload], partitions: int, cluster: Cluster) -> UnitTimes:
    """Return the training time of each member on each partition, by GPU.

    The partitions are assigned to the nodes in turn, and every GPU of a node reads the partitions there.
    A unit consists of a partition's share of an epoch and of its evaluation, and a hop: a checkpoint is
    written, then read on the next GPU, which is assumed to take as long as the writing.

    Raises
    ------
    BadInputError
        If the number of samples per epoch of a member is unknown.
    """
    workers = [(node, gpu) for node in cluster.nodes for gpu in node.gpus]
    homes = [cluster.nodes[j % len(cluster.nodes)].name for j in range(partitions)]
    has = np.array([[node.name == home for node, _ in workers] for home in homes])
    types = list(dict.fromkeys(node.gpu_type for node in cluster.nodes))
    by_type = np.array([[_unit_s(member, partitions, kind) for kind in types] for member in members])
    seconds = by_type[:, [types.index(node.gpu_type) for node, _ in workers]]
    return UnitTimes(
        configs=tuple(member.name for member in members),
        partitions=tuple(f"p{j}" for j in range(partitions)),
        workers=tuple(f"{node.name}:{gpu}" for node, gpu in workers),
        seconds=np.where(has[None], seconds[:, None], np.inf),
    )


def _unit_s(member: Workload, partitions: int, gpu_type: str | None) -> float:
    if not member.samples_per_epoch:
        raise BadInputError(
            f"the profile of {member.name} has no samples_per_epoch, which hopping requires",
            "run hetctl profile, or set samples_per_epoch in the ensemble file",
        )
    epoch_s = member.samples_per_epoch / member.on_type(gpu_type or "").rates[1] + member.evaluate_s
    return epoch_s / partitions + 2 * member.checkpoint_s


def hop_phase(
    members: Sequence[Workload], units: UnitTimes, clock: JobTiming, search: SearchOptions
) -> PhaseRun:
    """Simulate members that hop until the work of each is done; members that are done leave.

    Parameters
    ----------
    units : UnitTimes
        Unit times of the members.

    Raises
    ------
    InfeasibleError
        If a job is too short for a visit to a partition.
    """
    longer, epochs = _with_longer_epochs(
        units, {member.name: EpochTimeline(member, 1.0).count for member in members}
    )
    trace = simulate_hops(longer, plan=_visits(longer, epochs, search), epochs=epochs)
    visits_s = units.seconds[np.isfinite(units.seconds)]
    startup_s = max(member.startup_s for member in members)
    time = JobTime(clock, startup_s, float(visits_s.max()), float(visits_s.mean()))
    ends: dict[str, float] = {}
    training: dict[str, float] = dict.fromkeys(epochs, 0.0)
    for record in trace.records:
        config = record.visit.config
        ends[config] = max(ends.get(config, 0.0), record.end_s)
        training[config] += record.end_s - record.start_s
    done_s = {config: time.elapsed_s(end_s) for config, end_s in ends.items()}
    return PhaseRun(time.elapsed_s(trace.makespan_s), done_s, training)


def _with_longer_epochs(units: UnitTimes, epochs: Mapping[str, int]) -> tuple[UnitTimes, dict[str, int]]:
    """Return fewer, proportionally longer epochs if there are more than `MOST_VISITS` visits to simulate."""
    visits = len(units.partitions) * sum(epochs.values())
    fewer = {name: max(1, round(count * min(1.0, MOST_VISITS / visits))) for name, count in epochs.items()}
    factors = np.array([epochs[name] / fewer[name] for name in units.configs])
    return replace(units, seconds=units.seconds * factors[:, None, None]), fewer


def _visits(units: UnitTimes, epochs: Mapping[str, int], search: SearchOptions) -> list[Visit]:
    """Return the visits of all epochs, rescheduled whenever many configurations have left."""
    sets = _sets(epochs)
    each = replace(search, seconds=search.seconds / max(len(set(sets)), 1))
    schedules = {}
    for configs in dict.fromkeys(sets):
        part = units.of_configs(configs)
        schedules[configs] = visits_of(best(part, each), part)
    visits = (
        replace(visit, epoch=epoch) for epoch, configs in enumerate(sets) for visit in schedules[configs]
    )
    left = (visit for visit in visits if visit.epoch < epochs[visit.config])
    return [replace(visit, number=number) for number, visit in enumerate(left)]


def _sets(epochs: Mapping[str, int]) -> list[frozenset[str]]:
    """Return for each epoch the configurations that its schedule covers, a superset of those left."""
    sets: list[frozenset[str]] = []
    for epoch in range(max(epochs.values(), default=0)):
        left = frozenset(config for config, count in epochs.items() if count > epoch)
        sets.append(left if not sets or len(left) <= SHRUNK * len(sets[-1]) else sets[-1])
    return sets


def pipeline_phase(seconds: Mapping[str, float], clock: JobTiming) -> PhaseRun:
    """Return the result of members that train in turn, each as a pipeline on all GPUs for its seconds."""
    time, end_s = JobTime(clock), 0.0
    done_s = {}
    for member, training_s in seconds.items():
        end_s += training_s
        done_s[member] = time.elapsed_s(end_s)
    return PhaseRun(time.elapsed_s(end_s), done_s, dict(seconds))
