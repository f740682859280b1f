"""Results of simulations: of planners, of hops, and of balanced batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from hetctl.model.plan import Allocation, Forecast
from hetctl.model.run_status import TaskSpan
from hetctl.model.searches import SearchOutcome
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Interval:
    """Time interval in which a member held a constant number of GPUs.

    Parameters
    ----------
    restart_s : float
        Seconds of the interval that were spent on restarting the member.
    samples : float
        Samples trained in the rest of the interval.
    """

    allocation: Allocation
    round_index: int
    start_s: float
    end_s: float
    restart_s: float
    samples: float

    @property
    def member(self) -> str:
        """Name of the member."""
        return self.allocation.member

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.allocation.gpus


@dataclass(frozen=True)
class Simulation:
    """Schedule of a run under a virtual clock, and its ratio to the lower bound.

    Parameters
    ----------
    work : str
        Planner's knowledge of the remaining work: ``clairvoyant`` or ``predicted``.
    sharing : str
        ``lockstep`` or ``independent``.
    mean_jct_s : float
        Mean seconds of the members from arrival to convergence.
    lower_bound_s : float
        Lower bound of the objective: no schedule has a smaller makespan or mean time.
    ratio : float
        Ratio of the objective to `lower_bound_s`; 1.0 is the optimum.
    restarts : int
        Number of starts of members that had trained before.
    gpu_busy_fraction : float
        Share of all GPU-seconds until the makespan in intervals, without restarts.
    plan_seconds : float
        Total planning time of all decisions in seconds.
    slowest_plan_s : float
        Planning time of the slowest decision in seconds.
    members : tuple of Forecast
        Completions; `done_s` counts from the start of the run.
    reason : str
        Reason for the choice of the planner; empty if the user named it.
    """

    planner: str
    objective: str
    work: str
    sharing: str
    gpus: int
    gpus_per_node: int
    makespan_s: float
    mean_jct_s: float
    lower_bound_s: float
    ratio: float
    rounds: int
    restarts: int
    gpu_busy_fraction: float
    plan_seconds: float
    slowest_plan_s: float
    intervals: tuple[Interval, ...] = ()
    members: tuple[Forecast, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class SimulationResult:
    """Result of the simulation of a planner, with its input.

    Parameters
    ----------
    site : str
        Site where the rates were measured.
    arrivals : mapping
        Seconds from the start by member.
    work_errors : mapping
        Median errors of the predicted work by the share that was done; empty if the work was known.
    search : SearchOutcome or None
        Size of the ensemble's search; None if it has none.
    """

    simulation: Simulation
    ensemble: str
    site: str
    arrivals: Mapping[str, float]
    work_errors: Mapping[float, float] = field(default_factory=dict)
    search: SearchOutcome | None = None


@dataclass(frozen=True)
class HopSimulation:
    """Simulated hops of configurations over workers.

    Parameters
    ----------
    scheduler : str
        Source of the order: a scheduler's name, or ``replay`` for a log.
    mode : str
        Mode of training: ``hopper``, ``hybrid`` or ``data-parallel``.
    configs, partitions, workers : int
        Numbers of each; groups of workers that train together count as one.
    makespan_s : float
        Time when the last unit is done, in seconds.
    lower_bound_s : float
        Lower bound in seconds of the makespan without preemption and failures of workers.
    ratio : float
        Makespan divided by the bound; 1 is optimal.
    gpu_busy_fraction : float
        Share of all workers' time until the makespan in completed units.
    lost_s : float
        Seconds of all units whose results failures of workers lost.
    plan_seconds : float
        Time that the scheduler took, in seconds.
    makespans_s : mapping of str to float
        Planned makespan of an epoch in seconds, by mode, of all modes considered; empty for a replay.
    tasks : sequence of TaskSpan
        Hops: `member` is the configuration, `node` the worker, `round` the epoch; an exit code
        other than 0 means that its result was lost by a failure.
    config_names, worker_names : sequence of str
        Configurations and workers in the order of the input.
    """

    scheduler: str
    mode: str
    configs: int
    partitions: int
    workers: int
    epochs: int
    seed: int
    makespan_s: float
    lower_bound_s: float
    ratio: float
    gpu_busy_fraction: float
    lost_s: float
    plan_seconds: float
    makespans_s: Mapping[str, float] = field(default_factory=dict)
    tasks: Sequence[TaskSpan] = ()
    config_names: Sequence[str] = ()
    worker_names: Sequence[str] = ()


@dataclass(frozen=True)
class Iteration:
    """One iteration, from its start on the virtual clock to the end of the slowest worker.

    Parameters
    ----------
    expected_s : float
        Time in seconds without jitter.
    batches : tuple of int
        Batches by worker, in the order of `worker_s`.
    """

    start_s: float
    duration_s: float
    expected_s: float
    batches: tuple[int, ...]
    worker_s: tuple[float, ...]


@dataclass(frozen=True)
class ConditionSpan:
    """Iterations under one set of conditions, compared with their limit; all times without jitter.

    Parameters
    ----------
    first, last : int
        First and last iteration.
    t_star_s : float
        min t : sum_i Gamma_i^-1(t) >= B. No split is faster, not even one into fractions of samples.
    best_s, best_batches
        Time and batches of the best split into whole samples.
    equal_s : float
        Time with equal batches, as in BSP.
    steady_s : float
        Mean time over the last quarter.
    ratio : float
        `steady_s` / `t_star_s`; 1.0 is the limit.
    reached_at : int or None
        First iteration that takes at most 1.05 `t_star_s`; None without one.
    """

    first: int
    last: int
    t_star_s: float
    best_s: float
    best_batches: tuple[int, ...]
    equal_s: float
    steady_s: float
    ratio: float
    reached_at: int | None


@dataclass(frozen=True)
class BalanceSimulation:
    """Result of a simulation of balanced batches; `t_star_s`, `ratio`, `reached_at` are of its last phase.

    Parameters
    ----------
    predictor : str or None
        Name of the predictor; None if the algorithm has none.
    total_s : float
        Time of all iterations in seconds.
    """

    algorithm: str
    predictor: str | None
    batch: int
    workers: tuple[str, ...]
    total_s: float
    t_star_s: float
    ratio: float
    reached_at: int | None
    phases: tuple[ConditionSpan, ...]
    iterations: tuple[Iteration, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class AnswerDifference:
    """Iteration after which a repeated manager sets other batches than the log has."""

    iteration: int
    logged: tuple[int, ...]
    repeated: tuple[int, ...]


@dataclass(frozen=True)
class BalanceReplay:
    """Repetition of the balancing of a member in training, from its log.

    Parameters
    ----------
    iterations, segments : int
        Iterations in the log that count, and starts of managers, one for each start of the member.
    repeated : int
        Iterations that a new manager repeats: those before the first gap of a long log.
    equal : bool
        True if it sets the same batches as in the log.
    difference : AnswerDifference or None
        First difference, with the number of its iteration.
    first_batches, last_batches : tuple of int
        Batches at the start and at the end.
    iteration_s : float
        Mean time of the slowest worker in seconds, without exchange between workers.
    equal_batches_s : float
        Estimate of `iteration_s` with equal batches.
    gain : float
        `equal_batches_s` / `iteration_s`.
    """

    manager: str
    workers: tuple[str, ...]
    iterations: int
    segments: int
    repeated: int
    equal: bool
    difference: AnswerDifference | None
    first_batches: tuple[int, ...]
    last_batches: tuple[int, ...]
    iteration_s: float
    equal_batches_s: float
    gain: float


@dataclass(frozen=True)
class Simulated:
    """Result of ``hetctl simulate``, whatever its input.

    Parameters
    ----------
    result : object
        `SimulationResult`, `HopSimulation`, `BalanceSimulation`, `BalanceReplay` or `PipelineSimulation`:
        reports make table and page of it.
    fields : object
        Fields of the JSON object.
    trace : callable or None
        Function that returns a line of JSON for each interval or hop; None if there are none.
    """

    result: object
    fields: object
    trace: Callable[[], str] | None = None
