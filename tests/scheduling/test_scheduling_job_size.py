"""The job planner: nodes and time of jobs within a site's bins and a user's budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import InfeasibleError
from hetctl.model.run import Budget
from hetctl.model.site import Queue, Site
from hetctl.model.workload import Workload
from hetctl.scheduling.job_size import LEAST_WALL_S, best_of, bins_of, grace_of, job_sizes

HOUR = 3600
SUMMIT = (
    Queue("batch", 45, 2 * HOUR),
    Queue("batch", 91, 6 * HOUR),
    Queue("batch", 921, 12 * HOUR),
)


def site(queues=SUMMIT, nodes=921, gpus=6):
    return Site("s", "lsf", "jsrun", nodes, gpus, 42, 2**39, queues)


def member(name="m", hours=1.0, most=6, startup_s=10.0):
    """Scale perfectly up to `most` GPUs, and take so many hours on one."""
    rates = {gpus: 100.0 * gpus for gpus in range(1, most + 1)}
    return Workload(name, rates, 100.0 * hours * HOUR, startup_s=startup_s)


def members(count, **how):
    return [member(f"m{i}", **how) for i in range(count)]


def chosen(where, work, budget=None, **wishes):
    found = job_sizes(where, bins_of(where, where.queues), work, **wishes)
    return best_of(found, budget or Budget())


def test_bins_of_one_queue_follow_one_another():
    assert [(b.least_nodes, b.most_nodes) for b in bins_of(site(), SUMMIT)] == [(1, 45), (46, 91), (92, 921)]
    other = Queue("debug", 2, HOUR)
    assert bins_of(site(), (*SUMMIT, other))[-1].least_nodes == 1


def test_a_queue_for_large_jobs_takes_no_small_ones():
    prod = Queue("prod", 496, 24 * HOUR, min_nodes=10)
    (only,) = bins_of(site((prod,)), (prod,))
    assert (only.takes(9, HOUR), only.takes(10, HOUR)) == (False, True)
    assert chosen(site((prod,)), members(2)).size.nodes == 10


def test_a_bin_takes_no_fewer_nodes_than_its_own():
    small, middle, _ = bins_of(site(), SUMMIT)
    assert small.takes(10, 2 * HOUR)
    assert not small.takes(10, 3 * HOUR)
    assert not middle.takes(10, 3 * HOUR)
    assert middle.takes(46, 3 * HOUR)


def test_few_members_get_no_more_nodes_than_they_can_use():
    assert chosen(site(), members(2)).size.nodes <= 2


def test_a_short_run_asks_for_a_short_job():
    option = chosen(site(), members(6, hours=0.1))
    assert option.size.wall_s == LEAST_WALL_S
    assert option.jobs == 1


def test_a_long_run_takes_several_jobs_of_the_queues_limit():
    option = chosen(site(nodes=1, queues=(Queue("q", 1, 2 * HOUR),)), members(6, hours=10))
    assert option.size.wall_s == 2 * HOUR
    assert option.jobs == 6


def test_more_nodes_are_not_taken_where_they_waste():
    """Rates that hardly grow: a second GPU would double the GPU-hours."""
    slow = [Workload(f"m{i}", {1: 100.0, 2: 104.0, 3: 106.0, 4: 107.0}, 100.0 * HOUR) for i in range(12)]
    assert chosen(site(), slow).size.nodes == 2


def test_a_budget_of_gpu_hours_is_kept_where_that_is_possible():
    sublinear = [
        Workload(f"m{i}", {k: 100 * k**0.6 for k in range(1, 25)}, 100.0 * 5 * HOUR) for i in range(6)
    ]
    free = chosen(site(), sublinear)
    kept = chosen(site(), sublinear, Budget(gpu_hours=0.8 * free.gpu_hours))
    assert kept.gpu_hours <= 0.8 * free.gpu_hours
    assert kept.size.nodes < free.size.nodes


def test_an_unattainable_budget_takes_the_fewest_gpu_hours():
    found = job_sizes(site(), bins_of(site(), SUMMIT), members(6))
    assert best_of(found, Budget(gpu_hours=0.01)).gpu_hours == min(p.gpu_hours for p in found)


def test_a_budget_of_one_job_takes_nodes_enough_to_end_in_it():
    where = site(nodes=64, queues=(Queue("q", 64, 2 * HOUR),))
    work = members(60, hours=4, most=12)
    assert chosen(where, work, Budget(max_jobs=1)).jobs == 1


def test_gpus_and_time_set_by_the_user_are_kept():
    option = chosen(site(), members(40), gpus=24, wall_s=HOUR)
    assert (option.size.gpus, option.size.nodes, option.size.wall_s) == (24, 4, HOUR)
    assert option.size.grace_s == grace_of(HOUR)


def test_a_limit_that_leaves_no_time_is_refused():
    where = site(queues=(Queue("q", 8, 120),))
    with pytest.raises(InfeasibleError, match=r"the start of m0 \(200 s\)"):
        chosen(where, members(2, startup_s=200.0))


@given(
    hours=st.floats(0.01, 1000),
    count=st.integers(1, 50),
    most=st.integers(1, 64),
    limit=st.integers(1, 24),
    nodes=st.integers(1, 100),
)
def test_every_size_fits_its_queue_and_its_jobs_hold_the_work(hours, count, most, limit, nodes):
    where = site(nodes=nodes, queues=(Queue("q", nodes, limit * HOUR),))
    work = members(count, hours=hours, most=most)
    found = job_sizes(where, bins_of(where, where.queues), work)
    for option in found:
        size = option.size
        assert 1 <= size.nodes <= nodes
        assert size.gpus == size.nodes * where.gpus_per_node
        assert 0 < size.grace_s < size.wall_s <= limit * HOUR
        assert option.jobs * size.wall_s >= option.makespan_s
    assert best_of(found, Budget()) in found


def test_members_that_follow_others_need_no_nodes_of_their_own():
    first, then = members(12, most=1), [member(f"then-{i}", most=1) for i in range(12)]
    bins = bins_of(site(), SUMMIT)
    found = job_sizes(site(), bins, [*first, *then], before={one.name: 100.0 * HOUR for one in then})
    assert (
        best_of(found, Budget()).size.nodes == chosen(site(), members(12, hours=2.0, most=1)).size.nodes == 2
    )
    assert chosen(site(), [*first, *then]).size.nodes == 4


def test_jobs_are_large_enough_for_the_member_that_needs_most():
    wide = Workload("w", {gpus: 100.0 * gpus for gpus in range(13, 19)}, 1e5)
    sizes = {found.size.nodes for found in job_sizes(site(), bins_of(site(), SUMMIT), [wide])}
    # Each bin has its smallest job.
    assert sizes == {3, 46, 92}
