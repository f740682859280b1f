"""The driver of a job, with trainers that only pretend to train."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from driven_job import Job
from workbench import wait_for

from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER
from hetctl.model.run import Budget
from hetctl.model.site import MEMBERS, Queue, Site
from hetctl.runtime.driver.driver import Driver
from hetctl.runtime.driver.job_modes import JobMode
from hetctl.storage.run_files import write_spec


def test_rounds_follow_one_another_until_all_have_converged(tmp_path):
    job = Job(tmp_path, {name: {"epochs": 2} for name in "abcde"}, options={"alpha": 0.0})
    before = os.umask(0)
    try:
        assert "ended: finished" in job.drive()
    finally:
        os.umask(before)
    files = [path for path in job.run.path.rglob("*") if not path.is_symlink()]
    assert files
    assert not [path for path in files if path.stat().st_mode & 0o077]
    (started,) = job.events("job_started")
    assert (started.data["job"], started.data["batch_id"]) == (0, "17")
    assert [node["name"] for node in started.data["nodes"]] == ["localhost"]
    rounds = job.rounds()
    assert sorted(name for members in rounds for name in members) == list("abcde")
    assert len(rounds) == 3
    ends = [event.time for event in job.events("round_ended")]
    starts = [event.time for event in job.events("round_started")]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert {event.data["ended_by"] for event in job.events("round_ended")} == {"converged"}
    assert all(member.converged for member in job.progress().values())


def test_a_driver_names_a_damaged_specification(tmp_path):
    job = Job(tmp_path, {"a": {"epochs": 1}})
    job.run.spec.write_text("{")
    driver = job.start()
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 2
    assert "run.json is damaged" in output
    assert "`hetctl submit` writes it anew" in output
    assert "Traceback" not in output


def test_a_flotilla_stops_when_too_few_are_active(tmp_path):
    members = {"quick": {"epochs": 1}, "slow": {"epochs": 16, "epoch_s": 0.3}, "late": {"epochs": 1}}
    rates = {"quick": {1: 100.0}, "slow": {1: 99.0}, "late": {1: 50.0}}
    job = Job(tmp_path, members, rates=rates, options={"alpha": 0.8})
    job.drive()
    assert job.events("round_ended")[0].data["ended_by"] == "alpha"
    assert job.events("stopped", "slow")[0].data["reason"] == "alpha"
    assert job.trained("slow") == list(range(1, 17))
    assert job.reason == "finished"


def test_the_next_job_continues_after_the_deadline(tmp_path):
    job = Job(tmp_path, {"a": {"epochs": 20, "epoch_s": 0.5}, "b": {"epochs": 1}}, grace_s=2, wall_s=11)
    job.drive()
    assert job.reason == "deadline"
    assert job.progress()["a"].active
    assert job.progress()["b"].converged
    done = len(job.trained("a"))
    assert 0 < done < 20
    while job.progress()["a"].active:
        job.drive(number=1)
    assert job.trained("a") == list(range(1, 21))


def _first_line_of(path):
    return json.loads(path.read_text().split("\n", 1)[0])


@pytest.mark.parametrize("spoil", [lambda _: None, lambda state: state.write_text("{")])
def test_the_next_job_continues_with_or_without_a_snapshot(tmp_path, spoil):
    job = Job(tmp_path, {name: {"epochs": 2} for name in "abc"}, budget=Budget(max_rounds=1))
    job.drive()
    assert (len(job.rounds()), job.reason) == (1, "--max-rounds 1 is reached")
    known = _first_line_of(job.run.state)
    assert known["log"][0][DRIVER][0] == job.run.events_of(DRIVER).stat().st_size
    spoil(job.run.state)
    write_spec(job.run, replace(job.spec, budget=Budget()))
    job.drive(number=1)
    assert {name: job.trained(name) for name in "abc"} == {name: [1, 2] for name in "abc"}
    assert [event.round for event in job.events("round_started")] == [0, 1]
    renewed = _first_line_of(job.run.state)
    assert renewed["log"][0][DRIVER][0] == job.run.events_of(DRIVER).stat().st_size


def test_a_job_that_starts_after_its_deadline_starts_no_round(tmp_path):
    job = Job(tmp_path, {"a": {}}, wall_s=60)
    job.drive(started=time.time() - 100)
    assert (job.rounds(), job.reason) == ([], "deadline")
    assert job.progress()["a"].active


def test_a_member_whose_epochs_fit_no_job_is_trained_in_parts(tmp_path):
    job = Job(tmp_path, {"long": {"epochs": 2}}, rates={"long": {1: 0.6}}, grace_s=3, wall_s=18)
    assert "ended: finished" in job.drive()
    assert job.trained("long") == [1, 2]


def test_a_step_that_is_killed_is_reported_and_tried_again(tmp_path):
    job = Job(tmp_path, {"victim": {"epochs": 4, "kill_after": 2}, "other": {"epochs": 2}})
    job.drive()
    ended = [e for e in job.events("task_ended") if e.data["member"] == "victim"]
    assert (ended[0].data["exit_code"], ended[0].data["description"]) == (137, "killed by SIGKILL")
    assert ended[-1].data["exit_code"] == 0
    assert sum("victim" in members for members in job.rounds()) == len(ended) == 2
    assert job.trained("victim") == [1, 2, 3, 4]
    assert job.trained("other") == [1, 2]
    assert all(member.converged for member in job.progress().values())


def test_a_job_may_have_a_step_for_each_member(tmp_path):
    site = Site("l", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot", launch=MEMBERS)
    members = {"a": {"epochs": 3, "kill_after": 1}, "b": {"epochs": 8, "epoch_s": 0.5}, "c": {"epochs": 2}}
    job = Job(tmp_path, members, site=site, options={"alpha": 0.8})
    output = job.drive()
    assert "ended: finished" in output
    ended = {(e.data["member"], e.data["reason"]) for e in job.events("task_ended")}
    assert ended == {("a", "killed"), ("a", "finished"), ("b", "told"), ("b", "finished"), ("c", "finished")}
    assert {name: job.trained(name)[-1] for name in members} == {"a": 3, "b": 8, "c": 2}
    started = [f"round-{e.round:04d}/{e.data['member']}" for e in job.events("task_started")]
    assert sorted(line.split()[3] for line in output.splitlines() if line.startswith("agent")) == sorted(
        started
    )
    assert not list(job.run.path.rglob("agents.log"))


def test_a_failing_member_ends_and_the_others_continue(tmp_path):
    members = {"broken": {"fail": True}, "wrong": {"fail": "always"}, "good": {"epochs": 3}}
    job = Job(tmp_path, members, retries=1)
    assert "ended: finished" in job.drive()
    progress = job.progress()
    assert progress["broken"].failed == progress["wrong"].failed == "no such layer"
    assert progress["good"].converged
    assert (len(job.task_gpus("broken")), len(job.task_gpus("wrong"))) == (2, 1)
    assert job.trained("good") == [1, 2, 3]


def test_strangers_at_the_port_do_not_fail_the_job(tmp_path):
    """Before they were limited, they took all descriptors of the driver, which could not write its files."""
    job = Job(tmp_path, {"a": {"epochs": 3}, "b": {"epochs": 3}})
    process = job.start()
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (200, 200))
    wait_for(job.run.job(0).agents.address.exists)
    name = json.loads(job.run.job(0).agents.address.read_text())["name"]
    with ExitStack() as stack:
        for _ in range(220):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, job.reason) == (0, "finished"), output
    assert "Traceback" not in output, output


def test_a_local_planner_refills_a_freed_gpu_while_others_train(tmp_path):
    members = {"long": {"epochs": 15}, **{f"short-{n}": {"epochs": 1} for n in range(4)}}
    # With this seed the long member is among the first.
    job = Job(tmp_path, members, planner="independent", options={"seed": 1})
    job.drive()
    spans = {e.data["member"]: e.time for e in job.events("task_ended")}
    starts = [e.time for e in job.events("round_started")]
    assert any(start < spans["long"] for start in starts[1:])
    assert sum(len(members) for members in job.rounds()) == 5
    assert all(member.converged for member in job.progress().values())


@pytest.mark.parametrize("by", ["a signal", "the job's stop file"])
def test_the_job_ends_in_order_on_request(tmp_path, by):
    job = Job(tmp_path, {"a": {"epochs": 500}, "b": {"epochs": 500}})
    process = job.start()
    wait_for(lambda: job.trained("a") and job.trained("b"))
    if by == "a signal":
        process.send_signal(signal.SIGTERM)
    else:
        job.run.job(0).stop.write_text("signal\n")
    process.communicate(timeout=60)
    assert (process.returncode, job.reason) == (0, "signal")
    assert {(e.data["exit_code"], e.data["reason"]) for e in job.events("task_ended")} == {(0, "told")}
    assert [e.data["reason"] for e in job.events("stopped", "a")] == ["signal"]
    assert job.events("round_ended")[-1].data["ended_by"] == "signal"


def test_a_hanging_step_is_terminated_then_killed_in_the_grace(tmp_path):
    job = Job(tmp_path, {"unresponsive": {"hang": True}, "good": {"epochs": 500}}, wall_s=14, grace_s=4)
    job.drive()
    unresponsive = next(e for e in job.events("task_ended") if e.data["member"] == "unresponsive")
    assert unresponsive.data["description"] == "killed by SIGKILL"
    assert job.events("unresponsive", "unresponsive")
    assert job.progress()["unresponsive"].failures == 0
    good = next(e for e in job.events("task_ended") if e.data["member"] == "good")
    assert good.data["exit_code"] == 0
    assert job.reason == "deadline"


@pytest.mark.parametrize(
    ("budget", "rounds", "reason"),
    [
        (Budget(max_rounds=2), 2, "--max-rounds 2 is reached"),
        (Budget(gpu_hours=0.1 / 3600), 1, "--gpu-hours"),
        (Budget(), 3, "finished"),
    ],
    ids=["rounds", "GPU hours", "none"],
)
def test_a_run_ends_with_its_budget_on_the_gpus_that_were_asked_for(tmp_path, budget, rounds, reason):
    members = {name: {"epochs": 1} for name in "abcdef"}
    job = Job(tmp_path, members, slots=4, gpus=2, options={"alpha": 0.0}, budget=budget)
    job.drive()
    assert (len(job.rounds()), max(map(len, job.rounds()))) == (rounds, 2)
    assert job.reason.startswith(reason)


def test_a_member_without_room_for_an_epoch_is_started_once(tmp_path):
    job = Job(tmp_path, {"tight": {"no_room": True}, "good": {"epochs": 8}}, wall_s=15, grace_s=3)
    job.drive()
    starts = [e for e in job.events("task_started") if e.data["member"] == "tight"]
    assert len(starts) == 1
    assert job.reason == "deadline"
    assert job.progress()["tight"].active
    assert job.progress()["good"].converged


class DamagedMode(JobMode):
    """Mode of a later phase that reads a damaged file as it begins."""

    def scheduler(self):
        raise BadInputError("parent.json is damaged", "write it anew")


def test_a_damaged_file_of_a_later_phase_ends_the_job(tmp_path, capfd):
    job = Job(tmp_path, {})
    driver = Driver(job.run, 0, time.time() + 600)
    driver._later.append(DamagedMode(driver._rounds))
    assert driver.run() == "parent.json is damaged"
    assert "the job ends: parent.json is damaged (write it anew)" in capfd.readouterr().out
    assert job.reason == "parent.json is damaged"
