"""A run to report on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetctl.model.cost import Cost
from hetctl.model.job import Job, JobState
from hetctl.model.run import Usage
from hetctl.model.run_status import MemberRate, MemberStatus, RoundSpan, RunStatus, TaskSpan
from hetctl.model.training_progress import EpochResult

MakeRun = Callable[..., RunStatus]


def _member(name: str, best: float, rounds: int) -> MemberStatus:
    if rounds == 0:
        return MemberStatus(name, "waiting", (), 0, 30, "val_accuracy", None, 90.0, None, mode="max")
    return MemberStatus(
        member=name,
        state="converged",
        gpus_by_round=(1,) * rounds,
        rates=(MemberRate(1, None, 1234.5, 1234.5, 1250.5),),
        epochs=2 * rounds,
        max_epochs=30,
        metric="val_accuracy",
        mode="max",
        best=best,
        predicted_s=90.0,
        measured_s=100.0,
        reason="no better val_accuracy in 5 epochs",
    )


def _history(best: float, epochs: int) -> tuple[EpochResult, ...]:
    return tuple(
        EpochResult(e, {"loss": 2.0 / e, "val_accuracy": best * e / epochs}, 5.0, 1, 5.0 * e)
        for e in range(1, epochs + 1)
    )


def _make_run(names: tuple[str, ...] = ("mlp", "cnn"), rounds: int = 3) -> RunStatus:
    """Give each member its own GPU, four to a node, for 80 of the 100 seconds of each round."""
    bests = {name: 0.9 + 0.01 * i for i, name in enumerate(names)}
    members = tuple(_member(name, bests[name], rounds) for name in names)
    tasks = tuple(
        TaskSpan(name, r, f"node-{i // 4}", (i % 4,), 100.0 * r, 100.0 * r + 80, 0)
        for r in range(rounds)
        for i, name in enumerate(names)
    )
    return RunStatus(
        run="digits-1",
        ensemble="digits",
        site="local",
        device="slot",
        planner="flotilla",
        gpus=len(names),
        nodes=1,
        used=Usage(rounds, 80.0 * rounds * len(names), 100.0 * rounds),
        cost=Cost(100.0 * rounds / 3600, 100.0 * rounds * len(names) / 3600, 100.0 * rounds / 3600),
        predicted_cost=Cost(93.0 * rounds / 3600, 93.0 * rounds * len(names) / 3600, 93.0 * rounds / 3600),
        energy=None,
        state="finished",
        reason="every member is done",
        submitted_at=1e9,
        predicted_s=93.0 * rounds,
        measured_s=100.0 * rounds,
        states={member.member: member.state for member in members},
        members=members,
        rounds=tuple(RoundSpan(r, 0, 100.0 * r, 100.0 * (r + 1), 93.0, "converged") for r in range(rounds)),
        tasks=tasks,
        jobs=(Job(0, "hetctl-digits-1-0-a", "4711", JobState.FINISHED, 1, 600, 1e9),),
        history={name: _history(bests[name], 2 * rounds) for name in names if rounds},
    )


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    return _make_run
