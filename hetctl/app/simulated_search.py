"""A search under a virtual clock: its trials with their rates, and losses that are drawn at random."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.run_status import MOST_SIMULATED
from hetctl.model.searches import SearchOutcome, Trial
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline, task_s
from hetctl.scheduling.fusing import places

DRAWS = 5
"""Number of draws of the losses of a search; with more than `MOST_SIMULATED` trials they differ little."""

TURNS = 4
"""Number of turns in an epoch of trials that share GPUs."""


class _Turns(NamedTuple):
    """Turns that a trial has left, each of some seconds on its least number of GPUs."""

    name: str
    gpus: int
    seconds: float
    left: int

    @classmethod
    def of(cls, part: Workload) -> _Turns:
        """Return the turns of the work that a member has left."""
        count = TURNS * max(1, EpochTimeline(part, part.least_rate).count)
        return cls(part.name, part.min_gpus, task_s(part, part.least_rate) / count, count)


class LikelySearch(NamedTuple):
    """Likely training of a search.

    Parameters
    ----------
    trials : dict of str to Trial
        Its trials by member, each with its last epochs.
    seconds : float
        Its length on the least numbers of GPUs.
    waits : float
        Ratio of that to a bound for the same training if all trials could begin at the start; at least 1.
    """

    trials: dict[str, Trial]
    seconds: float
    waits: float

    def epochs(self, member: str) -> int:
        """Return the epochs of a trial beyond its parent's; 0 if its budget leaves it out."""
        trial = self.trials.get(member)
        return trial.epochs - self.inherited(member) if trial else 0

    def inherited(self, member: str) -> int:
        """Return the epochs that a trial has from its parent."""
        trial = self.trials.get(member)
        return trial.parent.epochs if trial and trial.parent else 0


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
        self._workloads, self._gpus, self._seed = workloads, gpus, seed
        self._numbers = {name: number for number, name in enumerate(search.members)}
        self._epochs, self._trained = 0, dict[int, int]()
        first = ensemble.member(search.members[0])
        if workloads[first.name].samples_per_epoch is None:
            raise BadInputError(
                f"the samples of an epoch of {first.name} are not known, but searches count epochs",
                "give samples_per_epoch in the ensemble file, or import rates with that column",
            )
        self._method, self._last, self._metrics = search.method, search.epochs, 1 + len(search.also)
        parallel = max(1, gpus // first.min_gpus)
        if search.configs_are_known:
            parallel *= places(workloads[name].fuses for name in search.members)
        # Configs do not matter here, and samplers take long to draw them.
        self._search = SearchRun(replace(search, sampler=None), parallel)

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

    def on_least_gpus(self) -> LikelySearch:
        """Return what it trains if trials take turns on their least numbers of GPUs, as those that hop do."""
        waiting, running = deque(map(_Turns.of, self.first())), list[tuple[float, str, _Turns]]()
        free, now_s, gpu_s = self._gpus, 0.0, 0.0
        spent_s = defaultdict[str, float](float)
        while waiting or running:
            while waiting and waiting[0].gpus <= free:
                turns = waiting.popleft()
                heapq.heappush(running, (now_s + turns.seconds, turns.name, turns))
                free -= turns.gpus
            if not running:
                # One is too wide for the cluster, which a plan refuses.
                break
            now_s, name, turns = heapq.heappop(running)
            free, gpu_s = free + turns.gpus, gpu_s + turns.seconds * turns.gpus
            spent_s[name] += turns.seconds
            if turns.left > 1:
                waiting.append(turns._replace(left=turns.left - 1))
            else:
                waiting.extend(map(_Turns.of, self.after(name, now_s, gpu_s)))
        trials = {self._search.member_of(trial): trial for trial in self._search.trials}
        at_once_s = max([gpu_s / self._gpus, *spent_s.values()])
        return LikelySearch(trials, now_s, max(1.0, now_s / at_once_s) if at_once_s else 1.0)

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


def simulated_searches(
    ensemble: Ensemble, members: Sequence[Workload], gpus: int, seed: int
) -> list[SimulatedSearch]:
    """Return the search of a new run with several draws of losses: trials stop, and some start again.

    None without a search, and for trials without epochs, of which an imported table only has the samples.
    """
    workloads = {member.name: member for member in members}
    trials = [workloads.get(name) for name in ensemble.trials]
    if not trials or not all(trial and trial.samples_per_epoch for trial in trials):
        return []
    draws = DRAWS if len(trials) <= MOST_SIMULATED else 1
    return [SimulatedSearch(ensemble, workloads, gpus, seed + draw) for draw in range(draws)]


def likely_search(
    ensemble: Ensemble, members: Sequence[Workload], gpus: int, seed: int = 0
) -> LikelySearch | None:
    """Return the median of several draws of a search; None where `simulated_searches` is empty."""
    draws = [one.on_least_gpus() for one in simulated_searches(ensemble, members, gpus, seed)]
    return sorted(draws, key=lambda draw: draw.seconds)[len(draws) // 2] if draws else None
