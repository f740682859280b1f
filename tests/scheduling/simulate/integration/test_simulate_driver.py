"""The simulator beside the real driver: the same rounds at the same times, on the same GPUs."""

from __future__ import annotations

import errno
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from virtual_job import Conclusion, Round, VirtualPool, VirtualRun, recorded

from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Placement
from hetctl.model.profile import MemberProfile
from hetctl.model.site import Cluster
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import active_workloads
from hetctl.runtime.driver.job_modes import DataParallelJob
from hetctl.scheduling.commands import Command, EndJob, ScheduleTick, Start
from hetctl.scheduling.events import SchedulingEvent, TaskEnded
from hetctl.scheduling.planners import PLANNERS, planner_named
from hetctl.scheduling.planners.base import options_from
from hetctl.scheduling.round_scheduler import RoundScheduler
from hetctl.scheduling.simulate.engine import Engine
from hetctl.scheduling.simulate.scenario import Arrival, Failures, JobTiming, Scenario
from hetctl.scheduling.simulate.simulated_task import SimulatedTask

ONE = Cluster.of(4, 2)
TWO_TYPES = Cluster.of_types({"v100": (2, 2), "p100": (2, 2)})
EPOCH = 100
CLOSE_S = 1.0
"""The driver looks every 0.05 s, and a run has up to ten rounds one after the other."""

Both = Callable[..., tuple[list[Round], list[Round]]]


class Drawn(random.Random):
    """Failures at known times, by node in the cluster's order; a node fails once at most."""

    times: list[float]

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.times.pop(0) if self.times else 1e12 * lambd


def profile(
    name: str, epochs: int, *rates: float, gpu_types: Mapping[str, float] | None = None
) -> MemberProfile:
    """Describe a member by its rates on 1, 2, .. GPUs, and how much faster it is by type."""
    curve = dict(enumerate(rates, start=1))
    by_type = {
        name: {gpus: factor * rate for gpus, rate in curve.items()}
        for name, factor in (gpu_types or {}).items()
    }
    return MemberProfile(name, curve, float(epochs * EPOCH), EPOCH, startup_s=2.0, rates_by_type=by_type)


@dataclass(frozen=True)
class RunCase:
    """A run: members, GPUs, length of jobs, failures of nodes, and the sharing of data."""

    planner: str
    profiles: list[MemberProfile]
    cluster: Cluster
    usable_s: float
    failed_at_s: Mapping[str, float]
    lockstep: bool
    options: Mapping[str, Any]


def simulate(ensemble: Ensemble, run: RunCase, monkeypatch: pytest.MonkeyPatch) -> list[SimulatedTask]:
    known = {p.member: p for p in run.profiles}
    cluster = run.cluster
    terms = GpuTerms(run.options.get("max_per_gpu", 1))
    members = active_workloads(ensemble, known, {}, cluster.gpus, terms=terms)
    failures = None
    if run.failed_at_s:
        Drawn.times = [run.failed_at_s.get(node.name, 1e12) for node in cluster.nodes]
        monkeypatch.setattr("hetctl.scheduling.simulate.engine.random.Random", Drawn)
        failures = Failures(1.0, repair_s=1e9)
    scenario = Scenario(cluster, JobTiming(run.usable_s), run.lockstep, failures)
    arrivals = [Arrival(member) for member in members]
    return Engine(planner_named(run.planner), arrivals, scenario, options_from(run.options)).run().tasks


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Return the rounds of the driver, and those of the simulator."""

    def run(
        planner: str,
        profiles: list[MemberProfile],
        cluster: Cluster = ONE,
        *,
        usable_s: float = 1e6,
        failed_at_s: Mapping[str, float] | None = None,
        **options: Any,
    ) -> tuple[list[Round], list[Round]]:
        virtual = VirtualRun(
            tmp_path, monkeypatch, profiles, planner, options, cluster, usable_s, failed_at_s
        )
        run = (profiles, cluster, usable_s, failed_at_s or {}, False, options)
        tasks = simulate(virtual.ensemble, RunCase(planner, *run), monkeypatch)
        by_round = defaultdict(list)
        for task in tasks:
            by_round[task.round_index].append(task)
        simulated = [
            (those[0].start_s, {s.workload.name: s.allocation.placement for s in those})
            for those in by_round.values()
        ]
        return virtual.rounds(), simulated

    return run


def assert_same(driven: list[Round], simulated: list[Round]) -> None:
    assert [placed for _, placed in simulated] == [placed for _, placed in driven]
    assert [at_s for at_s, _ in simulated] == pytest.approx([at_s for at_s, _ in driven], abs=CLOSE_S)


def on(node: str) -> tuple[Placement, ...]:
    return (Placement(node, (0,)),)


def members_of(rounds: list[Round]) -> list[str]:
    return ["".join(placed) for _, placed in rounds]


def test_one_round_for_all_types_that_stops_as_one(both: Both) -> None:
    types = {"v100": 2.0, "p100": 1.0}
    names = {"a": 9, "b": 8, "c": 7, "d": 6, "e": 5, "f": 4}
    profiles = [profile(name, epochs, 10.0, gpu_types=types) for name, epochs in names.items()]
    driven, simulated = both("flotilla", profiles, TWO_TYPES)
    assert_same(driven, simulated)
    first = {part.node for parts in simulated[0][1].values() for part in parts}
    assert first == {"node-0", "node-1"}
    assert len(simulated[1][1]) == 4, "all four GPUs are given anew when one of them is free"


def test_reports_for_a_phase_wait_until_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stores of states that agents open while the phase before the hops still trains."""
    asked: list[bool] = []

    class Later(DataParallelJob):
        begun = False

        def scheduler(self) -> RoundScheduler:
            self.begun = True
            return super().scheduler()

        def reports(self) -> tuple[()]:
            asked.append(self.begun)
            return ()

    monkeypatch.setattr(
        "hetctl.runtime.driver.driver.modes_of", lambda rounds: [DataParallelJob(rounds), Later(rounds)]
    )
    run = VirtualRun(tmp_path, monkeypatch, [profile("a", 3, 10.0)], "independent", {}, ONE)
    assert len(run.rounds()) == 1
    assert asked == [True] * len(asked) != []


def test_a_job_continues_without_a_failed_node(both: Both) -> None:
    profiles = [profile(name, 3, 10.0) for name in "abcdef"]
    driven, simulated = both("independent", profiles, failed_at_s={"node-1": 15.0})
    assert_same(driven, simulated)
    assert len(simulated[0][1]) == 4
    assert simulated[1][0] == 32.0, "the others trained on"
    later = {part.node for _, placed in simulated[1:] for parts in placed.values() for part in parts}
    assert later == {"node-0"}


def test_a_failed_node_without_a_task_is_noticed_at_once(both: Both) -> None:
    """b is on node-1 until 12 s, and a elsewhere until 42 s; then c and d go to node-0, one by one."""
    profiles = [profile(name, epochs, 10.0) for name, epochs in (("a", 4), ("b", 1), ("c", 2), ("d", 2))]
    driven, simulated = both("flotilla", profiles, Cluster.of(2, 1), alpha=0.0, failed_at_s={"node-1": 30.0})
    assert_same(driven, simulated)
    assert members_of(simulated) == ["ab", "c", "d"]
    assert simulated[1] == (42.0, {"c": on("node-0")})


def test_near_the_deadline_a_member_without_room_cedes_its_gpus(both: Both) -> None:
    profiles = [profile("a", 4, 5.0), profile("b", 9, 10.0), profile("c", 4, 4.0), profile("d", 2, 20.0)]
    driven, simulated = both("independent", profiles, Cluster.of(2, 2), usable_s=70.0)
    assert_same(driven, simulated)
    assert simulated[-1][0] > 70


def test_members_share_gpus(both: Both) -> None:
    names = (("a", 30), ("b", 28), ("c", 12), ("d", 5), ("e", 4))
    profiles = [replace(profile(name, epochs, 10.0), busy=0.5) for name, epochs in names]
    driven, simulated = both("fluid", profiles, Cluster.of(2, 2), max_per_gpu=2)
    assert_same(driven, simulated)
    together = [(part.gpus, part.seat) for parts in simulated[0][1].values() for part in parts]
    assert sorted(together) == [((0,), 1), ((0,), 2), ((1,), 1), ((1,), 2)]


@pytest.mark.parametrize("planner", ["doubling", "fluid", "flotilla-local", "fixed-2"])
def test_the_rounds_of_other_planners(both: Both, planner: str) -> None:
    rates = (10.0, 19.0, 27.0, 34.0)
    profiles = [profile(name, epochs, *rates) for name, epochs in (("a", 30), ("b", 12), ("c", 5))]
    assert_same(*both(planner, profiles))


@pytest.mark.parametrize(
    "what", ["virtual_job.VirtualPool.start", "hetctl.runtime.driver.rounds.write_planner_state"]
)
def test_a_failed_start_ends_the_job_and_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The disk is full when the first round begins, for one of its members at least."""
    profiles = [profile("a", 2, 10.0), profile("b", 1, 10.0)]
    virtual = VirtualRun(tmp_path, monkeypatch, profiles, "independent", {}, Cluster.of(2, 2))
    full = iter([True])
    room, name = what.rsplit(".", 1)
    owner = VirtualPool if room.endswith("VirtualPool") else import_module(room)
    start = getattr(owner, name)

    def fails_once(*values: Any, **named: Any) -> Any:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
        return start(*values, **named)

    monkeypatch.setattr(owner, name, fails_once)
    virtual.rounds()
    ends = [c.reason for _, commands in virtual.log for c in commands if isinstance(c, EndJob)]
    assert ends == ["disk-full", "finished"]


SCALE = 2.0**24
"""Samples and rates are multiples of it, so that times and samples are computed without rounding."""
SCENARIOS = 2 * settings.default.max_examples
EVERY_PLANNER = [*PLANNERS, "fixed-1", "fixed-2"]


def scenario(number: int) -> RunCase:
    """Draw a run from a grid on which much happens at the same time."""
    draw = random.Random(number)
    planner = EVERY_PLANNER[number % len(EVERY_PLANNER)]
    shares = planner_named(planner).trains_as_group
    several = draw.random() < 0.4
    cluster = TWO_TYPES if several else Cluster.of(*draw.choice([(2, 1), (4, 2), (4, 1), (6, 2), (8, 4)]))
    types = {"v100": 2.0, "p100": 1.0} if several else {}
    failing = draw.sample(cluster.nodes, draw.choice([0, 0, 1, len(cluster.nodes) - 1]))
    failed_at_s = {node.name: draw.randrange(1, 160) / 4 for node in failing}
    return RunCase(
        planner,
        [drawn_profile(draw, f"m{i}", types) for i in range(draw.randint(2, 7))],
        cluster,
        draw.choice([1e6, 32.0, 48.0, 80.0]),
        failed_at_s,
        shares and draw.random() < 0.5,
        {"alpha": draw.choice([0.0, 0.5, 0.8, 1.0]), "seed": number, "solver_time_limit_s": 0.1},
    )


def drawn_profile(draw: random.Random, name: str, types: Mapping[str, float]) -> MemberProfile:
    one = SCALE * draw.choice([8, 16, 32])
    curve = {gpus: one * 2.0 ** int(math.log2(gpus)) for gpus in range(1, draw.choice([1, 2, 4]) + 1)}
    by_type = {kind: {gpus: factor * rate for gpus, rate in curve.items()} for kind, factor in types.items()}
    epoch = int(64 * SCALE)
    work, startup_s = float(draw.randint(1, 9) * epoch), draw.choice([0.0, 1.0, 2.0])
    return MemberProfile(name, curve, work, epoch, startup_s=startup_s, rates_by_type=by_type)


def told(log: list[Conclusion]) -> list[str]:
    """Return each event from which something follows, and each end of a task, with its commands."""
    return [
        f"{_event(event)}: {[_command(c) for c in commands if not isinstance(c, ScheduleTick)]}"
        for event, commands in log
        if isinstance(event, TaskEnded) or any(not isinstance(c, ScheduleTick) for c in commands)
    ]


def _event(event: SchedulingEvent | None) -> str:
    return str(replace(event, no_room=False) if isinstance(event, TaskEnded) else event)


def _command(command: Command) -> str:
    """Write a command; between two jobs, the state of a planner has passed through JSON."""
    if isinstance(command, Start):
        return str(replace(command, planner_state=json.dumps(command.planner_state)))
    return str(command)


@pytest.mark.parametrize("number", range(SCENARIOS))
def test_both_adapters_are_commanded_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    drawn = scenario(number)
    virtual = VirtualRun(
        *(tmp_path, monkeypatch, drawn.profiles, drawn.planner, drawn.options, drawn.cluster),
        *(drawn.usable_s, drawn.failed_at_s),
        lockstep=drawn.lockstep,
    )
    log: list[Conclusion] = []
    monkeypatch.setattr("hetctl.scheduling.simulate.engine.RoundScheduler", recorded(log, virtual.decisions))
    simulate(virtual.ensemble, drawn, monkeypatch)
    monkeypatch.undo()
    virtual.rounds()
    assert told(log) == told(virtual.log)
    assert any(isinstance(command, Start) for _, commands in log for command in commands)
