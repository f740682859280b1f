"""The hopper as a state machine: it receives events and returns the units to start."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetctl.methods.hopper.unit_queue import UnitQueue
from hetctl.model.hops import Unit, Visit


@dataclass(frozen=True)
class HopperState:
    """Complete state of a hopper; `hetctl.model.serialization` converts it to JSON's types and back.

    Parameters
    ----------
    plan : tuple of Visit
        Plan in force; empty if units are drawn at random.
    workers : mapping of str to tuple of str
        Present workers with their partitions.
    configs : mapping of str to int
        Active configurations with their present epochs.
    running : tuple of Visit
        Running visits, Q' in CEREBRO.
    log : tuple of Visit
        Completed visits, in the order of their ends.
    started : int
        Number of visits started so far.
    since : mapping of str to float
        Start of the running visit by worker, in seconds on the clock of `Hopper.dispatch`.
    torn : bool
        True if a worker failed or joined after the first start and since the plan was made.
    """

    partitions: tuple[str, ...]
    seed: int = 0
    plan: tuple[Visit, ...] = ()
    workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configs: Mapping[str, int] = field(default_factory=dict)
    running: tuple[Visit, ...] = ()
    log: tuple[Visit, ...] = ()
    started: int = 0
    since: Mapping[str, float] = field(default_factory=dict)
    torn: bool = False


MayStart = Callable[[Unit, str], bool]
Reschedule = Callable[[HopperState, float], Sequence[Visit]]
"""Function from a state and its time in seconds to a plan of what is left."""


class Hopper:
    """Model hopper parallelism of any configurations on any workers (CEREBRO, Algorithms 1 and 2).

    After one or several events, `dispatch` returns the visits to start. Each configuration visits each
    partition once per epoch, on one worker at a time, and a worker trains one configuration at a time,
    without preemption. Workers may share partitions (section 4.5), fail, return and join late;
    configurations join and stop at any time (section 4.6). After a crash, an executor resumes from `state`.

    With a plan, units start in the plan's order for each worker and each configuration. A worker waits for
    a configuration that has not yet begun the epoch of its turn, unless that configuration has stopped.
    Units that the plan does not contain, or has on an absent worker, are drawn at random among those that
    an idle worker could process; without a plan, all units are. A log is a valid plan: following it is a
    replay.

    With `reschedule`, `dispatch` requests a new plan if workers failed, returned or joined late since the
    last plan, if there is none, or if it is completed.

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
    """

    def __init__(
        self,
        partitions: Iterable[str],
        *,
        seed: int = 0,
        plan: Sequence[Visit] = (),
        reschedule: Reschedule | None = None,
    ) -> None:
        self._partitions = tuple(partitions)
        self._seed = seed
        self._reschedule = reschedule
        self._queue = UnitQueue(plan)
        self._epochs: dict[str, int] = {}
        self._running: dict[str, Visit] = {}
        self._busy: set[str] = set()
        self._log: list[Visit] = []
        self._done: set[Unit] = set()
        self._started = 0
        self._since: dict[str, float] = {}
        self._torn = False

    @classmethod
    def resume(cls, state: HopperState, reschedule: Reschedule | None = None) -> Hopper:
        """Return a hopper with this state, which continues exactly as the original would."""
        hopper = cls(state.partitions, seed=state.seed, plan=state.plan, reschedule=reschedule)
        hopper._started = state.started
        hopper._since = dict(state.since)
        hopper._torn = state.torn
        hopper._log = list(state.log)
        hopper._done = {visit.unit for visit in state.log}
        for unit in hopper._done:
            hopper._queue.is_done(unit)
        hopper._running = {visit.worker: visit for visit in state.running}
        hopper._busy = {visit.config for visit in state.running}
        for worker, partitions in state.workers.items():
            hopper._queue.worker_joins(worker, partitions)
        for config, epoch in state.configs.items():
            hopper._enter(config, epoch)
        return hopper

    @property
    def state(self) -> HopperState:
        """State for `resume`."""
        return HopperState(
            partitions=self._partitions,
            seed=self._seed,
            plan=self._queue.plan,
            workers=dict(self._queue.homes),
            configs=dict(self._epochs),
            running=tuple(self._running.values()),
            log=self.log,
            started=self._started,
            since=dict(self._since),
            torn=self._torn,
        )

    @property
    def log(self) -> tuple[Visit, ...]:
        """Completed visits, in the order of their ends."""
        return tuple(self._log)

    @property
    def running(self) -> Mapping[str, Visit]:
        """Running visits by worker."""
        return dict(self._running)

    @property
    def workers(self) -> tuple[str, ...]:
        """Present workers, in the order in which they joined."""
        return tuple(self._queue.homes)

    @property
    def configs(self) -> Mapping[str, int]:
        """Active configurations with their present epochs."""
        return dict(self._epochs)

    @property
    def is_over(self) -> bool:
        """True if no unit waits or runs."""
        return not self._queue and not self._running

    @property
    def stranded(self) -> tuple[str, ...]:
        """Partitions that units wait for but no present worker has; the run needs a worker with them."""
        wanted = {unit.partition for unit in self._queue}.difference(*self._queue.homes.values())
        return tuple(partition for partition in self._partitions if partition in wanted)

    def has_finished(self, config: str) -> bool:
        """Return true if an active configuration has visited all partitions in its epoch."""
        epoch = self._epochs[config]
        return all(Unit(config, epoch, partition) in self._done for partition in self._partitions)

    def follow(self, plan: Sequence[Visit]) -> None:
        """Replace the plan for all waiting units, as after replanning; empty to draw units at random."""
        self._torn = False
        earlier, self._queue = self._queue, UnitQueue(plan)
        for unit in self._done:
            self._queue.is_done(unit)
        for worker, partitions in earlier.homes.items():
            self._queue.worker_joins(worker, partitions)
        for unit in earlier:
            self._queue.add(unit)

    def config_joins(self, config: str, epoch: int = 0) -> None:
        """Let a configuration visit all partitions, once more in each later epoch.

        A stopped configuration continues if it joins in the same epoch.

        Raises
        ------
        ValueError
            If it still has units of another epoch, or one is running.
        """
        if config in self._busy or (config in self._epochs and not self.has_finished(config)):
            raise ValueError(f"configuration {config} has not finished epoch {self._epochs.get(config)}")
        self._enter(config, epoch)

    def config_stops(self, config: str) -> None:
        """Remove a configuration's waiting units; a running one continues to its end, which is logged."""
        epoch = self._epochs.pop(config, None)
        for partition in self._partitions if epoch is not None else ():
            unit = Unit(config, epoch or 0, partition)
            if unit in self._queue:
                self._queue.remove(unit)

    def worker_joins(self, worker: str, partitions: Iterable[str]) -> Visit | None:
        """Add a worker: at the beginning, late, or back from a failure.

        Returns
        -------
        Visit or None
            The visit that it was thought to be running, if its failure had not been noticed.

        Raises
        ------
        ValueError
            If it has an unknown partition.
        """
        has = tuple(partitions)
        if unknown := set(has).difference(self._partitions):
            raise ValueError(f"worker {worker} has unknown partitions: {', '.join(sorted(unknown))}")
        lost = self.worker_fails(worker)
        self._torn = self._started > 0
        running = (visit.unit for visit in self._running.values())
        self._queue.worker_joins(worker, has, self._done.union(running))
        return lost

    def worker_fails(self, worker: str) -> Visit | None:
        """Remove a worker; its running visit, if any, is put back from Q' to Q (section 4.6) and returned."""
        lost = self._running.get(worker)
        if worker in self._queue.homes:
            self._torn = self._started > 0
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
        self._log.append(visit)
        self._done.add(visit.unit)
        self._queue.is_done(visit.unit)
        return True

    def unit_failed(self, visit: Visit) -> bool:
        """Put the unit of a failed visit back into the queue; return false as `unit_done` does."""
        if not self._release(visit):
            return False
        if self._epochs.get(visit.config) == visit.epoch:
            self._queue.add(visit.unit)
        return True

    def undo(self, visits: Collection[Visit]) -> None:
        """Put the units of done visits of one configuration back: their results were lost.

        The configuration, of which no unit may be running, continues in the epoch of the earliest one.
        """
        if not visits:
            return
        (config,) = {visit.config for visit in visits}
        self.config_stops(config)
        self._log = [visit for visit in self._log if visit not in visits]
        self._done.difference_update(visit.unit for visit in visits)
        self._enter(config, min(visit.epoch for visit in visits))

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
            self.follow(self._reschedule(self.state, now_s))
        return tuple(
            self._start(unit, worker, now_s)
            # In two passes, so that no drawn unit takes the configuration of a planned one.
            for choices in (self._planned, self._drawn)
            for worker in self._queue.homes
            if worker not in self._running
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
        return self._torn or self._queue.is_used_up

    def _planned(self, worker: str) -> Iterator[Unit]:
        """Yield the next unit of a worker by the plan, if it has one."""
        unit = self._queue.next_planned(worker, self._busy)
        if unit is not None and not self._is_too_early(worker, unit):
            yield unit

    def _is_too_early(self, worker: str, unit: Unit) -> bool:
        """Return true if an earlier turn of the worker is for a later epoch of an active configuration."""
        turns = self._queue.turns_before(worker, unit)
        return any(self._epochs.get(turn.config, turn.epoch) < turn.epoch for turn in turns)

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
        self._running[worker] = visit
        self._since[worker] = now_s
        self._busy.add(unit.config)
        return visit

    def _release(self, visit: Visit) -> bool:
        # Compared with its number: the same unit may have been started anew on the same worker.
        if self._running.get(visit.worker) != visit:
            return False
        del self._running[visit.worker], self._since[visit.worker]
        self._busy.discard(visit.config)
        return True

    def _enter(self, config: str, epoch: int) -> None:
        self._epochs[config] = epoch
        running = {visit.unit for visit in self._running.values()}
        for partition in self._partitions:
            unit = Unit(config, epoch, partition)
            if unit not in self._done and unit not in running:
                self._queue.add(unit)
