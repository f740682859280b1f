"""Times of one phase of a plan, in which all members train in one mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetctl.model.errors import InfeasibleError
from hetctl.model.values import dataclass
from hetctl.scheduling.simulate.scenario import JobTiming


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
