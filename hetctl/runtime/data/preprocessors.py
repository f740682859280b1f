"""Preprocessors: processes that prepare the chunks of a stream and put them into a ring."""

from __future__ import annotations

import mmap
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from numpy.random import Generator

from hetctl.model.errors import HetctlError
from hetctl.model.site import Timeouts
from hetctl.runtime.data.named_arrays import refusing_errors
from hetctl.runtime.data.sampler import Numbers, Order, Stream, sample_rng
from hetctl.runtime.data.sharing.ring import Ring, RingTimeoutError
from hetctl.runtime.data.sources import Array, SampleSource, SampleSpec
from hetctl.storage.processes import die_with_parent

CLAIM_S = 0.25
"""Seconds after which an idle preprocessor checks whether it has to fill another ring."""
FILE_SYSTEM = "check whether the file system of the data responds"
"""Hint for errors after a timeout."""
ENOUGH_SAMPLES = 20
"""Number of samples from whose times the throughput is known."""
DOUBLE = 8


class TimedSource:
    """Samples whose preparation is timed, in a process and in those forked from it.

    Samples that come prepared from a store of the node are not seen here, so they do not count.

    Attributes
    ----------
    process : int
        Number of this process, below `processes`: each counts in a row of its own.
    """

    def __init__(self, source: SampleSource, processes: int) -> None:
        self._source, self.process = source, 0
        self._counts = memoryview(mmap.mmap(-1, processes * 4 * DOUBLE)).cast("d")
        """Samples and seconds of each process, before the random part and in it."""

    @property
    def spec(self) -> SampleSpec:
        """Shapes and types of the arrays that `prepare` returns."""
        return self._source.spec

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def prepare(self, number: int) -> tuple[Array, Array]:
        """Return x and y of one sample before the random part."""
        began = time.perf_counter()
        prepared = self._source.prepare(number)
        self._count(0, time.perf_counter() - began)
        return prepared

    def augment(self, x: Array, rng: Generator, out: Array | None = None) -> Array:
        """Return x after the random part."""
        began = time.perf_counter()
        augmented = self._source.augment(x, rng, out)
        self._count(2, time.perf_counter() - began)
        return augmented

    @property
    def rate(self) -> float | None:
        """Samples/s that one process prepares while it does nothing else; None: too few were prepared."""
        prepared, prepare_s, augmented, augment_s = (sum(self._counts[at::4]) for at in range(4))
        if min(prepared, augmented) < ENOUGH_SAMPLES:
            return None
        return 1 / (prepare_s / prepared + augment_s / augmented)

    def _count(self, at: int, seconds: float) -> None:
        self._counts[4 * self.process + at] += 1
        self._counts[4 * self.process + at + 1] += seconds


class Preprocessors:
    """Forked processes that prepare one stream after another; they end with their parent.

    They must be forked before a framework or MPI has started threads.

    Attributes
    ----------
    sample : tuple of arrays
        A batch with the first sample.
    spec : SampleSpec
        Specification of samples after the random part.
    timed : TimedSource
        The samples as they are prepared.

    Parameters
    ----------
    share : callable
        Function from the samples to those that are prepared once for a node.
    """

    def __init__(
        self,
        source: SampleSource,
        count: int,
        share: Callable[[SampleSource], SampleSource] = lambda source: source,
    ) -> None:
        self.timed = TimedSource(source, count + 1)
        self._source = source = share(self.timed)
        x, y = source.prepare(0)
        x = source.augment(x, sample_rng(0, 1, 0))
        self.sample = x[None], y[None]
        self.spec = SampleSpec.of(x, y, "sample 0")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Forked rather than spawned: the source is not pickled, and its memory pages are shared.
        context = get_context("fork")
        for number in range(1, count + 1):
            self.timed.process = number
            parent_end, child_end = context.Pipe()
            # multiprocessing ends daemons only at a regular exit of the parent.
            ends = die_with_parent(signal.SIGKILL)
            process = context.Process(target=_serve, args=(source, self.spec, child_end, ends), daemon=True)
            process.start()
            # recv() raises EOFError after the child's death only if no copy of its end is open here.
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)
        self.timed.process = 0

    def prepare(
        self,
        ring: Path,
        stream: Stream,
        count: int | None = None,
        patience_s: float = Timeouts.samples_s,
    ) -> None:
        """Make the processes fill a ring with a stream until its readers have left, or the next call.

        Return when all have opened it. They abandon the previous ring, even if it still has readers.

        Parameters
        ----------
        count : int or None
            Number of processes, limited by those that exist; None: all.
        patience_s : float
            Time limit in seconds; a process that takes longer for one sample counts as hanging.

        Raises
        ------
        HetctlError
            If a process fails, was killed, or does not answer.
        """
        for pipe in self._pipes[:count]:
            pipe.send((ring, stream))
        for pipe in self._pipes[:count]:
            if not pipe.poll(patience_s):
                raise HetctlError(f"a preprocessor did not answer in {patience_s:g} s", FILE_SYSTEM)
            self._check(pipe)

    def check(self) -> None:
        """Raise the error that has ended one of the processes.

        Raises
        ------
        BadInputError
            If a sample cannot be prepared.
        HetctlError
            If a process was killed.
        """
        for pipe in wait(self._pipes, timeout=0):
            assert isinstance(pipe, Connection)
            self._check(pipe)

    def make(self, numbers: Numbers, order: Order) -> tuple[Array, Array]:
        """Prepare samples in this process, exactly as the preprocessors would."""
        x, y = self.spec.empty(len(numbers))
        with refusing_errors("preparing a sample"):
            _write(x, y, numbers, order, self._source)
        return x, y

    def stop(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            # They ignore SIGTERM and need no end in order: the kernel releases their claims.
            process.kill()
        for process in self._processes:
            process.join()

    @staticmethod
    def _check(pipe: Connection) -> None:
        try:
            answer = pipe.recv()
        except EOFError:
            raise HetctlError(
                "a preprocessor was killed", "check whether the node has enough memory"
            ) from None
        if answer is not None:
            raise answer


def _serve(
    source: SampleSource, spec: SampleSpec, pipe: Connection, end_with_parent: Callable[[], None]
) -> None:
    """Prepare one stream after another; send errors to the parent."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Batch systems send them to all processes of a step, and the rank needs samples until it stops.
        signal.signal(number, signal.SIG_IGN)
    while True:
        path, stream = pipe.recv()
        try:
            with refusing_errors("preparing a sample"), closing(Ring(path)) as ring:
                pipe.send(None)
                _fill(ring, pipe, stream, source, spec)
        except Exception as error:
            traceback.print_exc()
            pipe.send(error)


def _fill(ring: Ring, pipe: Connection, stream: Stream, source: SampleSource, spec: SampleSpec) -> None:
    """Prepare chunks until the stream has ended, or another request arrives.

    Readers may be slow, for example during an evaluation; this is no error.
    """
    # A request for another ring must not wait for readers of this one, which may be slow or gone.
    while not pipe.poll():
        try:
            position = ring.claim(CLAIM_S)
        except RingTimeoutError:
            continue
        if position is None:
            return
        chunk = stream.at(position)
        x, y = spec.slot_views(ring.buffer(position), len(chunk.numbers))
        _write(x, y, chunk.numbers, chunk.order, source)
        ring.publish(position, spec.slot_bytes(len(chunk.numbers)))


def _write(x: Array, y: Array, numbers: Numbers, order: Order, source: SampleSource) -> None:
    seed, epoch = order
    for index, number in enumerate(numbers.tolist()):
        prepared, y[index] = source.prepare(number)
        place = x[index, ...]
        augmented = source.augment(prepared, sample_rng(seed, epoch, number), place)
        if augmented is not place:
            place[...] = augmented
