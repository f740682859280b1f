"""The core of hops with a virtual executor: stores, transfers, ranks and checkpoints by a table of times."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper import hop_events
from hetctl.methods.hopper.hop_events import HopProgress
from hetctl.methods.hopper.hop_plans import HopPlanner
from hetctl.methods.hopper.hop_scheduler import OPEN_S, HopRules, HopScheduler
from hetctl.methods.hopper.schedule import SearchOptions
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.ensemble import Member, StopRule
from hetctl.model.events import ExitReason
from hetctl.model.hops import (
    HopPlanMade,
    StateFetched,
    StateSaved,
    StoreLost,
    StoreOpened,
    Unit,
    Visit,
    gpus_in,
    node_of,
    slots_in,
)
from hetctl.model.site import Node
from hetctl.model.training_progress import EpochResult
from hetctl.model.workload import Workload
from hetctl.scheduling import events
from hetctl.scheduling.commands import EndJob, EndRound, ScheduleTick, Start, Stop

SAVE_S, HOP_S = 0.3, 0.2
QUICK_SHARE = 0.3


@dataclass
class Observed:
    """Members that need training."""

    workloads: dict[str, Workload]
    limit: str | None = None

    def left(self, _now_s):
        return self.workloads

    def used_up(self):
        return self.limit


@dataclass
class Executor:
    """Executor of the commands of a core on a virtual clock."""

    nodes: dict[str, tuple[int, ...]]
    homes: dict[str, frozenset[int]]
    epochs: dict[str, int]
    partitions: int
    seed: int = 0
    deadline_s: float = 1e9
    scheduler: str = "best"
    progress: dict[str, HopProgress] = field(default_factory=dict)
    cut_off: frozenset[str] = frozenset()
    rates: dict[int, float] = field(default_factory=lambda: {1: 100.0})
    replay: tuple = ()
    seconds: dict[str, float] = field(default_factory=dict)
    are_known: bool = True

    def __post_init__(self):
        rule = lambda most: StopRule(metric="val_loss", patience=10**6, max_epochs=most)  # noqa: E731
        self.members = {name: Member(name, {}, stop=rule(most)) for name, most in self.epochs.items()}
        workloads = {
            name: Workload(
                *(name, self.planned_rates(name), 100.0 * self.partitions * most, 100 * self.partitions),
                spread={} if self.are_known else dict.fromkeys(self.rates, 3.0),
            )
            for name, most in self.epochs.items()
        }
        self.observed = Observed(workloads)
        planner = HopPlanner(self.scheduler, SearchOptions(self.seed, 0.02))
        progress = [self.progress.get(name) or HopProgress(self.members[name]) for name in self.members]
        rules = HopRules(self.partitions, self.seed, self.replay)
        self.core = HopScheduler(rules, progress, planner, self.observed)
        self.draw = random.Random(self.seed)
        self.queue, self.order, self.now = [], itertools.count(), 0.0
        self.stores = {node: set() for node in self.nodes}
        self.checkpoints = dict.fromkeys(self.epochs, -1)
        self.newest = dict.fromkeys(self.epochs)
        self.done, self.undone, self.lost, self.converged, self.ended = [], set(), [], [], None
        self.plans, self.intervals = [], []

    def planned_rates(self, name):
        if name in self.seconds and self.are_known:
            return {1: 100.0 / self.seconds[name]}
        return self.rates

    def at(self, delay_s, action, *arguments):
        heapq.heappush(self.queue, (self.now + delay_s, next(self.order), action, arguments))

    def run(self, limit=20_000):
        nodes = tuple(Node(name, gpus) for name, gpus in self.nodes.items())
        self.send(events.JobOpened(0.0, nodes, self.deadline_s))
        for node in self.nodes:
            self.at(0.1, self.open_store, node)
        for _ in range(limit):
            self.look()
            self.execute(self.core.schedule(self.now))
            if self.ended is not None:
                return self
            assert self.queue, "nothing is going to happen"
            self.now, _, action, arguments = heapq.heappop(self.queue)
            self.send(events.Tick(self.now))
            action(*arguments)
        raise AssertionError("the job comes to no end")

    def send(self, event):
        self.execute(self.core.handle(event))

    def look(self):
        """Do nothing: no search asks for members."""

    def execute(self, found):
        for command in found:
            self.EXECUTE[type(command)](self, command)

    def open_store(self, node):
        if node in self.nodes:
            self.send(StoreOpened(node, self.homes[node]))

    def start(self, command):
        (task,) = command.tasks
        visit, node = task.visit, node_of(task.visit.worker)
        assert int(visit.partition[1:]) in self.homes[node], "data stays where it is"
        newest = self.newest[visit.config]
        saved = f"{visit.config}-{self.checkpoints[visit.config]}"
        assert visit.state == newest if visit.state else newest in (None, saved)
        assert visit.checkpoint == self.checkpoints[visit.config]
        own = self.seconds.get(visit.config, 100.0 / self.rates[len(gpus_in(visit.worker))])
        seconds = own if visit.epoch % 2 == 0 else 0.1
        self.at(seconds * self.draw.uniform(0.8, 1.2), self.end_visit, visit, visit.state, self.now)

    def is_at_work(self, visit):
        running = self.core.running.get(visit.config)
        return running is not None and running.task.visit == visit

    def end_visit(self, visit, state, began):
        if not self.is_at_work(visit):
            return
        node = node_of(visit.worker)
        if self.core.running[visit.config].stopping:
            self.lost.append(visit)
            self.send(events.TaskEnded(self.now, visit.config, ExitReason.STOPPED))
        elif state is not None and state not in self.stores[node]:
            self.at(0.05, self.end_visit, visit, state, began)
        else:
            self.intervals.append((began, self.now, visit))
            self.finish(visit, node)

    def finish(self, visit, node):
        name = f"{visit.config}-{visit.number}"
        self.stores[node].add(name)
        self.newest[visit.config] = name
        self.done.append(visit)
        passed = [v for v in self.valid if (v.config, v.epoch) == (visit.config, visit.epoch)]
        over = visit.epoch % 2 == 1 and len(passed) + self.before(visit) == self.partitions
        result = EpochResult(visit.training_epoch, {"val_loss": 1.0}, 1.0, 1, self.now) if over else None
        self.send(visit.ended(0.0, self.now, result=result))
        # A checkpoint may be written before the rank has ended its task.
        is_quick = self.draw.random() < QUICK_SHARE
        if is_quick:
            self.save(visit, node)
        self.send(events.TaskEnded(self.now, visit.config, ExitReason.STOPPED))
        if not is_quick:
            self.at(SAVE_S, self.save, visit, node)

    def before(self, visit):
        """Return how many partitions the member had visited in this pass before the job."""
        known = self.progress.get(visit.config)
        same_pass = known and visit.epoch == 2 * len(known.history) + known.evaluating
        return len(known.visited) if same_pass else 0

    def save(self, visit, node):
        if node in self.nodes and visit.number not in self.undone:
            self.checkpoints[visit.config] = max(self.checkpoints[visit.config], visit.number)
            self.send(StateSaved(visit.config, visit.number, 0, 0, "", 0, "", 0.0))

    def fetch(self, command):
        self.at(HOP_S, self.fetched, command)

    def fetched(self, command):
        if command.node not in self.nodes:
            return
        error = (
            "" if command.source in self.nodes and command.state in self.stores[command.source] else "gone"
        )
        if not error:
            self.stores[command.node].add(command.state)
        self.send(StateFetched(command.node, command.state, error=error))

    def forget(self, command):
        for node in command.nodes:
            self.stores[node].difference_update(command.states)

    def undo(self, command):
        self.undone.update(command.numbers)
        assert min(command.numbers) > self.checkpoints[command.member], "a checkpoint has it"
        self.newest[command.member] = None

    def converge(self, command):
        self.converged.append(command.member)
        del self.observed.workloads[command.member]

    def lose_node(self, node):
        if node not in self.nodes or len(self.nodes) == 1:
            return
        for name, running in list(self.core.running.items()):
            if node_of(running.task.visit.worker) == node:
                self.lost.append(running.task.visit)
                self.send(events.TaskEnded(self.now, name, ExitReason.NODE_FAILURE))
        del self.nodes[node]
        self.stores[node] = set()
        self.send(events.NodeLost(self.now, node))

    def kill_rank(self, number):
        names = sorted(self.core.running)
        if names:
            name = names[number % len(names)]
            self.lost.append(self.core.running[name].task.visit)
            self.send(events.TaskEnded(self.now, name, ExitReason.KILLED))

    def join_node(self, node, gpus):
        """Let the agent of a node connect late."""
        self.nodes[node] = gpus
        self.stores[node] = set()
        self.send(events.NodeJoined(self.now, Node(node, gpus)))
        self.at(0.1, self.open_store, node)

    def away(self, node, seconds):
        """Lose a node, which returns with an empty store."""
        if node in self.nodes and len(self.nodes) > 1:
            self.at(seconds, self.join_node, node, self.nodes[node])
            self.lose_node(node)

    def kill_agent(self, node):
        """Kill an agent, which is started again with an empty store; its node stays in use."""
        if node not in self.nodes:
            return
        self.stores[node] = set()
        self.send(StoreLost(node))
        for name, running in list(self.core.running.items()):
            if node_of(running.task.visit.worker) == node:
                self.lost.append(running.task.visit)
                self.send(events.TaskEnded(self.now, name, ExitReason.NODE_FAILURE))
        self.at(0.3, self.open_store, node)

    def restart_agents(self):
        """Kill all ranks and agents, which start again with empty stores."""
        for name, running in list(self.core.running.items()):
            self.lost.append(running.task.visit)
            self.send(events.TaskEnded(self.now, name, ExitReason.KILLED))
        for node in self.nodes:
            self.stores[node] = set()
            self.at(0.3, self.open_store, node)

    def stop(self, command):
        pass  # Visits see it when they would end.

    def end(self, command):
        self.ended = command.reason

    @property
    def valid(self):
        return [visit for visit in self.done if visit.number not in self.undone]

    EXECUTE: ClassVar = {
        hop_events.OpenHops: lambda *_: None,
        Start: start,
        hop_events.FetchState: fetch,
        hop_events.ForgetStates: forget,
        hop_events.UndoVisits: undo,
        hop_events.Converge: converge,
        HopPlanMade: lambda self, command: self.plans.append(command),
        Stop: stop,
        ScheduleTick: lambda self, command: self.at(max(0.0, command.at_s - self.now), lambda: None),
        EndRound: lambda *_: None,
        EndJob: end,
    }


def assert_complete(job):
    """Assert that each member has trained and been evaluated once on each partition in each epoch."""
    seen = Counter((visit.config, visit.epoch, visit.partition) for visit in job.valid)
    wanted = {
        (name, epoch, f"p{partition}")
        for name, epochs in job.epochs.items()
        for epoch in range(2 * epochs)
        for partition in range(job.partitions)
    }
    assert seen == Counter(wanted)
    assert sorted(job.converged) == sorted(job.epochs)


def assert_exclusive(job):
    """Assert that no GPU and no member has two visits at a time."""
    for of in (lambda visit: slots_in(visit.worker), lambda visit: (visit.config,)):
        by = defaultdict(list)
        for began, ended, visit in job.intervals:
            for one in of(visit):
                by[one].append((began, ended))
        for spans in by.values():
            spans.sort()
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def everywhere(nodes, partitions):
    return dict.fromkeys(nodes, frozenset(range(partitions)))


@pytest.mark.parametrize("scheduler", ["best", "randomized"])
def test_every_member_visits_every_partition_once(scheduler):
    nodes = {"a": (0,), "b": (0,), "c": (0, 1)}
    homes = {"a": frozenset({0}), "b": frozenset({1}), "c": frozenset({2, 3})}
    job = Executor(nodes, homes, {"x": 2, "y": 1, "z": 3, "u": 2, "v": 2}, 4, scheduler=scheduler).run()
    assert job.ended == "finished"
    assert_complete(job)
    assert_exclusive(job)
    assert job.plans[0].reason == "start"


def test_visits_of_unknown_length_are_planned_anew_when_the_first_have_ended():
    nodes = dict.fromkeys("abcd", (0,))
    homes = {node: frozenset({number}) for number, node in enumerate(nodes)}
    seconds = {"x": 1.0, "y": 2.0, "z": 4.0, "u": 7.0, "v": 12.0, "w": 14.0}
    epochs = dict.fromkeys(seconds, 2)
    # By the guess, none would end before the deadline.
    unknown = {"are_known": False, "rates": {1: 100.0 / 5000}, "deadline_s": 1000.0}
    job = Executor(nodes, homes, epochs, 4, seconds=seconds, **unknown).run()
    assert_complete(job)
    assert_exclusive(job)
    again = [plan for plan in job.plans if plan.reason == "first visits"]
    assert 0 < len(again) <= 4
    # The longest member alone takes 112 s.
    assert job.plans[0].predicted_s > 10_000 > 500 > again[-1].predicted_s


def test_hops_of_no_members_end_at_once():
    """As where the last members are in the middle of data-parallel epochs."""
    job = Executor({"a": (0,)}, everywhere("a", 2), {}, 2).run()
    assert (job.ended, job.done) == ("finished", [])


def test_a_lost_node_costs_its_visits_and_replicas_take_over():
    nodes = {"a": (0,), "b": (0,), "c": (0,)}
    homes = {"a": frozenset({0, 1}), "b": frozenset({1, 2}), "c": frozenset({2, 0})}
    job = Executor(nodes, homes, {"x": 2, "y": 2, "z": 2, "u": 2}, 3)
    job.at(3.5, job.lose_node, "b")
    job.run()
    assert job.ended == "finished"
    assert len(job.lost) <= 2
    assert_complete(job)
    assert [plan.reason for plan in job.plans][:2] == ["start", "node lost"]


def test_a_node_that_joins_late_takes_its_share():
    job = Executor({"a": (0,)}, everywhere(("a", "b"), 4), {"x": 2, "y": 2, "z": 2}, 4)
    job.at(2.5, job.join_node, "b", (0,))
    job.run()
    assert_complete(job)
    assert_exclusive(job)
    later = [visit for began, _, visit in job.intervals if began > 4 and visit.epoch % 2 == 0]
    assert {visit.worker for visit in later} == {"a:0", "b:0"}
    assert [plan.reason for plan in job.plans][:2] == ["start", "node joined"]


@pytest.mark.parametrize("scheduler", ["best", "randomized"])
def test_a_node_that_returns_is_planned_anew(scheduler):
    nodes = {"a": (0,), "b": (0,), "c": (0,)}
    homes = {"a": frozenset({0, 1}), "b": frozenset({1, 2}), "c": frozenset({2, 0})}
    job = Executor(nodes, homes, {"x": 2, "y": 2, "z": 2, "u": 2}, 3, scheduler=scheduler)
    job.at(3.5, job.away, "b", 3.0)
    job.run()
    assert job.ended == "finished"
    assert_complete(job)
    assert_exclusive(job)
    workers = {visit.worker for began, _, visit in job.intervals if began > 6.5}
    assert workers == {"a:0", "b:0", "c:0"}
    assert [plan.reason for plan in job.plans if plan.reason != "used up"] == [
        "start",
        "node lost",
        "node joined",
    ]


def test_no_visit_starts_on_a_node_until_its_next_agent_is_there():
    job = Executor({"a": (0,), "b": (0,)}, everywhere("ab", 3), {"x": 1, "y": 1, "z": 1}, 3)
    job.at(1.5, job.kill_agent, "b")
    job.open_store = lambda node: (
        Executor.open_store(job, node)
        if not 1.5 < job.now < 3
        else job.at(1.4, Executor.open_store, job, node)
    )
    job.run()
    assert_complete(job)
    assert_exclusive(job)
    assert len(job.lost) == 1
    began = [began for began, _, visit in job.intervals if visit.worker == "b:0"]
    assert not any(1.5 < at < 3.0 for at in began)
    assert max(began) > 3.0
    assert [plan.reason for plan in job.plans][:3] == ["start", "node lost", "node joined"]


def test_a_visit_that_waits_for_a_state_of_a_lost_node_stops():
    stops = []

    def fetch_and_lose(job, command):
        Executor.fetch(job, command)
        job.at(HOP_S / 2, job.lose_node, command.source)

    def stop(_job, command):
        stops.append(command.reason)

    job = Executor({"a": (0,), "b": (0,)}, everywhere("ab", 4), {"x": 1, "y": 1, "z": 1}, 4)
    job.EXECUTE = {**Executor.EXECUTE, hop_events.FetchState: fetch_and_lose, Stop: stop}
    job.run()
    assert job.ended == "finished"
    assert_complete(job)
    assert stops == ["state lost"]


def test_others_go_on_until_a_returned_node_opens_its_store():
    job = Executor({"a": (0,), "b": (0,)}, everywhere("ab", 2), {"x": 1, "y": 1, "z": 1}, 2)
    job.at(0.5, job.away, "b", 1.0)
    job.open_store = lambda node: None if job.now > 1.0 else Executor.open_store(job, node)
    job.run()
    assert job.ended == "finished"
    assert_complete(job)
    assert {visit.worker for began, _, visit in job.intervals if began > 1.0} == {"a:0"}


def test_without_a_replica_members_wait_for_a_node_that_returns():
    homes = {"a": frozenset({0}), "b": frozenset({1})}
    job = Executor({"a": (0,), "b": (0,)}, homes, {"x": 1, "y": 1, "z": 1}, 2)
    job.at(0.5, job.away, "b", 1.0)
    job.run()
    assert job.ended == "finished"
    assert_complete(job)


def test_a_node_that_no_state_reaches_goes_on_from_checkpoints():
    homes = {"a": frozenset({0}), "b": frozenset({1}), "c": frozenset({2})}
    nodes = dict.fromkeys("abc", (0,))
    job = Executor(nodes, homes, {"x": 1, "y": 1, "z": 1}, 3, cut_off=frozenset("b")).run()
    assert job.ended == "finished"
    assert_complete(job)
    assert len(job.lost) < 40


def test_a_budget_that_is_used_up_ends_the_job():
    job = Executor({"a": (0,)}, everywhere("a", 4), {"x": 2}, 4)
    job.at(2.5, lambda: setattr(job.observed, "limit", "1 GPU-hour is used up"))
    job.run()
    assert (job.ended, job.lost) == ("1 GPU-hour is used up", [])
    assert len(job.done) == 3


def test_without_a_replica_the_rest_is_trained_first():
    nodes = {"a": (0,), "b": (0,)}
    homes = {"a": frozenset({0}), "b": frozenset({1})}
    job = Executor(nodes, homes, {"x": 1, "y": 1}, 2)
    job.at(0.5, job.lose_node, "b")
    job.run()
    assert job.ended == "no node has p1"
    assert {(visit.config, visit.partition) for visit in job.valid} == {("x", "p0"), ("y", "p0")}


def test_a_partitions_only_node_is_waited_for_while_it_imports():
    nodes = {"a": (0,), "b": (0,)}
    homes = {"a": frozenset({0}), "b": frozenset({1})}
    job = Executor(nodes, homes, {"x": 1, "y": 1}, 2)
    job.at(0.5, lambda: job.send(StoreLost("b")))
    job.at(60.0, job.open_store, "b")
    job.run()
    assert job.ended == "finished"


def test_the_only_node_of_a_partition_is_not_waited_for_forever():
    nodes = {"a": (0,), "b": (0,)}
    homes = {"a": frozenset({0}), "b": frozenset({1})}
    job = Executor(nodes, homes, {"x": 1, "y": 1}, 2)
    job.at(0.5, lambda: job.send(StoreLost("b")))
    job.run()
    assert job.ended == "no node has p1"
    assert job.now < 2 * OPEN_S


def test_times_of_visits_carry_over_to_other_types_as_planned():
    rates = {"fast": {1: 10.0}, "slow": {1: 1.0}}
    member = Workload("m", rates["slow"], 400.0, 100, evaluate_s=6.0, rates_by_type=rates)
    nodes = [Node("f", (0,), "fast"), Node("s", (0,), "slow")]
    homes = dict.fromkeys(("f:0", "s:0"), ("p0", "p1"))
    planner = HopPlanner("best", SearchOptions(0, 0.02))
    hopper = Hopper(("p0", "p1"))
    for worker, partitions in homes.items():
        hopper.worker_joins(worker, partitions)
    hopper.config_joins("m")
    planner.plan(hopper, {"m": member}, nodes, 0.0)
    fast, slow = (planner.seconds(Unit("m", 0, "p1"), worker) for worker in ("f:0", "s:0"))
    assert (fast, slow) == pytest.approx((5.0, 50.0))
    planner.note(Visit(0, "m", 0, "p0", "f:0"), 2 * fast)
    assert planner.seconds(Unit("m", 0, "p1"), "s:0") == pytest.approx(2 * slow)
    assert planner.seconds(Unit("m", 1, "p1"), "s:0") == pytest.approx(3.0)
    planner.note(Visit(1, "m", 0, "p1", "s:0"), 3 * slow)
    assert planner.seconds(Unit("m", 2, "p0"), "f:0") == pytest.approx(3 * fast)


def test_no_visit_starts_that_would_pass_the_deadline():
    job = Executor({"a": (0,)}, everywhere("a", 4), {"x": 1, "y": 1}, 4, deadline_s=4.4).run()
    assert (job.ended, job.lost) == ("deadline", [])
    assert len(job.done) in (3, 4)


def test_a_job_continues_where_checkpoints_end():
    member = Member("x", {}, stop=StopRule(metric="val_loss", max_epochs=2))
    partly = HopProgress(member, (1.0,), evaluating=True, visited=(2, 0))
    job = Executor({"a": (0, 1)}, everywhere("a", 3), {"x": 2}, 3, progress={"x": partly})
    job.run()
    assert [(visit.epoch, visit.partition) for visit in job.done] == [(3, "p1")]


def test_a_member_that_had_converged_does_not_train_on():
    member = Member("x", {}, stop=StopRule(metric="val_loss", max_epochs=2))
    job = Executor({"a": (0,)}, everywhere("a", 2), {"x": 2, "y": 1}, 2)
    job.progress["x"] = HopProgress(member, (1.0, 0.5))
    job.__post_init__()
    job.run()
    assert (job.ended, sorted(job.converged)) == ("finished", ["x", "y"])
    assert {visit.config for visit in job.done} == {"y"}


@pytest.mark.parametrize(("most", "epochs"), [(1, 2), (4, 4)])
def test_an_edited_stop_rule_counts_from_the_end_of_the_epoch(most, epochs):
    job = Executor({"a": (0,)}, everywhere("a", 2), {"x": 3, "y": 1}, 2)
    rule = StopRule(metric="val_loss", patience=10**6, max_epochs=most)

    def edit_in_the_second_epoch():
        seen = [visit.epoch for visit in job.done if visit.config == "x"]
        if seen and max(seen) == 2:
            job.send(events.MembersEdited(job.now, {"x": rule, "other": rule}))

    job.look = edit_in_the_second_epoch
    job.run()
    assert max(visit.training_epoch for visit in job.done if visit.config == "x") == epochs
    assert (job.ended, sorted(job.converged)) == ("finished", ["x", "y"])


SCALING = {gpus: 100.0 * gpus for gpus in range(1, 9)}


def sizes_in(job):
    """Return the numbers of GPUs of the visits that train, in the order of their ends."""
    return [len(gpus_in(visit.worker)) for _, _, visit in job.intervals if visit.epoch % 2 == 0]


def test_few_members_train_in_groups():
    nodes = dict.fromkeys("ab", (0, 1, 2, 3))
    job = Executor(nodes, {"a": {0, 1}, "b": {2, 3}}, {"x": 2, "y": 2}, 4, rates=SCALING).run()
    assert set(sizes_in(job)) == {4}
    assert set(job.plans[0].workers) == {"a:0+1+2+3", "b:0+1+2+3"}
    assert_complete(job)
    assert_exclusive(job)


def test_groups_grow_when_members_have_left():
    """Of four members on four GPUs of a node three leave after an epoch."""
    epochs = {"x": 1, "y": 1, "z": 1, "u": 4}
    job = Executor({"a": (0, 1, 2, 3)}, everywhere("a", 4), epochs, 4, rates=SCALING).run()
    sizes = sizes_in(job)
    assert (sizes[0], sizes[-1]) == (1, 4)
    assert sizes == sorted(sizes)
    assert_complete(job)
    assert_exclusive(job)
    assert [plan.reason for plan in job.plans][:2] == ["start", "other groups"]


def test_the_last_evaluations_form_no_groups():
    job = Executor({"a": (0, 1)}, everywhere("a", 4), {"x": 1, "y": 1}, 4, rates=SCALING).run()
    assert {visit.worker for _, _, visit in job.intervals} == {"a:0", "a:1"}
    assert len(job.plans) == 1


def test_a_replay_repeats_the_groups_of_other_nodes():
    """Groups of several sizes, on a node of another name, at other speeds."""
    epochs = {"x": 1, "y": 1, "z": 1, "u": 4}
    first = Executor({"a": (0, 1, 2, 3)}, everywhere("a", 4), epochs, 4, rates=SCALING).run()
    trace = tuple(visit for _, _, visit in sorted(first.intervals, key=lambda one: one[0]))
    again = Executor({"b": (0, 1, 2, 3)}, everywhere("b", 4), epochs, 4, seed=5, rates=SCALING, replay=trace)
    assert_exclusive(again.run())
    for name in epochs:
        courses = [
            [(v.epoch, v.partition, len(gpus_in(v.worker))) for _, _, v in job.intervals if v.config == name]
            for job in (first, again)
        ]
        assert courses[0] == courses[1]


@pytest.mark.parametrize(
    ("gpus", "rates"),
    [((0,), SCALING), ((0, 1), {1: 100.0}), ((0, 1), {1: 100.0, 2: 90.0})],
    ids=["nodes of one GPU", "members of one GPU", "members that do not scale"],
)
def test_groups_are_not_formed_where_they_are_of_no_use(gpus, rates):
    nodes = dict.fromkeys("abcd", gpus)
    homes = {node: {number} for number, node in enumerate(nodes)}
    job = Executor(nodes, homes, {"x": 1, "y": 1}, 4, rates=rates).run()
    assert set(sizes_in(job)) == {1}


def test_a_killed_rank_of_a_group_costs_one_visit():
    job = Executor({"a": (0, 1), "b": (0, 1)}, everywhere("ab", 4), {"x": 2}, 4, rates=SCALING)
    job.at(0.9, job.kill_rank, 0)
    job.run()
    assert len(job.lost) == 1
    assert_complete(job)
    assert_exclusive(job)


def test_a_lost_node_leaves_the_groups_of_others():
    job = Executor({"a": (0, 1), "b": (0, 1)}, everywhere("ab", 4), {"x": 2, "y": 2}, 4, rates=SCALING)
    job.at(1.2, job.lose_node, "a")
    job.run()
    assert len(job.lost) <= 1
    assert_complete(job)
    assert_exclusive(job)


FAULTS = st.lists(
    st.tuples(
        st.floats(0.2, 12.0), st.sampled_from(["node", "away", "rank", "agent", "agents"]), st.integers(0, 7)
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(
    epochs=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    gpus=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    partitions=st.integers(1, 4),
    faults=FAULTS,
    seed=st.integers(0, 99),
    scheduler=st.sampled_from(["best", "randomized"]),
    scales=st.booleans(),
)
def test_no_visit_is_missing_or_twice_after_faults(epochs, gpus, partitions, faults, seed, scheduler, scales):
    nodes = {f"n{number}": tuple(range(count)) for number, count in enumerate(gpus)}
    members = {f"m{number}": count for number, count in enumerate(epochs)}
    rates = {count: 100.0 * count for count in range(1, 5 if scales else 2)}
    homes = everywhere(nodes, partitions)
    job = Executor(nodes, homes, members, partitions, seed, scheduler=scheduler, rates=rates)
    for at_s, kind, number in faults:
        fault = {
            "node": (job.lose_node, f"n{number}"),
            "away": (job.away, f"n{number % 4}", 0.3 + at_s / 4),
            "rank": (job.kill_rank, number),
            "agent": (job.kill_agent, f"n{number % 4}"),
            "agents": (job.restart_agents,),
        }
        job.at(at_s, *fault[kind])
    job.run()
    assert job.ended == "finished"
    assert_complete(job)
    assert_exclusive(job)


class Searched(Executor):
    """A job whose search goes on with the first members that have their epochs, and asks for new ones."""

    asked = 0

    def look(self):
        """As in a run: what a search asks for is there before the next decision."""
        for name in [name for name in self.converged if name not in self.core.running]:
            self.converged.remove(name)
            if self.asked < 4:
                self.asked += 1
                self.join(name, self.epochs[name] + 1)
                self.join(f"new-{self.asked}", 1)

    def join(self, name, most):
        history = (1.0,) * self.epochs.get(name, 0)
        self.epochs[name], samples = most, 100 * self.partitions
        member = Member(name, {}, stop=StopRule(metric="val_loss", patience=10**6, max_epochs=most))
        self.observed.workloads[name] = Workload(name, self.rates, float(samples), samples)
        saved, self.newest[name] = self.checkpoints.setdefault(name, -1), None
        # A member that pauses takes no memory.
        assert not any(state.startswith(f"{name}-") for states in self.stores.values() for state in states)
        self.send(HopProgress(member, history, visit=saved))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["best", "randomized"]), st.booleans())
def test_members_of_a_search_join_late_and_go_on(seed, scheduler, away):
    homes = {"n1": frozenset({0, 1}), "n2": frozenset({1, 2, 0})}
    job = Searched({"n1": (0,), "n2": (0, 1)}, homes, {"a": 1, "b": 2, "c": 1}, 3, seed, scheduler=scheduler)
    if away:
        job.at(2.0, job.away, "n1", 1.0)
    job.run()
    assert job.ended == "finished"
    seen = Counter((visit.config, visit.epoch, visit.partition) for visit in job.valid)
    wanted = {
        (name, epoch, f"p{partition}")
        for name, epochs in job.epochs.items()
        for epoch in range(2 * epochs)
        for partition in range(3)
    }
    assert seen == Counter(wanted)
    assert sorted(name for name in job.epochs if name.startswith("new")) == [f"new-{n}" for n in range(1, 5)]
    assert_exclusive(job)
