"""A member's data: the order of an epoch and this rank's share of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.core.errors import BadInputError
from hetctl.runtime.group import Group

Samples = tuple[Any, Any]


def split_data(data: Any) -> tuple[Samples, Samples]:
    """Check what ``input_fn`` returned: ``(x, y), (x_validation, y_validation)``.

    Raises
    ------
    BadInputError
        If it has another shape.
    """
    try:
        (x, y), (x_validation, y_validation) = data
        sizes = (len(x), len(y)), (len(x_validation), len(y_validation))
    except (TypeError, ValueError):
        raise BadInputError(
            f"input_fn returned {type(data).__name__}, not ((x, y), (x_validation, y_validation))",
            "return two pairs of arrays: training and validation",
        ) from None
    for name, (inputs, targets) in zip(("training", "validation"), sizes, strict=True):
        if inputs != targets or inputs == 0:
            raise BadInputError(f"input_fn returned {inputs} {name} inputs and {targets} targets")
    return (x, y), (x_validation, y_validation)


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order in which epoch `epoch` visits the samples, whatever came before it."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


class Batches:
    """What a ``train_fn`` iterates over: this rank's share of one epoch's batches.

    A batch of the whole group is ``size * batch_size`` consecutive samples of the epoch's order,
    shared out evenly. Iteration ends with the epoch, or sooner when `should_stop` says so on
    rank 0; `position` then tells how many samples of the epoch are done.

    Parameters
    ----------
    order : array of int, shape (samples,)
        From `epoch_order`.
    start : int
        Samples of the order that were done before.
    on_step : callable
        Called after each step with the samples that the whole group has done so far.

    A ``train_fn`` may set `loss` to that of its last batch, as its framework has it, for people to see.
    """

    def __init__(
        self,
        samples: Samples,
        order: npt.NDArray[np.int64],
        start: int,
        batch_size: int,
        group: Group,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None] = lambda _position: None,
    ) -> None:
        self._x, self._y = samples
        self._order = order
        self._step = batch_size * group.size
        self._group = group
        self._should_stop = should_stop
        self._on_step = on_step
        self.start = start
        self.position = start
        self.weight = 1.0
        self.loss: Any = None

    @property
    def complete(self) -> bool:
        """Whether the epoch is done."""
        return self.position == len(self._order)

    def __iter__(self) -> Iterator[Samples]:
        while not self.complete and not self._group.agree(self._should_stop()):
            batch = self._order[self.position : self.position + self._step]
            mine = np.array_split(batch, self._group.size)[self._group.rank]
            self.weight = len(mine) / len(batch)
            # A rank without samples still takes part in the averaging, with weight zero.
            chosen = mine if len(mine) else batch[:1]
            yield self._x[chosen], self._y[chosen]
            self.position += len(batch)
            self._on_step(self.position)
