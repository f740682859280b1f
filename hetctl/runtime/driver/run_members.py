"""Input of a run's scheduling: the work left, from profiles and events, and the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import is_transient
from hetctl.model.events import ExitReason
from hetctl.model.plan import DATA_PARALLEL, Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.searches import PRUNED
from hetctl.model.workload import Workload
from hetctl.perf.preprocessing import seen_points
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import Workloads
from hetctl.scheduling.fusing import fused_shape
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.scheduling.planners.base import RunningMember, options_from
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.run_results import keep_results, results_of
from hetctl.storage.run_state import RunState

if TYPE_CHECKING:
    from hetctl.runtime.driver.trial_queue import TrialQueue

NO_ROOM = frozenset({ExitReason.OUT_OF_MEMORY, ExitReason.GPU_BUSY})
FAULTS_OF_ANY = frozenset({ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.HUNG})
"""Ends of all processes on a GPU with MPS, of which one has a fault."""


class RunMembers:
    """Members of a run that still need training.

    `workloads`, `asked` and `rates_seen` first read newly announced events; all other methods return the
    state after the last reading. While the disk does not answer, all return the last state; `read` raises an
    error.

    Attributes
    ----------
    began_at : float
        Start of the run's first job, which may be this one, in seconds since the epoch.

    Parameters
    ----------
    gpus : int
        Number of GPUs of the job.
    take_written : callable
        Function that returns the lengths of event files announced since its last call (`EventLog.read_new`).
    trials : TrialQueue or None
        Trials of the run's search; None if it has none.
    on_failure : callable
        Function called with the error if the disk does not answer.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        gpus: int,
        take_written: Callable[[], Mapping[str, int]],
        trials: TrialQueue | None = None,
        on_failure: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        self._on_failure, self._budget = on_failure, spec.budget
        self._folder, self._trials = folder, trials
        self._take_written = take_written
        self._state = PATIENT.call(RunState, folder, spec.ensemble, spec.retries)
        self._planned = {profile.member: profile for profile in spec.profiles}
        self._profiles, options = dict(self._planned), options_from(spec.options)
        self._workloads = Workloads(
            _installed(spec),
            self._profiles,
            gpus,
            in_lockstep=spec.sharing == LOCKSTEP,
            terms=GpuTerms.at(spec.site, options.max_per_gpu),
            fuses=lambda one: fused_shape(one, self._spec.ensemble, spec.site.launch, spec.sharing, options),
        )
        self._take(spec)
        PATIENT.call(self.read)
        began_at = self._state.usage.began_at
        self.began_at = time.time() if began_at is None else began_at

    def edit(self, spec: RunSpec) -> None:
        """Go on with the members of a specification, as users have edited them; errors as of `read`."""
        self._state.edit(spec.ensemble, spec.retries)
        planned = {profile.member: profile for profile in spec.profiles}
        others = {name: profile for name, profile in planned.items() if profile != self._planned.get(name)}
        self._workloads.edit(_installed(spec), others)
        self._planned, self._profiles = planned, self._profiles | others
        self._take(spec)
        self.read()

    def _take(self, spec: RunSpec) -> None:
        self._spec = spec
        self._members = {member.name: member for member in spec.ensemble.members}

    @property
    def edits(self) -> int:
        """Number of the users' newest edit of the run by the last reading."""
        return self._state.facts.edits

    @property
    def next_round(self) -> int:
        """Index of the run's next round by the last reading."""
        return self._state.usage.next_round

    def keep(self) -> None:
        """Save a snapshot for later readers, and results; OSError if the disk is full."""
        self._refresh()
        if self._state.keep():
            keep_results(self._folder, results_of(self._state, self._spec))

    def workloads(self) -> Mapping[str, Workload]:
        """Return the work left of all members after finished epochs and checkpoints."""
        self._refresh()
        return self._workloads.left

    def with_batch_sizes(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Return members with their present batch sizes, which may be below those of the ensemble."""
        progress = self._state.progress
        members = (self._member(name) for name in names)
        return tuple(replace(m, batch_size=progress[m.name].batch_size or m.batch_size) for m in members)

    def guessed(self, allocations: Iterable[Allocation]) -> set[str]:
        """Return the members whose rates on these GPUs are estimates."""
        left = self._workloads.left
        return {a.member for a in allocations if a.member in left and left[a.member].spread.get(a.gpus)}

    @property
    def preprocess(self) -> tuple[PreprocessPoint, ...]:
        """Throughputs of preprocessors: those that the run began with, or else what training has shown."""
        seen = (one.preparation_rate for one in self._state.progress.values())
        return self._spec.preprocess or seen_points(seen)

    def epochs(self, names: Iterable[str]) -> dict[str, int]:
        """Return the numbers of finished epochs of members."""
        return {name: len(self._state.progress[name].epochs) for name in names}

    def withheld(self, names: Collection[str]) -> dict[str, str]:
        """Return the members that their user or their search has taken out of training, each with a word."""
        progress = self._state.progress
        pruned = {name: PRUNED for name in names if progress[name].asked and not progress[name].is_awaited}
        return pruned | {name: word for name in names if (word := progress[name].withheld)}

    def asked(self) -> Mapping[str, int]:
        """Return the trials that need training, with the epochs that the search has asked for."""
        progress = self._state.progress
        return {name: epochs for name in self.workloads() if (epochs := progress[name].asked)}

    def planned_like(self, name: str) -> str:
        """Return the member whose plan suits this one: itself, or another trial with a similar config."""
        return self._trials.planned_like(name) if self._trials else name

    def unfit_gpus(self, allocation: Allocation, gpu_type: str, reason: ExitReason) -> int | None:
        """Return the GPUs of a member without room, if it should try another number of them; else None.

        0 means that it shared a GPU, and is not to do so again. With MPS so does a member with a fault there,
        as it may be that of another: the one at fault will fail alone.
        """
        # Of several who share a GPU, the first one may have told already that its shape is not to.
        began_beside = allocation.mode == DATA_PARALLEL and not allocation.alone
        is_concerned = reason in NO_ROOM or (
            self._spec.site.mps and reason in FAULTS_OF_ANY and allocation.mode == DATA_PARALLEL
        )
        shares = not allocation.own_gpus and (began_beside or self._workloads.may_share(allocation.member))
        if is_concerned and shares:
            return 0
        tries = reason is ExitReason.OUT_OF_MEMORY and allocation.mode == DATA_PARALLEL
        if tries and self._workloads.has_other_gpus(allocation.member, allocation.gpus, gpu_type):
            return allocation.gpus
        return None

    def keep_apart(self) -> None:
        """Let no member share a GPU any more in this job."""
        self._workloads.keep_apart()

    def fused_rates(self, name: str, gpu_type: str) -> dict[int, float]:
        """Return the rates of several members of its shape together on a type of GPU, by their number."""
        return self._workloads.fused_rates(name, gpu_type)

    def peak_memory(self, name: str) -> int:
        """Return the member's peak of memory in its profile or in training, in bytes; 0 if it is unknown."""
        return self._profiles[name].peak_memory_bytes or self._state.progress[name].peak_memory_bytes

    def busy_s(self, name: str) -> float:
        """Return the seconds in which a member may not notice a stop; 0 if they are unknown."""
        profile, seen = self._profiles[name], self._state.progress[name]
        profiled_s = profile.startup_s + profile.evaluate_s + profile.checkpoint_s
        return profiled_s or sum(filter(None, (seen.startup_s, seen.evaluate_s, seen.checkpoint_s)))

    def used_up(self) -> str | None:
        """Return the limit of the run's budget that is reached; None if none is."""
        return self._budget.exceeded(self._state.usage.used(time.time()))

    def members_in_training(self, running: Mapping[str, RunningTask], now: float) -> Iterator[RunningMember]:
        """Yield the members in training that need more of it and were not told to stop.

        `now` is in seconds since the epoch.
        """
        left, progress = self._workloads.left, self._state.progress
        for name, task in running.items():
            if name not in left or task.stopping:
                continue
            workload, allocation = left[name], task.task.allocation
            # With several types of GPU, use the rate of the allocation's own type.
            rates = {} if workload.rates_by_type else workload.rates
            report = self._state.reports[task.round, name]
            rate, since = rates.get(allocation.gpus, allocation.rate), report.epoch_since
            if not allocation.own_gpus:
                # Those who sit beside it come and go.
                rate = report.rate or allocation.rate
            known = as_of_now(workload, progress[name].part_samples, rate, since, now)
            yield RunningMember(known, allocation, task.since_s)

    def rates_seen(self, running: Mapping[str, RunningTask]) -> dict[str, float]:
        """Return the last rates in samples/s of members in training; some have none yet."""
        self._refresh()
        rates = {name: self._state.reports[task.round, name].rate for name, task in running.items()}
        return {name: rate for name, rate in rates.items() if rate}

    def _refresh(self) -> None:
        """Read new events from the disk, if it answers."""
        try:
            self.read()
        except OSError as error:
            if not is_transient(error):
                raise
            self._on_failure(error)

    def read(self) -> None:
        """Read new events from the disk; an OSError leaves the state as it was."""
        changed, progress = self._state.refresh(self._take_written()), self._state.progress
        # Read the search's requests and reports back, so that only what is on the disk counts.
        while self._trials and self._trials.advance(
            progress, self._state.usage.used(time.time()), self._run_s, self._state.facts.parts
        ):
            changed |= self._state.refresh(self._take_written())
        for name in changed:
            if self._trials and name in self._trials:
                profile = self._trials.profile(name, self._planned)
                self._workloads.replace_config(self._trials.member(name), profile)
                self._profiles[name] = profile
        self._workloads.update({name: progress[name] for name in changed})

    @property
    def _run_s(self) -> float:
        """Seconds since the start of the run."""
        return 0.0 if self._state.usage.began_at is None else time.time() - self._state.usage.began_at

    def _member(self, name: str) -> Member:
        return self._trials.member(name) if self._trials and name in self._trials else self._members[name]


def _installed(spec: RunSpec) -> Ensemble:
    """Return the ensemble with the packages of the job."""
    python = spec.site.container.python if spec.site.container else None
    return spec.ensemble.as_installed(python, one_gpu=spec.site.has_mig)


def as_of_now(
    workload: Workload, part_samples: int, rate: float, epoch_since: float | None, now: float
) -> Workload:
    """Return a member in training with its likely work left.

    From its last epoch or first step on, it is assumed to train at the predicted rate, at most to the end of
    its epoch: the next event gives the true count. If the length of an epoch is unknown, only events count.

    Parameters
    ----------
    workload : Workload
        Work left after its finished epochs and its last checkpoint.
    part_samples : int
        Samples of the unfinished epoch in the last checkpoint.
    rate : float
        Rate of the allocation, in samples/s.
    epoch_since, now : float
        Seconds since the epoch; `epoch_since` is None before the first step.
    """
    if epoch_since is None or not workload.samples_per_epoch:
        return workload
    rest = min(max(workload.samples_per_epoch - part_samples, 0), workload.samples_left)
    trained = min(max(now - epoch_since, 0.0) * rate, rest)
    return workload.with_left(workload.samples_left - trained)
