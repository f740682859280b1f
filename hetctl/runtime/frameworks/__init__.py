"""Deep learning frameworks behind one small interface: build, train, evaluate, save, restore."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt

from hetctl.core.ensemble import Member
from hetctl.core.errors import BadInputError
from hetctl.runtime.data import Batches
from hetctl.runtime.feeds import Samples
from hetctl.runtime.functions import UserFunctions
from hetctl.runtime.group import Group, Link

MODULES = {
    "tensorflow": "hetctl.runtime.frameworks.tensorflow",
    "pytorch": "hetctl.runtime.frameworks.pytorch",
}


class Network(Protocol):
    """A built network with its optimizer, on this rank."""

    def train(self, batches: Batches) -> float:
        """Train on the batches; return the mean training loss over them, equal on every rank."""

    def evaluate(self, samples: Samples) -> dict[str, float]:
        """Return ``val_*`` metrics, equal on every rank."""

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return all state: weights, optimizer, random generators of the layers.

        The arrays may be the network's own, which change with the next step.
        """

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `save` returned."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""


class Framework(Link, Protocol):
    """What a module of this package provides under the name ``FRAMEWORK``."""

    def version(self) -> str:
        """Name and version, as kept with a profile."""

    def prepare(self, cores: tuple[int, ...], seed: int) -> None:
        """Limit threads to the cores, which are always the same, and seed the generators."""

    def clear(self) -> None:
        """Let go of what a member has left behind, before the next one is built."""

    def build(self, member: Member, functions: UserFunctions, group: Group, sample: Samples) -> Network:
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
