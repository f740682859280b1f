"""Status of a run, from which tables, pages and ``--json`` output are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from hetctl.model.cost import Cost, Energy
from hetctl.model.hops import HopStatus
from hetctl.model.job import Job
from hetctl.model.pipelines import PipelineStatus, WaveCheck
from hetctl.model.run import Usage
from hetctl.model.seed_groups import SeedGroup
from hetctl.model.serialization import OMITTED
from hetctl.model.training_progress import EpochResult, LiveMetrics
from hetctl.model.values import dataclass

FOREMOST = ("failed", "training", "waiting", "paused", "converged", "stopped", "cancelled")
"""States of members, the most important to show first."""
ORDERS = ("state", "name", "epochs", "best")
"""Orders of members that a live table has."""
MOST_MEMBERS = 100
"""Largest number of members that are shown."""


def foremost(states: Mapping[str, str], most: int | None) -> Mapping[str, str]:
    """Select the members to show: failed ones first, then those in training, then waiting ones.

    Parameters
    ----------
    states : mapping of str to str
        State by member; the selected members keep this order.
    most : int or None
        Largest number of them; None: all.
    """
    if most is None or len(states) <= most:
        return states
    ranks = [FOREMOST.index(state) for state in states.values()]
    # The sort is stable: members of equal rank are chosen in the ensemble's order, the same at each look.
    chosen = set(sorted(range(len(ranks)), key=ranks.__getitem__)[:most])
    return {name: state for number, (name, state) in enumerate(states.items()) if number in chosen}


@dataclass(frozen=True)
class MemberRate:
    """A member's rate on a number of GPUs, in samples/s.

    Parameters
    ----------
    gpus : int
        Number of GPUs; 0: a part of one, if its newest rate was seen there.
    gpu_type : str or None
        Type of the GPUs, at a site with several types.
    profiled, planned : float or None
        Rate that the profile has or predicts, and rate in the plan, which also heeds earlier runs; None:
        there is none.
    seen : float or None
        Rate in training; None: it was not timed on these GPUs.
    rate_known : bool
        False if the planned rate is an estimate, and none was seen.
    """

    gpus: int
    gpu_type: str | None
    profiled: float | None
    planned: float | None
    seen: float | None
    rate_known: bool = True


MOST_SIMULATED = 500
"""Largest number of members that are simulated on other clusters, which takes a few seconds then."""


@dataclass(frozen=True)
class OnCluster:
    """Simulated makespans in seconds on a cluster: with the baseline, and with `fluid`."""

    nodes: int
    gpus: int
    baseline_s: float
    fluid_s: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of a finished run with simulations that use its measured rates and numbers of epochs.

    Parameters
    ----------
    baseline : str
        Name of the planner with which the run is compared.
    baseline_s, simulated_s : float
        Simulated makespans in seconds with that planner and with the run's own.
    epochs : int
        Epochs of all members together.
    clusters : tuple of OnCluster
        The same epochs on clusters of other sizes, as far as these are large enough for each member; empty
        for more than `MOST_SIMULATED` members.
    known_gpus : int
        Largest number of GPUs on which a rate was seen or profiled; rates on more are predicted.
    """

    baseline: str
    baseline_s: float
    simulated_s: float
    epochs: int
    clusters: tuple[OnCluster, ...] = ()
    known_gpus: int = 0


@dataclass(frozen=True)
class BatchChange:
    """Change of the samples that a member trains in a step, its global batch.

    Parameters
    ----------
    epoch : int
        First epoch that ended with the new batch.
    before, after : int
        Samples of a step.
    gpus : int
        GPUs of the member in that epoch.
    """

    epoch: int
    before: int
    after: int
    gpus: int


@dataclass(frozen=True)
class MemberStatus:
    """Row of the status table.

    Parameters
    ----------
    state : str
        ``waiting``, ``training``, ``converged``, ``failed``, ``paused`` or ``cancelled`` by the user or, of a
        trial that its search does not continue at present, ``stopped``.
    gpus_by_round : tuple of int
        GPUs held in each round of the run; 0 in rounds without the member.
    best : float or None
        Best value so far of the stop rule's `metric`.
    predicted_s, measured_s : float or None
        Predicted and measured seconds in tasks (start-up, training, evaluation, checkpoints) over all rounds.
    reason : str or None
        Reason why the member converged or failed.
    log_tail : tuple of str
        Last lines of a failed member's log that `reason` does not repeat.
    log : str
        Path of that log; empty if the member has not failed.
    live_metrics : LiveMetrics or None
        Current metrics of a member in training.
    rates : tuple of MemberRate
        Rates on its least number of GPUs, and on every number that it has trained on.
    batch_changes : tuple of BatchChange
        Changes of its global batch, which are in its results.
    config : mapping
        Its config; of a trial, the one that its search has drawn.
    is_trial : bool
        True for a trial of a search.
    gpu_seconds : float
        Time of all its GPUs in tasks that have ended.
    energy_j : float or None
        Energy of these in joules; None: not measured.
    mode : str
        ``max`` if more of `metric` is better, ``min`` if less is.
    best_epoch : int or None
        Best epoch by the stop rule whose checkpoint is kept; None: there is none.
    best_checkpoint : str
        Path of that checkpoint.
    samples_per_epoch : int or None
        Training samples of an epoch; None: not known yet.
    """

    member: str
    state: str
    gpus_by_round: tuple[int, ...]
    epochs: int
    max_epochs: int
    metric: str
    best: float | None
    predicted_s: float | None
    measured_s: float | None
    reason: str | None = None
    log_tail: tuple[str, ...] = ()
    log: str = ""
    live_metrics: LiveMetrics | None = None
    rates: tuple[MemberRate, ...] = ()
    batch_changes: tuple[BatchChange, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    is_trial: bool = False
    gpu_seconds: float = 0.0
    energy_j: float | None = None
    mode: str = "min"
    best_epoch: int | None = None
    best_checkpoint: str = ""
    samples_per_epoch: int | None = None

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key by which the member with the best metric is the first."""
        if self.best is None:
            return math.inf, self.member
        return (-self.best if self.mode == "max" else self.best), self.member

    @property
    def last_rate(self) -> MemberRate | None:
        """Rate on the number of GPUs that it had last, or on the fewest; on a part of one as it is there."""
        held = next((gpus for gpus in reversed(self.gpus_by_round) if gpus), 1)
        found = {rate.gpus: rate for rate in self.rates}
        on_part = found.pop(0, None)
        rate = found.get(held) or found.get(min(found, default=0))
        return replace(rate, seen=on_part.seen) if rate and on_part else rate


@dataclass(frozen=True)
class BalancePoint:
    """Balancing of a member at one time.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    batches : tuple of int
        Batch of each worker.
    iteration_s, t_star_s : float
        Time of the slowest worker in seconds, and the estimated least time of any split of the batch.
    """

    time: float
    batches: tuple[int, ...]
    iteration_s: float
    t_star_s: float


@dataclass(frozen=True)
class BalanceHistory:
    """Balancing of a member over the run.

    Parameters
    ----------
    workers : tuple of str
        Node and GPU of each worker.
    iteration_s, equal_batches_s : float
        Mean time of the slowest worker in seconds, and its estimate with equal batches.
    """

    member: str
    workers: tuple[str, ...]
    points: tuple[BalancePoint, ...]
    iteration_s: float
    equal_batches_s: float

    @property
    def gain(self) -> float:
        """Number of iterations in the time of one with equal batches."""
        return self.equal_batches_s / self.iteration_s


@dataclass(frozen=True)
class TaskSpan:
    """Member on the GPUs of one node, in seconds from the run's start; `end_s` is None while it runs.

    Parameters
    ----------
    exit_code : int or None
        Exit code; None while it runs, or if its driver was killed.
    seat : int
        Same as in `Placement`.
    """

    member: str
    round: int
    node: str
    gpus: tuple[int, ...]
    start_s: float
    end_s: float | None
    exit_code: int | None
    seat: int = field(default=0, metadata=OMITTED)

    @property
    def failed(self) -> bool:
        """True if it ended without exit code 0."""
        return self.end_s is not None and self.exit_code != 0


@dataclass(frozen=True)
class RoundSpan:
    """Interval of one round, in seconds from the run's start.

    Parameters
    ----------
    predicted_s : float or None
        Predicted length; None: rates of members were guesses.
    ended_by : str or None
        ``converged``, ``alpha`` (too few active GPUs), ``resize`` or ``preempted`` (the planner took the
        last member's GPUs), ``deadline``, ``failed``, ``signal``, ``driver-lost`` or a budget.
    """

    index: int
    job: int
    start_s: float
    end_s: float | None
    predicted_s: float | None
    ended_by: str | None


@dataclass(frozen=True)
class TimeShares:
    """Parts of a member's time in tasks, in seconds.

    Parameters
    ----------
    startup_s : float
        From launches to first steps: processes, imports, samples, network.
    steps_s, data_s : float
        Training steps, and waits for batches between them.
    evaluate_s, save_s : float
        Evaluations, and waits for checkpoints, which are written beside the training.
    rest_s : float
        All else, such as epochs that were trained again.
    """

    member: str
    startup_s: float
    steps_s: float
    data_s: float
    evaluate_s: float
    save_s: float
    rest_s: float

    @property
    def total_s(self) -> float:
        """The whole time."""
        return self.startup_s + self.steps_s + self.data_s + self.evaluate_s + self.save_s + self.rest_s


@dataclass(frozen=True)
class RunStatus:
    """Run with the state of all its members, or of those to be shown.

    Parameters
    ----------
    state : str
        ``queued``, ``in-doubt``, ``running``, ``between-jobs``, ``finished``, ``failed``, ``cancelled``,
        ``stopped`` or ``stalled``.
    nodes : int
        Nodes of each job.
    used : Usage
        Resources used so far.
    cost, predicted_cost : Cost or None
        Resources that its jobs have held so far, and those predicted by the submitted plan; None: rates of
        members were guesses.
    energy : Energy or None
        Energy of tasks that have ended; None: not measured.
    predicted_s : float or None
        Predicted seconds of the whole run, by the submitted plan; None: rates of members were guesses.
    measured_s : float
        Seconds from the start of the first job to the end of the last, or until now while the run goes on.
    states : mapping of str to str
        States of all members, in the order of the ensemble.
    members, tasks, history
        Data of all members, or of those to be shown.
    history : mapping of str to sequence of EpochResult
        Finished epochs by member.
    warnings : tuple of str
        Messages about problems of the run.
    comparison : Comparison or None
        Comparison of a finished run, if requested.
    balances : tuple of BalanceHistory
        Courses of balanced batches, the largest gain first, if requested.
    hops : HopStatus or None
        Hops of its members; None if they do not hop.
    pipelines : tuple of PipelineStatus
        Pipelines of the members that train, or trained, in that mode.
    wave_checks : tuple of WaveCheck
        Staleness of the pipelines' weights against its bounds, if requested.
    seeds : tuple of SeedGroup
        Results of the members that differ in their seed alone.
    track : str
        Tracker to which its epochs are forwarded; empty: none.
    shares : tuple of TimeShares
        Parts of the members' time, if requested.
    """

    run: str
    ensemble: str
    site: str
    device: str
    planner: str
    gpus: int
    nodes: int
    used: Usage
    cost: Cost
    predicted_cost: Cost | None
    energy: Energy | None
    state: str
    reason: str
    submitted_at: float
    predicted_s: float | None
    measured_s: float
    states: Mapping[str, str]
    members: tuple[MemberStatus, ...]
    rounds: tuple[RoundSpan, ...]
    tasks: tuple[TaskSpan, ...]
    jobs: tuple[Job, ...]
    history: Mapping[str, Sequence[EpochResult]]
    warnings: tuple[str, ...] = ()
    comparison: Comparison | None = None
    balances: tuple[BalanceHistory, ...] = ()
    hops: HopStatus | None = None
    pipelines: tuple[PipelineStatus, ...] = ()
    wave_checks: tuple[WaveCheck, ...] = ()
    seeds: tuple[SeedGroup, ...] = ()
    track: str = ""
    shares: tuple[TimeShares, ...] = ()
