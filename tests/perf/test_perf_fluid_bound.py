from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.perf.fluid_bound import Envelope, envelope_of, fluid_time

curves = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=16).map(
    lambda values: dict(enumerate(values, start=1))
)


def test_an_envelope_bridges_dips_and_ends_at_the_peak() -> None:
    curve = {1: 10.0, 2: 11.0, 3: 24.0, 4: 30.0, 5: 28.0}
    assert envelope_of(curve, 8) == Envelope((0, 1, 3, 4), (0.0, 10.0, 24.0, 30.0))
    assert envelope_of(curve, 2) == Envelope((0, 1, 2), (0.0, 10.0, 11.0))


def test_superlinear_members_share_all_their_gpus_in_time() -> None:
    assert envelope_of({1: 10.0, 2: 30.0}, 8) == Envelope((0, 2), (0.0, 30.0))


def test_gpus_for_a_rate_between_corners() -> None:
    envelope = Envelope((0, 1, 3), (0.0, 10.0, 20.0))
    assert envelope.gpus_for(5.0) == (0.5, 0.1)
    assert envelope.gpus_for(10.0) == (1.0, 0.1)
    assert envelope.gpus_for(15.0) == (2.0, 0.2)
    assert envelope.gpus_for(20.0) == (3.0, 0.2)


@given(curves)
def test_an_envelope_is_concave_and_above_the_curve(curve: dict[int, float]) -> None:
    envelope = envelope_of(curve, 16)
    slopes = [envelope.gpus_for(rate)[1] for rate in envelope.rates[1:]]
    assert slopes == sorted(slopes)
    for gpus, rate in curve.items():
        if rate <= envelope.highest:
            assert envelope.gpus_for(rate)[0] <= gpus + 1e-9


@given(st.lists(st.tuples(st.floats(1.0, 1e6), curves), min_size=1, max_size=8), st.integers(1, 30))
def test_at_the_fluid_time_all_gpus_are_needed_or_a_member_is_at_its_peak(
    members: list[tuple[float, dict[int, float]]], gpus: int
) -> None:
    works = [(work, envelope_of(curve, gpus)) for work, curve in members]
    time_s = fluid_time(works, gpus)
    needed = sum(envelope.gpus_for(work / time_s)[0] for work, envelope in works)
    fastest = max(work / envelope.highest for work, envelope in works)
    assert needed <= gpus * (1 + 1e-9)
    assert needed == pytest.approx(gpus) or time_s == pytest.approx(fastest)


def test_nothing_left_takes_no_time() -> None:
    assert fluid_time([], 4) == 0.0
