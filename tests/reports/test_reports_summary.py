from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.cost import Energy
from hetctl.model.run_status import BatchChange, Comparison, OnCluster, RunStatus
from hetctl.reports.summary import (
    busy_fraction,
    describe_batches,
    describe_clusters,
    describe_time,
    describe_usage,
    failures_of,
    gpus_by_round,
    names_text,
    prediction_error,
    ranked,
)

MakeRun = Callable[..., RunStatus]


def test_the_error_is_a_share_of_the_measured_time() -> None:
    assert prediction_error(120.0, 100.0) == pytest.approx(0.2)
    assert prediction_error(80.0, 100.0) == pytest.approx(-0.2)
    assert prediction_error(None, 100.0) is None
    assert prediction_error(80.0, 0.0) is None


def test_a_finished_run_is_judged_and_a_running_one_compared(make_run: MakeRun) -> None:
    run = make_run()
    assert describe_time(run) == "measured 5:00 min, predicted 4:39 min (7 % too short)"
    running = replace(run, state="running", measured_s=139.5)
    assert describe_time(running) == "2:20 min of 4:39 min predicted (50 %)"


def test_the_costs_of_a_run_are_compared_with_the_predicted_ones(make_run: MakeRun) -> None:
    run = make_run()
    assert describe_usage(run) == (
        "0.0833 node-hours, predicted 0.0775 (7 % too short), 0.167 slot-hours held;"
        " 0.133 slot-hours in training"
    )
    charged = replace(run.cost, charged=12.5)
    told = describe_usage(
        replace(run, state="running", cost=charged, predicted_cost=None, energy=Energy(1.25, 400.0))
    )
    assert told == (
        "0.0833 node-hours, 0.167 slot-hours held, charged 12.5; 0.133 slot-hours in training,"
        " 1.25 kWh (400 g of CO2)"
    )


def test_clusters_that_are_not_simulated_are_accounted_for(make_run: MakeRun) -> None:
    run = replace(make_run(), comparison=Comparison("independent", 214.0, 180.0, 166))
    (wide,) = describe_clusters(run)
    (many,) = describe_clusters(replace(run, states={str(n): "converged" for n in range(501)}))
    assert "needs more GPUs" in wide
    assert "more than 500 members" in many


@pytest.mark.parametrize(
    ("fluid_s", "words"), [(20.0, "and 20 s with fluid, 5.00 times as"), (100.0, "and no less with fluid;")]
)
def test_a_gain_is_named_where_there_is_one(make_run: MakeRun, fluid_s: float, words: str) -> None:
    found = Comparison("independent", 100.0, 100.0, 9, (OnCluster(1, 4, 100.0, fluid_s),), 2)
    assert describe_clusters(replace(make_run(), comparison=found))[1].startswith(words)


def test_gpus_are_idle_between_rounds_but_not_between_jobs(make_run: MakeRun) -> None:
    run = make_run()
    assert busy_fraction(run) == pytest.approx(0.8)
    assert busy_fraction(replace(run, gpus=4)) == pytest.approx(0.4)
    queued = replace(run.rounds[2], job=1, start_s=1200.0, end_s=1300.0)
    late = tuple(
        replace(task, start_s=1200.0, end_s=1280.0) if task.round == 2 else task for task in run.tasks
    )
    split = replace(run, rounds=(*run.rounds[:2], queued), tasks=late)
    assert busy_fraction(split) == pytest.approx(0.8)
    # The run has been continued with jobs twice as large.
    (first,) = run.jobs
    larger = replace(split, gpus=4, jobs=(first, replace(first, number=1, nodes=2)))
    assert busy_fraction(larger) == pytest.approx(0.6)


def test_a_running_task_is_busy_until_now(make_run: MakeRun) -> None:
    run = make_run(("mlp",), rounds=1)
    task = replace(run.tasks[0], end_s=None, exit_code=None)
    open_round = replace(run.rounds[0], end_s=None, ended_by=None)
    running = replace(run, tasks=(task,), rounds=(open_round,), measured_s=50.0)
    assert busy_fraction(running) == pytest.approx(1.0)


def test_nothing_is_busy_before_the_first_round(make_run: MakeRun) -> None:
    assert busy_fraction(make_run(rounds=0)) is None


def test_more_accuracy_is_better_and_less_loss(make_run: MakeRun) -> None:
    run = make_run(("a", "b", "c"))
    assert [member.member for member in ranked(run)] == ["c", "b", "a"]
    lost = replace(
        run,
        members=tuple(
            replace(m, metric="loss", mode="min", best=best)
            for m, best in zip(run.members, (0.3, 0.2, 0.4), strict=True)
        ),
    )
    assert [member.member for member in ranked(lost)] == ["b", "a", "c"]


def test_nobody_is_best_before_the_first_epoch(make_run: MakeRun) -> None:
    run = make_run(("a", "b"))
    assert ranked(replace(run, members=tuple(replace(m, best=None) for m in run.members))) == []


def test_the_last_changes_of_a_global_batch_are_told(make_run: MakeRun) -> None:
    (member,) = make_run(("a",)).members
    assert describe_batches(member, "gpu") == ""
    changes = tuple(BatchChange(number, 32 * number, 1024, number) for number in range(1, 6))
    once = replace(member, batch_changes=changes[:1])
    assert describe_batches(once, "gpu") == "global batch 32 -> 1,024 at epoch 1 (1 GPU)"
    often = describe_batches(replace(member, batch_changes=changes), "slot")
    assert often.startswith("global batch 96 -> 1,024 at epoch 3 (3 ")
    assert often.endswith(", after 2 earlier changes")


def test_numbers_of_gpus_by_round_fit_their_width() -> None:
    assert gpus_by_round((1, 0, 2, 2), 15) == "1 · 2 2"
    assert gpus_by_round(tuple(range(1, 10)), 15) == "… 3 4 5 6 7 8 9"
    assert gpus_by_round((), 15) == ""


@given(st.lists(st.integers(0, 5000)), st.integers(8, 40))
def test_rounds_never_exceed_their_width(counts: list[int], width: int) -> None:
    text = gpus_by_round(counts, width)
    assert len(text) <= width
    if counts:
        assert text.split()[-1] == (str(counts[-1]) if counts[-1] else "·")


def test_failures_with_one_cause_are_one_group(make_run: MakeRun) -> None:
    run = make_run(("mlp", "cnn", "rnn", "gru"))
    causes = "port 4711 of mlp is taken", "port 80 of cnn is taken", "no such file", "port 9 of gru is taken"
    failed = tuple(
        replace(member, state="failed", reason=reason, log_tail=(member.member,), log=f"{member.member}.log")
        for member, reason in zip(run.members, causes, strict=True)
    )
    first, other = failures_of(replace(run, members=failed))
    assert (first.names, first.reason, first.log_tail) == (("mlp", "cnn", "gru"), causes[0], ("mlp",))
    assert (other.names, other.log) == (("rnn",), "rnn.log")
    assert failures_of(run) == []


def test_of_many_failed_members_the_first_are_named() -> None:
    names = [f"m{number}" for number in range(1200)]
    assert names_text(names[:5]) == "m0, m1, m2, m3, m4"
    assert names_text(names) == "m0, m1, m2, m3, m4 and 1,195 more"
