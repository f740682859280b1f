"""Simulation of the hopper over one or several epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hetctl.methods.hopper.reschedule import Rescheduler
from hetctl.methods.hopper.search_options import SearchOptions
from hetctl.methods.hopper.simulate import HopClock, HopTrace, Outage
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.methods.hopper.visits import Visit


def simulate_hops(
    units: UnitTimes,
    *,
    plan: Sequence[Visit] = (),
    seed: int = 0,
    epochs: int | Mapping[str, int] = 1,
    outages: Iterable[Outage] = (),
    reschedule: SearchOptions | None = None,
) -> HopTrace:
    """Run a hopper until every configuration has visited every partition in each of its epochs.

    A configuration begins its next epoch when its previous one has ended, independent of the others
    (CEREBRO, section 2: there is no barrier). It leaves after its last epoch.

    Parameters
    ----------
    plan : sequence of Visit
        Plan for the hopper; empty if it draws units at random.
    epochs : int or mapping of str to int
        Epochs of every configuration, or by configuration; one with 0 or without an entry does not join.
    reschedule : SearchOptions or None
        Options of new plans when workers fail, return or join late; None: the first plan remains in force
        as far as possible. The virtual clock stands still during rescheduling.

    Raises
    ------
    InfeasibleError
        If a partition is permanently lost before every configuration has visited it.
    """
    wanted = epochs if isinstance(epochs, Mapping) else dict.fromkeys(units.configs, epochs)
    hopper = Hopper(
        units.partitions,
        seed=seed,
        plan=plan,
        reschedule=Rescheduler(units, wanted, reschedule) if reschedule else None,
    )
    configs, partitions, workers = (
        {name: i for i, name in enumerate(names)}
        for names in (units.configs, units.partitions, units.workers)
    )

    def seconds(config: str, partition: str, worker: str) -> float:
        return float(units.seconds[configs[config], partitions[partition], workers[worker]])

    def epoch_ends(config: str, epoch: int) -> None:
        if epoch + 1 < wanted[config]:
            hopper.config_joins(config, epoch + 1)
        else:
            hopper.config_stops(config)

    clock = HopClock(hopper, _homes(units), seconds=seconds, epoch_ends=epoch_ends, outages=outages)
    for config in units.configs:
        if wanted.get(config, 0) > 0:
            hopper.config_joins(config)
    return clock.run()


def _homes(units: UnitTimes) -> dict[str, tuple[str, ...]]:
    """Return the availability map: the partitions of each worker, for which it has finite times."""
    has = np.isfinite(units.seconds).any(axis=0)
    return {
        worker: tuple(name for j, name in enumerate(units.partitions) if has[j, k])
        for k, worker in enumerate(units.workers)
    }
