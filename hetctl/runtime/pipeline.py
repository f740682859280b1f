"""From what ``input_fn`` returned to this rank's batches: shared or not, with preprocessors or without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetctl.core.errors import BadInputError
from hetctl.core.run import CACHED, NONE
from hetctl.runtime.feeds import ArrayFeed, Feed, Kitchen, Lockstep, LockstepFeed, RingFeed, Samples
from hetctl.runtime.preprocessors import Preprocessors, layout_of
from hetctl.runtime.sharing.cached import CachedSource
from hetctl.runtime.sharing.node_folder import node_folder
from hetctl.runtime.sources import ArraySource, Source
from hetctl.runtime.stream import Stream, sample_rng

OpenFeed = Callable[[Stream], Feed]


@dataclass(frozen=True)
class Sharing:
    """How a rank comes by prepared samples.

    Parameters
    ----------
    mode : str
        ``none``, ``cached`` or ``lockstep``.
    folder : str
        Name of the folder that those who share use in the node's memory.
    preprocessors : int
        Processes that this rank forks.
    lockstep : Lockstep or None
        In lockstep, the stream that all train on.
    """

    mode: str = NONE
    folder: str = "alone"
    preprocessors: int = 1
    lockstep: Lockstep | None = None


def open_pipeline(source: Source, seed: int, sharing: Sharing, stack: ExitStack) -> OpenFeed:
    """Start what prepares samples; return what makes a feed of it, for any stream of them.

    Must be called before MPI or a framework has started threads, since it forks. Arrays need neither
    preprocessors nor a store: the processes of a node share their pages of memory as it is.

    Parameters
    ----------
    stack : ExitStack
        Ends all of it.
    """
    if isinstance(source, ArraySource):
        arrays = source
        return lambda stream: ArrayFeed(arrays, stream)
    folder = stack.enter_context(node_folder(sharing.folder))
    shared = cached(source, folder, "training") if sharing.mode == CACHED else source
    layout = layout_of(shared, seed)
    preprocessors = Preprocessors(shared, layout, sharing.preprocessors)
    stack.callback(preprocessors.stop)
    kitchen = Kitchen(layout, preprocessors, folder, first_sample(shared, seed))

    def open_feed(stream: Stream) -> Feed:
        together = sharing.lockstep
        feed = LockstepFeed(stream, kitchen, together) if together else RingFeed(stream, kitchen)
        stack.callback(feed.close)
        return feed

    return open_feed


def cached(source: Source, folder: Path, name: str) -> Source:
    """Share prepared samples with all who use the folder, if there is room for them."""
    try:
        return CachedSource(source, folder / f"{name}.samples", name)
    except BadInputError as error:
        print(f"samples are not shared: {error.message}", file=sys.stderr, flush=True)
        return source


def first_sample(source: Source, seed: int) -> Samples:
    """Return a batch of one."""
    x, y = source.prepare(0)
    return source.augment(x, sample_rng(seed, 1, 0))[None], y[None]


def all_samples(source: Source, seed: int) -> Samples:
    """Return all samples in memory, for an evaluation; the random part is the same every time."""
    if isinstance(source, ArraySource):
        return source.x, source.y
    layout = layout_of(source, seed)
    x = np.empty((len(source), *layout.spec.x_shape), layout.spec.x_dtype)
    y = np.empty((len(source), *layout.spec.y_shape), layout.spec.y_dtype)
    for number in range(len(source)):
        prepared, y[number] = source.prepare(number)
        x[number] = source.augment(prepared, sample_rng(seed, 0, number))
    return x, y
