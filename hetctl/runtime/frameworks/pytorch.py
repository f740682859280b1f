"""PyTorch; groups of several ranks average gradients through ``torch.distributed``."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches, pad
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks import Framework, FusedSteps, TrainableNetwork, finished
from hetctl.runtime.frameworks.packed_state import other_variables
from hetctl.runtime.frameworks.stage_network import TensorMemory
from hetctl.runtime.frameworks.torch_batches import (
    DeviceCopies,
    adapt_norms,
    array_of,
    is_compiled,
    mapped_outputs,
    present_device,
)
from hetctl.runtime.frameworks.torch_chain import TorchChain
from hetctl.runtime.frameworks.torch_measuring import GpuTensors, memory_gauge
from hetctl.runtime.frameworks.torch_parts import (
    Accumulation,
    Parts,
    Score,
    TorchRate,
    generators,
    make_parameters,
    pack,
    parts_of,
    set_generators,
    unpack,
    without_functions,
)
from hetctl.runtime.frameworks.torch_ranks import (
    Averaging,
    GradientShares,
    average,
    gather,
    init_group,
    make_equal,
)
from hetctl.runtime.frameworks.torch_weights import write_weights
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions, takes_context

CONTEXT, GRADIENTS = "context", "gradients"
"""Names in the state: of a ``train_fn``, and of gradients that await the optimizer's next step."""


class TorchNetwork(TrainableNetwork):
    """A module with its optimizer on this rank."""

    gather = staticmethod(gather)
    _rate: TorchRate
    _random_states: Callable[[], dict[str, torch.Tensor]] = staticmethod(generators)
    _set_random_states: Callable[[Any], None] = staticmethod(set_generators)
    _unpacked: Callable[[Any], Any] = staticmethod(unpack)

    def __init__(
        self, parts: Parts, member: Member, functions: UserFunctions, group: Group, device: torch.device
    ) -> None:
        self._parts = parts
        self._device = device
        self.tensors = DeviceCopies(device)
        # Graphs on a GPU, which torch.compile may make, have one memory for the outputs of all batches.
        self._compiled = self.reuses_outputs = is_compiled(parts.model)
        super().__init__(
            *(parts.model, parts.optimizer, member, functions, group),
            *(_default_train_fn(parts.loss, self._compiled), device, self.tensors),
            *(parts.scheduler, parts.loss_scale),
        )
        # With balanced batches a rank may have nearly all samples of the group.
        self._is_sample = torch.ones(member.batch_size * group.size, device=device)
        self._samples = member.batch_size
        adapt_norms(parts.model, self._is_sample if self._compiled else None)
        self._accumulates = False
        if self._context is not None:
            self._optimizer.register_step_post_hook(self._after_step)
        self._rate = TorchRate(parts)
        self._averaging: Averaging | GradientShares | None = None
        if member.micro_batch_size is not None:
            self._accumulation = Accumulation(self._optimizer, averaged=group.size > 1 and not member.shard)
        if group.size > 1:
            self._averaging = self._joined()
            self.timer = self._averaging.timer

    def train(self, batches: Batches) -> float:
        """Run ``train_fn``; advance the scheduler if the epoch is done."""
        self._model.train()
        return super().train(batches)

    def _synchronized(self, loss: float, batches: Batches) -> float:
        scheduler = None if self._parts.waits_for_metric else self._parts.scheduler
        if scheduler is not None and batches.ends_epoch:
            scheduler.step()
        if self._averaging is None:
            return loss
        self._averaging.release()
        # Each rank's statistics, such as batch-norm means, weighted by its share of the samples as gradients
        # are: a rank with more of each batch has seen more of the data.
        buffers = list(self._model.buffers())
        average((buffer for buffer in buffers if buffer.is_floating_point()), batches.share)
        make_equal(buffer for buffer in buffers if not buffer.is_floating_point())
        losses = torch.tensor([loss], dtype=torch.float64, device=self._device)
        average([losses], batches.share)
        return float(losses)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Advance a scheduler that waits for the stop rule's metric; give ``train_fn`` the results."""
        if self._parts.scheduler is not None and self._parts.waits_for_metric:
            self._parts.scheduler.step(metrics[self._member.stop.metric])
        super().end_epoch(metrics)

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Evaluate this rank's share: scores are means over samples, and their sums are added over ranks."""
        return finished(self.evaluating(batches))

    def evaluating(self, batches: Iterable[tuple[Samples, int]]) -> Generator[Any, Any, dict[str, float]]:
        """Do as `evaluate`; yield what `_scored` yields."""
        self._model.eval()
        scores = {**self._parts.metrics, "loss": self._parts.loss}
        # On the device: float() would wait for it in each batch.
        means, counts = [], []
        self._predictions.begin()
        for samples, count in batches:
            # Ranks that share a network must run it together.
            if count or self._member.shard:
                outputs, found = yield from self._scored(samples, count, scores)
            if not count:
                self._predictions.skip()
                continue
            means += found
            counts.append(count)
            self._predictions.add(outputs, samples[1][:count])
        # The last sum is the number of samples.
        weights = torch.tensor(counts, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            # Together at the end: for small networks it would take as long as they do.
            values = torch.stack([self._number(value) for value in means]) if means else weights
            totals = values.view(len(counts), len(scores)).T @ weights
            sums = torch.cat([totals, weights.sum()[None]])
        if self._group.size > 1:
            dist.all_reduce(sums)
        *found, count = sums.tolist()
        return self._with_whole(
            {f"val_{name}": total / count for name, total in zip(scores, found, strict=True)}
        )

    def metric_names(self) -> Collection[str]:
        """Return the names of loss and scores of ``model_fn``; none if ``evaluate_fn`` adds some."""
        return () if self._evaluate_fn else [f"val_{name}" for name in (*self._parts.metrics, "loss")]

    def arrays_of(self, outputs: Any) -> Any:
        """Return outputs as arrays."""
        return mapped_outputs(array_of, outputs)

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return all state, each tensor by its name in the module or the optimizer."""
        return pack(self._state())

    def _state(self) -> dict[str, Any]:
        holders = {name: without_functions(holder.state_dict()) for name, holder in self._holders().items()}
        own = {**holders, "generators": self._random_states(), "learning_rate_factor": self._rate.factor}
        if self._context is not None:
            own |= {CONTEXT: self._context.save(), GRADIENTS: self._gradients()}
        return own

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore all state.

        Raises
        ------
        BadInputError
            If ``model_fn`` now builds a network with other variables.
        """
        try:
            state = self._unpacked(arrays)
            self._rate.factor = state.pop("learning_rate_factor")
            random_states = state.pop("generators")
            context, gradients = state.pop(CONTEXT, None), state.pop(GRADIENTS, {})
            for name, holder in self._holders().items():
                holder.load_state_dict(state.pop(name))
            if state:
                raise KeyError(*state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise other_variables(error) from error
        # Gradients of earlier training belong to another state.
        self._optimizer.zero_grad()
        for name, parameter in self._model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
        self._accumulates = bool(gradients)
        if context is not None and self._context is not None:
            self._context.restore(context)
        self._set_random_states(random_states)

    def generators(self) -> Any:
        """Return the states of PyTorch's generators as hexadecimal digits, by device."""
        return {device: state.numpy().tobytes().hex() for device, state in generators().items()}

    def set_generators(self, states: Any) -> None:
        """Set PyTorch's generators."""
        set_generators(
            {
                device: torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
                for device, digits in states.items()
            }
        )

    def _joined(self) -> Averaging | GradientShares:
        """Make the networks of all ranks equal; return what averages their gradients."""
        make_equal([*self._model.parameters(), *self._model.buffers()])
        return Averaging(self._optimizer, self._accumulation)

    def _after_step(self, *_: Any) -> None:
        self._accumulates = False

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients since the optimizer's last step: training may stop before the next one."""
        parameters = self._model.named_parameters() if self._accumulates else ()
        return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}

    def _on_batch(self, batches: Batches, samples: int) -> None:
        """Tell batch norms the number of samples in a batch, and the averaging the share of this rank."""
        super()._on_batch(batches, samples)
        if self._compiled and samples != self._samples:
            # In place: a compiled step holds this very tensor.
            self._is_sample[:samples] = 1
            self._is_sample[samples:] = 0
            self._samples = samples
        if self._accumulation is not None:
            # With several ranks, `GradientShares` has weighted the gradients of a divided network.
            is_weighted = self._member.shard and self._group.size > 1
            weight = 1.0 if is_weighted else batches.weight
            self._accumulation.expect(weight, ends_step=batches.ends_step)
        if self._averaging is not None:
            self._averaging.expect(batches.weight, ends_step=batches.ends_step)
        self._accumulates = self._context is not None

    def _scored(
        self, samples: Samples, count: int, scores: Mapping[str, Score]
    ) -> Generator[Any, Any, tuple[Any, list[Any]]]:
        """Return the network's outputs for samples, and their scores; yield as `evaluating`."""
        yield from ()
        with torch.no_grad():
            if not self._compiled:
                x, y = self.tensors(samples)
                outputs = self._model(x)
            else:
                x, y = self.tensors(pad(samples, self._member.rows_evaluated))
                outputs, y = mapped_outputs(lambda tensor: tensor[:count], self._model(x)), y[:count]
            # A rank without samples only takes part in the computation of the outputs.
            return outputs, [score(outputs, y) for score in scores.values() if count]

    def _number(self, value: Any) -> torch.Tensor:
        """Return a number on the device, which may still be computing it."""
        return torch.as_tensor(value, dtype=torch.float64, device=self._device).reshape(())

    def _holders(self) -> dict[str, Any]:
        """Return the objects with state, by name."""
        parts = {
            "model": self._model,
            "loss": self._parts.loss,
            "optimizer": self._optimizer,
            "scheduler": self._parts.scheduler,
            "loss_scale": self._parts.loss_scale,
        }
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


class PyTorch(Framework):
    """Interface of PyTorch to the trainer."""

    needs = "torch.distributed"
    initialize = staticmethod(init_group)
    shutdown = staticmethod(dist.destroy_process_group)
    memory_gauge = staticmethod(memory_gauge)
    write_weights = staticmethod(write_weights)
    chain = TorchChain

    def version(self) -> str:
        """Return PyTorch's version."""
        return f"pytorch {torch.__version__}"

    def prepare(
        self, cores: tuple[int, ...], device: int | None, seed: int, *, deterministic: bool = False
    ) -> None:
        """Limit threads, choose the GPU and the kind of algorithms, seed all generators."""
        torch.set_num_threads(len(cores))
        if device is not None and torch.cuda.is_available():
            # The other GPUs stay visible: NCCL would lose its fast paths without them.
            torch.cuda.set_device(device)
        if deterministic:
            # PyTorch requires it: results of matrix products on GPUs depend on the workspace.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if deterministic or torch.are_deterministic_algorithms_enabled():
            # The call imports torch._dynamo, as slow as PyTorch itself: leaders and probes do without.
            torch.use_deterministic_algorithms(deterministic)
        random.seed(seed)
        # NumPy's global generator refuses seeds of more than 32 bits.
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def build(self, member: Member, functions: UserFunctions, group: Group, sample: Samples) -> TorchNetwork:
        """Call ``model_fn``, move the network to the GPU if there is one, create lazy parameters.

        Raises
        ------
        BadInputError
            If ``model_fn`` returns anything but the parts of a network.
        """
        parts, device = _built(member, functions), present_device()
        if member.shard:
            # Its packages take memory and time: only members that use it import them.
            from hetctl.runtime.frameworks.torch_sharded import sharded_network

            return sharded_network(parts, member, functions, group, sample, device)
        make_parameters(parts, sample, device)
        return TorchNetwork(parts, member, functions, group, device)

    def build_fused(
        self, member: Member, functions: UserFunctions, group: Group, sample: Samples
    ) -> TorchNetwork:
        """Build as `build`."""
        # Here and below: few ranks need torch.func.
        from hetctl.runtime.frameworks.torch_fused import FusedNetwork

        parts, device = _built(member, functions), present_device()
        make_parameters(parts, sample, device)
        return FusedNetwork(parts, member, functions, group, device)

    def fused_steps(self, known: Mapping[int, float] | None = None) -> FusedSteps:
        """Return steps through ``vmap``."""
        from hetctl.runtime.frameworks.torch_fused import TorchFusedSteps

        return TorchFusedSteps(known)

    def backend(self) -> str:
        """Return the backend of ``torch.distributed``."""
        return str(dist.get_backend())

    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that sums zeros."""
        values = torch.zeros(count, device=present_device())

        def run() -> None:
            dist.all_reduce(values)
            # NCCL's operations return as soon as they are queued on the GPU.
            if values.is_cuda:
                torch.cuda.synchronize()

        return run

    def without_peer_access(self, device: int, devices: int) -> tuple[int, ...]:
        """Return the devices without peer access in CUDA, and those that are hidden from this process."""
        seen = torch.cuda.device_count()
        others = (other for other in range(devices) if other != device)
        return tuple(o for o in others if o >= seen or not torch.cuda.can_device_access_peer(device, o))

    def gpu_memory(self) -> int:
        """Return the bytes of the current device."""
        if not torch.cuda.is_available():
            return 0
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def peak_gpu_memory(self) -> int:
        """Return the peak of the bytes of all tensors."""
        return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0

    def reset_peak_memory(self) -> None:
        """Restart the allocator's measurement of the peak."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def tensor_memory(self) -> TensorMemory:
        """Return the memory of its device."""
        return GpuTensors(present_device()) if torch.cuda.is_available() else TensorMemory()

    def clear(self) -> None:
        """Release unused memory of the GPU."""
        # Reference cycles hold tensors until a collection, and empty_cache() returns unused blocks only.
        gc.collect()
        if torch.cuda.is_available():
            # Also what other ranks had opened.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


FRAMEWORK = PyTorch()


def _built(member: Member, functions: UserFunctions) -> Parts:
    """Call ``model_fn``, and check the parts."""
    parts = parts_of(functions.model_fn(dict(member.config)), member.name)
    train_fn, scheduler = functions.train_fn, parts.scheduler
    if parts.loss_scale is not None and not (train_fn and takes_context(train_fn)):
        raise BadInputError(
            f"model_fn returned a loss_scale for {member.name}, which only a train_fn with a context can use",
            "name a train_fn(data, model, optimizer, config, context), or leave out loss_scale",
        )
    # It would take a better value of the stop rule's metric for a worse one.
    mode = getattr(scheduler, "mode", member.stop.mode)
    if isinstance(scheduler, ReduceLROnPlateau) and mode != member.stop.mode:
        raise BadInputError(
            f"the scheduler of {member.name} has mode {mode}, but its metric {member.stop.metric} has mode "
            f"{member.stop.mode}",
            f"create ReduceLROnPlateau with mode={member.stop.mode!r}, or name another metric in `stop`",
        )
    return parts


def _default_train_fn(
    loss_of_batch: Score, compiled: bool
) -> Callable[[Any, Any, Any, dict[str, Any]], float]:
    """Return plain training by the mean loss; compiled modules get batches of one size."""

    def train_fn(data: Any, model: Any, optimizer: Any, _config: dict[str, Any]) -> float:
        total, samples = 0.0, 0
        batches = ((x, y) for x, y, _ in data.padded()) if compiled else data
        for x, y in batches:
            optimizer.zero_grad()
            rows, outputs = data.samples, model(x)
            if compiled:
                outputs = mapped_outputs(lambda tensor, rows=rows: tensor[:rows], outputs)  # type: ignore[misc]
            loss = loss_of_batch(outputs, y[:rows])
            loss.backward()
            optimizer.step()
            data.loss = loss.detach()
            # On the device: float() in each step would wait for the GPU.
            total = total + data.loss * data.counted
            samples += data.counted
        return float(total) / samples if samples else 0.0

    return train_fn
