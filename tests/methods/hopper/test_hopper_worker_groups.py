"""Sizes of groups by the times of an epoch, and the workers of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.methods.hopper.worker_groups import (
    GROUP_CONNECT_S,
    group_size,
    hop_workers,
    visit_times,
    workers_of,
)
from hetctl.model.site import Node
from hetctl.model.workload import Workload

PARTITIONS = ("p0", "p1", "p2", "p3")
SCALING = {gpus: 10.0 * gpus for gpus in (1, 2, 3, 4)}


def members(count, rates=SCALING, samples=4000):
    return [Workload(f"m{number}", rates, float(samples), samples) for number in range(count)]


def nodes_of(*gpus):
    return [Node(f"n{number}", tuple(range(count))) for number, count in enumerate(gpus)]


def everywhere(nodes):
    return {node.name: PARTITIONS for node in nodes}


@pytest.mark.parametrize(
    ("gpus", "size", "expected"),
    [
        (4, 1, ["n:0", "n:1", "n:2", "n:3"]),
        (4, 2, ["n:0+1", "n:2+3"]),
        (4, 4, ["n:0+1+2+3"]),
        (2, 4, ["n:0+1"]),
        (5, 2, ["n:0+1+2", "n:3+4"]),
    ],
)
def test_workers_of_a_node(gpus, size, expected):
    assert workers_of(Node("n", tuple(range(gpus))), size) == expected


@pytest.mark.parametrize(("count", "size"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_fewer_members_form_larger_groups(count, size):
    nodes = nodes_of(4)
    assert group_size(members(count), PARTITIONS, nodes, everywhere(nodes)) == size


def test_groups_are_as_large_as_nodes_at_most():
    nodes = nodes_of(2, 2, 2)
    assert group_size(members(1), PARTITIONS, nodes, everywhere(nodes)) == 2


def test_all_members_must_have_rates_of_the_size():
    nodes = nodes_of(4)
    both = [*members(1), replace(members(1, {1: 10.0, 2: 20.0})[0], name="x")]
    assert group_size(both[:1], PARTITIONS, nodes, everywhere(nodes)) == 4
    assert group_size(both, PARTITIONS, nodes, everywhere(nodes)) == 2


def test_every_type_of_gpu_counts():
    nodes = [Node("n0", (0, 1), "fast"), Node("n1", (0, 1), "slow")]
    rates = {"fast": {1: 20.0, 2: 40.0}, "slow": {1: 10.0}}
    (member,) = members(1)
    assert group_size([replace(member, rates_by_type=rates)], PARTITIONS, nodes, everywhere(nodes)) == 1


def test_short_visits_are_not_made_in_groups():
    nodes = nodes_of(2)
    sizes = [
        group_size(members(1, samples=samples), PARTITIONS, nodes, everywhere(nodes)) for samples in (8, 80)
    ]
    assert sizes == [1, 2]


def test_a_partition_that_no_node_has_forms_no_groups():
    nodes = nodes_of(4)
    assert group_size(members(1), PARTITIONS, nodes, {"n0": PARTITIONS[:2]}) == 1


def test_a_group_has_its_rate_and_meets():
    nodes = nodes_of(2, 1)
    workers = hop_workers(nodes, everywhere(nodes), 2)
    seconds = visit_times(members(1), PARTITIONS, workers, {"m0": 0.0}).seconds[0, 0]
    assert list(seconds) == pytest.approx([1000 / 20 + GROUP_CONNECT_S, 1000 / 10])
