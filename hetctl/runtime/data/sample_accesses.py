"""Accesses of the samples of partitioned data, and their migration between workers (LB-BSP, section 3.5).

Each worker draws from the samples that it holds, the least accessed first. Every rank computes the draws and
migrations of all workers from the same state, without messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass

Numbers = npt.NDArray[np.int64]
Levels = Counter[int]
"""Number of a worker's samples by their accesses."""

MAX_ACCESS_GAP = 2
"""Largest difference of the accesses of two samples (footnote 5: "gap of traversal times bounded by 2")."""
GAP = 1.0
"""Gap between two workers' mean accesses from which samples migrate in the background. A worker's own samples
differ by up to one access, so that `MAX_ACCESS_GAP` holds while they are sent."""
STEPS_TO_SEND = 16
"""Steps from the start of a migration until its target draws the samples, or fewer if `MAX_ACCESS_GAP`
requires it. A fixed number, so that training does not depend on the time of sending."""


@dataclass(frozen=True)
class Transfer:
    """Samples that one worker sends to another.

    Parameters
    ----------
    number : int
        Number of the transfer, counted from 0.
    samples : array of int
        Numbers of the samples.
    due : int
        Step from which the target draws them, counted from 0.
    """

    number: int
    source: int
    target: int
    samples: Numbers
    due: int


Changes = tuple[tuple[Transfer, bool], ...]
"""Transfers, each with a flag: false if it begins, true if it ends and the target holds the samples."""


class Draw(NamedTuple):
    """Samples of a step by worker, and the transfers before it, in their order."""

    samples: tuple[Numbers, ...]
    changes: Changes


class SampleAccesses:
    """Holders and accesses of all samples of a group's partitioned data.

    Parameters
    ----------
    home : array of int, shape (samples,)
        Worker on whose node each sample lies; each worker is the home of at least one.
    seed : int
        Seed of the order in which samples of equal accesses are drawn.

    Attributes
    ----------
    pending : tuple of Transfer
        Transfers that have begun and not landed.
    """

    def __init__(self, home: Numbers, seed: int) -> None:
        self.home = home
        self.seed = seed
        self._workers = range(int(home.max()) + 1)
        self._holder = home.copy()
        self._accesses: Numbers = np.zeros_like(home)
        self._steps = 0
        self._transfers = 0
        self.pending: tuple[Transfer, ...] = ()
        self._recount()

    @property
    def held(self) -> list[int]:
        """Number of samples that each worker holds."""
        return [levels.total() for levels in self._levels]

    @property
    def extremes(self) -> tuple[int, int]:
        """Fewest and most accesses of a sample."""
        return min(map(min, self._levels)), max(map(max, self._levels))

    def draw(self, sizes: Sequence[int], parts: Sequence[int] = ()) -> Draw:
        """Return the samples of the next step, and count their accesses.

        Parameters
        ----------
        sizes : sequence of int
            Batch of each worker, at least 1.
        parts : sequence of int
            Samples of each worker in this step, if it is the smaller last one of an epoch.
        """
        counts = parts or sizes
        changes = self._land(transfer for transfer in self.pending if transfer.due <= self._steps)
        changes += self._migrate(sizes)
        while urgent := self._urgent(counts):
            # Samples that are on the way may suffice.
            changes += () if self.pending else self._begin(urgent, self._steps)
            changes += self._land(self.pending)
        self._steps += 1
        samples = tuple(
            self._take(worker, count) for worker, count in zip(self._workers, counts, strict=True)
        )
        return Draw(samples, changes)

    def away(self) -> list[Transfer]:
        """Return transfers that bring samples from their homes to their present holders."""
        away = np.flatnonzero(self._holder != self.home)
        routes = sorted(set(zip(self.home[away].tolist(), self._holder[away].tolist(), strict=True)))
        moved = []
        for number, (source, target) in enumerate(routes, start=1):
            samples = away[(self.home[away] == source) & (self._holder[away] == target)]
            # Negative numbers: later transfers count from 0.
            moved.append(Transfer(-number, source, target, samples, self._steps))
        return moved

    def save(self) -> dict[str, Numbers]:
        """Return the state as arrays."""
        return {
            "home": self.home,
            "holder": self._holder,
            "visits": self._accesses,
            "counts": np.array([self._steps, self._transfers]),
            "pending": np.array(
                [(t.number, t.source, t.target, t.due, len(t.samples)) for t in self.pending], np.int64
            ).reshape(-1, 5),
            "pending_samples": np.concatenate([self.home[:0], *(t.samples for t in self.pending)]),
        }

    def restore(self, state: Mapping[str, Numbers]) -> None:
        """Continue from a state.

        A sample with a new home is held there, and keeps its accesses. A state of another number of samples
        is ignored.
        """
        if len(state["home"]) != len(self.home):
            return
        self._accesses = state["visits"].copy()
        if np.array_equal(state["home"], self.home):
            self._holder = state["holder"].copy()
            self._steps, self._transfers = state["counts"].tolist()
            pending, samples = state["pending"], state["pending_samples"]
            parts = np.split(samples, np.cumsum(pending[:, -1])[:-1])
            rows = zip(pending[:, :4].tolist(), parts, strict=False)
            self.pending = tuple(
                Transfer(number, source, target, part, due) for (number, source, target, due), part in rows
            )
        self._recount()

    def begin_after(self, trained: Numbers) -> None:
        """Count one access of each sample that was trained before the first draw."""
        self._accesses[trained] += 1
        self._recount()

    def _recount(self) -> None:
        self._levels = [Counter(self._accesses[self._holder == w].tolist()) for w in self._workers]
        # Each worker's samples with the fewest accesses, in the order of drawing.
        self._queues = [self.home[:0] for _ in self._workers]

    def _take(self, worker: int, count: int) -> Numbers:
        """Return the next samples of a worker: the least accessed, equal ones in random order."""
        taken = []
        while count:
            if not len(self._queues[worker]):
                order = self._order(worker)
                self._queues[worker] = order[: self._levels[worker][min(self._levels[worker])]]
            samples = self._queues[worker][:count]
            self._queues[worker] = self._queues[worker][count:]
            self._accesses[samples] += 1
            taken.append(samples)
            self._levels[worker] = _accessed(self._levels[worker], len(samples))
            count -= len(samples)
        return np.concatenate([self.home[:0], *taken])

    def _order(self, worker: int, *, last_first: bool = False) -> Numbers:
        """Return the samples of a worker in the order of drawing, or in that of migration.

        Samples also migrate by accesses, but among equal ones the last to be drawn goes first.
        """
        own = np.flatnonzero(self._holder == worker)
        accesses = self._accesses[own]
        place = np.empty_like(own)
        for level in self._levels[worker]:
            at = accesses == level
            place[at] = _places(len(self.home), self.seed, level)[own[at]]
        order: Numbers = own[np.lexsort((-place if last_first else place, accesses))]
        return order

    def _migrate(self, sizes: Sequence[int]) -> Changes:
        """Begin a migration in the background if the mean accesses of two workers differ by `GAP`."""
        if self.pending:
            return ()
        drawn = [sum(accesses * count for accesses, count in levels.items()) for levels in self._levels]
        migration = next_migration(self.held, drawn, sizes, GAP)
        return self._begin(migration, self._steps + STEPS_TO_SEND) if migration else ()

    def _urgent(self, counts: Sequence[int]) -> Migration | None:
        """Return a migration that keeps accesses within `MAX_ACCESS_GAP` after this step; None: no need."""
        after = [_accessed(levels, count) for levels, count in zip(self._levels, counts, strict=True)]
        least = min(map(min, after))
        # A sample with `MAX_ACCESS_GAP` more accesses than another must not be drawn. Older gaps, after data
        # have moved to other nodes, do not count.
        above = [
            sum(
                count - before[accesses]
                for accesses, count in later.items()
                if accesses > least + MAX_ACCESS_GAP
            )
            for before, later in zip(self._levels, after, strict=True)
        ]
        target = max(self._workers, key=above.__getitem__)
        # A worker with fewer samples than its batch would be emptied.
        free = [min(later[least], held - 1) for later, held in zip(after, self.held, strict=True)]
        source = max(self._workers, key=free.__getitem__)
        samples = min(above[target], free[source])
        return Migration(source, target, samples) if samples > 0 else None

    def _begin(self, migration: Migration, due: int) -> Changes:
        source, target, count = migration.source, migration.target, migration.samples
        samples = self._order(source, last_first=True)[:count]
        transfer = Transfer(self._transfers, source, target, samples, due)
        self._transfers += 1
        self.pending += (transfer,)
        return ((transfer, False),)

    def _land(self, transfers: Iterable[Transfer]) -> Changes:
        """Let the targets hold the samples."""
        landed = tuple(transfers)
        for transfer in landed:
            self._holder[transfer.samples] = transfer.target
        if landed:
            self.pending = tuple(transfer for transfer in self.pending if transfer not in landed)
            self._recount()
        return tuple((transfer, True) for transfer in landed)


def most_accessed(state: Mapping[str, Numbers], count: int) -> Numbers:
    """Return the numbers of the `count` samples with the most accesses in a state of `SampleAccesses`."""
    return np.argsort(-state["visits"], kind="stable")[:count]


def _accessed(levels: Levels, count: int) -> Levels:
    """Return the numbers of samples by accesses after `count` more draws."""
    after = Counter(levels)
    while count:
        least = min(after)
        accessed = min(after[least], count)
        after[least + 1] += accessed
        after[least] -= accessed
        if not after[least]:
            del after[least]
        count -= accessed
    return after


@lru_cache(maxsize=4)
def _places(samples: int, seed: int, level: int) -> Numbers:
    """Return each sample's place in the drawing order of samples accessed `level` times."""
    places: Numbers = np.random.default_rng([seed, level]).permutation(samples)
    return places


@dataclass(frozen=True)
class Migration:
    """Number of samples that one worker transfers to another."""

    source: int
    target: int
    samples: int


def next_migration(
    held: Sequence[int], accesses: Sequence[int], batches: Sequence[int], gap: float
) -> Migration | None:
    """Return the next migration (section 3.5); None while no partition leads by more than `gap` traversals.

    Samples move from the worker with the fewest traversals of its partition to the one with the most: as many
    as let both traverse their partitions about equally often with their present batches.

    Parameters
    ----------
    held : sequence of int
        Samples that each worker holds, at least 1 each.
    accesses : sequence of int
        Accesses of the samples that each worker holds, in total.
    batches : sequence of int
        Batch of each worker in an iteration, x_i.
    gap : float
        Largest difference of the mean accesses before samples migrate.

    Raises
    ------
    BadInputError
        If a partition is empty, or the lengths of the sequences differ.
    """
    if not len(held) == len(accesses) == len(batches) or min(held, default=0) < 1:
        raise BadInputError(
            f"held {list(held)}, accesses {list(accesses)}, batches {list(batches)}: "
            "one of each by worker, and no worker without samples"
        )
    traversals = [seen / own for seen, own in zip(accesses, held, strict=True)]
    workers = range(len(traversals))
    source = min(workers, key=traversals.__getitem__)
    target = max(workers, key=traversals.__getitem__)
    if traversals[target] - traversals[source] <= gap:
        return None
    both = held[source] + held[target]
    fair = both * batches[target] // (batches[source] + batches[target])
    samples = min(fair, both - 1) - held[target]
    return Migration(source, target, samples) if samples > 0 else None
