"""Phases of hops under the simulator's clock, for several epochs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods import hop_phase as phases
from hetctl.methods.hop_phase import hop_phase, unit_times
from hetctl.methods.hopper import SearchOptions
from hetctl.methods.hopper.schedule import lower_bound
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.simulate.scenario import JobTiming

NO_LIMIT = JobTiming()
QUICK = SearchOptions(seconds=0.05)
CLUSTER = Cluster.of_types({"v100": (2, 2), "p100": (2, 2)})


def member(name: str = "m", epochs: float = 3.0, rate: float = 10.0, **values: float) -> Workload:
    curves = {"v100": {1: rate}, "p100": {1: rate / 2}}
    return Workload(name, {1: rate}, 120.0 * epochs, 120, rates_by_type=curves, **values)


def times_of(members, partitions, cluster=CLUSTER):
    """Return the times of training visits and of evaluation visits."""
    return tuple(unit_times(members, partitions, cluster, evaluates=kind) for kind in (False, True))


def test_a_partition_is_on_one_node_and_all_gpus_of_it_read_it():
    units = unit_times([member(evaluate_s=4.0, checkpoint_s=0.5)], 3, CLUSTER)
    assert units.workers == ("node-0:0", "node-0:1", "node-1:0", "node-1:1")
    assert np.isfinite(units.seconds[0]).tolist() == [
        [True, True, False, False],
        [False, False, True, True],
        [True, True, False, False],
    ]
    # A third of 12 s (24 s on the slow type), and a checkpoint written and read.
    assert units.seconds[0, 0, 0] == pytest.approx(12.0 / 3 + 1.0)
    assert units.seconds[0, 1, 2] == pytest.approx(24.0 / 3 + 1.0)


def test_evaluation_is_where_training_is_and_has_its_own_time():
    members = [member(evaluate_s=4.0, checkpoint_s=0.5)]
    train, evaluate = times_of(members, 3)
    assert (np.isfinite(evaluate.seconds) == np.isfinite(train.seconds)).all()
    assert evaluate.fastest.tolist() == [[4.0 / 3 + 1.0] * 3]


def test_partitions_that_nodes_have_take_the_place_of_turns():
    homes = {"node-0": {0, 1, 2}, "node-1": frozenset({2}), "elsewhere": {1}}
    units = unit_times([member()], 3, CLUSTER, homes)
    assert np.isfinite(units.seconds[0, :, [0, 2]]).T.tolist() == [[True, False], [True, False], [True, True]]


def test_a_partition_on_no_node_is_refused():
    with pytest.raises(InfeasibleError, match="no worker can train m on partition p1"):
        unit_times([member()], 2, CLUSTER, {"node-0": [0]})


def test_a_member_without_samples_per_epoch_cannot_hop():
    with pytest.raises(BadInputError, match="the profile of m has no samples_per_epoch"):
        unit_times([Workload("m", {1: 1.0}, 10.0)], 4, CLUSTER)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(2, 6))
def test_all_epochs_are_trained_no_sooner_than_they_can_be(epochs, partitions):
    members = [member(f"m{i}", count, rate=10.0 + i) for i, count in enumerate(epochs)]
    units, evaluation = times_of(members, partitions)
    run = hop_phase(members, units, evaluation, NO_LIMIT, QUICK)
    assert set(run.done_s) == {one.name for one in members}
    assert max(run.done_s.values()) == pytest.approx(run.seconds)
    least_s = units.fastest.sum(axis=1) * epochs
    for one, least in zip(members, least_s, strict=True):
        assert run.training_s[one.name] >= least * (1 - 1e-9)
        assert run.done_s[one.name] >= run.training_s[one.name] * (1 - 1e-9)
    assert run.seconds >= lower_bound(units) * min(epochs) * (1 - 1e-6)


def test_enough_alike_members_keep_every_gpu_busy():
    cluster = Cluster.of(4, 2)
    members = [member(f"m{i}", epochs=5) for i in range(8)]
    run = hop_phase(members, *times_of(members, 4, cluster), NO_LIMIT, QUICK)
    assert run.seconds == pytest.approx(8 * 5 * 12.0 / 4, rel=0.05)


@pytest.mark.parametrize("scheduler", ["best", "randomized"])
def test_evaluation_costs_little_more_than_its_own_time(scheduler):
    cluster = Cluster.of(8, 1)
    members = [member(f"m{i}", 4, rate=10.0 + i, evaluate_s=1.6) for i in range(16)]
    times = times_of(members, 8, cluster)
    run = hop_phase(members, *times, NO_LIMIT, QUICK, scheduler)
    bound_s = 4 * sum(units.seconds.min(axis=2).sum(axis=0).max() for units in times)
    assert bound_s <= run.seconds * (1 + 1e-9)
    assert run.seconds <= {"best": 1.05, "randomized": 1.3}[scheduler] * bound_s


def test_schedulers_of_open_shops_refuse_nodes_of_several_gpus():
    members = [member()]
    with pytest.raises(BadInputError, match="a partition is on several workers"):
        hop_phase(members, *times_of(members, 2), NO_LIMIT, QUICK, "approximate")


def test_many_epochs_are_lumped_and_the_work_stays_the_same(monkeypatch):
    members = [member(f"m{i}", epochs=10 + i) for i in range(6)]
    times = times_of(members, 4)
    fine = hop_phase(members, *times, NO_LIMIT, QUICK)
    monkeypatch.setattr(phases, "MOST_VISITS", 100)
    lumped = hop_phase(members, *times, NO_LIMIT, QUICK)
    assert lumped.seconds == pytest.approx(fine.seconds, rel=0.15)
    assert sum(lumped.training_s.values()) == pytest.approx(sum(fine.training_s.values()), rel=0.15)
