"""Results of simulations on the terminal and on pages."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement, Plan, Round
from hetctl.model.run_status import TaskSpan
from hetctl.model.simulation import HopSimulation, Interval, SimulationResult
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.reports.page import render
from hetctl.reports.plan_tables import explain_table
from hetctl.reports.simulation import MOST_DRAWN, held_gpu_s, report_of
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

STEPS = (
    TaskSpan("a<b>", 0, "w0", (0,), 0.0, 2.0, 1),
    TaskSpan("a<b>", 0, "w1", (0,), 2.0, 5.0, 0),
    TaskSpan("c", 0, "w0", (0,), 4.0, 9.0, 0),
)
HOPS = HopSimulation(
    *("best", "hopper", 2, 2, 2, 1, 0),
    makespan_s=9.0,
    lower_bound_s=8.0,
    ratio=1.125,
    gpu_busy_fraction=0.8,
    lost_s=2.0,
    plan_seconds=0.25,
    tasks=STEPS,
    config_names=("a<b>", "c"),
    worker_names=("w0", "w1"),
)


def show(renderable: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    assert all(len(line) <= 80 for line in console.file.getvalue().splitlines())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def result() -> SimulationResult:
    members = [Workload(f"net-{i}", {1: 10.0, 2: 18.0}, 100.0 * (i + 1)) for i in range(5)]
    arrivals = [Arrival(member, 2.0 * i) for i, member in enumerate(members)]
    simulation = simulate(PLANNERS["independent"], arrivals, Scenario(Cluster.of(2, 2)), Options())
    arrivals_s = {member.member: 2.0 * i for i, member in enumerate(simulation.members)}
    return SimulationResult(simulation, "zoo", "imported", arrivals_s)


def test_the_figures_of_members_and_hops_are_shown(result: SimulationResult) -> None:
    busy = f"{result.simulation.gpu_busy_fraction * 100:.0f}"
    lines = show(report_of(result))
    assert lines[-1].split()[6:11] == [f"{result.simulation.ratio:.3f}", "5", "0", busy, "%"]
    chosen = replace(result.simulation, reason="it is the only one")
    text = "\n".join(show(report_of(replace(result, simulation=chosen, work_errors={0.25: 0.314}))))
    assert chosen.reason in text
    assert "31 % at 25 %" in text
    hops = show(report_of(HOPS))[-1].split()
    assert hops == ["9.0", "s", "8.0", "s", "1.125", "80", "%", "2.0", "s", "0.25", "s"]


def test_the_page_has_every_member_and_interval(result: SimulationResult) -> None:
    page = render(report_of(result))
    assert page == render(report_of(result))
    assert "<h1>zoo, simulated</h1>" in page
    for i in range(5):
        assert f"net-{i}</td>" in page
        assert f"<title>net-{i} · round " in page
    assert f"<b>{result.simulation.ratio:.3f}</b><span>makespan over its bound" in page
    assert re.search(r"http|<script [^>]*src|<link|@import|fetch|import[ (]", page) is None


def test_names_and_reasons_are_escaped_in_the_page(result: SimulationResult) -> None:
    named = replace(result, ensemble="<img src=x>", simulation=replace(result.simulation, reason="<i>"))
    page = render(report_of(named))
    assert "<img" not in page
    assert "&lt;i&gt;" in page


def test_the_page_shows_workers_and_configurations() -> None:
    page = render(report_of(HOPS))
    assert "a<b>" not in page
    assert "a&lt;b&gt; · epoch 0 · worker w0 · 2.0 s · undone by a failure" in page
    for word in ("first job", "round numbers", "exit code", "slot"):
        assert word not in page
    plain = re.sub(' data-label="[^"]*"', "", page)
    (row,) = [" ".join(row.split()) for row in plain.split("<tr>") if "w0</td>" in row]
    assert '<td class="number">1</td><td class="number">1</td>' in row


def test_a_chart_that_nobody_could_read_is_left_out(result: SimulationResult) -> None:
    intervals = result.simulation.intervals * (MOST_DRAWN // 5 + 1)
    many = replace(result, simulation=replace(result.simulation, intervals=intervals))
    for found in (many, replace(HOPS, tasks=STEPS[1:2] * (MOST_DRAWN + 1))):
        page = render(report_of(found))
        assert "<svg" not in page
        assert "--trace" in page


def test_an_explanation_names_who_got_what_and_who_waits() -> None:
    members = [Workload(f"net-{i}", {1: 10.0}, 100.0) for i in range(9)]
    allocations = simulate(
        PLANNERS["independent"], [Arrival(m) for m in members], Scenario(Cluster.of(1, 1)), Options()
    )
    held = allocations.intervals[0].allocation
    same = {f"net-{i}": "waits for its turn" for i in range(9)}
    own = {f"net-{i}": f"is number {i}" for i in range(9)}
    rounds = tuple(
        Round(index, 10.0, (held,), 10.0 * index, {**reasons, held.member: "drawn"})
        for index, reasons in enumerate((same, own))
    )
    lines = show(explain_table(Plan("p", "makespan", 1, 1, 20.0, 20.0, 1.0, rounds)))
    assert lines[3].split() == [held.member, "1", "drawn"]
    assert lines[4].split()[1:] == ["+7", "waits", "for", "its", "turn"]
    assert lines[-1] == "and 2 more"


def test_gpu_seconds_of_those_that_share_count_once():
    def held(member, seat, gpus, start_s, end_s):
        allocation = Allocation(member, len(gpus), DATA_PARALLEL, 1.0, (Placement("n1", gpus, seat),))
        return Interval(allocation, 0, start_s, end_s, 0.0, 1.0)

    shared = [held("a", 1, (0,), 0.0, 10.0), held("b", 2, (0,), 4.0, 14.0), held("c", 1, (0,), 20.0, 21.0)]
    assert held_gpu_s([*shared, held("d", 0, (1, 2), 0.0, 5.0)]) == 14 + 1 + 10
