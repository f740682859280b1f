"""The hopper as a state machine with its queue: it receives events and returns the units to start."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hetctl.model.hops import Unit, Visit

MayStart = Callable[[Unit, str], bool]
Reschedule = Callable[["Hopper", float], Sequence[Visit]]
"""Function from a hopper and the time in seconds to a plan of what is left."""


class Hopper:
    """Model hopper parallelism of any configurations on any workers (CEREBRO, Algorithms 1 and 2).

    After one or several events, `dispatch` returns the visits to start. Each configuration visits each
    partition once per epoch, on one worker at a time, and a worker trains one configuration at a time,
    without preemption. Workers may share partitions (section 4.5), fail, return and join late;
    configurations join and stop at any time (section 4.6).

    With a plan, units start in the plan's order for each worker and each configuration. A worker waits for
    a configuration that has not yet begun the epoch of its turn, unless that configuration has stopped.
    Units that the plan does not contain, or has on an absent worker, are drawn at random among those that
    an idle worker could process; without a plan, all units are. A log is a valid plan: following it is a
    replay.

    With `reschedule`, `dispatch` requests a new plan if workers failed, returned or joined late since the
    last plan, if it is outdated, if there is none, or if it is completed.

    Parameters
    ----------
    partitions : iterable of str
        Partitions that every configuration has to visit.
    seed : int
        Seed of the random draws.
    plan : sequence of Visit
        Visits in an order in which they could start, as returned by `visits_of` and `log`.
    reschedule : callable or None
        Function that makes new plans; None for no rescheduling.
    done : iterable of Visit
        Visits that were completed before.
    started : int
        Number of the first visit.

    Attributes
    ----------
    log : list of Visit
        Completed visits, in the order of their ends.
    configs : dict of str to int
        Active configurations with their present epochs.
    running : dict of str to Visit
        Running visits by worker, Q' in CEREBRO.
    since : dict of str to float
        Start of the running visit by worker, in seconds on the clock of `dispatch`.
    """

    def __init__(
        self,
        partitions: Iterable[str],
        *,
        seed: int = 0,
        plan: Sequence[Visit] = (),
        reschedule: Reschedule | None = None,
        done: Iterable[Visit] = (),
        started: int = 0,
    ) -> None:
        self.partitions = tuple(partitions)
        self._seed = seed
        self._reschedule = reschedule
        self._queue = UnitQueue(plan)
        self.configs: dict[str, int] = {}
        self.running: dict[str, Visit] = {}
        self.since: dict[str, float] = {}
        self.log = list(done)
        self._done = {visit.unit for visit in self.log}
        self._started = started
        self._busy: set[str] = set()
        self._is_torn = False

    @property
    def plan(self) -> tuple[Visit, ...]:
        """Plan in force; empty if units are drawn at random."""
        return self._queue.plan

    @property
    def workers(self) -> Mapping[str, tuple[str, ...]]:
        """Present workers with their partitions, in the order in which they joined."""
        return self._queue.homes

    @property
    def is_over(self) -> bool:
        """True if no unit waits or runs."""
        return not self._queue and not self.running

    @property
    def stranded(self) -> tuple[str, ...]:
        """Partitions that units wait for but no present worker has; the run needs a worker with them."""
        wanted = {unit.partition for unit in self._queue}.difference(*self._queue.homes.values())
        return tuple(partition for partition in self.partitions if partition in wanted)

    def has_finished(self, config: str) -> bool:
        """Return true if an active configuration has visited all partitions in its epoch."""
        epoch = self.configs[config]
        return all(Unit(config, epoch, partition) in self._done for partition in self.partitions)

    def follow(self, plan: Sequence[Visit]) -> None:
        """Replace the plan for all waiting units, as after replanning; empty to draw units at random."""
        self._is_torn = False
        earlier, self._queue = self._queue, UnitQueue(plan)
        for unit in self._done:
            self._queue.is_done(unit)
        for worker, partitions in earlier.homes.items():
            self._queue.worker_joins(worker, partitions)
        for unit in earlier:
            self._queue.add(unit)

    def drop_plan(self) -> None:
        """Let the next `dispatch` request a new plan: what the last one was made from has changed."""
        self._is_torn = True

    def config_joins(self, config: str, epoch: int = 0) -> None:
        """Let a configuration that has finished its last epoch visit all partitions in another one.

        A stopped configuration continues if it joins in the same epoch.
        """
        self.configs[config] = epoch
        running = {visit.unit for visit in self.running.values()}
        for partition in self.partitions:
            unit = Unit(config, epoch, partition)
            if unit not in self._done and unit not in running:
                self._queue.add(unit)

    def config_stops(self, config: str) -> None:
        """Remove a configuration's waiting units; a running one continues to its end, which is logged."""
        epoch = self.configs.pop(config, None)
        for partition in self.partitions if epoch is not None else ():
            unit = Unit(config, epoch or 0, partition)
            if unit in self._queue:
                self._queue.remove(unit)

    def worker_joins(self, worker: str, partitions: Iterable[str]) -> None:
        """Add a worker: at the beginning, late, or back from a failure, even one that was not noticed."""
        self.worker_fails(worker)
        self._is_torn = self._started > 0
        running = (visit.unit for visit in self.running.values())
        self._queue.worker_joins(worker, tuple(partitions), self._done.union(running))

    def worker_fails(self, worker: str) -> Visit | None:
        """Remove a worker; its running visit, if any, is put back from Q' to Q (section 4.6) and returned."""
        lost = self.running.get(worker)
        self._is_torn |= worker in self.workers and self._started > 0
        self._queue.worker_leaves(worker)
        if lost:
            self.unit_failed(lost)
        return lost

    def unit_done(self, visit: Visit) -> bool:
        """Record the successful end of a visit (Algorithm 2).

        Returns
        -------
        bool
            False, with nothing changed, if the visit is not running: this is a late report of a worker that
            was given up, and its unit is or was trained elsewhere from the last checkpoint.
        """
        if not self._release(visit):
            return False
        self.log.append(visit)
        self._done.add(visit.unit)
        self._queue.is_done(visit.unit)
        return True

    def unit_failed(self, visit: Visit) -> None:
        """Put the unit of a failed visit back into the queue; ignore a visit that is not running."""
        if self._release(visit) and self.configs.get(visit.config) == visit.epoch:
            self._queue.add(visit.unit)

    def undo(self, visits: Collection[Visit]) -> None:
        """Put the units of done visits of one configuration back: their results were lost.

        The configuration, of which no unit may be running, continues in the epoch of the earliest one.
        """
        (config,) = {visit.config for visit in visits}
        self.config_stops(config)
        self.log = [visit for visit in self.log if visit not in visits]
        self._done.difference_update(visit.unit for visit in visits)
        self.config_joins(config, min(visit.epoch for visit in visits))

    def dispatch(self, now_s: float = 0.0, may_start: MayStart = lambda *_: True) -> tuple[Visit, ...]:
        """Start all units that can start now, planned ones first (Algorithm 1, lines 6 to 15).

        Parameters
        ----------
        now_s : float
            Seconds on any clock; needed only for rescheduling.
        may_start : callable
            Function of a unit and a worker that returns false if it must not start now.
        """
        if self._reschedule and self._needs_plan:
            self.follow(self._reschedule(self, now_s))
        return tuple(
            self._start(unit, worker, now_s)
            # In two passes, so that no drawn unit takes the configuration of a planned one.
            for choices in (self._planned, self._drawn)
            for worker in self._queue.homes
            if worker not in self.running
            and (unit := next((each for each in choices(worker) if may_start(each, worker)), None))
        )

    def next_turn(self, worker: str) -> Unit | None:
        """Return the unit that a worker, busy or not, can process next by the plan; None if none waits."""
        return next(self._planned(worker), None) if worker in self._queue.homes else None

    @property
    def _needs_plan(self) -> bool:
        """True if the plan is for other workers than the present ones, or ends before the waiting units.

        A plan from before the first start remains valid if all its workers are present.
        """
        if not self._queue:
            return False
        if self._started == 0:
            return not self._queue.plan or bool(self._queue.missing)
        return self._is_torn or self._queue.is_used_up

    def _planned(self, worker: str) -> Iterator[Unit]:
        """Yield the next unit of a worker by the plan, if it has one."""
        unit = self._queue.next_planned(worker, self._busy)
        if unit is not None and not self._is_too_early(worker, unit):
            yield unit

    def _is_too_early(self, worker: str, unit: Unit) -> bool:
        """Return true if an earlier turn of the worker is for a later epoch of an active configuration."""
        turns = self._queue.turns_before(worker, unit)
        return any(self.configs.get(turn.config, turn.epoch) < turn.epoch for turn in turns)

    def _drawn(self, worker: str) -> Iterator[Unit]:
        """Yield the units that no plan has, in random order.

        Each start has a new generator, so that no generator state has to be saved.
        """
        generator = random.Random(f"{self._seed}:{self._started}")
        loose = list(self._queue.loose(worker, self._busy))
        while loose:
            yield loose.pop(generator.randrange(len(loose)))

    def _start(self, unit: Unit, worker: str, now_s: float) -> Visit:
        visit = Visit(self._started, *unit, worker)
        self._started += 1
        self._queue.remove(unit)
        self.running[worker] = visit
        self.since[worker] = now_s
        self._busy.add(unit.config)
        return visit

    def _release(self, visit: Visit) -> bool:
        # Compared with its number: the same unit may have been started anew on the same worker.
        if self.running.get(visit.worker) != visit:
            return False
        del self.running[visit.worker], self.since[visit.worker]
        self._busy.discard(visit.config)
        return True


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
