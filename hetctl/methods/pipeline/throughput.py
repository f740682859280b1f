"""Period of virtual workers by their minibatches in flight, and the number they need (HetPipe, section 4).

A minibatch enters a pipeline when the one N_m before it has left. The period is found by simulation under
the paper's conditions 1 to 3, and is never below its limits: the slowest stage, waves, shared links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hetctl.methods.pipeline.pipeline_flow import FlowInput, Passes, held, run_waves
from hetctl.methods.pipeline.stage_costs import most_in_flight
from hetctl.methods.pipeline.transfers import Traffic, at_once_s, load_s
from hetctl.methods.pipeline.wsp import Bounds

Synced = tuple[Passes, Traffic]
"""Passes and transfers of a virtual worker."""

SAME = 1e-9
"""Relative tolerance within which times count as equal."""
WAVES, MINIBATCHES = 8, 96
"""Waves until the steady state, or fewer that contain this number of minibatches; twice as many more are
measured."""


def tasks(seconds: Sequence[tuple[float, float, float]]) -> Passes:
    """Return both tasks of each stage from its forward, backward and receive times.

    The gradients that a stage receives have the size of the activations of the next stage, and the first
    stage receives no activations; so the sum of both times is sufficient to separate them.
    """
    found = []
    activations_s = 0.0
    for forward_s, backward_s, receive_s in seconds:
        gradients_s = max(0.0, receive_s - activations_s)
        found.append((activations_s + forward_s, backward_s + gradients_s))
        activations_s = gradients_s
    return tuple(found)


def bottleneck_s(passes: Passes) -> float:
    """Return the least period, the seconds of the slowest stage."""
    return max(forward_s + backward_s for forward_s, backward_s in passes)


@dataclass(frozen=True)
class WaveSync:
    """Synchronisation of waves between virtual workers.

    Parameters
    ----------
    traffic : tuple of Traffic
        Transfers of each virtual worker.
    distance : int
        Clock distance D.
    """

    traffic: tuple[Traffic, ...]
    distance: int = 0

    @cached_property
    def seconds(self) -> float:
        """Time to send a wave if all virtual workers send at once."""
        return at_once_s([one.push for one in self.traffic])


def wave_time_s(passes: Passes, push_s: float, pull_s: float, distance: int) -> float:
    """Return the least time of a wave in seconds, independent of the number of its minibatches.

    The last minibatch of a wave starts when the wave D + 1 before it has been sent and fetched, and then
    passes all stages; waves are sent one after the other.
    """
    through_s = sum(map(sum, passes))
    return max(through_s, push_s, (push_s + pull_s + through_s) / (distance + 1))


def least_period_s(workers: Sequence[Synced], in_flight: int, distance: int = 0) -> float:
    """Return a lower bound of the period: the highest of those by stages, by waves and by shared links."""
    waves_s = (wave_time_s(passes, one.push_s, one.pull_s, distance) for passes, one in workers)
    return max(
        max(bottleneck_s(passes) for passes, _ in workers),
        max(waves_s) / in_flight,
        load_s([traffic for _, traffic in workers], in_flight, distance),
    )


def sufficient_depth(passes: Passes, sync: WaveSync) -> int:
    """Return a number of minibatches in flight with which neither stages nor waves wait for each other.

    Activations are taken to have the links for themselves.
    """
    stages = most_in_flight(len(passes))
    wave_s = wave_time_s(passes, sync.seconds, sync.seconds, sync.distance)
    return max(stages, math.ceil(wave_s / bottleneck_s(passes)) + 1)


def common_period_s(workers: Sequence[Synced], in_flight: int, distance: int) -> float:
    """Return the period of virtual workers that exchange waves and therefore wait for each other."""
    if not any(traffic.is_shared for _, traffic in workers):
        # Equal virtual workers run alike unless they compete for something.
        workers = tuple(dict.fromkeys(workers))
    return max(least_period_s(workers, in_flight, distance), _measured_s(tuple(workers), in_flight, distance))


@lru_cache(maxsize=10_000)
def _measured_s(workers: tuple[Synced, ...], in_flight: int, distance: int) -> float:
    first = max(1, min(WAVES, MINIBATCHES // in_flight))
    inputs = [FlowInput(passes, held(passes, in_flight), traffic) for passes, traffic in workers]
    flows = run_waves(inputs, Bounds(in_flight, distance), 3 * first)
    ends_s = [flow.completed_s[in_flight - 1 :: in_flight] for flow in flows]
    taken_s = max(ends[3 * first - 1] - ends[first - 1] for ends in ends_s)
    return taken_s / (2 * first * in_flight)
