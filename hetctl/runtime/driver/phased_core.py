"""The scheduling of a job in phases: pipelines, then hops, then data-parallel training of what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hetctl.model.site import Node
from hetctl.scheduling import events
from hetctl.scheduling.commands import EndJob
from hetctl.scheduling.core import FINISHED


class PhaseCore(Protocol):
    """Scheduling of one phase of a job, such as `hetctl.scheduling.core.Core`."""

    @property
    def running(self) -> Mapping[str, Any]:
        """Tasks by name; each has the index of its round."""

    @property
    def ending(self) -> str | None:
        """Reason for which the job ends; then no task is started any more."""

    @property
    def handles(self) -> frozenset[type]:
        """Kinds of events that it accepts."""

    def handle(self, event: Any) -> list[Any]:
        """Record an event and return the commands that follow at once."""

    def schedule(self, now_s: float) -> list[Any]:
        """Return the commands that follow from all events until now."""


class PhasedCore:
    """State machines of consecutive phases, of which each begins when the one before has finished.

    Parameters
    ----------
    makers : sequence of callable
        Functions that return the core of each phase; the first one is called at once.
    """

    def __init__(self, makers: Sequence[Callable[[], PhaseCore]]) -> None:
        self._core = makers[0]()
        self._later = list(makers[1:])
        self._nodes: dict[str, Node] = {}
        self._opened: events.JobOpened | None = None
        self._next_round = 0

    @property
    def running(self) -> Mapping[str, Any]:
        """Tasks by name."""
        return self._core.running

    @property
    def ending(self) -> str | None:
        """Reason for which the job ends; then no task is started any more."""
        return self._core.ending

    def handle(self, event: Any) -> list[Any]:
        """Record an event and return the commands that follow at once."""
        if isinstance(event, events.JobOpened):
            self._opened, self._nodes = event, {node.name: node for node in event.nodes}
            self._next_round = event.first_round
        elif isinstance(event, events.NodeJoined):
            self._nodes[event.node.name] = event.node
        elif isinstance(event, events.NodeLost):
            self._nodes.pop(event.node, None)
        # Some reports of a phase's ranks arrive after its end, such as checkpoints of the last visits.
        return self._noted(self._core.handle(event)) if type(event) in self._core.handles else []

    def schedule(self, now_s: float) -> list[Any]:
        """Return the commands that follow from all events until now."""
        commands = self._noted(self._core.schedule(now_s))
        ends = [command for command in commands if isinstance(command, EndJob)]
        if not ends or ends[0].reason != FINISHED or not self._later:
            return commands
        return [*(command for command in commands if command not in ends), *self._begin(now_s)]

    def _noted(self, commands: Sequence[Any]) -> list[Any]:
        """Return commands; remember the newest round that they name."""
        rounds = [command.round for command in commands if hasattr(command, "round")]
        self._next_round = max([self._next_round, *(number + 1 for number in rounds)])
        return list(commands)

    def _begin(self, now_s: float) -> list[Any]:
        """Begin the next phase."""
        assert self._opened is not None
        self._core = self._later.pop(0)()
        opened = events.JobOpened(
            now_s,
            tuple(self._nodes.values()),
            self._opened.deadline_s,
            self._next_round,
            self._opened.planner_state,
        )
        return self._noted(self._core.handle(opened))
