"""The scheduling of a job whose members hop first, and train data-parallel when few are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetctl.methods.hopper.hop_core import HopCore, RunningVisit
from hetctl.model.site import Node
from hetctl.scheduling import events
from hetctl.scheduling.commands import EndJob, EndRound
from hetctl.scheduling.core import FINISHED, Core
from hetctl.scheduling.rounds import Running


class PhasedCore:
    """State machines of two consecutive phases, of which the second begins when the first has finished.

    Parameters
    ----------
    hops : HopCore
        Core of the first phase.
    make_core : callable
        Function that returns the core of the second phase.
    """

    def __init__(self, hops: HopCore, make_core: Callable[[], Core]) -> None:
        self._core: HopCore | Core = hops
        self._make_core: Callable[[], Core] | None = make_core
        self._nodes: dict[str, Node] = {}
        self._opened: events.JobOpened | None = None

    @property
    def running(self) -> dict[str, RunningVisit] | dict[str, Running]:
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
        elif isinstance(event, events.NodeJoined):
            self._nodes[event.node.name] = event.node
        elif isinstance(event, events.NodeLost):
            self._nodes.pop(event.node, None)
        core: Any = self._core
        # Checkpoints of the last visits, and transfers, may be reported after the end of the hops.
        return core.handle(event) if type(event) in core.handles else []

    def schedule(self, now_s: float) -> list[Any]:
        """Return the commands that follow from all events until now."""
        commands: list[Any] = list(self._core.schedule(now_s))
        ends = [command for command in commands if isinstance(command, EndJob)]
        if not ends or ends[0].reason != FINISHED or self._make_core is None:
            return commands
        rounds = [command.round for command in commands if isinstance(command, EndRound)]
        return [
            *(command for command in commands if command not in ends),
            *self._begin(now_s, rounds[-1] + 1),
        ]

    def _begin(self, now_s: float, first_round: int) -> list[Any]:
        """Begin the second phase."""
        assert self._opened is not None
        assert self._make_core is not None
        self._core, self._make_core = self._make_core(), None
        opened = events.JobOpened(
            now_s,
            tuple(self._nodes.values()),
            self._opened.deadline_s,
            first_round,
            self._opened.planner_state,
        )
        return list(self._core.handle(opened))
