"""Samples for stages that read none: their inputs come from the stages before them."""

from __future__ import annotations

from collections.abc import Generator

from hetctl.runtime.data.loaders import Batch, Samples
from hetctl.runtime.data.sampler import Order


class NoBatches:
    """Loader of a rank without samples of its own; a `Loader`.

    Parameters
    ----------
    sample : tuple of array
        A batch with one sample.
    samples : int
        Samples of an epoch.
    """

    waited_s = 0.0

    def __init__(self, sample: Samples, samples: int) -> None:
        self.sample = sample
        self.samples = samples

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:  # noqa: ARG002
        """Yield nothing."""
        yield from ()

    def split(self, sizes: tuple[int, ...]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
