"""State of managers as plain values and arrays, from which another process continues exactly.

A state names the classes of its parts, and only those of a table are made of it: unlike a pickle, it cannot
run a program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetctl.methods.balance import curve_manager
from hetctl.methods.balance.cpu_manager import CpuManager
from hetctl.methods.balance.gpu_manager import GpuManager
from hetctl.methods.balance.predictors import averages, base, learner, network_training
from hetctl.methods.balance.predictors.narx import FeedForward

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        CpuManager,
        GpuManager,
        curve_manager.CurveManager,
        curve_manager.StepTimeHistory,
        curve_manager.Noise,
        curve_manager.ChangeDetector,
        averages.Memoryless,
        averages.Ema,
        base.ObservedRange,
        learner.Learner,
        learner.Effort,
        network_training.SpeedHistory,
        network_training.Models,
        network_training.Training,
        FeedForward,
    )
}
"""Classes of which managers, and trainings of their networks, consist."""


def state_of(value: Any) -> Any:
    """Return a manager or a training as mappings, lists and tuples of arrays and plain values."""
    kind = type(value)
    if CLASSES.get(kind.__name__) is kind:
        return {"class": kind.__name__, "state": {name: state_of(part) for name, part in vars(value).items()}}
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, np.ndarray):
        # Parts are changed in place, also while a checkpoint is being written.
        return value.copy()
    if isinstance(value, list):
        return [state_of(part) for part in value]
    return tuple(map(state_of, value)) if isinstance(value, tuple) else value


def made_of(state: Any) -> Any:
    """Return what a state is of.

    Raises
    ------
    ValueError
        If it names a class that is not in the table, or holds no state of a generator.
    """
    match state:
        case {"class": name, "state": parts}:
            if name not in CLASSES:
                raise ValueError(f"no class {name!r} has a state")
            made: Any = object.__new__(CLASSES[name])
            made.__dict__.update({name: made_of(part) for name, part in parts.items()})
            return made
        case {"generator": numbers}:
            generator = np.random.default_rng()
            generator.bit_generator.state = numbers
            return generator
        case list():
            return [made_of(part) for part in state]
        case tuple():
            return tuple(map(made_of, state))
    return state


def is_alike(one: Any, other: Any) -> bool:
    """Return true if one has the parts of the other, with arrays of the same shapes; None is like any."""
    if other is None:
        return True
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if type(other).__name__ not in CLASSES:
        return type(one) is type(other)
    parts = vars(other)
    return type(one) is type(other) and (
        vars(one).keys() == parts.keys() and all(is_alike(getattr(one, name), parts[name]) for name in parts)
    )
