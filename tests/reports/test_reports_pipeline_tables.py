"""Pipelines in the terminal, and in the plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from pipelined_run import ALONE, LAYOUT, status
from rich.console import Console, RenderableType

from hetctl.model.pipelines import PipelineLayout, StagePlan
from hetctl.model.plan import PIPELINE, Allocation, Placement, Plan, Round
from hetctl.reports.pipeline_tables import describe_layout, pipeline_sections
from hetctl.reports.plan_tables import plan_table

UNEQUAL = replace(LAYOUT, workers=(LAYOUT.workers[0], LAYOUT.workers[1][:1]))
PLACEMENT = (Placement("n1", (2, 5)), Placement("n2", (0, 1)))


def lines(*parts: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80, record=True, highlight=False)
    console.print(*parts, sep="\n")
    return console.export_text().splitlines()


def a_plan(*names: str, layouts: tuple[PipelineLayout, ...] = (LAYOUT,)) -> Plan:
    allocations = [
        Allocation(name, 4, PIPELINE, 100.0, PLACEMENT, pipeline=layouts[i % len(layouts)])
        for i, name in enumerate(names)
    ]
    rounds = tuple(Round(i, 60.0, (allocation,)) for i, allocation in enumerate(allocations))
    return Plan("fluid", "makespan", 4, 2, 60.0, 60.0, 1.0, rounds)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (LAYOUT, "2 x 2 stages, 3 in flight, D = 1"),
        (UNEQUAL, "2 + 1 stages, 3 in flight, D = 1"),
        (ALONE, "1 x 2 stages, 3 in flight"),
    ],
)
def test_a_layout_in_words(layout: PipelineLayout, words: str) -> None:
    assert describe_layout(layout) == words


def test_each_pipeline_has_a_line_with_its_figures() -> None:
    name = "resnet-152-with-a-long-name"
    shown = lines(*pipeline_sections([status(name), status("b", trained=False)]))
    assert max(map(len, shown)) <= 80
    first = next(line for line in shown if "2 x 2 stages" in line)
    assert first.split()[-6:] == ["80", "%", "20", "%", "32", "%"]
    assert "n1:1" in first
    second = next(line for line in shown if line.startswith("b "))
    assert second.split()[-4:] == ["-", "-", "-", "-"]
    sizes = next(line for line in shown if "KiB" in line)
    assert sizes.split()[1:] == ["3.7", "KiB", "5", "B", "8", "B", "100", "B"]


def test_without_pipelines_or_epochs_tables_are_left_out() -> None:
    assert [section.title for section in pipeline_sections([status(trained=False)])] == ["Pipelines"]
    assert list(pipeline_sections([])) == []


def test_a_plan_says_where_which_layers_are() -> None:
    first, *others = LAYOUT.workers[0]
    layout = replace(LAYOUT, workers=((replace(first, recomputes=True), *others), LAYOUT.workers[1]))
    shown = lines(plan_table(a_plan("a", "b", layouts=(layout,)), "slot"))
    at = shown.index("Stages of a, b: 2 x 2 stages, 3 in flight, D = 1")
    assert [line.split() for line in shown[at + 3 : at + 7]] == [
        ["0", "0", "0..3", "n1", "2", "3,", "recomputed"],
        ["1", "4..6", "n1", "5", "1"],
        ["1", "0", "0..2", "n2", "0", "3"],
        ["1", "3..6", "n2", "1", "1"],
    ]
    assert "3.0 GiB" in shown[at + 7] + shown[at + 8]


def test_a_plan_without_a_known_rate_predicts_no_time() -> None:
    plan = a_plan("a", "b")
    (allocation,) = plan.rounds[0].allocations
    guessed = replace(plan.rounds[0], allocations=(replace(allocation, rate_known=False),))
    shown = [
        lines(plan_table(replace(plan, rounds=rounds), "slot"))[1] for rounds in ((guessed,), plan.rounds)
    ]
    assert ["makespan" in line for line in shown] == [False, True]
    assert "guesses" in shown[0]


def test_layouts_have_tables_of_their_own_up_to_four() -> None:
    many = tuple(replace(LAYOUT, in_flight=count) for count in range(1, 7))
    shown = lines(plan_table(a_plan(*"abcdefghijkl", layouts=many), "gpu"))
    titles = [line.split(":")[0] for line in shown if line.startswith("Stages of")]
    assert titles == [f"Stages of {one}, {other}" for one, other in ("ag", "bh", "ci", "dj")]
    other = replace(a_plan("a").rounds[0].allocations[0], pipeline=None)
    shown = lines(plan_table(replace(a_plan("a"), rounds=(Round(0, 60.0, (other,)),)), "gpu"))
    assert not any("Stages" in line for line in shown)


def test_of_many_stages_the_first_are_shown() -> None:
    deep = PipelineLayout((tuple(StagePlan(i % 4, i, i, 1) for i in range(40)),), 3)
    shown = lines(plan_table(a_plan("a", "b", "c", "d", layouts=(deep,)), "gpu"))
    assert "Stages of a, b, c and 1 more: 1 x 40 stages, 3 in flight" in shown
    assert shown[-1].strip() == "and 8 more"
