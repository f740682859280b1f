"""Members as planners see them: what is left to do, from the profile and the events of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hetctl.model.ensemble import Member
from hetctl.model.run import RunSpec, Usage
from hetctl.model.workload import Workload
from hetctl.perf.workloads import Workloads
from hetctl.runtime.driver.active_round import ActiveRound
from hetctl.scheduling.planners.base import Held
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState
from hetctl.storage.step_fold import StepReport


@dataclass(frozen=True)
class RunObservation:
    """The members of a run at one moment.

    Parameters
    ----------
    left : mapping of str to Candidate
        All that still need training, with what they have left at most.
    waiting : tuple of Candidate
        Those that hold no GPU.
    held : tuple of Held
        Those in training that were not told to leave, with what they are likely to have left.
    """

    left: Mapping[str, Workload]
    waiting: tuple[Workload, ...]
    held: tuple[Held, ...]


class RunMembers:
    """The members of a run that still need training.

    `left`, `seen` and `rates_seen` take in what has been written until they are called, as far as trainers
    have told, and read each event once; what else is asked for is as of then.

    Parameters
    ----------
    gpus : int
        Of the job.
    take_written : callable
        Returns which lengths of event files trainers have told since it was last called (`EventLog.fresh`).
    """

    def __init__(
        self, folder: RunFolder, spec: RunSpec, gpus: int, take_written: Callable[[], Mapping[str, int]]
    ) -> None:
        self._profiles = {profile.member: profile for profile in spec.profiles}
        self._members = {member.name: member for member in spec.ensemble.members}
        self._state = RunState(folder, spec.ensemble, spec.retries)
        self._take_written = take_written
        self._workloads = Workloads(spec.ensemble, self._profiles, gpus, spec.site.gpus_per_node)
        self._look()
        self._began_at = time.time() if self._state.began_at is None else self._state.began_at

    @property
    def began_at(self) -> float:
        """Start of the run's first job, in seconds since the epoch; of this one if no other was before it."""
        return self._began_at

    @property
    def next_round(self) -> int:
        """Index that no round of the run had when it was last looked at."""
        return self._state.next_round

    def keep(self) -> None:
        """Have the next reader of the run's files go on from here; OSError if the disk is full."""
        self._look()
        self._state.keep()

    def left(self) -> Mapping[str, Workload]:
        """Return all, in training or not, as their finished epochs and their checkpoints tell."""
        self._look()
        return self._workloads.left

    def as_they_are(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Return members with the batch sizes that they have come down to."""
        progress = self._state.progress
        members = (self._members[name] for name in names)
        return tuple(replace(m, batch_size=progress[m.name].batch_size or m.batch_size) for m in members)

    def peak_memory(self, name: str) -> int:
        """Return the most bytes that the member held when it was profiled; 0 if nobody knows."""
        return self._profiles[name].peak_memory_bytes

    def used(self, now: float) -> Usage:
        """Return what the run has used; `now` is in seconds since the epoch."""
        return self._state.used(now)

    def seen(self, rounds: Iterable[ActiveRound], now: float) -> RunObservation:
        """Look at all members; `now` is in seconds since the epoch."""
        self._look()
        left, rounds = self._workloads.left, tuple(rounds)
        busy = {name for open_round in rounds for name in open_round.active}
        waiting = tuple([workload for name, workload in left.items() if name not in busy])
        in_training = (held for open_round in rounds for held in self._held(open_round, now))
        return RunObservation(left, waiting, tuple(in_training))

    def rates_seen(self, rounds: Iterable[ActiveRound]) -> dict[str, float]:
        """Return the rate, in samples/s, of the last epoch of each member in training that has one."""
        self._look()
        return {
            name: rate
            for opened in rounds
            for name, report in self._reports(opened).items()
            if (rate := report.rate)
        }

    def _look(self) -> None:
        """Take in what is new on the disk."""
        progress = self._state.progress
        news = self._state.look(self._take_written())
        self._workloads.update({name: progress[name] for name in news.members})

    def _reports(self, opened: ActiveRound) -> dict[str, StepReport]:
        """Return what the trainers of a round's members have reported."""
        return {name: self._state.reports[opened.index, name] for name in opened.active}

    def _held(self, opened: ActiveRound, now: float) -> Iterator[Held]:
        """Return those in training of a round that were not told to leave."""
        since = opened.opened_at - self._began_at
        left, progress = self._workloads.left, self._state.progress
        for name, report in self._reports(opened).items():
            workload = left.get(name)
            if workload is None or name in opened.leaving:
                continue
            allocation = opened.active[name]
            # Of several types of GPU the allocation's rate is that of its own.
            rates = {} if workload.rates_by_type else workload.rates
            rate = rates.get(allocation.gpus, allocation.rate)
            part_samples = progress[name].part_samples
            yield Held(as_of_now(workload, part_samples, rate, report.epoch_since, now), allocation, since)


def as_of_now(
    workload: Workload, part_samples: int, rate: float, epoch_since: float | None, now: float
) -> Workload:
    """Return a member in training with what it is likely to have left.

    Since its last epoch, or since its first step, it has trained at the predicted rate, but for no
    longer than to the end of its epoch: the next event tells more. Where nobody knows how long an
    epoch is, nothing but events counts.

    Parameters
    ----------
    workload : Workload
        As its finished epochs and its last checkpoint tell.
    part_samples : int
        Samples of the unfinished epoch in that checkpoint.
    rate : float
        Samples/s, as allocated.
    epoch_since, now : float
        Seconds since the epoch; None: it has not made its first step.
    """
    if epoch_since is None or not workload.samples_per_epoch:
        return workload
    rest = min(max(workload.samples_per_epoch - part_samples, 0), workload.samples_left)
    trained = min(max(now - epoch_since, 0.0) * rate, rest)
    return workload.with_left(workload.samples_left - trained)
