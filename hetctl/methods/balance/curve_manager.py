"""Batches by time curves that are learnt on the way: to the balance in a few steps, and then still."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetctl.methods.balance.batch_partition import Numbers, whole_batches
from hetctl.methods.balance.drift import ChangeDetector, Noise
from hetctl.methods.balance.manager import FULL_MEMORY, Observation, StragglerWarning, checked_limits
from hetctl.methods.balance.step_time_fit import Fit, StepTimeHistory, fit_lines

LAUNCH_SHARE = 0.3
"""Of the first iteration: what launching is taken for until the curve tells."""
LEAST_GAIN = 0.01
"""Share of an iteration that a change of batches has to save."""
SURE = 0.5
"""Standard errors of the slowest worker's time that it has to save as well."""
VENTURES = (1.15, 2.0, math.inf)
"""No batch grows by more than would take, if only in proportion, so many times what the slowest takes now;
by more only where less does not save enough."""
NEGLIGIBLE = 1e-9
"""Share of memory that is none; part of a sample that rounding may have taken away."""
PLAUSIBLE = 3.0
"""Standard deviations to which a measurement that is off by more is brought back."""


class CurveManager:
    """Learns each worker's Gamma_i (launch overhead, saturation, memory) and goes to the balanced point.

    Each iteration adds a point to each worker's curve. The split that balances the lines near the present
    batches is looked at again with lines near itself, and taken if it saves more than `LEAST_GAIN`,
    and more than measuring is unsure of. A worker that has strayed from its curve, by more than its
    noise explains, is learnt anew.

    Parameters
    ----------
    batches : sequence of int
        Of the first iteration; their sum is kept.
    caps : sequence of int or None
        The largest batch of each worker; empty: none for anybody.

    Raises
    ------
    BadInputError, InfeasibleError
        If batches and caps do not go together.
    """

    def __init__(self, batches: Sequence[int], caps: Sequence[int | None] = ()) -> None:
        self._limits = checked_limits(batches, caps)
        self._history = StepTimeHistory(len(batches))
        self._noise = Noise(len(batches))
        self._changes = ChangeDetector(len(batches))
        self._launch: Numbers = np.zeros(len(batches))
        self.batches = tuple(batches)
        self.warnings: tuple[StragglerWarning, ...] = ()

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Learn from the last iteration; change the batches if that is worth it."""
        batches = np.array([seen.batch for seen in observations], dtype=float)
        seconds = np.array([seen.seconds for seen in observations])
        self._learn(batches, seconds)
        memory = np.array([seen.memory for seen in observations])
        self._decide(self._room(batches, memory))
        return self.batches

    def _learn(self, batches: Numbers, seconds: Numbers) -> None:
        if not self._history.counts.any():
            self._launch = LAUNCH_SHARE * seconds
            self._history.add(batches, seconds, seconds)
            return
        expected = self._fit(batches)
        off = np.log(seconds / expected.seconds)
        deviation = np.hypot(self._noise.deviation, expected.error)
        self._noise.observe(off / deviation)
        new = self._changes.observe(off / deviation)
        limit = PLAUSIBLE * deviation
        self._history.add(batches, seconds, expected.seconds * np.exp(np.clip(off, -limit, limit)))
        self._history.restart(new)
        self._launch = np.where(new > 0, self._launch * seconds / expected.seconds, self._launch)

    def _room(self, batches: Numbers, memory: Numbers) -> Numbers:
        """Return how far batches may grow: memory is taken to grow in proportion, as it does at most."""
        filled = np.floor(batches * FULL_MEMORY / np.maximum(memory, NEGLIGIBLE) + NEGLIGIBLE)
        return np.minimum(self._limits, np.maximum(filled, self.batches))

    def _fit(self, near: Numbers) -> Fit:
        return fit_lines(self._history, near, self._noise.deviation, self._launch)

    def _decide(self, room: Numbers) -> None:
        now = np.array(self.batches, dtype=float)
        present = self._fit(now)
        self._launch = present.lines.launch
        slowest = int(present.seconds.argmax())
        enough = present.seconds[slowest] * (1 - max(LEAST_GAIN, SURE * float(present.error[slowest])))
        # Half of it will do at the first look: lines near the present show less of a longer way's savings.
        if present.lines.seconds(self._split(present, room)).max() > (enough + present.seconds[slowest]) / 2:
            self._warn(present)
            return
        in_proportion = now * present.seconds[slowest] / present.seconds
        for venture in VENTURES:
            limits = np.minimum(room, np.maximum(now + 1, np.floor(venture * in_proportion)))
            there = self._fit(self._split(present, limits))
            split = self._split(there, limits)
            if there.lines.seconds(split).max() <= enough:
                self.batches = tuple(split.astype(int).tolist())
                return

    def _split(self, fit: Fit, limits: Numbers) -> Numbers:
        return whole_batches(fit.lines, sum(self.batches), limits).astype(float)

    def _warn(self, present: Fit) -> None:
        """Say so if a worker holds up all others with a single sample."""
        slowest = int(present.seconds.argmax())
        others = np.delete(present.seconds, slowest)
        late = others.size and others.max() * (1 + LEAST_GAIN) < present.seconds[slowest]
        warning = StragglerWarning(
            slowest, "is the slowest with a single sample: training is faster without it"
        )
        if self.batches[slowest] == 1 and late and warning not in self.warnings:
            self.warnings += (warning,)
