"""Results of a run and of its members, kept at the end of each job: commands on many runs read no events.

The first line of the file is about the run, so that a list of runs reads nothing else.
"""

from __future__ import annotations

import json
from collections import Counter

from hetctl.model.cost import energy_of
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER, REQUESTS
from hetctl.model.run import NOTHING_USED, RunSpec
from hetctl.model.run_results import MemberResult, RunResults, RunSummary
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochHistory
from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState
from hetctl.storage.snapshot import compact, from_row, row_of


def results_of(state: RunState, spec: RunSpec) -> RunResults:
    """Return the results in the state of a run."""
    begun = [member for member in spec.ensemble.members if state.progress[member.name].asked != 0]
    members = tuple(_result(state, member) for member in begun)
    return RunResults(summary_of(state, spec), members)


def summary_of(state: RunState, spec: RunSpec) -> RunSummary:
    """Return the results of a run as a whole, in its state."""
    begun = [member for member in spec.ensemble.members if state.progress[member.name].asked != 0]
    kinds = Counter((member.objective.metric, member.objective.mode) for member in begun)
    ((metric, mode), _), *_ = kinds.most_common(1) or [(("", "min"), 0)]
    known = [
        (best, member.name)
        for member in begun
        if (member.objective.metric, member.objective.mode) == (metric, mode)
        if (best := EpochHistory.of(state.progress[member.name].epochs).best(metric, mode)) is not None
    ]
    sign = -1.0 if mode == "max" else 1.0
    best, name = min(known, key=lambda each: sign * each[0], default=(None, ""))
    last = state.facts.last
    used = state.usage.used(last.time) if last else NOTHING_USED
    return RunSummary(
        members=len(begun),
        converged=sum(state.progress[member.name].converged is not None for member in begun),
        failed=sum(state.progress[member.name].failed is not None for member in begun),
        metric=metric,
        mode=mode,
        best=best,
        member=name,
        began_at=state.usage.began_at,
        gpu_seconds=used.gpu_seconds,
        cost=spec.cost(used.node_seconds),
        energy=energy_of(used.energy_j, spec.site.billing),
    )


def _result(state: RunState, member: Member) -> MemberResult:
    epochs, rule = EpochHistory.of(state.progress[member.name].epochs), member.objective
    best = epochs.best(rule.metric, rule.mode)
    first = next((done.epoch for done in epochs if done.metrics.get(rule.metric) == best), None)
    tasks = [task for of_round in state.tasks_of(member.name).values() for task in of_round]
    return MemberResult(
        *(member.name, rule.metric, rule.mode, best, None if best is None else first),
        epochs=state.progress[member.name].last_epoch,
        seconds=sum(task.ended_at - task.began_at for task in tasks if task.ended_at is not None),
        gpu_seconds=sum(task.gpu_seconds for task in tasks),
    )


def keep_results(folder: RunFolder, results: RunResults) -> None:
    """Write the results at the end of a job; OSError if the disk is full."""
    head = {**encode(results.summary), "event_bytes": _event_bytes(folder)}
    rows = [row_of(member) for member in results.members]
    write_private(folder.results, f"{json.dumps(head)}\n{compact(rows)}\n", durable=False)


def _event_bytes(folder: RunFolder) -> int:
    """Return the length of the files of which one grows with whatever happens to a run."""
    files = [folder.events_of(source) for source in (DRIVER, REQUESTS)]
    return sum(file.stat().st_size for file in files if file.exists())


def known_summary(folder: RunFolder) -> RunSummary | None:
    """Read the results of a run as a whole; None if a later job has run, or none has ended in order."""
    try:
        with folder.results.open("rb") as file:
            summary = decode(RunSummary, json.loads(file.readline()))
        is_last = summary.event_bytes == _event_bytes(folder)
    except (OSError, ValueError):
        return None
    return summary if is_last else None


def known_results(folder: RunFolder) -> RunResults | None:
    """Read the results of a run and its members; None as of `known_summary`."""
    summary = known_summary(folder)
    try:
        rows = json.loads(folder.results.read_bytes().partition(b"\n")[2]) if summary else []
        members = tuple(from_row(MemberResult, row) for row in rows)
    except (OSError, ValueError, TypeError):
        return None
    return RunResults(summary, members) if summary else None
