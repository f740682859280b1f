"""Batches of an epoch, as a ``train_fn`` iterates over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hetctl.runtime.data.loaders import Batch, Loader, Samples
from hetctl.runtime.data.sampler import Chunk, Order, micro_batches, parts_of
from hetctl.runtime.worker.group import Group

Arrays = tuple[npt.NDArray[Any], ...]
GO_ON, STOP, PAUSE = 0, 1, 2
"""Requests of rank 0 before a step."""


class StepBalancer(Protocol):
    """Batch sizes of a group that follow the speeds of its ranks.

    Attributes
    ----------
    sizes : tuple of int
        Samples of each rank in a full chunk.
    """

    sizes: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a full chunk."""

    def before_step(self, decision: int, left: int) -> int:
        """Return rank 0's decision; for `GO_ON`, set the sizes of this step, equal on every rank.

        Parameters
        ----------
        decision : int
            Decision of this rank: `GO_ON`, `STOP` or `PAUSE`; only that of rank 0 counts.
        left : int
            Samples of the epoch that are left.
        """


class Batches:
    """A rank's share of the batches of one epoch.

    Iteration ends with the epoch, or when `should_stop` or `should_pause` returns true on rank 0; `position`
    then is the number of the epoch's trained samples. After a pause and `resume`, another iteration continues
    with the same source. The request for a batch may overwrite the memory of the previous one.

    Parameters
    ----------
    start : int
        Samples of the epoch that were trained before.
    on_step : callable
        Function called after each step with the number of the epoch's samples that the group has trained.
    order : Order or None
        Order in which the samples before `start` were trained; updated with each chunk.
    balancer : StepBalancer or None
        Balancer of the group's batch sizes; None: they are constant.
    is_last : bool
        True if the epoch ends with these batches; False if other partitions are still to be visited.
    most : int or None
        Largest batch: a larger part of a chunk is split into batches whose gradients are added up; None: each
        part is one batch.
    in_step : bool
        Yield equally many batches of a chunk on every rank; batches without samples have weight 0.
    should_pause : callable
        Function that returns true on rank 0 if this iteration has to end for a checkpoint.

    Attributes
    ----------
    paused : bool
        True if the iteration has ended for a checkpoint.
    weight : float
        Share of the last batch in the samples of the group's chunk.
    ends_step : bool
        True if the last batch ends this rank's part of the chunk.
    waited_s : float
        Seconds for which this rank has waited for batches.

    A ``train_fn`` may set `loss`, in any type of its framework, for display.
    """

    def __init__(
        self,
        loader: Loader,
        epoch: int,
        start: int,
        group: Group,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None] = lambda _position: None,
        order: Order | None = None,
        balancer: StepBalancer | None = None,
        is_last: bool = True,
        most: int | None = None,
        should_pause: Callable[[], bool] = lambda: False,
        in_step: bool = False,
    ) -> None:
        self._loader = loader
        self.epoch = epoch
        self.order = order
        self._group = group
        self._should_stop = should_stop
        self._should_pause = should_pause
        self._source: Generator[Batch, None, None] | None = None
        self._on_step = on_step
        self._balancer = balancer
        self._is_last = is_last
        self._most = most
        self._in_step = in_step
        self.start = start
        self.position = start
        self.trained = 0
        self.waited_s = 0.0
        self.paused = False
        self.weight = 1.0
        self.ends_step = True
        self.loss: Any = None

    @property
    def batch_size(self) -> int | None:
        """Samples of this rank's largest batch; None if the group is not balanced."""
        return None if self._balancer is None else micro_batches(self._balancer.batch_size, self._most)[0]

    @property
    def share(self) -> float:
        """Share of this rank in the samples trained so far: |B_i| / X of LB-BSP, Equation 7."""
        done = self.position - self.start
        return self.trained / done if done else 1.0 / self._group.size

    @property
    def complete(self) -> bool:
        """True if all batches are trained."""
        return self.position == self._loader.samples

    @property
    def ends_epoch(self) -> bool:
        """True if the epoch is finished."""
        return self.complete and self._is_last

    def __iter__(self) -> Iterator[Samples]:
        batches = self._source or self._loader.batches(self.epoch, self.position, self.order)
        self._source = None
        try:
            while not self.complete and not self._must_end():
                began = time.perf_counter()
                samples, chunk = next(batches)
                self.waited_s += time.perf_counter() - began
                yield from self._parts(samples, chunk)
                # Set together: of shards, the order says what is left after the chunk.
                self.order, self.position = chunk.order, chunk.stop
                self.trained += len(chunk.numbers)
                self._on_step(self.position)
            if self.complete:
                next(batches, None)  # lets the loader go on to the next epoch
        finally:
            if self.paused:
                # A loader that is opened again amid an epoch would lose what is prepared ahead.
                self._source = batches
            else:
                batches.close()

    def resume(self) -> None:
        """Begin the next part of the epoch after a pause."""
        self.paused = False
        self.start, self.trained = self.position, 0

    def close(self) -> None:
        """Release what a pause has left open."""
        if self._source is not None:
            self._source.close()

    def _parts(self, samples: Samples, chunk: Chunk) -> Iterator[Samples]:
        """Yield the batches of this rank's part of a chunk; a rank without a share gets the example."""
        sizes = self._sizes(chunk)
        if len(sizes) == 1:
            self.weight, self.ends_step = sizes[0] / (chunk.stop - chunk.start), True
            yield samples
            return
        (x, y), done = samples, 0
        for number, size in enumerate(sizes, start=1):
            self.weight = size / (chunk.stop - chunk.start)
            self.ends_step = number == len(sizes)
            first = done if size else 0
            rows = slice(first, first + max(1, size))
            yield x[rows], y[rows]
            done += size

    def _sizes(self, chunk: Chunk) -> tuple[int, ...]:
        own = len(chunk.numbers)
        if not self._in_step:
            return micro_batches(own, self._most)
        largest = -(-(chunk.stop - chunk.start) // self._group.size)
        return parts_of(own, (1,) * len(micro_batches(largest, self._most)))

    def _must_end(self) -> bool:
        """Return true if rank 0 decides to end: ranks that stop at different steps leave others waiting."""
        decision = STOP if self._should_stop() else PAUSE if self._should_pause() else GO_ON
        if self._balancer is None:
            decision = int(self._group.broadcast(decision))
        else:
            before = self._balancer.sizes
            decision = self._balancer.before_step(decision, self._loader.samples - self.position)
            if decision == GO_ON and self._balancer.sizes != before:
                self._loader.split(self._balancer.sizes)
        self.paused = decision == PAUSE
        return decision != GO_ON


class TrainingData:
    """Batches for a ``train_fn``, each in the types of its framework.

    Iteration yields pairs (x, y); the last one of an epoch may be smaller. A compiled step would be traced
    again for that shape: `padded` yields batches of one size.

    Parameters
    ----------
    batch_size : int
        Samples of this rank's largest batch, if the group is not balanced.
    convert : callable
        Function called with the arrays of each batch just before it is trained.
    on_batch : callable
        Function called before `convert` with the number of samples in the batch.
    """

    def __init__(
        self,
        batches: Batches,
        batch_size: int,
        convert: Callable[[Arrays], Any] = lambda arrays: arrays,
        on_batch: Callable[[int], None] = lambda _samples: None,
    ) -> None:
        self._batches = batches
        self._batch_size = batch_size
        self._convert = convert
        self._on_batch = on_batch
        self.samples = 0
        """Samples in the batch that was yielded last, without padding."""
        self.counted = 0
        """Like `samples`, but 0 for the example that a rank without a share trains."""

    @property
    def loss(self) -> Any:
        """Loss of the last batch."""
        return self._batches.loss

    @loss.setter
    def loss(self, value: Any) -> None:
        self._batches.loss = value

    @property
    def ends_step(self) -> bool:
        """True if the optimizer takes a step after the last batch; else more batches of the step follow."""
        return self._batches.ends_step

    def __iter__(self) -> Iterator[Any]:
        for samples in self._taken():
            yield self._convert(samples)

    def padded(self) -> Iterator[Any]:
        """Yield triples (x, y, weights) that all have the rows of a full batch.

        Missing rows repeat samples with weight 0. The samples' own weights make the mean over the rows that
        over the samples. Batch normalisation ignores repetitions. A balanced batch that has grown since the
        epoch began has more rows.
        """
        # Measured with TensorFlow: the trace for a smaller last batch took 0.54 s among steps of 20 ms.
        rows = self._batches.batch_size or self._batch_size
        for samples in self._taken():
            x, y = pad(samples, rows)
            yield self._convert((x, y, weights_of(self.samples, len(x))))

    def _taken(self) -> Iterator[Samples]:
        for samples in self._batches:
            self.samples = len(samples[0])
            self.counted = self.samples if self._batches.weight else 0
            self._on_batch(self.samples)
            yield samples


def validation_batches(
    loader: Loader, epoch: int, on_step: Callable[[], None]
) -> Iterator[tuple[Samples, int]]:
    """Yield a rank's batches of the validation samples, each with its number of samples, which may be 0.

    Parameters
    ----------
    epoch : int
        Epoch counted from 1; loaders prepare the samples of the next one ahead.
    on_step : callable
        Function called after each batch.
    """
    with closing(loader.batches(epoch, 0)) as batches:
        for samples, chunk in batches:
            yield samples, len(chunk.numbers)
            on_step()


def pad(samples: Samples, rows: int) -> Samples:
    """Repeat the samples of a batch until it has at least `rows` rows."""
    x, y = samples
    if len(x) >= rows:
        return samples
    chosen = np.arange(rows) % len(x)
    return x[chosen], y[chosen]


@lru_cache(maxsize=64)
def weights_of(samples: int, rows: int) -> npt.NDArray[np.float32]:
    """Return the weights of a padded batch's rows: ``rows / samples`` for samples, 0 for repetitions.

    The array is cached: callers must not change it.
    """
    weights = np.zeros(rows, np.float32)
    weights[:samples] = rows / samples
    return weights
