"""Training of several members of one shape in one process, as one computation."""

from __future__ import annotations

import copy
from contextlib import ExitStack, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import keep_orders
from hetctl.runtime.frameworks import FusedSteps, load_framework
from hetctl.runtime.job_logs import append
from hetctl.runtime.worker.checkpoint import Arrays
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.member_trainer import Steps, random_state
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.reporting import report_failure
from hetctl.runtime.worker.training import Trainer, build_member, reporting
from hetctl.scheduling.job_scheduler import ALONE
from hetctl.storage.event_files import EventWriter


@dataclass
class FusedTrainer(Trainer):
    """`Trainer` of a member that shares its process with others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Building and restoring others draws from the same generators.
        self._random = random_state()

    def _restore_generators(self, arrays: Arrays) -> None:
        super()._restore_generators(arrays)
        self._random = random_state()

    def _random_state(self) -> Any:
        return self._random


@dataclass
class FusedMember:
    """A member in training in this process.

    Parameters
    ----------
    keep : ExitStack
        Stack that ends the resources of this member alone.
    """

    trainer: FusedTrainer
    steps: Steps
    keep: ExitStack
    log: Path


class FusedMembers:
    """Members that train together on this rank; each has its own trainer, epochs, events and checkpoints."""

    def __init__(self, context: WorkerContext, fused: FusedSteps) -> None:
        self._context, self._fused = context, fused
        self._members: dict[str, FusedMember] = {}

    def run(self, first: Assignment) -> None:
        """Train a member, and others that arrive meanwhile, until all have ended."""
        arrived: Assignment | None = first
        results: dict[str, Any] = {}
        while arrived or self._members:
            if arrived:
                self._join(arrived, first)
                # Those that start together begin with the same step.
                arrived = self._context.arrived()
                continue
            results = self._advanced(results)
            arrived = self._context.arrived()

    def _advanced(self, results: dict[str, Any]) -> dict[str, Any]:
        """Let all trainers go on with results to their next works; return the results of these."""
        works = {}
        for name, member in list(self._members.items()):
            try:
                works[name] = _resumed(member.steps, results.get(name))
            except StopIteration:
                self._end(name)
            except Exception as error:
                # The others need not begin anew for an error of one.
                self._end(name, _failed(error, member.trainer.events, member.log))
        results = self._fused.run(works)
        if self._fused.measured and self._members:
            trainer = next(iter(self._members.values())).trainer
            rates = sorted(self._fused.measured.items())
            trainer.events.write("fused", rates=rates, gpu_type=trainer.gpu_type)
            self._fused.measured = {}
        self._let_go()
        return results

    def _let_go(self) -> None:
        """Stop the members that have to train alone, but keep one if all have to."""
        refused = [name for name in self._members if name in self._fused.refused]
        for name in refused[1:] if len(refused) == len(self._members) else refused:
            member = self._members[name]
            if member.trainer.stop.reason is None:
                member.trainer.stop.reason = ALONE
                _tell(member.log, f"{name} has to train alone: {self._fused.refused[name]}")

    def _join(self, assignment: Assignment, first: Assignment) -> None:
        """Build a member, and begin its training."""
        task, own, keep = assignment.task, copy.copy(self._context), ExitStack()
        own.send = partial(self._context.send, member=task.name)
        if task.name != first.task.name:
            _tell(task.log, f"{task.name} trains in the process of {first.task.name}: see its log")
        try:
            built, fields = build_member(assignment, self._context, own, keep, fused=True)
            trainer = FusedTrainer(**fields)
        except Exception as error:
            keep.close()
            own.send(done=True, code=_failed(error, own.writer(task), task.log))
            return
        self._fused.join(task.name, built.network)
        if not all(isinstance(loader, ArrayLoader) for loader in (built.training, built.validation)):
            self._fused.refused[task.name] = "its samples are prepared by processes"
        steps = reporting(trainer, own, lambda _: {})
        self._members[task.name] = FusedMember(trainer, steps, keep, task.log)
        keep_orders(len(self._members))
        self._let_go()

    def _end(self, name: str, code: int = 0) -> None:
        member = self._members.pop(name)
        self._fused.leave(name, member.trainer.network)
        member.keep.close()
        keep_orders(max(1, len(self._members)))
        self._context.send(done=True, member=name, code=code)


def train_fused(assignment: Assignment, context: WorkerContext) -> None:
    """Train members together: that of an assignment, and those whose assignments arrive meanwhile."""
    spec = assignment.task.spec
    fused = load_framework(spec.ensemble.framework).fused_steps(spec.fused_rates)
    FusedMembers(context, fused).run(assignment)


def _tell(log: Path, text: str) -> None:
    """Append a line to a member's own log; ignore a full disk."""
    with suppress(OSError):
        append(log, f"{text}\n")


def _failed(error: Exception, events: EventWriter, log: Path) -> int:
    """Report a failure as `report_failure`, in the member's own log."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(redirect_stderr(stack.enter_context(log.open("a"))))
        return report_failure(error, events)


def _resumed(steps: Steps, result: Any) -> Any:
    """Let a trainer go on to its next work, with a result or an error of the last one."""
    return steps.throw(result) if isinstance(result, Exception) else steps.send(result)
