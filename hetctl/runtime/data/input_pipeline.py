"""Pipelines from the data of ``input_fn`` to ranks' batches: shared or not, with or without preprocessors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from hetctl.model.errors import BadInputError, HetctlError, TransientInputError
from hetctl.model.run import CACHED, NONE
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import (
    CHECK_S,
    HELP_S,
    ArrayLoader,
    Batch,
    Loader,
    LockstepLoader,
    PreprocessorPool,
    RingLoader,
    Samples,
    StreamLoader,
)
from hetctl.runtime.data.named_arrays import CollatedSource
from hetctl.runtime.data.preprocessors import FILE_SYSTEM, Preprocessors
from hetctl.runtime.data.round_inputs import Lockstep
from hetctl.runtime.data.sampler import Chunk, Order, Stream, parts_of
from hetctl.runtime.data.shards import ShardPlan, ShardReader, ShardSource, Span
from hetctl.runtime.data.sharing.node_folder import node_folder
from hetctl.runtime.data.sharing.store import SampleStore
from hetctl.runtime.data.sources import (
    ArraySource,
    SampleSource,
    Source,
)

BATCHES_AHEAD = 2
"""Batches that are made while the trainer uses another one."""

Make = Callable[[], Samples]


class ThreadedLoader(StreamLoader):
    """Batches that a thread makes ahead, each in memory of its own.

    They are dropped if the sizes change, or another place is requested.

    Parameters
    ----------
    patience_s : float
        Time limit in seconds for a batch.
    """

    def __init__(self, source: CollatedSource | ShardSource, stream: Stream, patience_s: float) -> None:
        super().__init__(source.sample, stream)
        self._patience_s = patience_s
        self._ahead: deque[tuple[Future[Samples], Chunk]] = deque()
        self._in_use = 0
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def split(self, sizes: tuple[int, ...]) -> None:
        """Use these sizes from the next chunk on."""
        if sizes != self._stream.split:
            self._drop(self._in_use)
        super().split(sizes)

    def close(self) -> None:
        """Let the thread end after the batch that it is making, which is not awaited."""
        self._drop(0)
        self._maker.shutdown(wait=False)

    def _begin(self, order: Order, start: int) -> None:
        self._drop(0)
        super()._begin(order, start)

    def _next(self) -> Batch:
        while len(self._ahead) <= BATCHES_AHEAD:
            chunk, make = self._plan(self._position + len(self._ahead))
            self._ahead.append((self._maker.submit(make), chunk))
        made, chunk = self._ahead[0]
        if not wait([made], self._patience_s).done:
            raise HetctlError(f"no batch was made in {self._patience_s:g} s", FILE_SYSTEM)
        self._in_use = 1
        return made.result(), chunk

    def _release(self, _chunk: Chunk) -> None:
        self._ahead.popleft()
        self._in_use = 0

    def _plan(self, position: int) -> tuple[Chunk, Make]:
        """Return the chunk at a position, and a function that makes its batch."""
        raise NotImplementedError

    def _drop(self, kept: int) -> None:
        """Drop all batches made ahead but the first `kept`."""
        while len(self._ahead) > kept:
            self._ahead.pop()[0].cancel()


class CollatedLoader(ThreadedLoader):
    """Batches of a `CollatedSource`.

    A batch is made from sample numbers, so the chunks of an epoch, their order, and the ranks' shares are
    those of arrays.
    """

    def __init__(self, source: CollatedSource, stream: Stream, patience_s: float) -> None:
        super().__init__(source, stream, patience_s)
        self._source = source

    def _plan(self, position: int) -> tuple[Chunk, Make]:
        chunk = self._running.at(position)
        numbers = chunk.numbers.tolist()
        return chunk, partial(self._source.batch, numbers) if numbers else lambda: self.sample


class ShardLoader(ThreadedLoader):
    """Batches of a `ShardSource`.

    The order of a chunk names the shards begun after it and their rests, so training continues at the right
    sample with any number of ranks.
    """

    def __init__(self, source: ShardSource, stream: Stream, patience_s: float) -> None:
        super().__init__(source, stream, patience_s)
        self._source = source
        self._plans: dict[int, ShardPlan] = {}
        self._readers: dict[tuple[int, int], ShardReader] = {}

    def is_in_order(self, ranks: int) -> bool:  # noqa: ARG002
        """Return false: the order depends on the number of ranks."""
        return False

    def _order_at(self, epoch: int, start: int) -> Order:
        """Return the order after the first chunks of an epoch, if it is trained with the present sizes."""
        plan = self._plan_at((self._stream.seed, epoch))
        while start > plan.start:
            self._pieces(plan, min(plan.start + self._stream.chunk, start))
        return plan.order

    def _begin(self, order: Order, start: int) -> None:
        self._drop(0)
        self._position = 0
        self._plans = {-1: (plan := self._plan_at(order))}
        if plan.start != start:
            raise TransientInputError(
                f"the shards have {self.samples - plan.start} samples left in epoch {order[1]}, where the"
                f" checkpoint has {self.samples - start}",
                "give the shards with which it was begun, or start a new run with `hetctl submit --new`",
            )

    def _release(self, chunk: Chunk) -> None:
        super()._release(chunk)
        del self._plans[self._position - 1]

    def _plan(self, position: int) -> tuple[Chunk, Make]:
        plan = self._plans[position - 1].copy()
        if plan.start == self.samples:
            plan = self._plan_at((plan.order[0], plan.order[1] + 1))
        start, stop = plan.start, min(plan.start + self._stream.chunk, self.samples)
        mine = self._pieces(plan, stop)[self._stream.rank]
        self._plans[position] = plan
        chunk = Chunk(plan.order, start, stop, self._source.numbers([span for _, span in mine]))
        return chunk, partial(self._made, mine) if mine else lambda: self.sample

    def _plan_at(self, order: Order) -> ShardPlan:
        return ShardPlan(order, self._source.sizes, self._stream.ranks * self._source.mix)

    def _pieces(self, plan: ShardPlan, stop: int) -> list[list[tuple[int, Span]]]:
        """Take a chunk from the plan; return the spans of each rank, each with its lane."""
        mix, pieces, lane = self._source.mix, [], 0
        for samples in parts_of(stop - plan.start, self._stream.sizes or (1,) * self._stream.ranks):
            counts = enumerate(parts_of(samples, (1,) * mix), start=lane)
            pieces.append([(lane, span) for lane, count in counts for span in plan.assign(lane, count)])
            lane += mix
        return pieces

    def _made(self, pieces: list[tuple[int, Span]]) -> Samples:
        """Return a batch, in the thread; shards that were not read lately are closed."""
        kept = (BATCHES_AHEAD + 2) * sum(len(span) for _, span in pieces)
        samples = []
        for key, span in (((lane, span.shard), span) for lane, span in pieces):
            # The last entry is the reader used last.
            reader = self._readers.pop(key) if key in self._readers else ShardReader(self._source, span.shard)
            self._readers[key] = reader
            samples += reader.read(span.start, span.stop, kept)
        while len(self._readers) > 2 * self._source.mix:
            self._readers.pop(next(iter(self._readers))).close()
        return self._source.batch(samples)


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
    check_s, help_s : float
        Waits in seconds of its loaders, as in `PreprocessorPool`.
    """

    mode: str = NONE
    folder: str = "alone"
    preprocessors: int = 1
    timeouts: Timeouts = USUAL_TIMEOUTS
    check_s: float = CHECK_S
    help_s: float = HELP_S


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
    pool = PreprocessorPool(
        forked, folder, None, sharing.timeouts, heartbeat, sharing.check_s, sharing.help_s
    )

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
