"""Totals of visits: they equal those of all visits, whenever a reader begins."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hopping_run import plan_event, trace_of, visit_events
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.events import DRIVER, Event
from hetctl.storage.visit_fold import TotalsFold, VisitFold, totals_of

MEMBERS = ("m0", "m1", "m2")
TRACE = trace_of(MEMBERS, partitions=3, epochs=3, lost=True)
RESULT = {"metrics": {}, "duration_s": 1.0, "gpus": 1, "finished_at": 1.0}


def file_of(member):
    """Return the events of a member: its visits, its epochs, and the undoing of a visit of the last one."""
    lines = visit_events(TRACE.records)[member]
    for epoch in (1, 2, 3):
        done = [i for i, line in enumerate(lines) if (line["kind"], line.get("epoch")) == ("visit", epoch)]
        last = done[-1]
        time = lines[last]["ended_at"]
        if epoch == 3 and member == "m1":
            numbers = [lines[last]["number"]]
            lines.insert(last + 1, {"kind": "visits_undone", "time": time, "numbers": numbers, "reason": "x"})
        elif epoch < 3:
            lines.insert(last + 1, {"kind": "epoch", "time": time, **RESULT, "epoch": epoch})
    return [Event(member, seq, line["kind"], line["time"], line) for seq, line in enumerate(lines)]


def events():
    plan = plan_event()
    return [Event(DRIVER, 0, "hop_plan", plan["time"], plan), *(e for m in MEMBERS for e in file_of(m))]


def fold_of(found):
    fold = TotalsFold()
    fold.add(found)
    return fold


def test_totals_equal_those_of_all_visits():
    visits = VisitFold()
    visits.add(events())
    fold = fold_of(events())
    wanted = totals_of(visits.visits)
    assert fold.is_exact
    for member, own in fold.totals.items():
        for worker, sums in own.workers.items():
            assert asdict(sums) == pytest.approx(asdict(wanted[member].workers[worker]))
        assert replace(own, workers={}) == replace(wanted[member], workers={})
        assert own.done == wanted[member].done
    assert fold.plans == visits.plans
    assert sum(own.undone for own in fold.totals.values()) == 1


@given(st.data())
def test_a_reader_may_begin_anywhere(data):
    """Members' files are read one after another, each from where it was left."""
    first, then = [], []
    for source in (DRIVER, *MEMBERS):
        own = [event for event in events() if event.source == source]
        cut = data.draw(st.integers(0, len(own)))
        first, then = first + own[:cut], then + own[cut:]
    fold = TotalsFold()
    fold.restore(json.loads(json.dumps(fold_of(first).rows())))
    fold.add(then)
    whole = fold_of(events())
    assert fold.totals == whole.totals
    assert fold.plans == whole.plans
    assert fold.is_exact


def test_visits_of_reported_epochs_are_only_counted():
    _, _, newest = fold_of(events()).rows()
    assert {visit[1] for member in MEMBERS for _, visit in newest[member][0]} == {3}


def test_totals_say_when_a_counted_visit_was_undone():
    number = file_of("m0")[0].data["number"]
    undone = Event("m0", 99, "visits_undone", 9e9, {"numbers": [number], "reason": "checkpoint lost"})
    fold = fold_of([*events(), undone])
    assert not fold.is_exact
    again = TotalsFold()
    again.restore(json.loads(json.dumps(fold.rows())))
    assert not again.is_exact
