"""A whole run on a real Slurm: a plan, rounds over several jobs, a time limit, a killed step."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine_speed import scaled
from workbench import ProjectFolder, asked, ranks_of

from hetctl.model.events import DRIVER
from hetctl.model.plan import Placement
from hetctl.model.serialization import decode
from hetctl.storage.event_files import read_events
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec

pytestmark = [pytest.mark.slurm, pytest.mark.training]
CREW = Path(__file__).parents[1] / "ensembles" / "crew"
RUN = "crew-001"
WALL_S = round(scaled(40))
WHOLE_RUN_S = 900

BATCH_S = scaled(0.1)
"""The work, too, depends on the machine, so that it does not fit one job."""
RATES = "member,gpus,rate,samples\n" + "".join(
    f"{name},{gpus},{gpus * 30 / BATCH_S:.0f},{640 * epochs}\n"
    for name, most, epochs in (("one-short", 1, 5), ("one-long", 1, 10), ("two", 2, 20), ("four", 4, 45))
    for gpus in range(1, most + 1)
)
SITE = "timeouts: {{lease: 30s}}\nenvironment: {environment}\n"


@dataclass
class Story:
    """The project in which everything happened, and what it printed."""

    project: ProjectFolder
    plan: dict
    status: dict
    killed: str

    @property
    def run(self):
        return self.project.home.run(RUN)

    def events(self):
        return events_in(self.run)

    def of(self, kind):
        return [event for event in self.events() if event.kind == kind]

    def witnesses(self):
        """Return what each rank said when it got hold of its GPU."""
        lines = (self.project.path / "witnesses" / "witness.jsonl").read_text().splitlines()
        return list(map(json.loads, lines))


@pytest.fixture(scope="module")
def story(slurm_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("crew") / "project"
    shutil.copytree(CREW, folder)
    shutil.copy(CREW.parent / "handwriting.py", folder)
    (folder / "witnesses").mkdir()
    cluster = slurm_cluster.environment()
    variables = {name: value for name, value in cluster.items() if name.startswith("OMPI")}
    variables["CREW_WITNESSES"] = str(folder / "witnesses")
    variables["CREW_BATCH_S"] = str(BATCH_S)
    size = {"HETCTL_GPUS": "4", "HETCTL_TIME": f"{WALL_S}s"}
    lab = slurm_cluster.lab(folder, SITE.format(environment=json.dumps(variables)))
    project = ProjectFolder(folder, environment=lab | size)
    (folder / "rates.csv").write_text(RATES)
    asked(project, "profile", "import", "rates.csv")
    plan = asked(project, "plan")
    asked(project, "submit")
    killed = kill_a_training_rank(project.home.run(RUN))
    return Story(project, plan, wait_for_the_end(project), killed)


def kill_a_training_rank(run):
    """Kill a rank, in the midst of an epoch, of a member that has several; return the member.

    A rank that had just told that it was done, or was leaving, is no loss: then another one is killed.
    """
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for index, step in steps_in_training(run):
            last = step["placement"][-1]
            ranks = [pid for pid in ranks_of(run.path, last["node"]) if gpu_of(pid) == last["gpus"][-1]]
            if ranks:
                os.kill(ranks[0], signal.SIGKILL)
                if fault_of(run, index, step["member"]):
                    return step["member"]
        time.sleep(0.2)
    raise AssertionError("no member with several GPUs was lost in the midst of an epoch in time")


def steps_in_training(run):
    """Return the steps on several GPUs that have finished an epoch and have not ended, with their round."""
    events = events_in(run)
    trained = {(event.round, event.source) for event in events if event.kind == "epoch"}
    ended = {(event.round, event.data["member"]) for event in events if event.kind == "task_ended"}
    steps = [(event.round, event.data) for event in events if event.kind == "task_started"]
    return [(i, step) for i, step in steps if step["gpus"] > 1 and (i, step["member"]) in trained - ended]


def fault_of(run, index, member):
    """Wait for the end of a step; return whether the member lost it by its own fault."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for event in read_events(run.events_of(DRIVER)):
            if (event.round, event.kind, event.data.get("member")) == (index, "task_ended", member):
                return event.data["fault"]
        time.sleep(0.1)
    raise AssertionError("the step whose rank was killed did not end")


def gpu_of(rank):
    """Return the number of a rank's GPU."""
    return int(Path(f"/proc/{rank}/comm").read_text().rpartition("-")[2])


def wait_for_the_end(project):
    """Only look: every further job has to be submitted by the script of the one before it."""
    end = time.monotonic() + WHOLE_RUN_S
    while time.monotonic() < end:
        status = asked(project, "status")
        alive = {"pending", "running"} & {
            job["state"] for job in status["jobs"]
        }  # the last script may be leaving
        if status["state"] not in ("queued", "in-doubt", "running", "between-jobs") and not alive:
            return status
        time.sleep(4)
    raise AssertionError(f"the run is still {status['state']}: {status['reason']}")


def test_the_run_finishes_with_every_member_converged(story):
    assert story.status["state"] == "finished"
    assert {member["state"] for member in story.status["members"]} == {"converged"}


def test_it_takes_three_rounds_and_two_jobs(story):
    assert len(story.of("round_started")) >= 3
    assert len(story.status["jobs"]) >= 2
    assert {job["state"] for job in story.status["jobs"]} == {"finished"}


def test_members_train_on_one_gpu_and_on_those_of_both_nodes(story):
    """`four` has 45 of 80 equal epochs: on the two GPUs of one node it would be the last by far."""
    gpus = {event.data["gpus"] for event in story.of("task_started")}
    assert 1 in gpus
    assert max(gpus) > 2


def test_a_round_ended_by_the_limit_continues_in_the_next_job(story):
    ended = [event.data["ended_by"] for event in story.of("round_ended")]
    assert "deadline" in ended
    for event in story.of("job_ended"):
        job = next(job for job in story.status["jobs"] if job["number"] == event.data["job"])
        assert event.time < job["submitted_at"] + WALL_S + 30


def test_the_killed_step_is_reported_and_costs_no_finished_epoch(story):
    failed = [event for event in story.of("task_ended") if event.data["fault"]]
    assert [event.data["member"] for event in failed] == [story.killed]
    assert failed[0].data["description"] == "killed by SIGKILL"
    assert failed[0].data["fault"]
    later = [
        e for e in story.of("task_started") if e.data["member"] == story.killed and e.time > failed[0].time
    ]
    assert later


def test_no_epoch_is_lost_or_trained_twice(story):
    trained = Counter()
    reported = set()
    for event in story.of("epoch"):
        # Reported again on resuming: the same result, not another training.
        reported.add((event.source, event.data["epoch"], event.data["finished_at"]))
    for member, epoch, _ in reported:
        trained[member, epoch] += 1
    assert set(trained.values()) == {1}
    for member in story.status["members"]:
        numbers = sorted(epoch for name, epoch in trained if name == member["member"])
        assert numbers == list(range(1, member["epochs"] + 1))


def test_no_gpu_of_a_node_is_taken_by_two_ranks_at_once(story):
    records = story.witnesses()
    assert {record["kind"] for record in records} == {"held"}
    assert {record["gpu"] for record in records} <= {f"n{n}-{gpu}" for n in range(1, 5) for gpu in (0, 1)}


def test_every_rank_sees_all_gpus_of_its_node(story):
    assert {record["visible"] for record in story.witnesses()} == {"0,1"}


def test_a_job_starts_one_step(story):
    jobs = {record["job"] for record in story.witnesses()}
    assert len(jobs) == len(story.status["jobs"])
    assert len({(record["job"], record["step"]) for record in story.witnesses()}) == len(jobs)


def test_ranks_stay_from_round_to_round(story):
    """None is started again in a job but those of the group that was killed."""
    killed = max(e.data["gpus"] for e in story.of("task_started") if e.data["member"] == story.killed)
    starts = Counter((record["job"], record["gpu"]) for record in story.witnesses())
    assert sum(starts.values()) - len(starts) <= killed


def test_ranks_ran_on_the_nodes_that_the_plan_named(story):
    planned = set()
    for event in story.of("task_started"):
        placements = [decode(Placement, place) for place in event.data["placement"]]
        assert len(placements) == -(-event.data["gpus"] // 2)
        planned |= {f"{place.node}-{gpu}" for place in placements for gpu in place.gpus}
    assert {record["gpu"] for record in story.witnesses()} == planned


def test_the_plan_keeps_the_contract(story):
    assert story.plan["planner"] == "fluid"
    assert story.plan["ratio"] == pytest.approx(
        story.plan["predicted_makespan_s"] / story.plan["lower_bound_s"]
    )
    assert story.plan["predicted_makespan_s"] >= story.plan["lower_bound_s"] > 0


def test_events_of_the_driver_are_whole(story):
    driver = [event.kind for event in story.events() if event.source == DRIVER]
    assert driver.count("task_started") == driver.count("task_ended")
    assert read_spec(story.run).wall_s == WALL_S
