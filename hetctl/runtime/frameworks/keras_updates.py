"""Updates of a Keras optimizer one weight after another, so that they share the memory of their terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class Turns:
    """Groups of operations of a graph, each of which runs after those of the group before."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []

    @contextmanager
    def next(self) -> Iterator[None]:
        """Add the operations of the next group to the present graph meanwhile."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._done = graph, []
        known = len(graph.get_operations())
        with tf.control_dependencies(self._done):
            yield
        # Reads and assignments of variables: every other operation of an update ends in one.
        self._done = [one for one in graph.get_operations()[known:] if one.op_def.is_stateful]


def update_in_turn(optimizer: Any) -> None:
    """Have an optimizer update one weight after another in compiled functions, with the same results.

    A graph runs what does not depend on one another in any order: the terms of the updates of all weights,
    of the size of these, would be in memory at once.
    """
    turns = Turns()
    clip, decay, step = optimizer._clip_gradients, optimizer._apply_weight_decay, optimizer.update_step

    def decay_in_turn(variables: Sequence[Any]) -> None:
        for variable in variables:
            with turns.next():
                decay([variable])

    def step_in_turn(gradient: Any, variable: Any, learning_rate: Any) -> None:
        with turns.next():
            step(*clip([gradient]), variable, learning_rate)

    # A stage has no clipping by the norm of all gradients: each weight's is clipped when its turn comes.
    optimizer._clip_gradients = list
    optimizer._apply_weight_decay = decay_in_turn
    optimizer.update_step = step_in_turn
