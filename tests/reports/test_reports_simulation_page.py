from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hetctl.model.plan import Plan, Round
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.reports.plan_tables import explain_table
from hetctl.reports.simulation_page import MOST_DRAWN, render_simulation
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
def simulation() -> Simulation:
    members = [Workload(f"net-{i}", {1: 10.0, 2: 18.0}, 100.0 * (i + 1)) for i in range(5)]
    arrivals = [Arrival(member, 2.0 * i) for i, member in enumerate(members)]
    return simulate(PLANNERS["independent"], arrivals, Scenario(Cluster.of(2, 2)), Options())


def arrivals_of(simulation: Simulation) -> dict[str, float]:
    return {member.member: 2.0 * i for i, member in enumerate(simulation.members)}


def test_the_table_has_the_figures(simulation: Simulation) -> None:
    lines = show(simulation_table(simulation, "zoo, rates of imported", {}))
    assert lines[0] == "independent on 2 GPUs, 2 to a node: 5 members of zoo, rates of imported"
    assert lines[1] == "objective makespan · work clairvoyant · sharing independent"
    busy = f"{simulation.gpu_busy_fraction * 100:.0f}"
    assert lines[-1].split()[6:11] == [f"{simulation.ratio:.3f}", "5", "0", busy, "%"]


def test_the_table_says_why_and_how_wrong(simulation: Simulation) -> None:
    chosen = replace(simulation, reason="it is the only one")
    text = "\n".join(show(simulation_table(chosen, "zoo", {0.25: 0.314})))
    assert "chosen by auto: it is the only one" in text
    assert "median error of the predicted work: 31 % at 25 %" in text


def test_the_page_has_every_member_and_interval(simulation: Simulation) -> None:
    page = render_simulation("zoo", simulation, arrivals_of(simulation))
    assert page == render_simulation("zoo", simulation, arrivals_of(simulation))
    assert "<h1>zoo, simulated</h1>" in page
    for i in range(5):
        assert f"net-{i}</td>" in page
        assert f"<title>net-{i} · round " in page
    assert f"{simulation.ratio:.3f} of the bound" in page
    assert "http" not in page
    assert re.search(r"<script|<link|@import", page) is None


def test_names_and_reasons_are_escaped_in_the_page(simulation: Simulation) -> None:
    page = render_simulation("<img src=x>", replace(simulation, reason="<b>"), arrivals_of(simulation))
    assert "<img" not in page
    assert "&lt;b&gt;" in page


def test_a_chart_that_nobody_could_read_is_left_out(simulation: Simulation) -> None:
    many = replace(simulation, intervals=simulation.intervals * (MOST_DRAWN // 5 + 1))
    page = render_simulation("zoo", many, arrivals_of(simulation))
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
