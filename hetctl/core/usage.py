"""What a run has used so far, folded from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetctl.core.events import DRIVER, Event


@dataclass(frozen=True)
class Usage:
    """Rounds started, and the GPU-seconds that steps held; a running step counts until `now`."""

    rounds: int
    gpu_seconds: float


def usage_of(events: Iterable[Event], now: float) -> Usage:
    """Fold a run's events, in order of time."""
    rounds, seconds = 0, 0.0
    running: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.source != DRIVER:
            continue
        if event.kind == "round_started":
            rounds += 1
        elif event.kind == "step_started":
            running[str(event.data["member"])] = event.time, int(event.data["gpus"])
        elif event.kind == "step_ended" and event.data["member"] in running:
            began, gpus = running.pop(str(event.data["member"]))
            seconds += (event.time - began) * gpus
    return Usage(rounds, seconds + sum((now - began) * gpus for began, gpus in running.values()))
