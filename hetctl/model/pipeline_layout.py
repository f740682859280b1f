"""Layout of a pipeline in training: the layers of each rank, and the bounds of staleness (HetPipe)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers of a network on one rank.

    Parameters
    ----------
    rank : int
        Rank in the member's group.
    first, last : int
        First and last layer, counted from 0, both included.
    held : int
        Most minibatches between their forward and backward passes for which its GPU has memory.
    """

    rank: int
    first: int
    last: int
    held: int


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Virtual workers of a member, each with the whole network in stages.

    Parameters
    ----------
    workers : tuple of tuple of StagePlan
        Stages of each virtual worker in the order of the layers; the first stage of the first virtual worker
        is on rank 0.
    in_flight : int
        Minibatches of a virtual worker that are processed concurrently, and those of a wave: N_m.
    distance : int
        Clock distance D between virtual workers.
    servers : tuple of int
        Rank with the parameter server of each layer; empty for a single virtual worker, which needs none.
    wave_bytes : tuple of int
        Most bytes that waves and parameter servers take of the memory of each node, in the order of the
        allocation's placement; empty for a single virtual worker.
    """

    workers: tuple[tuple[StagePlan, ...], ...]
    in_flight: int
    distance: int = 0
    servers: tuple[int, ...] = ()
    wave_bytes: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.workers[0][-1].last + 1

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the virtual worker and of the stage of a rank, both counted from 0."""
        return next(
            (worker, stage)
            for worker, stages in enumerate(self.workers)
            for stage, plan in enumerate(stages)
            if plan.rank == rank
        )
