from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hetctl.model.plan import Plan, Round
from hetctl.model.simulation import SimulationResult
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.reports.plan_tables import explain_table
from hetctl.reports.simulation_page import MOST_DRAWN, simulation_page
from hetctl.reports.simulation_tables import simulation_table
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


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


def test_the_table_has_the_figures(result: SimulationResult) -> None:
    lines = show(simulation_table(result))
    assert lines[0] == "independent on 2 GPUs, 2 to a node: 5 members of zoo, rates of imported"
    assert lines[1] == "objective makespan · work clairvoyant · sharing independent"
    busy = f"{result.simulation.gpu_busy_fraction * 100:.0f}"
    assert lines[-1].split()[6:11] == [f"{result.simulation.ratio:.3f}", "5", "0", busy, "%"]


def test_the_table_says_why_and_how_wrong(result: SimulationResult) -> None:
    chosen = replace(result.simulation, reason="it is the only one")
    text = "\n".join(show(simulation_table(replace(result, simulation=chosen, work_errors={0.25: 0.314}))))
    assert "chosen by auto: it is the only one" in text
    assert "median error of the predicted work: 31 % at 25 %" in text


def test_the_page_has_every_member_and_interval(result: SimulationResult) -> None:
    page = simulation_page(result)
    assert page == simulation_page(result)
    assert "<h1>zoo, simulated</h1>" in page
    for i in range(5):
        assert f"net-{i}</td>" in page
        assert f"<title>net-{i} · round " in page
    assert f"<b>{result.simulation.ratio:.3f}</b><span>makespan over its bound" in page
    assert "http" not in page
    assert re.search(r"<script|<link|@import", page) is None


def test_names_and_reasons_are_escaped_in_the_page(result: SimulationResult) -> None:
    named = replace(result, ensemble="<img src=x>", simulation=replace(result.simulation, reason="<i>"))
    page = simulation_page(named)
    assert "<img" not in page
    assert "&lt;i&gt;" in page


def test_a_chart_that_nobody_could_read_is_left_out(result: SimulationResult) -> None:
    intervals = result.simulation.intervals * (MOST_DRAWN // 5 + 1)
    page = simulation_page(replace(result, simulation=replace(result.simulation, intervals=intervals)))
    assert "<svg" not in page
    assert "20,005 intervals are too many for a chart" in page


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
    assert lines[1] == "Round 0, from 0 s"
    assert lines[4].split() == [held.member, "1", "drawn"]
    assert lines[5].split()[1:] == ["+7", "waits", "for", "its", "turn"]
    assert lines[-1] == "and 2 more"
