"""Progress of a member: its finished epochs, the ends of its tasks, and its live metrics in training.

A run has up to millions of epochs: `EpochHistory` holds them in rows of numbers.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field
from itertools import groupby
from operator import itemgetter
from typing import Any, SupportsBytes, overload
from zlib import compress, decompress

from hetctl.model.serialization import OMITTED
from hetctl.model.values import dataclass

PAUSED, CANCELLED, DROPPED = "paused", "cancelled", "dropped"
"""Words for members that their user has taken out of training."""


@dataclass(frozen=True)
class EpochResult:
    """Result of one epoch of a member.

    Parameters
    ----------
    epoch : int
        Number of the epoch, from 1.
    metrics : mapping
        ``loss`` over the training samples and ``val_*`` over the validation samples.
    duration_s : float
        Training time of the epoch, without evaluation and checkpoint.
    rate : float or None
        Samples/s of the group over the full batches after the first; None: there were too few.
    batch_size : int or None
        Samples per GPU and step.
    gpu_type : str or None
        Type of its GPUs, if the site has several types and these were of one.
    overhead_s : float or None
        Seconds between the ends of training of the previous epoch and this one, minus those of its samples at
        `rate`; None if the process trained no epoch before, or only part of this one.
    """

    epoch: int
    metrics: Mapping[str, float]
    duration_s: float
    gpus: int
    finished_at: float
    rate: float | None = None
    batch_size: int | None = None
    gpu_type: str | None = None
    overhead_s: float | None = None


@dataclass(frozen=True)
class TimedRate:
    """Rate of a group in training, from timed steps.

    Parameters
    ----------
    rate : float
        Samples/s of the group.
    batch_size, gpu_type
        Same as in `EpochResult`.
    error : float
        Half-width of the rate's 95 % confidence interval, relative to the rate.
    finished_at : float
        Time of the last timed step in seconds since the epoch.
    busy : float or None
        Share of these steps in which its device was busy; None: not known, or it has several.
    beside : tuple of str
        Members that sat on its GPU from its start on.
    """

    rate: float
    gpus: int
    batch_size: int
    gpu_type: str | None
    error: float
    finished_at: float = 0.0
    busy: float | None = field(default=None, metadata=OMITTED)
    beside: tuple[str, ...] = field(default=(), metadata=OMITTED)


@dataclass(frozen=True)
class BestCheckpoint:
    """Kept checkpoint of the best epoch, by the metric of the member's stop rule; no epoch: none is kept."""

    epoch: int | None
    path: str


NO_BEST = BestCheckpoint(None, "")


FusedRates = tuple[tuple[str, int, float], ...]


def with_fused(known: FusedRates, newer: FusedRates) -> FusedRates:
    """Return known rates of fused members, those of the types of newer ones replaced by these."""
    types = {gpu_type for gpu_type, *_ in newer}
    return (*(one for one in known if one[0] not in types), *newer)


@dataclass(frozen=True)
class Progress:
    """Progress of a member.

    Parameters
    ----------
    failures : int
        Tasks that failed since the last finished epoch.
    part_samples : int
        Samples of the unfinished epoch in the last checkpoint.
    node_failures : int
        Tasks that ended because one of their nodes failed.
    disk_errors : int
        Tasks that ended with a disk error since a checkpoint or an epoch last got further than before.
    batch_size : int or None
        Batch size after reductions for lack of memory; None: it was not reduced.
    furthest : int
        Largest number of finished epochs so far, even if it has returned to an earlier checkpoint.
    asked : int or None
        Total epochs that a search has asked for; 0 before it begins the trial, None if it is no trial.
    reported : int
        Total epochs of the last request that the search has a report of.
    samples_per_epoch : int or None
        Training samples per epoch, as its trainer found them; None: it has not said so.
    best_epoch : int or None
        Best epoch whose checkpoint is kept; None: there is none.
    best_checkpoint : str
        Path of that checkpoint.
    startup_s, evaluate_s, checkpoint_s : float or None
        Seconds of its first start until the first step, of its last evaluation, and of the writing of its
        last checkpoint; None: not known yet. On a rank that had trained before, a start begins there.
    peak_memory_bytes : int
        Peak memory of rank 0 in its first steps, in bytes; 0: not known yet.
    preparation_rate : float or None
        Samples/s that one of its preprocessors prepares; None: not known yet.
    fused_rates : tuple of (str, int, float)
        Types of GPU and numbers of members of its shape that were one computation there, with the samples/s
        of all together. The type is "" at a site with one type.
    script_s : float
        Seconds for which its command has run in all starts whose end it has seen.
    withheld : str or None
        `PAUSED`, `CANCELLED` or `DROPPED` if the user does not want it to train.
    unfit : tuple of (str, int)
        Types and numbers of GPUs on which it ran out of memory with its present batch size before it had
        trained there; 0: on one that it shared. The type is "" at a site with one type, and for groups on
        several types.
    restarts_s : tuple of float
        Seconds to the first step of its newest starts on ranks that had trained before.
    """

    member: str
    epochs: Sequence[EpochResult] = ()
    converged: str | None = None
    failed: str | None = None
    failures: int = 0
    part_samples: int = 0
    node_failures: int = 0
    disk_errors: int = 0
    batch_size: int | None = None
    furthest: int = 0
    asked: int | None = None
    reported: int = 0
    samples_per_epoch: int | None = None
    best_epoch: int | None = None
    best_checkpoint: str = ""
    startup_s: float | None = None
    evaluate_s: float | None = None
    checkpoint_s: float | None = None
    peak_memory_bytes: int = 0
    preparation_rate: float | None = None
    fused_rates: FusedRates = ()
    script_s: float = 0.0
    withheld: str | None = None
    unfit: tuple[tuple[str, int], ...] = ()
    restarts_s: tuple[float, ...] = ()

    @property
    def active(self) -> bool:
        """True if the member still needs training; a trial only while its search waits for it."""
        return self._is_left and self.withheld is None

    @property
    def is_paused(self) -> bool:
        """True if the member needs training as soon as its user resumes it."""
        return self._is_left and self.withheld == PAUSED

    @property
    def _is_left(self) -> bool:
        is_over = self.converged is not None or self.failed is not None
        return not is_over and (self.asked is None or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        """True if its search has asked for the trial and has no report of it yet."""
        return self.asked is not None and self.asked > self.reported

    @property
    def last_epoch(self) -> int:
        """Number of its last finished epoch; 0 if there is none."""
        return self.epochs[-1].epoch if self.epochs else 0


@dataclass(frozen=True)
class RankShare:
    """Share of a rank in the steps of a balanced group.

    Parameters
    ----------
    worker : str
        Node and number of its GPU or slot, as in ``node1:0``.
    batch : int
        Samples of the rank in a full chunk.
    step_s : float
        Time of its own computing in the last step, without waiting for other ranks.
    """

    worker: str
    batch: int
    step_s: float


@dataclass(frozen=True)
class LiveMetrics:
    """Live metrics of a member in training at one time.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    epoch : int
        Number of the epoch in training, from 1.
    position, samples : int
        Samples of the epoch that are done, and samples of the whole epoch; 0: not known.
    rate : float
        Samples/s of the whole group since the previous report.
    loss : float or None
        Loss of the last batch; None if ``train_fn`` does not report it.
    gpu_busy_fraction : float or None
        Share of its GPU or cores that rank 0 used since the previous report.
    ranks : tuple of RankShare
        Shares of all ranks of a group whose times are compared; empty for others.
    """

    time: float
    epoch: int
    position: int
    samples: int
    rate: float
    loss: float | None = None
    gpu_busy_fraction: float | None = None
    ranks: tuple[RankShare, ...] = ()


NEWEST = 3
"""Number of newest epochs whose rates are kept apart."""
DETAILS = frozenset({"_last", "_summary", "_timed"})
"""Attributes of a history that are read on demand, since a status needs those of few members."""


Kind = tuple[str | None, bool, bool, bool, tuple[str, ...]]
"""Contents of a row: type of GPU; whether it has a rate, a batch size, an overhead; names of metrics."""
LINE, EPOCH, GPUS, BATCH, FIRST_METRIC = 1, 2, 4, 7, 9
"""Columns; column 0 is the number of the kind, and the others are those of `_numbers`."""


def _kind(done: EpochResult) -> Kind:
    optional = done.rate is not None, done.batch_size is not None, done.overhead_s is not None
    return (done.gpu_type, *optional, tuple(done.metrics))


def _numbers(kind: int, line: int, done: EpochResult) -> tuple[float, ...]:
    times = done.duration_s, done.gpus, done.finished_at
    return (
        *(kind, line, done.epoch, *times),
        *(done.rate or 0.0, done.batch_size or 0, done.overhead_s or 0.0, *done.metrics.values()),
    )


class _Rows:
    """Rows of one width that only grow: histories with the same beginning share them."""

    __slots__ = ("kinds", "numbers", "width")

    def __init__(self, kinds: Iterable[Kind] = (), width: int = FIRST_METRIC, numbers: bytes = b"") -> None:
        self.kinds = {kind: number for number, kind in enumerate(kinds)}
        self.width, self.numbers = width, array("d", numbers)

    def first(self, count: int) -> _Rows:
        return _Rows(self.kinds, self.width, self.numbers[: count * self.width].tobytes())

    def widened(self, width: int) -> _Rows:
        wide = _Rows(self.kinds, width)
        more = (0.0,) * (width - self.width)
        for begin in range(0, len(self.numbers), self.width):
            wide.numbers.extend((*self.numbers[begin : begin + self.width], *more))
        return wide

    def add(self, done: EpochResult, line: int) -> None:
        """Add a row, which may be narrower; OverflowError if a number fits no float."""
        row = _numbers(self.kinds.setdefault(_kind(done), len(self.kinds)), line, done)
        self.numbers.extend(array("d", (*row, *(0.0,) * (self.width - len(row)))))

    def results(self, begin: int, end: int) -> Iterator[EpochResult]:
        kinds, width = list(self.kinds), self.width
        for at in range(begin * width, end * width, width):
            kind, _, epoch, duration_s, gpus, finished_at, rate, batch, overhead_s, *values = self.numbers[
                at : at + width
            ]
            gpu_type, has_rate, has_batch, has_overhead, names = kinds[int(kind)]
            yield EpochResult(
                *(int(epoch), dict(zip(names, values, strict=False)), duration_s, int(gpus), finished_at),
                rate if has_rate else None,
                int(batch) if has_batch else None,
                gpu_type,
                overhead_s if has_overhead else None,
            )


def _key_of(seen: EpochResult | TimedRate) -> tuple[str, int, int | None]:
    return seen.gpu_type or "", seen.gpus, seen.batch_size


class EpochHistory(Sequence[EpochResult]):
    """Finished epochs of a member; it never changes.

    Adding an epoch copies no earlier ones. A history that was read from its `row` unpacks its epochs on
    demand.

    Attributes
    ----------
    rates : mapping of (str, int, int or None) to tuple of float
        Newest rates of epochs, and those timed within them, by type of GPU ("": none, or several), number
        of GPUs, and batch size.
    overheads_s : mapping of int or None to tuple of float
        Newest overheads by batch size.
    """

    __slots__ = ("_count", "_last", "_packed", "_summary", "_timed", "_unpacked", "overheads_s", "rates")

    def __init__(self) -> None:
        self._unpacked: _Rows | None = _Rows()
        self._packed: Any = None
        self._summary: Any = None
        self._last: EpochResult | None = None
        self._count = 0
        self._timed: tuple[TimedRate, ...] = ()
        self.rates: Mapping[tuple[str, int, int | None], tuple[float, ...]] = {}
        self.overheads_s: Mapping[int | None, tuple[float, ...]] = {}

    @classmethod
    def of(cls, epochs: Iterable[EpochResult | TimedRate]) -> EpochHistory:
        """Return a history with these epochs and rates."""
        if isinstance(epochs, cls):
            return epochs
        return cls().plus(epochs)

    def plus(self, epochs: Iterable[EpochResult | TimedRate], lines: Iterable[int] = ()) -> EpochHistory:
        """Return a history with more epochs at its end, and rates; OverflowError if a number fits no float.

        Parameters
        ----------
        lines : iterable of int
            Line of each epoch in the member's file; empty: they have none.
        """
        numbers = iter(lines)
        history = self
        for done in epochs:
            if isinstance(done, TimedRate):
                history = history.with_rate(done)
            else:
                history = history._with(done, next(numbers, -1))
        return history

    def _with(self, done: EpochResult, line: int) -> EpochHistory:
        rows, width = self._rows, FIRST_METRIC + len(done.metrics)
        # Another history may have added its rows to these.
        if len(rows.numbers) != self._count * rows.width:
            rows = rows.first(self._count)
        if width > rows.width:
            rows = rows.widened(width)
        rows.add(done, line)
        made = EpochHistory.__new__(EpochHistory)
        made._unpacked, made._packed, made._summary, made._count = rows, None, None, self._count + 1
        made._timed, made.rates, made.overheads_s = self._timed, self.rates, self.overheads_s
        made._note(done)
        return made

    @property
    def timed(self) -> tuple[TimedRate, ...]:
        """Newest rate timed within an epoch, of each key of `rates`, beside each set of members."""
        return self._timed

    def with_rate(self, timed: TimedRate) -> EpochHistory:
        """Return the same epochs with one more rate."""
        made = copy(self)
        key = _key_of(timed), timed.beside
        made._timed = (*(one for one in self._timed if (_key_of(one), one.beside) != key), timed)
        made._note_rate(timed)
        return made

    def _note(self, done: EpochResult) -> None:
        self._last = done
        self._note_rate(done)
        if done.overhead_s is not None:
            before = self.overheads_s.get(done.batch_size, ())
            self.overheads_s = {**self.overheads_s, done.batch_size: (*before, done.overhead_s)[-NEWEST:]}

    def _note_rate(self, seen: EpochResult | TimedRate) -> None:
        if seen.rate:
            key = _key_of(seen)
            self.rates = {**self.rates, key: (*self.rates.get(key, ()), seen.rate)[-NEWEST:]}

    def until(self, epoch: int) -> EpochHistory:
        """Return the epochs up to that number, with the rates timed so far; all must be in order."""
        if self._last is None or epoch >= self._last.epoch:
            return self
        made = EpochHistory.__new__(EpochHistory)
        made._unpacked, made._packed, made._count = self._rows, None, self._position(epoch)
        made._last, made._summary, made.rates, made.overheads_s = None, None, {}, {}
        made._timed = self._timed
        for timed in made._timed:
            made._note_rate(timed)
        for done in made:
            made._note(done)
        return made

    def after(self, epoch: int) -> list[tuple[EpochResult, int]]:
        """Return the epochs after that number, each with its line; all must be in order."""
        if self._last is None or epoch >= self._last.epoch:
            return []
        rows, begin = self._rows, self._position(epoch)
        lines = map(int, rows.numbers[begin * rows.width + LINE : self._count * rows.width : rows.width])
        return list(zip(rows.results(begin, self._count), lines, strict=True))

    def _position(self, epoch: int) -> int:
        """Return the number of epochs up to that number."""
        rows = self._rows
        return bisect_right(
            range(self._count), epoch, key=lambda at: int(rows.numbers[at * rows.width + EPOCH])
        )

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric in the epochs that have it."""
        rows = self._rows
        places = {names.index(metric) if metric in names else None for *_, names in rows.kinds}
        if len(places) == 1 and None not in places:
            begin = FIRST_METRIC + next(iter(places))  # type: ignore[operator]
            return rows.numbers[begin : self._count * rows.width : rows.width].tolist()
        return [done.metrics[metric] for done in self if metric in done.metrics]

    def best(self, metric: str, mode: str) -> float | None:
        """Return the best value of a metric by its mode, ``min`` or ``max``; None if no epoch has one."""
        extremes = self._summarised[0].get(metric)
        return None if extremes is None else extremes[mode == "max"][0]

    def best_epoch(self, metric: str, mode: str) -> int | None:
        """Return the number of the first epoch with the best value; None if no epoch has one."""
        extremes = self._summarised[0].get(metric)
        return None if extremes is None else extremes[mode == "max"][1]

    @property
    def batches(self) -> Sequence[tuple[int, int, int]]:
        """First epoch with each number of GPUs and batch size, as (epoch, GPUs, batch size)."""
        return [(epoch, gpus, batch) for epoch, gpus, batch in self._summarised[1]]

    @property
    def _summarised(self) -> Any:
        """Extremes by metric, each with its epoch, and batches, which `packed` has before the epochs."""
        if self._summary is None:
            columns = {name: self.values(name) for *_, names in self._rows.kinds for name in names}
            extremes = {
                name: [(value, self._first(name, values, value)) for value in (min(values), max(values))]
                for name, values in columns.items()
                if values
            }
            self._summary = extremes, list(self._batches())
        return self._summary

    def _first(self, metric: str, values: Sequence[float], value: float) -> int:
        """Return the number of the first epoch with a value among all those of a metric."""
        if len(values) == self._count:
            return int(self._rows.numbers[values.index(value) * self._rows.width + EPOCH])
        return next(done.epoch for done in self if done.metrics.get(metric) == value)

    def _batches(self) -> Iterator[tuple[int, int, int]]:
        rows, end = self._rows, self._count * self._rows.width
        columns = (rows.numbers[column : end : rows.width] for column in (0, GPUS, BATCH, EPOCH))
        has_batch = [kind[2] for kind in rows.kinds]
        for (kind, gpus, batch), alike in groupby(zip(*columns, strict=True), itemgetter(0, 1, 2)):
            if has_batch[int(kind)]:
                yield int(next(alike)[3]), int(gpus), int(batch)

    def row(self) -> list[Any]:
        """Return the argument of `from_row` that is read of every member."""
        rates = [[*key, newest] for key, newest in self.rates.items()]
        return [self._count, rates, list(self.overheads_s.items())]

    def loaded(self) -> EpochHistory:
        """Return this history, of which nothing is left to read from a file."""
        self._packed = self._packed and bytes(self._packed)
        return self

    def packed(self) -> bytes:
        """Return the rest as one line of text."""
        if self._packed is None:
            rows = self._rows
            last = self._last and list(vars(self._last).values())
            timed = [list(vars(each).values()) for each in self._timed]
            head = f"{rows.width} {json.dumps(list(rows.kinds))}\n".encode()
            body = rows.numbers[: self._count * rows.width].tobytes()
            details = json.dumps([last, self._summarised, timed], separators=(",", ":")).encode()
            self._packed = details + b" " + b64encode(compress(head + body, 1))
        return bytes(self._packed)

    @classmethod
    def from_row(cls, row: Sequence[Any], packed: memoryview | SupportsBytes) -> EpochHistory:
        """Return the history with this `row` and `packed`, which `bytes` reads on first use."""
        made = cls.__new__(cls)
        made._count, rates, overheads_s = row
        made.rates = {(gpu_type, gpus, size): tuple(newest) for gpu_type, gpus, size, newest in rates}
        made.overheads_s = {size: tuple(newest) for size, newest in overheads_s}
        made._unpacked, made._packed = None, packed
        return made

    def __getattr__(self, name: str) -> Any:
        """Read what `from_row` has left out."""
        if name not in DETAILS:
            raise AttributeError(name)
        last, self._summary, timed = json.loads(bytes(self._packed).rpartition(b" ")[0])
        self._timed = tuple(TimedRate(*each) for each in timed)
        self._last = last and EpochResult(*last)
        return getattr(self, name)

    @property
    def _rows(self) -> _Rows:
        if self._unpacked is None:
            head, _, body = decompress(b64decode(bytes(self._packed).rpartition(b" ")[2])).partition(b"\n")
            width, kinds = head.split(b" ", 1)
            found = ((gpu_type, *has, tuple(names)) for gpu_type, *has, names in json.loads(kinds))
            self._unpacked = _Rows(found, int(width), body)
        return self._unpacked

    def __len__(self) -> int:
        """Return the number of epochs."""
        return self._count

    def __iter__(self) -> Iterator[EpochResult]:
        """Yield the epochs in their order."""
        return self._rows.results(0, self._count)

    @overload
    def __getitem__(self, at: int) -> EpochResult: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[EpochResult, ...]: ...

    def __getitem__(self, at: int | slice) -> EpochResult | tuple[EpochResult, ...]:
        """Return one epoch, or those of a slice."""
        if isinstance(at, slice):
            return tuple(self[place] for place in range(*at.indices(self._count)))
        place = range(self._count)[at]
        if place == self._count - 1 and self._last is not None:
            return self._last
        return next(self._rows.results(place, place + 1))

    def __eq__(self, other: object) -> bool:
        """Compare the epochs with those of another sequence."""
        if not isinstance(other, Sequence) or len(other) != self._count:
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the epochs as text."""
        return f"EpochHistory({list(self)!r})"
