"""Memory of layers in TensorFlow, by the counts of its allocators, and its release between members."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.worker.measuring.layer_memory import GpuMemory, MemoryGauge, ProcessMemory

GPU, CPU = "GPU:0", "CPU:0"
"""The only GPU that set_visible_devices() has left, whichever it is on the node, and the CPU."""
CUSTOM_GRADIENT = "CustomGradient-"
"""Beginning of the names under which TensorFlow registers gradients that are made with a graph."""
POOLED_BYTES = 2**20
"""Size of a tensor in oneDNN's pool, which leaves those below 256 KiB to the C library."""


def memory_gauge(device: int | None) -> MemoryGauge:
    """Return the gauge for a rank's device, as in `Framework.memory_gauge`."""
    if tf.config.list_physical_devices("GPU"):
        return _gpu(device or 0)
    return PoolMemory() if has_pool() else ProcessMemory()


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
        synchronize=tf.test.experimental.sync_devices,
        there_and_back=there_and_back,
    )


class PoolMemory(ProcessMemory):
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


def forget_custom_gradients() -> None:
    """Forget the gradients that were made with the graphs of earlier members.

    TensorFlow keeps each call of `tf.custom_gradient` in a graph for good, and with it the graph, its weights
    and the optimizer's state. Every compiled step has one: Keras' optimizers call `all_reduce` of a
    `ReplicaContext`. They are looked up only while a graph is made.
    """
    registered = gradient_registry._registry
    for name in [name for name in registered if name.startswith(CUSTOM_GRADIENT)]:
        del registered[name]
