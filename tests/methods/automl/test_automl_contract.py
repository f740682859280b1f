"""One story over every procedure: workers that come and go, slow, failing and repeating themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.automl.grid_random import GridSource, OneShot, RandomSource
from hetctl.methods.automl.halving import Asha, Hyperband
from hetctl.methods.automl.optuna_search import OptunaSource
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.trials import Categorical, NumberRange, Report, Trial
from hetctl.model.errors import BadInputError
from hetctl.model.searches import PROMOTION, STOPPING

Begin = Callable[..., Procedure]

GRID = {
    "network": Categorical(("resnet18", "resnet34", "resnet50")),
    "lr": Categorical((1e-2, 1e-4)),
    "batch": Categorical((16, 64)),
}
SPACE = {
    "network": Categorical(("resnet18", "resnet34", None)),
    "lr": NumberRange(1e-5, 1.0, log=True),
    "layers": NumberRange(1, 8, whole=True),
    "momentum": NumberRange(0.0, 1.0),
}
MUTATIONS = {
    "lr": Mutation((0.8, 1.2), 1e-6, 1.0, multiply=True),
    "batch": Mutation((16, -16), 16, 256),
}


def grid(seed: int = 0, state: Any = None) -> Procedure:  # noqa: ARG001
    return Procedure(OneShot(12, 5), GridSource(GRID), state)


def random_search(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(OneShot(10, 3), RandomSource(SPACE, seed), state)


def hyperband(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(Hyperband(9), RandomSource(SPACE, seed), state)


def asha(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(Asha(20, 9, eta=3), RandomSource(SPACE, seed), state)


def promoting_asha(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(Asha(20, 9, eta=3, variant=PROMOTION), RandomSource(SPACE, seed), state)


def stopping_asha(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(Asha(20, 9, eta=3, variant=STOPPING), RandomSource(SPACE, seed), state)


def pbt(seed: int = 0, state: Any = None) -> Procedure:
    return Procedure(Pbt(12, 4, 5, MUTATIONS, seed), GridSource(GRID), state)


def optuna(seed: int = 0, state: Any = None, sampler: str = "TPESampler") -> Procedure:
    pytest.importorskip("optuna")
    return Procedure(OneShot(14, 2), OptunaSource(SPACE, sampler, seed), state)


def optuna_asha(seed: int = 0, state: Any = None) -> Procedure:
    pytest.importorskip("optuna")
    return Procedure(Asha(14, 9, eta=3), OptunaSource(SPACE, seed=seed), state)


BARRIERS: dict[str, Begin] = {
    "grid": grid,
    "random": random_search,
    "hyperband": hyperband,
    "pbt": pbt,
}
"""Procedures whose requests do not depend on the order of reports."""
OTHERS: dict[str, Begin] = {
    "asha": asha,
    "asha-promotion": promoting_asha,
    "asha-stopping": stopping_asha,
    "optuna": optuna,
    "optuna-asha": optuna_asha,
    "optuna-random": partial(optuna, sampler="RandomSampler"),
}
ALL = {**BARRIERS, **OTHERS}
every_procedure = pytest.mark.parametrize("begin", ALL.values(), ids=ALL)
seeds = given(seed=st.integers(0, 2**32))


def examples(begin: Begin, most: int = 10) -> settings:
    quick = begin in (*BARRIERS.values(), asha, promoting_asha, stopping_asha)
    return settings(max_examples=most if quick else 2, deadline=None)


def loss_of(trial: Trial, failing: float) -> float | None:
    chance = random.Random(f"{trial.config}/{trial.epochs}")
    return None if chance.random() < failing else chance.random() / trial.epochs


def report_of(trial: Trial, failing: float = 0.1) -> Report:
    return Report(trial.number, trial.epochs, loss_of(trial, failing))


def story(
    procedure: Procedure, seed: int, between: Callable[[Procedure], Procedure] = lambda same: same
) -> Procedure:
    """Ask for a few trials, report one, and so on, until all is done."""
    chance = random.Random(seed)
    while not procedure.done:
        most = chance.randint(0, 4)
        assert len(procedure.ask(most)) <= most
        procedure = between(procedure)
        waiting = procedure.history.waiting
        if waiting:
            assert procedure.tell(report_of(chance.choice(waiting)))
        procedure = between(procedure)
    return procedure


def asked_by(procedure: Procedure) -> list[Trial]:
    return [event for event in procedure.history.events if isinstance(event, Trial)]


@every_procedure
def test_every_trial_is_requested_and_reported_once(begin: Begin) -> None:
    @examples(begin)
    @seeds
    def check(seed: int) -> None:
        procedure = story(begin(), seed)
        asked = asked_by(procedure)
        reports = [event for event in procedure.history.events if isinstance(event, Report)]
        assert procedure.ask() == procedure.history.waiting == ()
        assert sorted((t.number, t.epochs) for t in asked) == sorted((r.trial, r.epochs) for r in reports)
        for number, last in enumerate(procedure.history.trials):
            mine = [trial for trial in asked if trial.number == number]
            assert mine[-1] == last
            assert all(before.epochs < after.epochs for before, after in pairwise(mine))
            assert all(trial.config == last.config and trial.parent == last.parent for trial in mine)

    check()


@every_procedure
def test_a_failed_trial_is_never_requested_again(begin: Begin) -> None:
    @examples(begin)
    @seeds
    def check(seed: int) -> None:
        failed = set[int]()
        for event in story(begin(), seed).history.events:
            if isinstance(event, Trial):
                assert event.number not in failed
                assert event.parent is None or event.parent.trial not in failed
            elif event.loss is None:
                failed.add(event.trial)

    check()


@every_procedure
def test_a_restored_procedure_continues_as_if_uninterrupted(begin: Begin) -> None:
    steps = count()

    def interrupted(procedure: Procedure) -> Procedure:
        if next(steps) % 4:
            return procedure
        restored = begin(state=json.loads(json.dumps(procedure.state, allow_nan=False)))
        assert restored.history.waiting == procedure.history.waiting
        assert restored.history.best == procedure.history.best
        return restored

    @examples(begin, 5)
    @seeds
    def check(seed: int) -> None:
        assert story(begin(), seed, interrupted).state == story(begin(), seed).state

    check()


@every_procedure
def test_late_and_repeated_reports_change_nothing(begin: Begin) -> None:
    def told_again(procedure: Procedure) -> Procedure:
        for report in list(procedure.history.events):
            if isinstance(report, Report):
                for loss in (report.loss, None, -1.0, float("nan")):
                    assert not procedure.tell(Report(report.trial, report.epochs, loss))
        return procedure

    @examples(begin, 5)
    @seeds
    def check(seed: int) -> None:
        assert story(begin(), seed, told_again).state == story(begin(), seed).state

    check()


@pytest.mark.parametrize("begin", BARRIERS.values(), ids=BARRIERS)
def test_the_order_of_reports_does_not_matter_behind_a_barrier(begin: Begin) -> None:
    def asked(seed: int) -> list[Trial]:
        return sorted(asked_by(story(begin(), seed)), key=lambda trial: (trial.number, trial.epochs))

    @examples(begin)
    @given(first=st.integers(0, 99), second=st.integers(100, 199))
    def check(first: int, second: int) -> None:
        assert asked(first) == asked(second)

    check()


@every_procedure
def test_equal_seeds_give_equal_trials_and_others_do_not(begin: Begin) -> None:
    runs = [story(begin(seed=seed), 1).history.trials for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) is (begin is grid)


@every_procedure
def test_a_story_in_which_all_fail_ends(begin: Begin) -> None:
    procedure = begin()
    while not procedure.done:
        for trial in procedure.ask(3):
            assert procedure.tell(report_of(trial, failing=1.0))
    assert procedure.history.best is None


@every_procedure
def test_a_report_that_was_not_requested_is_refused(begin: Begin) -> None:
    procedure = begin()
    first = procedure.ask(1)[0]
    before = procedure.state
    for number, epochs in ((1, first.epochs), (-1, first.epochs), (0, first.epochs + 1), (0, 0)):
        with pytest.raises(BadInputError, match=f"trial {number} with {epochs} epochs"):
            procedure.tell(Report(number, epochs, 0.5))
    assert procedure.state == before


@every_procedure
def test_a_state_that_is_no_such_search_is_refused(begin: Begin) -> None:
    state = story(begin(), 1).state
    for part in ("method", "source"):
        with pytest.raises(BadInputError, match="another search"):
            begin(state={**state, part: {**state[part], "name": "other"}})
    for events in (None, [{"number": 1}], [{"number": 7, "config": {}, "epochs": 1}]):
        with pytest.raises(BadInputError, match="cannot be read"):
            begin(state={**state, "events": events})


@every_procedure
def test_the_best_is_the_least_loss(begin: Begin) -> None:
    procedure = story(begin(), 2)
    losses = [event.loss for event in procedure.history.events if isinstance(event, Report) and event.loss]
    assert procedure.history.best is not None
    assert procedure.history.best.loss == min(losses)
