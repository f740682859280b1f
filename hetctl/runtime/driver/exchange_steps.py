"""Data exchange between nodes: one step of leaders for each round in lockstep on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.plan import Allocation
from hetctl.model.run import LOCKSTEP
from hetctl.model.site import Site
from hetctl.runtime.best_effort_io import log_line
from hetctl.runtime.data.lineup import Lineup, nodes_of, write_lineup
from hetctl.runtime.driver.launched_steps import EndedStep, StepPool
from hetctl.storage.paths import JobFiles

LEAVE_S = 5.0
"""Seconds that leaders have to end at the end of the job, when no trainer is left."""


class Exchanges:
    """The steps of leaders of a job; they end by themselves when the trainers of their round have ended.

    If leaders fail, the trainers continue without them, so no member counts as failed.
    """

    def __init__(self, site: Site, files: JobFiles) -> None:
        self._site = site.yielding_to(os.environ)
        self._start_leaders = LAUNCHERS[site.launcher].leaders
        self._files = files
        self._steps = StepPool()

    def needed(self, sharing: str, allocations: Sequence[Allocation]) -> bool:
        """Return true if a round needs leaders."""
        several = len(nodes_of(allocations)) > 1
        return sharing == LOCKSTEP and several and self._start_leaders is not None

    def start(self, lineup: Lineup) -> None:
        """Start the leaders of a round, if it needs any; OSError if they cannot be started."""
        if not lineup.led or self._start_leaders is None:
            return
        write_lineup(self._files.lineups, lineup)
        arguments = (str(self._files.lineups), "--round", str(lineup.index))
        command = (sys.executable, "-m", "hetctl.runtime.data.node_exchange", *arguments)
        name = f"exchange of round {lineup.index}"
        step = self._start_leaders(self._site, name, nodes_of(lineup.allocations), command)
        self._steps.launch(step, self._files.exchange_log)

    def reap(self) -> None:
        """Log the leaders that have failed since the last call."""
        _say_which_failed(self._steps.reap())

    def leave(self) -> None:
        """End the leaders that are left."""
        _say_which_failed(self._steps.end(LEAVE_S))


def _say_which_failed(steps: Sequence[EndedStep]) -> None:
    for step in steps:
        if step.exit_code:
            log_line(f"the {step.name} ended with {step.exit_code}: its trainers go on without it")
