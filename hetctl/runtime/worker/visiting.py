"""Visit of a member that hops: restore it, train or evaluate it on one partition, and store it again.

Training depends on the member's state alone: not on the ranks and nodes that it visits, nor on whether a
rank has kept its network or builds it anew. The ranks of a group make a visit together, data-parallel, and
start from the same file; rank 0 stores and reports the new state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.hops import StateSaved, Visit, VisitEnd
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.data import state_file
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.loaders import ArrayLoader, Samples
from hetctl.runtime.data.sampler import streams_of
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.frameworks.packed_state import within
from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, TrainingState
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import all_gather
from hetctl.runtime.worker.hardware import live_metrics_to
from hetctl.runtime.worker.hop_resources import HopResources, open_hops
from hetctl.runtime.worker.member_trainer import (
    SCORES,
    Note,
    StopSignal,
    check_finite,
    check_metrics,
    lost_checkpoints_error,
    own_arrays,
    random_state,
    refuse_early_end,
    set_random_state,
)
from hetctl.runtime.worker.messages import Assignment, TrainingSpec
from hetctl.runtime.worker.tensorboard import TensorBoardWriter
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import tensorboard_file

POLL_S = 0.001
"""Seconds between two checks for a state that is on its way."""

StartState = tuple[Arrays | None, TrainingState]
"""Arrays from which a visit starts, and the rest of the state; None: the network is fresh."""


class Stopwatch:
    """Seconds from one call to the next."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the construction."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before


def visit(assignment: Assignment, context: WorkerContext) -> None:
    """Perform a visit; if told to stop before its end, leave no trace."""
    began_at = time.time()
    spec = assignment.task.spec
    resources = open_hops(context, spec.run_key, spec.ensemble)
    resources.saver.check()
    stopwatch = Stopwatch()
    context.join(assignment.rank_info, spec.network, spec.timeouts)
    meet_s = stopwatch.lap()
    stop = StopSignal(lambda: context.stop_reason(assignment.rank_info.key), spec.deadline)
    visitor = Visitor(spec, context, resources, stop)
    end = visitor.run(began_at)
    if end is not None and context.group.rank == 0:
        visitor.hand_over(replace(end, meet_s=meet_s), context.writer(assignment.task))
    context.group.barrier_and_close()


class Visitor:
    """One visit of a member to this rank or its group."""

    def __init__(
        self, spec: TrainingSpec, context: WorkerContext, resources: HopResources, stop: StopSignal
    ) -> None:
        assert spec.visit is not None
        assert spec.ensemble.partitions is not None
        (self._member,) = spec.ensemble.members
        self._visit = spec.visit
        self._count = spec.ensemble.partitions.count
        self._gpu_type = spec.gpu_type
        self._checkpoints = CheckpointFolder(Path(spec.checkpoints), context.patience, self._member)
        self._context, self._resources, self._group, self._stop = context, resources, context.group, stop
        self._sums: Arrays = {}
        self._measured: dict[str, Any] = {}

    def run(self, began_at: float) -> VisitEnd | None:
        """Train or evaluate, and store the new state; return None if rank 0 is told to stop earlier.

        Parameters
        ----------
        began_at : float
            Arrival of the assignment, in seconds since the epoch.
        """
        loaders = self._loaders()
        stopwatch = Stopwatch()
        start = self._await_start()
        if start is None:
            return None
        self._measured["waited_s"] = stopwatch.lap()
        network, state = self._restore(start, loaders[0].sample)
        self._sums = within(start[0] or {}, SCORES)
        self._measured["restore_s"] = stopwatch.lap()
        work = self._evaluate if self._visit.evaluates else self._train
        after = work(network, state, loaders)
        if after is None:
            return None
        stopwatch.lap()
        self._store(network, after)
        result = after.epochs[-1] if len(after.epochs) > len(state.epochs) else None
        return self._visit.ended(
            began_at, time.time(), save_s=stopwatch.lap(), result=result, **self._measured
        )

    def hand_over(self, end: VisitEnd, events: EventWriter) -> None:
        """Report the visit, and have its state written into a checkpoint."""
        # Map the file now: after the report the driver may have it deleted.
        arrays, state = state_file.read(self._resources.store, self._visit.new_state)
        self._context.send(visited=end)
        folder = self._checkpoints

        def save() -> None:
            stopwatch = Stopwatch()
            # No driver returns to an earlier checkpoint than the one that it knew at the start of this visit.
            manifest = folder.save(arrays, state, self._visit.checkpoint)
            saved = StateSaved(
                member=end.member,
                number=end.number,
                epoch=len(manifest.state.epochs),
                part_samples=manifest.state.part_samples,
                path=str(folder.path / manifest.file),
                bytes=manifest.bytes,
                sha256=manifest.sha256,
                duration_s=stopwatch.lap(),
                best=folder.best,
                damaged=tuple(folder.take_damaged()),
            )
            if end.result is not None:
                # Ranks of several nodes write the member's TensorBoard file one after another.
                samples = round((end.result.rate or 0.0) * end.result.duration_s)
                TensorBoardWriter(tensorboard_file(folder.path), samples).show(end.result)
            # If the driver has ended, the next one finds the checkpoint.
            with suppress(ConnectionError):
                self._context.send(saved=saved)

        self._resources.saver.save(save, events, self._context.heartbeat)

    def _loaders(self) -> tuple[ArrayLoader, ArrayLoader]:
        sources = self._resources.partitions.open(self._visit.partition_number, self._context.prepare_data)
        self._context.heartbeat()
        place = self._group.rank, self._group.size
        streams = streams_of(self._member, len(sources[0]), len(sources[1]), *place)
        training, validation = map(ArrayLoader, sources, streams)
        return training, validation

    def _await_start(self) -> StartState | None:
        """Wait for the start state and return it; None if told to stop."""
        name = self._visit.state
        if name is None:
            wanted = self._visit.checkpoint
            loaded = self._checkpoints.load(lambda state: wanted in (None, state.visit))
            for damaged in loaded.invalid:
                print(f"checkpoint {damaged} is damaged and is not used", flush=True)
            if loaded.arrays is None and wanted is not None and wanted >= 0:
                raise lost_checkpoints_error(self._member.name, self._checkpoints.path, loaded.invalid)
            return loaded.arrays, loaded.state
        is_there = False
        while self._group.rank == 0 and not self._stop():
            if is_there := (self._resources.store / name).exists():
                break
            self._context.heartbeat()
            time.sleep(POLL_S)
        return state_file.read(self._resources.store, name) if self._group.broadcast(is_there) else None

    def _restore(self, start: StartState, sample: Samples) -> tuple[TrainableNetwork, TrainingState]:
        """Return the member's network in the start state, and that state for these GPUs."""
        arrays, state = start
        gpus = self._group.size
        check_fits(self._visit, state, self._count)
        network = self._network(state, sample)
        if arrays is not None and self._visit.state is None and self._checkpoints.is_of_parent(state):
            # A mutant has its own learning rate, not the parent's, scaled for the parent's GPUs.
            network.adopt(own_arrays(arrays))
            state = replace(state, gpus=1)
        elif arrays is not None:
            network.restore(own_arrays(arrays))
        if arrays is not None:
            set_random_state(state.random_state)
        if self._member.rescales and state.gpus != gpus:
            network.scale_learning_rate(gpus / state.gpus)
        self._context.heartbeat()
        return network, replace(state, gpus=gpus)

    def _network(self, state: TrainingState, sample: Samples) -> TrainableNetwork:
        """Return the member's kept network, still to be restored, or a fresh one.

        A network that has trained cannot take over the learning rate of another number of GPUs. Either all
        ranks of a group build one or none, since building makes their weights equal.
        """
        kept = self._resources.networks.pop(self._member, self._group.size)
        fits = kept is not None and self._visit.state is not None and state.gpus == self._group.size
        all_fit = all(all_gather(self._group, fits))
        if kept is None or not all_fit:
            return self._context.build_network(self._member, sample)
        self._context.prepare(self._member)
        return kept

    def _train(
        self, network: TrainableNetwork, state: TrainingState, loaders: tuple[ArrayLoader, ArrayLoader]
    ) -> TrainingState | None:
        training, _ = loaders
        visited = (*state.visited, self._visit.partition_number)
        whole = round((state.part_samples + training.samples) / len(visited) * self._count)

        def after_step(position: int) -> None:
            # Detect a full disk before another visit whose state could not be saved.
            self._resources.saver.check()
            self._context.heartbeat()
            note(self._visit.training_epoch, state.part_samples + position, batches.loss)

        batches = Batches(
            *(training, self._visit.training_epoch, 0, self._group, self._stop, after_step),
            is_last=len(visited) == self._count,
            most=self._member.micro_batch_size,
        )
        stopwatch = Stopwatch()
        live: AbstractContextManager[Note] = nullcontext(lambda *_: None)
        if self._group.rank == 0:
            live = live_metrics_to(self._context.send, whole, self._resources.busy)
        with live as note:
            loss = network.train(batches)
        seconds = stopwatch.lap()
        if not batches.complete:
            part = f"partition {self._visit.partition_number}"
            refuse_early_end(self._group, self._stop, batches.position, training.samples, part)
            return None
        check_finite({"loss": loss}, "visit")
        self._measured |= {"samples": training.samples, "train_s": seconds, "loss": loss}
        self._sums = {}
        return replace(
            state,
            visited=visited,
            part_samples=state.part_samples + training.samples,
            part_loss=state.part_loss + loss * training.samples,
            part_s=state.part_s + seconds,
        )

    def _evaluate(
        self, network: TrainableNetwork, state: TrainingState, loaders: tuple[ArrayLoader, ArrayLoader]
    ) -> TrainingState | None:
        _, validation = loaders
        stopwatch = Stopwatch()
        metrics = network.evaluate(self._until_stopped(validation))
        seconds = stopwatch.lap()
        if any(all_gather(self._group, self._stop.reason is not None)):
            return None
        check_finite(metrics, "evaluation")
        earlier = state.scores if state.evaluating else {}
        after = replace(
            state,
            evaluating=True,
            visited=(*(state.visited if state.evaluating else ()), self._visit.partition_number),
            # Sums weighted by samples.
            scores={
                name: earlier.get(name, 0.0) + mean * validation.samples for name, mean in metrics.items()
            },
            scored=state.scored + validation.samples,
        )
        self._measured |= {"samples": validation.samples, "train_s": seconds}
        before = self._sums if state.evaluating else {}
        sums = network.metric_sums()
        self._sums = {name: array + before[name] if name in before else array for name, array in sums.items()}
        if len(after.visited) < self._count:
            return after
        means = {name: total / after.scored for name, total in after.scores.items()}
        finished = self._finished(after, network.metrics_of(self._sums) if self._sums else means)
        network.end_epoch(finished.epochs[-1].metrics)
        self._sums = {}
        return finished

    def _until_stopped(self, validation: ArrayLoader) -> Iterator[tuple[Samples, int]]:
        """Yield validation batches until told to stop, but at least one: metrics are means."""
        batches = validation_batches(validation, self._visit.training_epoch, self._context.heartbeat)
        for number, batch in enumerate(batches):
            if number and self._stop():
                return
            yield batch

    def _finished(self, state: TrainingState, metrics: Mapping[str, float]) -> TrainingState:
        """Return the state after an epoch with these metrics over all partitions."""
        result = EpochResult(
            epoch=self._visit.training_epoch,
            metrics={"loss": state.part_loss / state.part_samples, **metrics},
            duration_s=state.part_s,
            gpus=state.gpus,
            finished_at=time.time(),
            rate=state.part_samples / state.part_s,
            batch_size=self._member.batch_size,
            gpu_type=self._gpu_type,
        )
        check_metrics(result.metrics, self._member)
        return TrainingState(epochs=(*state.epochs, result), gpus=state.gpus)

    def _store(self, network: TrainableNetwork, after: TrainingState) -> None:
        """Write the new state into the store, and keep the network."""
        size_bytes = 0
        if self._group.rank == 0:
            arrays = network.save() | {f"{SCORES}{sum_of}": array for sum_of, array in self._sums.items()}
            after = replace(after, visit=self._visit.number, random_state=random_state())
            size_bytes = state_file.write(self._resources.store, self._visit.new_state, arrays, after)
        size_bytes = self._group.broadcast(size_bytes)
        self._resources.networks.keep(self._member, self._group.size, network, size_bytes)


def check_fits(wanted: Visit, state: TrainingState, count: int) -> None:
    """Reject a state that does not suit a visit.

    Parameters
    ----------
    count : int
        Number of the partitions.

    Raises
    ------
    BadInputError
        If the state is of another epoch, within an epoch of another mode, or after this visit.
    """
    if state.is_within_epoch:
        raise BadInputError(
            f"the newest checkpoint of {wanted.config} is in the middle of epoch {len(state.epochs) + 1} of "
            "data-parallel training",
            "finish the epoch with `--mode data-parallel`, or start a new run with `hetctl submit --new`",
        )
    trained = len(state.visited) == count and not state.evaluating
    is_begun = state.evaluating == wanted.evaluates
    partition = wanted.partition_number
    fits = partition not in state.visited if is_begun else trained and wanted.evaluates
    if wanted.training_epoch != len(state.epochs) + 1 or not fits:
        raise TransientInputError(
            f"visit {wanted.number} to {'evaluate' if wanted.evaluates else 'train'} epoch "
            f"{wanted.training_epoch} on partition {partition} does not follow the state of "
            f"{wanted.config}: {len(state.epochs)} epochs, and "
            f"partitions {list(state.visited)} {'evaluated' if state.evaluating else 'trained'}",
            "cancel the run and submit it again: it then continues from the newest checkpoints",
        )
