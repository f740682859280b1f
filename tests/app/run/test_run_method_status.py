"""Status of hops from events: where members are, and how busy workers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopping_run import BEGAN_AT, plan_event, trace_of, visit_events
from pipelined_run import ALONE, LAYOUT, STAGES, stages, task_started

from hetctl.app.hopper import lines_of
from hetctl.app.run.method_status import hop_spans, hop_status, pipeline_statuses
from hetctl.methods.hopper.schedule import visits_to_repeat
from hetctl.model.events import DRIVER, Event
from hetctl.model.hops import DONE
from hetctl.model.pipelines import pipeline_use
from hetctl.model.training_progress import EpochResult
from hetctl.storage.visit_fold import StageFold, VisitFold, totals_of

MEMBERS = ("m0", "m1", "m2")
TRACE = trace_of(MEMBERS, lost=True)


def fold():
    found = VisitFold()
    for member, events in visit_events(TRACE.records).items():
        found.add(Event(member, seq, data["kind"], data["time"], data) for seq, data in enumerate(events))
    plan = plan_event()
    found.add([Event(DRIVER, 0, "hop_plan", plan["time"], plan)])
    return found


def status_of(visits, **options):
    return hop_status(totals_of(visits), fold().plans, 2, BEGAN_AT, members=MEMBERS, **options)


def test_a_member_is_in_the_pass_of_its_newest_visit():
    own = [visit for visit in fold().visits if visit.member == "m1" and visit.state == "done"]
    seen = []
    for count in range(len(own) + 1):
        member = status_of(own[:count]).members[1]
        seen.append((member.epoch, member.evaluating, member.visited, member.visits))
    first = [(1, False, 0, 0), (1, False, 1, 1), (1, True, 0, 2), (1, True, 1, 3)]
    second = [(2, False, 0, 4), (2, False, 1, 5), (2, True, 0, 6), (2, True, 1, 7)]
    assert seen == [*first, *second, (3, False, 0, 8)]
    ended = status_of(own, ended=["m1"]).members[1]
    assert (ended.epoch, ended.evaluating, ended.visited) == (2, True, 2)


def test_a_visit_to_a_group_counts_for_each_of_its_gpus():
    together = [replace(visit, worker="a:0+1") for visit in fold().visits if visit.worker == "a:0"]
    used = {worker.worker: worker for worker in status_of(together).workers}
    assert used.keys() == {"a:0", "a:1", "b:0", "b:1"}
    assert replace(used["a:0"], worker="a:1") == used["a:1"]
    assert used["a:0"].visits > used["b:0"].visits == 0
    assert status_of(together).members[0].worker == "a:0+1"


def test_a_member_without_visits_is_at_its_beginning():
    member = status_of(()).members[0]
    assert (member.epoch, member.visited, member.worker, member.visits) == (1, 0, None, 0)


def test_a_member_that_has_ended_says_so():
    status = status_of(fold().visits, ended={"m1"})
    assert [member.ended for member in status.members] == [False, True, False]


def test_the_worker_is_that_of_the_present_or_the_last_visit():
    visits = fold().visits
    last = [visit.worker for visit in visits if visit.member == "m0"][-1]
    assert status_of(visits).members[0].worker == last
    assert status_of(visits, at={"m0": "b:1"}).members[0].worker == "b:1"


def test_visits_count_by_their_states():
    hops = status_of(fold().visits)
    assert (hops.visits, hops.lost, hops.undone) == (24, 1, 0)
    assert sum(member.repeated for member in hops.members) == 1
    assert sum(worker.visits for worker in hops.workers) == 24


def in_round(visit, index):
    """Return the visit in a job that begins a million seconds after the one before."""
    later_s = 1e6 * index
    return replace(visit, round=index, began_at=visit.began_at + later_s, ended_at=visit.ended_at + later_s)


def test_shares_of_workers_are_those_of_the_time_of_visits():
    visits = [replace(visit, round=visit.epoch) for visit in fold().visits]
    visits = [
        replace(v, began_at=v.began_at + 1e6, ended_at=v.ended_at + 1e6) if v.epoch == 2 else v
        for v in visits
    ]
    hops = status_of(visits)
    assert [worker.worker for worker in hops.workers] == ["a:0", "a:1", "b:0", "b:1"]
    done_s = sum(v.ended_at - v.began_at for v in visits if v.state == "done")
    whole_s = sum(
        max(v.ended_at for v in visits if v.round == r) - min(v.began_at for v in visits if v.round == r)
        for r in (1, 2)
    )
    assert sum(w.gpu_busy_fraction + w.waiting_fraction for w in hops.workers) == pytest.approx(
        done_s / whole_s
    )
    waited = {w.worker for w in hops.workers if w.waiting_fraction}
    assert waited == {w.worker for w in hops.workers if w.hop_s is not None}
    assert {w.hop_s for w in hops.workers} <= {0.25, None}


def test_a_plan_is_compared_with_the_visits_of_its_job():
    (plan,) = status_of(fold().visits).plans
    assert (plan.predicted_s, plan.lower_bound_s, plan.workers, plan.start_s) == (50.0, 40.0, 4, 0.0)
    assert plan.measured_s == pytest.approx(TRACE.makespan_s)
    assert status_of(()).plans[0].measured_s is None


def test_spans_count_from_the_start_of_the_run():
    spans = hop_spans(fold().visits, BEGAN_AT)
    assert [span.began_at for span in spans] == pytest.approx([r.start_s for r in TRACE.records])
    assert [span.state == DONE for span in spans] == [not record.lost for record in TRACE.records]


def test_the_trace_has_the_visits_in_the_order_of_their_numbers():
    """Although the clock of one node is a minute behind."""
    visits = [
        replace(v, began_at=v.began_at - 60, ended_at=v.ended_at - 60) if v.worker[0] == "b" else v
        for v in fold().visits
    ]
    repeated = visits_to_repeat("".join(lines_of(visits)))
    done = [visit for visit in visits if visit.state == "done"]
    assert [(v.config, v.epoch, v.partition, v.worker) for v in repeated] == [
        (v.member, v.hopper_epoch, f"p{v.partition}", v.worker) for v in done
    ]


STEP = Event(DRIVER, 0, "task_started", 1.0, task_started())
HISTORY = {"a": (EpochResult(1, {}, 10.0, 4, 12.0, 90.0), EpochResult(2, {}, 10.0, 4, 22.0, 80.0)), "b": ()}


def statuses(*events):
    fold = StageFold()
    fold.add(events)
    return pipeline_statuses(fold, HISTORY)


def test_the_rate_is_that_of_the_reported_epoch():
    (seen,) = statuses(STEP, Event("a", 0, "stages", 2.0, stages(1)))
    assert (seen.member, seen.layout, seen.predicted_rate) == ("a", LAYOUT, 100.0)
    assert (seen.last.epoch, seen.last.rate, seen.last.use) == (1, 90.0, pipeline_use(STAGES))


def test_an_epoch_that_has_not_ended_has_no_rate():
    (seen,) = statuses(STEP, Event("a", 0, "stages", 2.0, stages(3)))
    assert (seen.last.epoch, seen.last.rate) == (3, None)


def test_before_its_first_epoch_a_pipeline_has_a_layout():
    assert [(seen.layout, seen.last) for seen in statuses(STEP)] == [(LAYOUT, None)]


def test_figures_of_an_earlier_layout_are_left_out():
    earlier = Event("a", 0, "stages", 2.0, stages(1))
    (seen,) = statuses(STEP, earlier, Event(DRIVER, 1, "task_started", 3.0, task_started(ALONE)))
    assert (seen.layout, seen.last) == (ALONE, None)


def test_members_of_other_modes_have_no_pipeline():
    assert statuses(Event(DRIVER, 0, "task_started", 1.0, task_started(None))) == ()
