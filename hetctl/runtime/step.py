"""What trainers and measurements have in common: one rank of a step, from launch to exit."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.core.ensemble import Ensemble, Member
from hetctl.core.errors import HetctlError
from hetctl.core.events import EventWriter
from hetctl.runtime.data import Samples, split_data
from hetctl.runtime.frameworks import Framework, Network, load_framework
from hetctl.runtime.functions import UserFunctions, load_functions
from hetctl.runtime.group import Group, bind_device, join_group

LAUNCHED_AT = "HETCTL_STEP_LAUNCHED_AT"
"""Set by whoever launches a step: seconds since the epoch."""


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
    training: Samples
    validation: Samples


def launched_at() -> float:
    """Return when the step was launched, in seconds since the epoch."""
    return float(os.environ.get(LAUNCHED_AT) or time.time())


def build_rank(ensemble: Ensemble, member: Member, gpus: int, device: str) -> Rank:
    """Bind the device, meet the group, load the data, build the network."""
    cores = bind_device(device, gpus)
    group = join_group(gpus)
    framework = load_framework(ensemble.framework)
    framework.prepare(cores, member.seed)
    functions = load_functions(ensemble)
    training, validation = split_data(functions.input_fn(ensemble.data))
    sample = training[0][: member.batch_size], training[1][: member.batch_size]
    network = framework.build(member, functions, group, sample)
    return Rank(group, framework, functions, network, training, validation)


def reporter(folder: Path, source: str, group: Group) -> Any:
    """Return rank 0's event writer, and a silent one for the others."""
    return EventWriter(folder, source) if group.rank == 0 else _Silent()


def run_step(body: Callable[[], Group], folder: Path, source: str) -> int:
    """Run a step's body; an error becomes a ``failed`` event, and the exit code 1.

    Parameters
    ----------
    body : callable
        Returns the group that is to be left in order.
    """
    try:
        body().leave()
    except Exception as error:
        traceback.print_exc()
        EventWriter(folder, source).write("failed", error=_summary(error))
        _abort_world()
        return 1
    return 0


def _summary(error: Exception) -> str:
    if isinstance(error, HetctlError):
        return " ".join(filter(None, (error.message, f"({error.hint})" if error.hint else "")))
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


def _abort_world() -> None:
    """End the other ranks too: they would wait for this one for ever."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        mpi.COMM_WORLD.Abort(1)
