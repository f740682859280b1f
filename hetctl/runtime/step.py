"""What trainers and measurements have in common: one rank of a step, from launch to exit."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.core.ends import EXIT_CODES, Why
from hetctl.core.ensemble import Ensemble, Member
from hetctl.core.errors import HetctlError
from hetctl.core.events import EventWriter
from hetctl.runtime.feeds import Feed, Samples
from hetctl.runtime.frameworks import Framework, Network, load_framework
from hetctl.runtime.functions import UserFunctions, load_functions
from hetctl.runtime.group import Group, bind_device, join_group
from hetctl.runtime.machine import peak_memory
from hetctl.runtime.pipeline import Sharing, all_samples, open_pipeline
from hetctl.runtime.sources import as_sources
from hetctl.runtime.steady import DISK_FULL_ERRORS
from hetctl.runtime.stream import Stream

LAUNCHED_AT = "HETCTL_STEP_LAUNCHED_AT"
"""Set by whoever launches a step: seconds since the epoch."""

OUT_OF_MEMORY_ERRORS = frozenset({"MemoryError", "ResourceExhaustedError", "OutOfMemoryError"})
"""Python's and NumPy's, TensorFlow's, PyTorch's: by name, since only one framework is ever loaded."""

FULL_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What PyTorch says of the node's memory, for which it has no class."""

ALONE = Sharing()


class _Silent:
    """Where the events of other ranks go."""

    def write(self, kind: str, **data: Any) -> None:
        """Ranks other than 0 report nothing."""


@dataclass(frozen=True)
class Rank:
    """One rank of a step with everything built."""

    group: Group
    framework: Framework
    functions: UserFunctions
    network: Network
    training: Feed
    validation: Samples


def launched_at() -> float:
    """Return when the step was launched, in seconds since the epoch."""
    return float(os.environ.get(LAUNCHED_AT) or time.time())


def build_rank(
    ensemble: Ensemble,
    member: Member,
    gpus: int,
    device: str,
    stack: contextlib.ExitStack,
    sharing: Sharing = ALONE,
) -> Rank:
    """Bind the device, load the data, meet the group, build the network.

    Parameters
    ----------
    stack : ExitStack
        Gives back what was taken of the node.
    """
    cores = bind_device(device, gpus)
    framework = load_framework(ensemble.framework)
    framework.prepare(cores, member.seed)
    functions = load_functions(ensemble)
    training, validation = as_sources(functions.input_fn(ensemble.data))
    open_feed = open_pipeline(training, member.seed, sharing, stack)
    group = join_group(gpus, framework)
    chunk = member.batch_size * group.size
    feed = open_feed(Stream(len(training), chunk, member.seed, rank=group.rank, ranks=group.size))
    network = framework.build(member, functions, group, feed.sample)
    # Rank 0 evaluates for all.
    evaluated = all_samples(validation, member.seed) if group.rank == 0 else feed.sample
    return Rank(group, framework, functions, network, feed, evaluated)


def reporter(folder: Path, source: str, group: Group) -> Any:
    """Return rank 0's event writer, and a silent one for the others."""
    return EventWriter(folder, source) if group.rank == 0 else _Silent()


def run_step(body: Callable[[], Group], folder: Path, source: str) -> int:
    """Run a step's body; an error becomes a ``failed`` event, and one of the `EXIT_CODES`.

    Parameters
    ----------
    body : callable
        Returns the group that is to be left in order.
    """
    try:
        body().leave()
    except Exception as error:
        traceback.print_exc()
        why = why_failed(error)
        with contextlib.suppress(OSError):
            EventWriter(folder, source).write(
                "failed", error=_summary(error), why=why.value, peak_memory_bytes=peak_memory()
            )
        _abort_world(EXIT_CODES[why])
        return EXIT_CODES[why]
    return 0


def why_failed(error: BaseException) -> Why:
    """Tell a full memory or disk from an error of the program."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return Why.DISK_FULL
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & OUT_OF_MEMORY_ERRORS or FULL_MEMORY in str(error):
        return Why.OUT_OF_MEMORY
    return Why.PROGRAM_ERROR if error.__cause__ is None else why_failed(error.__cause__)


def _summary(error: Exception) -> str:
    if isinstance(error, HetctlError):
        return " ".join(filter(None, (error.message, f"({error.hint})" if error.hint else "")))
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


def _abort_world(code: int) -> None:
    """End the other ranks too: they would wait for this one for ever."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        mpi.COMM_WORLD.Abort(code)
