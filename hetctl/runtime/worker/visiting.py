"""Visit of a member that hops: it is restored, trains or is evaluated on one partition, and is stored again.

The state of a member is all that its training depends on: the ranks and the nodes that it visits do not
matter, nor does it matter whether a rank has kept the member's network or builds it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.data import state_file
from hetctl.runtime.data.batches import Batches, held_out_batches
from hetctl.runtime.data.loaders import ArrayLoader, Samples
from hetctl.runtime.data.sampler import streams_of
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, Manifest, TrainingState
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import SingleRank
from hetctl.runtime.worker.heartbeat import heartbeats_to
from hetctl.runtime.worker.hop_resources import HopResources
from hetctl.runtime.worker.messages import Assignment, StateSaved, TrainingSpec, VisitReport, VisitSpec
from hetctl.runtime.worker.random_state import random_state, set_random_state
from hetctl.runtime.worker.reporting import writer_of
from hetctl.runtime.worker.state_saver import UnsavedState
from hetctl.runtime.worker.tensorboard import Board
from hetctl.runtime.worker.trainer import StopSignal, check_finite, check_metrics, own_arrays
from hetctl.storage.paths import board_in

LOOK_S = 0.001
"""Seconds between two looks for a state that is on its way."""

Start = tuple[Arrays | None, TrainingState]
"""Arrays from which a visit starts, and the rest of the state; without arrays the network is a fresh one."""


@dataclass(frozen=True)
class Stretch:
    """Training, or evaluation, on one partition.

    Parameters
    ----------
    state : TrainingState
        State after it.
    seconds : float
        Time of training or evaluating.
    loss : float or None
        Mean training loss; None for an evaluation.
    """

    state: TrainingState
    samples: int
    seconds: float
    loss: float | None = None

    @property
    def result(self) -> EpochResult | None:
        """Epoch that ends with it, if one does."""
        ends_epoch = self.loss is None and not self.state.evaluating
        return self.state.epochs[-1] if ends_epoch else None


class Laps:
    """Seconds from one call to the next."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before


def visit(assignment: Assignment, context: WorkerContext) -> None:
    """Perform a visit; one that is told to stop before its end leaves no trace."""
    began_at = time.time()
    spec = assignment.task.training
    assert spec is not None
    resources = context.open_hops(spec.run, spec.ensemble)
    resources.saver.check()
    stop = StopSignal(lambda: context.stop_reason(assignment.place.key), spec.deadline)
    report = Visitor(spec, context, resources, stop).run(began_at)
    if report is None:
        return
    # Mapped before the driver may have it deleted.
    arrays, state = state_file.read(resources.store, report.state)
    context.send_visited(report)
    folder = CheckpointFolder(Path(spec.checkpoints))
    events = writer_of(assignment.task, context.send_written)
    reporter = _reporter_of(report, folder, context)
    resources.saver.save(UnsavedState(folder, arrays, state, reporter, events), context.sign)


def _reporter_of(
    report: VisitReport, folder: CheckpointFolder, context: WorkerContext
) -> Callable[[Manifest, float], None]:
    def on_saved(manifest: Manifest, seconds: float) -> None:
        saved = StateSaved(
            member=report.member,
            number=report.number,
            epochs=len(manifest.state.epochs),
            part_samples=manifest.state.part_samples,
            path=str(folder.path / manifest.file),
            size_bytes=manifest.bytes,
            sha256=manifest.sha256,
            seconds=seconds,
        )
        if report.result is not None:
            _show(report.result, folder)
        # The driver may have ended: the next one finds the checkpoint.
        with suppress(ConnectionError):
            context.send_saved(saved)

    return on_saved


def _show(result: EpochResult, folder: CheckpointFolder) -> None:
    """Add an epoch to the member's TensorBoard file, which ranks of several nodes write one after another."""
    samples = round((result.rate or 0.0) * result.seconds)
    Board(board_in(folder.path), samples).show(result)


class Visitor:
    """One visit of a member to this rank."""

    def __init__(
        self, spec: TrainingSpec, context: WorkerContext, resources: HopResources, stop: StopSignal
    ) -> None:
        assert spec.visit is not None
        assert spec.ensemble.partitions is not None
        (self._member,) = spec.ensemble.members
        self._visit = spec.visit
        self._count = spec.ensemble.partitions.count
        self._gpu_type = spec.gpu_type
        self._checkpoints = CheckpointFolder(Path(spec.checkpoints))
        self._context, self._resources, self._stop = context, resources, stop

    def run(self, began_at: float) -> VisitReport | None:
        """Train or evaluate, and store the new state; return None if told to stop before.

        Parameters
        ----------
        began_at : float
            Arrival of the assignment, in seconds since the epoch.
        """
        loaders = self._loaders()
        laps = Laps()
        start = self._await_start()
        if start is None:
            return None
        waited_s = laps.lap()
        network, state = self._restore(start, loaders[0].sample)
        restore_s = laps.lap()
        stretch = STRETCHES[self._visit.evaluates](self, network, state, loaders)
        if stretch is None:
            return None
        laps.lap()
        name, size_bytes = self._store(network, stretch.state)
        return VisitReport(
            member=self._member.name,
            number=self._visit.number,
            epoch=self._visit.epoch,
            partition=self._visit.partition,
            evaluates=self._visit.evaluates,
            state=name,
            began_at=began_at,
            ended_at=time.time(),
            waited_s=waited_s,
            restore_s=restore_s,
            train_s=stretch.seconds,
            save_s=laps.lap(),
            samples=stretch.samples,
            loss=stretch.loss,
            size_bytes=size_bytes,
            result=stretch.result,
        )

    def _loaders(self) -> tuple[ArrayLoader, ArrayLoader]:
        """Return the training and the validation samples of the partition."""
        sources = self._resources.partitions.open(self._visit.partition, self._context.prepare_data)
        self._context.sign()
        streams = streams_of(self._member, len(sources[0]), len(sources[1]), rank=0, ranks=1)
        training, validation = map(ArrayLoader, sources, streams)
        return training, validation

    def _await_start(self) -> Start | None:
        """Return the state from which to start once it is there; None if told to stop before."""
        name = self._visit.state
        if name is None:
            return self._newest()
        while not self._stop():
            with suppress(FileNotFoundError):
                return state_file.read(self._resources.store, name)
            self._context.sign()
            time.sleep(LOOK_S)
        return None

    def _newest(self) -> Start:
        wanted = self._visit.checkpoint
        loaded = self._checkpoints.load(lambda state: wanted in (None, state.visit))
        for name in loaded.invalid:
            print(f"checkpoint {name} is damaged: continuing from an earlier one", flush=True)
        return None if loaded.arrays is None else own_arrays(loaded.arrays), loaded.state

    def _restore(self, start: Start, sample: Samples) -> tuple[TrainableNetwork, TrainingState]:
        """Return the member's network in the state from which to start, and that state for one GPU."""
        arrays, state = start
        check_fits(self._member.name, self._visit, state, self._count)
        network = self._network(sample)
        if arrays is not None:
            network.restore(arrays)
            set_random_state(state.random_state)
        if self._member.rescale_learning_rate and state.gpus != 1:
            network.scale_learning_rate(1 / state.gpus)
        self._context.sign()
        return network, replace(state, gpus=1)

    def _network(self, sample: Samples) -> TrainableNetwork:
        """Return a network of the member whose state is to be restored, or a fresh one.

        Without a state in the store, the learning rate may be that of another number of GPUs, which a network
        that has trained cannot take over.
        """
        kept = self._resources.networks.take(self._member)
        if kept is None or self._visit.state is None:
            return self._context.build_alone(self._member, sample)
        self._context.prepare(self._member.seed)
        return kept

    def _train(
        self, network: TrainableNetwork, state: TrainingState, loaders: tuple[ArrayLoader, ArrayLoader]
    ) -> Stretch | None:
        training, _ = loaders
        visited = (*state.visited, self._visit.partition)
        whole = round((state.part_samples + training.samples) / len(visited) * self._count)

        def after_step(position: int) -> None:
            # A full disk must show before another visit is made in vain.
            self._resources.saver.check()
            self._context.sign()
            note(self._visit.epoch, state.part_samples + position, batches.loss)

        is_last = len(visited) == self._count
        group, stop = SingleRank(), self._stop
        batches = Batches(training, self._visit.epoch, 0, group, stop, after_step, is_last=is_last)
        laps = Laps()
        with heartbeats_to(self._context.send_heartbeat, whole, self._resources.busy) as note:
            loss = network.train(batches)
        seconds = laps.lap()
        if not batches.complete:
            self._check_stopped(batches.position, training.samples)
            return None
        check_finite({"loss": loss}, "visit")
        after = replace(
            state,
            visited=visited,
            part_samples=state.part_samples + training.samples,
            part_loss=state.part_loss + loss * training.samples,
            part_seconds=state.part_seconds + seconds,
        )
        return Stretch(after, training.samples, seconds, loss)

    def _check_stopped(self, position: int, samples: int) -> None:
        """Raise a BadInputError if training has ended early without being told to stop."""
        if self._stop.reason is None:
            raise BadInputError(
                f"train_fn took {position} of the {samples} samples of partition {self._visit.partition}",
                "let it iterate over all batches of `data`",
            )

    def _evaluate(
        self, network: TrainableNetwork, state: TrainingState, loaders: tuple[ArrayLoader, ArrayLoader]
    ) -> Stretch | None:
        _, validation = loaders
        laps = Laps()
        metrics = network.evaluate(self._until_stopped(validation))
        seconds = laps.lap()
        if self._stop.reason is not None:
            return None
        check_finite(metrics, "evaluation")
        after = self._merged(state, metrics, validation.samples)
        return Stretch(after, validation.samples, seconds)

    def _until_stopped(self, validation: ArrayLoader) -> Iterator[tuple[Samples, int]]:
        """Yield validation batches until told to stop, but at least one: no metric has a mean of nothing."""
        left = validation.samples
        for samples, count in held_out_batches(validation, self._visit.epoch, self._context.sign):
            yield samples, count
            left -= count
            if left and self._stop():
                return

    def _merged(self, state: TrainingState, metrics: Mapping[str, float], samples: int) -> TrainingState:
        """Return the state after an evaluation: means weighted by samples, as sums."""
        before = state.scores if state.evaluating else {}
        after = replace(
            state,
            evaluating=True,
            visited=(*(state.visited if state.evaluating else ()), self._visit.partition),
            scores={name: before.get(name, 0.0) + mean * samples for name, mean in metrics.items()},
            scored=state.scored + samples,
        )
        return after if len(after.visited) < self._count else self._finished(after)

    def _finished(self, state: TrainingState) -> TrainingState:
        """Return the state after an epoch."""
        means = {name: total / state.scored for name, total in state.scores.items()}
        result = EpochResult(
            epoch=self._visit.epoch,
            metrics={"loss": state.part_loss / state.part_samples, **means},
            seconds=state.part_seconds,
            gpus=1,
            finished_at=time.time(),
            rate=state.part_samples / state.part_seconds,
            batch_size=self._member.batch_size,
            gpu_type=self._gpu_type,
        )
        check_metrics(result.metrics, self._member.stop.metric)
        return TrainingState(epochs=(*state.epochs, result))

    def _store(self, network: TrainableNetwork, state: TrainingState) -> tuple[str, int]:
        """Write the new state into the store, and keep the network; return name and size of the file."""
        name = state_name(self._member, self._visit.number)
        arrays = network.save()
        after = replace(state, visit=self._visit.number, random_state=random_state())
        size_bytes = state_file.write(self._resources.store, name, arrays, after)
        self._resources.networks.keep(self._member, network, size_bytes)
        return name, size_bytes


STRETCHES = {False: Visitor._train, True: Visitor._evaluate}
"""Work of a visit, by whether it evaluates."""


def state_name(member: Member, number: int) -> str:
    """Return the name of a member's state after a visit."""
    return f"{member.name}-{number}"


def check_fits(name: str, wanted: VisitSpec, state: TrainingState, count: int) -> None:
    """Reject a state from which a visit cannot start.

    Parameters
    ----------
    name : str
        Name of the member.
    count : int
        Number of the partitions.

    Raises
    ------
    BadInputError
        If the state is of another epoch, in the middle of an epoch of another mode, or after this visit.
    """
    if state.part_samples and not state.visited:
        raise BadInputError(
            f"the newest checkpoint of {name} is in the middle of epoch {len(state.epochs) + 1} of "
            "data-parallel training",
            "finish the epoch with `--mode data-parallel`, or start a new run with `hetctl submit --new`",
        )
    trained = len(state.visited) == count and not state.evaluating
    is_begun = state.evaluating == wanted.evaluates
    fits = wanted.partition not in state.visited if is_begun else trained and wanted.evaluates
    if wanted.epoch != len(state.epochs) + 1 or not fits:
        raise BadInputError(
            f"{_described(wanted)} does not follow the state of {name}: {len(state.epochs)} epochs, and "
            f"partitions {list(state.visited)} {'evaluated' if state.evaluating else 'trained'}",
            "cancel the run and submit it again: it then continues from the newest checkpoints",
        )


def _described(wanted: VisitSpec) -> str:
    kind = "to evaluate" if wanted.evaluates else "to train"
    return f"visit {wanted.number} {kind} epoch {wanted.epoch} on partition {wanted.partition}"
