"""Points of an ensemble's rates at a site: those that are wanted, those that are known, and their cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.profile.catalog_profiles import RatePoints
from hetctl.app.profile.jobs import ProfileCommand, nodes_of
from hetctl.model.ensemble import COMMAND
from hetctl.model.profile import ProfilePoint, RateShape, shapes_of
from hetctl.model.values import dataclass
from hetctl.perf.profile_points import ShapeRates, shape_rates, worth_measuring
from hetctl.perf.rate_extrapolation import largest_profile, profiled_gpus, rate_curve, usable_rates
from hetctl.storage.profile_request import USUAL_COMMAND_S, ProfileTarget
from hetctl.storage.project_copy import linked_in

POINT_S = 8.0
"""Seconds that a point is assumed to take at a site where none was measured; commands run for `--for`."""
JOB_START_S = 10.0
"""Seconds in which a job starts its ranks, which import the framework."""
EPOCH_ENDS, EVALUATIONS, CHECKPOINTS = 3, 2, 3
"""Ends of epochs, evaluations and checkpoints that are timed in a point."""


class RateTargets:
    """The points that a profiling command may measure.

    Parameters
    ----------
    stored : callable
        Function that returns the points in the catalog.
    """

    def __init__(self, command: ProfileCommand, stored: Callable[[], Iterable[ProfilePoint]]) -> None:
        self._command, self._stored = command, stored
        site = command.site
        self._shapes = shapes_of(command.ensemble.as_installed(site.other_python, one_gpu=site.has_mig))

    @property
    def _available(self) -> int:
        return min(self._command.size.gpus, self._command.site.gpus_of_one_type)

    def known(self) -> list[ProfileTarget]:
        """Return the points in the catalog."""
        return [ProfileTarget(point.member, point.gpus) for point in self._current()]

    def targets(self, most_gpus: int | None = None) -> list[ProfileTarget]:
        """Return the first member of each shape on numbers of GPUs up to `most_gpus`, by default up to M_b.

        A shape that needs more GPUs than that is measured on the least number that it needs, or on all of
        one type if those are fewer.
        """
        per_node = self._command.site.gpus_per_node
        most = min(most_gpus or profiled_gpus(per_node), self._available)
        counts = every_count if self._command.measures_all else measured_counts
        return [
            ProfileTarget(shape.member, gpus)
            for shape in self._shapes
            for gpus in counts(shape, most, self._available, per_node)
        ]

    def most_gpus(self) -> int:
        """Return M_t = max(M_a, M_b); M_b if the user gave no number of GPUs."""
        if not self._command.sized:
            return profiled_gpus(self._command.site.gpus_per_node)
        fewest = {point.member: point for point in reversed(self._current())}.values()
        single = [point.rate / point.gpus for point in fewest]
        return largest_profile(single, self._command.site.gpus_per_node)

    def beyond(self) -> list[ProfileTarget]:
        """Return the first member of each shape on more GPUs than were measured, where it may be faster."""
        current = self._current()
        return [
            ProfileTarget(shape.member, gpus)
            for shape in self._shapes
            for gpus in counts_beyond(
                shape, [point for point in current if point.member == shape.member], self._available
            )
        ]

    def points(self, known: Collection[ProfileTarget]) -> tuple[ProfilePoint, ...]:
        """Return those of the stored points that are `known`, each with the first member of its shape."""
        return tuple(point for point in self._current() if ProfileTarget(point.member, point.gpus) in known)

    def worth_measuring(
        self, left: Iterable[ProfileTarget], known: Collection[ProfileTarget]
    ) -> list[ProfileTarget]:
        """Return the points to measure first; none if no other rate can change the plan."""
        if self._command.measures_all:
            return list(left)
        found = worth_measuring(self._shape_rates(left, known), self._command.size.gpus)
        return [ProfileTarget(member, gpus) for member, gpus in found]

    def cost(self) -> ProfileCost:
        """Return what the command costs, as far as it is known before it starts."""
        command, site = self._command, self._command.site
        known = set() if command.force else set(self.known())
        left = [target for target in self.targets() if target not in known]
        first = self.worth_measuring(left, known)
        most = left if first else []
        earlier, nodes = self._current(), nodes_of(most, site.gpus_per_node) if most else 0
        point_s = statistics.fmean(map(_seconds_of, earlier)) if earlier else None
        # Points share the job's GPUs.
        gpu_s = sum(target.gpus for target in most) * (point_s or self._assumed_s)
        job_s = gpu_s / (nodes * site.gpus_per_node) + JOB_START_S if most else 0.0
        at_once = min(command.jobs, command.max_concurrent or command.jobs)
        return ProfileCost(
            least_points=len(first),
            points=len(most),
            nodes=nodes,
            seconds=job_s / at_once,
            node_hours=nodes * job_s / 3600,
            point_s=point_s or self._assumed_s,
            assumed=point_s is None,
            linked=tuple(linked_in(Path(command.ensemble.folder))) if self._is_of_commands else None,
        )

    @property
    def _is_of_commands(self) -> bool:
        return self._command.ensemble.framework == COMMAND

    @property
    def _assumed_s(self) -> float:
        return (self._command.command_s or USUAL_COMMAND_S) if self._is_of_commands else POINT_S

    def _shape_rates(
        self, left: Iterable[ProfileTarget], known: Collection[ProfileTarget]
    ) -> list[ShapeRates]:
        counts = {(target.member, target.gpus) for target in left}
        return shape_rates(self._command.ensemble, self._shapes, self.points(known), counts)

    def _current(self) -> list[ProfilePoint]:
        """Return the stored points that hold now, by shape and number of GPUs."""
        points = RatePoints(self._stored(), self._command.ensemble)
        return [
            replace(point, member=shape.member)
            for shape in self._shapes
            for point in sorted(points.of(shape.member), key=lambda point: point.gpus)
        ]


def _seconds_of(point: ProfilePoint) -> float:
    """Return how long a point took."""
    timed_s = point.steps * point.batch_size * point.gpus / point.rate if point.rate > 0 else 0.0
    others_s = EPOCH_ENDS * point.epoch_s + EVALUATIONS * point.evaluate_s + CHECKPOINTS * point.checkpoint_s
    return point.startup_s + timed_s + others_s


@dataclass(frozen=True)
class ProfileCost:
    """Expected cost of a profiling command.

    Parameters
    ----------
    least_points, points : int
        Numbers of points that it measures at least, and at most.
    nodes : int
        Nodes of each job.
    seconds : float
        Seconds from the start of its job to the end, for all points.
    node_hours : float
        Node-hours for all points.
    point_s : float
        Seconds of a point.
    assumed : bool
        True if these are assumed, and not the mean of earlier points.
    linked : tuple of str or None
        Files and folders that scratch copies of the project, in which scripts are measured, only link; None:
        no script is measured.
    """

    least_points: int
    points: int
    nodes: int
    seconds: float
    node_hours: float
    point_s: float
    assumed: bool
    linked: tuple[str, ...] | None


def every_count(shape: RateShape, most: int, available: int, _per_node: int) -> Sequence[int]:
    """Return all numbers of GPUs on which the first member of a shape may be measured, as FLEET does.

    Parameters
    ----------
    most : int
        Largest number that is to be measured, out of those `available`.
    """
    least = min(shape.min_gpus, available)
    return range(least, max(min(most, shape.max_gpus or most), least) + 1)


def measured_counts(shape: RateShape, most: int, available: int, per_node: int) -> Sequence[int]:
    """Return numbers of GPUs between which rates are interpolated: doubled ones, a node's, and the largest.

    Parameters are those of `every_count`.
    """
    counts = every_count(shape, most, available, per_node)
    least, last = counts[0], counts[-1]
    doubled = {least * 2**power for power in range(math.ceil(math.log2(last / least)))}
    return sorted(doubled | {last} | ({per_node} & set(counts)))


def counts_beyond(shape: RateShape, points: Sequence[ProfilePoint], available: int) -> tuple[int, ...]:
    """Return further numbers of GPUs on which to measure a shape, so that no plan relies on predictions."""
    rates = usable_rates({point.gpus: point.rate for point in points})
    return rate_curve(rates, min(available, shape.max_gpus or available)).to_measure if rates else ()
