from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hetctl.model.run_status import TaskSpan
from hetctl.model.simulation import HopSimulation
from hetctl.reports.simulation_page import MOST_DRAWN, simulation_page
from hetctl.reports.simulation_tables import simulation_table, view_of

STEPS = (
    TaskSpan("a<b>", 0, "w0", (0,), 0.0, 2.0, 1),
    TaskSpan("a<b>", 0, "w1", (0,), 2.0, 5.0, 0),
    TaskSpan("c", 0, "w0", (0,), 4.0, 9.0, 0),
)


@pytest.fixture
def figures() -> HopSimulation:
    return HopSimulation(
        scheduler="best",
        mode="hopper",
        configs=2,
        partitions=2,
        workers=2,
        epochs=1,
        seed=0,
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


def test_the_table_has_the_figures(figures: HopSimulation) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(simulation_table(figures))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[0] == "best: 2 configurations on 2 partitions and 2 workers, 1 epoch"
    assert lines[-1].split() == ["9.0", "s", "8.0", "s", "1.125", "80", "%", "2.0", "s", "0.25", "s"]
    assert view_of(replace(figures, mode="hybrid")).headline.endswith(", 1 epoch, hybrid")


def test_the_page_shows_workers_and_configurations(figures: HopSimulation) -> None:
    page = simulation_page(figures)
    assert page == simulation_page(figures)
    assert "a&lt;b&gt;" in page
    assert "a<b>" not in page
    assert "a&lt;b&gt; · epoch 0 · worker w0 · 2.0 s · undone by a failure" in page
    assert "workers over time, by configuration" in page
    for word in ("first job", "round numbers", "exit code", "slot"):
        assert word not in page
    cells = [" ".join(row.split()) for row in page.split("<tr>") if "w0</td>" in row]
    assert '<td class="number">1</td><td class="number">1</td>' in cells[0]


def test_a_chart_that_nobody_could_read_is_left_out(figures: HopSimulation) -> None:
    page = simulation_page(replace(figures, tasks=STEPS[1:2] * (MOST_DRAWN + 1)))
    assert "<svg" not in page
    assert "20,001 hops are too many for a chart" in page
