"""Memory of layers in TensorFlow, by the counts of its allocators, and its release between members."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, MemoryGauge

GPU, CPU = "GPU:0", "CPU:0"
"""The only GPU that set_visible_devices() has left, whichever it is on the node, and the CPU."""
CUSTOM_GRADIENT = "CustomGradient-"
"""Beginning of the names under which TensorFlow registers gradients that are made with a graph."""
GRADIENTS = "_hetctl_custom_gradients"
"""Attribute of a graph with what is registered for it."""
POOLED_BYTES = 2**20
"""Size of a tensor in oneDNN's pool, which leaves those below 256 KiB to the C library."""


def memory_gauge(device: int | None) -> MemoryGauge:
    """Return the gauge for a rank's device, as in `Framework.memory_gauge`."""
    if tf.config.list_physical_devices("GPU"):
        return _gpu(device or 0)
    return PoolMemory() if has_pool() else MemoryGauge()


def _gpu(device: int) -> GpuMemory:
    def allocated() -> int:
        return int(tf.config.experimental.get_memory_info(GPU)["current"])

    def there_and_back(array: Tensor) -> None:
        with tf.device(GPU):
            tf.identity(array).numpy()

    return GpuMemory(
        device=device,
        allocated=allocated,
        # It does not tell what its allocator has taken; before the first layer that is hardly more.
        reserved=allocated,
        wait=tf.test.experimental.sync_devices,
        there_and_back=there_and_back,
    )


class PoolMemory(MemoryGauge):
    """Memory of TensorFlow on a slot, by its own count.

    The pool of oneDNN keeps what is freed: the resident memory would hide what the next passes need.
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
    """Return true if TensorFlow counts tensors in the node's memory, as the pool of oneDNN does."""
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
    `ReplicaContext`. Meanwhile the graphs alone refer to their gradients; those of graphs that are in use
    otherwise are registered again, since their backward passes may still have to be made.
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
    """Return the graph for which a gradient was made, None if it is not found.

    It is that of the results, to which the function that is called by the registered one refers.
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
