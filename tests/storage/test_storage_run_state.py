"""The state of a run does not depend on the order or the portions in which events are read."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_folds import progress_in, progress_of, usage_of

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import DRIVER, Event, ExitReason, in_order
from hetctl.model.profile import MemberProfile
from hetctl.perf.workloads import Workloads, active_workloads
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import ProgressFold
from hetctl.storage.run_state import RunState
from hetctl.storage.task_fold import TaskFold, TaskReport, UsageFold, report_of

RULE = StopRule("loss", max_epochs=6, patience=3)
MEMBERS = (
    Member("a", batch_size=64, min_batch_size=16, stop=RULE),
    Member("b", stop=RULE),
    *(Member(name, stop=StopRule("loss", max_epochs=60, min_delta=0.01)) for name in "cdef"),
)
ENSEMBLE = Ensemble("e", "pytorch", Functions("m:i", "m:m"), MEMBERS, "/x")
PROFILES = {m.name: MemberProfile(m.name, {1: 10.0, 2: 18.0}, None, 100) for m in MEMBERS}
RETRIES = 1
NAMES = [member.name for member in MEMBERS]
NOW = 1000.0

ends = st.builds(
    lambda member, reason: (
        "task_ended",
        {"member": member, "exit_code": 1, "reason": reason.value, "description": reason.name},
    ),
    st.sampled_from(NAMES),
    st.sampled_from(ExitReason),
)
starts = st.builds(
    lambda member, gpus: ("task_started", {"member": member, "gpus": gpus, "placement": []}),
    st.sampled_from(NAMES),
    st.integers(1, 4),
)
jobs = st.just(("job_started", {"job": 0}))
rounds = st.just(("round_started", {"job": 0, "predicted_s": 1.0}))
epochs = st.builds(
    lambda number, noise, new: (
        "epoch",
        {"epoch": number, "metrics": {"loss": 1 / number + noise / 100}, "duration_s": 1.0, "gpus": 1}
        | {"finished_at": 0.0, "rate": 10.0 + noise, "batch_size": 32}
        | ({"evaluate_s": 1.0} if new else {}),
    ),
    st.integers(1, 7),
    st.integers(0, 9),
    st.booleans(),
)
others = st.sampled_from(
    [
        ("first_step", {"startup_s": 1.0, "peak_memory_bytes": 5}),
        ("converged", {"reason": "4 epochs done"}),
        ("converged", {"reason": "loss reached 0.1"}),
        ("stopped", {"reason": "deadline", "part_samples": 30}),
        ("failed", {"error": "no such layer", "reason": "program-error", "peak_memory_bytes": 7}),
    ]
)
files = st.dictionaries(
    st.tuples(st.integers(0, 3), st.sampled_from([DRIVER, *NAMES, "stranger"])),
    st.lists(st.floats(0, 900), max_size=9),
    max_size=16,
)


@st.composite
def histories(draw):
    """Draw files of events, each in order of its lines, whose times need not be."""
    kinds = {DRIVER: st.one_of(ends, starts, jobs, rounds)}
    drawn = draw(files)
    return [
        [
            Event(
                source, seq, *_kind_time_data(draw(kinds.get(source, st.one_of(epochs, others))), at), index
            )
            for seq, at in enumerate(times)
        ]
        for (index, source), times in drawn.items()
    ]


def _kind_time_data(told, at):
    kind, data = told
    return kind, at, data


@st.composite
def pieces(draw, history):
    """Read files in pieces, in any order; of each file the lines in order."""
    unread, read = [list(file) for file in history if file], []
    while unread:
        piece = []
        for _ in range(draw(st.integers(1, 4))):
            if unread:
                file = draw(st.sampled_from(unread))
                count = draw(st.integers(1, len(file)))
                piece += file[:count]
                del file[:count]
                unread = [rest for rest in unread if rest]
        read.append(piece)
    return read


@given(st.data())
def test_the_order_of_files_does_not_matter(data):
    history = data.draw(histories())
    once = in_order(event for file in history for event in file)
    progress, tasks, usage = ProgressFold(ENSEMBLE, RETRIES), TaskFold(), UsageFold()
    workloads = Workloads(ENSEMBLE, PROFILES, 4)
    workloads.update(progress.progress)
    for piece in data.draw(pieces(history)):
        changed = progress.add(piece)
        workloads.update({name: progress.progress[name] for name in changed})
        usage.add(piece, tasks.add(piece))
    assert progress.progress == progress_of(ENSEMBLE, once, RETRIES)
    assert list(progress.progress) == NAMES
    assert usage.used(NOW) == usage_of(once, NOW)
    assert tuple(workloads.left.values()) == active_workloads(ENSEMBLE, PROFILES, progress.progress, 4)


@given(st.data())
def test_unreported_members_have_not_changed(data):
    history = data.draw(histories())
    fold = ProgressFold(ENSEMBLE, RETRIES)
    for piece in data.draw(pieces(history)):
        before = dict(fold.progress)
        changed = fold.add(piece)
        assert {name for name in NAMES if fold.progress[name] != before[name]} <= changed


@given(st.lists(st.tuples(st.floats(0, 900), st.one_of(epochs, others)), max_size=9))
def test_a_report_has_the_last_values(told):
    events = [Event("a", seq, kind, at, data) for seq, (at, (kind, data)) in enumerate(told)]
    report = report_of(events)
    trained = [event for event in events if event.kind == "epoch" and "evaluate_s" in event.data]
    begun = [event.time for event in events if event in trained or event.kind == "first_step"]
    assert report.rate == (trained[-1].data["rate"] if trained else None)
    assert report.epoch_since == (begun[-1] if begun else None)
    assert report.last_at == max((event.time for event in events), default=None)
    assert len(report.stop_reasons) == sum(event.kind == "stopped" for event in events)
    left = [event.kind for event in events if event.kind in ("converged", "stopped")]
    assert report.exit_reason == (
        {"converged": ExitReason.FINISHED, "stopped": ExitReason.STOPPED}[left[-1]] if left else None
    )


def test_without_events_nothing_is_reported():
    assert report_of([]) == TaskReport()


def test_each_look_reads_what_was_written_since_the_last(tmp_path):
    run = RunFolder(tmp_path)
    driver, trainer = (EventWriter(run.create().events, name, 0) for name in (DRIVER, "a"))
    driver.write("round_started", job=0, predicted_s=1.0, members=["a"])
    driver.write("task_started", member="a", gpus=2, placement=[])
    state = RunState(run, ENSEMBLE, RETRIES)
    assert state.refresh() == set(NAMES)
    assert state.refresh() == set()
    trainer.write("first_step", startup_s=1.0)
    trainer.write(
        "epoch",
        epoch=1,
        metrics={"loss": 1.0},
        duration_s=1.0,
        gpus=2,
        finished_at=0.0,
        rate=7.0,
        evaluate_s=0.1,
    )
    assert state.refresh() == {"a"}
    assert len(state.progress["a"].epochs) == 1
    assert state.reports[0, "a"].rate == 7.0
    driver.write("task_ended", member="a", exit_code=1, reason="killed", description="killed by SIGKILL")
    news = state.refresh()
    assert (news, list(state.tasks_of("a")), state.usage.open_tasks) == ({"a"}, [0], {})
    assert state.progress["a"].failures == 1
    assert state.progress == progress_in(run, ENSEMBLE, RETRIES)
    (task,) = state.tasks_of("a")[0]
    used = state.usage.used(NOW)
    assert (used.rounds, used.gpu_seconds) == (1, pytest.approx(task.gpu_seconds))


@pytest.mark.parametrize(
    ("lines", "node_seconds"),
    [
        ([(DRIVER, 0, "job_started", 2)], 2 * 100),
        ([(DRIVER, 0, "job_started", 2), (DRIVER, 30, "job_ended", 0)], 2 * 30),
        # A killed driver reports no end: its job counts until its last event.
        ([(DRIVER, 0, "job_started", 2), ("a", 20, "started", 0), (DRIVER, 40, "job_started", 3)], 40 + 180),
    ],
)
def test_node_seconds_are_those_of_jobs_from_start_to_end(lines, node_seconds):
    usage = UsageFold()
    for seq, (source, at, kind, nodes) in enumerate(lines):
        names = [{"name": f"n{number}", "gpus": [0]} for number in range(nodes)]
        data = {"job": 0, "nodes": names, "reason": "", "epochs": 0, "part_samples": 0}
        usage.add([Event(source, seq, kind, float(at), data)], {})
    again = UsageFold()
    again.restore(json.loads(json.dumps(usage.rows())))
    assert usage.used(100.0).node_seconds == again.used(100.0).node_seconds == node_seconds


EDITED = (
    Member("new", stop=RULE),
    *(Member(name, stop=StopRule("loss", max_epochs=9, patience=4)) for name in "ab"),
    *MEMBERS[3:],
)


@given(st.data(), st.integers(0, 2))
def test_a_state_with_edited_members_is_that_of_a_reader_who_begins_with_them(data, retries):
    edited = Ensemble("e", "pytorch", Functions("m:i", "m:m"), EDITED, "/x")
    lines = defaultdict(list)
    for file in data.draw(histories()):
        lines[file[0].source if file else DRIVER] += [
            json.dumps({"kind": e.kind, "time": e.time, "round": e.round, **e.data}) for e in file
        ]
    # Files are read again from the start of a task on.
    starts = [{"kind": "task_started", "time": 950.0, "round": 9, "member": m.name} for m in EDITED]
    last = [json.dumps({**start, "gpus": 1, "placement": []}) for start in starts]
    with TemporaryDirectory() as folder:
        run = RunFolder(Path(folder)).create()
        state = RunState(run, ENSEMBLE, RETRIES)
        for source, written in lines.items():
            seen = data.draw(st.integers(0, len(written)))
            _append(run, source, written[:seen])
            lines[source] = written[seen:]
        state.refresh()
        before = dict(state.progress)
        state.edit(edited, retries)
        for source, written in {**lines, DRIVER: [*lines[DRIVER], *last]}.items():
            _append(run, source, written)
        changed = state.refresh()
        assert [
            name for name in state.progress.keys() - changed if state.progress[name] != before[name]
        ] == []
        fresh = RunState(run, edited, retries)
        fresh.refresh()
        assert state.progress == fresh.progress
        assert list(state.progress) == [member.name for member in EDITED]
        state.keep()
        kept = RunState(run, edited, retries)
        kept.refresh()
        assert kept.progress == fresh.progress


def _append(run, source, lines):
    with run.events_of(source).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
