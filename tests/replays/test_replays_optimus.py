"""Optimus fits speeds from few of them, and gives workers where they gain most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replays.optimus import INTERVAL_S, OPTIMUS, SpeedModels, fitted

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def workload(name: str, seconds: float, cost: float = 0.0, most: int = 16) -> Workload:
    """Take so long on one worker; more workers divide the time but for `cost` s per sample and worker."""
    rates = {w: 1 / (0.1 / w + cost * w) for w in range(1, most + 1)}
    return Workload(name, rates, 10 * seconds, restart_s=30.0)


def simulated(workloads: list[Workload], gpus: int) -> Simulation:
    scenario = Scenario(Cluster.of(gpus, 4), rate_learner=SpeedModels(workloads))
    return simulate(OPTIMUS, list(map(Arrival, workloads)), scenario, Options())


@pytest.mark.parametrize("cost", [0.0, 0.001])
def test_speeds_of_the_models_form_are_found_from_four(cost: float) -> None:
    true = workload("a", 1.0, cost).rates
    assert fitted({w: true[w] for w in (1, 2, 4, 8)}, list(true)) == pytest.approx(true)


def test_a_speed_that_was_seen_changes_the_others() -> None:
    (one,) = workloads = [workload("a", 1.0)]
    models = SpeedModels(workloads)
    before = models.seen(one).rates[16]
    models.report("a", 16, one.rates[16] / 4)
    assert models.seen(one).rates[16] < before


def test_workers_go_where_they_gain_most() -> None:
    result = simulated(
        [workload("long", 9000.0), workload("flat", 9000.0, cost=0.1), workload("b", 900.0)], 8
    )
    first = {i.member: i.gpus for i in result.intervals if i.start_s == 0.0}
    assert (first["flat"], sum(first.values())) == (1, 8)
    assert first["long"] > first["b"] > 1


def test_workers_are_distributed_anew_after_ten_minutes_only() -> None:
    result = simulated([workload("long", 9000.0), workload("short", 300.0)], 4)
    starts = {i.start_s: i.gpus for i in result.intervals if i.member == "long"}
    assert list(starts) == [0.0, INTERVAL_S]
    assert starts[INTERVAL_S] == 4


def test_a_network_that_waits_begins_with_one_worker_when_one_is_free() -> None:
    workloads = [workload("a", 100.0, most=1), replace(workload("b", 900.0, most=1)), workload("c", 900.0)]
    result = simulated(workloads, 2)
    (start, *_) = [(i.start_s, i.gpus) for i in result.intervals if i.member == "c"]
    assert start == (pytest.approx(100.0), 1)
