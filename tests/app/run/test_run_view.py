"""What is shown of a run while it is watched is what a first look at it shows."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pipelined_run import stages, task_started

from hetctl.app.project import Project
from hetctl.app.run import status
from hetctl.app.run.explain import explain_member
from hetctl.app.run.select_run import record_of
from hetctl.app.run.status import RunWatch, compared_status
from hetctl.app.run.view import _held, _seconds, batch_changes, rate_warning, rates_of, wrong_rates
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import DRIVER
from hetctl.model.job import Job, JobState, JobStatus
from hetctl.model.plan import Plan
from hetctl.model.profile import MemberProfile
from hetctl.model.run import LOCKSTEP, NOTHING_USED, RunSpec
from hetctl.model.run_status import BatchChange, MemberRate, MemberStatus, TaskSpan, foremost
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochHistory, EpochResult, LiveMetrics, Progress, TimedRate
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home
from hetctl.storage.run_files import write_live_metrics, write_spec

RUN = "trio-001"
SITE = Site("local", "local", "local", 1, 4, 4, 2**30, (Queue("local"),), device="slot")
NAMES = ("a", "b", "c")
MEMBERS = tuple(Member(name, stop=StopRule("loss", max_epochs=9)) for name in NAMES)
JOB = Job(0, "hetctl-trio", "17", JobState.RUNNING, 1, 3600, 0.0)


class Silent:
    """A batch system that says of each job what the catalog has it for."""

    @staticmethod
    def usual(ids):
        return dict.fromkeys(ids, JobStatus(JobState.RUNNING))

    def statuses(self, ids):
        return self.usual(ids)


@pytest.fixture
def project(tmp_path, monkeypatch):
    home = Home(tmp_path / ".hetctl")
    spec = RunSpec(
        run=RUN,
        ensemble=Ensemble("trio", "pytorch", Functions("m:i", "m:m"), MEMBERS, "/x"),
        site=SITE,
        planner="fluid",
        gpus=4,
        queue="local",
        wall_s=3600,
        grace_s=60,
        profiles=tuple(MemberProfile(name, {1: 10.0, 2: 19.0}, None, 100) for name in NAMES),
        checkpoints=str(home.path / "checkpoints"),
    )
    home.run(RUN).create()
    write_spec(home.run(RUN), spec)
    with Catalog.open(home.catalog) as catalog:
        catalog.add_run(spec, Plan("fluid", "makespan", 4, 4, 100.0, 90.0, 1.1, ()), 1.0, JOB)
        catalog.set_run_state(RUN, "running")
    monkeypatch.setattr(Project, "batch_system", lambda *_: Silent())
    return Project(tmp_path, home)


def course(project):
    """Have things happen in the run, one after another."""
    run = project.home.run(RUN)

    def write(index, source, kind, **data):
        EventWriter(run.events, source, index).write(kind, **data)

    def started(index, *members):
        write(index, DRIVER, "round_started", job=0, predicted_s=10.0, members=members)
        for gpu, name in enumerate(members):
            placement = [{"node": "n", "gpus": [gpu]}]
            write(index, DRIVER, "task_started", member=name, gpus=1, placement=placement)

    def ended(index, name, reason="told"):
        write(
            index,
            DRIVER,
            "task_ended",
            member=name,
            exit_code=0,
            reason=reason,
            description=reason,
            fault=False,
        )

    def epoch(index, name, number, rate):
        result = {"epoch": number, "metrics": {"loss": 1 / number}, "duration_s": 1.0, "gpus": 1}
        write(index, name, "epoch", **result, finished_at=0.0, rate=rate, batch_size=32, evaluate_s=0.1)

    yield
    write(0, DRIVER, "job_started", job=0)
    yield
    started(0, "a", "b")
    yield
    write(0, "a", "first_step", startup_s=1.0)
    yield
    write_live_metrics(run.job(0).live_metrics, {"a": LiveMetrics(time.time(), 1, 10, 100, 9.0)})
    yield
    epoch(0, "a", 1, 2.0)
    epoch(0, "b", 1, 10.0)
    yield
    ended(0, "a")
    started(1, "c")
    yield
    epoch(1, "c", 1, 11.0)
    write(1, "c", "converged", reason="done")
    yield
    ended(1, "c", "finished")
    write(1, DRIVER, "round_ended", ended_by="converged")
    yield
    run.log_of("b").write_text("no such layer\n")
    for _ in range(3):
        write(0, "b", "failed", error="no such layer")
        ended(0, "b", "program-error")
    yield
    write(0, DRIVER, "round_ended", ended_by="failed")
    write(0, DRIVER, "job_ended", job=0, reason="finished")
    yield
    write(2, DRIVER, "job_started", job=1)
    started(2, "a")
    yield


def two_rounds(project, *, requeued):
    """Have a driver be killed in round 0; if the job is `requeued`, another one start round 1 in it."""
    run = project.home.run(RUN)
    for index, member in enumerate(("a", "b")[: 1 + requeued]):
        driver = EventWriter(run.events, DRIVER, index)
        driver.write("job_started", job=0)
        driver.write("round_started", job=0, predicted_s=1.0, members=[member])
        driver.write("task_started", member=member, gpus=1, placement=[{"node": "n", "gpus": [0]}])


def test_tasks_and_rounds_of_a_job_that_is_over_have_ended(project, monkeypatch):
    two_rounds(project, requeued=False)
    running = RunWatch(project, RUN).poll()
    assert (running.states["a"], running.tasks[0].end_s, running.rounds[0].ended_by) == (
        "training",
        None,
        None,
    )
    failed = {JOB.batch_id: JobStatus(JobState.FAILED, 137)}
    # Another job waits, with which the run goes on.
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_job(RUN, replace(JOB, number=1, name="hetctl-trio-1", batch_id="18"))
    monkeypatch.setattr(Silent, "statuses", lambda _, ids: Silent.usual(ids) | failed)
    over = RunWatch(project, RUN).poll()
    assert (over.states["a"], over.tasks[0].failed, over.rounds[0].ended_by) == (
        "waiting",
        True,
        "driver-lost",
    )
    assert over.tasks[0].end_s == over.rounds[0].end_s


def test_tasks_from_before_a_job_was_requeued_have_ended(project):
    two_rounds(project, requeued=True)
    status = RunWatch(project, RUN).poll()
    assert status.states == {"a": "waiting", "b": "training", "c": "waiting"}
    assert [(task.member, task.failed, task.end_s is None) for task in status.tasks] == [
        ("a", True, False),
        ("b", False, True),
    ]
    assert [span.ended_by for span in status.rounds] == ["driver-lost", None]


def unhurried(status):
    """Return a status without what depends on the moment of the look."""
    return replace(status, measured_s=0.0, used=NOTHING_USED)


def assert_cut(cut, whole):
    """Hold that a look at some members tells the same of them, and what is told of all."""
    names = [member.member for member in cut.members]
    assert names == list(foremost(whole.states, 2))
    assert cut.members == tuple(member for member in whole.members if member.member in names)
    assert cut.tasks == tuple(task for task in whole.tasks if task.member in names)
    assert cut.history == {name: whole.history[name] for name in names}
    assert (cut.states, cut.warnings, cut.rounds) == (whole.states, whole.warnings, whole.rounds)


def test_a_watched_run_is_shown_as_at_a_first_poll(project):
    watch, states = RunWatch(project, RUN), set()
    for _ in course(project):
        seen = watch.poll()
        assert unhurried(seen) == unhurried(RunWatch(project, RUN).poll())
        assert_cut(RunWatch(project, RUN).poll(2), seen)
        assert seen.states == {member.member: member.state for member in seen.members}
        states |= set(seen.states.values())
    assert states == {"waiting", "training", "converged", "failed"}
    assert [len(member.gpus_by_round) for member in seen.members] == [3, 3, 3]
    # The log has no line that the reason does not say.
    assert (seen.members[1].reason, seen.members[1].log_tail) == ("no such layer", ())
    assert Path(seen.members[1].log).read_text().strip() == "no such layer"
    assert "a on 1 planned 10, seen 2 samples/s" in seen.warnings[0]


def test_members_in_lockstep_are_not_off_their_rates(project):
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_spec(replace(catalog.run(RUN).spec, sharing=LOCKSTEP))
    for _ in course(project):
        seen = RunWatch(project, RUN).poll()
    assert (seen.members[0].rates[0].seen, seen.warnings) == (2.0, ())


def test_what_a_killed_job_left_open_ends_when_no_job_is_left(project):
    watch = RunWatch(project, RUN)
    for _ in course(project):
        running = watch.poll()
    assert [task.end_s for task in running.tasks][-1] is None
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_job(RUN, replace(JOB, state=JobState.VANISHED, ended_at=9.0))
        catalog.set_run_state(RUN, "stopped")
    stopped = watch.poll()
    assert all(task.end_s is not None for task in stopped.tasks)
    assert stopped == RunWatch(project, RUN).poll()


def test_looks_read_only_what_is_new(project, monkeypatch):
    steps = course(project)
    for _ in range(8):
        next(steps)
    watch = RunWatch(project, RUN)
    watch.poll()
    monkeypatch.setattr(status, "known_run", lambda *_: pytest.fail("read the catalog again"))
    read, really = [], os.pread

    def noted(descriptor, size, offset):
        found = really(descriptor, size, offset)
        read.extend([found] if size > 1 else [])  # a writer looks at the last byte
        return found

    monkeypatch.setattr(os, "pread", noted)
    watch.poll()
    assert b"".join(read) == b""
    next(steps)
    watch.poll()
    assert [line.split(b'"')[3] for line in b"".join(read).splitlines()] == [b"task_ended", b"round_ended"]


def test_rates_are_profiled_planned_and_of_the_last_epochs():
    profile = MemberProfile("a", {1: 100.0, 2: 150.0}, None, 1000, seen_rates={"": {1: 90.0}})
    rates = ((1, 70.0), (1, 70.0), (2, 130.0), (2, 130.0))
    epochs = (
        EpochResult(n, {}, 1000 / rate, gpus, float(n), rate, 32) for n, (gpus, rate) in enumerate(rates, 1)
    )
    progress = Progress("a", tuple(epochs))
    assert rates_of(MEMBERS[0], profile, progress) == (
        MemberRate(1, None, 100.0, 90.0, 70.0),
        MemberRate(2, None, 150.0, pytest.approx(135.0), 130.0),
    )
    assert rates_of(MEMBERS[0], None, Progress("a")) == (MemberRate(1, None, None, None, None),)


def test_a_rate_on_a_part_of_a_gpu_is_seen_while_it_is_the_newest():
    profile = MemberProfile("a", {1: 100.0}, None, 1000)
    epochs = EpochHistory.of([EpochResult(1, {}, 10.0, 1, 1.0, 90.0, 32)])
    shared = epochs.with_rate(TimedRate(30.0, 0, 32, None, 0.01, 2.0))
    rates = rates_of(MEMBERS[0], profile, Progress("a", shared))
    line = MemberStatus("a", "training", (1,), 1, 2, "loss", None, None, None, rates=rates)
    assert line.last_rate == MemberRate(1, None, 100.0, 100.0, 30.0)
    assert wrong_rates("a", rates) == []
    alone = shared.plus([EpochResult(2, {}, 10.0, 1, 3.0, 94.0, 32)])
    rates = rates_of(MEMBERS[0], profile, Progress("a", alone))
    assert replace(line, rates=rates).last_rate == MemberRate(1, None, 100.0, 100.0, 92.0)


def test_no_profile_has_the_rate_of_several_types_at_once():
    by_type = {"P100": {1: 100.0, 2: 200.0}, "V100": {1: 300.0, 2: 600.0}}
    profile = MemberProfile("a", by_type["P100"], None, 1000, gpu_type="P100", rates_by_type=by_type)
    progress = Progress("a", (EpochResult(1, {}, 2.5, 2, 1.0, 400.0, 32),))
    rates = rates_of(MEMBERS[0], profile, progress)
    assert rates[-1] == MemberRate(2, None, None, None, 400.0)
    assert wrong_rates("a", rates) == []


def test_a_plan_whose_rates_were_off_by_more_than_a_fifth_says_so():
    near = MemberRate(1, None, None, 118.0, 100.0)
    far = MemberRate(2, None, None, 593.0, 1300.0)
    assert wrong_rates("a", [near, replace(far, planned=None), replace(far, seen=None)]) == []
    (wrong,) = wrong_rates("a", [near, far])
    assert "a on 2" in wrong
    assert rate_warning([wrong] * 1020).count(wrong) == 20
    assert "1,000 more" in rate_warning([wrong] * 1020)


def test_numbers_of_gpus_that_are_too_small_for_a_member_are_told(project):
    events = EventWriter(project.home.run(RUN).events, DRIVER, 0)
    events.write("job_started", job=0)
    events.write("task_started", member="a", gpus=1, placement=[{"node": "n", "gpus": [0]}])
    end = {"member": "a", "exit_code": 71, "reason": "out-of-memory", "description": "out of memory"}
    events.write("task_ended", **end, unfit_gpus=1)
    (told,) = [text for text in status.run_status(project, None).warnings if "out of memory" in text]
    assert told == "out of memory or place at a first start: a on 1 GPU; these try other numbers"
    reasons = explain_member(project, None, "a").reasons
    assert "it ran out of memory or place on 1 GPU: it tries other numbers" in reasons
    events.write("task_ended", **end, unfit_gpus=4, gpu_type="V100")
    events.write("task_ended", **end, unfit_gpus=2, gpu_type="V100")
    reasons = explain_member(project, None, "a").reasons
    assert any("on 1 GPU and on 2 and 4 GPUs of type V100" in reason for reason in reasons)


def test_the_next_step_after_an_input_error_is_to_correct_it(project):
    folder = project.home.run(RUN)
    events = EventWriter(folder.events, DRIVER, 0)
    events.write("job_started", job=0)
    events.write("task_started", member="a", gpus=1, placement=[{"node": "n", "gpus": [0]}])
    EventWriter(folder.events, "a", 0).write("failed", error="no such metric", reason="bad-input")
    events.write("task_ended", member="a", exit_code=65, reason="bad-input", description="wrong")
    told = explain_member(project, None, "a")
    assert (told.state, told.reasons[0]) == ("failed", "it failed: no such metric")
    assert not any("are free" in reason for reason in told.reasons)
    assert told.next_step.startswith(f"correct its code and, once the run has no job, `hetctl retry {RUN} a`")


def test_more_gpus_and_smaller_batches_change_the_global_batch():
    # The first epoch is one on a shared GPU.
    sizes = ((0, 32), (1, 32), (2, 32), (4, 16), (1, None), (1, 16))
    epochs = EpochHistory.of(
        EpochResult(number, {}, 1.0, gpus, 0.0, batch_size=batch)
        for number, (gpus, batch) in enumerate(sizes, start=1)
    )
    assert batch_changes(Member("m"), epochs) == (BatchChange(3, 32, 64, 2), BatchChange(6, 64, 16, 1))
    assert batch_changes(Member("m", global_batch_size=64), epochs) == ()


def test_a_member_holds_one_gpu_in_a_round_of_many_visits():
    """And its time is that of all its visits; a task on two nodes has the GPUs of both, and counts once."""
    visits = [TaskSpan("m0", 0, "a", (0,), start_s, start_s + 2.0, 0) for start_s in (0.0, 3.0, 6.0)]
    group = [TaskSpan("m0", 1, node, (0, 1), 10.0, 15.0, 0) for node in ("a", "b")]
    assert _held([*visits, *group]) == {0: 1, 1: 4}
    assert _seconds([*visits, *group]) == 3 * 2.0 + 5.0
    assert _seconds([]) is None


def with_pipelines(project):
    """Have member a of the run train as a pipeline."""
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_spec(replace(record_of(catalog, RUN).spec, pipelines={"a": {}}))


def test_runs_with_pipelines_are_compared_with_no_simulation(project):
    for name in NAMES:
        writer = EventWriter(project.home.run(RUN).events, name, 0)
        result = {"epoch": 1, "metrics": {"loss": 0.5}, "duration_s": 1.0, "gpus": 1, "finished_at": 1.0}
        writer.write("epoch", **result, rate=10.0, batch_size=32, evaluate_s=0.1)
        writer.write("converged", reason="done")
    assert compared_status(project, RUN).comparison.epochs == 3
    with_pipelines(project)
    assert compared_status(project, RUN).comparison is None


def test_pipelines_of_a_run_are_shown_while_they_train(project):
    run = project.home.run(RUN)
    with_pipelines(project)
    watch = RunWatch(project, RUN)
    assert watch.poll().pipelines == ()
    EventWriter(run.events, DRIVER, 0).write("task_started", **task_started())
    assert [(one.member, one.last) for one in watch.poll().pipelines] == [("a", None)]
    EventWriter(run.events, "a", 0).write("stages", **stages())
    seen = watch.poll().pipelines
    assert [one.last.epoch for one in seen] == [1]
    assert RunWatch(project, RUN).poll().pipelines == seen
