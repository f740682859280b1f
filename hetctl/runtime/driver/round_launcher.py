"""Start of a round: its events, the groups of its members, and its leaders on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.disk_errors import is_transient
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER
from hetctl.model.plan import Allocation
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Site
from hetctl.model.training_settings import OFF
from hetctl.perf.rate_extrapolation import rate_on
from hetctl.runtime.data.input_share import InputShare
from hetctl.runtime.data.lineup import Lineup, nodes_of, shares_of, write_lineup
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.runtime.driver.active_round import ActiveRound
from hetctl.runtime.driver.launched_steps import EndedStep, StepPool
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.messages import (
    RUN_COMMAND,
    STAGE,
    TRAIN,
    VISIT,
    TaskMessage,
    TrainingSpec,
    VisitSpec,
)
from hetctl.scheduling.planners.base import options_from
from hetctl.storage.event_files import EventQueue
from hetctl.storage.lease import LeaseMark
from hetctl.storage.paths import JobFiles, RunFolder
from hetctl.storage.run_files import checkpoint_folder, write_planner_state

SHUTDOWN_S = 5.0
"""Seconds that leaders have to end at the end of the job, when no trainer is left."""


@dataclass(frozen=True)
class RoundLauncher:
    """Launcher of the rounds of one job.

    Parameters
    ----------
    deadline, max_uninterrupted_s
        Deadlines of `TrainingSpec`.
    events : EventQueue
        Events of the driver.
    on_failure : callable
        Function called with the error if something cannot be written or launched.
    """

    folder: RunFolder
    spec: RunSpec
    job: int
    deadline: float
    max_uninterrupted_s: float
    rank_pool: RankPool
    exchanges: Exchanges
    events: EventQueue
    on_failure: Callable[[OSError], None]
    lease: LeaseMark

    def open(
        self,
        index: int,
        allocations: Sequence[Allocation],
        members: Sequence[Member],
        predicted_s: float,
        planner_state: Any,
    ) -> ActiveRound:
        """Start members with their allocations as one round.

        Parameters
        ----------
        members : sequence of Member
            Members in the order of `allocations`, with the batch sizes of this training.
        planner_state : Any
            The planner's state, which the next job reads.

        Raises
        ------
        OSError
            If the start of the round cannot be written; no member is started then.
        """
        names = [allocation.member for allocation in allocations]
        write_planner_state(self.folder, planner_state)
        opened = self._opened(index, names, predicted_s)
        if error := self.events.error:
            if is_transient(error):
                # Its start will still be written.
                opened.end("failed")
            raise error
        lineup = self._lineup(index, allocations, members)
        try:
            self.exchanges.start(lineup)
        except OSError as error:
            self.on_failure(error)
        shares = shares_of(lineup)
        for allocation, member in zip(allocations, members, strict=True):
            self._launch(opened, allocation, member, shares[member.name])
        return opened

    def open_visits(self, index: int, names: Sequence[str]) -> ActiveRound:
        """Begin the round in which all visits of a job take place."""
        return self._opened(index, names, 0.0, visits=True)

    def _opened(
        self, index: int, names: Sequence[str], predicted_s: float, *, visits: bool = False
    ) -> ActiveRound:
        events = self.events.writer(DRIVER, index)
        events.write("round_started", job=self.job, predicted_s=predicted_s, members=list(names))
        return ActiveRound(self.folder, index, events, self.rank_pool.stop, visits=visits)

    def visit(self, opened: ActiveRound, allocation: Allocation, visit: VisitSpec, member: Member) -> None:
        """Start a visit of a member in the round of all visits."""
        self._launch(opened, allocation, member, (InputShare(),), visit)

    def _lineup(self, index: int, allocations: Sequence[Allocation], members: Sequence[Member]) -> Lineup:
        return Lineup(
            run=self.spec.run,
            run_key=run_key(self.spec.run, self.spec.checkpoints),
            index=index,
            ensemble=replace(self.spec.ensemble, members=tuple(members)),
            allocations=tuple(allocations),
            sharing=self.spec.sharing,
            preprocess=self.spec.preprocess,
            cores=self.spec.site.cores_per_node,
            has_leaders=self.exchanges.needed(self.spec.sharing, allocations),
            timeouts=self.spec.site.timeouts,
        )

    def _launch(
        self,
        opened: ActiveRound,
        allocation: Allocation,
        member: Member,
        shares: tuple[InputShare, ...],
        visit: VisitSpec | None = None,
    ) -> None:
        # Before the group forms: GPUs of a step whose driver is killed are counted from this event on.
        opened.events.write(
            "task_started",
            member=member.name,
            gpus=allocation.gpus,
            mode=allocation.mode,
            rate=allocation.rate,
            placement=encode(allocation.placement),
            batch_size=member.batch_size,
            **({"pipeline": encode(allocation.pipeline)} if allocation.pipeline else {}),
        )
        training = replace(self._training(opened.index, allocation, member, shares), visit=visit)
        own = RUN_COMMAND if member.command else TRAIN
        kind = VISIT if visit else STAGE if allocation.pipeline else own
        try:
            # Before the ranks start: what the file gets from now on is this round's.
            opened.expect_events_of(member.name)
            self.rank_pool.start(
                TaskMessage(kind, str(self.folder.path), member.name, training),
                allocation.placement,
                training.ensemble.code,
            )
        except OSError as error:
            self.on_failure(error)
            opened.note_not_launched(member.name)
        else:
            opened.active[member.name] = allocation

    def _training(
        self, index: int, allocation: Allocation, member: Member, shares: tuple[InputShare, ...]
    ) -> TrainingSpec:
        site = self.spec.site
        balance = replace(self.spec.ensemble.balance, mode=options_from(self.spec.options).balance)
        if balance.mode != OFF and allocation.pipeline is None:
            allocation = replace(allocation, batch_sizes=self._first_batches(allocation, member))
        return TrainingSpec(
            run=self.spec.run,
            run_key=self._run_key(member),
            round=index,
            ensemble=self.spec.ensemble.of(member),
            allocation=allocation,
            checkpoints=str(checkpoint_folder(self.spec, member.name)),
            deadline=self.deadline,
            shares=shares,
            max_uninterrupted_s=self.max_uninterrupted_s,
            sharing=self.spec.sharing,
            preprocessors=site.cores_per_node // site.gpus_per_node,
            gpu_type=self._gpu_type_of(allocation),
            balance=balance,
            network=site.network,
            timeouts=site.timeouts,
            grace_s=self.spec.grace_s,
            lease=self.lease,
        )

    def _run_key(self, member: Member) -> str:
        """Return the key of what ranks of a node share; members with code of their own have their own."""
        key = run_key(self.spec.run, self.spec.checkpoints)
        return f"{key}-{member.code.digest}" if member.code else key

    def _first_batches(self, allocation: Allocation, member: Member) -> tuple[int, ...]:
        """Return a batch for each GPU by the profiled rates of its type; empty: the member's own on each."""
        profile = next((p for p in self.spec.profiles if p.member == member.name), None)
        types = {node.name: node.gpu_type or "" for node in self.rank_pool.nodes}
        if profile is None or len({types[place.node] for place in allocation.placement}) == 1:
            return ()
        # Imported here since batches differ only between types of GPU.
        from hetctl.methods.balance.cpu_manager import first_batches

        found = {t: rate_on(allocation.gpus, profile.rates_by_type.get(t, {})) for t in types.values()}
        # A type that was not measured: the manager finds its speed.
        slowest = min((rate for rate in found.values() if rate), default=1.0)
        return first_batches(allocation, member.chunk(allocation.gpus), types, lambda t: found[t] or slowest)

    def _gpu_type_of(self, allocation: Allocation) -> str | None:
        """Return the type of a member's GPUs; None if they are of several types."""
        types = {node.name: node.gpu_type for node in self.rank_pool.nodes}
        held = {types.get(place.node) for place in allocation.placement}
        return next(iter(held)) or None if len(held) == 1 else None


class Exchanges:
    """The steps of leaders of a job, one for each round; each ends with the trainers of its round.

    In lockstep on several nodes, leaders exchange data between the nodes. If they fail, the trainers
    continue without them, so no member counts as failed.
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
        if not lineup.has_leaders or self._start_leaders is None:
            return
        write_lineup(self._files.lineups, lineup)
        arguments = (str(self._files.lineups), "--round", str(lineup.index))
        command = (sys.executable, "-m", "hetctl.runtime.data.node_exchange", *arguments)
        name = f"exchange of round {lineup.index}"
        step = self._start_leaders(self._site, name, nodes_of(lineup.allocations), command)
        self._steps.launch(step, self._files.exchange_log)

    def reap(self) -> None:
        """Log the leaders that have failed since the last call."""
        _log_failures(self._steps.reap())

    def shutdown(self) -> None:
        """End the leaders that are left."""
        _log_failures(self._steps.end(SHUTDOWN_S))


def _log_failures(steps: Sequence[EndedStep]) -> None:
    for step in steps:
        if step.exit_code:
            log_line(f"the {step.name} ended with {step.exit_code}: its trainers continue without it")
