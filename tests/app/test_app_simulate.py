"""What a simulation is made from: workloads, jobs that are drawn, and what may be known of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hetctl.app.project import Project
from hetctl.app.simulate import SimulateRequest, run_simulation, trace_of
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.profile import Hardware, ProfilePoint
from hetctl.model.workload import Workload
from hetctl.storage.paths import Home

MEMBERS = tuple(Member(name, {"units": i}) for i, name in enumerate(("a", "b")))
ENSEMBLE = Ensemble("e", "tensorflow", Functions("m:i", "m:m"), MEMBERS, "/nowhere")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Member a has 100 samples and b 300, at 10 samples/s; a start takes 5 s, an epoch of 100 1 s more."""
    project = Project(tmp_path, Home(tmp_path / ".hetctl"))
    points = [
        ProfilePoint(
            member.name, 1, 10.0, member.fingerprint, 32, time.time(), Hardware("x", "x", "x"),
            samples=100.0 + 200 * i, samples_per_epoch=100, startup_s=5.0, evaluate_s=1.0,
        )
        for i, member in enumerate(MEMBERS)
    ]  # fmt: skip
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_points("e", "here", points)
    return project


def request(**values: object) -> SimulateRequest:
    gpus = {"": values.pop("gpus", 2)}
    values = {"planner": "independent", "gpus": gpus, "gpus_per_node": 2, **values}
    return SimulateRequest(ENSEMBLE, **values)  # type: ignore[arg-type]


def test_what_was_measured_counts_unless_restarts_are_given(project: Project) -> None:
    measured = run_simulation(project, request()).simulation
    assert {m.member: m.done_s for m in measured.members} == pytest.approx({"a": 5 + 11, "b": 5 + 33})
    bare = run_simulation(project, request(restart_s=10.0)).simulation
    assert {m.member: m.done_s for m in bare.members} == pytest.approx({"a": 10, "b": 30})


@pytest.mark.parametrize("planner", ["auto", "doubling-exploratory"])
def test_expected_rates_are_taken_for_the_true_ones(project: Project, planner: str) -> None:
    """Two members of 100 s and 300 s, measured on one GPU: a second one is expected to be faster."""
    with Catalog.open(project.home.catalog) as catalog:
        longer = [replace(point, samples=10 * point.samples) for point in catalog.points("e", "here")]
        catalog.save_points("e", "here", longer)
    result = run_simulation(project, request(planner=planner, restart_s=10.0)).simulation
    assert result.makespan_s < 300.0
    assert result.ratio >= 1.0


def test_members_with_measured_busy_shares_may_share_a_gpu(project: Project) -> None:
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_points("e", "here", [replace(p, busy=0.4) for p in catalog.points("e", "here")])
    wishes = {"planner": "fluid", "gpus": 1, "restart_s": 0.0}
    alone = run_simulation(project, request(**wishes)).simulation
    shared = run_simulation(project, request(**wishes, options={"max_per_gpu": 2})).simulation
    assert (alone.makespan_s, shared.makespan_s) == pytest.approx((40, 30))
    assert (alone.lower_bound_s, shared.lower_bound_s) == pytest.approx((40, 30))


def test_rates_may_have_to_be_learned(project: Project) -> None:
    learned = run_simulation(project, request(planner="fluid", restart_s=10.0, learn_rates_s=3.0))
    assert learned.simulation.ratio >= 1
    often = request(planner="auto", restart_s=1.0, learn_rates_s=3.0, sample_members=5)
    assert len(run_simulation(project, often).simulation.members) == 5


def test_each_job_after_a_round_limit_restarts(project: Project) -> None:
    limited = run_simulation(project, request(gpus=1, restart_s=2.0, wall_s=15)).simulation
    assert [i.restart_s for i in limited.intervals if i.member == "b"] == [0.0, 2.0, 2.0]


def test_the_same_jobs_come_however_often(project: Project) -> None:
    often = run_simulation(project, request(sample_members=50, arrival_mean_s=1.0))
    rarely = run_simulation(project, request(sample_members=50, arrival_mean_s=1000.0))
    assert often.arrivals.keys() == rarely.arrivals.keys()
    assert list(rarely.arrivals.values()) == pytest.approx([1000 * at for at in often.arrivals.values()])
    assert next(iter(often.arrivals.values())) == 0
    assert 0.6 < max(often.arrivals.values()) / 49 < 1.6
    assert {name[:2] for name in often.arrivals} == {"a-", "b-"}


def test_without_jobs_each_member_arrives_once(project: Project) -> None:
    assert run_simulation(project, request()).arrivals == {"a": 0.0, "b": 0.0}
    a, b = run_simulation(project, request(arrival_mean_s=100.0)).arrivals.values()
    assert a == 0 < b


def test_the_trace_has_exactly_what_was_promised(project: Project) -> None:
    text = trace_of(run_simulation(project, request(restart_s=0.0)).simulation)
    assert text.splitlines() == [
        '{"member": "a", "gpus": 1, "start_s": 0.0, "end_s": 10.0, "restart_s": 0.0, "samples": 100.0}',
        '{"member": "b", "gpus": 1, "start_s": 0.0, "end_s": 30.0, "restart_s": 0.0, "samples": 300.0}',
    ]


def test_failing_nodes_lose_what_came_after_the_last_checkpoint(project: Project) -> None:
    steady = run_simulation(project, request(sample_members=40, restart_s=0.0)).simulation
    failing = run_simulation(project, request(sample_members=40, restart_s=0.0, node_mtbf_s=100.0)).simulation
    assert failing.restarts > 0 == steady.restarts
    assert failing.makespan_s > steady.makespan_s


class Doubling:
    """Sees twice the work that there is."""

    made: list[tuple[int, int]]

    def __init__(self, workloads: Sequence[Workload], seed: int) -> None:
        self.made.append((len(workloads), seed))

    def __call__(self, workloads: Sequence[Workload]) -> list[Workload]:
        return [replace(c, samples_left=2 * c.samples_left) for c in workloads]

    def errors(self) -> dict[float, float]:
        return {0.5: 1.0}


def test_predicted_work_is_all_that_planners_see_also_for_auto(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("hetctl.scheduling.simulate.work_estimator")
    monkeypatch.setattr(Doubling, "made", [], raising=False)
    module.WorkEstimator = Doubling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetctl.scheduling.simulate.work_estimator", module)
    options = {"seed": 7, "solver_time_limit_s": 0.1}
    outcome = run_simulation(project, request(planner="auto", predicted=True, restart_s=0.0, options=options))
    assert outcome.simulation.work == "predicted"
    assert outcome.simulation.makespan_s <= 30
    assert " independent 0:01:00" in outcome.simulation.reason
    assert outcome.work_errors == {0.5: 1.0}
    assert Doubling.made == [(2, 7), (2, 7)]
