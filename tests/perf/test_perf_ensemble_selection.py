"""Selection, averages, temperatures and intervals, against what is known of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.model.exports import ACCURACY, LOSS, MSE, OutputForm
from hetctl.perf import ensemble_selection as selection
from hetctl.perf.ensemble_selection import SCORES, Task


def classified(draws, members, samples, classes, metric):
    skills = draws.uniform(0, 2, members)
    targets = draws.integers(0, classes, samples)
    logits = draws.normal(size=(members, samples, classes))
    logits[:, np.arange(samples), targets] += skills[:, None]
    return Task(np.stack([selection.softmax(one) for one in logits]), targets, metric)


def valued(draws, members, samples):
    targets = draws.normal(size=(samples, 2))
    noise = draws.normal(size=(members, samples, 2)) * draws.uniform(0.1, 2, members)[:, None, None]
    return Task(targets + noise, targets, MSE)


@st.composite
def tasks(draw):
    draws = np.random.default_rng(draw(st.integers(0, 10**6)))
    members, samples = draw(st.integers(1, 6)), draw(st.integers(4, 40))
    metric = draw(st.sampled_from([ACCURACY, LOSS, MSE]))
    if metric == MSE:
        return valued(draws, members, samples)
    return classified(draws, members, samples, draw(st.integers(2, 4)), metric)


def loss_with(task, weights):
    return task.loss(selection.averaged(task.predictions, weights))


@given(tasks())
def test_weights_add_up_and_the_greedy_average_is_no_worse_than_the_best_member(task):
    for weights_of in (selection.best, selection.average, selection.greedy, selection.weighted):
        weights = weights_of(task)
        assert weights.sum() == pytest.approx(1.0)
        assert (weights >= 0).all()
    best = loss_with(task, selection.best(task))
    assert best == min(task.loss(one) for one in task.predictions)
    assert loss_with(task, selection.greedy(task))[0] <= best[0] + 1e-12


@given(tasks(), st.integers(1, 3))
def test_greedy_steps_are_the_best_of_all_that_add_one_member(task, steps):
    """Against the definition: each step tried with every member, and the best prefix."""
    chosen, found = [], []
    for _ in range(steps):
        tried = {one: [*chosen, one] for one in range(len(task.predictions))}
        losses = {one: task.loss(task.predictions[picks].mean(axis=0)) for one, picks in tried.items()}
        chosen = tried[min(losses, key=losses.__getitem__)]
        found.append(min(losses.values()))
    weights = selection.greedy(task, steps)
    assert loss_with(task, weights)[0] == pytest.approx(min(found)[0])


@given(tasks())
def test_weights_have_the_least_loss_of_all_on_a_grid(task):
    members = len(task.predictions)
    if members > 3:
        return
    metric = LOSS if task.has_classes else MSE

    def loss(weights):
        predictions = selection.averaged(task.predictions, np.array(weights, dtype=float))
        return SCORES[metric](predictions, task.targets).mean()

    grid = [w for w in itertools.product(range(11), repeat=members) if sum(w) == 10]
    assert loss(selection.weighted(task)) <= min(loss(np.array(w) / 10) for w in grid) * (1 + 1e-3) + 1e-3


@given(st.integers(0, 10**6), st.floats(0.3, 5.0))
def test_the_temperature_undoes_a_scale_and_is_the_best(seed, factor):
    draws = np.random.default_rng(seed)
    task = classified(draws, 1, 200, 3, LOSS)
    found = selection.temperature(task.predictions[0], task.targets)
    blurred = selection.scaled(task.predictions[0], factor)
    again = selection.temperature(blurred, task.targets)
    low, high = selection.TEMPERATURES
    if low * 1.01 < found < high / 1.01 and low * 1.01 < found / factor < high / 1.01:
        assert again == pytest.approx(found / factor, rel=1e-4)

    def loss(by):
        return SCORES[LOSS](selection.scaled(task.predictions[0], by), task.targets).mean()

    assert loss(found) <= min(loss(by) for by in np.geomspace(low, high, 40)) + 1e-9


@given(st.integers(2, 101))
def test_every_sample_is_judged_once_and_never_by_its_own_choice(samples):
    seen = []

    def choose(rows):
        def predict(others):
            assert not set(rows) & set(others)
            seen.extend(others)
            return np.full((len(others), 1), len(rows))

        return predict

    judged = selection.judged(choose, (samples, 1))
    assert sorted(seen) == list(range(samples))
    assert set(judged[:, 0]) == {samples // 2, samples - samples // 2}


def test_a_choice_by_chance_gains_nothing_where_it_was_not_made():
    """Of 200 members that guess, the best seems good by the samples that chose it alone."""
    task = classified(np.random.default_rng(3), 200, 60, 2, ACCURACY)
    guesses = np.random.default_rng(4).dirichlet([1, 1], (200, 60))
    task = Task(guesses, task.targets, ACCURACY)
    fitted = -loss_with(task, selection.best(task))[0]
    judged = selection.judged(selection.choosing(task, selection.best), guesses.shape[1:])
    assert fitted > 0.65
    assert SCORES[ACCURACY](judged, task.targets).mean() < 0.65


def test_the_interval_holds_the_true_gain_as_often_as_it_says():
    draws, held = np.random.default_rng(5), 0
    for _ in range(200):
        before = draws.random(300) < 0.7
        after = np.where(draws.random(300) < 0.1, draws.random(300) < 0.9, before)
        # 0.1 of the samples are drawn anew, with 0.9 instead of 0.7.
        gain = selection.gain_of(after.astype(float), before.astype(float), larger_is_better=True)
        held += gain.low <= 0.1 * 0.2 <= gain.high
    assert 0.88 <= held / 200 <= 0.99


def test_a_smaller_loss_is_a_gain():
    gain = selection.gain_of(np.full(9, 1.0), np.full(9, 3.0), larger_is_better=False)
    assert (gain.mean, gain.low, gain.high) == (2.0, 2.0, 2.0)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_greedy_soup_is_no_worse_than_its_first(seed, members):
    losses = {}
    draws = np.random.default_rng(seed)

    def loss_of(chosen):
        return losses.setdefault(chosen, (float(draws.random()), 0.0))

    chosen = selection.greedy_soup(range(members), loss_of)
    assert 0 in chosen
    assert losses[tuple(sorted(chosen))] <= losses[0,]


ROWS = np.array([[0.2, 0.8], [0.6, 0.4]])


@pytest.mark.parametrize(
    ("outputs", "targets", "form", "found"),
    [
        (ROWS, [1, 0], OutputForm.PROBABILITIES, ROWS),
        (np.log(ROWS), [1, 0], OutputForm.LOGITS, ROWS),
        (ROWS[:, 1:], [[1], [0]], OutputForm.PROBABILITIES, ROWS),
        (np.log(ROWS[:, 1:] / ROWS[:, :1]), [1.0, 0.0], OutputForm.LOGITS, ROWS),
        (ROWS, [[0, 1], [1, 0]], OutputForm.PROBABILITIES, ROWS),
        (ROWS * 9, [[0.5, 1.5], [2.0, 3.0]], OutputForm.VALUES, ROWS * 9),
        (ROWS[:, 0], [0.5, 2.0], OutputForm.VALUES, ROWS[:, :1]),
    ],
)
def test_outputs_are_read_as_what_they_are(outputs, targets, form, found):
    read, classes = selection.read_targets(np.array(targets), outputs)
    assert selection.form_of(outputs, classes) is form
    assert selection.predictions_of(outputs, form) == pytest.approx(found)
    assert (classes == 0) == (form is OutputForm.VALUES)
    if classes:
        assert read.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [(np.zeros((2, 3)), np.ones((2, 3))), (np.zeros((2, 3, 4)), np.zeros((2, 4), int))],
)
def test_what_is_neither_classes_nor_values_is_refused(outputs, targets):
    with pytest.raises(BadInputError, match="neither one class nor values"):
        selection.read_targets(targets, outputs)
