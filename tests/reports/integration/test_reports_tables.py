from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hetctl.model.job import JobState
from hetctl.model.plan import DATA_PARALLEL, Allocation, Forecast, Placement, Plan, Round
from hetctl.model.profile import (
    INTRA_NODE,
    Hardware,
    LayerPoint,
    LinkPoint,
    MeasuredLayer,
    PreprocessPoint,
    ProfilePoint,
    RateShape,
)
from hetctl.model.run_status import BatchChange, RunStatus
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import LiveMetrics, RankShare
from hetctl.reports.plan_tables import plan_table
from hetctl.reports.profile_tables import layers_table, profile_table, shapes_text
from hetctl.reports.setup_tables import sites_table
from hetctl.reports.status_table import status_table

MakeRun = Callable[..., RunStatus]


def show(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "\x1b" not in console.file.getvalue()
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def line_of(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_status_names_the_run_and_has_one_line_per_member(make_run: MakeRun) -> None:
    lines = show(status_table(make_run(("mlp", "cnn-residual"))))
    assert {"digits-1", "local", "flotilla"} <= set(lines[0].split())
    assert lines[1].startswith("finished")
    words = line_of(lines, "cnn-residual").split()
    assert words[1:] == ["converged", *"111", "1,234", "1,250", "6/30", "0.91", "1:30", "min", "1:40", "min"]
    assert show(status_table(make_run((), rounds=0)))
    assert "GPUs" in "\n".join(show(status_table(replace(make_run(), device="gpu"))))


@pytest.mark.parametrize("width", [70, 79])
def test_a_narrow_terminal_has_whole_names_and_fewer_columns(make_run: MakeRun, width: int) -> None:
    lines = show(status_table(make_run(("mlp", "cnn-residual")), width), width)
    words = line_of(lines, "cnn-residual").split()
    assert words[1:] == ["converged", *"111", "1,250", "6/30", "0.91", "1:40", "min"]
    assert not {"prof.", "predicted"} & {word for line in lines[6:] for word in line.split()}


def test_a_run_without_a_profile_has_no_columns_of_predictions(make_run: MakeRun) -> None:
    run = make_run(("mlp", "cnn-residual"))
    first, second = run.members
    learned = replace(first, predicted_s=None, rates=())
    one_planned, none = (replace(run, members=(learned, other)) for other in (second, learned))
    assert " ".join(show(status_table(one_planned))[8].split()).endswith("accuracy predicted measured")
    assert " ".join(show(status_table(none))[8].split()).endswith("epochs accuracy measured")


def test_a_failed_member_shows_its_reason_and_log_without_markup(make_run: MakeRun) -> None:
    run = make_run()
    log = ("\x1b[31mTraceback\x1b[0m", "[bold]OOM[/bold]")
    failed = replace(run.members[0], state="failed", reason="exit code 137 [red]", log_tail=log)
    lines = show(status_table(replace(run, members=(failed, run.members[1]))))
    at = next(at for at, line in enumerate(lines) if line.endswith("exit code 137 [red]"))
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["Traceback", "[bold]OOM[/bold]"]


def test_status_has_a_line_for_each_changed_global_batch(make_run: MakeRun) -> None:
    run = make_run()
    changed = replace(run.members[0], batch_changes=(BatchChange(5, 32, 64, 2),))
    lines = show(status_table(replace(run, device="gpu", members=(changed, run.members[1]))))
    assert "mlp: global batch 32 -> 64 at epoch 5 (2 GPUs)" in lines
    assert sum("global batch" in line for line in lines) == 1


def test_status_of_members_with_unlike_metrics_names_each(make_run: MakeRun) -> None:
    run = make_run()
    other = replace(run.members[0], metric="val_loss", best=0.25)
    lines = show(status_table(replace(run, members=(other, run.members[1]))))
    assert "val_loss" in line_of(lines, "mlp")
    assert any(line.split() == ["0.25"] for line in lines)


def test_members_that_are_not_shown_are_counted(make_run: MakeRun) -> None:
    run = make_run(tuple(f"m{number}" for number in range(9)))
    states = {**run.states, "m3": "waiting", "m5": "training", "m7": "failed"}
    lines = show(status_table(replace(run, states=states, members=run.members[:4])))
    named = [line.split()[0] for line in lines if line[1:2].isdigit()]
    assert named == ["m0", "m1", "m2", "m3"]
    assert any("5 more" in line for line in lines)
    assert "6 converged, 1 training, 1 waiting, 1 failed" in lines


@pytest.mark.parametrize("rounds", [1, 8, 9, 100])
def test_many_rounds_do_not_break_a_line(make_run: MakeRun, rounds: int) -> None:
    run = make_run(("cnn-residual", "mlp"), rounds=rounds)
    assert line_of(show(status_table(run)), "cnn-residual").endswith("1:40 min")


def a_plan(rounds: int, members: int = 3, gpus_per_node: int = 2) -> Plan:
    """Put each member on one GPU, node by node, in every round."""
    spots = [(f"node-{i // gpus_per_node}", i % gpus_per_node) for i in range(members)]
    allocations = tuple(
        Allocation(f"net-{i}", 1, DATA_PARALLEL, 500.0, (Placement(node, (gpu,)),))
        for i, (node, gpu) in enumerate(spots)
    )
    return Plan(
        planner="flotilla",
        objective="makespan",
        gpus=members + 1,
        gpus_per_node=gpus_per_node,
        predicted_makespan_s=60.0 * rounds,
        lower_bound_s=50.0 * rounds,
        ratio=1.2,
        rounds=tuple(Round(r, 60.0, allocations, 60.0 * r) for r in range(rounds)),
        members=tuple(Forecast(f"net-{i}", 60.0 * rounds, 60.0) for i in range(members)),
    )


def test_plan_lists_allocations_and_maps_nodes() -> None:
    lines = show(plan_table(replace(a_plan(2), balance_gains={"a": 1.5, "b": 2.25, "f[red]": 1.75}), "gpu"))
    assert [line.split()[-2:] for line in lines if "net-1" in line] == [["1", "500"], ["2:00", "min"]]
    assert line_of(lines, "node-0").split() == ["node-0", "a", "b", "a", "b"]
    assert line_of(lines, "node-1").split() == ["node-1", "c", "c"]
    assert any(line.endswith("b 2.25, f[red] 1.75, a 1.50") for line in lines)
    assert len(show(plan_table(a_plan(0), "slot"))) == 2


def test_idle_gpus_of_a_node_are_marked() -> None:
    lone = Allocation("net", 1, DATA_PARALLEL, 1.0, (Placement("node-0", (2,)),))
    plan = replace(a_plan(1), rounds=(Round(0, 60.0, (lone,)),))
    assert line_of(show(plan_table(plan, "gpu")), "node-0").split()[1:] == ["·", "·", "a"]


def test_a_big_plan_is_cut_after_twenty_rounds() -> None:
    lines = show(plan_table(a_plan(300, members=60, gpus_per_node=6), "gpu"))
    assert not any("round 20" in line for line in lines)
    assert sum(line.startswith("node-9") for line in lines) == len(
        [x for x in lines if x.startswith("node ")]
    )
    assert any(" bh" in line for line in lines)


def a_point(member: str, gpus: int, rate: float) -> ProfilePoint:
    machine = Hardware("A100", "535", "tensorflow 2.18.1")
    return ProfilePoint(
        member, gpus, rate, "f", 32, 0.0, machine, None, None, 4.0 + gpus, 0.5, 0.1, gpus << 30
    )


def test_profile_has_rates_by_gpus_costs_and_stale_marks() -> None:
    points = [a_point("mlp", 1, 100), a_point("mlp", 2, 190), a_point("cnn", 1, 10)]
    lines = show(profile_table(points, {("mlp", 2)}, [PreprocessPoint(1, 5000)], "slot"))
    rates, costs = [line.split() for line in lines if line.startswith("mlp")]
    assert rates == ["mlp", "100", "190*"]
    assert costs == ["mlp", "32", "6.0", "s", "0.5", "s", "0.1", "s", "2.0", "GiB"]
    assert next(line.split() for line in lines if line.startswith("cnn")) == ["cnn", "10.0", "-"]
    assert any("stale" in line for line in lines)
    assert line_of(lines, "rate").split() == ["rate", "5,000"]
    assert lines[-1] == "Measured on A100"


def test_shapes_are_counted_and_name_the_members_that_share_them() -> None:
    many = tuple(f"m{number}" for number in range(23))
    shapes = [RateShape("alone", (), 1), RateShape("pair", ("other",), None), RateShape("first", many, None)]
    lines = show(shapes_text(shapes), width=200)
    assert lines[0] == "27 members of 3 shapes"
    assert [line.split()[0] for line in lines[1:]] == ["pair", "first"]
    assert lines[2].endswith("m19 and 3 more")


def test_profile_names_points_whose_steps_were_not_steady() -> None:
    vague = replace(a_point("mlp", 2, 190), rate_error=0.08)
    jerky = replace(a_point("cnn", 1, 10), rate_error=0.02, slow_steps_s=(12.0,))
    lines = show(profile_table([vague, jerky], set(), [], "slot"))
    assert any(line.endswith("mlp on 2 ±8 %") for line in lines)
    assert any(line.endswith("cnn on 1: 12 s") for line in lines)


def test_a_fresh_profile_has_no_footnote_and_a_wide_one_wraps() -> None:
    points = [a_point("cnn-residual", gpus, 20_000) for gpus in range(1, 17)]
    lines = show(profile_table(points, set(), []))
    assert not any("stale" in line for line in lines)
    assert len([line for line in lines if line.startswith("cnn-residual")]) == 3
    assert sum(line.count("20,000") for line in lines) == 16


def test_sites_are_listed_with_their_files() -> None:
    summit = Site("summit", "lsf", "jsrun", 4600, 6, 42, 1 << 39, (Queue("batch"),))
    local = Site("local", "local", "local", 1, 2, 2, 1 << 33, (Queue("batch"),), device="slot")
    lines = show(sites_table([(local, "shipped"), (summit, "/home/a/" + "long/" * 20 + "summit.yaml")]))
    assert line_of(lines, "local").split() == ["local", "local", "1", "x", "2", "slots", "local", "shipped"]
    assert line_of(lines, "summit").split()[:6] == ["summit", "lsf", "4600", "x", "6", "GPUs"]


def test_jobs_that_ended_early_are_named_with_their_cause(make_run: MakeRun) -> None:
    status = make_run(("mlp", "cnn-residual"))
    (job,) = status.jobs
    failed = replace(job, number=1, state=JobState.NODE_FAILED, reason="NODE_FAIL", failed_nodes=("n2",))
    preempted = replace(job, number=2, state=JobState.PREEMPTED, reason="PREEMPTED")
    lines = show(status_table(replace(status, jobs=(job, failed, preempted))))
    assert line_of(lines, "ended early") == "ended early: job 1 node-failed (n2), job 2 preempted"
    assert not any(line.startswith("ended early") for line in show(status_table(status)))


def test_lost_nodes_are_named_beside_the_running_job(make_run: MakeRun) -> None:
    status = make_run(("mlp", "cnn-residual"))
    running = replace(status.jobs[0], state=JobState.RUNNING, failed_nodes=("n2", "n3"))
    shown = show(status_table(replace(status, jobs=(running,))))
    assert any("running" in line and line.endswith("n2, n3)") for line in shown[:4])


def test_what_members_in_training_do_just_now_is_shown(make_run: MakeRun) -> None:
    run = make_run()
    assert "just now" not in "\n".join(show(status_table(run)))
    live_metrics = LiveMetrics(
        time=0.0, epoch=7, position=50, samples=200, rate=1234.5, loss=0.25, gpu_busy_fraction=0.875
    )
    busy, _ = run.members
    alive = replace(
        run, members=(replace(busy, state="training", live_metrics=live_metrics), *run.members[1:])
    )
    (shown,) = [line for line in show(status_table(alive)) if "25 %" in line]
    assert shown.split() == ["mlp", "1,234", "7", "25", "%", "0.25", "88", "%"]
    unknown = replace(live_metrics, loss=None, gpu_busy_fraction=None)
    alive = replace(run, members=(replace(busy, state="training", live_metrics=unknown), *run.members[1:]))
    (shown,) = [line for line in show(status_table(alive)) if "25 %" in line]
    assert shown.split()[-2:] == ["-", "-"]


def with_ranks(run: RunStatus, *ranks: RankShare) -> list[str]:
    live_metrics = LiveMetrics(time=0.0, epoch=7, position=50, samples=200, rate=1234.5, ranks=ranks)
    alive = replace(run.members[0], state="training", live_metrics=live_metrics)
    return show(status_table(replace(run, members=(alive, *run.members[1:]))))


def test_ranks_of_a_balanced_group_are_shown_slowest_first(make_run: MakeRun) -> None:
    lines = with_ranks(make_run(), RankShare("n1:0", 273, 0.29), RankShare("n4:[0]", 34, 0.31))
    first = next(i for i, line in enumerate(lines) if "n4:[0]" in line)
    assert lines[first].split() == ["mlp", "n4:[0]", "34", "0.31", "s", "100", "%"]
    assert lines[first + 1].split() == ["n1:0", "273", "0.29", "s", "94", "%"]


def test_equal_ranks_are_not_shown_and_many_are_cut(make_run: MakeRun) -> None:
    assert "worker" not in "\n".join(
        with_ranks(make_run(), RankShare("a:0", 32, 0.1), RankShare("b:0", 32, 0.105))
    )
    many = [RankShare(f"n{number}:0", 32, 0.1 + number) for number in range(20)]
    text = "\n".join(with_ranks(make_run(), *many))
    assert "and 12 faster ones" in text
    assert "n19:0" in text
    assert "n3:0" not in text


def test_layers_are_added_up_and_share_one_workspace() -> None:
    mib = 2**20
    layer = MeasuredLayer("conv\x1b[31m", 0.001, 0.002, mib, 2 * mib, 3 * mib, 4 * mib, 5 * mib)
    machine = Hardware("V100", "1", "fake")
    point = LayerPoint("m", "f", 16, 0.0, machine, 100, 300 * mib, (layer, replace(layer, name="fc")))
    link = LinkPoint(INTRA_NODE, ("n0", "n0"), 0.0, ((65536.0, 0.00025),))
    lines = [line.split() for line in show(layers_table([point], [link]))]
    sizes = ["2.0", "MiB", "5.0", "MiB", "3.0", "MiB", "4.0", "MiB"]
    assert ["conv", "1", "2", "1.0", "MiB", *sizes] in lines
    assert ["all", "2", "4", "4.0", "MiB", "10.0", "MiB", "6.0", "MiB", "4.0", "MiB"] in lines
    assert ["within", "a", "node", "0.25", "n0"] in lines
    assert any("300" in line and "GPU" in line for line in lines)
    earlier = replace(point, layers=(replace(layer, optimizer_bytes=None),))
    lines = [line.split() for line in show(layers_table([earlier], []))]
    assert ["conv", "1", "2", "1.0", "MiB", "2.0", "MiB", "-", "3.0", "MiB", "4.0", "MiB"] in lines
