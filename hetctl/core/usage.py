"""What a run has used so far, folded from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetctl.core.events import DRIVER, Event


@dataclass(frozen=True)
class Usage:
    """Rounds started, and the GPU-seconds that steps held; a running step counts until `now`."""

    rounds: int
    gpu_seconds: float


def usage_of(events: Iterable[Event], now: float) -> Usage:
    """Fold a run's events, in order of time.

    Steps whose end nobody has reported, since their driver was killed, count until the last event of
    their job.
    """
    rounds, seconds, last = 0, 0.0, 0.0
    running: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.kind == "job_started":
            seconds += _held_s(running, last)
            running.clear()
        last = event.time
        if event.source != DRIVER:
            continue
        if event.kind == "round_started":
            rounds += 1
        elif event.kind == "step_started":
            running[str(event.data["member"])] = event.time, int(event.data["gpus"])
        elif event.kind == "step_ended" and event.data["member"] in running:
            began, gpus = running.pop(str(event.data["member"]))
            seconds += (event.time - began) * gpus
    return Usage(rounds, seconds + _held_s(running, now))


def _held_s(running: Mapping[str, tuple[float, int]], now: float) -> float:
    return sum((now - began) * gpus for began, gpus in running.values())
