"""How points are spread over profiling jobs, and how often the batch system is asked about these."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.app.profile.follow import moments_to_ask
from hetctl.app.profile.jobs import split
from hetctl.app.project import USUAL_WAITS
from hetctl.storage.profile_request import ProfileTarget

POINTS = st.lists(
    st.builds(ProfileTarget, st.sampled_from("abcdef"), st.integers(1, 16)), min_size=1, max_size=40
)


@given(POINTS, st.integers(1, 12))
def test_each_point_is_in_one_share_and_no_share_is_empty(points, jobs):
    shares = split(points, jobs)
    assert len(shares) == min(jobs, len(points))
    assert all(shares)
    key = lambda point: (point.member, point.gpus)  # noqa: E731
    assert sorted((p for share in shares for p in share), key=key) == sorted(points, key=key)


@given(POINTS, st.integers(1, 12))
def test_shares_differ_by_one_point_at_most(points, jobs):
    sums = [sum(point.gpus for point in share) for share in split(points, jobs)]
    assert max(sums) - min(sums) <= max(point.gpus for point in points)


def test_the_batch_system_is_asked_ever_less_often():
    now = [0.0]
    asked = []
    for ask in moments_to_ask(clock=lambda: now[0]):
        if ask:
            asked.append(now[0])
        now[0] += USUAL_WAITS.profile_poll_s
        if now[0] > 600:
            break
    pauses = [after - before for before, after in zip([0.0, *asked], asked, strict=False)]
    assert pauses == [1, 2, 4, 8, 16] + [30] * (len(pauses) - 5)
    assert 20 < len(pauses) < 30
