"""Operations of the ranks of a PyTorch group: connection, and averages of gradients and statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetctl.runtime.frameworks.torch_accumulation import at_end_of_backward, parameters_of
from hetctl.runtime.interfaces import gloo_over
from hetctl.runtime.worker.group import WiredGroup
from hetctl.runtime.worker.step_clock import HostStepTimer

MS_PER_S = 1000.0


def meet(group: WiredGroup) -> None:
    """Initialize ``torch.distributed``: NCCL with GPUs, else Gloo; rank 0 broadcasts its store's port."""
    store = None
    if group.rank == 0:
        # By default it would wait for the other ranks, which do not have the port yet.
        store = dist.TCPStore(group.host, 0, group.size, is_master=True, wait_for_workers=False)
    port = group.broadcast(store and store.port)
    store = store or dist.TCPStore(group.host, port, group.size, is_master=False)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # Without it, PyTorch's own limits hold: 10 minutes with NCCL, 30 with Gloo.
    limit = timedelta(seconds=group.hang_s)
    with gloo_over("GLOO_SOCKET_IFNAME", group.interface):
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)


def make_equal(tensors: Iterable[torch.Tensor]) -> None:
    """Set the tensors on every rank to rank 0's values."""
    with torch.no_grad():
        for tensor in tensors:
            # Broadcasts refuse tensors that are not contiguous, such as transposed weights.
            values = tensor.contiguous()
            dist.broadcast(values, 0)
            tensor.copy_(values)


def average(tensors: Iterable[torch.Tensor], weight: float) -> None:
    """Set the tensors on every rank to the mean of all ranks' values.

    Parameters
    ----------
    weight : float
        Weight of this rank; the weights of all ranks add up to 1.
    """
    with torch.no_grad():
        for tensor in tensors:
            values = tensor * weight
            dist.all_reduce(values)
            tensor.copy_(values)


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values, on every rank."""
    dist.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; no values on the others."""
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    values: list[Any] = [None] * size if is_first else []
    dist.gather_object(value, values if is_first else None, dst=0)
    return values


class Averaging:
    """Average of an optimizer's gradients over the ranks at the end of every backward pass.

    Clipping and loss scaling, which come between the backward pass and the step, therefore see the gradients
    of the whole batch on every rank. Averaging an average again does not change it: gradients may be
    accumulated over several passes.

    Parameters
    ----------
    hooked : bool
        True if it averages by itself; False: only when `average_all` is called.

    Attributes
    ----------
    weight : float
        Share of this rank in the batch of the whole group, |B_i| / X of LB-BSP, Equation 7; the shares of
        all ranks add up to 1.
    timer : HostStepTimer or CudaStepTimer
        Timer of the steps, which ends where the average begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, hooked: bool = True) -> None:
        self.weight = 1.0 / dist.get_world_size() if hooked else 1.0
        self.timer = CudaStepTimer() if torch.cuda.is_available() else HostStepTimer()
        self._optimizer = optimizer
        self._averaged = False
        if hooked:
            at_end_of_backward(parameters_of(optimizer), self.average_all)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, *_: Any) -> None:
        """Average gradients that were not computed by a backward pass."""
        if not self._averaged:
            self.average_all()

    def _after_step(self, *_: Any) -> None:
        self._averaged = False

    def average_all(self) -> None:
        """Set all gradients on every rank to their weighted sum over the ranks."""
        self._averaged = True
        self.timer.end()
        kinds: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters_of(self._optimizer):
            # A rank without samples runs its example batch only to take part: its gradients must not count.
            if not self.weight:
                parameter.grad = None
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        with torch.no_grad():
            for parameters in kinds.values():
                self._average_together(parameters)

    def _average_together(self, parameters: list[torch.Tensor]) -> None:
        """Average all gradients in one message, with the number of ranks that have each gradient."""
        # A parameter without a gradient on all ranks must keep none: with zeros, weight
        # decay or momentum would change it.
        given = torch.tensor([parameter.grad is not None for parameter in parameters])
        message = torch.cat([*map(_flat_gradient, parameters), given.to(parameters[0])])
        message[: -len(parameters)] *= self.weight
        dist.all_reduce(message)
        *means, ranks = message.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, mean, count in zip(parameters, means, ranks, strict=True):
            if parameter.grad is not None or count > 0:
                parameter.grad = mean.view_as(parameter)


class CudaStepTimer:
    """Timer by events in the GPU's queue, which are read when the GPU has passed them."""

    def __init__(self) -> None:
        self._step = 0
        self._began = torch.cuda.Event(enable_timing=True)
        self._queued: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self, step: int) -> None:
        """Start the time of a step."""
        self._step, self._began = step, torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        """End the time of the step; a later end of the same step, as of its next backward pass, holds."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        if self._queued and self._queued[-1][0] == self._step:
            self._queued.pop()
        self._queued.append((self._step, self._began, ended))

    def taken(self) -> list[tuple[int, float]]:
        """Return the steps whose end the GPU has passed."""
        taken = []
        while self._queued and self._queued[0][2].query():
            step, began, ended = self._queued.popleft()
            taken.append((step, began.elapsed_time(ended) / MS_PER_S))
        return taken


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
