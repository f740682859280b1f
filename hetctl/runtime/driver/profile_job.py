"""A profiling job: one pool of ranks runs many measurements, packed on the GPUs of one allocation."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hetctl.cluster.launchers.container import node_command
from hetctl.model.ensemble import COMMAND
from hetctl.model.plan import Placement
from hetctl.model.profile import INTRA_NODE, shapes_of
from hetctl.perf.profile_points import shape_rates, worth_measuring
from hetctl.runtime.data.partition_folder import stage_orders
from hetctl.runtime.driver.launched_steps import nodes_of_this_job
from hetctl.runtime.driver.rank_group import RankGroup, exit_reason_of
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.job_logs import private_log
from hetctl.runtime.worker.measuring.measure_preprocessing import PREPROCESS
from hetctl.runtime.worker.messages import (
    MEASURE,
    MEASURE_COMMAND,
    MEASURE_LAYERS,
    MEASURE_LINKS,
    TaskMessage,
)
from hetctl.scheduling.planners.packing import pack
from hetctl.storage.atomic_io import make_private_folder, write_private
from hetctl.storage.event_files import EventWriter, read_events, read_folder
from hetctl.storage.paths import AgentFiles
from hetctl.storage.patience import PATIENT
from hetctl.storage.profile_request import (
    LAYERS,
    LINKS,
    RATE,
    Measurements,
    ProfileTarget,
    ended_file,
    read_measurements,
)

POLL_S = 0.05
TASKS = {RATE: MEASURE, LAYERS: MEASURE_LAYERS, LINKS: MEASURE_LINKS}


def run_profile_job(folder: Path) -> None:
    """Measure every point of a profiling folder.

    A failed point is reported in its event file; the others continue.
    """
    try:
        _ProfileDriver(folder).run()
    finally:
        # On a full disk only the batch system shows that the job is over.
        with suppress(OSError):
            PATIENT.call(write_private, ended_file(folder), "")


class _ProfileDriver:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._measurements: Measurements = read_measurements(folder)
        self._logs = folder / "logs"
        self._events = folder / "events"
        for own in (self._logs, self._events):
            make_private_folder(own)
        site = self._measurements.site
        ensemble = self._measurements.ensemble
        nodes = nodes_of_this_job(site)
        types = Counter(node.gpu_type for node in nodes for _ in node.gpus)
        # The most frequent one; None if the site has one type.
        self._gpu_type = max(types, key=types.__getitem__)
        self._rank_pool = RankPool(
            *(site, nodes, AgentFiles.within(folder), ensemble.preloaded),
            stages=stage_orders(ensemble.partitions, [node.name for node in nodes]),
        )

    def run(self) -> None:
        """Measure the points; end all ranks; measure the preprocessing."""
        try:
            self._measure_points()
        finally:
            self._rank_pool.shutdown()
        if self._measurements.preprocess_cores:
            # In a process of its own, after the ranks: it uses all cores of the node.
            words = ("-m", "hetctl.runtime.worker.measuring.measure_preprocessing", str(self._folder))
            command = node_command(self._measurements.site, self._folder, sys.executable, *words)
            with private_log(self._logs / f"{PREPROCESS}.log") as output:
                subprocess.call(command, stdout=output, stderr=output)

    def _measure_points(self) -> None:
        """Measure each link alone, undisturbed, then all other points."""
        links = [point for point in self._measurements.points if point.what == LINKS]
        for link in links:
            self._measure([link])
        rest = [point for point in self._measurements.points if point.what != LINKS]
        if self._measurements.planned_gpus is None:
            self._measure(rest)
            return
        while chosen := self._worth_measuring(rest):
            self._measure(chosen)
            rest = [point for point in rest if point not in chosen]
        for point in rest:
            EventWriter(self._events, point.source, patience=PATIENT).write("skipped")

    def _measure(self, points: Sequence[ProfileTarget]) -> None:
        """Start each point once its GPUs are free, the points with most GPUs first."""
        waiting = sorted(points, key=lambda point: -point.gpus)
        while waiting or self._rank_pool.busy:
            for ended in self._rank_pool.reap():
                self._report(ended)
            waiting = [point for point in waiting if not self._start(point)]
            if waiting and not self._rank_pool.busy:
                # With all GPUs free, a point that does not start never will.
                lost = "" if self._rank_pool.nodes else self._loss("the job has lost all nodes")
                for point in waiting:
                    self._fail(point.source, lost or _what_lacks(point))
                return
            self._rank_pool.wait(POLL_S)

    def _worth_measuring(self, points: Sequence[ProfileTarget]) -> list[ProfileTarget]:
        """Return the points to measure next."""
        wanted, gpus = self._measurements, self._measurements.planned_gpus
        assert gpus is not None
        measured = [event.record for event in read_folder(self._events) if event.kind == "point"]
        left = {(point.member, point.gpus): point for point in points}
        known = shape_rates(wanted.ensemble, shapes_of(wanted.ensemble), (*wanted.known, *measured), left)
        return [left[one] for one in worth_measuring(known, gpus)]

    def _start(self, point: ProfileTarget) -> bool:
        """Start a point on free GPUs; return false if there are too few."""
        gpu_type = point.gpu_type or self._gpu_type
        placement = self._ends_of(point.member) if point.what == LINKS else self._placed(point, gpu_type)
        if placement:
            ensemble = self._measurements.ensemble
            of_command = point.what == RATE and ensemble.framework == COMMAND
            kind = MEASURE_COMMAND if of_command else TASKS[point.what]
            # For links, ranks load the ensemble's framework.
            own = None if point.what == LINKS else ensemble.member(point.member).code
            task = TaskMessage(kind, str(self._folder), point.source, gpu_type=gpu_type)
            self._rank_pool.start(task, placement, own or ensemble.code)
        return bool(placement)

    def _placed(self, point: ProfileTarget, gpu_type: str | None) -> tuple[Placement, ...]:
        """Return GPUs for a point, all of one type; none if there are too few."""
        # A group on several types has the rate of none; all rates of a member should be of one type.
        free, nodes = (
            [node for node in each if node.gpu_type == gpu_type]
            for each in (self._rank_pool.free_nodes(), self._rank_pool.nodes)
        )
        return pack([(point.member, point.gpus)], free, 1, nodes)[0].get(point.member, ())

    def _ends_of(self, kind: str) -> tuple[Placement, ...]:
        """Return two GPUs on one node or on two; none if there is no such pair."""
        nodes = self._rank_pool.free_nodes()
        if kind == INTRA_NODE:
            return next(((Placement(n.name, n.gpus[:2]),) for n in nodes if len(n.gpus) > 1), ())
        ends = tuple(Placement(node.name, node.gpus[:1]) for node in nodes[:2])
        return ends if len(ends) == 2 else ()

    def _report(self, ended: RankGroup) -> None:
        if ended.exit_code == 0:
            return
        path = self._events / f"{ended.name}.jsonl"
        if any(event.kind == "failed" for event in PATIENT.call(lambda: list(read_events(path)))):
            return
        if ended.lost_nodes:
            self._fail(ended.name, self._loss(f"lost with {', '.join(ended.lost_nodes)}"))
            return
        self._fail(ended.name, ended.description(exit_reason_of(ended.exit_code, ended.output)))

    def _loss(self, what: str) -> str:
        return f"{what}: {AgentFiles.within(self._folder).log} says why"

    def _fail(self, source: str, error: str) -> None:
        EventWriter(self._events, source, patience=PATIENT).write("failed", error=error)


def _what_lacks(point: ProfileTarget) -> str:
    """Return why a point finds no GPUs although all are free."""
    if point.what == LINKS:
        return "the job has no two GPUs for it"
    if point.gpu_type:
        return f"the job has no GPU of type {point.gpu_type}: name a queue with --queue that gives one"
    return f"the job has no {point.gpus} GPUs of one type"
