"""Training of a member as a pipeline in one round, on one rank of its group."""

from __future__ import annotations

import json
import queue
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from hetctl.model.errors import BadInputError
from hetctl.model.pipelines import PipelineLayout, WaveRecord
from hetctl.model.serialization import encode
from hetctl.runtime.data.input_pipeline import refuse_own_batches
from hetctl.runtime.data.loaders import Loader
from hetctl.runtime.data.named_arrays import refuse_named
from hetctl.runtime.frameworks.stage_network import Chain
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.stages.p2p_transport import P2PTransport, TensorMessage, receive
from hetctl.runtime.stages.parameter_server import TO_SERVER, WaveServer
from hetctl.runtime.stages.pipeline_trainer import PART, PartSaver, PipelineTrainer
from hetctl.runtime.stages.stage_worker import StageWorker
from hetctl.runtime.worker.context import WholeData, WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, RankInfo
from hetctl.runtime.worker.messages import Assignment, TrainingSpec
from hetctl.runtime.worker.training import (
    restart_time,
    run_shown,
    sample_sharing,
    trainer_fields,
)
from hetctl.storage.atomic_io import make_private_folder

SAMPLE = "sample"
"""Kind of the message with one sample, from which the stages take their shapes."""


def train_stage(assignment: Assignment, context: WorkerContext) -> None:
    """Train the layers of this rank as its round specifies: until convergence, or until told to stop."""
    restarted_at = restart_time(assignment, context)
    spec, rank_info = assignment.task.training, assignment.rank_info
    assert spec is not None
    layout = spec.allocation.pipeline
    assert layout is not None
    (member,) = spec.ensemble.members
    framework, chain = context.chain(spec.ensemble)
    group = context.join(rank_info, spec.network, spec.timeouts, CollectiveBackend())
    _check_layers(member.name, layout.layers, chain)
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
        layers = range(plan.first, plan.last + 1)
        network = chain.build(layers, training.sample, recomputes=plan.recomputes)
        context.heartbeat()
        served = [layer for layer, rank in enumerate(layout.servers) if rank == group.rank]
        server = WaveServer(transport, to_server, served, [stages[0].rank for stages in layout.workers])
        recorder = WaveRecorder(assignment.task.wave_log(group.rank), spec.round)
        fields = trainer_fields(assignment, context, network, training, validation, restarted_at)
        # A checkpoint has the servers' weights of a wave, of which the first virtual worker's copy is enough.
        part = stage if worker == 0 else None
        saver = PartSaver(fields["checkpoints"], transport, parts, part, len(layout.workers[0]))
        trainer = PipelineTrainer(
            **fields,
            stage=StageWorker(network, layout, transport, recorder.write, context.heartbeat),
            saver=saver,
            worker_names=spec.worker_names,
        )
        run_shown(trainer, context, trainer.figures_of)
    # Only behind the barrier has every rank sent its last wave to this one's server.
    group.barrier_and_close()
    server.close()
    transport.close()


def _check_layers(name: str, planned: int, chain: Chain) -> None:
    """Refuse a layout of other layers than those of the network.

    Raises
    ------
    BadInputError
        If their numbers differ.
    """
    if planned != len(chain.layers):
        raise BadInputError(
            f"the layer profile of {name} has {planned} layers, but model_fn builds {len(chain.layers)}:"
            f" {', '.join(chain.layers)}",
            f"measure them with `hetctl profile --layers {name}`",
        )


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
        # The first stage may load data for minutes; without heartbeats this rank would be taken for hung.
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
    """Writer of a rank's log: the weights that its minibatches met, a line for each wave.

    Training goes on if the disk is full.

    Parameters
    ----------
    log : Path
        File that grows from one round to the next.
    """

    def __init__(self, log: Path, round_index: int) -> None:
        self._log, self._round = log, round_index
        self._begin = self._repair()

    def write(self, record: WaveRecord) -> None:
        """Append a record."""
        line, self._begin = self._begin + json.dumps(encode(replace(record, round=self._round))) + "\n", ""
        try:
            make_private_folder(self._log.parent)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log_line(f"{self._log.name} lacks a wave: {error}")

    def _repair(self) -> str:
        """Return what ends an incomplete line of a process that was killed."""
        with suppress(OSError):
            if not self._log.read_bytes().endswith(b"\n"):
                return "\n"
        return ""
