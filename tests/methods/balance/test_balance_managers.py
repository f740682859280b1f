"""Properties of every batch size manager."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.balance import managers
from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.manager import Observation, equal_batches
from hetctl.methods.balance.managers import CpuManager, GpuManager, dump_state, load_state, same_structure
from hetctl.methods.balance.predictors.learner import PREDICTORS
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.training_settings import MANAGERS, ON, BalanceSettings

SECONDS = st.floats(1e-4, 1e4)
MEMORY = st.floats(0, 1)


def make_manager(name, batches, caps=()):
    return managers.make_manager(BalanceSettings(ON, name, "memoryless"), batches, caps)


@st.composite
def workers(draw):
    caps = draw(st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=6))
    most = sum(cap or 200 for cap in caps)
    return equal_batches(draw(st.integers(len(caps), most)), caps), caps


@pytest.mark.parametrize("name", MANAGERS)
@settings(max_examples=40)
@given(workers(), st.data())
def test_the_total_is_kept_and_caps_are_respected(name, batches_and_caps, data):
    batches, caps = batches_and_caps
    manager = make_manager(name, batches, caps)
    assert manager.batches == batches
    for _ in range(12):
        states = [(data.draw(SECONDS), data.draw(MEMORY)) for _ in batches]
        observations = [
            Observation(batch, seconds, memory=memory)
            for batch, (seconds, memory) in zip(manager.batches, states, strict=True)
        ]
        taken = manager.update(observations)
        assert taken == manager.batches
        assert sum(taken) == sum(batches)
        assert all(
            type(batch) is int and 1 <= batch <= (cap or 10**9)
            for batch, cap in zip(taken, caps, strict=True)
        )


@pytest.mark.parametrize("name", MANAGERS)
def test_equal_workers_keep_equal_batches(name):
    manager = make_manager(name, (32, 32, 32))
    for _ in range(50):
        manager.update([Observation(batch, batch / 100) for batch in manager.batches])
    assert manager.batches == (32, 32, 32)
    assert manager.warnings == ()


def observed(manager, draw):
    return [Observation(batch, batch / draw.uniform(50, 150), draw.random()) for batch in manager.batches]


@pytest.mark.parametrize(
    "manager",
    [
        pytest.param(GpuManager((32, 32, 32)), id="gpu"),
        pytest.param(CurveManager((32, 32, 32)), id="curve"),
        *(
            pytest.param(CpuManager((32, 32, 32), PREDICTORS[name](3, 0)), id=f"cpu-{name}")
            for name in PREDICTORS
        ),
    ],
)
def test_a_manager_continues_from_its_state_in_the_next_job(manager):
    draw = random.Random(1)
    for _ in range(130):
        manager.update(observed(manager, draw))
    # A training that waits goes on as well.
    other = load_state(dump_state(manager))
    assert same_structure(other, manager)
    for _ in range(30):
        seen = observed(manager, draw)
        assert other.batches == manager.batches
        for one in (manager, other):
            if one.learner is not None:
                one.learner.train()
        assert other.update(seen) == manager.update(seen)


@pytest.mark.parametrize("name", MANAGERS)
def test_one_worker_takes_all(name):
    manager = make_manager(name, (7,))
    assert manager.update([Observation(7, 1.0)]) == (7,)
    assert manager.warnings == ()


@pytest.mark.parametrize("name", MANAGERS)
@pytest.mark.parametrize(("batches", "caps"), [((), ()), ((0, 8), ()), ((8, 8), (9,))])
def test_batches_and_caps_that_do_not_go_together_are_refused(name, batches, caps):
    with pytest.raises(BadInputError):
        make_manager(name, batches, caps)


@pytest.mark.parametrize("name", MANAGERS)
def test_first_batches_above_their_caps_are_infeasible(name):
    with pytest.raises(InfeasibleError, match="above their caps"):
        make_manager(name, (8, 8), (9, 7))


def test_equal_batches_are_equal():
    assert equal_batches(128, [None] * 4) == (32, 32, 32, 32)
    assert equal_batches(10, [None] * 4) == (3, 3, 2, 2)


def test_equal_batches_leave_what_does_not_fit_to_others():
    assert equal_batches(100, [10, None, None]) == (10, 45, 45)


@given(st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 400))
def test_equal_batches_have_the_total_and_fit_their_caps(caps, total):
    most = sum(cap or 400 for cap in caps)
    if not len(caps) <= total <= most:
        with pytest.raises(InfeasibleError if total > most else BadInputError):
            equal_batches(total, caps)
        return
    batches = equal_batches(total, caps)
    assert sum(batches) == total
    assert all(1 <= batch <= (cap or 400) for batch, cap in zip(batches, caps, strict=True))


@pytest.mark.parametrize(
    "values",
    [{"batch": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"cpu": float("nan")}, {"memory": -0.1}],
)
def test_observations_that_cannot_be_are_refused(values):
    with pytest.raises(BadInputError):
        Observation(**{"batch": 8, "seconds": 1.0, **values})
