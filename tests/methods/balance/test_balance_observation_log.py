"""The log of a manager in training, its repetition, and the history and gain that it shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import dump_state, load_state, make_manager
from hetctl.methods.balance.observation_log import (
    POINTS,
    ManagerStart,
    balance_history,
    counted,
    json_line,
    logged,
    records_in,
    replay,
)
from hetctl.methods.balance.predictors import learner
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import MANAGERS, ON, BalanceSettings

BATCHES = (32, 32, 32)
PER_SAMPLE_S = (0.001, 0.002, 0.0041)

STRAIGHT_S = (0.001, 0.002, 0.004)
T_STAR_S = 0.005 + 96 / sum(1 / s for s in STRAIGHT_S)
WORKERS = ("a:0", "b:0", "c:0")


def observed(manager, number):
    """Observations of an iteration: noise without a generator, and cores that come and go."""
    noise = [1 + 0.02 * ((number * 7 + worker * 3) % 5 - 2) for worker in range(3)]
    return [
        Observation(batch, 0.005 + s * batch * off, cpu=0.5 + 0.1 * (number % 3), memory=0.2)
        for batch, s, off in zip(manager.batches, PER_SAMPLE_S, noise, strict=True)
    ]


def train(manager, first, last, at=None):
    """Give a manager iterations, the first of them at a time; return their records."""
    records = []
    for number in range(first, last):
        seen = observed(manager, number)
        time = float(number if at is None else at + number - first)
        records.append(logged(time, number, seen, manager.update(seen)))
    return records


def segment(settings, batches=BATCHES, continued=0):
    return ManagerStart(settings, ("a:0", "b:0", "c:0"), batches, 3, continued)


def read_back(records):
    return list(records_in([json_line(record) for record in records]))


@pytest.fixture
def soon(monkeypatch):
    """Networks learn and predict after few iterations."""
    monkeypatch.setattr(learner, "LEARNS_FROM", 30)
    monkeypatch.setattr(learner, "PREDICTS_FROM", 50)


def train_late(manager, first, last):
    """Give a manager iterations, and the weights of each training seven iterations late."""
    records, since = [], 0
    for number in range(first, last):
        training, adopted = manager.learner.training, None
        since = 0 if training is None else since + 1
        if since > 7:
            adopted = training.fitted()
            manager.learner.adopt(adopted)
        seen = observed(manager, number)
        records.append(logged(float(number), number, seen, manager.update(seen), adopted))
    return records


@pytest.mark.usefixtures("soon")
def test_weights_from_the_background_are_repeated():
    """Also when the job is killed while a training waits, whose result comes at another iteration then."""
    settings = BalanceSettings(ON, "cpu", "narx")
    manager = make_manager(settings, (320,) * 3, (), 3)
    records = [segment(settings, manager.batches), *train_late(manager, 0, 82)]
    assert manager.learner.training is not None
    state = dump_state(manager)
    records += train_late(manager, 82, 100)  # lost with the job
    manager = load_state(state)
    records += [segment(settings, manager.batches, 82), *train_late(manager, 82, 142)]
    iterations = [record for record in records if not isinstance(record, ManagerStart)]
    assert sum(bool(one.adopted) for one in iterations) > 5
    found = replay(read_back(records))
    assert (found.difference, len(found.iterations)) == (None, 142)
    without = [segment(settings, (320,) * 3), *(replace(one, adopted="") for one in iterations[:82])]
    assert replay(without).difference is not None


@pytest.mark.parametrize(
    ("name", "adopted", "message"),
    [
        ("curve", "AAAAAAAA8D8=", "weights of networks, but the manager has none"),
        ("cpu", "AAAAAAAA8D8=", "no training waits for 1 weights"),
        ("cpu", "AAAAAAAA8D", "no doubles in Base64"),
        ("cpu", "AAAA", "no doubles in Base64"),
        ("cpu", "é", "no doubles in Base64"),
    ],
)
def test_weights_that_nothing_waits_for_are_refused(name, adopted, message):
    settings = BalanceSettings(ON, name, "narx")
    records = [segment(settings), *train(make_manager(settings, BATCHES, (), 3), 0, 3)]
    records[2] = replace(records[2], adopted=adopted)
    with pytest.raises(BadInputError, match=message):
        replay(read_back(records))


@pytest.mark.parametrize("name", MANAGERS)
def test_a_killed_and_continued_run_repeats_exactly(name):
    settings = BalanceSettings(ON, name, "narx")
    manager = make_manager(settings, BATCHES, (), 3)
    records = [segment(settings), *train(manager, 0, 130)]
    state = dump_state(manager)
    records += train(manager, 130, 150)  # lost with the job
    manager = load_state(state)
    records += [segment(settings, manager.batches, 130), *train(manager, 130, 190, at=200)]
    assert read_back(records) == records
    found = replay(read_back(records))
    assert found.difference is None
    assert tuple(counted(records)) == found.iterations
    assert [one.time for one in found.iterations] == [*range(130), *range(200, 260)]


def test_a_log_is_repeated_up_to_what_it_left_out():
    """A job that goes on from before the gap, and a new manager, are repeated again."""
    settings = BalanceSettings(ON, "curve")
    manager = make_manager(settings, BATCHES, (), 3)
    first = train(manager, 0, 20)
    state = dump_state(manager)
    rest = train(manager, 20, 60)
    thin = [rest[15], rest[31]]
    records = [segment(settings), *first, *thin]
    found = replay(read_back(records))
    assert (found.difference, found.repeated, len(found.iterations)) == (None, 20, 22)
    beyond = [*records, segment(settings, manager.batches, 60), *train(manager, 60, 70)]
    found = replay(read_back(beyond))
    assert (found.difference, found.repeated, len(found.iterations)) == (None, 20, 32)
    manager = load_state(state)
    before = [*records, segment(settings, manager.batches, 20), *train(manager, 20, 30)]
    found = replay(read_back(before))
    assert (found.difference, found.repeated, len(found.iterations)) == (None, 30, 30)
    other = train(make_manager(settings, BATCHES, (), 3), 0, 9)
    found = replay(read_back([*records, segment(settings), *other]))
    assert (found.difference, found.repeated, len(found.iterations)) == (None, 29, 31)


def test_a_changed_answer_is_found():
    settings = BalanceSettings(ON, "curve")
    records = [segment(settings), *train(make_manager(settings, BATCHES, (), 3), 0, 20)]
    records[8] = replace(records[8], answer=(1, 1, 94))
    difference = replay(records).difference
    assert (difference.iteration, difference.logged) == (7, (1, 1, 94))
    assert difference.repeated != difference.logged


def test_a_new_manager_keeps_the_iterations_of_the_one_before():
    """As when a member goes on with other GPUs."""
    settings = BalanceSettings(ON, "curve")
    other = (48, 48)
    manager = make_manager(settings, other, (), 3)
    seen = [Observation(batch, 0.01 * batch) for batch in other]
    records = [
        segment(settings),
        *train(make_manager(settings, BATCHES, (), 3), 0, 10),
        ManagerStart(settings, ("a:0", "d:0"), other, 3),
        *(logged(100.0, number, seen, manager.update(seen)) for number in range(5)),
        ManagerStart(settings, ("a:0", "d:0"), other, 3, 2),
    ]
    found = replay(records)
    assert (found.difference, len(found.iterations)) == (None, 12)


def test_a_torn_last_line_is_ignored():
    settings = BalanceSettings(ON, "curve")
    records = [segment(settings), *train(make_manager(settings, BATCHES, (), 3), 0, 3)]
    lines = [json_line(record) for record in records]
    assert list(records_in([*lines[:-1], lines[-1][:-9]])) == records[:-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[]\n"], "line 1: no record"),
        (['{"settings": 3}\n'], "line 1: no record"),
        (["no\n"], "line 1: no record"),
    ],
)
def test_a_line_that_is_no_record_is_named(lines, message):
    with pytest.raises(BadInputError, match=message):
        list(records_in(lines))


def test_a_log_begins_with_the_start_of_a_manager():
    settings = BalanceSettings(ON, "curve")
    with pytest.raises(BadInputError, match="must begin with the start of a manager"):
        replay(train(make_manager(settings, BATCHES, (), 3), 0, 3))


def trained(count):
    manager = make_manager(BalanceSettings(ON, "curve"), (32, 32, 32))
    for number in range(count):
        pairs = zip(manager.batches, STRAIGHT_S, strict=True)
        seen = [Observation(batch, 0.005 + s * batch) for batch, s in pairs]
        yield logged(float(number), number, seen, manager.update(seen))


@pytest.mark.parametrize("count", [1, 60, 1000])
def test_a_course_has_few_points_and_the_last_iteration(count):
    history = balance_history("m", WORKERS, list(trained(count)))
    assert len(history.points) == min(count, POINTS)
    assert history.points[-1].time == count - 1
    assert all(point.iteration_s > 0 for point in history.points)


def test_the_gain_is_that_over_equal_batches():
    history = balance_history("m", WORKERS, list(trained(100)))
    assert history.points[-1].t_star_s == pytest.approx(T_STAR_S, rel=0.02)
    assert history.points[-1].iteration_s == pytest.approx(T_STAR_S, rel=0.05)
    assert history.equal_batches_s == pytest.approx(0.005 + 32 * 0.004, rel=0.05)
    assert history.gain == pytest.approx(history.equal_batches_s / T_STAR_S, rel=0.1)
