"""Results of a run and of its members, kept with each snapshot: commands on many runs read no events.

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
        event_bytes=state.event_bytes,
        predicted_cost=spec.predicted_cost,
    )


def _result(state: RunState, member: Member) -> MemberResult:
    epochs, rule = EpochHistory.of(state.progress[member.name].epochs), member.objective
    tasks = [task for of_round in state.tasks_of(member.name).values() for task in of_round]
    return MemberResult(
        *(member.name, rule.metric, rule.mode),
        best=epochs.best(rule.metric, rule.mode),
        epoch=epochs.best_epoch(rule.metric, rule.mode),
        epochs=state.progress[member.name].last_epoch,
        seconds=sum(task.ended_at - task.began_at for task in tasks if task.ended_at is not None),
        gpu_seconds=sum(task.gpu_seconds for task in tasks),
    )


def keep_results(folder: RunFolder, results: RunResults) -> None:
    """Write the results of a run; OSError if the disk is full."""
    rows = [row_of(member) for member in results.members]
    text = f"{json.dumps(encode(results.summary))}\n{compact(rows)}\n"
    write_private(folder.results, text, durable=False)


def _event_bytes(folder: RunFolder) -> int:
    """Return the present length of the files of drivers and of requests."""
    files = [folder.events_of(source) for source in (DRIVER, REQUESTS)]
    return sum(file.stat().st_size for file in files if file.exists())


def noted_summary(folder: RunFolder) -> RunSummary | None:
    """Read the results of a run as a whole as its driver has last noted them; None if it has noted none."""
    try:
        with folder.results.open("rb") as file:
            return decode(RunSummary, json.loads(file.readline()))
    except (OSError, ValueError):
        return None


def known_summary(folder: RunFolder) -> RunSummary | None:
    """Read the results of a run as a whole; None if the run has gone on since they were noted."""
    summary = noted_summary(folder)
    return summary if summary and summary.event_bytes == _event_bytes(folder) else None


def members_noted_with(folder: RunFolder, summary: RunSummary) -> tuple[MemberResult, ...] | None:
    """Read the results of members that were noted together with those of a run; None if others were."""
    try:
        head, _, rows = folder.results.read_bytes().partition(b"\n")
        if decode(RunSummary, json.loads(head)) == summary:
            return tuple(from_row(MemberResult, row) for row in json.loads(rows))
    except (OSError, ValueError, TypeError):
        pass
    return None
