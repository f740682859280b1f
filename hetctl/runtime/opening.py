"""Opening a round: its folder, its file, and the groups of those who start together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetctl.core.codec import encode
from hetctl.core.ensemble import Member
from hetctl.core.events import DRIVER, SteadyWriter
from hetctl.core.layout import RoundFolder, RunFolder
from hetctl.core.plan import Allocation
from hetctl.core.run import RoundFile, RunSpec, write_round
from hetctl.runtime.assignment import TRAIN, Task
from hetctl.runtime.crew import Crew
from hetctl.runtime.exchanges import Exchanges
from hetctl.runtime.history import make_folder, next_folder
from hetctl.runtime.rounds import OpenRound


@dataclass(frozen=True)
class Opener:
    """Opens the rounds of one job.

    Parameters
    ----------
    first : RoundFolder
        Of the job; made when it was submitted.
    deadline, longest_s
        As in `RoundFile`.
    on_failure : callable
        Told of what cannot be written or launched.
    """

    folder: RunFolder
    first: RoundFolder
    spec: RunSpec
    job: int
    deadline: float
    longest_s: float
    crew: Crew
    exchanges: Exchanges
    on_failure: Callable[[OSError], None]

    def open(
        self, allocations: Sequence[Allocation], members: Sequence[Member], predicted_s: float, memory: Any
    ) -> OpenRound:
        """Start members, each with its allocation, as one round.

        Parameters
        ----------
        members : sequence of Member
            In the order of their allocations, with the batch sizes that they are trained with.
        memory : Any
            As in `RoundFile`.

        Raises
        ------
        OSError
            If the round's file cannot be written; nothing is started then.
        """
        folder = next_folder(self.folder, self.first)
        make_folder(folder, self.first)
        round_file = self._round_file(folder, allocations, members, memory)
        write_round(folder.file, round_file)
        events = SteadyWriter(folder.events, DRIVER, self.on_failure)
        names = [allocation.member for allocation in allocations]
        events.write(
            "round_started", index=folder.index, job=self.job, predicted_s=predicted_s, members=names
        )
        opened = OpenRound(folder, events, time.time(), self.crew.stop)
        try:
            self.exchanges.start(folder, round_file)
        except OSError as error:
            self.on_failure(error)
        for allocation, member in zip(allocations, members, strict=True):
            self._launch(opened, allocation, member)
        return opened

    def _round_file(
        self, folder: RoundFolder, allocations: Sequence[Allocation], members: Sequence[Member], memory: Any
    ) -> RoundFile:
        return RoundFile(
            run=self.spec.run,
            index=folder.index,
            job=self.job,
            deadline=self.deadline,
            ensemble=replace(self.spec.ensemble, members=tuple(members)),
            allocations=tuple(allocations),
            checkpoints=self.spec.checkpoints,
            memory=memory,
            longest_s=self.longest_s,
            sharing=self.spec.sharing,
            preprocess=self.spec.preprocess,
            cores=self.spec.site.cores_per_node,
            gpus_per_node=self.spec.site.gpus_per_node,
            led=self.exchanges.needed(self.spec.sharing, allocations),
            gpu_types=self._types_of(allocations),
            network=self.spec.site.network,
            timeouts=self.spec.site.timeouts,
        )

    def _types_of(self, allocations: Sequence[Allocation]) -> dict[str, str]:
        """Return the types of members' GPUs, where those of a member are of one type."""
        types = {node.name: node.gpu_type for node in self.crew.nodes}
        held = {a.member: {types.get(place.node) for place in a.placement} for a in allocations}
        return {
            member: kind for member, kinds in held.items() if len(kinds) == 1 and (kind := next(iter(kinds)))
        }

    def _launch(self, opened: OpenRound, allocation: Allocation, member: Member) -> None:
        opened.events.write(
            "step_started",
            member=member.name,
            gpus=allocation.gpus,
            placement=encode(allocation.placement),
            batch_size=member.batch_size,
        )
        try:
            self.crew.engage(Task(TRAIN, str(opened.folder.path), member.name), allocation)
        except OSError as error:
            self.on_failure(error)
        else:
            opened.active[member.name] = allocation
