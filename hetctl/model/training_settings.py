"""Settings of training: framework or command, interval of checkpoints, and balanced batches (LB-BSP)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Annotated, Any

from hetctl.model.file_keys import Bytes, Key
from hetctl.model.values import dataclass


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
        Modules besides `module` that ranks share with the template from which they are forked.
    withheld : tuple of str
        Optional packages that it imports for parts that no rank needs; they are hidden during its import.
    nccl_fix : str
        Next step if its groups of GPUs do not communicate through NCCL.
    can_divide : bool
        True if it can divide parameters, gradients and optimizer state among a member's GPUs (``shard``).
    can_fuse : bool
        True if it can train several members as one computation (``fuse``).
    endings : tuple of str
        Endings of the files of weights that it writes, the usual one first.
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
    can_fuse: bool = False
    endings: tuple[str, ...] = ()
    out_of_memory: tuple[str, ...] = ()
    full_memory: tuple[str, ...] = ()


FIRST_USE = {"torch": ("torch._dynamo",)}
"""Modules that packages import on their first use: PyTorch's first optimizer takes two seconds for it."""
TENSORBOARD = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)
"""Modules for a member's first epoch; importing them would take each rank 30 ms beside PyTorch."""
TENSORFLOW = FrameworkEntry(
    name="tensorflow",
    module="hetctl.runtime.frameworks.tensorflow",
    packages=("tensorflow", "horovod"),
    nccl_fix="install a TensorFlow that sees the GPUs, and Horovod with HOROVOD_GPU_OPERATIONS=NCCL",
    preloaded=TENSORBOARD,
    # keras.wrappers and keras.visualization import these, with SciPy: a third of TensorFlow's time.
    withheld=("sklearn", "matplotlib"),
    endings=(".keras", ".weights.h5"),
    out_of_memory=("ResourceExhaustedError",),
    # An error of XLA, for which it has no class.
    full_memory=("RESOURCE_EXHAUSTED",),
)
PYTORCH = FrameworkEntry(
    name="pytorch",
    module="hetctl.runtime.frameworks.pytorch",
    packages=("torch",),
    nccl_fix="install a PyTorch for these GPUs: torch.cuda.is_available() is false on the nodes",
    preloaded=(*FIRST_USE["torch"], *TENSORBOARD),
    can_divide=True,
    can_fuse=True,
    endings=(".pt", ".safetensors"),
    out_of_memory=("OutOfMemoryError",),
    # Errors of the node's memory, and of a GPU's outside its allocator, which have no class.
    full_memory=("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory"),
)
FRAMEWORKS: dict[str, FrameworkEntry] = {entry.name: entry for entry in (TENSORFLOW, PYTORCH)}
"""Frameworks by name, in order of preference where a job may choose."""
USUAL_FRAMEWORK = TENSORFLOW.name
"""Framework of functions whose module imports none."""


def missing_for_groups(framework: str) -> str | None:
    """Return the package that this Python lacks for members with several GPUs; None if it has all.

    None also without the framework itself: the members then train in another Python.
    """
    own, *of_groups = FRAMEWORKS[framework].packages if framework in FRAMEWORKS else ("",)
    if not of_groups or find_spec(own) is None:
        return None
    return next((package for package in of_groups if find_spec(package) is None), None)


def of_one_gpu(framework: str, device: str) -> str:
    """Return why members get one GPU each, and the next step, where `missing_for_groups` names a package."""
    return (
        f"members with framework {framework} get one {'slot' if device == 'slot' else 'GPU'} each, as"
        f" {sys.executable} has no package {missing_for_groups(framework)}; for more, install it as"
        " docs/install.md says"
    )


PLACEHOLDER = re.compile(r"\{(\{)?([A-Za-z_]\w*(?:\.\w+)*)\}(?(1)\})")
"""Name in braces, also one with dots; in two braces it is text, and so are other braces, as in JSON."""
CHECKPOINT_DIR = "checkpoint_dir"
"""Placeholder of the folder for checkpoints, which is a scratch folder in a profile."""
RESUME_FROM = "resume_from"
"""Placeholder of the checkpoint from which the command continues; empty if there is none."""
BUILT_IN = frozenset({"name", "seed", "batch_size", CHECKPOINT_DIR, RESUME_FROM})
"""Placeholders of all members; they take precedence over keys of a config."""


def placeholders(command: Iterable[str]) -> list[str]:
    """Return the names of the placeholders of a command, each once, in their order."""
    found = (match for word in command for match in PLACEHOLDER.findall(word))
    return list(dict.fromkeys(name for is_text, name in found if not is_text))


def filled(command: Iterable[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a command with values, as JSON unless they are text, in place of placeholders."""

    def text_of(found: re.Match[str]) -> str:
        if found[1]:
            return found[0][1:-1]
        value = values[found[2]]
        return value if isinstance(value, str) else json.dumps(value)

    return tuple(PLACEHOLDER.sub(text_of, word) for word in command)


@dataclass(frozen=True)
class Resume:
    """Start of a command that continues from a checkpoint.

    Parameters
    ----------
    checkpoint : str
        Pattern of the checkpoints in the folder for them, for a script that names none; the newest counts.
    options : tuple of str
        Words added to the command if there is a checkpoint.
    """

    checkpoint: str = ""
    options: tuple[str, ...] = ()


RANKS, NO_RANKS = "gpus", "none"
"""Ranks of a command: one on each GPU, or none, for a script that knows no ranks."""


PROGRESS_VARIABLE = "HETCTL_PROGRESS_FD"
"""Variable with the descriptor to which the script writes its reports, one line of JSON each."""
ANSWER_VARIABLE = "HETCTL_ANSWER_FD"
"""Variable with a descriptor that gives one byte for each line after hetctl has judged it."""
STOP_VARIABLE = "HETCTL_STOP_FD"
"""Variable with a descriptor whose other end is closed when the script has to stop."""
RESUME_VARIABLE = "HETCTL_RESUME_FROM"
"""Variable with the newest checkpoint that the script has named in an earlier start."""


EPOCHS, STEPS, SECONDS = "epochs", "steps", "seconds"
"""Units of intervals."""


@dataclass(frozen=True)
class CheckpointInterval:
    """Training after which the next checkpoint is due; by default an epoch.

    Parameters
    ----------
    every : int
        Number of units.
    unit : str
        `EPOCHS`, `STEPS` or `SECONDS`.
    """

    every: int = 1
    unit: str = EPOCHS

    @property
    def is_timed(self) -> bool:
        """True if it is a time."""
        return self.unit == SECONDS

    def saves_of_epoch(self, steps: float, seconds: float) -> float:
        """Return the number of checkpoints that an epoch of so many steps and seconds needs."""
        return {EPOCHS: 1.0, STEPS: steps, SECONDS: seconds}[self.unit] / self.every


EVERY_EPOCH = CheckpointInterval()


@dataclass(frozen=True)
class KeepSettings:
    """Numbers of checkpoints of finished epochs that stay, beside the newest two to go on from."""

    best: Annotated[
        int, Key("Number of the best epochs, by the metric of the stop rule, whose checkpoints stay.", ge=0)
    ] = 1
    last: Annotated[int, Key("Number of the last finished epochs whose checkpoints stay.", ge=1)] = 1
    predictions: Annotated[
        Bytes | None,
        Key(
            "Most bytes of validation predictions, with targets, that a checkpoint of a finished epoch has"
            " for `hetctl ensemble`, such as 256MiB; larger ones are left out; null: none."
        ),
    ] = 64 * 2**20


AUTO, ON, OFF = "auto", "on", "off"
BALANCE_MODES = (AUTO, ON, OFF)
MANAGERS = ("cpu", "gpu", "curve")
"""Managers of batch sizes: Algorithm 1 and Algorithm 2 of LB-BSP, and time curves learnt online."""
PREDICTORS = ("memoryless", "narx")
"""Predictors of speeds, for the manager ``cpu``."""


@dataclass(frozen=True)
class BalanceSettings:
    """Batch sizes that follow the speeds of a member's GPUs."""

    mode: Annotated[
        str,
        Key(
            "on, off, or auto: for groups on several types of GPU, and those that drift apart.",
            choices=BALANCE_MODES,
        ),
    ] = AUTO
    manager: Annotated[
        str,
        Key("Algorithm that sets the sizes: cpu and gpu are those of LB-BSP.", choices=MANAGERS),
    ] = "curve"
    predictor: Annotated[str, Key("Predictor of speeds of the manager cpu.", choices=PREDICTORS)] = "narx"
