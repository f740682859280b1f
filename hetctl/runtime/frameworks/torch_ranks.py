"""Operations of the ranks of a PyTorch group: connection, times of steps, averages.

Gradients are sent while the backward pass still computes others, in buckets in the reverse order of their
parameters, as in Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2.3. `DistributedDataParallel`
itself weights all ranks equally, renames the module's parameters, and by default refuses parameters without a
gradient.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.packed_state import from_bytes, to_bytes
from hetctl.runtime.frameworks.torch_parts import Accumulation, parameters_of
from hetctl.runtime.interfaces import gloo_over
from hetctl.runtime.worker.group import ProcessGroup
from hetctl.runtime.worker.step_clock import HostStepTimer

MS_PER_S = 1000.0
FLOAT_BYTES = 4
"""Bytes of the smallest numbers in which means are computed."""
ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
"""Variable of PyTorch for errors of NCCL; with this value operations fail, with others the process ends."""


def init_group(group: ProcessGroup) -> None:
    """Initialize ``torch.distributed``: NCCL with GPUs, else Gloo; rank 0 broadcasts its store's port.

    NCCL's operations would wait for a lost rank: they are aborted when its connection ends.
    """
    store = None
    if group.rank == 0:
        # By default it would listen at all addresses, and wait for ranks that do not know the port yet.
        family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
        listener = socket.create_server((group.host, 0), family=family, backlog=group.size)
        own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.fileno()}
        store = dist.TCPStore(group.host, listener.getsockname()[1], group.size, **own)
        listener.detach()
    port = group.broadcast(store and store.port)
    store = store or dist.TCPStore(group.host, port, group.size, is_master=False)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # PyTorch's own limits are 10 minutes with NCCL, 30 with Gloo.
    limit = timedelta(seconds=group.hang_s)
    # Otherwise PyTorch would end the process amid a checkpoint.
    os.environ.setdefault(ERROR_HANDLING, CLEAN_UP_ONLY)
    with gloo_over("GLOO_SOCKET_IFNAME", group.interface):
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    if backend == "nccl":
        group.on_peer_loss(dist.distributed_c10d._abort_process_group)


def make_equal(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
    """Set the tensors on every rank to rank 0's values, one after another.

    Parameters
    ----------
    device : torch.device or None
        Device of the group's exchanges, if the tensors may lie elsewhere.
    """
    with torch.no_grad():
        for tensor in tensors:
            # Broadcasts refuse some types, and tensors that are not contiguous, such as transposed weights.
            values = tensor.to(device=device).contiguous()
            dist.broadcast(values.reshape(-1).view(torch.uint8), 0)
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
            # 16-bit numbers would lose digits each time. Infinite values, as in masks, times 0 are not 0.
            values = tensor.float() if tensor.element_size() < FLOAT_BYTES else tensor
            values = values * weight if weight else torch.zeros_like(values)
            dist.all_reduce(values)
            tensor.copy_(values)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; no values on the others.

    Values are mappings, lists and tuples of arrays and plain values.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    # PyTorch's own function pickles values: another process could make it run code.
    data = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    lengths[dist.get_rank()] = len(data)
    dist.all_reduce(lengths)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, parts, dst=0)
    found = zip(parts or (), lengths.tolist(), strict=False)
    return [from_bytes(part[:length].cpu().numpy().tobytes()) for part, length in found]


class CudaStepTimer:
    """Timer by events in the GPU's queue, read once the GPU has passed them."""

    def __init__(self) -> None:
        self._step = 0
        self._began = torch.cuda.Event(enable_timing=True)
        self._queued: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self, step: int) -> None:
        """Start the time of a step."""
        self._step, self._began = step, torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        """End the time of the step; a later call, after another backward pass of the step, replaces it."""
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


BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""Sizes at which buckets are full; the first one is small, so that sending begins early."""


class Bucket:
    """Parameters whose gradients are sent in one message, all of one type and on one device.

    Attributes
    ----------
    message : torch.Tensor or None
        Memory of the message, kept for the next pass: the kernel gives new memory of this size page by page.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self._sizes = [*(parameter.numel() for parameter in parameters), len(parameters)]
        self.message: torch.Tensor | None = None

    def put(self, weight: float) -> torch.Tensor:
        """Return the message: weighted gradients, and the number of ranks that have each."""
        if self.message is None:
            self.message = self.parameters[0].new_empty(sum(self._sizes))
        *parts, ranks = self.message.split(self._sizes)
        # To copy a list would wait until the GPU has computed all that is queued.
        ranks.fill_(1.0)
        for number, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if (gradient := parameter.grad) is None:
                part.zero_()
                ranks[number].zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                torch.mul(dense, weight, out=part.view_as(parameter))
        return self.message

    def take(self) -> None:
        """Set the gradients to those of the message."""
        assert self.message is not None
        *means, ranks = self.message.split(self._sizes)
        for parameter, flat, count in zip(self.parameters, means, ranks, strict=True):
            gradient, mean = parameter.grad, flat.view_as(parameter)
            if gradient is not None and not (gradient.is_sparse or gradient.requires_grad):
                gradient.copy_(mean)
            # A parameter without a gradient on any rank must get none: with zeros, weight decay or momentum
            # would change it.
            elif gradient is not None or count > 0:
                # A copy: a ``train_fn`` may hold it while the next pass is sent.
                parameter.grad = mean.clone()


class Averaging:
    """Average of an optimizer's gradients over the ranks in every backward pass.

    After the pass all ranks have the gradients of the whole batch, so clipping and loss scaling see them.
    Averaging an average does not change it, so gradients may be accumulated over several passes.

    Parameters
    ----------
    accumulation : Accumulation or None
        Sum of the gradients of a step's batches: only the whole sum is averaged.

    Attributes
    ----------
    timer : HostStepTimer or CudaStepTimer
        Timer of this rank's steps, without its waits for other ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation | None = None) -> None:
        self.timer = CudaStepTimer() if torch.cuda.is_available() else HostStepTimer()
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._weight = 1.0 / dist.get_world_size() if accumulation is None else 1.0
        self._holds = False
        self._averaged = False
        self._average: BucketAverage | None = None
        # The first pass must show that gradients are final when their hooks are called.
        self._overlaps = False
        self._hooked: set[torch.Tensor] = set()
        self._known: list[torch.Tensor] = []
        self._ordered = False
        self._buckets: list[Bucket] = []
        self._hook_new()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def expect(self, weight: float, *, ends_step: bool) -> None:
        """Note the next batch.

        Parameters
        ----------
        weight : float
            Share of this rank in the batch of the whole group, |B_i| / X of LB-BSP, Equation 7; the shares
            of all ranks add up to 1.
        ends_step : bool
            False if more batches of the step follow: backward passes then do not average.
        """
        self._holds = not ends_step
        if self._accumulation is None:
            self._weight = weight

    def release(self) -> None:
        """Release memory that only further steps need."""
        for bucket in self._buckets:
            bucket.message = None

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        if self._holds:
            return
        if self._average is None:
            self._average = self._new_average()
            # The engine calls it once, at the end of this pass; DistributedDataParallel relies on it, too.
            Variable._execution_engine.queue_callback(self._average_all)
        self._average.note(parameter)
        if self._overlaps:
            self._average.send()

    def _average_all(self) -> None:
        """Set all gradients on every rank to their weighted sum over the ranks."""
        if self._average is not None:
            self._overlaps = not self._average.repeats
        average, self._average = self._average or self._new_average(), None
        self.timer.end()
        average.send(waits=False)
        average.receive()
        if not self._ordered:
            self._ordered = True
            # Parameters without a gradient are sent last, as only the end of a pass shows that they get none.
            # After an average a parameter has one on all ranks or on none: the order is the same everywhere.
            self._buckets = _buckets_of(sorted(self._known, key=lambda each: each.grad is not None))
        self._averaged = True
        self._hook_new()

    def _before_step(self, *_: Any) -> None:
        """Average gradients that no backward pass has averaged."""
        if self._averaged:
            return
        for parameter in parameters_of(self._optimizer):
            # The user's own tensors stay as they are.
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        self._average_all()

    def _after_step(self, *_: Any) -> None:
        self._averaged = False

    def _new_average(self) -> BucketAverage:
        parameters = parameters_of(self._optimizer)
        # An optimizer may get more or other parameters while a network trains.
        if [*map(id, parameters)] != [*map(id, self._known)]:
            self._known, self._ordered = parameters, False
            self._buckets = _buckets_of(parameters)
        return BucketAverage(self._buckets, self._weight, self._accumulation)

    def _hook_new(self) -> None:
        """Watch for the gradients of new parameters, such as unfrozen ones."""
        for parameter in parameters_of(self._optimizer):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._after_gradient)


class BucketAverage:
    """One average of all gradients; all ranks send equal buckets in equal order, each when it is ready.

    Parameters
    ----------
    weight : float
        Weight of this rank's gradients.
    accumulation : Accumulation or None
        Sum of this rank's gradients in the step, as in `Averaging`.

    Attributes
    ----------
    repeats : bool
        True if a parameter got gradients more than once in this backward pass.
    """

    def __init__(self, buckets: Sequence[Bucket], weight: float, accumulation: Accumulation | None) -> None:
        self._buckets = buckets
        self._weight = weight
        self._accumulation = accumulation
        self._bucket_of = {each: n for n, bucket in enumerate(buckets) for each in bucket.parameters}
        self._awaited = [{each for each in bucket.parameters if each.requires_grad} for bucket in buckets]
        self._sent: list[Any] = []
        self.repeats = False

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a parameter has its gradient.

        Raises
        ------
        BadInputError
            If the gradient was sent before.
        """
        number = self._bucket_of.get(parameter)
        if number is None:
            return
        if number < len(self._sent):
            raise BadInputError(
                "a parameter was given gradients twice in one backward pass, and not in the one before",
                "call torch.utils.checkpoint.checkpoint with use_reentrant=False",
            )
        self.repeats |= parameter not in self._awaited[number]
        self._awaited[number].discard(parameter)

    def send(self, *, waits: bool = True) -> None:
        """Send the next buckets.

        Parameters
        ----------
        waits : bool
            True: only buckets whose gradients are all there. False: all, since no more gradients come.
        """
        while len(self._sent) < len(self._buckets) and not (waits and self._awaited[len(self._sent)]):
            bucket = self._buckets[len(self._sent)]
            with torch.no_grad():
                for parameter in bucket.parameters:
                    if self._accumulation is not None:
                        self._accumulation.finish(parameter)
                    elif not self._weight:
                        # A rank without samples runs an example only to take part: that must not count.
                        parameter.grad = None
                self._sent.append(dist.all_reduce(bucket.put(self._weight), async_op=True))

    def receive(self) -> None:
        """Wait for the sums, and set the gradients to them."""
        with torch.no_grad():
            for bucket, work in zip(self._buckets, self._sent, strict=True):
                work.wait()
                bucket.take()


def _buckets_of(parameters: Iterable[torch.Tensor]) -> list[Bucket]:
    """Return buckets of parameters, in the order in which they are sent."""
    full: list[list[torch.Tensor]] = []
    # The last layers have their gradients first.
    open_buckets: dict[Any, list[torch.Tensor]] = {}
    limits: dict[Any, int] = {}
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= limits.get(kind, FIRST_BUCKET_BYTES):
            full.append(open_buckets.pop(kind))
            limits[kind] = BUCKET_BYTES
    return [*map(Bucket, full), *map(Bucket, open_buckets.values())]


class GradientShares:
    """Weights of the ranks' gradients in FSDP's sum; replaces `Averaging`.

    The gradient of the outputs is multiplied, and thereby those of all parameters: FSDP adds gradients up
    within the backward pass, where nothing else can weight them.
    """

    timer = None
    """Ranks wait for one another in each layer, so their own step times are unknown."""

    def __init__(self, model: torch.nn.Module, ranks: int) -> None:
        self._ranks = ranks
        self._factor = 1.0
        model.register_forward_hook(self._after_forward)

    def expect(self, weight: float, *, ends_step: bool) -> None:  # noqa: ARG002
        """Note the share of this rank's next batch in the step; the shares of all ranks add up to 1."""
        # FSDP divides the sum by the number of ranks.
        self._factor = weight * self._ranks

    def release(self) -> None:
        """Do nothing: FSDP releases its own memory."""

    def _after_forward(self, _module: Any, _inputs: Any, outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return outputs
        return tree_map_only(torch.Tensor, lambda each: _Weighted.apply(each, self._factor), outputs)


class _Weighted(torch.autograd.Function):  # type: ignore[misc]
    """Identity whose gradient is multiplied by a factor.

    A hook on an output would also multiply the gradients of others that the network computes from it.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the values."""
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient times the factor."""
        # An example that does not count may have an infinite gradient.
        return (gradient * ctx.factor if ctx.factor else torch.zeros_like(gradient)), None
