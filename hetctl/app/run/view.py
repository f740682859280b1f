"""Rounds, tasks, members and rates of a run for display, updated with its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice, pairwise

from hetctl.app.log_tail import tail_of
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER, Event
from hetctl.model.plan import Plan
from hetctl.model.profile import MemberProfile
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.run_status import BatchChange, MemberRate, MemberStatus, RoundSpan, TaskSpan
from hetctl.model.training_progress import EpochHistory, EpochResult, LiveMetrics, Progress
from hetctl.perf.rate_extrapolation import rate_on
from hetctl.perf.rate_prediction import NOTEWORTHY, is_noteworthy, known_rates, seen_rates
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunFacts, RunState
from hetctl.storage.task_fold import TaskRecord
from hetctl.storage.visit_totals import TotalsFold

TRAINING = "training"
DRIVER_LOST = "driver-lost"
"""End of a round that its driver was killed before it could report."""
MOST_NAMED = 20
"""Wrong rates that a warning states."""


@dataclass(frozen=True)
class DisplayedMembers:
    """Parts of a `RunStatus` that belong to the displayed members."""

    members: tuple[MemberStatus, ...]
    tasks: tuple[TaskSpan, ...]
    history: Mapping[str, Sequence[EpochResult]]


class RunView:
    """Run for display; lines are only computed for the displayed members."""

    def __init__(self, folder: RunFolder, spec: RunSpec, plan: Plan) -> None:
        self.folder, self.spec = folder, spec
        self._members = {member.name: member for member in spec.ensemble.members}
        self._profiles = {profile.member: profile for profile in spec.profiles}
        self._predicted_s = {forecast.member: forecast.training_s for forecast in plan.members}
        self._state = RunState(folder, spec.ensemble, spec.retries)
        self._wrong: dict[str, list[str]] = {}

    @property
    def facts(self) -> RunFacts:
        """Jobs and rounds of the run, its first and its last event."""
        return self._state.facts

    @property
    def hops(self) -> TotalsFold:
        """Totals of the visits of members that hop."""
        return self._state.hops

    @property
    def progress(self) -> Mapping[str, Progress]:
        """Progress by member, in the ensemble's order."""
        return self._state.progress

    @property
    def has_work(self) -> bool:
        """True if a member needs training, or the run's search may ask for more."""
        return self._state.has_work

    def refresh(self) -> None:
        """Read new events from the disk."""
        changed = self._state.refresh()
        # In lockstep all members have the rate of the slowest, as planned.
        if self.spec.sharing != LOCKSTEP:
            self._wrong |= {name: wrong_rates(*self._rated(name)) for name in changed}

    def states(self, alive: Set[int]) -> dict[str, str]:
        """Return the state of each member, in the ensemble's order.

        Parameters
        ----------
        alive : set of int
            Numbers of the jobs in which tasks without an end run; others ended with their last event.
        """
        training = {name for index, name in self._state.usage.open_tasks if self._goes_on(index, alive)}
        return {
            name: _state_of(done, name in training)
            for name, done in self.progress.items()
            # A trial that its search has not asked for is none yet.
            if done.asked != 0
        }

    def shown(
        self,
        states: Mapping[str, str],
        start: float,
        live_metrics: Mapping[str, LiveMetrics],
        alive: Set[int],
    ) -> DisplayedMembers:
        """Return the lines of members, with their tasks by round, and in a round by start.

        Parameters
        ----------
        states : mapping of str to str
            States by member, of some or all in the result of `states`.
        start : float
            Time from which seconds count, in seconds since the epoch.
        live_metrics : mapping of str to LiveMetrics
            Live metrics of members in training.
        alive : set of int
            Same as in `states`.
        """
        spans = {name: self._spans_of(name, start, alive) for name in states}
        return DisplayedMembers(
            members=tuple(
                self._line(name, state, spans[name], live_metrics.get(name)) for name, state in states.items()
            ),
            tasks=tuple(
                sorted(chain.from_iterable(spans.values()), key=lambda s: (s.round, s.start_s, s.member))
            ),
            history={name: self.progress[name].epochs for name in states},
        )

    def rounds(self, start: float, alive: Set[int]) -> tuple[RoundSpan, ...]:
        """Return the rounds that have begun; `alive` is the same as in `states`."""
        return tuple(
            _round_span(index, self.facts.rounds[index], start, self._lost_at(index, alive))
            for index in self._begun
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the rates of all members."""
        wrong = rate_warnings(chain.from_iterable(self._wrong.get(name, ()) for name in self._members))
        return (*wrong, *blind_warnings(self._blind))

    @property
    def _blind(self) -> list[str]:
        """Members whose commands have run without a report."""
        return [
            name
            for name, member in self._members.items()
            if member.command and not self.progress[name].epochs and not self.progress[name].failed
            if any(task.ended_at for tasks in self._state.tasks_of(name).values() for task in tasks)
        ]

    @property
    def _begun(self) -> list[int]:
        return sorted(index for index, events in self.facts.rounds.items() if "round_started" in events)

    def _rated(self, name: str) -> tuple[Member, MemberProfile | None, Progress]:
        """Return the arguments of `rates_of` and `wrong_rates`."""
        return self._members[name], self._profiles.get(name), self.progress[name]

    def _spans_of(self, name: str, start: float, alive: Set[int]) -> list[TaskSpan]:
        return [
            span
            for index, tasks in sorted(self._state.tasks_of(name).items())
            for task in tasks
            for span in task_spans(task, index, name, start, self._open_until(index, name, alive))
        ]

    def _goes_on(self, index: int, alive: Set[int]) -> bool:
        """Return true if a round without an end goes on: its job does, and was not requeued since."""
        begun = self.facts.rounds.get(index, {}).get("round_started")
        starts = [event for event in self.facts.jobs if event.kind == "job_started"]
        last = max(
            (event.round for event in starts if begun and event.record.job == begun.record.job), default=0
        )
        return begun is not None and begun.record.job in alive and index >= last

    def _open_until(self, index: int, name: str, alive: Set[int]) -> float | None:
        """Return the end of a task without one, by its or its driver's last event; None if it is running."""
        if (index, name) not in self._state.usage.open_tasks or self._goes_on(index, alive):
            return None
        return self._last_heard(index, (name,))

    def _lost_at(self, index: int, alive: Set[int]) -> float | None:
        """Return the end of a round without one, by the last events in it; None if it goes on."""
        if "round_ended" in self.facts.rounds[index] or self._goes_on(index, alive):
            return None
        lost = [name for round_index, name in self._state.usage.open_tasks if round_index == index]
        return max(self.facts.rounds[index]["round_started"].time, self._last_heard(index, lost))

    def _last_heard(self, index: int, members: Iterable[str]) -> float:
        """Return the time of the last event of a round's driver and of some of its members; 0 without one."""
        reports = (self._state.reports.get((index, source)) for source in (DRIVER, *members))
        return max((report.last_at for report in reports if report and report.last_at), default=0.0)

    def _line(
        self, name: str, state: str, own: Sequence[TaskSpan], live_metrics: LiveMetrics | None
    ) -> MemberStatus:
        member, progress = self._members[name], self.progress[name]
        held = _held(own)
        objective, epochs = member.objective, EpochHistory.of(progress.epochs)
        return MemberStatus(
            member=name,
            state=state,
            gpus_by_round=tuple(held.get(index, 0) for index in self._begun),
            epochs=progress.last_epoch,
            max_epochs=progress.asked or member.stop.max_epochs,
            metric=objective.metric,
            best=epochs.best(objective.metric, objective.mode),
            predicted_s=self._predicted_s.get(name),
            measured_s=_seconds(own),
            reason=progress.failed or progress.converged,
            log_tail=tail_of(self.folder.log_of(name), progress.failed) if progress.failed else (),
            log=str(self.folder.log_of(name)) if progress.failed else "",
            rates=rates_of(*self._rated(name)),
            live_metrics=live_metrics if state == TRAINING else None,
            # Each minibatch of a pipeline is a step, whatever the number of GPUs.
            batch_changes=() if name in self.spec.pipelines else batch_changes(member, epochs),
            mode=objective.mode,
            config=self.facts.trials[name].record.config if name in self.facts.trials else None,
        )


def task_spans(
    task: TaskRecord, index: int, member: str, start: float, open_until: float | None
) -> Iterable[TaskSpan]:
    """Return a task's time on each of its nodes.

    Parameters
    ----------
    open_until : float or None
        End of a task without one, in seconds since the epoch; None: it is running.
    """
    ended_at = open_until if task.ended_at is None else task.ended_at
    for place in task.placement:
        yield TaskSpan(
            member=member,
            round=index,
            node=place["node"],
            gpus=tuple(place["gpus"]),
            start_s=task.began_at - start,
            end_s=None if ended_at is None else ended_at - start,
            exit_code=task.exit_code,
        )


def rates_of(member: Member, profile: MemberProfile | None, progress: Progress) -> tuple[MemberRate, ...]:
    """Return the rates on the least number of GPUs, and on all that the member has trained on."""
    seen = seen_rates_of(member, progress) or {"": {}}
    found = []
    for gpu_type in sorted(seen):
        for count in sorted({member.min_gpus, *seen[gpu_type]}):
            profiled = _rate(profile, gpu_type, count)
            planned = _rate(planned_by(profile), gpu_type, count)
            found.append(MemberRate(count, gpu_type or None, profiled, planned, seen[gpu_type].get(count)))
    return tuple(found)


def seen_rates_of(member: Member, progress: Progress) -> Mapping[str, Mapping[int, float]]:
    """Return the rates of a member's epochs with its present batch size, by type and number of GPUs."""
    return seen_rates(progress.epochs, progress.batch_size or member.batch_size)


def planned_by(profile: MemberProfile | None) -> MemberProfile | None:
    """Return the profile that the plan was made by: with what earlier runs have seen."""
    return known_rates(profile) if profile and profile.seen_rates else profile


def wrong_rates(member: Member, profile: MemberProfile | None, progress: Progress) -> list[str]:
    """Return texts on a member's planned rates that were wrong by more than `NOTEWORTHY`."""
    return [
        f"{member.name} on {count} planned {planned:,.0f}, seen {rate:,.0f} samples/s"
        for gpu_type, rates in sorted(seen_rates_of(member, progress).items())
        for count, rate in sorted(rates.items())
        if (planned := _rate(planned_by(profile), gpu_type, count)) and is_noteworthy(planned, rate)
    ]


def rate_warnings(wrong: Iterable[str]) -> tuple[str, ...]:
    """Return a warning about the plan's wrong rates and its effect; empty if there are none.

    Parameters
    ----------
    wrong : iterable of str
        Texts from `wrong_rates`, of all members.
    """
    named = list(islice(every := iter(wrong), MOST_NAMED))
    if not named:
        return ()
    rest = sum(1 for _ in every)
    more = f"; and {rest:,} more, of which `hetctl status --json` has the rates" if rest else ""
    return (
        f"the plan's rates were off by more than {NOTEWORTHY:.0%}: {'; '.join(named)}{more}. Planners go by"
        " what is seen, in this run and in later ones; `hetctl profile --force` measures anew",
    )


def blind_warnings(blind: Sequence[str]) -> tuple[str, ...]:
    """Return a warning about members whose commands report nothing; empty if there are none."""
    if not blind:
        return ()
    return (
        f"the command of {', '.join(blind)} has reported no finished epoch: no stop rule applies to it, and"
        " it has no rate. It counts as converged when it exits with 0; `hetctl.report` in the script reports"
        " epochs",
    )


def _rate(profile: MemberProfile | None, gpu_type: str, count: int) -> float | None:
    """Return a profile's rate on GPUs of one type, measured or predicted; None if they were of several."""
    if profile is None or (profile.rates_by_type and not gpu_type and count > 1):
        return None
    return rate_on(count, profile.rates_by_type.get(gpu_type, profile.rates))


def _round_span(index: int, events: Mapping[str, Event], start: float, lost_at: float | None) -> RoundSpan:
    begun, ended = events["round_started"], events.get("round_ended")
    end = ended.time if ended else lost_at
    return RoundSpan(
        index=index,
        job=begun.record.job,
        start_s=begun.time - start,
        end_s=None if end is None else end - start,
        predicted_s=begun.record.predicted_s,
        ended_by=ended.record.ended_by if ended else None if lost_at is None else DRIVER_LOST,
    )


def _state_of(progress: Progress, training: bool) -> str:
    if progress.failed:
        return "failed"
    if progress.converged:
        return "converged"
    if training:
        return TRAINING
    return "waiting" if progress.active else "stopped"


def _held(tasks: Iterable[TaskSpan]) -> dict[int, int]:
    """Return the most GPUs of a member at a time, by round: one that hops has many tasks in a round."""
    by_task: dict[tuple[int, float], int] = defaultdict(int)
    for task in tasks:
        by_task[task.round, task.start_s] += len(task.gpus)
    held: dict[int, int] = defaultdict(int)
    for (index, _), gpus in by_task.items():
        held[index] = max(held[index], gpus)
    return held


def _seconds(tasks: Iterable[TaskSpan]) -> float | None:
    """Return the total time of all tasks; a task on several nodes counts once."""
    by_task = {(s.round, s.start_s): s.end_s - s.start_s for s in tasks if s.end_s is not None}
    return sum(by_task.values()) if by_task else None


def batch_changes(member: Member, epochs: EpochHistory) -> tuple[BatchChange, ...]:
    """Return the changes of a data-parallel member's samples a step; none with a `global_batch_size`.

    An epoch whose parts were trained on different numbers of GPUs counts with the last of them.
    """
    if member.global_batch_size is not None:
        return ()
    return tuple(
        BatchChange(epoch, before * before_each, gpus * batch, gpus)
        for (_, before, before_each), (epoch, gpus, batch) in pairwise(epochs.batches)
        if before * before_each != gpus * batch
    )
