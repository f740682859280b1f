"""Population-based tuning as in CEREBRO's appendix 11, from Table 6."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import GridSource, Procedure
from hetctl.methods.automl.trials import Categorical, Report
from hetctl.model.errors import BadInputError
from hetctl.model.searches import Trial

TABLE_6 = {
    "network": Categorical(("ResNet18", "ResNet34", "ResNet50")),
    "batch_size": Categorical((64,)),
    "learning_rate": Categorical((1e-2, 1e-4)),
    "weight_decay": Categorical((1e-2, 1e-4)),
}
STEPS = tuple(sign * 5.0**-power for power in (4, 5, 6) for sign in (1, -1))
MUTATIONS = {
    "batch_size": Mutation((16, -16), 16, 256),
    "learning_rate": Mutation(STEPS, 1e-6, 1.0),
    "weight_decay": Mutation(STEPS, 0.0, 1.0),
}
PAPER = Pbt(trials=12, iterations=8, epochs=5, mutations=MUTATIONS)


def loss(trial: Trial) -> float:
    return random.Random(f"{trial.number} {trial.epochs}").random()


def iteration(procedure: Procedure, failing: frozenset[int] = frozenset()) -> tuple[Trial, ...]:
    asked = procedure.ask()
    for trial in asked:
        procedure.tell(Report(trial.number, trial.epochs, None if trial.number in failing else loss(trial)))
    return asked


def test_the_papers_run_halts_the_lower_six_eight_times() -> None:
    procedure = Procedure(PAPER, GridSource(TABLE_6))
    before = iteration(procedure)
    assert [trial.config for trial in before] == [GridSource(TABLE_6).config(number) for number in range(12)]
    for epochs in range(10, 45, 5):
        now = iteration(procedure)
        better = sorted(before, key=loss)[:6]
        assert [trial.number for trial in now[:6]] == [trial.number for trial in better]
        assert all(trial.epochs == epochs for trial in now)
        for mutant in now[6:]:
            assert mutant.parent is not None
            assert mutant.parent.epochs == epochs - 5
            parent = next(trial for trial in better if trial.number == mutant.parent.trial)
            assert mutant.config["network"] == parent.config["network"]
            assert abs(mutant.config["batch_size"] - parent.config["batch_size"]) in (0, 16)
            assert mutant.config != parent.config
        before = now
    assert procedure.done
    assert len(procedure.history.trials) == 12 + 7 * 6


def test_the_next_iteration_waits_for_the_last_report() -> None:
    procedure = Procedure(PAPER, GridSource(TABLE_6))
    first, *others = procedure.ask()
    for trial in others:
        procedure.tell(Report(trial.number, trial.epochs, 1.0))
    assert procedure.ask() == ()
    assert not procedure.done
    procedure.tell(Report(first.number, first.epochs, 0.5))
    assert procedure.ask()[0].number == first.number


def test_where_more_than_half_fail_more_are_replaced() -> None:
    procedure = Procedure(PAPER, GridSource(TABLE_6))
    iteration(procedure, failing=frozenset(range(10)))
    now = procedure.ask()
    assert sorted(trial.number for trial in now) == [10, 11, *range(12, 22)]
    assert {trial.parent.trial for trial in now[2:] if trial.parent} <= {10, 11}


@given(
    value=st.integers(16, 256) | st.floats(16, 256),
    steps=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    share=st.floats(0, 1, exclude_max=True),
    multiply=st.booleans(),
)
def test_a_mutation_keeps_its_bounds_and_the_type(
    value: float, steps: list[float], share: float, multiply: bool
) -> None:
    changed = Mutation(tuple(steps), 16, 256, multiply).of(value, share)
    assert 16 <= changed <= 256
    assert isinstance(changed, int) or not isinstance(value, int)


def test_a_mutation_by_a_factor_multiplies_the_value() -> None:
    assert Mutation((0.8, 1.2), 0.0, 1.0, multiply=True).of(0.5, 0.6) == pytest.approx(0.6)


def test_a_population_larger_than_the_grid_is_refused() -> None:
    with pytest.raises(BadInputError, match="takes 13 configurations, but there are only 12"):
        Procedure(Pbt(13, 2, 5, {}), GridSource(TABLE_6))
