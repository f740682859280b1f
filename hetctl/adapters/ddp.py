"""Agreement of the ranks of a PyTorch script to stop between the same two steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hetctl import script


class StopVote:
    """`should_stop` for all ranks together: call it on each of them after each step.

    The votes of a step are counted at the next one, through a separate group on CPUs, so that neither steps
    nor GPUs wait for them. Without a process group this is `should_stop`.
    `decided` is the last answer.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self.decided = False

    def __call__(self) -> bool:
        """Return true on all ranks, at the same call, once one of them has to stop."""
        is_alone = not _has_ranks()
        self.decided = self.decided or (script.should_stop() if is_alone else self._counted())
        if not (is_alone or self.decided):
            self._cast()
        return self.decided

    def _counted(self) -> bool:
        if self._pending is None:
            return False
        work, votes = self._pending
        work.wait()
        return bool(votes.item())

    def _cast(self) -> None:
        self._group = self._group or dist.new_group(backend="gloo")
        votes = torch.tensor(int(script.should_stop()), device="cpu")
        self._pending = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True), votes


def wait_for_ranks() -> None:
    """Wait until all ranks have called this."""
    if _has_ranks():
        dist.barrier()


def _has_ranks() -> bool:
    return bool(dist.is_available() and dist.is_initialized())
