"""Pipelines from the data of ``input_fn`` to ranks' batches: shared or not, with or without preprocessors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from hetctl.model.errors import BadInputError
from hetctl.model.run import CACHED, NONE
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import (
    USUAL_LOADER_WAITS,
    ArrayLoader,
    Loader,
    LoaderWaits,
    LockstepLoader,
    PreprocessorPool,
    RingLoader,
)
from hetctl.runtime.data.named_arrays import CollatedSource
from hetctl.runtime.data.preprocessors import Preprocessors
from hetctl.runtime.data.round_inputs import Lockstep
from hetctl.runtime.data.sampler import Stream, sample_rng
from hetctl.runtime.data.shards import ShardSource
from hetctl.runtime.data.sharing.node_folder import node_folder
from hetctl.runtime.data.sharing.store import SampleStore
from hetctl.runtime.data.sources import (
    WITHOUT_STORE,
    Array,
    ArraySource,
    SampleSource,
    SampleSpec,
    Source,
)
from hetctl.runtime.data.threaded_loaders import CollatedLoader, ShardLoader


@dataclass(frozen=True)
class Sharing:
    """Source of the prepared samples of a process, for any member.

    Parameters
    ----------
    mode : str
        Kind of sharing: ``none``, ``cached`` or ``lockstep``.
    folder : str
        Name of the folder in the node's memory that the sharing processes use.
    preprocessors : int
        Number of processes to fork: the largest number that any member may need.
    timeouts : Timeouts
        Time limits for batches and for the processes that share them.
    waits : LoaderWaits
        Waits of its loaders.
    """

    mode: str = NONE
    folder: str = "alone"
    preprocessors: int = 1
    timeouts: Timeouts = USUAL_TIMEOUTS
    waits: LoaderWaits = USUAL_LOADER_WAITS


OpenLoader = Callable[..., Loader]
"""Factory of loaders, used one after another: ``(stream, preprocessors=None, lockstep=None) -> Loader``.

`preprocessors` of the process's preprocessors work for it (None: all); `lockstep` is the stream on which all
members train. Close the previous loader first.
"""


def open_pipeline(
    source: Source,
    sharing: Sharing,
    stack: ExitStack,
    name: str = "training",
    heartbeat: Callable[[], None] = lambda: None,
) -> OpenLoader:
    """Start the preparation of samples; return a factory of loaders for any stream of them.

    Call it before a framework starts threads, since it forks. Arrays need neither preprocessors nor a store:
    forked processes share their memory pages. Batches of a ``collate_fn`` have no fixed size, and fit into no
    ring or store: each rank makes its own. Each rank also reads its own shards.

    Parameters
    ----------
    stack : ExitStack
        Stack that ends the pipeline.
    name : str
        Name of the samples among those that the node shares.
    heartbeat : callable
        Function called regularly while a loader waits for samples.
    """
    limit_s = sharing.timeouts.samples_s
    if own := OWN_LOADERS.get(type(source)):
        return lambda stream, *_: own(source, stream, limit_s)
    assert not isinstance(source, CollatedSource | ShardSource)
    folder = stack.enter_context(node_folder(sharing.folder))

    def share(source: SampleSource) -> SampleSource:
        # The random part stays with each member: they share samples before it.
        try:
            return SampleStore(source, folder / f"{name}.samples", name, limit_s)
        except BadInputError as error:
            print(f"samples are not shared: {error.message}", file=sys.stderr, flush=True)
        return source

    forked = Preprocessors(source, sharing.preprocessors, *([share] if sharing.mode == CACHED else []))
    stack.callback(forked.stop)
    pool = PreprocessorPool(forked, folder, None, sharing.timeouts, sharing.waits, heartbeat)

    def open_loader(
        stream: Stream, preprocessors: int | None = None, lockstep: Lockstep | None = None
    ) -> Loader:
        own = replace(pool, num_workers=preprocessors)
        return LockstepLoader(stream, own, lockstep) if lockstep else RingLoader(stream, own)

    return open_loader


OWN_LOADERS: Mapping[type, Callable[[Any, Stream, float], Loader]] = {
    ArraySource: lambda source, stream, _limit_s: ArrayLoader(source, stream),
    CollatedSource: CollatedLoader,
    ShardSource: ShardLoader,
}
"""Loaders of samples that each rank prepares itself, unshared."""


class ValidationSource:
    """Validation samples with the same random part in every evaluation of every member."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.spec = SampleSpec.of(*self.prepare(0), "sample 0")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def prepare(self, number: int) -> tuple[Array, Array]:
        """Return one sample's x and y, after the random part."""
        x, y = self._source.prepare(number)
        # Epochs count from 1: epoch 0 has random numbers that no training sample gets.
        return self._source.augment(x, sample_rng(0, 0, number)), y

    def augment(self, x: Array, _rng: np.random.Generator, _out: Array | None = None) -> Array:
        """Return x: the random part is already done."""
        return x


def open_validation(
    source: Source, sharing: Sharing, stack: ExitStack, heartbeat: Callable[[], None] = lambda: None
) -> OpenLoader:
    """Start the preparation of validation samples, as `open_pipeline` does for training samples."""
    held_out = source if isinstance(source, WITHOUT_STORE) else ValidationSource(source)
    return open_pipeline(held_out, sharing, stack, "validation", heartbeat)


def refuse_own_batches(loader: Loader, reader: str) -> None:
    """Refuse batches of a ``collate_fn`` or of shards where all must have one shape.

    Raises
    ------
    BadInputError
        If the loader yields such batches; `reader` names what needs one shape.
    """
    if type(loader) in OWN_BATCHES:
        kind, need = OWN_BATCHES[type(loader)]
        raise BadInputError(
            f"input_fn returned {kind}, and {reader} needs {need}",
            "return arrays or a dataset of pairs (x, y), or train the member without a pipeline",
        )


OWN_BATCHES: Mapping[type[Loader], tuple[str, str]] = {
    ShardLoader: ("Shards", "samples that can be read by number"),
    CollatedLoader: ("samples with a collate_fn", "batches of one shape"),
}
