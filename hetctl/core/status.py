"""A run as people look at it: the value that tables, pages and ``--json`` are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.core.job import Job
from hetctl.core.profile import EpochResult
from hetctl.core.pulse import Pulse


@dataclass(frozen=True)
class MemberStatus:
    """One line of the status table.

    Parameters
    ----------
    state : str
        ``waiting``, ``training``, ``converged`` or ``failed``.
    gpus_by_round : tuple of int
        GPUs held in each round of the run, 0 where it was not in the round.
    profiled_rate : float or None
        Samples/s on one GPU.
    best : float or None
        Best value so far of the stop rule's `metric`.
    predicted_s, measured_s : float or None
        Time in steps (start-up, training, evaluation and checkpoints), over all rounds.
    cause : str or None
        Why the member converged or failed.
    log_tail : tuple of str
        End of the log of a failed member.
    pulse : Pulse or None
        What a member in training does just now.
    """

    member: str
    state: str
    gpus_by_round: tuple[int, ...]
    profiled_rate: float | None
    epochs: int
    max_epochs: int
    metric: str
    best: float | None
    predicted_s: float | None
    measured_s: float | None
    cause: str | None = None
    log_tail: tuple[str, ...] = ()
    pulse: Pulse | None = None


@dataclass(frozen=True)
class StepSpan:
    """A member on the GPUs of one node, in seconds from the run's start; `end_s` None: running."""

    member: str
    round: int
    node: str
    gpus: tuple[int, ...]
    start_s: float
    end_s: float | None
    exit_code: int | None


@dataclass(frozen=True)
class RoundSpan:
    """One round, in seconds from the run's start.

    Parameters
    ----------
    ended_by : str or None
        ``converged``, ``alpha`` (too few active GPUs), ``resize`` or ``preempted`` (the planner took the
        last member's GPUs), ``deadline``, ``failed``, ``signal`` or a budget.
    """

    index: int
    job: int
    start_s: float
    end_s: float | None
    predicted_s: float
    ended_by: str | None


@dataclass(frozen=True)
class RunStatus:
    """A run and all that is known of it.

    Parameters
    ----------
    state : str
        ``queued``, ``running``, ``between-jobs``, ``finished``, ``failed``, ``cancelled`` or ``stopped``.
    predicted_s : float
        Of the whole run, by the plan that was submitted.
    measured_s : float
        From the start of the first job to the end of the last, or until now.
    history : mapping of str to tuple of EpochResult
        By member.
    """

    run: str
    ensemble: str
    site: str
    device: str
    planner: str
    gpus: int
    state: str
    reason: str
    submitted_at: float
    predicted_s: float
    measured_s: float
    members: tuple[MemberStatus, ...]
    rounds: tuple[RoundSpan, ...]
    steps: tuple[StepSpan, ...]
    jobs: tuple[Job, ...]
    history: Mapping[str, tuple[EpochResult, ...]]
