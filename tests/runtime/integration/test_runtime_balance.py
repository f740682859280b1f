"""Balanced batches in real training: ranks of unequal speed, stopped in an epoch and continued."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest
from driven_job import Job
from tiny_networks import ENSEMBLES, functions_of

from hetctl.methods.balance.observation_log import LoggedIteration, ManagerStart, records_in, replay
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import MemberProfile
from hetctl.model.training_settings import AUTO, ON, BalanceSettings
from hetctl.scheduling.planners.base import Decision, Planner

pytestmark = pytest.mark.training
SAMPLES, BATCH, EPOCHS = 640, 32, 4
SECONDS = (0.001, 0.003)
"""Per sample of each rank."""


def both_slots(request):
    """Give the member both slots as long as it trains."""
    given = Allocation("m", 2, DATA_PARALLEL, 200.0, (Placement("localhost", (0, 1)),))
    start = [] if request.held else [given for _ in request.workloads]
    return Decision(tuple(start), (), request.now_s + 1.0, None)


def job_of(tmp_path, mode, rows=False, epochs=EPOCHS):
    functions = functions_of("pytorch", "paced_train_fn")
    if rows:
        functions = Functions("handwriting:rows_input_fn", functions.model_fn, functions.train_fn)
    config = {"optimizer": "sgd", "seconds": SECONDS, "seen": str(tmp_path / "seen")}
    member = Member("m", config, BATCH, 5, StopRule(max_epochs=epochs, patience=99), max_gpus=2)
    ensemble = Ensemble("e", "pytorch", functions, (member,), str(ENSEMBLES), balance=BalanceSettings(mode))
    profiles = (MemberProfile("m", {1: 100.0, 2: 200.0}, None, SAMPLES),)
    options = {"balance": mode}
    return Job(tmp_path, {"m": {}}, ensemble=ensemble, profiles=profiles, planner="script", options=options)


def visits(tmp_path):
    """How often each sample was trained, by its checksum."""
    lines = [path.read_text().split() for path in tmp_path.glob("seen-*")]
    return Counter(int(number) for line in lines for number in line)


def is_iteration(record):
    return isinstance(record, LoggedIteration)


@pytest.mark.parametrize("rows", [False, True], ids=["arrays", "preprocessed"])
def test_sizes_and_samples_go_on_where_training_was_stopped(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("READINGS", str(tmp_path / "readings"))
    job = job_of(tmp_path, ON, rows)
    planner = Planner("script", "elastic", both_slots)
    job.drive_by(planner, monkeypatch, real=True, seconds=8.0)
    if job.progress()["m"].active:
        job.drive_by(planner, monkeypatch, 1, real=True)
    assert job.trained("m") == list(range(1, EPOCHS + 1))
    counts = visits(tmp_path)
    assert sum(counts.values()) == EPOCHS * SAMPLES
    assert all(count % EPOCHS == 0 for count in counts.values())
    assert len(counts) > SAMPLES // 2
    with (job.run.balance / "m.jsonl").open() as lines:
        log = list(records_in(lines))
    found = replay(log)
    assert found.difference is None
    # 48 and 16 samples take the same time; a busy machine may slow down a rank for a while.
    later = [iteration.answer[0] for iteration in found.iterations[len(found.iterations) // 4 :]]
    assert median(later) == pytest.approx(48, abs=6)
    starts = [record for record in log if isinstance(record, ManagerStart)]
    # On a busy machine the first driver may end before the first iteration.
    given = [any(map(is_iteration, log[: log.index(start)])) for start in starts]
    assert [start.continued > 0 for start in starts] == given


def test_a_drift_of_ranks_switches_balancing_on(tmp_path, monkeypatch):
    # The detector compares three windows of 16 steps; an epoch has 10.
    job = job_of(tmp_path, AUTO, epochs=6)
    job.drive_by(Planner("script", "elastic", both_slots), monkeypatch, real=True)
    (started,) = job.events("balance_started", "m")
    assert started.data["reason"].startswith("localhost:1 takes")
    assert [rank["batch"] for rank in started.data["ranks"]] == [BATCH, BATCH]
