"""An AutoML procedure that drives the model hopper on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.trial_history import Report, Trial, TrialHistory
from hetctl.methods.hopper.simulate import HopClock, HopTrace, Outage
from hetctl.methods.hopper.state_machine import Hopper

Loss = Callable[[Trial], float | None]
"""Loss of a trial after `trial.epochs`, lower is better; None if the trial failed."""
Seconds = Callable[[Trial, str, str], float]
"""Time of a trial's unit in seconds, by trial, partition and worker."""


def simulate_search(
    procedure: Procedure,
    homes: Mapping[str, Sequence[str]],
    *,
    loss: Loss,
    seconds: Seconds,
    most: int | None = None,
    seed: int = 0,
    outages: Iterable[Outage] = (),
) -> HopTrace:
    """Simulate a hopper that trains the trials of a procedure, until the procedure is done.

    A trial joins the hopper when the procedure requests it, late or again, and leaves when it has its
    epochs and its loss is reported (CEREBRO, section 4.6 and appendix 11). Trials do not wait for each
    other unless the procedure requires it.

    Parameters
    ----------
    procedure : Procedure
        Source of the trials and receiver of the reports; its history holds the result of the search. An
        interrupted procedure is continued.
    homes : mapping of str to sequence of str
        Partitions of the training data by worker.
    most : int or None
        Most trials in the hopper at a time, at least 1; None for all that are asked for.
    seed : int
        Seed of the hopper's random draws.

    Returns
    -------
    HopTrace
        Visits of all trials. A configuration is named by its trial's number. Its epochs count from 0,
        those of its parent included.

    Raises
    ------
    InfeasibleError
        If a partition is permanently lost before every trial has visited it.
    """
    search = _SearchRun(procedure, Hopper(dict.fromkeys(chain(*homes.values())), seed=seed), loss, most)
    clock = HopClock(
        search.hopper,
        homes,
        seconds=lambda visit: seconds(search.trial(visit.config), visit.partition, visit.worker),
        epoch_ends=search.epoch_ends,
        outages=outages,
    )
    search.begin()
    return clock.run()


class _SearchRun:
    """Adapter between a procedure, which counts whole trials, and a hopper, which counts epochs."""

    def __init__(self, procedure: Procedure, hopper: Hopper, loss: Loss, most: int | None) -> None:
        self.hopper = hopper
        self._procedure, self._loss, self._most = procedure, loss, most

    def trial(self, config: str) -> Trial:
        """Return the latest trial that was asked for with this configuration."""
        return self._procedure.history.trials[int(config)]

    def begin(self) -> None:
        """Add the trials that wait from an earlier run, then the newly requested ones."""
        for trial in self._procedure.history.waiting:
            self._join(trial)
        self._ask()

    def epoch_ends(self, config: str, epoch: int) -> None:
        """Begin the next epoch, or report the trial's loss and request further trials."""
        trial = self.trial(config)
        if epoch + 1 < trial.epochs:
            self.hopper.config_joins(config, epoch + 1)
            return
        # It leaves before its report, after which the procedure may ask for the same trial again.
        self.hopper.config_stops(config)
        self._procedure.tell(Report(trial.number, trial.epochs, self._loss(trial)))
        self._ask()

    def _ask(self) -> None:
        waiting = len(self._procedure.history.waiting)
        for trial in self._procedure.ask(None if self._most is None else self._most - waiting):
            self._join(trial)

    def _join(self, trial: Trial) -> None:
        self.hopper.config_joins(str(trial.number), _epochs_before(trial, self._procedure.history))


def _epochs_before(trial: Trial, history: TrialHistory) -> int:
    """Return the epochs that a trial has when it joins: its own so far, or those of its parent."""
    reports = (event for event in history.events if isinstance(event, Report))
    return max(
        (report.epochs for report in reports if report.trial == trial.number),
        default=trial.parent.epochs if trial.parent else 0,
    )
