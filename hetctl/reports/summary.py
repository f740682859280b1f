"""Key figures of a run, for the tables and the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetctl.model.cost import Cost, Energy
from hetctl.model.plan import USUAL_PLANNER
from hetctl.model.profile import some_of
from hetctl.model.run_status import MOST_SIMULATED, MemberStatus, RoundSpan, RunStatus, TaskSpan
from hetctl.model.values import dataclass
from hetctl.reports.units import device_word, format_percent, format_seconds

IDLE_MARK = "·"
LEAST_GAIN = 1.005
"""Ratio of two simulated times below which they are said to be equal."""
MOST_CHANGES = 3
"""Last changes of a member's global batch that are shown."""
STATES = ("converged", "training", "waiting", "paused", "stopped", "cancelled", "failed")
MOST_NAMED = 5
"""Failed members with one cause that are named."""


def prediction_error(predicted_s: float | None, measured_s: float | None) -> float | None:
    """Return the error of a prediction as a fraction of the measured time; positive: too long."""
    if predicted_s is None or not measured_s:
        return None
    return (predicted_s - measured_s) / measured_s


def describe_time(status: RunStatus) -> str:
    """Compare predicted and measured time: the error for a finished run, the share for any other."""
    predicted, measured = format_seconds(status.predicted_s), format_seconds(status.measured_s)
    if status.predicted_s is None:
        return f"measured {measured}; without measured rates nothing was predicted"
    error = prediction_error(status.predicted_s, status.measured_s)
    if status.state == "finished" and error is not None:
        return f"measured {measured}, predicted {predicted} ({describe_error(error)})"
    share = format_percent(status.measured_s / status.predicted_s if status.predicted_s else None)
    return f"{measured} of {predicted} predicted ({share})"


def describe_usage(status: RunStatus) -> str:
    """Return what the jobs cost beside the prediction, the GPU-hours of training, and the energy."""
    predicted = status.predicted_cost
    beside = "" if predicted is None else f", predicted {predicted.node_hours:.3g}"
    error = prediction_error(predicted.node_hours if predicted else None, status.cost.node_hours)
    if status.state == "finished" and error is not None:
        beside += f" ({describe_error(error)})"
    trained = f"{status.used.gpu_seconds / 3600:.3g} {device_word(status.device, 1)}-hours in training"
    return f"{describe_cost(status.cost, status.device, beside)}; {trained}{describe_energy(status.energy)}"


def describe_cost(cost: Cost, device: str, beside: str = "") -> str:
    """Return the hours that jobs hold, and what is charged for them if that is another number.

    Parameters
    ----------
    beside : str
        Text behind the node-hours.
    """
    charged = "" if cost.charged == cost.node_hours else f", charged {cost.charged:.3g}"
    held = f"{cost.gpu_hours:.3g} {device_word(device, 1)}-hours held"
    return f"{cost.node_hours:.3g} node-hours{beside}, {held}{charged}"


def describe_energy(energy: Energy | None) -> str:
    """Return the energy, to be put behind other text; empty if none was measured."""
    if energy is None:
        return ""
    co2 = "" if energy.co2_g is None else f" ({energy.co2_g:.3g} g of CO2)"
    return f", {energy.kwh:.3g} kWh{co2}"


def describe_comparison(status: RunStatus) -> str:
    """Return the simulated time with the baseline; empty without comparison, as for unfinished runs."""
    beside = status.comparison
    if beside is None:
        return ""
    simulated, baseline = format_seconds(beside.simulated_s), format_seconds(beside.baseline_s)
    return (
        f"Simulated with the rates that were seen, the same {beside.epochs} epochs take {baseline} with "
        f"{beside.baseline} and {simulated} with {status.planner}; this run took "
        f"{format_seconds(status.measured_s)}."
    )


def describe_clusters(status: RunStatus) -> list[str]:
    """Return two lines about the simulated clusters, or why there are none; empty without comparison."""
    beside = status.comparison
    if beside is None:
        return []
    if not beside.clusters:
        too_many = f"more than {MOST_SIMULATED} members keep their GPUs busy with one each"
        why = too_many if len(status.states) > MOST_SIMULATED else "a member needs more GPUs than they have"
        return [f"Clusters of up to 4 nodes of 4 GPUs are not simulated: {why}."]
    times = [
        ", ".join(format_seconds(seconds) for seconds in each)
        for each in zip(*((one.baseline_s, one.fluid_s) for one in beside.clusters), strict=True)
    ]
    nodes = ", ".join(str(one.nodes) for one in beside.clusters)
    per_node = beside.clusters[0].gpus // beside.clusters[0].nodes
    most = max(one.baseline_s / one.fluid_s for one in beside.clusters)
    known = f"{beside.known_gpus} {device_word(status.device, beside.known_gpus)}"
    # Members that have a GPU each, and may have no more, end no sooner with any planner.
    with_fluid = "no less" if most < LEAST_GAIN else times[1]
    gain = "" if most < LEAST_GAIN else f", {most:.2f} times as fast at best"
    return [
        f"On {nodes} nodes of {per_node} GPUs they take {times[0]} with {beside.baseline}, one GPU each,",
        f"and {with_fluid} with {USUAL_PLANNER}{gain}; rates on more than {known} are predicted.",
    ]


def comparison_lines(status: RunStatus) -> list[str]:
    """Return all that is said of the comparison on the terminal; empty without it."""
    return [describe_comparison(status), *describe_clusters(status)] if status.comparison else []


def describe_error(error: float) -> str:
    """Return a prediction's error in words."""
    percent = format_percent(abs(error))
    return "exact to 1 %" if percent == "0 %" else f"{percent} too {'long' if error > 0 else 'short'}"


def describe_batches(member: MemberStatus, device: str) -> str:
    """Return the changes of a member's global batch in words; empty if there are none."""
    changes = member.batch_changes
    shown = [
        f"{change.before:,} -> {change.after:,} at epoch {change.epoch}"
        f" ({change.gpus} {device_word(device, change.gpus)})"
        for change in changes[-MOST_CHANGES:]
    ]
    earlier = len(changes) - MOST_CHANGES
    before = f", after {earlier} earlier changes" if earlier > 0 else ""
    return f"global batch {', '.join(shown)}{before}" if shown else ""


def describe_config(config: Mapping[str, Any]) -> str:
    """Return a config as ``key=value`` pairs, numbers with four digits."""
    texts = {key: f"{v:.4g}" if isinstance(v, float) else str(v) for key, v in config.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items())


@dataclass(frozen=True)
class FailureGroup:
    """Members that failed with one cause; reason, end of the log, and path of the log are the first one's."""

    names: tuple[str, ...]
    reason: str
    log_tail: tuple[str, ...]
    log: str


def names_text(members: Sequence[str]) -> str:
    """Return the names of the first members, and the number of the others."""
    return some_of(members, MOST_NAMED)


def grouped(failures: Iterable[FailureGroup]) -> list[FailureGroup]:
    """Group failures by cause, in the order of each cause's first failure."""
    groups: dict[str, list[FailureGroup]] = {}
    for failure in failures:
        cause = failure.reason
        for name in failure.names:
            cause = cause.replace(name, "")
        # Numbers of processes and ports, and sizes, differ between failures with one cause.
        groups.setdefault(re.sub("[0-9]+", "0", cause), []).append(failure)
    return [
        replace(same[0], names=tuple(name for failure in same for name in failure.names))
        for same in groups.values()
    ]


def failures_of(status: RunStatus) -> list[FailureGroup]:
    """Return the failures of a run's members, grouped by cause."""
    return grouped(
        FailureGroup((member.member,), member.reason or "reason unknown", member.log_tail, member.log)
        for member in status.members
        if member.state == "failed"
    )


@dataclass(frozen=True)
class Spans:
    """Intervals in which members held GPUs in a simulation, as a `RunStatus` has them for a run.

    Parameters
    ----------
    gpus : int
        Number of GPUs of each job.
    measured_s : float
        Seconds from the start to the end, or until now.
    """

    device: str
    gpus: int
    measured_s: float
    tasks: Sequence[TaskSpan]
    rounds: Sequence[RoundSpan]


def one_round(seconds: float) -> tuple[RoundSpan, ...]:
    """Return one round that covers all of a simulation."""
    return (RoundSpan(0, 0, 0.0, seconds, 0.0, None),)


def now_s(spans: Spans | RunStatus) -> float:
    """Return the last known second since the run's start; running tasks last until then."""
    each: tuple[RoundSpan | TaskSpan, ...] = (*spans.rounds, *spans.tasks)
    return max([spans.measured_s, *(span.end_s or span.start_s for span in each)])


def end_of(span: TaskSpan | RoundSpan, now: float) -> float:
    """Return the end of a task or round; `now` if it is running."""
    return now if span.end_s is None else span.end_s


def job_spans(spans: Spans | RunStatus) -> dict[int, tuple[float, float]]:
    """Return when each job held its GPUs: from the start of its first round to the end of its last."""
    now = now_s(spans)
    found: dict[int, tuple[float, float]] = {}
    for span in spans.rounds:
        end = end_of(span, now)
        start, until = found.get(span.job, (span.start_s, end))
        found[span.job] = (min(start, span.start_s), max(until, end))
    return found


def busy_fraction(status: RunStatus) -> float | None:
    """Return the share of the GPU time held by jobs in which a member's task ran; None before that."""
    # A continued run may have jobs of several sizes; its own size is that of the newest.
    nodes = {job.number: job.nodes for job in status.jobs}
    last = status.jobs[-1].nodes if status.jobs else 1
    held = sum(
        status.gpus * nodes.get(job, last) / last * (end - start)
        for job, (start, end) in job_spans(status).items()
    )
    now = now_s(status)
    busy = sum(len(task.gpus) * (end_of(task, now) - task.start_s) for task in status.tasks)
    # Clocks of nodes differ, so that tasks may seem to exceed their job.
    return min(busy / held, 1.0) if held > 0 else None


def ranked(status: RunStatus) -> list[MemberStatus]:
    """Return the members that share the first one's metric and have a value of it, best first."""
    metric = status.members[0].metric if status.members else ""
    rivals = [member for member in status.members if member.metric == metric and member.best is not None]
    return sorted(rivals, key=lambda member: member.rank)


def gpus_by_round(counts: Sequence[int], width: int) -> str:
    """Return GPUs per round as ``1 · 2 2``; only the last rounds if all would be wider than `width`."""
    words = [str(count) if count else IDLE_MARK for count in counts]
    if len(" ".join(words)) <= width:
        return " ".join(words)
    while words and len(" ".join(words)) > width - 2:
        words = words[1:]
    return " ".join(["…", *words])


def describe_states(status: RunStatus, states: Sequence[str] = STATES) -> str:
    """Return counts of members by state, ``7 converged, 1 failed``; states without members are left out."""
    counts = Counter(status.states.values())
    return ", ".join(f"{counts[state]} {state}" for state in states if counts[state])
