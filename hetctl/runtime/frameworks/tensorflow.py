"""TensorFlow with Keras 3; groups of several ranks average gradients through Horovod."""

from __future__ import annotations

import inspect
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism
from tensorflow.python.framework.ops import gradient_registry

from hetctl.model.ensemble import Member
from hetctl.model.errors import TransientInputError
from hetctl.runtime.agent.gpus import gpus_of_node, visible_gpus
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks import GLOO, NCCL, Framework
from hetctl.runtime.frameworks.keras_chain import KerasChain
from hetctl.runtime.frameworks.keras_model import compiled_model
from hetctl.runtime.frameworks.keras_network import KerasNetwork, horovod, make_variables
from hetctl.runtime.frameworks.keras_weights import write_weights
from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.horovod_rendezvous import horovod_rendezvous
from hetctl.runtime.interfaces import gloo_over
from hetctl.runtime.worker.group import Group, ProcessGroup
from hetctl.runtime.worker.hardware import GpuMemory, MemoryGauge
from hetctl.runtime.worker.user_functions import UserFunctions

HOST = "localhost"
CONVERTED = "__autograph_generated_file"
"""Prefix of the modules in which AutoGraph stores the code that it makes of Python functions."""


class TensorFlow(Framework):
    """Interface of TensorFlow to the trainer."""

    needs = "Horovod"
    write_weights = staticmethod(write_weights)
    chain = KerasChain

    def __init__(self) -> None:
        self._rendezvous = ExitStack()

    def version(self) -> str:
        """Return TensorFlow's and Keras' versions."""
        return f"tensorflow {tf.__version__}, keras {keras.__version__}"

    def prepare(
        self, cores: tuple[int, ...], device: int | None, seed: int, *, deterministic: bool = False
    ) -> None:
        """Limit threads, choose the GPU and the kind of operations, seed all generators.

        The GPU's memory is allocated on demand.
        """
        # After its first operation, as in a notebook, TensorFlow accepts no other numbers of threads.
        with suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(len(cores))
            tf.config.threading.set_inter_op_parallelism_threads(len(cores))
        if device is not None and (gpus := tf.config.list_physical_devices("GPU")):
            # The other GPUs stay visible: NCCL would lose its fast paths without them.
            tf.config.set_visible_devices(gpus[device], "GPU")
            # By default TensorFlow takes nearly all of a GPU's memory at its first operation.
            tf.config.experimental.set_memory_growth(gpus[device], True)
        keras.utils.set_random_seed(seed)
        if deterministic:
            tf.config.experimental.enable_op_determinism()
        else:
            disable_op_determinism()

    def build(self, member: Member, functions: UserFunctions, group: Group, sample: Samples) -> KerasNetwork:
        """Call ``model_fn`` and create all variables.

        Raises
        ------
        BadInputError
            If ``model_fn`` returns anything but a compiled Keras model.
        """
        model = compiled_model(functions.model_fn(dict(member.config)), member.name)
        return KerasNetwork(model, member, functions, group, make_variables(model, *sample))

    def load(self) -> None:
        """Import Horovod."""
        horovod()

    def initialize(self, group: ProcessGroup) -> None:
        """Start Horovod over Gloo, whose worlds can be formed repeatedly, unlike MPI's.

        Raises
        ------
        BadInputError
            If rank 0 is at an IPv6 address: Horovod would end the process without a message.
        """
        if ":" in group.host:
            raise TransientInputError(
                f"Horovod's ranks meet over IPv4 only, but rank 0 of the group is at {group.host}",
                "name an interface with an IPv4 address in `network: {control: [..]}` of the site file",
            )
        found = None
        if group.rank == 0:
            # All ranks count as on one host; only hierarchical operations care, and they are off.
            alone = {f"cross_{rank}": 1 for rank in range(group.size)}
            scopes = {"global": group.size, f"local_{HOST}": group.size, **alone}
            found = self._rendezvous.enter_context(horovod_rendezvous(scopes, group.host))
        os.environ.update(
            {
                # As Horovod's own launcher does if all ranks are on one host.
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(group.hang_s)),
                "HOROVOD_HOSTNAME": HOST,
                "HOROVOD_RANK": str(group.rank),
                "HOROVOD_SIZE": str(group.size),
                "HOROVOD_LOCAL_RANK": str(group.rank),
                "HOROVOD_LOCAL_SIZE": str(group.size),
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "1",
                **group.broadcast(found),
            }
        )
        with gloo_over("HOROVOD_GLOO_IFACE", group.interface):
            horovod().init()

    def shutdown(self) -> None:
        """Shut down Horovod."""
        horovod().shutdown()
        self._rendezvous.close()

    def backend(self) -> str:
        """Return NCCL if Horovod supports it and there is a GPU, else Gloo, through the host's memory."""
        has_gpu = bool(tf.config.get_visible_devices("GPU"))
        return NCCL if has_gpu and horovod().nccl_built() else GLOO

    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that sums zeros."""
        values = tf.zeros(count)

        def run() -> None:
            horovod().allreduce(values, op=horovod().Sum, name="all_reduce")
            # Operations on a GPU return before they are done.
            tf.test.experimental.sync_devices()

        return run

    def gpu_memory(self) -> int:
        """Return the bytes of the first visible GPU, from the node: TensorFlow does not tell them."""
        if not self.peak_gpu_memory():
            return 0
        return next((gpu.memory or 0 for gpu in visible_gpus(gpus_of_node(), os.environ)), 0)

    def peak_gpu_memory(self) -> int:
        """Return the peak of the bytes of all tensors."""
        if not tf.config.list_physical_devices("GPU"):
            return 0
        return int(tf.config.experimental.get_memory_info(GPU)["peak"])

    def reset_peak_memory(self) -> None:
        """Restart the allocator's measurement of the peak."""
        if tf.config.list_physical_devices("GPU"):
            tf.config.experimental.reset_memory_stats(GPU)

    def memory_gauge(self, device: int | None) -> MemoryGauge:
        """Return a gauge of its allocator, or of the process."""
        if not tf.config.list_physical_devices("GPU"):
            return PoolMemory() if has_pool() else MemoryGauge()

        def allocated() -> int:
            return int(tf.config.experimental.get_memory_info(GPU)["current"])

        def there_and_back(array: Tensor) -> None:
            with tf.device(GPU):
                tf.identity(array).numpy()

        return GpuMemory(
            device=device or 0,
            allocated=allocated,
            # TensorFlow hides what its allocator has reserved; before the first layer that is hardly more.
            reserved=allocated,
            wait=tf.test.experimental.sync_devices,
            there_and_back=there_and_back,
        )

    def remove_temporary_files(self) -> None:
        """Remove the code that AutoGraph has made, such as of Horovod's and input pipelines' functions.

        AutoGraph removes sources in an exit handler, which ranks do not run, and never removes bytecode.
        """
        for name, module in list(sys.modules.items()):
            if name.startswith(CONVERTED):
                for file in filter(None, (module.__file__, module.__cached__)):
                    with suppress(OSError):
                        Path(file).unlink()

    def clear(self) -> None:
        """Delete graphs and names, and collect their garbage."""
        with unused_gradients_released():
            # It collects garbage itself: another collection found nothing, and took 3 ms.
            keras.backend.clear_session()


FRAMEWORK = TensorFlow()


GPU, CPU = "GPU:0", "CPU:0"
"""The only GPU that set_visible_devices() leaves, and the CPU."""
CUSTOM_GRADIENT = "CustomGradient-"
"""Prefix of the names under which TensorFlow registers gradients of a graph."""
GRADIENTS = "_hetctl_custom_gradients"
"""Attribute of a graph with the gradients registered for it."""
POOLED_BYTES = 2**20
"""Size of a tensor in oneDNN's pool; tensors below 256 KiB are the C library's."""


class PoolMemory(MemoryGauge):
    """Memory of TensorFlow on a slot, by its own count.

    oneDNN's pool keeps freed memory: the resident memory would hide what the next passes need.
    """

    def context_bytes(self) -> int:
        """Return the resident memory: no samples are loaded yet."""
        return super().used()

    def used(self) -> int:
        """Return the bytes of all tensors."""
        return int(tf.config.experimental.get_memory_info(CPU)["current"])

    def reset_peak(self) -> None:
        """Restart TensorFlow's measurement of the peak."""
        tf.config.experimental.reset_memory_stats(CPU)

    def peak(self) -> int:
        """Return the peak of the bytes of all tensors."""
        return int(tf.config.experimental.get_memory_info(CPU)["peak"])


def has_pool() -> bool:
    """Return true if TensorFlow counts tensors in the node's memory, as oneDNN's pool does."""
    tensor = tf.zeros(POOLED_BYTES, tf.uint8)
    try:
        counted: int = tf.config.experimental.get_memory_info(CPU)["current"]
    except ValueError:  # It runs without oneDNN.
        return False
    return counted >= int(tf.size(tensor))


@contextmanager
def unused_gradients_released() -> Iterator[None]:
    """Let garbage be collected that TensorFlow's registry of gradients refers to.

    TensorFlow registers each call of `tf.custom_gradient` in a graph for good, and with it the graph, its
    weights and the optimizer's state. Every compiled step has one: Keras' optimizers call `all_reduce` of a
    `ReplicaContext`. Inside the block only graphs refer to their gradients. The gradients of graphs that
    survive are registered again: their backward passes may still come.
    """
    registered = gradient_registry._registry
    graphs = []
    for name in [name for name in registered if name.startswith(CUSTOM_GRADIENT)]:
        if (graph := _graph_of(registered[name]["type"])) is not None:
            setattr(graph, GRADIENTS, {**getattr(graph, GRADIENTS, {}), name: registered.pop(name)})
            graphs.append(weakref.ref(graph))
            del graph
    try:
        yield
    finally:
        for reference in graphs:
            if (graph := reference()) is not None:
                registered.update(getattr(graph, GRADIENTS))


def _graph_of(gradient: Callable[..., Any]) -> Any:
    """Return the graph for which a gradient was made, or None.

    The registered function calls another one, which refers to the graph's results.
    """
    functions: list[Callable[..., Any]] = [gradient]
    functions += filter(inspect.isfunction, _captured(gradient))
    captured = tf.nest.flatten([list(_captured(function)) for function in functions])
    return next((one.graph for one in captured if tf.is_tensor(one) and tf.is_symbolic_tensor(one)), None)


def _captured(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the values of a function's closure."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It has no value yet.
            yield cell.cell_contents
