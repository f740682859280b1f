"""Points of rates that a profiling command may measure, and their cost."""

from __future__ import annotations

import pytest

from hetctl.app.profile.jobs import ProfileCommand
from hetctl.app.profile.rate_targets import RateTargets, counts_beyond, every_count, measured_counts
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.job import JobSize
from hetctl.model.profile import Hardware, ProfilePoint, shape_digest, shapes_of
from hetctl.model.site import Queue, Site


@pytest.mark.parametrize(
    ("limits", "most", "available", "counts"),
    [
        ({}, 4, 8, [1, 2, 3, 4]),
        ({"min_gpus": 2, "max_gpus": 3}, 4, 8, [2, 3]),
        ({"min_gpus": 6, "max_gpus": 6}, 4, 8, [6]),
        ({"min_gpus": 6}, 4, 4, [4]),
        ({"global_batch_size": 3}, 4, 8, [1, 2, 3]),
    ],
)
def test_no_number_is_measured_that_a_member_never_has(limits, most, available, counts):
    (shape,) = shapes_of(
        Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("m", **limits),), "/nowhere")
    )
    assert list(every_count(shape, most, available, 4)) == counts


@pytest.mark.parametrize(
    ("limits", "most", "per_node", "counts"),
    [
        ({}, 8, 4, [1, 2, 4, 8]),
        ({}, 12, 6, [1, 2, 4, 6, 8, 12]),
        ({"max_gpus": 7}, 8, 4, [1, 2, 4, 7]),
        ({"min_gpus": 3}, 8, 4, [3, 4, 6, 8]),
        ({"max_gpus": 1}, 8, 4, [1]),
    ],
)
def test_between_the_measured_numbers_rates_are_interpolated(limits, most, per_node, counts):
    (shape,) = shapes_of(
        Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("m", **limits),), "/nowhere")
    )
    assert list(measured_counts(shape, most, 16, per_node)) == counts


@pytest.mark.parametrize(
    ("rates", "max_gpus", "counts"),
    [
        ({1: 100.0, 2: 190.0, 4: 340.0}, None, (8, 16, 32)),
        ({1: 100.0, 2: 190.0, 4: 340.0}, 16, (8, 16)),
        ({1: 100.0, 2: 120.0, 4: 90.0, 8: 60.0}, None, ()),
        ({1: 0.0}, None, ()),
        ({}, None, ()),
    ],
)
def test_more_gpus_are_measured_where_they_may_be_faster(rates, max_gpus, counts):
    (shape,) = shapes_of(
        Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("m", max_gpus=max_gpus),), "/nowhere")
    )
    points = [
        ProfilePoint("m", gpus, rate, "", 32, 1.0, Hardware("gpu", "", "")) for gpus, rate in rates.items()
    ]
    assert counts_beyond(shape, points, 32) == counts


QUEUE = Queue("main")
SITE = Site("lab", "slurm", "srun", 4, 4, 16, 2**30, (QUEUE,))
MEMBERS = tuple(Member(name, config={"units": number}) for number, name in enumerate("abc"))


def targets(*points, **options):
    ensemble = Ensemble("e", "pytorch", Functions("m:i", "m:m"), MEMBERS, "/nowhere")
    asked = ProfileCommand(ensemble, SITE, JobSize(QUEUE, 16, 4, 600, 10), **options)
    return RateTargets(asked, lambda: points)


def test_before_any_measurement_the_cost_is_assumed():
    """On two nodes 8 seconds for each of 3 points on 1, 2, 4 and 8 GPUs, and ten for the start."""
    cost = targets().cost()
    assert (cost.least_points, cost.points, cost.nodes, cost.assumed) == (3, 12, 2, True)
    assert cost.seconds == pytest.approx(10 + 3 * 15 * 8 / 8)
    assert cost.node_hours == pytest.approx(2 * cost.seconds / 3600)


def test_all_points_are_measured_if_asked():
    cost = targets(every=True).cost()
    assert (cost.least_points, cost.points) == (24, 24)


def test_more_gpus_than_two_nodes_have_are_measured_only_if_a_number_is_given():
    hardware = Hardware("gpu", "", "")
    points = [
        ProfilePoint(member.name, 1, rate, "", 32, 1.0, hardware, shape=shape_digest(member, ()))
        for member, rate in zip(MEMBERS, (10.0, 95.0, 120.0), strict=True)
    ]
    assert targets(*points).most_gpus() == 12
    assert targets(*points, sized=False).most_gpus() == 8
