"""Deep learning frameworks: one entry each, with all that is needed before a framework is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrameworkEntry:
    """Properties of one framework.

    Parameters
    ----------
    name : str
        Value of `framework` in an ensemble file.
    module : str
        Module whose ``FRAMEWORK`` is a `hetctl.runtime.frameworks.Framework`, imported on first use.
    packages : tuple of str
        Packages that groups of several ranks import, its own first.
    preloaded : tuple of str
        Modules that ranks share with the template from which they are forked, in addition to `module`.
    withheld : tuple of str
        Packages that it imports if they are installed, for parts of it that no rank needs; hidden from it
        during its import.
    nccl_fix : str
        Next step where its groups of GPUs do not communicate through NCCL.
    can_divide : bool
        True if it can divide parameters, gradients and optimizer state among a member's GPUs (``shard``).
    out_of_memory : tuple of str
        Names of its error classes for full memory of a GPU or the node.
    full_memory : tuple of str
        Parts of messages of its other errors that mean full memory.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    nccl_fix: str
    preloaded: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    can_divide: bool = False
    out_of_memory: tuple[str, ...] = ()
    full_memory: tuple[str, ...] = ()


TENSORBOARD = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)
"""Modules for the first epoch of a member, whose import takes 30 ms of each rank beside PyTorch."""
TENSORFLOW = FrameworkEntry(
    name="tensorflow",
    module="hetctl.runtime.frameworks.tensorflow",
    packages=("tensorflow", "horovod"),
    nccl_fix="install a TensorFlow that sees the GPUs, and Horovod with HOROVOD_GPU_OPERATIONS=NCCL",
    preloaded=TENSORBOARD,
    # For keras.wrappers and keras.visualization: with SciPy and more, a third of the time of TensorFlow.
    withheld=("sklearn", "matplotlib"),
    out_of_memory=("ResourceExhaustedError",),
    # Of XLA, for which it has no class.
    full_memory=("RESOURCE_EXHAUSTED",),
)
PYTORCH = FrameworkEntry(
    name="pytorch",
    module="hetctl.runtime.frameworks.pytorch",
    packages=("torch",),
    nccl_fix="install a PyTorch for these GPUs: torch.cuda.is_available() is false on the nodes",
    # The first optimizer imports torch._dynamo, which takes two seconds.
    preloaded=("torch._dynamo", *TENSORBOARD),
    can_divide=True,
    out_of_memory=("OutOfMemoryError",),
    # Of the node's memory, and of a GPU's outside of its allocator, for which it has no class.
    full_memory=("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory"),
)
FRAMEWORKS: dict[str, FrameworkEntry] = {entry.name: entry for entry in (TENSORFLOW, PYTORCH)}
"""Frameworks by name, in order of preference where a job may choose."""
USUAL_FRAMEWORK = TENSORFLOW.name
"""Framework of ensembles that name none."""
