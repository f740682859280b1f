"""The crew of a batch job: a process on each GPU, from its first member to the end of the job.

Ranks are started one by one through the site's launcher when their GPU is first needed, each as a step of
its own, and stay: the next member costs a regrouping, not the start of a framework. A rank that fails, dies
or hangs takes along the other ranks of its group alone; they are started again when they are needed.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.core.codec import encode
from hetctl.core.plan import Allocation
from hetctl.core.site import Node, Site
from hetctl.launchers import LAUNCHERS
from hetctl.launchers.seats import CREW_FILE, NAMELESS, Gpu, gpus_of, rank_command, seat_of
from hetctl.runtime.assignment import Assignment, Task, write_address
from hetctl.runtime.engagement import EndedGroup, Engagement, Seat
from hetctl.runtime.group import Place
from hetctl.runtime.steps import StepPool
from hetctl.runtime.wire import Door, Wire

PATIENCE_S = 900.0
"""A group of which no rank has given a sign of life for so long hangs: it is ended."""
GRACE_S = 3.0
"""So long the ranks of a group that has failed may take to end by themselves, and again when terminated."""
LEAVE_S = 5.0
"""At the end of the job."""


class Crew:
    """The ranks of one batch job, and the groups they form.

    Parameters
    ----------
    folder : Path
        For the file by which ranks find the driver, and for their logs.
    patience_s : float
        As `PATIENCE_S`.
    """

    def __init__(
        self, site: Site, nodes: Sequence[Node], folder: Path, patience_s: float = PATIENCE_S
    ) -> None:
        self.nodes = tuple(nodes)
        self._site = site
        self._folder = folder
        self._patience_s = patience_s
        self._steps = StepPool()
        self._seats: dict[Gpu, Seat] = {}
        self._engaged: list[Engagement] = []
        self._door = Door(secrets.token_hex(32))
        write_address(folder / CREW_FILE, self._door.address)

    @property
    def gpus(self) -> int:
        """GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def busy(self) -> bool:
        """Whether any group is at work."""
        return bool(self._engaged)

    def free_nodes(self) -> tuple[Node, ...]:
        """Return the nodes with the GPUs that no group holds, without full nodes."""
        held = self._held()
        free = (replace(n, gpus=tuple(g for g in n.gpus if (n.name, g) not in held)) for n in self.nodes)
        return tuple(node for node in free if node.gpus)

    def can_hold(self, allocation: Allocation) -> bool:
        """Whether the member is not at work, and nobody holds any of these GPUs."""
        at_work = {engagement.task.name for engagement in self._engaged}
        return allocation.member not in at_work and self._held().isdisjoint(gpus_of(allocation))

    def engage(self, task: Task, allocation: Allocation) -> None:
        """Let the ranks on an allocation's GPUs form a group and do a task; start those that are not there.

        Raises
        ------
        OSError
            If one cannot be started.
        """
        log_start = task.log.stat().st_size if task.log.exists() else 0
        if self._site.launcher in NAMELESS and not self._seats:
            for node in self.nodes:
                for gpu in node.gpus:
                    self._start((node.name, gpu))
        self._reap_steps()
        seats = [self._seats.get(gpu) or self._start(gpu) for gpu in gpus_of(allocation)]
        engagement = Engagement(
            task, allocation, seats, secrets.token_hex(32), log_start, time.time(), time.monotonic()
        )
        self._engaged.append(engagement)
        self._tell(engagement)

    def reap(self) -> list[EndedGroup]:
        """Return what the groups have come to that have ended since the last call; their GPUs are free."""
        for who, wire in self._door.guests():
            self._seat(who, wire)
        for seat in self._seats.values():
            self._hear(seat)
        self._reap_steps()
        for engagement in self._engaged:
            self._tell(engagement)
            self._watch(engagement)
        over = [engagement for engagement in self._engaged if engagement.over]
        self._engaged = [engagement for engagement in self._engaged if engagement not in over]
        return [engagement.ended() for engagement in over]

    def send_signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the ranks of the group with a task of that name."""
        for engagement in self._engaged:
            if engagement.task.name == name:
                self._signal(engagement, number)

    def leave(self) -> None:
        """Let all ranks go home; none outlives this."""
        self._door.close()
        for seat in self._seats.values():
            if seat.wire is not None:
                seat.wire.close()
            else:
                self._steps.signal(signal.SIGTERM, seat.name)
        self._steps.end(LEAVE_S)
        (self._folder / CREW_FILE).unlink(missing_ok=True)

    def _held(self) -> set[Gpu]:
        for seat in self._seats.values():
            self._hear(seat)
        at_work = {seat.gpu for engagement in self._engaged for seat in engagement.seats}
        return at_work | {seat.gpu for seat in self._seats.values() if seat.lost}

    def _start(self, gpu: Gpu) -> Seat:
        seat = seat_of(gpu)
        command = rank_command(gpu, self._folder, self._site.device, sys.executable)
        step = LAUNCHERS[self._site.launcher](self._site, seat, command)
        self._steps.launch(seat.member, step, self._folder / "logs" / f"{seat.member}.log")
        self._seats[gpu] = Seat(gpu, seat.member)
        return self._seats[gpu]

    def _seat(self, who: Any, wire: Wire) -> None:
        for seat in self._seats.values():
            if seat.name == who["seat"] and seat.wire is None:
                seat.wire = wire
                return
        wire.close()

    def _hear(self, seat: Seat) -> None:
        """Hear what a rank says."""
        if seat.wire is None or seat.lost:
            return
        group = self._group_of(seat)
        try:
            for message in seat.wire.arrived():
                if group is not None:
                    group.hear(seat, message)
        except ConnectionError:
            seat.lost = True
            if group is not None:
                group.end()

    def _group_of(self, seat: Seat) -> Engagement | None:
        return next((group for group in self._engaged if seat in group.working), None)

    def _tell(self, engagement: Engagement) -> None:
        """Give out the assignments that can be: rank 0 says where the others find it."""
        for rank, seat in enumerate(engagement.seats):
            ready = seat.wire is not None and (rank == 0 or engagement.master is not None)
            if not ready or rank in engagement.told or engagement.ending is not None:
                continue
            master = engagement.master if rank else None
            place = Place(rank, len(engagement.seats), engagement.key, master)
            engagement.told.add(rank)
            try:
                assert seat.wire is not None
                seat.wire.send(encode(Assignment(engagement.task, place, engagement.engaged_at)))
            except ConnectionError:
                engagement.end()

    def _reap_steps(self) -> None:
        for step in self._steps.reap():
            seat = next(seat for seat in self._seats.values() if seat.name == step.name)
            del self._seats[seat.gpu]
            if group := self._group_of(seat):
                group.lose(seat, step)

    def _watch(self, engagement: Engagement) -> None:
        """End a group that hangs, and what is left of one that has failed."""
        now = time.monotonic()
        if engagement.ending is None and now - engagement.heard > self._patience_s:
            engagement.hung = True
            engagement.end()
            engagement.ending = now - GRACE_S
        if engagement.ending is None or engagement.over:
            return
        if not engagement.warned and now - engagement.ending >= GRACE_S:
            self._signal(engagement, signal.SIGTERM)
            engagement.warned = True
        elif now - engagement.ending >= 2 * GRACE_S:
            self._signal(engagement, signal.SIGKILL)

    def _signal(self, engagement: Engagement, number: signal.Signals) -> None:
        for seat in engagement.working:
            self._steps.signal(number, seat.name)
