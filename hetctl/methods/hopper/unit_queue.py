"""Queue of waiting units, Q in CEREBRO: planned ones have a turn, the others are for any worker."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from hetctl.model.hops import Unit, Visit


class UnitQueue:
    """Waiting units, and the partitions of the present workers.

    A unit is *planned* if a plan has it on a present worker with its partition. Otherwise it is *loose*:
    any worker with its partition may process it (section 4.5). Thus a plan remains in force for the other
    workers after a failure. Units that a worker missed before it joined stay loose: if it kept these turns,
    all others would have to wait until it has caught up.

    Parameters
    ----------
    plan : sequence of Visit
        Planned visits; a visit starts after all earlier ones of its worker or configuration.

    Attributes
    ----------
    homes : dict
        Partitions by worker: the availability map.
    """

    def __init__(self, plan: Sequence[Visit] = ()) -> None:
        self._plan = tuple(plan)
        self._turns = {visit.unit: turn for turn, visit in enumerate(self._plan)}
        self._planned_at: defaultdict[str, deque[Unit]] = defaultdict(deque)
        for visit in self._plan:
            self._planned_at[visit.worker].append(visit.unit)
        self.homes: dict[str, tuple[str, ...]] = {}
        self._waiting: set[Unit] = set()
        self._by_worker: defaultdict[str, list[int]] = defaultdict(list)
        self._by_config: defaultdict[str, list[int]] = defaultdict(list)
        self._loose: defaultdict[str, list[Unit]] = defaultdict(list)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._waiting

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def plan(self) -> tuple[Visit, ...]:
        """Plan in force, without missed turns."""
        return tuple(visit for visit in self._plan if visit.unit in self._turns)

    @property
    def is_used_up(self) -> bool:
        """True if there was a plan and all of it is done."""
        return bool(self._plan) and not any(self._planned_at.values())

    @property
    def missing(self) -> set[str]:
        """Absent workers that the plan relies on."""
        return {worker for worker, units in self._planned_at.items() if units} - self.homes.keys()

    def add(self, unit: Unit) -> None:
        """Add a waiting unit."""
        self._waiting.add(unit)
        for row, entry in self._rows(unit):
            # Sorted lists make draws independent of the order in which units were added.
            insort(row, entry)

    def remove(self, unit: Unit) -> None:
        """Remove a waiting unit."""
        self._waiting.remove(unit)
        for row, entry in self._rows(unit):
            del row[bisect_left(row, entry)]

    def is_done(self, unit: Unit) -> None:
        """Mark a unit as done, so that it will never wait again."""
        if unit in self._turns:
            with suppress(ValueError):
                self._planned_at[self._plan[self._turns[unit]].worker].remove(unit)

    def worker_leaves(self, worker: str) -> None:
        """Remove a worker; units that wait for a turn there become loose."""
        self._settle(worker, None)

    def worker_joins(self, worker: str, partitions: tuple[str, ...], begun: Iterable[Unit] = ()) -> None:
        """Add a worker with its partitions, and keep its turns that are later than all of the begun units."""
        latest = max((self._turns.get(unit, -1) for unit in begun), default=-1)
        for unit in [unit for unit in self._planned(worker) if self._turns[unit] < latest]:
            self.remove(unit)
            del self._turns[unit]
            self.add(unit)
        self._settle(worker, partitions)

    def next_planned(self, worker: str, busy: Collection[str]) -> Unit | None:
        """Return the worker's next planned unit; None if it has none or it is not yet its turn.

        It is its turn if neither the worker nor the configuration, which must not be busy, has an earlier
        planned unit that waits. The earliest of all planned units always has its turn, so a plan cannot
        deadlock.
        """
        turns = self._by_worker[worker]
        if not turns:
            return None
        unit = self._plan[turns[0]].unit
        return unit if unit.config not in busy and self._by_config[unit.config][0] == turns[0] else None

    def turns_before(self, worker: str, unit: Unit) -> Iterator[Unit]:
        """Yield the worker's unfinished turns before that of a unit, in the plan's order."""
        turn = self._turns[unit]
        for other in self._planned_at[worker]:
            if self._turns.get(other, -1) >= turn:
                return
            if other in self._turns:
                yield other

    def loose(self, worker: str, busy: Collection[str]) -> list[Unit]:
        """Return the loose units that the worker can process: those of configurations that are not busy."""
        return [
            unit
            for partition in self.homes[worker]
            for unit in self._loose[partition]
            if unit.config not in busy
        ]

    def _planned(self, worker: str) -> list[Unit]:
        """Return the waiting units with a turn at a worker, present or not."""
        return [unit for unit in self._planned_at[worker] if unit in self._waiting and unit in self._turns]

    def _settle(self, worker: str, partitions: tuple[str, ...] | None) -> None:
        """Change a worker's entry in the availability map, and recompute which of its units are loose."""
        moved = self._planned(worker)
        for unit in moved:
            self.remove(unit)
        self.homes.pop(worker, None)
        if partitions is not None:
            self.homes[worker] = partitions
        for unit in moved:
            self.add(unit)

    def _rows(self, unit: Unit) -> list[tuple[list[Any], Any]]:
        """Return the sorted lists that contain a unit, each with the unit's entry in it."""
        turn = self._turns.get(unit)
        if turn is not None and unit.partition in self.homes.get(self._plan[turn].worker, ()):
            by_worker = self._by_worker[self._plan[turn].worker]
            return [(by_worker, turn), (self._by_config[unit.config], turn)]
        return [(self._loose[unit.partition], unit)]
