"""Stories of runs with a scripted batch system: together they reach every transition of the table."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from workbench import ENSEMBLE, new_project

from hetctl.app.project import Project, Waits
from hetctl.app.run.job_states import START_PATIENCE_S, current_jobs, ended_by_files
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.model import job as job_module
from hetctl.model.errors import BatchSystemError
from hetctl.model.events import DRIVER, Event
from hetctl.model.job import (
    BETWEEN_JOBS,
    ENDED,
    IN_DOUBT,
    JOB_REASONS,
    RESUMABLE,
    RUN_AFTER,
    SUPERSEDED_EXIT,
    Job,
    JobState,
    JobStatus,
)
from hetctl.storage.event_files import EventWriter

RUN = "trio-001"
MEMBERS = ("a", "b", "c")


class Reached(dict):
    """Table that notes which of its keys were looked up, and by which stories."""

    def __init__(self, table):
        super().__init__(table)
        self.keys_used, self.stories = set(), set()

    def __contains__(self, key):
        return self._noted(key, super().__contains__(key))

    def get(self, key, default=None):
        self._noted(key, super().__contains__(key))
        return super().get(key, default)

    def _noted(self, key, known):
        if known:
            self.keys_used.add(key)
        return known


class ScriptedBatch:
    """Batch system whose jobs do what a story says."""

    def __init__(self):
        self.states, self.names = {}, {}
        self.refuses = self.loses = self.answers_late = self.hides = False

    def submit(self, request):
        if self.refuses:
            raise BatchSystemError("no such account")
        if not self.loses:
            self.names[request.name] = str(len(self.states))
            self.states[self.names[request.name]] = JobState.PENDING
        if self.loses or self.answers_late:
            raise SubmissionInDoubtError("sbatch did not answer in time")
        return self.names[request.name]

    def statuses(self, ids):
        return {each: JobStatus(self.states[each]) for each in ids}

    def find(self, names, **_):
        known = {} if self.hides else self.names
        return {name: known[name] for name in names if name in known}

    def cancel(self, ids):
        self.states |= dict.fromkeys(ids, JobState.CANCELLED)


class Story:
    """A project, its batch system, and what happens in the jobs of its run."""

    def __init__(self, project, batch):
        self.project, self.batch = project, batch
        self.cancelled = []

    def does(self, command, *options, code=0):
        """Run a command; return the state of the run that it prints."""
        done = self.project.here(command, *options, "--json")
        assert done.code == code, done.stdout + done.stderr
        return done.json.get("state")

    @property
    def shown(self):
        return self.project.here("status", "--json").json["state"]

    @property
    def stored(self):
        with Catalog.open_to_read(self.project.home.catalog) as catalog:
            return catalog.run(RUN).state

    def jobs_of(self, run):
        with Catalog.open_to_read(self.project.home.catalog) as catalog:
            return catalog.jobs(run)

    @property
    def last(self):
        return str(len(self.batch.states) - 1)

    def claims(self, batch_id, number=0):
        self.project.home.run(RUN).job(number).claim.write_text(f"{batch_id}\n")

    def job_starts(self):
        self.batch.states[self.last] = JobState.RUNNING
        self._write(DRIVER, "job_started", job=int(self.last), nodes=[{"name": "n", "gpus": [0]}])

    def job_ends(self, state=JobState.PREEMPTED):
        self.batch.states[self.last] = state

    def members_converge(self, reason="done", members=MEMBERS):
        for member in members:
            self._write(member, "converged", reason=reason)

    def member_fails(self):
        for member in MEMBERS[1:]:
            self._write(member, "converged", reason="done")
        self._write(MEMBERS[0], "failed", error="no such layer")
        placement = [{"node": "n", "gpus": [0]}]
        self._write(DRIVER, "task_started", member=MEMBERS[0], gpus=1, placement=placement)
        end = {"exit_code": 1, "reason": "program-error", "description": "no such layer", "fault": True}
        self._write(DRIVER, "task_ended", member=MEMBERS[0], **end)

    def is_stored(self, state):
        """Have the catalog hold one of the two states that a run under way may have there."""
        with Catalog.open(self.project.home.catalog) as catalog:
            catalog.set_run_state(RUN, state)

    def _write(self, source, kind, **data):
        EventWriter(self.project.home.run(RUN).events, source, 0).write(kind, **data)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("states") / "project"
    project = new_project(path, ENSEMBLE, waits=Waits(settle_s=0.0))
    project.environment["HETCTL_SITE"] = "local"
    assert project.here("profile", "import", "rates.csv").code == 0
    return project


@pytest.fixture(scope="module")
def reached():
    return Reached(RUN_AFTER)


@pytest.fixture
def tell(profiled, tmp_path, monkeypatch, reached):
    """Tell a story, with one of the two states that a run under way may have in the catalog."""
    monkeypatch.setattr(job_module, "RUN_AFTER", reached)

    def tell(story, stored):
        folder = shutil.copytree(profiled.path, tmp_path / f"{story.__name__}-{stored}")
        told = Story(replace(profiled, path=Path(folder)), ScriptedBatch())
        told.first = stored
        monkeypatch.setattr(Project, "batch_system", lambda *_: told.batch)
        story(told)
        reached.stories.add((story, stored))

    return tell


def begun(story):
    assert story.does("submit") == "queued"
    assert (story.shown, story.stored) == ("queued", "queued")


def a_run_from_job_to_job_until_all_converge(story):
    begun(story)
    assert story.does("advance") == "running"
    assert story.shown == "queued"
    assert story.does("advance") == "running"
    story.job_starts()
    assert story.shown == "running"
    story.job_ends()
    assert story.shown == "between-jobs"
    assert story.does("advance") == "queued"
    story.job_starts()
    assert story.shown == "running"
    story.job_ends()
    assert story.shown == "between-jobs"
    story.members_converge()
    assert story.does("advance") == "finished"
    assert story.shown == story.does("cancel") == story.does("advance") == "finished"


def a_run_that_is_found_finished_while_it_runs(story):
    begun(story)
    assert story.does("advance") == "running"
    story.members_converge()
    story.job_ends(JobState.FINISHED)
    assert story.does("advance") == "finished"


def a_run_that_gets_more_epochs(story):
    begun(story)
    story.members_converge("4 epochs done")
    story.job_ends(JobState.FINISHED)
    assert story.does("advance") == "finished"
    file = story.project.path / "ensemble.yaml"
    file.write_text(file.read_text().replace("max_epochs: 4", "max_epochs: 5"))
    assert story.does("submit") == story.shown == "queued"


def runs_that_are_removed(story):
    for state in (*RESUMABLE, *ENDED):
        begun(story)
        story.does("rm", RUN, "--yes", code=6)
        story.job_ends()
        story.is_stored(state)
        story.does("rm", RUN, "--yes")
        story.does("status", code=2)
        # The name would not be used again.
        shutil.rmtree(story.project.home.removed)
        story.batch.names.clear()


def a_run_with_a_member_that_fails(story):
    assert story.does("submit", "--retries", "0") == "queued"
    story.is_stored(story.first)
    story.member_fails()
    story.job_ends(JobState.FINISHED)
    assert story.does("advance") == "failed"
    assert story.does("cancel") == "failed"
    assert story.does("submit", "--retries", "1") == "queued"


def a_run_that_ends_with_a_paused_member(story):
    begun(story)
    story.does("pause", "a")
    story.is_stored(story.first)
    story.members_converge(members=MEMBERS[1:])
    story.job_ends(JobState.FINISHED)
    assert story.does("advance") == "stopped"
    assert story.does("cancel", "a") == "stopped"
    assert story.does("submit") == "finished"
    assert story.does("resume", "a") == story.shown == "finished"
    assert story.does("submit") == "queued"


def a_run_whose_failed_member_is_tried_again(story):
    assert story.does("submit", "--retries", "0") == "queued"
    story.is_stored(story.first)
    story.member_fails()
    story.job_ends(JobState.FINISHED)
    assert story.does("advance") == "failed"
    assert story.does("retry", MEMBERS[0]) == "failed"
    assert story.does("submit") == "queued"


def a_run_out_of_budget(story):
    assert story.does("submit", "--max-jobs", "1") == "queued"
    story.is_stored(story.first)
    story.job_ends()
    assert story.does("advance") == story.does("advance") == story.shown == "stopped"
    # It is granted anew.
    story.does("submit", "--max-jobs", "1")
    assert story.shown == "queued"
    story.is_stored(story.first)
    story.job_ends()
    assert story.does("advance") == "stopped"
    assert story.does("cancel") == "cancelled"


def a_run_out_of_node_hours(story):
    story.does("submit", "--node-hours", "0.01", code=3)
    assert story.does("submit", "--node-hours", "0.034") == "queued"
    story.is_stored(story.first)
    assert [job.wall_s for job in story.jobs_of(RUN)] == [122]
    story.job_starts()
    time.sleep(3.0)
    story._write(DRIVER, "job_ended", job=0, reason="deadline")
    story.job_ends()
    # Less than two minutes are left.
    assert story.does("advance") == "stopped"
    assert story.does("submit", "--node-hours", "0.04") == "queued"
    story.job_starts()
    story.batch.cancel = lambda ids: story.cancelled.extend(ids)
    assert story.does("cancel") == "cancelled"
    # The job still ends, on the budget that it was given.
    assert story.does("submit", "--node-hours", "0.04") == "queued"


def a_run_that_gets_nothing_done(story):
    begun(story)
    story.job_ends(JobState.FAILED)
    assert story.does("advance") == "queued"
    story.is_stored(story.first)
    story.job_ends(JobState.FAILED)
    assert story.does("advance") == story.does("status", code=7) == "stalled"
    story.does("submit")
    story.is_stored(story.first)
    story.job_ends(JobState.FAILED)
    story.does("advance")
    story.is_stored(story.first)
    story.job_ends(JobState.FAILED)
    assert story.does("advance") == "stalled"
    assert story.does("cancel") == "cancelled"


def a_run_that_is_cancelled_and_continued(story):
    begun(story)
    story.is_stored(story.first)
    assert story.does("cancel") == story.does("cancel") == story.does("advance") == "cancelled"
    assert story.batch.states["0"] is JobState.CANCELLED
    story.does("submit")
    assert story.shown == "queued"
    assert story.batch.states["1"] is JobState.PENDING


def a_run_that_is_continued_between_its_jobs(story):
    begun(story)
    story.is_stored(story.first)
    story.job_ends()
    assert story.shown == "between-jobs"
    story.does("submit")
    assert story.shown == "queued"


def a_run_whose_first_job_is_refused(story):
    story.batch.refuses = True
    story.does("submit", code=4)
    story.does("status", code=2)


def a_run_whose_next_job_is_refused(story):
    begun(story)
    story.job_ends()
    story.batch.refuses = True
    story.does("advance", code=4)
    assert story.shown == "between-jobs"


def a_run_whose_job_is_found_after_all(story):
    begun(story)
    story.job_ends()
    story.batch.answers_late = story.batch.hides = True
    story.does("advance", code=4)
    story.is_stored(story.first)
    assert story.shown == "in-doubt"
    story.batch.hides = False
    assert story.does("advance") == "queued"
    assert len(story.batch.states) == 2


def a_run_whose_job_was_lost_before_it_was_cancelled(story):
    story.batch.loses = True
    story.does("submit", code=4)
    assert story.shown == "in-doubt"
    assert story.does("cancel") == "cancelled"
    story.batch.loses = False
    story.does("submit")
    assert story.shown == "queued"


def a_run_whose_job_finds_itself(story):
    """Nobody else has looked for it: its own script does, at its end."""
    story.batch.answers_late = story.batch.hides = True
    story.does("submit", code=4)
    story.batch.answers_late = story.batch.hides = False
    story.job_starts()
    story.does("advance", "--after-job", "0", RUN)
    assert [*story.batch.states] == ["0", "1"]


def a_run_whose_jobs_are_taken_without_an_answer(story):
    """As by an sbatch that prints an error after the controller has the job."""
    story.batch.answers_late = True
    begun(story)
    story.job_ends()
    assert story.does("advance") == "queued"
    assert [*story.batch.states] == ["0", "1"]


def a_run_whose_job_was_forgotten(story):
    """As by a command that took an error for a refusal: the job of the next number waits already."""
    begun(story)
    story.job_ends()
    (first,) = story.jobs_of(RUN)
    story.batch.answers_late, story.batch.hides = True, True
    story.does("advance", code=4)
    with Catalog.open(story.project.home.catalog) as catalog:
        catalog.remove_job(RUN, 1)
    story.batch.answers_late, story.batch.hides = False, False
    story.is_stored(story.first)
    assert story.does("advance") == "queued"
    assert [job.batch_id for job in story.jobs_of(RUN)] == [first.batch_id, "1"]
    assert [*story.batch.states] == ["0", "1"]


def a_run_whose_number_another_job_has_claimed(story):
    """The job that the catalog knows leaves, and does not count as the end of the other one."""
    begun(story)
    story.batch.states |= {"0": JobState.RUNNING, "1": JobState.RUNNING}
    story.claims("1")
    assert story.does("advance") == "running"
    assert [job.batch_id for job in story.jobs_of(RUN)] == ["1"]
    assert story.batch.states == {"0": JobState.CANCELLED, "1": JobState.RUNNING}


def a_cancelled_run_whose_job_still_ends(story):
    begun(story)
    story.job_starts()
    story.batch.cancel = lambda ids: story.cancelled.extend(ids)
    assert story.does("cancel") == "cancelled"
    answer = story.project.here("submit")
    assert "job 1 submitted; it starts when job 0 has ended" in answer.stdout, answer
    assert story.cancelled == ["0", "0"]
    story.batch.states["0"] = JobState.CANCELLED


def a_chain_that_gets_nothing_done(story):
    story.does("submit", "--chain")
    for number in "01":
        story.batch.states[number] = JobState.RUNNING
        story.is_stored(story.first)
        story.does("advance", "--queue-next-after", number, RUN)
        story.batch.states[number] = JobState.FAILED
        story.does("advance", "--after-job", number, RUN)
    assert story.does("status", code=7) == "stalled"
    assert [*story.batch.states.values()] == [JobState.FAILED, JobState.FAILED, JobState.CANCELLED]


def a_chain_out_of_budget(story):
    story.does("submit", "--chain", "--max-jobs", "2")
    for number in "01":
        story.batch.states[number] = JobState.RUNNING
        story.is_stored(story.first)
        story.does("advance", "--queue-next-after", number, RUN)
        # Also the job that waits is within the budget.
        assert story.does("advance") == "running"
        assert len(story.batch.states) == 2
        story.batch.states[number] = JobState.PREEMPTED
        story.does("advance", "--after-job", number, RUN)
    assert story.shown == "stopped"


def a_run_that_is_continued_after_it_stalled(story):
    a_run_that_gets_nothing_done(story)
    story.does("submit")
    for state, shown in (
        (JobState.PREEMPTED, "queued"),
        (JobState.FAILED, "queued"),
        (JobState.FAILED, "stalled"),
    ):
        story.is_stored(story.first)
        story.job_ends(state)
        assert story.does("advance") == shown


def a_new_run_beside_one_in_doubt(story):
    story.batch.loses = True
    story.does("submit", code=4)
    story.batch.loses = False
    assert story.does("submit", "--new") == "queued"
    assert [*story.batch.names] == [job.name for job in story.jobs_of("trio-002")]


STORIES = (
    a_run_from_job_to_job_until_all_converge,
    a_run_that_is_found_finished_while_it_runs,
    a_run_that_gets_more_epochs,
    runs_that_are_removed,
    a_run_with_a_member_that_fails,
    a_run_that_ends_with_a_paused_member,
    a_run_whose_failed_member_is_tried_again,
    a_run_out_of_budget,
    a_run_out_of_node_hours,
    a_run_that_gets_nothing_done,
    a_run_that_is_cancelled_and_continued,
    a_run_that_is_continued_between_its_jobs,
    a_run_whose_first_job_is_refused,
    a_run_whose_next_job_is_refused,
    a_run_whose_job_is_found_after_all,
    a_run_whose_job_was_lost_before_it_was_cancelled,
    a_run_whose_job_finds_itself,
    a_run_whose_jobs_are_taken_without_an_answer,
    a_run_whose_job_was_forgotten,
    a_run_whose_number_another_job_has_claimed,
    a_cancelled_run_whose_job_still_ends,
    a_chain_that_gets_nothing_done,
    a_chain_out_of_budget,
    a_run_that_is_continued_after_it_stalled,
    a_new_run_beside_one_in_doubt,
)


TOLD = [(story, stored) for story in STORIES for stored in ("queued", "running")]
"""The catalog has one of two states for a run that is under way."""


@pytest.mark.parametrize(("story", "stored"), TOLD, ids=lambda one: getattr(one, "__name__", one))
def test_a_run_goes_through_the_states_that_its_story_tells(tell, story, stored):
    tell(story, stored)


def test_stories_reach_every_transition(tell, reached):
    for each in TOLD:
        if each not in reached.stories:
            tell(*each)
    assert set(RUN_AFTER) - reached.keys_used == {
        key for key in RUN_AFTER if key[0] in (IN_DOUBT, BETWEEN_JOBS)
    }


OLD, WALL_S = 0.0, 60


def a_job(state, submitted_at=None):
    return Job(0, "hetctl-x", "7", state, 1, WALL_S, time.time() if submitted_at is None else submitted_at)


class Answer:
    """Batch system with one answer."""

    def __init__(self, state, exit_code=None):
        self._status = JobStatus(state, exit_code)

    def statuses(self, ids):
        return dict.fromkeys(ids, self._status)


ASKED = [
    (before, after)
    for before, after in JOB_REASONS
    if before not in (None, JobState.SUBMITTING) and after is not JobState.VANISHED
]


@pytest.mark.parametrize(("before", "after"), ASKED, ids=lambda state: state.value)
def test_a_job_is_as_the_batch_system_says(before, after):
    (job,) = current_jobs([a_job(before)], Answer(after), [])
    assert (job.state, job.ended_at is not None) == (after, after.over)


@pytest.mark.parametrize(("claimed", "state"), [("", JobState.UNKNOWN), ("7", JobState.FAILED)])
def test_a_job_that_left_to_an_unseen_one_is_not_over(claimed, state):
    """Files of other nodes may be seen late, but the exit code tells."""
    left = Answer(JobState.FAILED, exit_code=SUPERSEDED_EXIT)
    (job,) = current_jobs([a_job(JobState.RUNNING)], left, [], claimant=lambda _: claimed)
    assert job.state is state


def test_a_node_that_is_used_again_is_not_a_failed_one():
    def told(number, kind, **data):
        return Event(DRIVER, 0, kind, float(number), {"job": 0, **data})

    lost = [told(n, "node_failed", member="a", nodes=[f"n{n}"]) for n in (1, 2)]
    back = told(3, "node_joined", node="n1")
    again = told(4, "node_failed", member="b", nodes=["n1"])
    seen = [
        current_jobs([a_job(JobState.RUNNING)], Answer(JobState.RUNNING), events)[0].failed_nodes
        for events in (lost, [*lost, back], [*lost, back, again])
    ]
    assert seen == [("n1", "n2"), ("n2",), ("n2", "n1")]


@pytest.mark.parametrize("before", [JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN])
def test_a_forgotten_job_vanishes_when_its_time_is_over(before):
    late = time.time() - 2 * START_PATIENCE_S
    (job,) = current_jobs([a_job(before, late)], Answer(JobState.UNKNOWN), [])
    assert job.state is JobState.VANISHED


@pytest.mark.parametrize("before", [state for state in JobState if not state.over])
def test_a_job_whose_driver_reported_its_end_is_finished(before):
    end = Event(DRIVER, 0, "job_ended", 5.0, {"job": 0, "reason": "deadline"})
    (job,) = ended_by_files([a_job(before)], [end], done=False, silent=True)
    assert (job.state, job.ended_at) == (JobState.FINISHED, 5.0)


def test_a_forgotten_job_that_was_requeued_may_be_alive():
    now = time.time()
    kinds = ("job_started", "job_ended", "job_started")
    told = [Event(DRIVER, 0, kind, now + n, {"job": 0, "reason": "x"}) for n, kind in enumerate(kinds)]
    (job,) = current_jobs([a_job(JobState.RUNNING)], Answer(JobState.UNKNOWN), told)
    assert job.state is JobState.UNKNOWN
    (job,) = current_jobs([a_job(JobState.RUNNING)], Answer(JobState.UNKNOWN), told[:2])
    assert job.state is JobState.FINISHED


@pytest.mark.parametrize("before", [state for state in JobState if state.over])
def test_a_job_that_is_over_is_not_asked_about(before):
    (job,) = current_jobs([a_job(before)], Answer(JobState.RUNNING), [])
    assert job.state is before
