"""Deep learning frameworks behind one small interface: build, train, evaluate, save, restore."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Protocol

import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.worker.group import CollectiveBackend, Group
from hetctl.runtime.worker.user_functions import UserFunctions

MODULES = {
    "tensorflow": "hetctl.runtime.frameworks.tensorflow",
    "pytorch": "hetctl.runtime.frameworks.pytorch",
}
PACKAGES_OF_GROUPS = {"tensorflow": ("tensorflow", "horovod"), "pytorch": ("torch",)}
"""Packages without which a group of several ranks cannot be formed."""
NCCL, GLOO = "nccl", "gloo"
"""Libraries by which groups exchange gradients: from GPU to GPU, and through the memory of their nodes."""

BEFORE_A_FORK = {
    "tensorflow": (MODULES["tensorflow"],),
    # The first optimizer imports torch._dynamo, which takes two seconds.
    "pytorch": (MODULES["pytorch"], "torch._dynamo"),
}
"""Modules that ranks share with the template from which they are forked."""


class TrainableNetwork(Protocol):
    """A built network with its optimizer, on this rank."""

    def train(self, batches: Batches) -> float:
        """Train on the batches; return the mean training loss over them, equal on every rank."""

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Return ``val_*`` metrics over all ranks' batches, equal on every rank.

        Parameters
        ----------
        batches : iterable of (Samples, int)
            This rank's, each with its number of samples: where that is 0, the batch does not count.
        """

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return all state: weights, optimizer, random generators of the layers.

        The arrays may be the network's own, which change with the next step.
        """

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `save` returned."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""


class Framework(CollectiveBackend, Protocol):
    """What a module of this package provides under the name ``FRAMEWORK``."""

    def version(self) -> str:
        """Name and version, as kept with a profile."""

    def prepare(self, cores: tuple[int, ...], device: int | None, seed: int) -> None:
        """Limit threads to the cores, choose the GPU, and seed the generators.

        Parameters
        ----------
        cores : tuple of int
            The same in every call.
        device : int or None
            Index of the rank's GPU among those in sight, the same in every call; None without one.
        """

    def clear(self) -> None:
        """Let go of what a member has left behind, before the next one is built."""

    def backend(self) -> str:
        """Return the library by which the group of this rank exchanges gradients: `NCCL` or `GLOO`."""

    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that adds up `count` 32-bit numbers over all ranks, and waits for the sums.

        The numbers are where gradients would be: on the GPU, if the framework sees one.
        """

    def unreached(self, device: int, devices: int) -> tuple[int, ...]:
        """Return the devices of this node that the rank's GPU has no direct access to, as far as is known.

        Parameters
        ----------
        device : int
            Index of the rank's own, as in `prepare`.
        devices : int
            How many the node has.
        """

    def build(
        self, member: Member, functions: UserFunctions, group: Group, sample: Samples
    ) -> TrainableNetwork:
        """Build a member's network; `sample` is one batch, for layers that wait for their input."""


def load_framework(name: str) -> Framework:
    """Import a framework; only now does it cost its start-up time.

    Raises
    ------
    BadInputError
        If it is not installed.
    """
    try:
        framework: Framework = importlib.import_module(MODULES[name]).FRAMEWORK
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"framework {name} cannot be imported: {error}", "install it as docs/install.md says"
        ) from None
    return framework


def framework_of_groups() -> str | None:
    """Return the first framework of which this Python has all that groups take; None without any."""
    there = (name for name, packages in PACKAGES_OF_GROUPS.items() if all(map(find_spec, packages)))
    return next(there, None)


def preload_framework(name: str | None) -> None:
    """Import what ranks of a framework need; in each rank `load_framework` reports what is missing."""
    with suppress(ImportError):
        for module in BEFORE_A_FORK.get(name or "", ()):
            importlib.import_module(module)
