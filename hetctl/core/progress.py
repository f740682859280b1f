"""How far each member has come, folded from events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetctl.core.codec import decode
from hetctl.core.ends import FREE_NODE_FAILURES, Why
from hetctl.core.ensemble import Ensemble, Member
from hetctl.core.events import DRIVER, Event, read_folder
from hetctl.core.layout import RunFolder
from hetctl.core.profile import EpochResult, Progress


def progress_of(ensemble: Ensemble, events: Iterable[Event], retries: int) -> dict[str, Progress]:
    """Fold a run's events, in order of time, into the progress of every member.

    An epoch counts once, however often it is reported: a trainer that was killed between its
    checkpoint and its event reports the epoch again when it resumes.
    """
    members = {member.name: member for member in ensemble.members}
    progress = {name: Progress(name) for name in members}
    errors: dict[str, str] = {}
    for event in events:
        name = str(event.data.get("member")) if event.source == DRIVER else event.source
        if name not in progress:
            continue
        if event.kind == "failed":
            errors[name] = str(event.data.get("error", ""))
        if event.kind == "step_ended" and progress[name].active:
            progress[name] = _after_step(progress[name], members[name], event, errors.pop(name, ""), retries)
        else:
            progress[name] = _after(progress[name], event)
    return progress


def events_in(folder: RunFolder) -> list[Event]:
    """Read all events below a run's folder, in order of time."""
    events = [event for rounds in folder.rounds() for event in read_folder(rounds.events)]
    return sorted(events, key=lambda event: (event.time, event.source, event.seq))


def progress_in(folder: RunFolder, ensemble: Ensemble, retries: int) -> dict[str, Progress]:
    """Fold all events below a run's folder."""
    return progress_of(ensemble, events_in(folder), retries)


def _after(progress: Progress, event: Event) -> Progress:
    if event.kind == "epoch":
        return _with_epoch(progress, decode(EpochResult, dict(event.data)))
    if event.kind == "converged":
        return replace(progress, converged=str(event.data["reason"]))
    if event.kind == "stopped":
        return replace(progress, part_samples=int(event.data.get("part_samples", 0)))
    return progress


def _after_step(progress: Progress, member: Member, event: Event, error: str, retries: int) -> Progress:
    """Hold an end against the member, or not; `error` is what its trainer said of it."""
    why, cause = Why(event.data["why"]), str(event.data["cause"])
    if why is Why.OUT_OF_MEMORY:
        smaller = member.smaller_batch(progress.batch_size or member.batch_size)
        return replace(progress, batch_size=smaller) if smaller else replace(progress, failed=cause)
    nodes = progress.node_failures + (why is Why.NODE_FAILURE)
    counts = why in (Why.PROGRAM_ERROR, Why.KILLED) or nodes > max(progress.node_failures, FREE_NODE_FAILURES)
    failures = progress.failures + counts
    failed = (error or cause) if failures > retries else None
    return replace(progress, node_failures=nodes, failures=failures, failed=failed)


def _with_epoch(progress: Progress, result: EpochResult) -> Progress:
    if any(done.epoch == result.epoch for done in progress.epochs):
        return progress
    epochs = tuple(sorted((*progress.epochs, result), key=lambda done: done.epoch))
    return replace(progress, epochs=epochs, failures=0, part_samples=0)
