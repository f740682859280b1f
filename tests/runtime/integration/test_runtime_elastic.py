"""Members that are resized, moved and stopped during training."""

from __future__ import annotations

import shutil
import time

import pytest
from driven_job import Job
from tiny_networks import ENSEMBLES, functions_of
from whole_folds import usage_of

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import MemberProfile
from hetctl.model.run import Budget
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import Decision, Planner
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_planner_state

AGAIN_S = 0.1
STEPS = ("task_started", "task_ended")


def give(member: str, *gpus: int, rate: float = 100.0) -> Allocation:
    return Allocation(member, len(gpus), DATA_PARALLEL, rate, (Placement("localhost", gpus),))


class Script:
    """An elastic planner that passes through given states of the cluster, by a rule of the test.

    Parameters
    ----------
    states : list of tuple of Allocation
        Allocations in each state; finished members are skipped.
    due : callable
        From a request to whether the next state is due.
    """

    def __init__(self, states, due):
        self.states, self.due = states, due
        self.requests = []
        self.planner = Planner("script", "elastic", self.decide)

    def decide(self, request):
        self.requests.append(request)
        index, since_s = request.planner_state or [0, request.now_s]
        if index + 1 < len(self.states) and self.due(request, since_s):
            index, since_s = index + 1, request.now_s
        held = {h.workload.name: h for h in request.held}
        here = {*held, *(workload.name for workload in request.workloads)}
        wanted = {a.member: a for a in self.states[index] if a.member in here}
        start = [a for name, a in wanted.items() if name not in held or held[name].allocation != a]
        stop = tuple(name for name in held if name not in wanted)
        fixed = {name for name, h in held.items() if h.fixed}
        return Decision(
            tuple(a for a in start if a.member not in fixed),
            tuple(name for name in stop if name not in fixed),
            request.now_s + AGAIN_S,
            [index, since_s],
        )


def after(seconds):
    return lambda request, since_s: request.now_s - since_s >= seconds


def after_samples(count):
    """Return a rule that is true when member m has trained so many samples on the GPUs that it has now."""
    left_at_start = {}

    def due(request, _since_s):
        ours = (held for held in request.held if held.workload.name == "m")
        left = {held.since_s: held.workload.samples_left for held in ours}
        return any(left_at_start.setdefault(step, left[step]) - left[step] > count for step in left)

    return due


def scripted(tmp_path, members, **how):
    return Job(tmp_path, members, max_gpus=4, planner="script", **how)


def test_a_member_is_resized_and_another_makes_room_for_it(tmp_path, monkeypatch):
    # So many that none is done before the plans change, also on a machine that is busy.
    job = scripted(tmp_path, {"a": {"epochs": 120}, "b": {"epochs": 90}})
    apart, together = (give("a", 0), give("b", 1)), (give("a", 0, 1),)
    job.drive_by(Script([apart, together, apart], after(0.6)).planner, monkeypatch)
    assert job.reason == "finished"
    assert job.rounds() == [["a", "b"], ["a"], ["a", "b"]]
    assert (job.task_gpus("a"), job.task_gpus("b")) == ([1, 2, 1], [1, 1])
    assert (job.reasons("a"), job.reasons("b")) == (["resize", "resize"], ["preempted"])
    assert job.trained("a") == list(range(1, 121))
    assert job.trained("b") == list(range(1, 91))
    ended_by = [event.data["ended_by"] for event in job.events("round_ended")]
    assert ended_by == ["preempted", "resize", "converged"]
    assert not any(event.data["fault"] for event in job.events("task_ended"))


def test_only_those_wait_whose_gpus_are_not_free_yet(tmp_path, monkeypatch):
    members = {"slow": {"epochs": 99, "leave_s": 2.5}, "quick": {"epochs": 99}, "new": {"epochs": 3}}
    job = scripted(tmp_path, members, slots=3)
    first = (give("slow", 0), give("quick", 1))
    then = (give("quick", 0, 1), give("new", 2))
    script = Script([first, then, ()], after(1.5))
    job.drive_by(script.planner, monkeypatch)
    assert job.rounds() == [["slow", "quick"], ["new"], ["quick"]]
    began_and_ended = [(e.kind, e.data["member"]) for e in events_in(job.run) if e.kind in STEPS]
    new, slow = began_and_ended.index(("task_started", "new")), began_and_ended.index(("task_ended", "slow"))
    assert new < slow < began_and_ended.index(("task_started", "quick"), new)
    left = job.events("stopped", "slow")[0].time
    assert job.events("task_ended")[0].data["member"] == "quick"
    asked = [script.requests[i].now_s for i in range(len(script.requests))]
    told = job.events("stopped", "quick")[0].time
    began = events_in(job.run)[0].time
    assert not [s for s in asked if told - began < s < left - began], "nobody is asked while starts pend"


def test_gpu_hours_of_a_resized_member_sum_over_its_steps(tmp_path, monkeypatch):
    job = scripted(tmp_path, {"a": {"epochs": 30}})
    job.drive_by(Script([(give("a", 0),), (give("a", 0, 1),)], after(0.5)).planner, monkeypatch)
    starts, ends = job.events("task_started"), job.events("task_ended")
    spent = sum((e.time - s.time) * s.data["gpus"] for s, e in zip(starts, ends, strict=True))
    usage = usage_of(events_in(job.run), time.time())
    assert (usage.rounds, usage.gpu_seconds) == (2, pytest.approx(spent))
    assert len(starts) == 2


def test_a_trainer_that_does_not_leave_is_killed_without_fault(tmp_path, monkeypatch):
    job = scripted(tmp_path, {"unresponsive": {"hang": True}, "good": {"epochs": 60}}, grace_s=1)
    states = [(give("unresponsive", 0), give("good", 1)), (give("good", 0, 1),)]
    job.drive_by(Script(states, after(2.5)).planner, monkeypatch)
    ended = {event.data["member"]: event for event in job.events("task_ended")}
    assert ended["unresponsive"].data["description"] == "killed by SIGKILL"
    assert ended["unresponsive"].data["fault"] is False
    assert job.progress()["unresponsive"].failures == 0
    assert job.task_gpus("good") == [1, 2]
    assert job.progress()["good"].converged
    assert job.events("round_ended")[0].data["ended_by"] in ("resize", "preempted")


def test_a_member_that_converges_when_stopped_stays_converged(tmp_path, monkeypatch):
    job = scripted(tmp_path, {"a": {"epochs": 2, "epoch_s": 0.5}})
    script = Script([(give("a", 0),), (give("a", 1),)], after(0.0))
    monkeypatch.setattr("hetctl.runtime.driver.rank_pool.RankPool.stop", lambda *_: None)
    job.drive_by(script.planner, monkeypatch)
    assert (job.task_gpus("a"), job.reason) == ([1], "finished")
    assert job.events("round_ended")[0].data["ended_by"] == "converged"


def test_near_the_deadline_a_member_stays_where_it_is(tmp_path, monkeypatch):
    """Not even the rest of an epoch counts as fitting elsewhere: its length is only estimated."""
    job = scripted(tmp_path, {"a": {"epochs": 3, "epoch_s": 0.95}}, rates={"a": {1: 10.0}})
    states = [(give("a", 0, rate=10.0),), (give("a", 0, 1, rate=1.45),)]
    script = Script(states, lambda request, _since_s: request.held and request.now_s > 1.5)
    job.drive_by(script.planner, monkeypatch, seconds=8)
    assert (job.task_gpus("a"), job.reasons("a"), job.reason) == ([1], [], "finished")
    assert any(held.fixed for request in script.requests for held in request.held)


def test_the_next_job_remembers(tmp_path, monkeypatch):
    job = scripted(tmp_path, {"a": {"epochs": 8}}, budget=Budget(max_rounds=2))
    script = Script([(give("a", 0),), (give("a", 1),), (give("a", 0, 1),)], after(0.3))
    job.drive_by(script.planner, monkeypatch)
    assert job.reason == "--max-rounds 2 is reached"
    remembered = read_planner_state(job.run)
    assert remembered[0] == 1
    assert script.requests[0].planner_state is None
    asked = len(script.requests)
    job.drive_by(script.planner, monkeypatch, number=1)
    later = script.requests[asked]
    assert later.planner_state == remembered
    assert later.now_s > script.requests[asked - 1].now_s, "time counts from the start of the run"


def test_requests_have_members_in_training_and_their_work(tmp_path, monkeypatch):
    job = scripted(tmp_path, {"a": {"epochs": 20}, "b": {"epochs": 20}})
    script = Script([(give("a", 0),), (give("a", 0), give("b", 1))], after(0.5))
    job.drive_by(script.planner, monkeypatch)
    first, *others = script.requests
    assert ([c.name for c in first.workloads], first.held) == (["a", "b"], ())
    assert all(request.cluster == first.nodes for request in others)
    training = next(request for request in others if request.held)
    assert [c.name for c in training.workloads] == ["b"]
    assert [node.gpus for node in training.nodes] == [(1,)]
    (held,) = training.held
    assert (held.workload.name, held.allocation) == ("a", give("a", 0))
    assert 0 <= held.since_s <= training.now_s
    left = [h.workload.samples_left for r in others for h in r.held if h.workload.name == "a"]
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]


@pytest.mark.parametrize("planner", [*PLANNERS, "fixed-2"])
def test_every_planner_brings_every_member_to_its_end(tmp_path, planner):
    members = {"a": {"epochs": 12}, "b": {"epochs": 4}, "c": {"epochs": 2}}
    rates = {"a": {1: 100.0, 2: 190.0, 4: 350.0}, "b": {1: 50.0, 2: 90.0}, "c": {1: 20.0}}
    options = {"solver_time_limit_s": 0.2}
    job = Job(tmp_path, members, slots=4, max_gpus=4, rates=rates, planner=planner, options=options)
    assert "ended: finished" in job.drive()
    assert {name: job.trained(name) for name in members} == {
        name: list(range(1, config["epochs"] + 1)) for name, config in members.items()
    }
    assert not any(event.data["fault"] for event in job.events("task_ended"))
    if planner == "doubling":
        assert max(job.task_gpus("a")) > 1


@pytest.mark.parametrize("planner", ["fluid", "doubling", "static", "independent", "flotilla"])
def test_a_member_that_needs_two_gpus_never_has_one(tmp_path, planner):
    members = (
        Member("wide", {"epochs": 6}, min_gpus=2, max_gpus=4),
        Member("exact", {"epochs": 4}, min_gpus=3, max_gpus=3),
        *(Member(name, {"epochs": 8}, max_gpus=1) for name in "ab"),
    )
    rates = {k: 100.0 * k for k in range(1, 5)}
    profiles = tuple(MemberProfile(member.name, rates, None, 10) for member in members)
    ensemble = Ensemble("e", "tensorflow", Functions("nets:input_fn", "nets:model_fn"), members, "/x")
    job = Job(
        tmp_path, {}, slots=4, planner=planner, ensemble=ensemble, profiles=profiles,
        options={"solver_time_limit_s": 0.1},
    )  # fmt: skip
    assert "ended: finished" in job.drive()
    assert min(job.task_gpus("wide")) >= 2
    assert set(job.task_gpus("exact")) == {3}
    assert job.trained("wide") == list(range(1, 7))
    assert job.trained("b") == list(range(1, 9))


@pytest.mark.training
def test_a_resized_global_batch_ends_as_a_still_one(tmp_path, monkeypatch):
    """Resized in the midst of epochs, from 1 to 2 and to 4 ranks: losses are equal to 1e-5."""
    config = {"pause_s": 0.03, "optimizer": "sgd", "learning_rate": 0.1}
    stop = StopRule("val_accuracy", "max", 9, max_epochs=2)
    members = tuple(Member(name, config, 20, 5, stop, global_batch_size=40) for name in ("m", "still"))
    functions = functions_of("pytorch", "fit_train_fn")
    ensemble = Ensemble("tiny", "pytorch", functions, members, str(ENSEMBLES))
    profiles = tuple(MemberProfile(member.name, {1: 200.0}, None, 640) for member in members)
    job = Job(tmp_path, {}, slots=5, planner="script", grace_s=60, profiles=profiles, ensemble=ensemble)
    states = [(give("m", *range(gpus)), give("still", 4)) for gpus in (1, 2, 4)]
    job.drive_by(Script(states, after_samples(40)).planner, monkeypatch, real=True)
    assert (job.task_gpus("m"), job.task_gpus("still")) == ([1, 2, 4], [1])
    resized, still = (
        [epoch.metrics["val_loss"] for epoch in job.progress()[member.name].epochs] for member in members
    )
    assert len(still) == 2
    assert resized == pytest.approx(still, rel=1e-5)


@pytest.mark.training
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")
def test_a_member_resized_twice_trains_every_sample_once(tmp_path, monkeypatch):
    member = Member("m", {"pause_s": 0.1}, 32, 5, StopRule("val_accuracy", "max", 9, max_epochs=3), 2)
    functions = functions_of("tensorflow", "fit_train_fn")
    job = Job(
        tmp_path, {}, planner="script", grace_s=60, profiles=(MemberProfile("m", {1: 100.0}, None, 640),),
        ensemble=Ensemble("tiny", "tensorflow", functions, (member,), str(ENSEMBLES)),
    )  # fmt: skip
    alone, both = (give("m", 0),), (give("m", 0, 1),)
    job.drive_by(Script([alone, both, alone], after_samples(40)).planner, monkeypatch, real=True)
    assert (job.task_gpus("m"), job.reason) == ([1, 2, 1], "finished")
    assert job.trained("m") == [1, 2, 3]
    stops, starts = job.events("stopped", "m"), job.events("started", "m")
    assert [event.data["reason"] for event in stops] == ["resize", "resize"]
    assert [event.data["part_samples"] for event in stops] == [
        event.data["part_samples"] for event in starts[1:]
    ]
    assert any(event.data["part_samples"] for event in stops)
    own = {*job.run.path.rglob("m.*"), *job.folder.rglob("*tfevents*")}
    assert own >= {job.run.events_of("m"), job.run.log_of("m")}
    assert len(own) <= 3
