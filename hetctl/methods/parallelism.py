"""Training mode of each network: data-parallel, hopping or pipeline; times of a phase in one mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE, ModeChoice
from hetctl.model.profile import some_of
from hetctl.model.values import dataclass
from hetctl.scheduling.simulate.scenario import JobTiming

NAMED = 5
"""Networks that a reason names."""


@dataclass(frozen=True)
class Demand:
    """Properties of a network that decide its training mode.

    Parameters
    ----------
    memory_bytes : int or None
        Memory that training on a single GPU needs; None if unknown.
    epochs : int
        Epochs left to train.
    """

    member: str
    memory_bytes: int | None
    epochs: int = 1


@dataclass(frozen=True)
class ModeLimits:
    """Properties of the GPUs and the data that decide the training modes.

    Parameters
    ----------
    gpu : str
        Name of the GPU with the least memory, for messages.
    memory_bytes : int or None
        Memory of that GPU; None if unknown.
    partitions : int
        Partitions of the data, each on one node; 0 if the data is not partitioned.
    """

    gpus: int
    gpu: str
    memory_bytes: int | None
    partitions: int


def too_large(demand: Demand, limits: ModeLimits) -> bool:
    """Return true if the network is known to exceed the memory of the smallest GPU."""
    needs, has = demand.memory_bytes, limits.memory_bytes
    return needs is not None and has is not None and needs > has


def does_not_fit(subject: str, demand: Demand, limits: ModeLimits) -> str:
    """Return the reason why one GPU is too small, as a clause for a message."""
    needs, has = _gigabytes(demand.memory_bytes), _gigabytes(limits.memory_bytes)
    return f"{subject} needs {needs} of memory, and {limits.gpu} has {has}"


@dataclass(frozen=True)
class HopChoice:
    """Number of epochs to hop for networks that fit a GPU, by the costs of the alternatives.

    Parameters
    ----------
    makespans_s : mapping of int to float
        Simulated seconds until all of them are trained, by epochs of hopping before data-parallel training;
        0 is data-parallel training alone. Alternatives without a plan are missing.
    unknown : tuple of str
        Networks of which no rate is known yet: while there are any, only data-parallel training is planned.
    """

    makespans_s: Mapping[int, float]
    unknown: tuple[str, ...] = ()

    @property
    def epochs(self) -> int:
        """Epochs of hopping in the cheapest alternative; of equal ones the one with the fewest."""
        return min(self.makespans_s, key=lambda epochs: (self.makespans_s[epochs], epochs), default=0)

    @property
    def hopping_s(self) -> float | None:
        """Seconds of the cheapest alternative with hops; None if there is none."""
        return min((seconds for epochs, seconds in self.makespans_s.items() if epochs), default=None)


def choose_modes(demands: Sequence[Demand], limits: ModeLimits, hops: HopChoice) -> tuple[ModeChoice, ...]:
    """Return the mode of each network with its reason.

    A network that does not fit one GPU is split into a pipeline. The others hop if the data is partitioned
    over the nodes and the simulator finds that cheaper; otherwise they train data-parallel.
    """
    return tuple(
        _pipeline(demand, limits)
        if too_large(demand, limits)
        else _hopper(demand, hops, limits)
        if hops.epochs
        else _data_parallel(demand, hops, limits)
        for demand in demands
    )


def _pipeline(demand: Demand, limits: ModeLimits) -> ModeChoice:
    reason = f"{does_not_fit('it', demand, limits)}: its layers go to several GPUs"
    return ModeChoice(demand.member, PIPELINE, reason)


def _hopper(demand: Demand, hops: HopChoice, limits: ModeLimits) -> ModeChoice:
    reason = (
        f"hopping over {limits.partitions} partitions is estimated at {_time(hops.makespans_s[hops.epochs])}"
    )
    parallel_s = hops.makespans_s.get(0)
    reason += "" if parallel_s is None else f", data-parallel training at {_time(parallel_s)}"
    if demand.epochs > hops.epochs:
        reason += f"; after {hops.epochs} of its {demand.epochs} epochs it goes on data-parallel"
    return ModeChoice(demand.member, HOPPER, reason)


def _data_parallel(demand: Demand, hops: HopChoice, limits: ModeLimits) -> ModeChoice:
    fits = "it fits one GPU"
    if demand.memory_bytes is None and demand.member in hops.unknown:
        fits = "it is taken to fit one GPU, and no pipeline was considered, as its layers are not known"
    elif limits.memory_bytes is None:
        fits = "it is taken to fit one GPU, as the site does not say how much memory they have"
    return ModeChoice(demand.member, DATA_PARALLEL, f"{fits}, and {_no_hops(hops, limits)}")


def _no_hops(hops: HopChoice, limits: ModeLimits) -> str:
    if not limits.partitions:
        return "the data is not partitioned"
    if hops.unknown:
        return f"hopping was not considered, as no rate of {some_of(hops.unknown, NAMED)} is known yet"
    if hops.hopping_s is None:
        return "hopping has no plan"
    estimate = _time(hops.makespans_s[0])
    return f"data-parallel training is estimated at {estimate}, hopping at {_time(hops.hopping_s)}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _gigabytes(size: int | None) -> str:
    return f"{(size or 0) / 1e9:.3g} GB"


@dataclass(frozen=True)
class PhaseRun:
    """Result of a phase; times in seconds from its start.

    Parameters
    ----------
    done_s, training_s : mapping of str to float
        End of each member's work, and its training time.
    """

    seconds: float
    done_s: Mapping[str, float]
    training_s: Mapping[str, float]

    def stretched(self, factor: float) -> PhaseRun:
        """Return the phase with times without training by which it takes so many times as long."""
        done_s = {member: factor * seconds for member, seconds in self.done_s.items()}
        return replace(self, seconds=factor * self.seconds, done_s=done_s)


@dataclass(frozen=True)
class JobTime:
    """Conversion of training time to wall-clock time, over as many jobs as necessary.

    Parameters
    ----------
    startup_s : float
        Start-up time of the members in each job, whose own start is in `timing`.
    longest_s, mean_s : float
        Longest and mean time of a visit, or of another part of training that is not interrupted. Near its
        time limit a job starts no other part, so each job loses one mean time.
    """

    timing: JobTiming
    startup_s: float = 0.0
    longest_s: float = 0.0
    mean_s: float = 0.0

    def elapsed_s(self, training_s: float) -> float:
        """Return the wall-clock time at which the given training time has been reached.

        Raises
        ------
        InfeasibleError
            If a job is too short for the longest part.
        """
        begin_s = self.timing.job_start_s + self.startup_s
        room_s = self.timing.usable_s - begin_s
        if training_s <= room_s:
            return begin_s + training_s
        useful_s = room_s - self.mean_s
        if room_s < self.longest_s or useful_s <= 0:
            raise InfeasibleError(
                f"a job has {self.timing.usable_s:.0f} s for training, but start-up and a visit to a"
                f" partition take {begin_s + self.longest_s:.0f} s",
                "raise --time, or have more partitions",
            )
        jobs = math.ceil(training_s / useful_s)
        between_s = self.mean_s + self.timing.job_overhead_s
        return training_s + jobs * begin_s + (jobs - 1) * between_s


def phase_in_turn(seconds: Mapping[str, float], timing: JobTiming) -> PhaseRun:
    """Return the result of members that train one after another, each on all GPUs for its seconds."""
    time, end_s = JobTime(timing), 0.0
    done_s = {}
    for member, training_s in seconds.items():
        end_s += training_s
        done_s[member] = time.elapsed_s(end_s)
    return PhaseRun(time.elapsed_s(end_s), done_s, dict(seconds))
