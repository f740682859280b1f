"""Pipelines in the terminal, in the plan and on the page of a run."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from pipelined_run import ALONE, LAYOUT, status
from rich.console import Console, RenderableType

from hetctl.model.pipelines import PipelineLayout, StagePlan
from hetctl.model.plan import PIPELINE, Allocation, Placement, Plan, Round
from hetctl.model.run_status import RunStatus
from hetctl.reports.pipeline_tables import describe_layout, pipeline_tables
from hetctl.reports.plan_tables import plan_table
from hetctl.reports.status_table import status_table

MakeRun = Callable[..., RunStatus]
UNEQUAL = replace(LAYOUT, workers=(LAYOUT.workers[0], LAYOUT.workers[1][:1]))


def lines(*parts: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80, record=True, highlight=False)
    console.print(*parts, sep="\n")
    return console.export_text().splitlines()


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
    shown = lines(*pipeline_tables([status(name), status("b", trained=False)]))
    assert max(map(len, shown)) <= 80
    first = next(line for line in shown if "2 x 2 stages" in line)
    assert first.split()[-6:] == ["80", "%", "20", "%", "32", "%"]
    assert "n1:1" in first
    second = next(line for line in shown if line.startswith("b "))
    assert second.split()[-4:] == ["-", "-", "-", "-"]
    sizes = next(line for line in shown if "KiB" in line)
    assert sizes.split()[1:] == ["3.7", "KiB", "5", "B", "8", "B", "100", "B"]


def test_pipelines_come_after_the_members(make_run: MakeRun) -> None:
    run = make_run()
    assert "pipelines" not in "\n".join(lines(status_table(run)))
    shown = lines(status_table(replace(run, pipelines=(status("mlp"),))))
    heads = [at for at, line in enumerate(shown) if line.startswith(("member ", "are pipelines"))]
    assert len(heads) == 2
    assert shown[heads[1] + 2].startswith("mlp ")


def test_without_an_epoch_there_are_no_bytes() -> None:
    assert "bytes" not in "\n".join(lines(*pipeline_tables([status(trained=False)])))


PLACEMENT = (Placement("n1", (2, 5)), Placement("n2", (0, 1)))


def a_plan(*names: str, layouts: tuple[PipelineLayout, ...] = (LAYOUT,)) -> Plan:
    allocations = [
        Allocation(name, 4, PIPELINE, 100.0, PLACEMENT, pipeline=layouts[i % len(layouts)])
        for i, name in enumerate(names)
    ]
    rounds = tuple(Round(i, 60.0, (allocation,)) for i, allocation in enumerate(allocations))
    return Plan("fluid", "makespan", 4, 2, 60.0, 60.0, 1.0, rounds)


def test_a_plan_says_where_which_layers_are() -> None:
    shown = lines(plan_table(a_plan("a", "b"), "slot"))
    assert shown.count("Stages of a, b: 2 x 2 stages, 3 in flight, D = 1") == 1
    at = shown.index("Stages of a, b: 2 x 2 stages, 3 in flight, D = 1")
    assert shown[at + 1].split() == [
        "virtual",
        "worker",
        "stage",
        "layers",
        "node",
        "slot",
        "minibatches",
        "held",
    ]
    rows = [line.split() for line in shown[at + 3 : at + 7]]
    assert rows == [
        ["0", "0", "0..3", "n1", "2", "3"],
        ["1", "4..6", "n1", "5", "1"],
        ["1", "0", "0..2", "n2", "0", "3"],
        ["1", "3..6", "n2", "1", "1"],
    ]
    said = " ".join(line.strip() for line in shown[at + 7 :])
    assert said.startswith(
        "Minibatches on their way, waves and parameter servers take up to 3.0 GiB of a node's memory."
    )


def test_a_plan_says_which_stages_recompute() -> None:
    first, *others = LAYOUT.workers[0]
    layout = replace(LAYOUT, workers=((replace(first, recomputes=True), *others), LAYOUT.workers[1]))
    shown = lines(plan_table(a_plan("a", layouts=(layout,)), "slot"))
    assert [line.split()[-2:] for line in shown if "recomputed" in line] == [["3,", "recomputed"]]


def test_members_of_unlike_layouts_have_tables_of_their_own() -> None:
    many = tuple(replace(LAYOUT, in_flight=count) for count in range(1, 7))
    shown = lines(plan_table(a_plan(*"abcdefghijkl", layouts=many), "gpu"))
    titles = [line for line in shown if line.startswith("Stages of")]
    assert [title.split(":")[0] for title in titles] == [
        f"Stages of {one}, {other}" for one, other in ("ag", "bh", "ci", "dj")
    ]
    assert "and 2 more, which `--json` has" in shown


def test_plans_of_other_modes_have_no_stages() -> None:
    plan = a_plan("a")
    other = replace(plan.rounds[0].allocations[0], pipeline=None)
    shown = lines(plan_table(replace(plan, rounds=(Round(0, 60.0, (other,)),)), "gpu"))
    assert not any("Stages" in line for line in shown)


def test_of_many_stages_the_first_are_shown() -> None:
    deep = PipelineLayout((tuple(StagePlan(i % 4, i, i, 1) for i in range(40)),), 3)
    shown = lines(plan_table(a_plan("a", "b", "c", "d", layouts=(deep,)), "gpu"))
    assert "Stages of a, b, c and 1 more: 1 x 40 stages, 3 in flight" in shown
    assert shown[-1].strip() == "and 8 more"
