"""A run as people look at it: the value that tables, pages and ``--json`` are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.model.heartbeat import Heartbeat
from hetctl.model.job import Job
from hetctl.model.training_progress import EpochResult

FOREMOST = ("failed", "training", "waiting", "converged")
"""States of members, those first that need to be seen."""
MOST_MEMBERS = 200
"""Most members that are shown; of more, some."""


def foremost(states: Mapping[str, str], most: int) -> Mapping[str, str]:
    """Choose whom to show of many members: those first that failed, then those in training, and that wait.

    Parameters
    ----------
    states : mapping of str to str
        By member; those chosen stay in its order.
    """
    if len(states) <= most:
        return states
    ranks = [FOREMOST.index(state) for state in states.values()]
    chosen = set(sorted(range(len(ranks)), key=ranks.__getitem__)[:most])
    return {name: state for number, (name, state) in enumerate(states.items()) if number in chosen}


@dataclass(frozen=True)
class MemberRate:
    """A member's rate on a number of GPUs, in samples/s.

    Parameters
    ----------
    gpu_type : str or None
        Of the GPUs, where a site has several types.
    profiled, planned : float or None
        As it was profiled, or predicted from that, and as the plan had it, which knows what earlier runs
        had seen; None: there is no profile.
    seen : float or None
        Of the last epochs; None: none was trained so.
    """

    gpus: int
    gpu_type: str | None
    profiled: float | None
    planned: float | None
    seen: float | None


@dataclass(frozen=True)
class Comparison:
    """A finished run beside simulations of it, with the rates that were seen and the epochs trained.

    Parameters
    ----------
    baseline : str
        Name of the planner that the run is compared with.
    baseline_s, simulated_s : float
        The makespan with that planner, and with the run's own.
    epochs : int
        Of all members together.
    """

    baseline: str
    baseline_s: float
    simulated_s: float
    epochs: int


@dataclass(frozen=True)
class MemberStatus:
    """One line of the status table.

    Parameters
    ----------
    state : str
        ``waiting``, ``training``, ``converged`` or ``failed``.
    gpus_by_round : tuple of int
        GPUs held in each round of the run, 0 where it was not in the round.
    best : float or None
        Best value so far of the stop rule's `metric`.
    predicted_s, measured_s : float or None
        Time in steps (start-up, training, evaluation and checkpoints), over all rounds.
    cause : str or None
        Why the member converged or failed.
    log_tail : tuple of str
        End of the log of a failed member.
    pulse : Heartbeat or None
        What a member in training does just now.
    rates : tuple of MemberRate
        On one GPU, and on every number that it has trained on.
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
    cause: str | None = None
    log_tail: tuple[str, ...] = ()
    pulse: Heartbeat | None = None
    rates: tuple[MemberRate, ...] = ()

    @property
    def last_rate(self) -> MemberRate | None:
        """The rate on as many GPUs as it had last, or on one."""
        held = next((gpus for gpus in reversed(self.gpus_by_round) if gpus), 1)
        found = {rate.gpus: rate for rate in self.rates}
        return found.get(held) or found.get(1)


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
    """A run, and what is known of all its members or of those to be shown.

    Parameters
    ----------
    state : str
        ``queued``, ``in-doubt``, ``running``, ``between-jobs``, ``finished``, ``failed``, ``cancelled`` or
        ``stopped``.
    predicted_s : float
        Of the whole run, by the plan that was submitted.
    measured_s : float
        From the start of the first job to the end of the last, or until now if the run is under way.
    states : mapping of str to str
        Of all members, in the ensemble's order.
    members, steps, history
        Of all members, or of those to be shown.
    history : mapping of str to tuple of EpochResult
        By member.
    warnings : tuple of str
        What a person should know of the run.
    comparison : Comparison or None
        Of a finished run, where it was asked for.
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
    states: Mapping[str, str]
    members: tuple[MemberStatus, ...]
    rounds: tuple[RoundSpan, ...]
    steps: tuple[StepSpan, ...]
    jobs: tuple[Job, ...]
    history: Mapping[str, tuple[EpochResult, ...]]
    warnings: tuple[str, ...] = ()
    comparison: Comparison | None = None
