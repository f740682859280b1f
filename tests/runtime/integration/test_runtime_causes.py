"""Effects of failed steps on members, by cause: real processes, and a substitute for srun."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from driven_job import FUNCTIONS, Job
from hostnames import IMPORT
from trainless import SIGNAL_DELAY
from workbench import processes_on, ranks_of, wait_for

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.events import ExitReason
from hetctl.model.profile import MemberProfile
from hetctl.model.site import Queue, Site, Timeouts
from hetctl.scheduling.job_scheduler import LAUNCH_PAUSES_S

NODES = ("n1", "n2", "n3")
SITE = Site("slurm", "slurm", "srun", 3, 1, 1, 2**30, (Queue("main"),), device="slot")

# Starts the command on each node. FAULT requests a failure: "STEP|times|exit code|text" of the whole step,
# "NODE|file|text" of a node, as soon as there is a file.
SRUN = """\
#!{python}
{hostnames}import os, subprocess, threading, time
from pathlib import Path

# Several may run at once.
def is_among_the_first(times):
    for number in range(times):
        try:
            Path(os.environ["FAULTS"], str(number)).touch(exist_ok=False)
            return True
        except FileExistsError:
            pass
    return False

def lose(process, file, text):
    while not Path(file).exists():
        time.sleep(0.05)
    process.kill()
    print(text, file=sys.stderr, flush=True)

start = next(n for n, a in enumerate(sys.argv) if n and not a.startswith("--"))
options, command = sys.argv[1:start], sys.argv[start:]
nodes = hostnames(next(o.partition("=")[2] for o in options if o.startswith("--nodelist=")))
where, *fault = os.environ["FAULT"].split("|")
if where == "STEP" and is_among_the_first(int(fault[0])):
    print(fault[2], file=sys.stderr)
    sys.exit(int(fault[1]))
running = {{node: subprocess.Popen(command, env=os.environ | {{"SLURMD_NODENAME": node}}) for node in nodes}}
if where in running:
    threading.Thread(target=lose, args=(running[where], fault[0], fault[1]), daemon=True).start()
sys.exit(max(process.wait() for process in running.values()))
"""


class SlurmJob(Job):
    """A job on three nodes with a GPU each."""

    def __init__(self, folder: Path, members: dict[str, dict], site: Site = SITE, **spec) -> None:
        super().__init__(folder, members, site=site, gpus=3, **spec)

    def start(self, fault: str = "", **how):
        self._substitute_srun(fault)
        return super().start(**how)

    def drive(self, fault: str = "", **how):
        self._substitute_srun(fault)
        return super().drive(**how)

    def _substitute_srun(self, fault: str) -> None:
        tools, faults = self.folder / "tools", self.folder / "faults"
        tools.mkdir(exist_ok=True)
        faults.mkdir(exist_ok=True)
        for name, text in {
            "srun": SRUN.format(python=sys.executable, hostnames=IMPORT),
            "scontrol": f"#!/bin/sh\nprintf '%s\\n' {' '.join(NODES)}\n",
        }.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environment = {"FAULT": fault, "FAULTS": str(faults), "SLURM_JOB_NODELIST": "n[1-3]"}
        self.environment["PATH"] = f"{tools}:{os.environ['PATH']}"

    def nodes_of(self, member: str) -> list[str]:
        started = [e for e in self.events("task_started") if e.data["member"] == member]
        return [place["node"] for event in started for place in event.data["placement"]]

    def whys(self, member: str) -> list[str]:
        return [e.data["reason"] for e in self.events("task_ended") if e.data["member"] == member]


@pytest.mark.parametrize("planner", ["flotilla", "fluid"])
def test_a_job_continues_without_a_failed_node_and_no_fault(tmp_path, planner):
    options = {"solver_time_limit_s": 0.2}
    members = {n: {"epochs": 60} for n in "abcd"}
    job = SlurmJob(tmp_path, members, retries=0, planner=planner, options=options)
    fault = tmp_path / "fault"
    process = job.start(fault=f"n2|{fault}|srun: error: Node failure on n2")
    wait_for(lambda: any(job.trained(name) and "n2" in job.nodes_of(name) for name in members))
    fault.touch()
    process.communicate(timeout=120)
    job.leaves_nothing_behind()
    assert job.reason == "finished"
    failed = job.events("node_failed")
    assert {(event.data["job"], *event.data["nodes"]) for event in failed} <= {(0, "n2")}
    lost = {event.data["member"] for event in failed}
    assert {reason for name in lost for reason in job.whys(name)} <= {"node-failure", "finished", "told"}
    assert {reason for name in members.keys() - lost for reason in job.whys(name)} <= {"finished", "told"}
    for name, progress in job.progress().items():
        assert (progress.failures, job.trained(name)) == (0, list(range(1, 61)))
        assert job.nodes_of(name)[-1] != "n2" or name not in lost


@pytest.mark.parametrize(("fault", "epochs"), [(signal.SIGKILL, 100), (signal.SIGSTOP, 250)])
def test_a_node_that_returns_is_used_by_the_same_job(tmp_path, fault, epochs):
    """The agent of n2 is killed; or all on n2 stands still until the node is lost."""
    members = {n: {"epochs": epochs} for n in "abcd"}
    site = replace(SITE, timeouts=Timeouts(silence_s=6.0))
    job = SlurmJob(tmp_path, members, retries=0, planner="fluid", site=site)
    process = job.start()
    (trained, *_) = wait_for(lambda: [name for name in members if "n2" in job.nodes_of(name)])
    wait_for(lambda: job.trained(trained))
    there = processes_on(job.run.path, "n2")
    parents = {pid: psutil.Process(pid).ppid() for pid in there}
    (keeper,) = (pid for pid in there if parents[pid] not in there)
    victims = [pid for pid in there if fault == signal.SIGSTOP or parents[pid] == keeper]
    for pid in victims:
        os.kill(pid, fault)
    wait_for(lambda: job.events("node_failed"))
    for pid in victims if fault == signal.SIGSTOP else ():
        os.kill(pid, signal.SIGCONT)
    process.communicate(timeout=180)
    job.leaves_nothing_behind()
    (back,) = job.events("node_joined")
    assert (job.reason, back.data) == ("finished", {"job": 0, "node": "n2"})
    later = [event for event in job.events("task_started") if event.time > back.time]
    assert any(place["node"] == "n2" for event in later for place in event.data["placement"])
    for name, progress in job.progress().items():
        assert (progress.failures, job.trained(name)[-1]) == (0, epochs)


def test_a_step_is_retried_after_a_pause_if_slurm_is_unreachable(tmp_path):
    job = SlurmJob(tmp_path, {"a": {"epochs": 2}}, retries=0)
    contact = "srun: error: Unable to create step for job 7: Unable to contact slurm controller"
    assert "ended: finished" in job.drive(fault=f"STEP|1|1|{contact}")
    refused, again = job.events("task_ended")[0], job.events("task_started")[1]
    assert again.time - refused.time >= LAUNCH_PAUSES_S[ExitReason.NOT_LAUNCHED] - 0.01  # rounding
    assert job.whys("a") == ["not-launched", "finished"]
    assert (job.progress()["a"].failures, job.trained("a")) == (0, [1, 2])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("slurmstepd: error: *** STEP 7.3 ON n1 CANCELLED AT NOON DUE TO TIME LIMIT ***", "time"),
        ("slurmstepd: error: *** STEP 7.3 ON n1 CANCELLED AT NOON DUE TO PREEMPTION ***", "preempted"),
        (
            "srun: error: Unable to create step for job 7: Job/step already completing or completed",
            "cancelled",
        ),
    ],
)
def test_a_job_ended_by_the_batch_system_blames_no_member(tmp_path, text, reason):
    job = SlurmJob(tmp_path, {"a": {"epochs": 500}, "b": {"epochs": 500}}, retries=0)
    job.drive(fault=f"STEP|1|143|{text}")
    assert (job.reason, job.whys("a") + job.whys("b")) == (reason, [reason, reason])
    assert all(member.active and not member.failures for member in job.progress().values())


def test_a_step_that_dies_of_the_jobs_own_signal_is_not_blamed(tmp_path):
    """The signal reaches the step first, and the driver a little later."""
    job = SlurmJob(tmp_path, {"a": {"epochs": 500}}, retries=0)
    process = job.start(**{SIGNAL_DELAY: "5"})
    wait_for(lambda: job.trained("a"))
    (rank,) = ranks_of(job.run.path)
    os.kill(rank, signal.SIGTERM)
    wait_for(lambda: job.reasons("a"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (job.reason, job.whys("a"), job.progress()["a"].failures) == ("signal", ["told"], 0)


def test_a_signalled_member_stops_and_continues_in_the_same_job(tmp_path):
    job = SlurmJob(tmp_path, {"a": {"epochs": 40}, "b": {"epochs": 40}}, retries=0)
    process = job.start()
    wait_for(lambda: job.trained("a") and job.trained("b"))
    ranks = ranks_of(job.run.path)
    os.kill(ranks[0], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "ended: finished" in output
    assert sorted([job.whys("a"), job.whys("b")]) == [["finished"], ["told", "finished"]]
    assert job.reasons("a") + job.reasons("b") == ["signal"]
    assert "signal" in {event.data["ended_by"] for event in job.events("round_ended")}
    for name in "ab":
        assert (job.progress()[name].failures, job.trained(name)) == (0, list(range(1, 41)))


def shrinking(folder: Path, oom_above: int, **member) -> Job:
    config = {"epochs": 2, "oom_above": oom_above}
    members = Member("big", config, 64, max_gpus=1, **member), Member("good", {"epochs": 2}, max_gpus=1)
    profiles = tuple(MemberProfile(m.name, {1: 100.0}, None, 10, peak_memory_bytes=2**30) for m in members)
    ensemble = Ensemble("e", "tensorflow", FUNCTIONS, members, "/x")
    return Job(folder, {}, ensemble=ensemble, profiles=profiles, retries=0)


def test_out_of_memory_is_tried_again_with_half_the_batch(tmp_path):
    job = shrinking(tmp_path, 16, min_batch_size=16)
    assert "ended: finished" in job.drive()
    steps = [e.data for e in job.events("task_started") if e.data["member"] == "big"]
    ends = [e.data for e in job.events("task_ended") if e.data["member"] == "big"]
    assert [step["batch_size"] for step in steps] == [64, 32, 16]
    assert [end["reason"] for end in ends] == ["out-of-memory", "out-of-memory", "finished"]
    progress = job.progress()["big"]
    assert (progress.batch_size, progress.failures, job.trained("big")) == (16, 0, [1, 2])


def test_out_of_memory_fails_with_the_peak_at_the_smallest_batch(tmp_path):
    job = shrinking(tmp_path, 16)
    assert "ended: finished" in job.drive()
    assert job.progress()["big"].failed == "out of memory: 3.00 GiB at its peak"
    assert job.progress()["good"].converged
    assert len(job.task_gpus("big")) == 1


def test_a_first_start_out_of_memory_is_tried_on_more_gpus(tmp_path):
    config = {"epochs": 2, "oom_on": [1]}
    members = Member("big", config, 64), Member("alike", {**config, "seed": 7}, 64)
    ensemble = Ensemble("e", "tensorflow", FUNCTIONS, members, "/x")
    profiles = tuple(MemberProfile(m.name, {}) for m in members)
    job = Job(tmp_path, {}, ensemble=ensemble, profiles=profiles, retries=0)
    assert "ended: finished" in job.drive()
    ends = [e.data for e in job.events("task_ended")]
    assert {e["unfit_gpus"] for e in ends if e["reason"] == "out-of-memory"} == {1}
    assert not any(e["fault"] for e in ends)
    for name in ("big", "alike"):
        assert job.task_gpus(name)[-1] > 1
        assert job.progress()[name].converged


def test_a_step_killed_for_memory_has_the_profiled_peak(tmp_path):
    job = SlurmJob(
        tmp_path,
        {"a": {"epochs": 3}},
        profiles=(MemberProfile("a", {1: 100.0}, None, 10, peak_memory_bytes=2**31),),
    )
    job.drive(fault="STEP|1|253|slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.")
    assert job.progress()["a"].failed == "out of memory: 2.00 GiB at its peak"


def test_a_rank_that_exceeds_its_share_is_ended_with_its_peak(tmp_path):
    members = {"greedy": {"eat": 450 * 2**20, "epochs": 1000}, "good": {"epochs": 60}}
    job = Job(tmp_path, members, memory=400 * 2**20, retries=0, options={"alpha": 0.0})
    job.drive()
    (end,) = (e.data for e in job.events("task_ended") if e.data["member"] == "greedy")
    assert (end["reason"], end["exit_code"], end["fault"]) == ("out-of-memory", 71, True)
    found = re.fullmatch(
        r"out of memory: (\S+) GiB at its peak, and its share of the node is 0.20 GiB", end["description"]
    )
    # It may be ended while it still fills its memory: all ranks together have 95 % of 0.39 GiB then.
    assert 0.25 < float(found[1]) < 0.6
    assert job.progress()["greedy"].failed == end["description"]
    assert end["description"] in job.run.log_of("greedy").read_text()
    assert job.progress()["good"].converged
    assert len(job.task_gpus("good")) == 1


def test_a_disk_full_for_a_trainer_ends_the_job_without_fault(tmp_path):
    job = Job(tmp_path, {"a": {"epochs": 9, "disk_full_after": 2}, "b": {"epochs": 20}}, retries=0)
    job.drive()
    ends = {e.data["member"]: e.data for e in job.events("task_ended")}
    assert (ends["a"]["reason"], ends["a"]["description"], ends["a"]["fault"]) == (
        "disk-full",
        "disk full",
        False,
    )
    assert (job.reason, ends["b"]["reason"]) == ("disk-full", "told")
    assert all(member.active for member in job.progress().values())
    job.drive(number=1)
    assert job.trained("a") == list(range(1, 10))


def test_a_disk_full_for_the_driver_ends_the_job_in_order(tmp_path):
    job = Job(tmp_path, {"a": {"epochs": 500}, "b": {"epochs": 500}})
    process = job.start()
    wait_for(lambda: job.trained("a") and job.trained("b"))
    driver_events = job.run.events_of("driver")
    room = driver_events.stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
    os.kill(ranks_of(job.run.path)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "the job ends: disk-full" in output
    assert "ended: disk-full" in output
    assert driver_events.stat().st_size <= room
    assert driver_events.read_bytes().endswith(b"\n")
    assert (job.events("stopped", "a") + job.events("stopped", "b"))[0].data["reason"]
