"""Traces: what is written is what is repeated."""

from __future__ import annotations

from hopping_run import trace_of

from hetctl.methods.hopper.schedule import trace_line, visits_to_repeat
from hetctl.methods.hopper.state_machine import Hopper


def test_a_trace_has_the_visits_that_were_done_in_their_order():
    trace = trace_of(("m0", "m1"), lost=True)
    lines = [trace_line(r.visit, r.start_s, r.end_s, lost=r.lost) for r in trace.records]
    found = visits_to_repeat("".join(lines))
    assert sorted(v.unit for v in found) == sorted(v.unit for v in trace.log)
    assert [v.number for v in found] == list(range(len(trace.log)))
    assert Hopper(["p0", "p1"], plan=found).plan == found
