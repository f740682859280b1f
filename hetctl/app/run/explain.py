"""Explanation of a member's state from the run's events, its retries, and a plan of the work that is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hetctl.app.project import Project
from hetctl.app.run.continue_run import plan_of_rest
from hetctl.app.run.job_states import CONTINUES, CONTINUES_WITHIN_BUDGET
from hetctl.app.run.logs import tail_of
from hetctl.app.run.status import RunWatch
from hetctl.app.run.view import TRAINING, on_gpus
from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.events import DRIVER, Event, ExitReason
from hetctl.model.job import CANCELLED, RUNNING, STALLED, STOPPED, UNDER_WAY
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.run import RunSpec
from hetctl.model.run_results import Explanation
from hetctl.model.run_status import RunStatus
from hetctl.model.training_progress import EpochHistory, Progress
from hetctl.storage.event_files import read_events
from hetctl.storage.run_state import RunState

MOST_ENDS = 3
"""Last ends of tasks that are told."""
MOST_PLANNED = 1000
"""Members in training or waiting up to which the planner is asked again: with more it takes seconds."""
GO_ON = {
    CANCELLED: CONTINUES,
    STOPPED: CONTINUES_WITHIN_BUDGET,
    STALLED: "correct the cause; then `hetctl submit` continues the run",
}
"""Next step by the state of a run that does not go on by itself."""
RESUME = "`hetctl resume {run} {name}` trains it again"
NEXT_STEPS = {
    "failed": "`hetctl logs {run} {name}` shows its log; `hetctl retry {run} {name}` trains it again",
    "paused": RESUME,
    "cancelled": RESUME,
    "converged": "`hetctl change {run} {name} --max-epochs N`, or --patience or --target, lets it train on",
    TRAINING: "`hetctl logs {run} {name} -f` follows it",
}
"""Next step by the state of a member."""
NEXT_STEPS_OF_FAILED = {
    ExitReason.OUT_OF_MEMORY: (
        "give it a smaller batch_size, or a min_batch_size; `hetctl submit --new` starts another run"
    ),
    ExitReason.BAD_INPUT: (
        "correct its code and, once the run has no job, `hetctl retry {run} {name}` and `hetctl submit`;"
        " with a corrected ensemble file, `hetctl submit --new`"
    ),
}
"""Next step of a failed member, by the reason of its last end, where it is another."""


def explain_member(project: Project, run: str | None, name: str) -> Explanation:
    """Explain the state of a member of a run, by default the newest.

    Raises
    ------
    BadInputError
        If the run or the member does not exist, or the trial has not begun.
    """
    watch = RunWatch(project, run)
    record, _, view = watch.read()
    status, spec, state = watch.poll(0), record.spec, view.state
    if name not in status.states:
        raise BadInputError(
            f"run {status.run} has no member {name!r}", f"`hetctl status {status.run}` shows its members"
        )
    folder, member = project.home.run(status.run), spec.ensemble.member(name)
    shown, progress = status.states[name], state.progress[name]
    ends = [
        event
        for event in read_events(folder.events_of(DRIVER), {"task_ended"})
        if event.record.member == name and event.record.reason is not ExitReason.FINISHED
    ]
    reasons = [*_outcome(member, progress), *_tasks(state, name, shown, spec.site.device)]
    goes_on = shown in (TRAINING, "waiting")
    if goes_on and status.state != RUNNING:
        reasons.append(f"its run is {status.state}: {status.reason}")
    if goes_on and status.state in UNDER_WAY:
        counts = Counter(status.states.values())
        reasons += [f"of all members {counts[TRAINING]:,} train, and {counts['waiting']:,} wait"]
        if counts[TRAINING] + counts["waiting"] <= MOST_PLANNED:
            reasons += _planned(project, spec, state, name)
    reasons += _failures(progress, spec.retries, ends)
    return Explanation(
        *(status.run, name, shown, tuple(reasons)),
        log_tail=tail_of(folder.log_of(name), progress.failed or "") if ends else (),
        log=str(folder.log_of(name)),
        next_step=_next_step(status, name, shown, ends),
    )


def _outcome(member: Member, progress: Progress) -> Iterator[str]:
    if progress.failed:
        yield f"it failed: {progress.failed}"
    if progress.converged:
        yield f"its stop rule is met: {progress.converged}"
    rule, epochs = member.objective, EpochHistory.of(progress.epochs)
    best = epochs.best(rule.metric, rule.mode)
    shown = "" if best is None else f", best {rule.metric} {best:.4g}"
    yield f"it has {progress.last_epoch} of at most {progress.asked or member.stop.max_epochs} epochs{shown}"
    if progress.batch_size:
        yield f"it has run out of memory, and trains with a batch of {progress.batch_size} per GPU since"
    if progress.unfit:
        yield f"it ran out of memory or place {on_gpus(progress.unfit)}: it tries other numbers"


def _tasks(state: RunState, name: str, shown: str, device: str) -> Iterator[str]:
    rounds = state.tasks_of(name)
    if not rounds:
        yield "it has not trained yet"
        return
    index = max(rounds)
    task = rounds[index][-1]
    nodes = ", ".join(f"{place['node']}:{'+'.join(map(str, place['gpus']))}" for place in task.placement)
    verb = "has" if shown == TRAINING else "last had"
    word = "slot" if device == "slot" else "GPU"
    yield f"it {verb} {task.gpus} {word}{'s' * (task.gpus != 1)} in round {index}: {nodes}"


def _planned(project: Project, spec: RunSpec, state: RunState, name: str) -> Iterator[str]:
    """Yield the planner's reason for a member, if it were asked now about all that is left to train."""
    if spec.phases != (DATA_PARALLEL,):
        return
    try:
        with project.reading() as catalog:
            plan = plan_of_rest(project, catalog, spec, state, explain=True)
    except HetctlError as error:
        yield f"no plan of the rest can be made: {error.message}"
        return
    first = plan.rounds[0] if plan.rounds else None
    if first and name in first.reasons:
        yield f"planner {plan.planner}, asked now about all that is left: {first.reasons[name]}"
    begins = next((each for each in plan.rounds if name in {a.member for a in each.allocations}), None)
    if begins and begins.start_s:
        yield f"by that plan it starts {begins.start_s:,.0f} s after the first ones"


def _failures(progress: Progress, retries: int, ends: Sequence[Event]) -> Iterator[str]:
    # An input error fails it whatever is free.
    if progress.failures > retries or (progress.failures and not progress.failed):
        yield f"{progress.failures} failures of its own count since its last new epoch; {retries} are free"
    for event in ends[-MOST_ENDS:]:
        yield f"round {event.round} ended with {event.record.reason.value}: {event.record.description}"


def _next_step(status: RunStatus, name: str, shown: str, ends: Sequence[Event]) -> str:
    step = NEXT_STEPS.get(shown, GO_ON.get(status.state, ""))
    if shown == "failed" and ends:
        step = NEXT_STEPS_OF_FAILED.get(ends[-1].record.reason, step)
    return step.format(run=status.run, name=name)
