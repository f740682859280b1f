"""Managers of batch sizes by LB-BSP (Algorithms 1 and 2), their choice by name, and their states.

A state is plain values and arrays, from which another process continues exactly. It names the classes of its
parts, and only classes of a table are built from it: unlike a pickle, it cannot run a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance import curve_manager
from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.manager import (
    FULL_MEMORY,
    BatchSizeManager,
    Observation,
)
from hetctl.methods.balance.predictors import learner, network_training
from hetctl.methods.balance.predictors.learner import (
    PREDICTORS,
    Ema,
    Learner,
    Memoryless,
    ObservedRange,
    Predictor,
)
from hetctl.methods.balance.step_time import Lines, Values, whole_batches
from hetctl.model.plan import Allocation
from hetctl.model.training_settings import BalanceSettings


class CpuManager(BatchSizeManager):
    """Manager for workers without accelerators: Gamma_i(x) = x / v_i, with the predicted v_i.

    Parameters
    ----------
    predictor : Predictor
        Predictor for the same number of workers, F_i in the paper.
    """

    def __init__(self, batches: Sequence[int], predictor: Predictor, caps: Sequence[int | None] = ()) -> None:
        super().__init__(batches, caps)
        self._predictor = predictor

    @property
    def learner(self) -> Learner | None:
        """The predictor, if it has networks."""
        return self._predictor if isinstance(self._predictor, Learner) else None

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Return batches for the predicted speeds (Algorithm 1).

        Rounding makes the slowest worker as fast as possible. Beyond Algorithm 1, and as in the other
        managers, a worker without free memory gets no larger batch.
        """
        self._predictor.observe(
            np.array([seen.batch / seen.seconds for seen in observations]),
            np.array([seen.cpu for seen in observations]),
            np.array([seen.memory for seen in observations]),
        )
        speeds = self._predictor.predict()
        full = np.array([seen.memory > FULL_MEMORY for seen in observations])
        # At least the present batches, so that the total fits.
        limits = np.where(full, np.minimum(self._limits, self.batches), self._limits)
        self.batches = _in_proportion(speeds, sum(self.batches), limits)
        return self.batches


def first_batches(
    given: Allocation, samples: int, gpu_types: Mapping[str, str], rate_of: Callable[[str], float]
) -> tuple[int, ...]:
    """Return a batch for each GPU of an allocation in proportion to its rate (LB-BSP, Algorithm 1).

    Empty if the GPUs are of one type. During training, a manager adapts the batches.

    Parameters
    ----------
    samples : int
        Samples of the whole group's step, the sum of the batches.
    gpu_types : mapping of str to str
        GPU type of each node.
    rate_of : callable
        Function that returns the member's rate in samples/s on as many GPUs of the given type.
    """
    types = [gpu_types[part.node] for part in given.placement for _ in part.gpus]
    if len(set(types)) == 1:
        return ()
    rates = np.array([rate_of(gpu_type) for gpu_type in types])
    return _in_proportion(rates, samples, np.full_like(rates, np.inf))


def _in_proportion(speeds: Values, total: int, limits: Values) -> tuple[int, ...]:
    """Return integer batches with sum `total` that minimise the longest time x_i / v_i (lines 7 to 9)."""
    lines = Lines(np.zeros_like(speeds), 1 / speeds)
    # Plain rounding could give the slowest worker a sample that delays all.
    return tuple(whole_batches(lines, total, limits).tolist())


FAST_STEP, FAST_WINDOW = 5, 5
"""Step Delta in samples and window D in iterations during the approach to the balance."""
FINE_STEP, FINE_WINDOW = 1, 20
"""Step and window after a leader was slower than a straggler."""
PAPER_BATCH = 32
"""Batch of a worker in the paper's evaluation. Before the paper's two steps, larger batches use one in
proportion: with 512 samples, 5 at a time would take more than 30 iterations."""
CHANGED = 1.5
"""Growth of the straggler's time over the leader's, since steps are fine, that makes steps coarse again:
conditions have changed. The paper's GPUs keep their speed (section 3.3)."""


class GpuManager(BatchSizeManager):
    """Manager of Algorithm 2, for accelerators: the leader takes over samples from the straggler."""

    def __init__(self, batches: Sequence[int], caps: Sequence[int | None] = ()) -> None:
        super().__init__(batches, caps)
        coarse = FAST_STEP * (sum(batches) // (PAPER_BATCH * len(batches)))
        first = [(coarse, FAST_WINDOW)] if coarse > FAST_STEP else []
        self._levels = (*first, (FAST_STEP, FAST_WINDOW), (FINE_STEP, FINE_WINDOW))
        self._recent: list[NDArray[np.float64]] = []
        self._enter(0)

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Move one step of samples if the leader was faster throughout the window (Algorithm 2)."""
        seconds = np.array([seen.seconds for seen in observations])
        self._recent = [*self._recent, seconds][-FINE_WINDOW:]
        # Line 12 compares with all past iterations, not just with the window.
        self._ever_slower |= seconds[:, None] > seconds[None, :]
        if self._have_conditions_changed():
            self._enter(0)
        straggler = int(seconds.argmax())
        # Line 5. A GPU with less than 5 % of its memory free might run out of it.
        free = (worker for worker, seen in enumerate(observations) if seen.memory <= FULL_MEMORY)
        faster = [worker for worker in free if seconds[worker] < seconds[straggler]]
        # Once the step is known: the leader must have room for it.
        able = [worker for worker in faster if self.batches[worker] + self._step <= self._limits[worker]]
        leader = min(able, key=lambda worker: seconds[worker], default=straggler)
        if not faster:
            return self.batches  # as in a tie
        if self.batches[straggler] <= self._step:
            self._warn_or_refine(straggler)
        elif not able:
            self._enter_finer()  # others may hold a few samples more
        elif self._always_faster(leader, straggler):
            self._move(straggler, leader)
        elif self._ever_slower[leader, straggler]:
            self._enter_finer()
        return self.batches

    def _enter(self, level: int) -> None:
        """Use the step and window of a level; the last level stays until conditions change."""
        self._level = level
        self._step, self._window = self._levels[level]
        workers = len(self._limits)
        self._ever_slower = np.zeros((workers, workers), dtype=bool)
        self._least_gap = np.inf

    def _enter_finer(self) -> None:
        if self._step != FINE_STEP:
            self._enter(self._level + 1)

    def _have_conditions_changed(self) -> bool:
        """Return true if the straggler has fallen far behind for a window, after being near the balance."""
        window = self._recent[-FAST_WINDOW:]
        if self._step != FINE_STEP or len(window) < FAST_WINDOW:
            return False
        # The median, since another process may change the time of single iterations.
        seconds = np.median(window, axis=0)
        gap = float(seconds.max() / seconds.min())
        self._least_gap = min(self._least_gap, gap)
        return gap > CHANGED * self._least_gap

    def _warn_or_refine(self, straggler: int) -> None:
        """Move nothing, and warn that training is faster without the worker (lines 8 and 9).

        Steps for large batches, which are not the paper's, first become smaller.
        """
        if self._step > FAST_STEP:
            self._enter(self._level + 1)
        else:
            samples = self.batches[straggler]
            self._warn(straggler, f"is the slowest with {samples} samples and cannot give away {self._step}")

    def _always_faster(self, leader: int, straggler: int) -> bool:
        window = self._recent[-self._window :]
        return len(window) == self._window and all(past[leader] < past[straggler] for past in window)

    def _move(self, straggler: int, leader: int) -> None:
        batches = list(self.batches)
        batches[straggler] -= self._step
        batches[leader] += self._step
        self.batches = tuple(batches)


Caps = Sequence[int | None]
_MANAGERS: Mapping[str, Callable[[Sequence[int], Caps, str, int], BatchSizeManager]] = {
    "cpu": lambda batches, caps, predictor, seed: CpuManager(
        batches, PREDICTORS[predictor](len(batches), seed), caps
    ),
    "gpu": lambda batches, caps, *_: GpuManager(batches, caps),
    "curve": lambda batches, caps, *_: CurveManager(batches, caps),
}


def make_manager(
    settings: BalanceSettings, batches: Sequence[int], caps: Caps = (), seed: int = 0
) -> BatchSizeManager:
    """Return a new manager; its `dump_state` suffices to continue elsewhere.

    Parameters
    ----------
    batches : sequence of int
        Batches of the first iteration; their sum is kept.
    caps : sequence of int or None
        Largest batch of each worker, None for no cap; empty if no worker has one.
    seed : int
        Seed of the predictor.

    Raises
    ------
    BadInputError, InfeasibleError
        If batches and caps are inconsistent.
    """
    return _MANAGERS[settings.manager](batches, caps, settings.predictor, seed)


CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        CpuManager,
        GpuManager,
        curve_manager.CurveManager,
        curve_manager.StepTimeHistory,
        curve_manager.Noise,
        curve_manager.ChangeDetector,
        Memoryless,
        Ema,
        ObservedRange,
        learner.Learner,
        learner.Effort,
        network_training.SpeedHistory,
        network_training.Models,
        network_training.Training,
        network_training.FeedForward,
    )
}
"""Classes in the states of managers and of trainings of their networks."""


def dump_state(value: Any) -> Any:
    """Return a manager or a training as mappings, lists and tuples of arrays and plain values."""
    kind = type(value)
    if CLASSES.get(kind.__name__) is kind:
        return {
            "class": kind.__name__,
            "state": {name: dump_state(part) for name, part in vars(value).items()},
        }
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, np.ndarray):
        # A copy, since parts change in place while a checkpoint is being written.
        return value.copy()
    if isinstance(value, list):
        return [dump_state(part) for part in value]
    return tuple(map(dump_state, value)) if isinstance(value, tuple) else value


def load_state(state: Any) -> Any:
    """Return the manager or training of a state.

    Raises
    ------
    ValueError
        If the state names a class outside the table, or holds a wrong state of a generator.
    """
    match state:
        case {"class": name, "state": parts}:
            if name not in CLASSES:
                raise ValueError(f"no class {name!r} has a state")
            made: Any = object.__new__(CLASSES[name])
            made.__dict__.update({name: load_state(part) for name, part in parts.items()})
            return made
        case {"generator": numbers}:
            generator = np.random.default_rng()
            generator.bit_generator.state = numbers
            return generator
        case list():
            return [load_state(part) for part in state]
        case tuple():
            return tuple(map(load_state, state))
    return state


def same_structure(one: Any, other: Any) -> bool:
    """Return true if both have the same parts, with arrays of the same shapes; None equals anything."""
    if other is None:
        return True
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if type(other).__name__ not in CLASSES:
        return type(one) is type(other)
    parts = vars(other)
    return type(one) is type(other) and (
        vars(one).keys() == parts.keys()
        and all(same_structure(getattr(one, name), parts[name]) for name in parts)
    )
