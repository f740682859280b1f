"""Traces of visits: one JSON object a line, written by simulations and of runs, and repeated by a replay."""

from __future__ import annotations

import json

from hetctl.methods.hopper.schedule import Visit


def trace_line(visit: Visit, start_s: float, end_s: float, *, lost: bool) -> str:
    """Return the line of a visit, with its end.

    Parameters
    ----------
    start_s, end_s : float
        Seconds from the start of the trace.
    lost : bool
        True if its result was lost.
    """
    fields = {
        "config": visit.config,
        "worker": visit.worker,
        "start": start_s,
        "end": end_s,
        "partition": visit.partition,
        "epoch": visit.epoch,
        "lost": lost,
    }
    return json.dumps(fields) + "\n"


def visits_to_repeat(text: str) -> tuple[Visit, ...]:
    """Return the visits of a trace that were not lost, in the order of their starts: a plan for `Hopper`.

    Parameters
    ----------
    text : str
        Trace that was checked when it was given.
    """
    lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    done = sorted((line for line in lines if not line["lost"]), key=lambda line: (line["start"], line["end"]))
    return tuple(
        Visit(number, line["config"], line["epoch"], line["partition"], line["worker"])
        for number, line in enumerate(done)
    )
