"""One story over every procedure: workers that come and go, slow, failing and repeating themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.automl.halving import Asha, Hyperband
from hetctl.methods.automl.optuna_search import OptunaSource
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import GridSource, Method, OneShot, Procedure, RandomSource, TrialSource
from hetctl.methods.automl.trials import Categorical, NumberRange, Report
from hetctl.model.errors import BadInputError
from hetctl.model.searches import PROMOTION, STOPPING, Trial
from hetctl.model.serialization import encode, parse

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


def drawn(seed: int) -> RandomSource:
    return RandomSource(SPACE, seed)


def of_optuna(seed: int, sampler: str = "TPESampler") -> OptunaSource:
    pytest.importorskip("optuna")
    return OptunaSource(SPACE, sampler, seed)


def beginning(method: Callable[[int], Method], source: Callable[[int], TrialSource] = drawn) -> Begin:
    """Return a function that begins a procedure with a seed, or goes on after events."""
    return lambda seed=0, events=(): Procedure(method(seed), source(seed), events)


BARRIERS: dict[str, Begin] = {
    "grid": beginning(lambda _: OneShot(12, 5), lambda _: GridSource(GRID)),
    "random": beginning(lambda _: OneShot(10, 3)),
    "hyperband": beginning(lambda _: Hyperband(9)),
    "pbt": beginning(lambda seed: Pbt(12, 4, 5, MUTATIONS, seed), lambda _: GridSource(GRID)),
}
"""Procedures whose requests do not depend on the order of reports."""
OTHERS: dict[str, Begin] = {
    "asha": beginning(lambda _: Asha(20, 9, eta=3)),
    "asha-promotion": beginning(lambda _: Asha(20, 9, eta=3, variant=PROMOTION)),
    "asha-stopping": beginning(lambda _: Asha(20, 9, eta=3, variant=STOPPING)),
    "optuna": beginning(lambda _: OneShot(14, 2), of_optuna),
    "optuna-asha": beginning(lambda _: Asha(14, 9, eta=3), of_optuna),
    "optuna-random": beginning(lambda _: OneShot(14, 2), partial(of_optuna, sampler="RandomSampler")),
}
ALL = {**BARRIERS, **OTHERS}
every_procedure = pytest.mark.parametrize("begin", ALL.values(), ids=ALL)
seeds = given(seed=st.integers(0, 2**32))


def examples(begin: Begin, most: int = 10) -> settings:
    is_slow = any(begin is each for name, each in ALL.items() if name.startswith("optuna"))
    return settings(max_examples=2 if is_slow else most, deadline=None)


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
        written = [(type(one), json.dumps(encode(one), allow_nan=False)) for one in procedure.history.events]
        restored = begin(events=[parse(kind, text) for kind, text in written])
        assert restored.history.waiting == procedure.history.waiting
        return restored

    @examples(begin, 5)
    @seeds
    def check(seed: int) -> None:
        assert story(begin(), seed, interrupted).history.events == story(begin(), seed).history.events

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
        assert story(begin(), seed, told_again).history.events == story(begin(), seed).history.events

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
    assert (runs[0] == runs[2]) is (begin is ALL["grid"])


@every_procedure
def test_a_story_in_which_all_fail_ends(begin: Begin) -> None:
    procedure = begin()
    while not procedure.done:
        for trial in procedure.ask(3):
            assert procedure.tell(report_of(trial, failing=1.0))


@every_procedure
def test_a_report_that_was_not_requested_is_refused(begin: Begin) -> None:
    procedure = begin()
    first = procedure.ask(1)[0]
    before = list(procedure.history.events)
    for number, epochs in ((1, first.epochs), (-1, first.epochs), (0, first.epochs + 1), (0, 0)):
        with pytest.raises(BadInputError, match=f"trial {number} with {epochs} epochs"):
            procedure.tell(Report(number, epochs, 0.5))
    assert procedure.history.events == before
