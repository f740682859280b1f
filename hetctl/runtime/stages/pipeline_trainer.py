"""Training of a member whose layers are stages on several ranks: epochs, evaluation and checkpoints."""

from __future__ import annotations

import json
import queue
import time
from collections import defaultdict, deque
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import field, replace
from pathlib import Path

from hetctl.model.errors import BadInputError
from hetctl.model.pipelines import PipelineLayout, StageReport, WaveRecord
from hetctl.model.serialization import decode, encode
from hetctl.model.training_settings import EVERY_EPOCH
from hetctl.model.values import dataclass
from hetctl.runtime.data.batches import validation_batches
from hetctl.runtime.data.input_pipeline import refuse_own_batches
from hetctl.runtime.data.loaders import Batch, Loader
from hetctl.runtime.data.named_arrays import refuse_named
from hetctl.runtime.data.sampler import Order
from hetctl.runtime.frameworks import finished
from hetctl.runtime.frameworks.stage_network import LAYER, Tensor
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.stages.p2p_transport import P2PTransport, TensorMessage, receive
from hetctl.runtime.stages.parameter_server import TO_SERVER, WaveServer
from hetctl.runtime.stages.stage_worker import EpochPart, PartHooks, StageRun, StageWorker
from hetctl.runtime.worker.async_checkpoint import OnSaved, Saver
from hetctl.runtime.worker.checkpoint import (
    ArrayFile,
    CheckpointFolder,
    Loaded,
    Manifest,
    TrainingState,
)
from hetctl.runtime.worker.context import WholeData, WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, RankInfo, all_gather
from hetctl.runtime.worker.member_trainer import MemberTrainer, Steps, load_together, random_state
from hetctl.runtime.worker.messages import Assignment, TrainingSpec
from hetctl.runtime.worker.step_clock import EpochClock
from hetctl.runtime.worker.tensorboard import stage_figures
from hetctl.runtime.worker.training import (
    reporting,
    restart_time,
    sample_sharing,
    trainer_fields,
)
from hetctl.storage.atomic_io import make_private_folder

LEAST_SAVE_S, SAVE_SHARE = 2.0, 0.05
"""Least seconds between two checkpoints within an epoch, and largest share of time to write them."""

PART = "part"
"""Kind of the message of a stage that has written its part."""


@dataclass
class PipelineTrainer(MemberTrainer):
    """A pipeline's training in one round, on one of its ranks.

    A checkpoint is written after each epoch, and within epochs at the ends of waves; with an interval set, at
    the first end of an epoch or wave after it. Its weights contain these waves of all virtual workers; the
    optimizer's state is the first virtual worker's.

    Parameters
    ----------
    stage : StageWorker
        Stage of this rank.
    worker_names : tuple of str
        Node and GPU of each rank.
    """

    stage: StageWorker = field(kw_only=True)
    worker_names: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts = self._waves = 0
        self._order: Order = ()
        self._losses: list[float] = []
        # An epoch is shown once its checkpoint is written: the next epoch may have ended by then.
        self._reported: deque[tuple[int, tuple[StageReport, ...]]] = deque(maxlen=2)
        self._saved_at = self._began_at = time.monotonic()
        self._write_s = 0.0
        # From the decision to save a wave until the weights of all virtual workers have come.
        self._awaits_wave = False

    def _load(self) -> Loaded:
        """Return this stage's arrays of the newest checkpoint that all stages can read."""
        prefixes = tuple(LAYER.format(layer) for layer in self.stage.network.layers)

        def needs(name: str) -> bool:
            return name.startswith(prefixes) or not name.startswith("layer-")

        return load_together(self.checkpoints, self.group, needs)

    def _restore(self) -> None:
        super()._restore()
        self.stage.waves.begin()

    def _rescale_learning_rate(self) -> None:
        """Keep the learning rate: each minibatch is an update, whatever the number of virtual workers."""
        self.state = replace(self.state, gpus=1)

    def _train_epoch(self) -> Steps:
        number = len(self.state.epochs) + 1
        workers = len(self.stage.heads)
        part = EpochPart(
            number=self._parts,
            epoch=number,
            position=self.state.part_samples,
            samples=self.training.samples,
            chunk=self.member.batch_size * workers,
            first_wave=self._waves,
        )
        clock = EpochClock(part.samples, part.chunk)

        def on_step(minibatch: int, loss: float) -> None:
            position = part.position_after(minibatch)
            clock.note(position, loss)
            self._losses.append(loss)
            self._after_step(number, position, loss)

        hooks = PartHooks(
            should_stop=self.stop,
            should_save=self._is_save_due,
            on_step=on_step,
            save=lambda minibatch, arrays: self._save_wave(part, minibatch, arrays),
        )
        self._losses.clear()
        self._began_at = began = time.perf_counter()
        with closing(self._feed(part)) as feed:
            trained = self.stage.train(part, feed if self.stage.is_first else None, hooks)
        seconds = time.perf_counter() - began
        self._parts, self._waves = self._parts + 1, self._waves + trained.waves
        self._account(part, trained, seconds)
        if self.state.part_samples < part.samples:
            return False
        yield from self._finish_epoch(number, clock.rate, is_whole=not part.position)
        return True

    def _feed(self, part: EpochPart) -> Generator[Batch, None, None]:
        """Yield the batches of this virtual worker."""
        with closing(
            self.training.batches(part.epoch, part.position, self.state.part_order or None)
        ) as batches:
            for samples, chunk in batches:
                self._order = chunk.order
                yield samples, chunk

    def _account(self, part: EpochPart, trained: StageRun, seconds: float) -> None:
        """Record a part, and report the times of all stages."""
        worker, index = self.stage.worker, self.stage.stage
        plan = self.stage.layout.workers[worker][index]
        report = {
            "worker": self.worker_names[self.group.rank],
            "virtual_worker": worker,
            "stage": index,
            "layers": [plan.first, plan.last],
            **trained.times,
            **self.stage.transport.take_sent(),
        }
        gathered = all_gather(self.group, [trained.loss, trained.samples, report])
        losses, samples = zip(*(gathered[head][:2] for head in self.stage.heads), strict=True)
        # A part that was stopped before its first minibatch has no samples.
        loss = sum(losses) / max(1, sum(samples))
        position = part.position_after(trained.minibatches)
        self.state = replace(
            self.state,
            part_samples=position,
            part_order=self._order,
            part_loss=self.state.part_loss + loss * (position - part.position),
            part_s=self.state.part_s + seconds,
        )
        reports = (decode(StageReport, of_rank) for *_, of_rank in gathered)
        stages = tuple(sorted(reports, key=lambda one: (one.virtual_worker, one.stage)))
        self._reported.append((part.epoch, stages))
        self.events.write("stages", epoch=part.epoch, duration_s=seconds, stages=encode(stages))

    def figures_of(self, epoch: int) -> Mapping[str, float]:
        """Return the stages' figures for TensorBoard in one of the last two epochs."""
        return stage_figures(dict(self._reported)[epoch])

    def _evaluate(self, number: int) -> Steps:
        yield from ()
        feed = validation_batches(self.validation, number, self.heartbeat)
        scores, count = self.stage.evaluate(feed if self.stage.is_first else None)
        gathered = [one for one in all_gather(self.group, [scores, count]) if one[1]]
        total = sum(count for _, count in gathered)
        return {
            name: sum(scores[name] * count for scores, count in gathered) / total for name in gathered[0][0]
        }

    def _end_epoch(self, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        self.stage.network.end_epoch()

    def _is_save_due(self) -> bool:
        """Return true if rank 0 wants a checkpoint at the end of this wave."""
        if self._saver.is_busy or self._awaits_wave:
            return False
        pause_s = max(LEAST_SAVE_S, self._write_s / SAVE_SHARE)
        often = self.member.checkpoint == EVERY_EPOCH and time.monotonic() - self._saved_at >= pause_s
        if not (often or self._clock.is_due()):
            return False
        self._saved_at = time.monotonic()
        self._clock.restart()
        self._awaits_wave = True
        return True

    def _save_wave(self, part: EpochPart, minibatch: int, arrays: Mapping[str, Tensor]) -> None:
        """Write a checkpoint at the end of a wave, while training goes on."""
        self._awaits_wave = False
        position = part.position_after(minibatch)
        # Other virtual workers have sent only their weights by now.
        loss = sum(self._losses) / max(1, len(self._losses))
        state = replace(
            self.state,
            part_samples=position,
            part_order=self._order,
            part_loss=self.state.part_loss + loss * (position - part.position),
            part_s=self.state.part_s + time.perf_counter() - self._began_at,
            random_state=random_state(),
        )

        def report(manifest: Manifest, seconds: float) -> None:
            self._write_s = seconds
            self._report_checkpoint(manifest, seconds)

        self._saver.save(arrays, state, report)

    def _save(self, report: OnSaved) -> None:
        self._saved_at = time.monotonic()
        self.state = replace(self.state, random_state=random_state())
        arrays = {name: tensor.copy() for name, tensor in self.stage.network.save().items()}
        self._saver.save(arrays, self.state, report)


class PartSaver(Saver):
    """Writer of this rank's part; rank 0 completes the checkpoint once all parts exist.

    Rank 0's wait raises LostPeerError if the rank of another part has ended.

    Parameters
    ----------
    messages : queue of TensorMessage
        Queue of the messages of the kind `PART`, on rank 0.
    part : int or None
        Number of this rank's part, if it is a stage of the first virtual worker. None: it writes nothing, as
        its weights are in the others' parts.
    parts : int
        Number of all parts.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        transport: P2PTransport,
        messages: queue.SimpleQueue[TensorMessage],
        part: int | None,
        parts: int,
    ) -> None:
        super().__init__(folder)
        self._transport, self._messages = transport, messages
        self._part, self._parts = part, parts
        self._files: defaultdict[tuple[int, ...], dict[int, ArrayFile]] = defaultdict(dict)

    def save(self, arrays: Mapping[str, Tensor], state: TrainingState, report: OnSaved) -> None:
        """Write this rank's arrays once the previous ones are written; they must not change.

        Parameters
        ----------
        report : callable
            Function called on rank 0, in another thread, when the checkpoint is complete.

        Raises
        ------
        OSError
            If the previous part could not be written.
        """
        if self._part is not None:
            super().save(arrays, state, report)

    def _copies(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(arrays)

    def _written(self, arrays: Mapping[str, Tensor], state: TrainingState) -> Manifest | None:
        assert self._part is not None
        file = self._folder.save_part(arrays, state, self._part)
        self._transport.send(0, PART, order=list(state.order), part=self._part, file=encode(file))
        if self._transport.rank != 0:
            return None
        # Other stages may be ahead by one checkpoint.
        while len(self._files[state.order]) < self._parts:
            message = receive(self._messages)
            assert message is not None
            fields = message.fields
            self._files[tuple(fields["order"])][fields["part"]] = decode(ArrayFile, fields["file"])
        files = self._files.pop(state.order)
        return self._folder.join_parts([files[part] for part in sorted(files)], state)


SAMPLE = "sample"
"""Kind of the message with one sample, from which the stages take their shapes."""


def train_stage(assignment: Assignment, context: WorkerContext) -> None:
    """Train the layers of this rank as its round specifies: until convergence, or until told to stop.

    Raises
    ------
    BadInputError
        If the layout has another number of layers than the network.
    """
    restarted_at = restart_time(assignment, context)
    spec, rank_info = assignment.task.spec, assignment.rank_info
    layout = spec.allocation.pipeline
    assert layout is not None
    (member,) = spec.ensemble.members
    framework, chain = context.chain(spec.ensemble)
    group = context.join(rank_info, spec.network, spec.timeouts, CollectiveBackend())
    if layout.layers != len(chain.layers):
        raise BadInputError(
            f"the layer profile of {member.name} has {layout.layers} layers, but model_fn builds "
            f"{len(chain.layers)}: {', '.join(chain.layers)}",
            f"measure them with `hetctl profile --layers {member.name}`",
        )
    worker, stage = layout.place_of(group.rank)
    with ExitStack() as stack:
        to_server: queue.SimpleQueue[TensorMessage] = queue.SimpleQueue()
        parts: queue.SimpleQueue[TensorMessage] = queue.SimpleQueue()
        transport = P2PTransport(
            group,
            rank_info,
            [part.node for part in spec.allocation.placement for _ in part.gpus],
            spec.network,
            spec.timeouts,
            {**dict.fromkeys(TO_SERVER, to_server), PART: parts},
            framework.tensor_memory(),
        )
        training, validation = _loaders(spec, layout, context, stack, transport, worker, stage)
        context.prepare(member)
        plan = layout.workers[worker][stage]
        network = chain.build(range(plan.first, plan.last + 1), training.sample, recomputes=plan.recomputes)
        context.heartbeat()
        served = [layer for layer, rank in enumerate(layout.servers) if rank == group.rank]
        server = WaveServer(transport, to_server, served, [stages[0].rank for stages in layout.workers])
        recorder = WaveRecorder(assignment.task.wave_log(group.rank), spec.round)
        fields = trainer_fields(assignment, context, network, training, validation, restarted_at)
        # The first virtual worker's copy of the servers' weights is enough for a checkpoint.
        part = stage if worker == 0 else None
        saver = PartSaver(fields["checkpoints"], transport, parts, part, len(layout.workers[0]))
        trainer = PipelineTrainer(
            **fields,
            stage=StageWorker(network, layout, transport, recorder.write, context.heartbeat),
            saver=saver,
            worker_names=spec.worker_names,
        )
        finished(reporting(trainer, context, trainer.figures_of))
    # After the barrier every rank has sent its last wave to this rank's server.
    group.barrier_and_close()
    server.close()
    transport.close()


def _loaders(
    spec: TrainingSpec,
    layout: PipelineLayout,
    context: WorkerContext,
    stack: ExitStack,
    transport: P2PTransport,
    worker: int,
    stage: int,
) -> tuple[Loader, Loader]:
    """Return the loaders of a first stage; the other stages get one sample, and the number of samples."""
    if stage > 0:
        # The first stage may load data for minutes; without heartbeats this rank would seem to hang.
        while (message := receive(transport.inbox)) is None or message.kind != SAMPLE:
            context.heartbeat()
        x, y = message.tensors
        nothing = Loader(message.fields["samples"], (x, y))
        return nothing, nothing
    (member,) = spec.ensemble.members
    sharing = sample_sharing(spec, spec.shares[transport.rank], context.binding.node)
    data = context.load_data(spec.ensemble, sharing)
    assert isinstance(data, WholeData)
    rank_info = RankInfo(worker, len(layout.workers))
    training, validation = data.open(rank_info, member, spec.shares[transport.rank])
    stack.enter_context(closing(training))
    stack.enter_context(closing(validation))
    refuse_own_batches(training, "a pipeline")
    refuse_named(training.sample[0], "a pipeline")
    for plan in layout.workers[worker][1:]:
        transport.send(plan.rank, SAMPLE, training.sample, samples=training.samples)
    return training, validation


class WaveRecorder:
    """Writer of a rank's log: a line for each wave with the weights that its minibatches met.

    Training goes on if the disk is full.

    Parameters
    ----------
    log : Path
        File that grows from one round to the next.
    """

    def __init__(self, log: Path, round_index: int) -> None:
        self._log, self._round, self._begin = log, round_index, ""
        with suppress(OSError):
            # A newline ends the incomplete line of a killed process.
            self._begin = "" if log.read_bytes().endswith(b"\n") else "\n"

    def write(self, record: WaveRecord) -> None:
        """Append a record."""
        line, self._begin = self._begin + json.dumps(encode(replace(record, round=self._round))) + "\n", ""
        try:
            make_private_folder(self._log.parent)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log_line(f"{self._log.name} lacks a wave: {error}")
