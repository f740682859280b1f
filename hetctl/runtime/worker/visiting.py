"""Visit of a member that hops: training or evaluation on one partition, on one rank (CEREBRO, 3.2)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.data import state_file
from hetctl.runtime.data.batches import Batches, held_out_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.checkpoint import CheckpointFolder, Manifest, TrainingState
from hetctl.runtime.worker.context import VisitResources, WorkerContext
from hetctl.runtime.worker.group import SingleRank
from hetctl.runtime.worker.heartbeat import cores_used, gpu_used, heartbeats_to
from hetctl.runtime.worker.messages import Assignment, StateSaved, TrainingSpec, VisitReport, VisitSpec
from hetctl.runtime.worker.random_state import random_state, set_random_state
from hetctl.runtime.worker.trainer import StopSignal, check_metrics

LOOK_S = 0.001
"""Seconds between two looks for a state that is on its way."""

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class VisitOutcome:
    """Result of a visit on its rank.

    Parameters
    ----------
    state : TrainingState
        State after the visit, without its number and random state.
    samples : int
        Samples trained or evaluated.
    loss : float or None
        Mean training loss.
    """

    state: TrainingState
    samples: int
    loss: float | None = None


def visit(assignment: Assignment, context: WorkerContext) -> None:
    """Carry out a visit and report its new state; one that is told to stop leaves no trace."""
    began_at, began = time.time(), time.perf_counter()
    spec = assignment.task.training
    assert spec is not None
    assert spec.visit is not None
    (member,) = spec.ensemble.members
    stop = StopSignal(lambda: context.stop_reason(assignment.place.key), spec.deadline)
    resources = context.load_visit_resources(spec.ensemble, spec.run)
    loaded = _load(spec, spec.visit, resources, context, stop)
    if loaded is None:
        return
    arrays, state = loaded
    waited = time.perf_counter()
    _refuse_other(spec.visit, state, member.name)
    training, validation = resources.partition(spec.visit.partition)
    network = _restored(context, resources, member, training, arrays, state)
    restored = time.perf_counter()
    visitor = Visitor(member, network, spec.visit, spec.ensemble.partitions.count, stop, context)  # type: ignore[union-attr]
    outcome = visitor.evaluate(state, validation) if spec.visit.evaluates else visitor.train(state, training)
    if outcome is None:
        return
    trained = time.perf_counter()
    name = f"{member.name}-{spec.visit.number}"
    after = replace(outcome.state, visit=spec.visit.number, random_state=random_state())
    size_bytes = state_file.write(resources.store, name, network.save(), after)
    saved = time.perf_counter()
    finished = len(after.epochs) > len(state.epochs)
    context.send_visited(
        VisitReport(
            member=member.name,
            number=spec.visit.number,
            epoch=spec.visit.epoch,
            partition=spec.visit.partition,
            evaluates=spec.visit.evaluates,
            began_at=began_at,
            ended_at=time.time(),
            waited_s=waited - began,
            restore_s=restored - waited,
            train_s=trained - restored,
            save_s=saved - trained,
            samples=outcome.samples,
            loss=outcome.loss,
            state=name,
            size_bytes=size_bytes,
            result=after.epochs[-1] if finished else None,
        )
    )
    _checkpoint(spec, member, spec.visit.number, name, context)


@dataclass(frozen=True)
class Visitor:
    """A member's network on a rank, for one visit.

    Parameters
    ----------
    partitions : int
        Number of partitions of the data.
    """

    member: Member
    network: TrainableNetwork
    visit: VisitSpec
    partitions: int
    stop: StopSignal
    context: WorkerContext

    def train(self, state: TrainingState, source: ArraySource) -> VisitOutcome | None:
        """Train a sub-epoch; return None if told to stop before its end."""
        stream = Stream(len(source), self.member.batch_size, self.member.seed)
        device = self.context.binding.device
        busy = cores_used() if device is None else gpu_used(device)
        is_last = len(state.visited) + 1 == self.partitions
        # Partitions may differ in size, so the length of the epoch is an estimate.
        samples = len(source) * self.partitions
        with heartbeats_to(self.context.send_heartbeat, samples, busy) as note:

            def after_step(position: int) -> None:
                self.context.sign()
                note(self.visit.epoch, state.part_samples + position, batches.loss)

            batches = Batches(
                *(ArrayLoader(source, stream), self.visit.epoch, 0, SingleRank(), self.stop, after_step),
                ends_epoch=is_last,
            )
            began = time.perf_counter()
            loss = self.network.train(batches)
            seconds = time.perf_counter() - began
        if not batches.complete:
            return None
        visited = (*state.visited, self.visit.partition)
        after = replace(
            state,
            part_samples=state.part_samples + len(source),
            part_loss=state.part_loss + loss * len(source),
            part_seconds=state.part_seconds + seconds,
            visited=() if is_last else visited,
            evaluating=is_last,
        )
        return VisitOutcome(after, len(source), loss)

    def evaluate(self, state: TrainingState, source: ArraySource) -> VisitOutcome | None:
        """Evaluate the partition's validation samples; sums over all partitions give the epoch's metrics."""
        count = len(source)
        if self.stop():
            return None
        scores = dict(state.scores)
        if count:
            loader = ArrayLoader(source, Stream(count, self.member.rows_evaluated, UNSHUFFLED))
            found = self.network.evaluate(held_out_batches(loader, self.visit.epoch, self.context.sign))
            scores = {name: scores.get(name, 0.0) + value * count for name, value in found.items()}
        after = replace(
            state,
            scores=scores,
            scored=state.scored + count,
            visited=(*state.visited, self.visit.partition),
        )
        if len(after.visited) == self.partitions:
            after = TrainingState(epochs=(*after.epochs, self._result(after)), gpus=after.gpus)
        return VisitOutcome(after, count)

    def _result(self, state: TrainingState) -> EpochResult:
        merged = {name: total / state.scored for name, total in state.scores.items()}
        metrics = {"loss": state.part_loss / max(1, state.part_samples), **merged}
        check_metrics(metrics, self.member.stop.metric)
        return EpochResult(
            epoch=self.visit.epoch,
            metrics=metrics,
            seconds=state.part_seconds,
            gpus=1,
            finished_at=time.time(),
            rate=state.part_samples / state.part_seconds if state.part_seconds else None,
            batch_size=self.member.batch_size,
        )


def _load(
    spec: TrainingSpec, visit: VisitSpec, resources: VisitResources, context: WorkerContext, stop: StopSignal
) -> tuple[Arrays | None, TrainingState] | None:
    """Return the state from which a visit starts; None if told to stop before it is there."""
    if visit.state is None:
        # A checkpoint that this rank still writes may be the newest one.
        resources.saver.wait()
        loaded = CheckpointFolder(Path(spec.checkpoints)).load()
        return loaded.arrays, loaded.state
    path = resources.store / visit.state
    while not path.exists():
        if stop():
            return None
        context.sign()
        time.sleep(LOOK_S)
    return state_file.read(resources.store, visit.state)


def _refuse_other(visit: VisitSpec, state: TrainingState, member: str) -> None:
    """Refuse a state that is not the one before the visit."""
    epoch = len(state.epochs) + 1
    fits = (epoch, state.evaluating) == (visit.epoch, visit.evaluates)
    if not fits or visit.partition in state.visited or (state.part_order and not state.visited):
        raise BadInputError(
            f"the checkpoint of {member} is in epoch {epoch}, after partitions {list(state.visited)}, and"
            f" does not fit a visit to partition {visit.partition} in epoch {visit.epoch}",
            "train the member on as it was trained before, or start a new run with `hetctl submit --new`",
        )


def _restored(
    context: WorkerContext,
    resources: VisitResources,
    member: Member,
    source: ArraySource,
    arrays: Arrays | None,
    state: TrainingState,
) -> TrainableNetwork:
    """Build the network of a member and give it its state."""
    context.prepare(resources.framework, member.seed)
    sample = source.x[[0]], source.y[[0]]
    network = resources.framework.build(member, resources.functions, SingleRank(), sample)
    if arrays is not None:
        network.restore(arrays)
    set_random_state(state.random_state)
    context.sign()
    return network


def _checkpoint(spec: TrainingSpec, member: Member, number: int, name: str, context: WorkerContext) -> None:
    """Have the state written as a checkpoint in the background; the mapped file is its copy."""
    resources = context.load_visit_resources(spec.ensemble, spec.run)
    arrays, state = state_file.read(resources.store, name)

    def report(manifest: Manifest, seconds: float) -> None:
        with suppress(ConnectionError):
            context.send_saved(
                StateSaved(
                    *(member.name, number, len(manifest.state.epochs), manifest.state.part_samples),
                    *(str(Path(spec.checkpoints) / manifest.file), manifest.bytes, manifest.sha256, seconds),
                )
            )

    resources.saver.save(CheckpointFolder(Path(spec.checkpoints)), arrays, state, report)
