"""The hopper under every procedure trains exactly the requested trials."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.automl.asha import Asha
from hetctl.methods.automl.hyperband import Hyperband
from hetctl.methods.automl.one_shot import OneShot
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.plain_sources import GridSource, RandomSource
from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.space import Categorical, NumberRange
from hetctl.methods.automl.trial_history import Report, Trial
from hetctl.methods.hopper.simulate import HopTrace, Outage
from hetctl.methods.search_by_hops import simulate_search
from hetctl.model.errors import InfeasibleError

HOMES = {"w0": ("p0", "p1"), "w1": ("p1", "p2"), "w2": ("p2",)}
GRID = {"lr": Categorical((1e-2, 1e-4)), "layers": Categorical((2, 4, 8))}
SPACE = {"lr": NumberRange(1e-5, 1.0, log=True), "layers": NumberRange(1, 8, whole=True)}
MUTATIONS = {"lr": Mutation((0.8, 1.2), 1e-6, 1.0, multiply=True)}

PROCEDURES: dict[str, Callable[[Any], Procedure]] = {
    "grid": lambda state: Procedure(OneShot(6, 2), GridSource(GRID), state),
    "random": lambda state: Procedure(OneShot(5, 3), RandomSource(SPACE), state),
    "hyperband": lambda state: Procedure(Hyperband(9), RandomSource(SPACE), state),
    "asha": lambda state: Procedure(Asha(12, 9, eta=3), RandomSource(SPACE), state),
    "pbt": lambda state: Procedure(Pbt(6, 3, 2, MUTATIONS), GridSource(GRID), state),
}
every_procedure = pytest.mark.parametrize("begin", PROCEDURES.values(), ids=PROCEDURES)


class Interrupted(Exception):  # noqa: N818
    pass


def seconds(trial: Trial, partition: str, worker: str) -> float:
    return trial.config["layers"] + len(partition) + int(worker[1:])


def loss_of(trial: Trial) -> float | None:
    chance = random.Random(f"{trial.config}/{trial.epochs}")
    return None if chance.random() < 0.1 else chance.random() / trial.epochs


def search(procedure: Procedure, **wishes: Any) -> HopTrace:
    return simulate_search(procedure, HOMES, **{"loss": loss_of, "seconds": seconds} | wishes)


def first_epoch(trial: Trial) -> int:
    return trial.parent.epochs if trial.parent else 0


def told_epochs(procedure: Procedure) -> dict[int, int]:
    return {event.trial: event.epochs for event in procedure.history.events if isinstance(event, Report)}


@every_procedure
def test_a_search_trains_each_request_and_reports_it_once(begin):
    @settings(max_examples=10, deadline=None)
    @given(
        seed=st.integers(0, 99),
        most=st.none() | st.integers(1, 8),
        away=st.lists(
            st.tuples(st.sampled_from(sorted(HOMES)), st.floats(0, 99), st.floats(1, 50)), max_size=3
        ),
    )
    def check(seed: int, most: int | None, away: list[tuple[str, float, float]]) -> None:
        procedure, judged = begin(None), []

        def judge(trial: Trial) -> float | None:
            assert most is None or len(procedure.history.waiting) <= most
            judged.append((trial.number, trial.epochs))
            return loss_of(trial)

        outages = [Outage(worker, start, start + length) for worker, start, length in away]
        course = search(procedure, loss=judge, most=most, seed=seed, outages=outages)
        assert procedure.done
        asked = [(e.number, e.epochs) for e in procedure.history.events if isinstance(e, Trial)]
        assert sorted(judged) == sorted(asked)
        assert len(set(asked)) == len(asked)
        epochs = told_epochs(procedure)
        assert Counter(visit.unit for visit in course.log) == {
            (str(trial.number), epoch, partition): 1
            for trial in procedure.history.trials
            for epoch in range(first_epoch(trial), epochs[trial.number])
            for partition in ("p0", "p1", "p2")
        }
        check_records(course)

    check()


def check_records(course: HopTrace) -> None:
    """Hold isolation and exclusive access; a configuration's epochs follow one another."""
    by_name: dict[tuple[str, str], list[Any]] = {}
    for record in course.records:
        assert record.visit.partition in HOMES[record.visit.worker]
        for name in (("config", record.visit.config), ("worker", record.visit.worker)):
            by_name.setdefault(name, []).append(record)
    for (kind, _), records in by_name.items():
        for earlier, later in pairwise(records):
            assert earlier.end_s <= later.start_s
            assert kind == "worker" or earlier.visit.epoch <= later.visit.epoch


@every_procedure
def test_the_same_search_has_the_same_course(begin):
    first, second = begin(None), begin(None)
    assert search(first, seed=3, most=4) == search(second, seed=3, most=4)
    assert first.state == second.state


@every_procedure
def test_an_interrupted_search_continues(begin):
    procedure, left = begin(None), iter(range(4))

    def interrupted(trial: Trial) -> float | None:
        if next(left, None) is None:
            raise Interrupted
        return loss_of(trial)

    with pytest.raises(Interrupted):
        search(procedure, loss=interrupted)
    before = told_epochs(procedure)
    restored = begin(json.loads(json.dumps(procedure.state)))
    course = search(restored)
    assert restored.done
    trained = {(int(visit.config), visit.epoch) for visit in course.log}
    assert trained == {
        (trial.number, epoch)
        for trial in restored.history.trials
        for epoch in range(before.get(trial.number, first_epoch(trial)), told_epochs(restored)[trial.number])
    }


def test_mutants_join_after_the_reports_of_their_parents():
    procedure = PROCEDURES["pbt"](None)
    course = search(procedure)
    mutants = [trial for trial in procedure.history.trials if trial.parent]
    assert mutants
    for mutant in mutants:
        begins_s = min(s.start_s for s in course.records if s.visit.config == str(mutant.number))
        parent, epochs = str(mutant.parent.trial), mutant.parent.epochs
        assert begins_s >= max(
            s.end_s for s in course.records if s.visit.config == parent and s.visit.epoch < epochs
        )


def test_trials_that_were_stopped_have_no_more_epochs():
    """Brackets of 3 trials, of which one continues from 1 epoch to 3, and of 2 with 3 epochs."""
    procedure = Procedure(Hyperband(3), RandomSource(SPACE))
    course = search(procedure, loss=lambda trial: trial.number)
    units = Counter(int(visit.config) for visit in course.log)
    assert units == {0: 9, 1: 3, 2: 3, 3: 9, 4: 9}


def test_a_partition_that_is_lost_for_good_ends_the_search():
    with pytest.raises(InfeasibleError, match="no worker is left with p0"):
        search(PROCEDURES["grid"](None), outages=[Outage("w0", 5)])
