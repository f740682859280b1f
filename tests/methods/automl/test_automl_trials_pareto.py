"""Points with several losses in the order of their fronts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.automl.halving import Asha
from hetctl.methods.automl.trials import Report, TrialHistory, dominates, front_of, pareto_order
from hetctl.model.searches import Trial

small = st.integers(0, 5).map(float)
clouds = st.lists(st.tuples(small, small, small), max_size=25).map(lambda points: dict(enumerate(points)))


@given(points=clouds)
def test_a_front_has_the_points_that_no_other_dominates(points) -> None:
    front = front_of(points)
    assert front == [n for n in points if not any(dominates(other, points[n]) for other in points.values())]


@given(points=clouds)
def test_no_point_comes_before_one_that_dominates_it(points) -> None:
    order = pareto_order(points)
    assert sorted(order) == list(points)
    places = {number: place for place, number in enumerate(order)}
    for one in points:
        for other in points:
            if dominates(points[one], points[other]):
                assert places[one] < places[other]


def test_the_ends_of_a_front_come_first_and_crowded_points_last() -> None:
    points = {0: (0.0, 10.0), 1: (4.8, 5.0), 2: (5.0, 4.8), 3: (5.2, 4.6), 4: (10.0, 0.0), 5: (10.0, 10.0)}
    order = pareto_order(points)
    assert order[:2] == [0, 4]
    assert order[4:] == [2, 5]


def asked(count: int) -> TrialHistory:
    return TrialHistory(Trial(number, {}, 1) for number in range(count))


def test_asha_promotes_from_the_front_of_several_losses() -> None:
    history = asked(6)
    # By the first loss alone trials 0 and 1 would go on; 5 is as good by the other one.
    for number, losses in enumerate([(0.0, 9.0), (1.0, 9.5), (2.0, 9.6), (3.0, 9.7), (4.0, 9.8), (5.0, 0.0)]):
        assert history.tell(Report(number, 1, losses[0], losses[1:]))
    asha = Asha(6, 9, eta=3, variant="promotion")
    promoted = []
    while (trial := asha.next_trial(history)) is not None:
        promoted.append(trial.number)
        history.ask(trial)
    assert promoted == [0, 5]
    assert history.ranked(1, [1, 5, 3]) == [5, 1, 3]


def test_a_trial_that_lacks_one_of_its_losses_has_failed() -> None:
    history = asked(2)
    history.tell(Report(0, 1, 0.5, (float("nan"),)))
    history.tell(Report(1, 1, 0.7, (1.0,)))
    assert history.ranked(1) == [1]
    assert history.events[-2] == Report(0, 1, None)
    assert TrialHistory(history.events).ranked(1) == [1]
