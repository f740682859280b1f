"""The ranks of a job: ranks that stay from member to member, and groups that fail separately."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from workbench import alive, wait_for

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.ensemble import COMMAND, Functions, TrainingCode
from hetctl.model.events import EXIT_CODES, LOST_PEER, ExitReason
from hetctl.model.hops import PartitionFile, PartitionManifest
from hetctl.model.plan import FUSED, Placement
from hetctl.model.serialization import decode
from hetctl.model.site import HEARTBEAT_EVERY_S, MEMBERS, NODES, Node, Queue, Site, Timeouts
from hetctl.runtime.agent.messages import AgentAssignment, PartitionToStage, StageOrder
from hetctl.runtime.data.partition_folder import write_manifest
from hetctl.runtime.driver.rank_group import exit_reason_of
from hetctl.runtime.driver.rank_pool import URGENT, RankPool
from hetctl.runtime.driver.rounds import reason_of_end
from hetctl.runtime.transport import Address, connect
from hetctl.runtime.worker.messages import TRAIN, TaskMessage
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.storage.paths import AgentFiles
from hetctl.storage.task_fold import TaskReport

SLOTS = 4
PART = b"8 bytes."
PATIENCE_S = 60.0
TIMEOUTS = Timeouts(hang_s=60.0, ending_s=5.0)
SITE = Site(
    *("local", "local", "local", 1, SLOTS, SLOTS, 2**30, (Queue("local"),)), device="slot", timeouts=TIMEOUTS
)
BY_MEMBERS = replace(SITE, launch=MEMBERS)
NODE = Node("localhost", tuple(range(SLOTS)), None)

WORK = """
import json, os, signal, sys, time
from pathlib import Path
from hetctl.runtime.agent import agent, agent_process
from hetctl.runtime.agent.__main__ import main
from hetctl.model.plan import FUSED
from hetctl.runtime.worker.messages import TRAIN
from hetctl.runtime.worker.group import Group, join_group
from hetctl.runtime.worker import worker

class NoBackend:
    needs = "nothing"
    def load(self): pass
    def initialize(self, group): pass
    def shutdown(self): pass

def work(assignment, context):
    how = json.loads((Path(assignment.task.folder) / f"{assignment.task.name}.json").read_text())
    if how.get("shares"): Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
    if how.get("early") and assignment.rank_info.rank == 0: os.kill(os.getpid(), how["early"])
    context.group = Group()
    publish = lambda address: context.send(master=address)
    context.group = join_group(assignment.rank_info, NoBackend(), publish)
    ranks = context.group
    me = {"pid": os.getpid(), "rank": ranks.rank, "size": ranks.size, "device": context.binding.device}
    me |= {"gpu": context.binding.gpu, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    me |= {"imported": imported}
    joined = Path(assignment.task.folder, f"{assignment.task.name}.joined")
    with open(Path(assignment.task.folder) / f"{assignment.task.name}.did", "a") as file:
        file.write(json.dumps(me) + "\\n")
    print("at work on", assignment.task.name, flush=True)
    for kind in how.get("tell", ()):
        context.reporter(assignment.task).write(kind)
    if how.get("rank", 0) == ranks.rank:
        if how.get("raise"): raise ValueError("no such layer")
        if how.get("signal"): os.kill(os.getpid(), how["signal"])
        if how.get("hang"): time.sleep(1000)
    def goes_on():
        stopped = context.stop_reason(assignment.rank_info.key)
        told = stopped or Path(assignment.task.folder, "enough").exists()
        return ranks.broadcast(how["steps"] > 0 and not (told and not how.get("unresponsive")))
    while goes_on():
        how["steps"] -= 1
        time.sleep(0.05)
        if not how.get("silent"): context.heartbeat()
        if assignment.rank_info.key in context.joined: joined.touch()
    ranks.barrier_and_close()

def fused(assignment, context):
    steps = {}
    while assignment or steps:
        if assignment:
            name = assignment.task.name
            steps[name] = json.loads((Path(assignment.task.folder) / f"{name}.json").read_text())
            with open(Path(assignment.task.folder) / f"{name}.did", "a") as file:
                file.write(json.dumps({"pid": os.getpid(), "rank": 0}) + "\\n")
        for name, how in list(steps.items()):
            how["steps"] -= 1
            if how["steps"] < 0:
                del steps[name]
                context.send(done=True, member=name, code=int(how.get("fails", 0)))
        time.sleep(0.05)
        # For a while, as in an evaluation, only one of them sends messages.
        context.send(**({"member": next(iter(steps))} if steps else {}))
        assignment = context.arrived()

class Meter:
    # It grows by 10 J on slot 0 with each look, by 20 J on slot 1, ..
    def __init__(self, numbers, gpus, of_node):
        assert (len(gpus) in (0, 4), of_node) == (True, 4)
        self.numbers, self.looks = numbers, 0
    def used_j(self):
        self.looks += 1
        return {number: 10.0 * (number + 1) * self.looks for number in self.numbers}

agent.EnergyMeter = Meter
worker.WORK = {TRAIN: work, FUSED: fused}
imported = []  # by the template of this process
agent_process.preload_framework = imported.append
sys.argv = sys.argv[2:]
os._exit(main())
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that creates a job, at a site if given; its processes end with the test."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{WORK}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    made = []

    def make(site=SITE, **waits):
        made.append(Job(tmp_path, site, **waits))
        return made[-1]

    yield make
    for job in made:
        if not job.is_over:
            job.end()


@pytest.fixture
def members_job(start):
    """A job with a step for each member."""
    return start(BY_MEMBERS)


@pytest.fixture
def job(start):
    return start()


class Job:
    """A job whose ranks simulate training."""

    def __init__(self, folder: Path, site: Site = SITE, frameworks=(), **waits) -> None:
        self.folder = folder
        for name in ("events", "logs"):
            (folder / name).mkdir()
        self.rank_pool = RankPool(site, (NODE,), AgentFiles.within(folder), frameworks, **waits)
        self.ended = {}
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.rank_pool.shutdown()
        wait_for(lambda: not alive(str(self.folder)))

    def agents(self) -> list[int]:
        """Return the agents, or their keepers, that the driver has started: it is this process."""
        there = alive(str(AgentFiles.within(self.folder).address))
        return [pid for pid in there if _parent(pid) == os.getpid()]

    def agent(self) -> int:
        """Return the agent of the one keeper."""
        (keeper,) = self.agents()
        (agent,) = (
            pid for pid in alive(str(AgentFiles.within(self.folder).address)) if _parent(pid) == keeper
        )
        return agent

    def start(
        self,
        name: str,
        *gpus: int,
        steps: int = 3,
        code=None,
        seat: int = 0,
        kind: str = TRAIN,
        alone: bool = False,
        **how,
    ) -> None:
        how["steps"] = steps
        (self.folder / f"{name}.json").write_text(json.dumps(how))
        free = self.free()
        placement = (Placement("localhost", gpus, seat),)
        self.rank_pool.start(TaskMessage(kind, str(self.folder), name), placement, code, alone=alone)
        assert (seat > 1 or free >= set(gpus), self.free()) == (True, free.difference(gpus))

    def free(self) -> set[int]:
        """Return the free GPUs of this machine."""
        return {gpu for node in self.rank_pool.free_nodes() if node.name == "localhost" for gpu in node.gpus}

    def end_of(self, *names: str):
        """Wait for the ends of these tasks; return them."""

        def all_ended():
            self.ended |= {step.name: step for step in self.rank_pool.reap()}
            return set(names) <= self.ended.keys()

        wait_for(all_ended)
        return [self.ended[name] for name in names]

    def enough(self) -> None:
        """End all tasks at work after their current step."""
        (self.folder / "enough").touch()

    def at_work(self, name: str) -> list[int]:
        """Return the processes that have begun, by rank."""
        return [one["pid"] for one in self.did(name)]

    def did(self, name: str) -> list[dict]:
        """Return the reports of the ranks that have begun, by rank."""
        self.ended |= {step.name: step for step in self.rank_pool.reap()}
        file = self.folder / f"{name}.did"
        did = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return sorted(did, key=lambda one: one["rank"])


def test_ranks_are_forked_from_the_template_of_their_framework(start):
    job = start(frameworks=("pytorch", "tensorflow"))
    for name, gpu, framework in (("one", 0, "tensorflow"), ("two", 0, "pytorch"), ("three", 1, None)):
        code = TrainingCode(framework, Functions("a:b", "a:c")) if framework else None
        job.start(name, gpu, code=code)
        job.end_of(name)
    imported = [did["imported"] for name in ("one", "two", "three") for did in job.did(name)]
    # A rank that loads no framework has that of the first template.
    assert imported == [["tensorflow"], ["pytorch"], ["pytorch"]]


def test_the_agent_of_a_member_imports_its_framework_alone(start):
    job = start(BY_MEMBERS, frameworks=("pytorch", "tensorflow"))
    for name, framework in (("one", "tensorflow"), ("two", COMMAND)):
        job.start(name, 0, code=TrainingCode(framework, Functions("a:b", "a:c")))
        job.end_of(name)
    assert [did["imported"] for name in ("one", "two") for did in job.did(name)] == [["tensorflow"], [None]]


def test_ranks_stay_and_form_group_after_group(job):
    job.start("pair", 0, 1)
    job.start("one", 2)
    assert [step.exit_code for step in job.end_of("pair", "one")] == [0, 0]
    first, second = job.at_work("pair")
    (third,) = job.at_work("one")
    assert len({first, second, third}) == 3
    job.start("three", 2, 0, 1)
    job.end_of("three")
    assert job.at_work("three") == [third, first, second]
    job.start("alone", 1)
    job.start("other", 0, 2)
    job.end_of("alone", "other")
    assert (job.at_work("alone"), job.at_work("other")) == ([second], [first, third])
    assert job.rank_pool.free_nodes() == (NODE,)


def test_groups_have_the_energy_of_their_slots_while_they_work(job):
    job.start("before", 0)
    job.end_of("before")
    job.start("pair", 0, 2, steps=10_000)
    job.start("one", 1, steps=10_000)
    groups = job.rank_pool._running
    wait_for(lambda: job.rank_pool.reap() == [] and all((g.energy_j or 0) >= 120 for g in groups.values()))
    job.enough()
    pair, one = job.end_of("pair", "one")
    # Slots 0 and 2 use 40 J between two heartbeats, slot 1 uses 20 J.
    assert (pair.energy_j % 40, one.energy_j % 20) == (0, 0)
    assert abs(pair.energy_j / 40 - one.energy_j / 20) <= 1


def test_fused_members_have_one_rank_whose_death_is_no_fault_of_theirs(job):
    names = "one", "two", "three"
    for seat, name in enumerate(names, start=1):
        # The error of one is not the others'.
        job.start(
            name, 1, seat=seat, kind=FUSED, steps=2 if name == "three" else 10_000, fails=name == "three"
        )
    wait_for(lambda: all(job.at_work(name) for name in names))
    (rank,) = {pid for name in names for pid in job.at_work(name)}
    (three,) = job.end_of("three")
    assert (three.exit_code, job.free(), job.ended.keys()) == (1, {0, 2, 3}, {"three"})
    # Alone it may have memory enough.
    job.start("full", 1, seat=3, kind=FUSED, steps=2, fails=EXIT_CODES[ExitReason.OUT_OF_MEMORY])
    (full,) = job.end_of("full")
    report = TaskReport(failed_by="out-of-memory")
    assert reason_of_end(full, RunningTask(None, 0, 1.0, 0.0), report) is ExitReason.STOPPED
    job.start("four", 1, seat=3, kind=FUSED, steps=10_000)
    wait_for(lambda: job.at_work("four") == [rank])
    os.kill(rank, signal.SIGKILL)
    for group in job.end_of("one", "two", "four"):
        assert reason_of_end(group, RunningTask(None, 0, 1.0, 0.0), TaskReport()) is ExitReason.STOPPED
        assert (group.exit_code, group.beside_others) == (128 + signal.SIGKILL, True)
    job.start("last", 1, seat=1, kind=FUSED, steps=10_000)
    wait_for(lambda: job.at_work("last"))
    os.kill(*job.at_work("last"), signal.SIGKILL)
    (last,) = job.end_of("last")
    assert reason_of_end(last, RunningTask(None, 0, 1.0, 0.0), TaskReport()) is ExitReason.KILLED
    assert job.free() == {0, 1, 2, 3}
    # A lost node leaves none of them to train alone from then on.
    for seat, name in enumerate(("five", "six"), start=1):
        job.start(name, 1, seat=seat, kind=FUSED, steps=10_000)
    wait_for(lambda: job.at_work("five") and job.at_work("six"))
    os.kill(job.agent(), signal.SIGKILL)
    for group in job.end_of("five", "six"):
        assert reason_of_end(group, RunningTask(None, 0, 1.0, 0.0), TaskReport()) is ExitReason.NODE_FAILURE
        assert not group.beside_others


def test_members_on_one_slot_have_a_rank_each_and_one_that_is_killed_ends_alone(job):
    job.start("one", 1, seat=1, steps=10_000)
    wait_for(lambda: job.at_work("one"))
    assert not (job.folder / "one.joined").exists()
    for seat, name in enumerate(("two", "three"), start=2):
        job.start(name, 1, seat=seat, steps=10_000)
    wait_for(lambda: all(job.at_work(name) for name in ("two", "three")))
    # Also told to one that had not begun when the next one came.
    wait_for(lambda: all((job.folder / f"{name}.joined").exists() for name in ("one", "two")))
    assert not (job.folder / "three.joined").exists()
    assert [job.did(name)[0]["gpu"] for name in ("one", "two", "three")] == [1, 1 + SLOTS, 1 + 2 * SLOTS]
    (killed,) = job.at_work("two")
    os.kill(killed, signal.SIGKILL)
    (two,) = job.end_of("two")
    assert (two.exit_code, job.free()) == (128 + signal.SIGKILL, {0, 2, 3})
    job.start("four", 1, seat=2)
    assert [step.exit_code for step in job.end_of("four")] == [0]
    assert not job.ended.keys() & {"one", "three"}
    job.enough()
    groups = [*job.end_of("one", "three"), two, job.ended["four"]]
    assert [group.exit_code for group in groups] == [0, 0, 128 + signal.SIGKILL, 0]
    assert job.rank_pool.free_nodes() == (NODE,)
    # Together they had one slot.
    held_s = time.time() - min(group.started_at for group in groups)
    assert 0 < sum(group.divided_s for group in groups) <= held_s
    assert sum(group.energy_j or 0.0 for group in groups) % 20 == pytest.approx(0)
    # One that is to be alone there waits for the end of those that wait in other seats.
    idle = [Path(f"/proc/{pid}") for name in ("three", "four") for pid in job.at_work(name)]
    assert all(map(Path.exists, idle))
    job.start("alone", 1, seat=1, alone=True, steps=10_000)
    wait_for(lambda: job.at_work("alone"))
    assert (job.at_work("alone"), any(map(Path.exists, idle))) == (job.at_work("one"), False)
    job.start("beside", 1, seat=3)
    assert [step.exit_code for step in job.end_of("alone", "beside")] == [0, 0]


def test_a_new_agent_counts_energy_from_nothing(job):
    job.start("one", 1, steps=10_000)
    group = job.rank_pool._running["one"]
    wait_for(lambda: job.rank_pool.reap() == [] and group.energy_j)
    before = group.energy_j
    job.rank_pool.on_energy({("localhost", 1): 7.0, ("elsewhere", 1): 99.0})
    assert group.energy_j == before + 7.0
    job.enough()
    job.end_of("one")


def test_waiting_ends_with_results_and_not_with_heartbeats(job, monkeypatch):
    job.start("first", 0)
    job.end_of("first")
    arriving = []
    monkeypatch.setattr(
        job.rank_pool.agents, "wait", lambda _: job.rank_pool.on_message(("localhost", 0), arriving.pop(0))
    )
    for result in sorted(URGENT - {"visited", "saved"}):
        arriving[:] = [{}, {"heartbeat": {}}, {"written": 7}, {result: True}, {}]
        job.rank_pool.wait(PATIENCE_S)
        assert arriving == [{}], result


@pytest.fixture
def slow_part(tmp_path):
    """Return a part that is read as slowly as the test writes, and the order to copy it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    part = PartitionFile(1, 1, len(PART), hashlib.sha256(PART).hexdigest())
    write_manifest(shared, PartitionManifest(0, (part,)))
    os.mkfifo(shared / "0.npz")
    order = StageOrder(1, (PartitionToStage(0, f"{shared}/0.npz", f"{tmp_path}/disk/0.npz"),))
    return shared / "0.npz", order


def test_ranks_wait_for_parts_and_their_agent_does_not(start, tmp_path, slow_part):
    source, order = slow_part
    impatient = replace(
        SITE, timeouts=replace(TIMEOUTS, hang_s=6 * HEARTBEAT_EVERY_S, silence_s=3 * HEARTBEAT_EVERY_S)
    )
    job = start(impatient, stages={"localhost": order})
    job.start("one", 0)

    def opened():
        assert job.rank_pool.reap() == []
        with suppress(OSError):  # until the agent reads
            return os.fdopen(os.open(source, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0)

    # As long as bytes arrive neither the agent nor its ranks count as lost.
    with wait_for(opened) as file:
        for byte in PART:
            file.write(bytes([byte]))
            until = time.monotonic() + HEARTBEAT_EVERY_S
            while (left := until - time.monotonic()) > 0:
                assert job.rank_pool.reap() == []
                job.rank_pool.wait(left)
            assert job.did("one") == []
    assert [step.exit_code for step in job.end_of("one")] == [0]
    (staged,) = job.rank_pool.staged
    assert (staged.node, staged.copied, staged.bytes, staged.errors) == ("localhost", (0,), len(PART), ())
    assert (tmp_path / "disk" / "0.npz").read_bytes() == PART


def test_signals_end_ranks_that_wait_for_parts(start, slow_part):
    job = start(stages={"localhost": slow_part[1]}, grace_s=0.1)
    job.start("one", 0, 1)
    job.rank_pool.stop("one", "deadline")
    ended = []

    def has_ended():
        ended.extend(job.rank_pool.reap())
        return ended

    (step,) = wait_for(has_ended)
    assert (step.exit_code > 128, step.terminated, job.did("one")) == (True, True, [])


def test_output_goes_to_the_log_of_the_task_at_work(job):
    for name in ("first", "second"):
        job.start(name, 0)
        (step,) = job.end_of(name)
        assert step.output == f"at work on {name}\n"
        assert (job.folder / "logs" / f"{name}.log").read_text() == f"at work on {name}\n"


FAULTS = {
    "an error": ({"raise": True}, EXIT_CODES[ExitReason.PROGRAM_ERROR]),
    "a crash": ({"signal": signal.SIGSEGV}, 128 + signal.SIGSEGV),
    "a kill": ({"signal": signal.SIGKILL}, 128 + signal.SIGKILL),
}


def test_a_rank_that_fails_ends_its_own_group_with_its_cause(job):
    job.start("other", 3, steps=10_000)
    wait_for(lambda: job.at_work("other"))
    old = set()
    for (what, (how, code)), rank in product(FAULTS.items(), (0, 1, 2)):
        name = f"{what} of rank {rank}"
        job.start(name, 0, 1, 2, rank=rank, **how)
        (ill,) = job.end_of(name)
        assert (ill.exit_code, ill.hung) == (code, False), name
        assert not old & set(job.at_work(name)), name
        old |= set(job.at_work(name))
        assert "other" not in job.ended, name
    job.start("well", 0, 1, 2)
    (well,) = job.end_of("well")
    assert well.exit_code == 0
    assert not old & set(job.at_work("well"))
    job.enough()
    (other,) = job.end_of("other")
    assert other.exit_code == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_without_a_sign_of_life_is_ended(start, rank):
    job = start(replace(SITE, timeouts=Timeouts(hang_s=10.0, ending_s=1.0)))
    job.start("first", 0, 1, 3)  # so that the start of ranks does not count as a hang
    job.end_of("first")
    job.start("other", 3, steps=1000)
    for seat, name in enumerate(("talking", "silent"), start=1):
        job.start(name, 2, seat=seat, kind=FUSED, steps=240)
    job.start("unresponsive", 0, 1, rank=rank, hang=True)
    wait_for(lambda: len(job.at_work("unresponsive")) == 2)
    (unresponsive,) = job.end_of("unresponsive")
    assert unresponsive.hung
    assert unresponsive.exit_code > 128
    job.enough()
    for each in job.end_of("other", "talking", "silent"):
        assert (each.exit_code, each.hung) == (0, False)


def test_a_group_that_does_not_stop_in_time_is_ended_alone(start):
    job = start(grace_s=1.0)
    job.start("unresponsive", 0, 1, steps=100_000, unresponsive=True)
    job.start("other", 2, steps=1000)
    wait_for(lambda: len(job.at_work("unresponsive") + job.at_work("other")) == 3)
    job.rank_pool.stop("unresponsive", "deadline")
    (unresponsive,) = job.end_of("unresponsive")
    assert (unresponsive.terminated, unresponsive.exit_code > 128) == (True, True)
    job.enough()
    (other,) = job.end_of("other")
    assert (other.exit_code, other.signalled, other.terminated) == (0, False, False)


def test_rank_0_tells_how_long_its_event_file_has_become(job):
    job.start("a", 0, 1, tell=["started", "first_step"])
    job.start("b", 2)
    job.end_of("a", "b")
    length = (job.folder / "events" / "a.jsonl").stat().st_size
    assert job.rank_pool.take_written() == {"a": length}
    assert job.rank_pool.take_written() == {}


def test_sigterm_to_a_rank_is_reported_and_the_rank_stays(job):
    job.start("pair", 0, 1, steps=100_000)
    wait_for(lambda: len(job.at_work("pair")) == 2)
    pids = job.at_work("pair")
    assert job.rank_pool.signalled() == ()
    os.kill(pids[1], signal.SIGTERM)
    wait_for(lambda: job.rank_pool.reap() == [] and job.rank_pool.signalled() == ("pair",))
    job.rank_pool.stop("pair", "signal")
    (pair,) = job.end_of("pair")
    assert (pair.exit_code, pair.signalled) == (0, True)
    job.start("next", 0, 1)
    (after,) = job.end_of("next")
    assert (after.exit_code, after.signalled) == (0, False)
    assert job.at_work("next") == pids


def test_a_second_sigterm_ends_a_rank_that_does_not_leave(job):
    job.start("unresponsive", 0, steps=100_000, unresponsive=True)
    (pid,) = wait_for(lambda: job.at_work("unresponsive"))
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: job.rank_pool.reap() == [] and job.rank_pool.signalled() == ("unresponsive",))
    os.kill(pid, signal.SIGTERM)
    (unresponsive,) = job.end_of("unresponsive")
    assert (unresponsive.exit_code, unresponsive.signalled, unresponsive.got_sigterm) == (
        128 + signal.SIGTERM,
        True,
        True,
    )


def test_an_idle_rank_that_ends_is_started_again(job):
    job.start("first", 0)
    job.end_of("first")
    (old,) = job.at_work("first")
    for end in (signal.SIGTERM, signal.SIGKILL):
        os.kill(old, end)
        wait_for(lambda: job.rank_pool.reap() == [] and not job.rank_pool._slots)
        job.start(end.name, 0)
        (second,) = job.end_of(end.name)
        assert second.exit_code == 0
        (new,) = job.at_work(end.name)
        assert new != old
        old = new


def test_ranks_with_other_code_are_replaced(job):
    one, other = (TrainingCode(name, Functions("m:input_fn", "m:model_fn")) for name in ("a", "b"))
    job.start("first", 0, 1, code=one)
    job.end_of("first")
    job.start("second", 1, 0, code=one)
    job.end_of("second")
    job.start("third", 1, 2, code=other)
    (third,) = job.end_of("third")
    assert third.exit_code == 0
    job.start("links", 0, 1)
    job.start("fourth", 2, code=other)
    job.end_of("links", "fourth")
    left, right = job.at_work("first")
    assert job.at_work("second") == [right, left]
    replaced, fresh = job.at_work("third")
    assert replaced not in (left, right)
    # Links load no code: any rank will do.
    assert job.at_work("links") == [left, replaced]
    assert job.at_work("fourth") == [fresh]
    wait_for(lambda: right not in alive(str(AgentFiles.within(job.folder).address)))
    assert job.rank_pool.reap() == []


def test_a_rank_that_is_to_be_replaced_may_die(job):
    one, other = (TrainingCode(name, Functions("m:input_fn", "m:model_fn")) for name in ("a", "b"))
    job.start("first", 0, code=one)
    job.end_of("first")
    (old,) = job.at_work("first")
    os.kill(old, signal.SIGSTOP)
    job.start("second", 0, code=other)
    os.kill(old, signal.SIGKILL)
    (second,) = job.end_of("second")
    assert second.exit_code == 0
    assert job.at_work("second") != [old]


def test_a_rank_that_cannot_start_ends_its_group_with_its_output(job, monkeypatch):
    broken = job.folder / "broken"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    job.start("m", 0, 1)
    (step,) = job.end_of("m")
    assert step.exit_code == 3
    assert "no such interpreter" in (job.folder / "logs" / "m.log").read_text()


def test_a_rank_that_has_not_begun_survives_the_failed_group(job):
    """Rank 0 is killed before it has sent its address."""
    job.start("first", 1)
    job.end_of("first")
    (idle,) = job.at_work("first")
    job.start("ill", 0, 1, early=signal.SIGKILL)
    (ill,) = job.end_of("ill")
    assert ill.exit_code == 128 + signal.SIGKILL
    job.start("next", 1)
    job.end_of("next")
    assert job.at_work("next") == [idle]


def test_an_agent_of_another_node_is_sent_away(job):
    assert AgentFiles.within(job.folder).address.stat().st_mode & 0o777 == 0o600
    stranger = connect_as(job, "agents", "elsewhere")
    wait_for(lambda: job.rank_pool.reap() == [] and _closed(stranger))


def _closed(connection) -> bool:
    try:
        connection.receive(0.01)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def test_a_node_is_lost_with_its_groups_if_no_agent_connects(start, monkeypatch):
    job = start(replace(SITE, timeouts=replace(TIMEOUTS, join_s=0.5)))
    unresponsive = job.folder / "unresponsive"
    unresponsive.write_text("#!/bin/sh\nsleep 100\n")
    unresponsive.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(unresponsive))
    job.start("m", 0, 1)
    (step,) = job.end_of("m")
    assert (step.lost_nodes, job.rank_pool.nodes, job.rank_pool.gpus) == (("localhost",), (), 0)
    late = connect_as(job, "agents", "localhost")
    wait_for(lambda: job.rank_pool.reap() == [] and job.rank_pool.nodes == (NODE,))
    assert not _closed(late)


@pytest.mark.parametrize(("victim", "lost"), [("agent", ("localhost",)), ("keeper", ())])
def test_a_killed_agent_ends_its_ranks_and_is_started_again(job, victim, lost):
    """Also on the only node, by its keeper, or with the step by the driver."""
    job.start("first", 0, 1, steps=1000)
    wait_for(lambda: len(job.at_work("first")) == 2)
    old = job.at_work("first")
    (keeper,) = job.agents()
    os.kill(keeper if victim == "keeper" else job.agent(), signal.SIGKILL)
    (first,) = job.end_of("first")
    assert (first.exit_code, first.lost_nodes) == (128 + signal.SIGKILL, lost)
    wait_for(lambda: job.rank_pool.reap() == [] and job.rank_pool.nodes == (NODE,))
    job.start("second", 0, 1)
    (second,) = job.end_of("second")
    assert second.exit_code == 0
    assert not set(old) & set(job.at_work("second"))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("launch", [NODES, MEMBERS])
def test_either_launch_has_the_same_results(start, launch):
    """A killed rank ends its own member, a stop another one, and their GPUs are free for the next."""
    job = start(replace(SITE, launch=launch, device="gpu"))
    job.start("one", 3, steps=1000)
    job.start("pair", 1, 2, rank=1, signal=signal.SIGKILL)
    (pair,) = job.end_of("pair")
    assert (pair.exit_code, pair.lost_nodes) == (128 + signal.SIGKILL, ())
    assert "one" not in job.ended
    job.start("again", 1, 2)
    (again,) = job.end_of("again")
    assert again.exit_code == 0
    assert not set(job.at_work("pair")) & set(job.at_work("again"))
    wait_for(lambda: job.at_work("one"))
    job.rank_pool.stop("one", "deadline")
    (one,) = job.end_of("one")
    assert (one.exit_code, one.output) == (0, "at work on one\n")
    assert job.rank_pool.free_nodes() == (NODE,)
    seen = {name: [(r["gpu"], r["device"], r["visible"]) for r in job.did(name)] for name in ("one", "again")}
    assert seen == SEEN[launch]
    assert len(job.agents()) == (1 if launch == NODES else 0)


SEEN = {
    NODES: {"one": [(3, 3, "0,1,2,3")], "again": [(1, 1, "0,1,2,3"), (2, 2, "0,1,2,3")]},
    MEMBERS: {"one": [(3, 0, "3")], "again": [(1, 0, "1,2"), (2, 1, "1,2")]},
}
"""Number of each rank's GPU, its index among those that the rank sees, and those."""


def test_the_rank_of_a_slot_sees_no_gpus(job, monkeypatch):
    """All ranks would take the first one, which NCCL refuses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job.start("m", 2)
    job.end_of("m")
    assert [(rank["device"], rank["visible"]) for rank in job.did("m")] == [(None, "")]


NVML_WITH_MIG = """
from types import SimpleNamespace

nvmlInit = lambda: None
nvmlSystemGetDriverVersion = lambda: "580.65.06"
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: "GPU"
nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(domain=0, bus=1, device=0)
nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7
nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, index: ["MIG-0", "MIG-1", "MIG-2", "MIG-3"][index]
nvmlDeviceGetCpuAffinity = lambda handle, words: ()
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=5 * 2**30)
nvmlDeviceGetUUID = lambda handle: handle
nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
"""


def test_each_rank_sees_the_mig_device_of_its_number_alone(start, monkeypatch, tmp_path):
    """CUDA would use the first of several, in all ranks."""
    (tmp_path / "pynvml.py").write_text(NVML_WITH_MIG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = start(replace(SITE, device="gpu"))
    for gpu in (3, 1):
        job.start(f"on {gpu}", gpu)
    job.end_of("on 3", "on 1")
    seen = [[(rank["device"], rank["visible"]) for rank in job.did(f"on {gpu}")] for gpu in (3, 1)]
    assert seen == [[(0, "MIG-3")], [(0, "MIG-1")]]


def test_what_ranks_have_shared_is_removed_at_their_end(start):
    job = start()
    job.start("stays", 0, shares=True)
    job.start("ends", 1, 2, shares=True, signal=signal.SIGKILL)
    job.end_of("stays", "ends")
    shared = {name: shared_by(*job.at_work(name)) for name in ("stays", "ends")}
    wait_for(lambda: not any(path.exists() for path in shared["ends"]))
    assert all(path.exists() for path in shared["stays"])
    job.end()
    assert not any(path.exists() for path in shared["stays"])


def shared_by(*pids: int) -> list[Path]:
    """Return the files in which PyTorch notes what processes have shared."""
    return [Path(f"/dev/shm/torch_{pid}_1_0") for pid in pids]


def test_gpus_of_a_member_are_free_when_its_step_has_ended(members_job):
    job = members_job
    job.start("m", 0, 1)
    wait_for(lambda: len(job.at_work("m")) == 2)
    (agent,) = job.agents()
    job.end_of("m")
    assert job.rank_pool.free_nodes() == (NODE,)
    assert not alive(str(AgentFiles.within(job.folder).address))
    job.start("next", 0, 1)
    job.end_of("next")
    assert agent not in job.agents()
    assert not set(job.at_work("m")) & set(job.at_work("next"))


def test_a_killed_agent_of_a_member_ends_that_member_alone(members_job):
    job = members_job
    job.start("other", 3, steps=1000)
    wait_for(lambda: job.at_work("other"))
    (others,) = job.agents()
    job.start("first", 0, 1, steps=1000)
    wait_for(lambda: len(job.at_work("first")) == 2)
    (agent,) = set(job.agents()) - {others}
    os.kill(agent, signal.SIGKILL)
    (first,) = job.end_of("first")
    assert (first.exit_code, first.lost_nodes) == (128 + signal.SIGKILL, ())
    assert job.rank_pool.nodes == (NODE,)
    assert "other" not in job.ended
    job.enough()
    (other,) = job.end_of("other")
    assert other.exit_code == 0


def connect_as(job, step: str, node: str, **facts):
    """Connect as an agent of a step on a node."""
    address = json.loads((AgentFiles.within(job.folder).address).read_text())
    who = {"step": step, "host": node, "variables": {}, "cores": [0], **facts}
    return connect(decode(Address, address), who, PATIENCE_S)


GPUS_SEEN = [{"uuid": f"GPU-{number}", "name": "A100"} for number in range(2)]
MISFITS = {
    "another node": ({"node": "n2"}, "was to start on localhost, and started on n2"),
    "too few GPUs": ({"node": "localhost", "gpus": GPUS_SEEN[:1]}, "sees 1 GPUs on localhost, and not 2"),
    "too many GPUs": ({"node": "localhost", "gpus": 2 * GPUS_SEEN}, "sees 4 GPUs on localhost, and not 2"),
}


@pytest.mark.parametrize(("facts", "message"), MISFITS.values(), ids=MISFITS)
def test_a_misplaced_agent_ends_its_member(start, tmp_path, monkeypatch, facts, message):
    unresponsive = tmp_path / "unresponsive"
    unresponsive.write_text("#!/bin/sh\nexec sleep 100\n")
    unresponsive.chmod(0o755)
    job = start(replace(BY_MEMBERS, device="gpu"), shutdown_s=0.2)
    monkeypatch.setattr(sys, "executable", str(unresponsive))
    job.rank_pool.agents.nodes = (NODE, Node("n2", NODE.gpus))
    job.start("m", 0, 1)
    stranger = connect_as(job, f"{tmp_path.name}/m", **facts)
    (step,) = job.end_of("m")
    assert message in stranger.receive(PATIENCE_S)["rejected"]
    assert _closed(stranger)
    assert f"placement could not be kept: step {tmp_path.name}/m {message}" in step.output
    assert exit_reason_of(step.exit_code, step.output) is ExitReason.NOT_LAUNCHED
    assert (step.lost_nodes, len(job.rank_pool.free_nodes())) == ((), 2)


def test_a_launcher_that_chooses_nodes_may_use_another_node(start, tmp_path, monkeypatch):
    job = start(BY_MEMBERS)
    monkeypatch.setitem(LAUNCHERS, "local", replace(LAUNCHERS["local"], chooses_nodes=True))
    unresponsive = tmp_path / "unresponsive"
    unresponsive.write_text("#!/bin/sh\nexec sleep 100\n")
    unresponsive.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(unresponsive))
    job.rank_pool.agents.nodes = (NODE, Node("n2", NODE.gpus))
    job.start("m", 2, 3)
    agent = connect_as(job, f"{tmp_path.name}/m", "n2")
    wait_for(lambda: job.rank_pool.reap() == [] and _has_word(agent))
    assignment = decode(AgentAssignment, agent.receive(PATIENCE_S))
    assert (assignment.node, assignment.gpus) == ("n2", (2, 3))
    assert agent.receive(PATIENCE_S) == {"start": None, "gpu": 2}


def _has_word(connection) -> bool:
    return bool(select.select([connection], [], [], 0.01)[0])


DRIVER = """
import json, os, sys, time
from pathlib import Path
sys.path[:0] = json.loads(os.environ["TEST_PATHS"])
from test_driver_rank_pool import Job
sys.executable = sys.argv[2]
job = Job(Path(sys.argv[1]))
job.start("one", 0, 1, steps=100000)
job.start("two", 2)
while True:
    job.rank_pool.reap()
    time.sleep(0.05)
"""


def test_ranks_at_work_and_idle_end_with_a_driver_that_is_killed(tmp_path):
    python, script = tmp_path / "python", tmp_path / "driver.py"
    python.write_text(f"#!{sys.executable}\n{WORK}")
    python.chmod(0o755)
    script.write_text(DRIVER)
    here = Path(__file__).parent
    paths = json.dumps([str(here), str(here.parents[1])])
    driver = subprocess.Popen(
        [sys.executable, script, tmp_path, python], env={**os.environ, "TEST_PATHS": paths}
    )
    wait_for(lambda: (tmp_path / "one.did").exists() and (tmp_path / "two.did").exists())
    assert len(alive(str(AgentFiles.within(tmp_path).address))) >= 3
    driver.kill()
    driver.wait()
    wait_for(lambda: not alive(str(AgentFiles.within(tmp_path).address)))


def test_the_exit_code_of_a_lost_peer_is_unique():
    assert LOST_PEER not in EXIT_CODES.values()
