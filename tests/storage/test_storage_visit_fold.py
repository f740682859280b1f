"""Visits from event files, in whatever order they are read, and the invariants of the paper."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import MISSING, fields, replace

import pytest
from hop_rules import broken_by_visits
from hopping_run import plan_event, trace_of, visit_events, write_events, write_run
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.event_records import FORMS, record_of
from hetctl.model.events import DRIVER, Event
from hetctl.storage.event_files import read_folder
from hetctl.storage.paths import RunFolder
from hetctl.storage.visit_fold import FoldLog, VisitFold

MEMBERS = ("m0", "m1", "m2")
TRACE = trace_of(MEMBERS, lost=True)


def events_of(trace=TRACE):
    return [
        Event(member, seq, data["kind"], data["time"], data)
        for member, events in visit_events(trace.records).items()
        for seq, data in enumerate(events)
    ]


def folded(events):
    fold = VisitFold()
    fold.add(events)
    return fold


def visits(**options):
    return folded(events_of(trace_of(MEMBERS, **options))).visits


def test_a_gpu_makes_one_visit_at_a_time_alone_or_in_a_group():
    first, *_ = visits()
    other = replace(first, member="m9", number=99)
    rules = {"a:0+1": ["exclusive access"], "a:1+2": [], "b:0+1": []}
    for worker, expected in rules.items():
        found = broken_by_visits([replace(first, worker="a:0"), replace(other, worker=worker)], 2, {})
        assert [rule.partition(":")[0] for rule in found] == expected


@given(st.randoms(use_true_random=False))
def test_the_order_of_reading_does_not_matter(rng: random.Random):
    events = events_of()
    rng.shuffle(events)
    fold = VisitFold()
    for at in range(0, len(events), 7):
        fold.add(events[at : at + 7] * rng.randint(1, 2))
    assert fold.visits == folded(events_of()).visits


def test_visits_are_in_the_order_of_their_starts():
    found = folded(events_of()).visits
    assert [visit.number for visit in found] == list(range(len(found)))
    assert Counter(visit.state for visit in found) == {"done": 3 * 2 * 4, "lost": 1}
    assert [visit.reason for visit in found if visit.state == "lost"] == ["killed"]
    assert {visit.hopper_epoch for visit in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_as_simulated_violates_nothing(lost):
    assert broken_by_visits(visits(lost=lost), 2, dict.fromkeys(MEMBERS, 2), slack_s=1e-6) == []


def test_each_invariant_is_seen_to_be_violated():
    good = visits()
    first, epochs = good[0], dict.fromkeys(MEMBERS, 2)
    later = next(visit for visit in good[1:] if visit.member == first.member)
    for edited, words in (
        (good[1:], f"completeness: {first.member} visits partition {first.partition} 0 times in training"),
        ((*good, replace(first, number=99, began_at=9e9, ended_at=9e9)), "visits partition"),
        ((replace(first, state="lost"), *good[1:]), "0 times in training of epoch 1"),
        (
            tuple(moved(v, later, began_at=first.began_at) for v in good),
            f"isolation: visit {later.number} of",
        ),
        (tuple(replace(v, worker="a:0") for v in good), "exclusive access: visit"),
        (tuple(moved(v, first, ended_at=first.began_at - 1) for v in good), "ends before it begins"),
        (tuple(moved(v, later, number=first.number) for v in good), f"visit {first.number} is 2 intervals"),
        (tuple(moved(v, first, evaluates=True) for v in good), "belongs to an earlier pass"),
    ):
        found = broken_by_visits(edited, 2, epochs, slack_s=1e-6)
        assert any(words in line for line in found), (words, found)


def moved(visit, wanted, **edits):
    return replace(visit, **edits) if visit == wanted else visit


def test_undone_visits_count_no_more():
    events = events_of()
    done = next(event for event in events if event.kind == "visit")
    member, numbers = done.source, [done.data["number"]]
    undone = Event(member, 99, "visits_undone", 9e9, {"numbers": numbers, "reason": "node lost"})
    found = folded([undone, *events]).visits
    assert [visit.number for visit in found if visit.state == "undone"] == numbers
    assert broken_by_visits(found, 2, dict.fromkeys(MEMBERS, 2), 1e-6)


def test_a_visit_of_an_unfinished_epoch_is_not_missing():
    found = [visit for visit in visits() if visit.epoch == 1 or visit.partition == 0]
    assert broken_by_visits(found, 2, dict.fromkeys(MEMBERS, 1), slack_s=1e-6) == []


def test_plans_are_in_the_order_of_their_times():
    data = [plan_event(), plan_event(reason="node lost", time=2e6)]
    events = [Event(DRIVER, i, "hop_plan", one["time"], one) for i, one in enumerate(data)]
    plans = folded(events[::-1]).plans
    assert [plan.reason for plan in plans] == ["start", "node lost"]
    assert plans[0].workers["b:1"] == ("p1",)


def test_the_log_reads_what_was_appended(tmp_path):
    folder = RunFolder(tmp_path)
    write_run(folder.events, TRACE.records)
    log = FoldLog(VisitFold(), folder, MEMBERS)
    count = len(log.refresh().visits)
    assert count == len(TRACE.records)
    assert len(read_folder(folder.events)) == count + 5
    added = {**visit_events(TRACE.records)["m0"][0], "number": 99}
    write_events(folder.events, "m0", [added])
    assert [visit.number for visit in log.refresh().visits][-2:] == [count - 1, 99]


@pytest.mark.parametrize("kind", ["visit", "visit_lost", "visits_undone", "hop_plan"])
def test_an_event_without_its_fields_is_corrupt(kind):
    records = visit_events(TRACE.records)
    good = {event["kind"]: event for events in records.values() for event in events}
    good["visits_undone"] = {"numbers": [1, 2], "reason": "node lost"}
    good["hop_plan"] = plan_event()
    data = {key: value for key, value in good[kind].items() if key not in ("kind", "time", "round")}
    assert isinstance(record_of(kind, data), FORMS[kind])
    needed = [field.name for field in fields(FORMS[kind]) if field.default is MISSING]
    assert len(needed) >= 2
    for key in needed:
        with pytest.raises(ValueError):  # noqa: PT011
            record_of(kind, {k: v for k, v in data.items() if k != key})
