"""Rounds, tasks, members and rates of a run for display, updated with its events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from hetctl.app.run.logs import tail_of
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER
from hetctl.model.plan import Plan
from hetctl.model.profile import MemberProfile, some_of
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.run_status import FOREMOST, BatchChange, MemberRate, MemberStatus, RoundSpan, TaskSpan
from hetctl.model.seed_groups import SeedGroup, groups_of, spread_of
from hetctl.model.training_progress import EpochHistory, EpochResult, LiveMetrics, Progress, TimedRate
from hetctl.perf.rate_extrapolation import rate_on
from hetctl.perf.rate_prediction import NOTEWORTHY, is_noteworthy, known_rates, seen_rates
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState

if TYPE_CHECKING:
    from hetctl.perf.workloads import Workloads

TRAINING = "training"
DRIVER_LOST = "driver-lost"
"""End of a round whose driver was killed before it reported one."""
MOST_NAMED = 20
"""Largest number of wrong rates in a warning."""


class RunView:
    """Run for display; lines are computed only for the displayed members.

    `alive` has the numbers of jobs whose rounds without an end go on; others ended with their last event.

    Parameters
    ----------
    lazily : bool
        Same as in `RunState`; for few members.
    """

    def __init__(self, folder: RunFolder, spec: RunSpec, plan: Plan, *, lazily: bool = False) -> None:
        self.folder, self.spec = folder, spec
        self.state = RunState(folder, spec.ensemble, spec.retries, lazily=lazily)
        self._members = {member.name: member for member in spec.ensemble.members}
        self._profiles = {profile.member: profile for profile in spec.profiles}
        known = {profile.member for profile in spec.profiles if profile.has_rates}
        self._predicted_s = {f.member: f.training_s for f in plan.members if f.member in known}
        self._wrong: dict[str, list[str]] = {}
        # Estimates follow what is seen of other members, as in the driver.
        self._workloads: Workloads | None = None
        if len(known) < len(spec.profiles):
            # Imported here since most runs have profiles of all members.
            from hetctl.perf.workloads import Workloads

            self._workloads = Workloads(spec.ensemble, self._profiles, spec.gpus)

    def refresh(self) -> None:
        """Read new events from the disk."""
        changed = self.state.refresh()
        if self._workloads:
            self._workloads.update({name: self.state.progress[name] for name in changed})
        # In lockstep all members have the rate of the slowest, as planned.
        if self.spec.sharing != LOCKSTEP:
            self._wrong |= {name: self._wrong_rates(name) for name in changed}

    def _wrong_rates(self, name: str) -> list[str]:
        profile, seen = self._profiles.get(name), EpochHistory.of(self.state.progress[name].epochs).rates
        # Most rates are as profiled, which is seen twenty times as fast.
        if profile and profile.rates and not (profile.rates_by_type or profile.seen_rates):
            for (_, gpus, _), newest in seen.items():
                planned = profile.rates.get(gpus, 0.0)
                if is_noteworthy(planned, min(newest)) or is_noteworthy(planned, max(newest)):
                    break
            else:
                return []
        return wrong_rates(name, self._rates(name))

    def states(self, alive: Set[int]) -> dict[str, str]:
        """Return the state of each member, in the ensemble's order."""
        going_on = self._going_on(alive)
        training = {name for index, name in self.state.usage.open_tasks if index in going_on}
        return {
            name: _state_of(done, name in training)
            for name, done in self.state.progress.items()
            # A trial exists once its search has asked for it.
            if done.asked != 0
        }

    def first(self, states: Mapping[str, str], order: str, most: int | None) -> Mapping[str, str]:
        """Return the first members by one of `ORDERS`, each with its state, in that order."""
        keys: Mapping[str, Callable[[str], Any]] = {
            "state": lambda name: FOREMOST.index(states[name]),
            "name": lambda name: name,
            "epochs": lambda name: -self.state.progress[name].last_epoch,
            "best": self._badness,
        }
        return {name: states[name] for name in sorted(states, key=keys[order])[:most]}

    def _badness(self, name: str) -> float:
        best = self._best(name)
        return math.inf if best is None else -best if self._members[name].objective.mode == "max" else best

    def _best(self, name: str) -> float | None:
        rule = self._members[name].objective
        return EpochHistory.of(self.state.progress[name].epochs).best(rule.metric, rule.mode)

    def shown(
        self,
        states: Mapping[str, str],
        start: float,
        live_metrics: Mapping[str, LiveMetrics],
        alive: Set[int],
    ) -> dict[str, Any]:
        """Return the fields of a `RunStatus` that belong to the displayed members, and its rounds.

        Parameters
        ----------
        states : mapping of str to str
            States by member, of some or all in the result of `states`.
        start : float
            Time from which seconds count, in seconds since the epoch.
        live_metrics : mapping of str to LiveMetrics
            Live metrics of members in training.
        """
        going_on = self._going_on(alive)
        spans = {name: list(self._spans(name, start, going_on)) for name in states}
        tasks = chain.from_iterable(spans.values())
        return {
            "members": tuple(
                self._line(name, state, spans[name], live_metrics.get(name)) for name, state in states.items()
            ),
            "tasks": tuple(sorted(tasks, key=lambda span: (span.round, span.start_s, span.member))),
            "rounds": tuple(self._round(index, start, going_on) for index in self._begun),
            "history": {name: EpochHistory.of(self.state.progress[name].epochs).loaded() for name in states},
        }

    def seed_groups(self) -> tuple[SeedGroup, ...]:
        """Return the results of the members that differ in their seed alone."""
        groups = groups_of((member.name, member.seeds_of) for member in self._members.values())
        return tuple(
            SeedGroup(
                *(group, tuple(names), self._members[names[0]].objective.metric),
                spread_of([best for name in names if (best := self._best(name)) is not None]),
            )
            for group, names in groups.items()
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the rates of all members, and about commands that have run without a report."""
        wrong = [text for name in self._members for text in self._wrong.get(name, ())]
        blind = [
            name
            for name, done in self.state.progress.items()
            if self._members[name].command
            and not (done.epochs or done.failed or done.reported or done.withheld)
            if any(task.ended_at for tasks in self.state.tasks_of(name).values() for task in tasks)
        ]
        unfit = [
            f"{name} {on_gpus(progress.unfit)}"
            for name, progress in self.state.progress.items()
            if progress.unfit and progress.active
        ]
        found = [rate_warning(wrong)] if wrong else []
        if unfit:
            found.append(
                f"out of memory or place at a first start: {some_of(unfit, MOST_NAMED)}; these try other"
                " numbers"
            )
        if blind:
            found.append(
                f"the command of {', '.join(blind)} has reported no finished epoch: no stop rule applies to"
                " it, and it has no rate. It counts as converged when it exits with 0; `hetctl.report` in the"
                " script reports epochs"
            )
        return tuple(found)

    @property
    def _begun(self) -> list[int]:
        return sorted(index for index, events in self.state.facts.rounds.items() if "round_started" in events)

    def _rates(self, name: str) -> tuple[MemberRate, ...]:
        rates = rates_of(self._members[name], self._profiles.get(name), self.state.progress[name])
        left = self._workloads.left.get(name) if self._workloads else None
        if left is None or not left.is_guess:
            return rates
        return tuple(replace(r, planned=left.rates.get(r.gpus), rate_known=False) for r in rates)

    def _going_on(self, alive: Set[int]) -> set[int]:
        """Return the rounds without an end that go on: their job is alive, and was not requeued since."""
        facts = self.state.facts
        jobs = {index: facts.rounds[index]["round_started"].record.job for index in self._begun}
        last: dict[int, int] = defaultdict(int)
        for event in facts.jobs:
            if event.kind == "job_started":
                last[event.record.job] = max(last[event.record.job], event.round)
        return {index for index, job in jobs.items() if job in alive and index >= last[job]}

    def _spans(self, name: str, start: float, going_on: Set[int]) -> Iterator[TaskSpan]:
        """Yield a member's tasks on each of their nodes."""
        for index, tasks in sorted(self.state.tasks_of(name).items()):
            # A task without an end is running, or ended with its or its driver's last event.
            is_lost = (index, name) in self.state.usage.open_tasks and index not in going_on
            until = self._last_heard(index, (name,)) if is_lost else None
            for task in tasks:
                end = until if task.ended_at is None else task.ended_at
                for place in task.placement:
                    yield TaskSpan(
                        *(name, index, place["node"], tuple(place["gpus"]), task.began_at - start),
                        end_s=None if end is None else end - start,
                        exit_code=task.exit_code,
                        seat=place.get("seat", 0),
                    )

    def _round(self, index: int, start: float, going_on: Set[int]) -> RoundSpan:
        events = self.state.facts.rounds[index]
        begun, ended = events["round_started"], events.get("round_ended")
        end, ended_by = (ended.time, ended.record.ended_by) if ended else (None, None)
        if not ended and index not in going_on:
            lost = [name for round_index, name in self.state.usage.open_tasks if round_index == index]
            end, ended_by = max(begun.time, self._last_heard(index, lost)), DRIVER_LOST
        return RoundSpan(
            *(index, begun.record.job, begun.time - start, None if end is None else end - start),
            # Of guessed rates nothing was predicted.
            predicted_s=None if self._workloads else begun.record.predicted_s,
            ended_by=ended_by,
        )

    def _last_heard(self, index: int, members: Iterable[str]) -> float:
        """Return the time of the last event of a round's driver or of some of its members; 0 without one."""
        reports = (self.state.reports.get((index, source)) for source in (DRIVER, *members))
        return max((report.last_at for report in reports if report and report.last_at), default=0.0)

    def _line(
        self, name: str, state: str, own: Sequence[TaskSpan], live_metrics: LiveMetrics | None
    ) -> MemberStatus:
        member, progress = self._members[name], self.state.progress[name]
        held, trials = _held(own), self.state.facts.trials
        tasks = list(chain.from_iterable(self.state.tasks_of(name).values()))
        alone = [s for s in own if s.end_s is not None and not s.seat]
        energies = [task.energy_j for task in tasks if task.energy_j is not None]
        objective, epochs = member.objective, EpochHistory.of(progress.epochs)
        return MemberStatus(
            member=name,
            state=state,
            gpus_by_round=tuple(held.get(index, 0) for index in self._begun),
            epochs=progress.last_epoch,
            max_epochs=progress.asked or member.stop.max_epochs,
            metric=objective.metric,
            best=self._best(name),
            predicted_s=self._predicted_s.get(name),
            measured_s=_seconds(own),
            reason=progress.failed or progress.converged,
            log_tail=tail_of(self.folder.log_of(name), progress.failed) if progress.failed else (),
            log=str(self.folder.log_of(name)) if progress.failed else "",
            rates=self._rates(name),
            live_metrics=live_metrics if state == TRAINING else None,
            # Each minibatch of a pipeline is a step, whatever the number of GPUs.
            batch_changes=() if name in self.spec.pipelines else batch_changes(member, epochs),
            mode=objective.mode,
            config=trials[name].record.config if name in trials else member.config,
            is_trial=name in trials,
            gpu_seconds=math.fsum(
                (
                    *((s.end_s - s.start_s) * len(s.gpus) for s in alone if s.end_s is not None),
                    *(task.divided_s for task in tasks if task.divided_s),
                )
            ),
            energy_j=sum(energies) if energies else None,
            best_epoch=progress.best_epoch,
            best_checkpoint=progress.best_checkpoint,
            samples_per_epoch=progress.samples_per_epoch,
        )


def rates_of(member: Member, profile: MemberProfile | None, progress: Progress) -> tuple[MemberRate, ...]:
    """Return the rates on the least number of GPUs, and on all that the member has trained on.

    The newest rate is among them even if it was seen on a part of a GPU.
    """
    # Only epochs with its present batch size count.
    seen = seen_rates(progress.epochs, progress.batch_size or member.batch_size) or {"": {}}
    # The plan was made with what earlier runs have seen.
    planned = known_rates(profile) if profile and profile.seen_rates else profile
    rates = tuple(
        MemberRate(
            *(count, gpu_type or None, _rate(profile, gpu_type, count), _rate(planned, gpu_type, count)),
            seen=rates.get(count),
        )
        for gpu_type, rates in sorted(seen.items())
        for count in sorted({member.min_gpus, *rates})
    )
    epochs = EpochHistory.of(progress.epochs)
    last: list[EpochResult | TimedRate] = [*epochs[-1:], *epochs.timed[-1:]]
    newest = max((one for one in last if one.rate), key=lambda one: one.finished_at, default=None)
    if newest is None or newest.gpus:
        return rates
    return MemberRate(0, newest.gpu_type, None, None, newest.rate), *rates


def _rate(profile: MemberProfile | None, gpu_type: str, count: int) -> float | None:
    """Return a profile's rate on GPUs of one type, measured or predicted; None if they were of several."""
    if profile is None or (profile.rates_by_type and not gpu_type and count > 1):
        return None
    return rate_on(count, profile.rates_by_type.get(gpu_type, profile.rates))


def wrong_rates(name: str, rates: Iterable[MemberRate]) -> list[str]:
    """Return texts on a member's planned rates that were wrong by more than `NOTEWORTHY`."""
    return [
        f"{name} on {rate.gpus} planned {rate.planned:,.0f}, seen {rate.seen:,.0f} samples/s"
        for rate in rates
        if rate.planned and rate.seen is not None and is_noteworthy(rate.planned, rate.seen)
    ]


def rate_warning(wrong: Sequence[str]) -> str:
    """Return a warning about the plan's wrong rates, of all members, and its effect."""
    rest = len(wrong) - MOST_NAMED
    more = f"; and {rest:,} more, of which `hetctl status --json` has the rates" if rest > 0 else ""
    return (
        f"the plan's rates were off by more than {NOTEWORTHY:.0%}: {'; '.join(wrong[:MOST_NAMED])}{more}."
        " Planners go by what is seen, in this run and in later ones; `hetctl profile --force` measures anew"
    )


def on_gpus(numbers: Sequence[tuple[str, int]]) -> str:
    """Return ``on 1 GPU``, ``on 1 and 2 GPUs of type V100``, .. for types and numbers of GPUs.

    0 is ``on a part of 1 GPU``.
    """
    of_type: dict[str, list[int]] = defaultdict(list)
    for gpu_type, count in numbers:
        of_type[gpu_type].append(count)
    return " and ".join(
        f"on {' and '.join(str(count or 'a part of 1') for count in counts)} GPU{'s' * (max(counts) > 1)}"
        + (kind and f" of type {kind}")
        for kind, counts in of_type.items()
    )


def _state_of(progress: Progress, training: bool) -> str:
    if progress.failed:
        return "failed"
    if progress.converged:
        return "converged"
    if training:
        return TRAINING
    return "waiting" if progress.active else progress.withheld or "stopped"


def _held(tasks: Iterable[TaskSpan]) -> dict[int, int]:
    """Return a member's largest number of GPUs by round; one that hops has many tasks in a round."""
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
    """Return the changes of a data-parallel member's samples per step; none with a `global_batch_size`.

    If parts of an epoch were trained on different numbers of GPUs, the last number counts.
    """
    if member.global_batch_size is not None:
        return ()
    # Epochs on a shared GPU have 0 GPUs, and the batch of one.
    steps = [(epoch, max(gpus, 1), batch) for epoch, gpus, batch in epochs.batches]
    return tuple(
        BatchChange(epoch, before * before_each, gpus * batch, gpus)
        for (_, before, before_each), (epoch, gpus, batch) in pairwise(steps)
        if before * before_each != gpus * batch
    )
