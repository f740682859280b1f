"""Gantt chart of a run's workers, with the members that visit them."""

from __future__ import annotations

from collections.abc import Mapping

from hetctl.model.hops import HopSpan, HopStatus, slots_in
from hetctl.model.run_status import StepSpan
from hetctl.reports.gantt import HOPS, gantt_svg
from hetctl.reports.summary import Spans, one_round

MOST_DRAWN = 20_000
"""Largest number of visits in a chart; more would be neither readable nor quick to load."""


def hop_svg(hops: HopStatus, colours: Mapping[str, str]) -> str | None:
    """Draw the visits by worker over time; None if there are none, or too many for a chart."""
    if not 0 < len(hops.spans) <= MOST_DRAWN:
        return None
    end_s = max(span.end_s for span in hops.spans)
    steps = [_step(span, slot) for span in hops.spans for slot in slots_in(span.worker)]
    # A visit to a group is in the row of each of its GPUs.
    spans = Spans("slot", len(hops.workers), end_s, steps, one_round(end_s))
    return gantt_svg(spans, colours, HOPS)


def _step(span: HopSpan, slot: str) -> StepSpan:
    return StepSpan(
        member=span.member,
        round=span.epoch,
        node=slot,
        gpus=(0,),
        start_s=span.start_s,
        end_s=span.end_s,
        exit_code=0 if span.done else 1,
    )
