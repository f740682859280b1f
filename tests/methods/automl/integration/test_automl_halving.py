"""Hyperband and ASHA against their papers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetctl.methods.automl.halving import Asha, Hyperband
from hetctl.methods.automl.procedure import Method, Procedure, RandomSource
from hetctl.methods.automl.trials import NumberRange, Report
from hetctl.model.errors import BadInputError
from hetctl.model.searches import DELAYED, PROMOTION, STOPPING, Trial

SOURCE = RandomSource({"x": NumberRange(0.0, 1.0)})


def loss(number: int, epochs: int) -> float:
    return random.Random(f"{number} {epochs}").random()


def one_by_one(method: Method) -> list[Trial]:
    """Return the requests that a single worker gets."""
    procedure, asked = Procedure(method, SOURCE), list[Trial]()
    while new := procedure.ask(1):
        asked += new
        procedure.tell(Report(new[0].number, new[0].epochs, loss(new[0].number, new[0].epochs)))
    return asked


def algorithm_1(most: int, eta: int) -> list[tuple[int, int]]:
    """Return number and epochs of all that Algorithm 1 of the Hyperband paper trains."""
    s_max = max(s for s in range(64) if eta**s <= most)
    trained, first = [], 0
    for s in range(s_max, -1, -1):
        n = math.ceil((s_max + 1) * eta**s / (s + 1))
        numbers = list(range(first, first + n))
        first += n
        for i in range(s + 1):
            n_i, r_i = n // eta**i, most // eta ** (s - i)
            assert len(numbers) == n_i
            trained += [(number, r_i) for number in numbers]
            numbers = sorted(numbers, key=lambda number: loss(number, r_i))[: n_i // eta]
    return trained


def test_the_brackets_of_81_epochs_are_those_of_algorithm_1() -> None:
    brackets = Hyperband(81, 3).brackets()
    assert [len(bracket.numbers) for bracket in brackets] == [81, 34, 15, 8, 5]
    assert brackets[0].epochs == (1, 3, 9, 27, 81)
    assert brackets[-1].epochs == (81,)


@settings(max_examples=30, deadline=None)
@given(most=st.integers(1, 30), eta=st.integers(2, 5))
def test_hyperband_trains_what_algorithm_1_does(most: int, eta: int) -> None:
    asked = one_by_one(Hyperband(most, eta))
    assert [(trial.number, trial.epochs) for trial in asked] == algorithm_1(most, eta)


@settings(max_examples=40)
@given(most=st.integers(1, 10**6), eta=st.integers(2, 7))
def test_epochs_grow_within_a_bracket_up_to_the_most(most: int, eta: int) -> None:
    for bracket in Hyperband(most, eta).brackets():
        assert bracket.epochs[0] >= 1
        assert bracket.epochs[-1] == most
        assert sorted(set(bracket.epochs)) == list(bracket.epochs)


def test_a_slow_trial_holds_up_its_own_bracket_alone() -> None:
    procedure = Procedure(Hyperband(9), SOURCE)
    first, *others = procedure.ask()
    for trial in others:
        procedure.tell(Report(trial.number, trial.epochs, loss(trial.number, trial.epochs)))
    second = Hyperband(9).brackets()[1]
    assert {trial.number for trial in procedure.ask()} <= set(second.numbers)
    procedure.tell(Report(first.number, first.epochs, None))
    assert {trial.number for trial in procedure.ask()} < set(Hyperband(9).brackets()[0].numbers)


def test_asha_promotes_as_soon_as_it_can() -> None:
    asked = one_by_one(Asha(9, 9, eta=3, variant=PROMOTION))
    best = min(range(3), key=lambda number: loss(number, 1))
    assert [(trial.number, trial.epochs) for trial in asked[:4]] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (best, 3),
    ]
    assert [trial.number for trial in asked[4:6]] == [3, 4]


def test_delayed_promotions_are_fewer_until_all_have_begun() -> None:
    begun, promoted = list[int](), list[int]()
    for trial in one_by_one(Asha(18, 9, eta=3, variant=DELAYED)):
        if trial.epochs == 1:
            begun.append(trial.number)
        elif trial.epochs == 3:
            one_in = 6 if len(begun) < 18 else 3
            best = sorted(begun, key=lambda number: loss(number, 1))[: len(begun) // one_in]
            assert trial.number in best
            promoted += [trial.number] * (len(begun) < 18)
    assert promoted


@pytest.mark.parametrize("variant", [DELAYED, PROMOTION])
@settings(max_examples=25, deadline=None)
@given(trials=st.integers(1, 60), most=st.integers(1, 100), eta=st.integers(2, 4), workers=st.integers(1, 9))
def test_asha_ends_with_the_best_of_each_rung_promoted(
    variant: str, trials: int, most: int, eta: int, workers: int
) -> None:
    method = Asha(trials, most, eta=eta, variant=variant)
    procedure, chance = Procedure(method, SOURCE), random.Random(workers)
    while not procedure.done:
        procedure.ask(workers - len(procedure.history.waiting))
        late = chance.choice(procedure.history.waiting)
        procedure.tell(Report(late.number, late.epochs, loss(late.number, late.epochs)))
    rungs = [set(procedure.history.rung(epochs)) for epochs in method.epochs]
    assert rungs[0] == set(range(trials))
    for epochs, lower, upper in zip(method.epochs, rungs, rungs[1:], strict=False):
        best = sorted(lower, key=lambda number: loss(number, epochs))[: len(lower) // eta]
        assert set(best) <= upper <= lower


@settings(max_examples=20, deadline=None)
@given(trials=st.integers(1, 40), most=st.integers(1, 30), eta=st.integers(2, 4), rate=st.integers(0, 1))
def test_the_stopping_variant_ends_the_trials_that_optuna_ends(
    trials: int, most: int, eta: int, rate: int
) -> None:
    assume(most >= eta**rate)
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=eta, min_early_stopping_rate=rate
    )
    study, trained = optuna.create_study(pruner=pruner), list[int]()
    method = Asha(trials, most, eta=eta, stop_rate=rate, variant=STOPPING)
    for number in range(trials):
        trial = study.ask()
        for epochs in range(1, method.epochs[-1] + 1):
            trial.report(loss(number, epochs), epochs)
            if epochs == method.epochs[-1] or trial.should_prune():
                break
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        trained.append(epochs)
    last = {trial.number: trial.epochs for trial in one_by_one(method)}
    assert [last[number] for number in range(trials)] == trained


def test_a_stopping_trial_goes_on_at_once_or_never() -> None:
    procedure = Procedure(Asha(9, 9, eta=3, variant=STOPPING), SOURCE)
    procedure.ask(4)
    for number, lost in enumerate((0.5, 0.6, 0.4)):
        procedure.tell(Report(number, 1, lost))
    # The first was the best of one, and the third is that of three; the second never was.
    assert [(trial.number, trial.epochs) for trial in procedure.ask(3)] == [(0, 3), (2, 3), (4, 1)]
    procedure.tell(Report(3, 1, None))
    procedure.tell(Report(0, 3, 0.9))
    assert [(trial.number, trial.epochs) for trial in procedure.ask(2)] == [(0, 9), (5, 1)]


def test_the_stop_rate_gives_every_trial_more_epochs() -> None:
    assert Asha(1, 256, min_epochs=1, stop_rate=0).epochs == (1, 4, 16, 64, 256)
    assert Asha(1, 256, min_epochs=1, stop_rate=2).epochs == (16, 64, 256)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Hyperband(0), "max_epochs is 0"),
        (lambda: Hyperband(9, 1), "eta is 1"),
        (lambda: Asha(0, 9), "trials is 0"),
        (lambda: Asha(9, 9, eta=1), "eta is 1"),
        (lambda: Asha(9, 9, stop_rate=-1), "stop_rate is -1"),
        (lambda: Asha(9, 9, min_epochs=10), "first rung has 10"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object, rule: str) -> None:
    with pytest.raises(BadInputError, match=rule):
        make()  # type: ignore[operator]
