"""A run's rounds, steps and members as people look at them, kept up to date with its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from hetctl.core.ensemble import Member
from hetctl.core.events import DRIVER, Event
from hetctl.core.layout import RunFolder
from hetctl.core.plan import Plan
from hetctl.core.profile import EpochResult, Progress
from hetctl.core.pulse import Pulse
from hetctl.core.run import RunSpec
from hetctl.core.run_facts import RunFacts
from hetctl.core.run_state import RunState
from hetctl.core.status import MemberStatus, RoundSpan, StepSpan
from hetctl.core.steps import Step, StepKey
from hetctl.runner.logs import tail_of
from hetctl.runner.run_rates import rate_warnings, rates_of, wrong_rates

TRAINING = "training"


class RunView:
    """The lines that are shown of a run; only those that have changed since the last look are made anew."""

    def __init__(self, folder: RunFolder, spec: RunSpec, plan: Plan) -> None:
        self.folder, self.spec = folder, spec
        self._members = {member.name: member for member in spec.ensemble.members}
        self._profiles = {profile.member: profile for profile in spec.profiles}
        self._predicted_s = {forecast.member: forecast.training_s for forecast in plan.members}
        self._state = RunState(folder, spec.ensemble, spec.retries)
        self._steps: dict[int, dict[str, tuple[Step, ...]]] = defaultdict(dict)
        self._spans: dict[int, dict[str, tuple[StepSpan, ...]]] = defaultdict(dict)
        self._rounds_of: dict[str, list[int]] = defaultdict(list)
        self._lines: dict[str, MemberStatus] = {}
        self._open: set[StepKey] = set()
        self._pulses: Mapping[str, Pulse] = {}
        self._wrong: set[str] = set()
        self._changed: set[str] = set()
        self._shown: tuple[float, bool, Sequence[int]] | None = None

    @property
    def facts(self) -> RunFacts:
        """The jobs and the rounds of the run, its first and its last event."""
        return self._state.facts

    @property
    def progress(self) -> Mapping[str, Progress]:
        """By member, in the ensemble's order."""
        return self._state.progress

    @property
    def history(self) -> dict[str, tuple[EpochResult, ...]]:
        """The finished epochs of each member."""
        return {name: progress.epochs for name, progress in self.progress.items()}

    def look(self) -> None:
        """Take in what is new on the disk."""
        news = self._state.look()
        for (index, name), steps in news.steps.items():
            if name not in self._steps[index]:
                self._rounds_of[name] = sorted([*self._rounds_of[name], index])
            self._steps[index][name] = steps
            self._open.discard((index, name))
            if steps and steps[-1].ended_at is None:
                self._open.add((index, name))
        self._changed |= news.members
        self._changed |= {name for _, name in news.steps}

    def show(self, start: float, under_way: bool, pulses: Mapping[str, Pulse]) -> None:
        """Bring what is shown up to date.

        Parameters
        ----------
        start : float
            From when on seconds count.
        under_way : bool
            Whether steps without an end are running; else they ended with their last event.
        pulses : mapping of str to Pulse
            Live metrics of members in training.
        """
        self._pulses = pulses
        shown = start, under_way, tuple(self._begun)
        open_steps = {name for _, name in self._open}
        changed = self._changed if under_way else self._changed | open_steps
        if shown != self._shown:
            changed = set(self._members)
        self._shown, self._changed = shown, set()
        for name in changed & self._members.keys() if self._lines else self._members:
            self._show_member(self._members[name], start, under_way)
        for name in open_steps - changed:
            self._show_pulse(name)

    @property
    def members(self) -> tuple[MemberStatus, ...]:
        """In the ensemble's order."""
        return tuple(self._lines.values())

    @property
    def steps(self) -> tuple[StepSpan, ...]:
        """By round, and in a round by start."""
        rounds = (chain.from_iterable(self._spans[index].values()) for index in sorted(self._spans))
        return tuple(chain.from_iterable(sorted(r, key=lambda s: (s.start_s, s.member)) for r in rounds))

    def rounds(self, start: float) -> tuple[RoundSpan, ...]:
        """Return the rounds that have begun."""
        return tuple(_round_span(index, self.facts.rounds[index], start) for index in self._begun)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts about the rates."""
        return rate_warnings(line for name, line in self._lines.items() if name in self._wrong)

    @property
    def _begun(self) -> list[int]:
        return sorted(index for index, told in self.facts.rounds.items() if "round_started" in told)

    def _show_member(self, member: Member, start: float, under_way: bool) -> None:
        name = member.name
        for index in self._rounds_of[name]:
            self._spans[index][name] = self._spans_of(index, name, start, under_way)
        own = [span for index in self._rounds_of[name] for span in self._spans[index][name]]
        self._lines[name] = self._line(member, self.progress[name], own)
        self._wrong.discard(name)
        if wrong_rates(self._lines[name]):
            self._wrong.add(name)

    def _show_pulse(self, name: str) -> None:
        line = self._lines[name]
        if line.state == TRAINING and (pulse := self._pulses.get(name)) != line.pulse:
            self._lines[name] = replace(line, pulse=pulse)

    def _spans_of(self, index: int, name: str, start: float, under_way: bool) -> tuple[StepSpan, ...]:
        steps = self._steps[index][name]
        last_at = self._last_heard(index, name) if (index, name) in self._open else start
        return tuple(
            span for step in steps for span in step_spans(step, index, name, start, under_way, last_at)
        )

    def _last_heard(self, index: int, name: str) -> float:
        """Return when a member in training, or the driver of its round, was last heard of."""
        reports = self._state.reports
        heard = (reports[index, source].last_at for source in (name, DRIVER))
        return max(at for at in heard if at is not None)

    def _line(self, member: Member, progress: Progress, own: Sequence[StepSpan]) -> MemberStatus:
        held: dict[int, int] = defaultdict(int)
        for step in own:
            held[step.round] += len(step.gpus)
        metrics = [epoch.metrics[member.stop.metric] for epoch in progress.epochs]
        state = _state_of(progress, own)
        profile = self._profiles.get(member.name)
        return MemberStatus(
            member=member.name,
            state=state,
            gpus_by_round=tuple(held.get(index, 0) for index in self._begun),
            epochs=len(progress.epochs),
            max_epochs=member.stop.max_epochs,
            metric=member.stop.metric,
            best=_best(metrics, member.stop.mode),
            predicted_s=self._predicted_s.get(member.name),
            measured_s=_seconds(own),
            cause=progress.failed or progress.converged,
            log_tail=tail_of(self.folder.log_of(member.name)) if progress.failed else (),
            rates=rates_of(member, profile, progress, self.spec.site),
            pulse=self._pulses.get(member.name) if state == TRAINING else None,
        )


def step_spans(
    step: Step, index: int, member: str, start: float, under_way: bool, last_at: float
) -> Iterable[StepSpan]:
    """Return a step's time on each of its nodes; one that a killed job left open ends with `last_at`."""
    open_until = None if under_way else last_at - start
    for place in step.placement:
        yield StepSpan(
            member=member,
            round=index,
            node=place["node"],
            gpus=tuple(place["gpus"]),
            start_s=step.began_at - start,
            end_s=open_until if step.ended_at is None else step.ended_at - start,
            exit_code=step.exit_code,
        )


def _round_span(index: int, told: Mapping[str, Event], start: float) -> RoundSpan:
    begun, ended = told["round_started"], told.get("round_ended")
    return RoundSpan(
        index=index,
        job=int(begun.data["job"]),
        start_s=begun.time - start,
        end_s=ended.time - start if ended else None,
        predicted_s=float(begun.data["predicted_s"]),
        ended_by=str(ended.data["ended_by"]) if ended else None,
    )


def _state_of(progress: Progress, steps: Sequence[StepSpan]) -> str:
    if progress.failed:
        return "failed"
    if progress.converged:
        return "converged"
    return TRAINING if any(step.end_s is None for step in steps) else "waiting"


def _best(metrics: Sequence[float], mode: str) -> float | None:
    if not metrics:
        return None
    return max(metrics) if mode == "max" else min(metrics)


def _seconds(steps: Sequence[StepSpan]) -> float | None:
    """Sum over rounds; a step on several nodes counts once."""
    by_round = {step.round: step.end_s - step.start_s for step in steps if step.end_s is not None}
    return sum(by_round.values()) if by_round else None
