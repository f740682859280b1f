"""Order of the passes of a stage (HetPipe, section 4, conditions 1 to 3), in training and in simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class StageQueue(Generic[T]):
    """Passes that are ready at a stage, in the order in which they became ready.

    Forward passes start in the order of the minibatches, and so do backward passes, as they become ready in
    that order; of both the one that was ready first starts. A forward pass waits for memory, and backward
    passes, which release it, may overtake.

    Parameters
    ----------
    capacity : int
        Minibatches that the stage can hold between their forward and backward passes.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._ready: deque[tuple[bool, T]] = deque()

    def add(self, item: T, *, backward: bool) -> None:
        """Add a pass that is ready now."""
        self._ready.append((backward, item))

    def take(self, may_start: Callable[[T], bool] = lambda _: True) -> tuple[bool, T] | None:
        """Return the pass to start now, and whether it is a backward pass; None if none may start.

        Parameters
        ----------
        may_start : callable
            Function that returns false for a forward pass that still waits for weights; it holds up those
            after it.
        """
        forward_waits = False
        for at, (backward, item) in enumerate(self._ready):
            if backward or not (forward_waits or (forward_waits := not (self._free and may_start(item)))):
                del self._ready[at]
                self._free -= not backward
                return backward, item
        return None

    def release(self) -> None:
        """Record that the stage holds one minibatch less."""
        self._free += 1
