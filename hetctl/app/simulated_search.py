"""A search under a virtual clock: its trials with their rates, and losses that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.methods.automl.trials import Trial
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.searches import SearchOutcome
from hetctl.model.workload import Workload


class SimulatedSearch:
    """Trials of an ensemble's search, as a run would ask for them.

    The loss of a trial is drawn once and stays the same: the trial that is ahead after one epoch is ahead at
    the end.

    Parameters
    ----------
    workloads : mapping of str to Workload
        Members by name, trials as planned.
    gpus : int
        Number of GPUs.
    seed : int
        Seed of the losses.

    Raises
    ------
    BadInputError
        If the length of an epoch is not known, or Optuna is needed and missing.
    """

    def __init__(self, ensemble: Ensemble, workloads: Mapping[str, Workload], gpus: int, seed: int) -> None:
        search = ensemble.search
        assert search is not None
        self._workloads, self._seed = workloads, seed
        self._numbers = {name: number for number, name in enumerate(search.members)}
        self._epochs, self._trained = 0, dict[int, int]()
        first = ensemble.member(search.members[0])
        if workloads[first.name].samples_per_epoch is None:
            raise BadInputError(
                f"the samples of an epoch of {first.name} are not known, but searches count epochs",
                "give samples_per_epoch in the ensemble file, or import rates with that column",
            )
        self._method, self._last, self._metrics = search.method, search.epochs, 1 + len(search.also)
        # Configs do not matter here, and samplers take long to draw them.
        self._search = SearchRun(replace(search, sampler=None), max(1, gpus // first.min_gpus))

    def first(self) -> list[Workload]:
        """Return the members at the start: those that are no trials, and the first trials."""
        listed = (workload for name, workload in self._workloads.items() if name not in self._numbers)
        return [*listed, *self._asked(UsedResources(0.0, 0.0))]

    def after(self, name: str, now_s: float, gpu_s: float) -> list[Workload]:
        """Return the trials that the search asks for when one has had its epochs.

        Parameters
        ----------
        name : str
            Name of that trial; after another member no trial follows.
        now_s, gpu_s : float
            Seconds and GPU-seconds since the start.
        """
        if name not in self._numbers:
            return []
        number = self._numbers[name]
        draw = random.Random(f"{self._seed}:{number}")
        self._search.report(self._search.trials[number], [draw.random() for _ in range(self._metrics)])
        return list(self._asked(UsedResources(gpu_s / 3600, now_s)))

    @property
    def outcome(self) -> SearchOutcome:
        """Size of the search so far."""
        trials = self._search.trials
        finished = sum(trial.epochs >= self._last for trial in trials)
        return SearchOutcome(self._method, len(trials), self._epochs, finished)

    def _asked(self, resources: UsedResources) -> Iterator[Workload]:
        for request in self._search.requests(resources):
            yield self._workload(self._search.trials[int(request["number"])])

    def _workload(self, trial: Trial) -> Workload:
        """Return a trial with the epochs that it still needs; it has those of its parent."""
        workload = self._workloads[self._search.member_of(trial)]
        done = self._trained.get(trial.number, trial.parent.epochs if trial.parent else 0)
        self._trained[trial.number] = trial.epochs
        self._epochs += trial.epochs - done
        samples = float((trial.epochs - done) * (workload.samples_per_epoch or 0))
        return workload.interrupted(samples) if done else workload.with_left(samples)
