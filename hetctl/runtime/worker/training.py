"""Training of a member in one round, on one rank of its group."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hetctl.model.searches import PART
from hetctl.model.training_progress import RankShare
from hetctl.model.training_settings import OFF
from hetctl.model.values import dataclass
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.loaders import ArrayLoader, Loader
from hetctl.runtime.data.partitioned_data import PartitionLoader
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.data.sample_accesses import SampleAccesses, Transfer, most_accessed
from hetctl.runtime.data.sampler import Order, epoch_order
from hetctl.runtime.data.sharing.node_folder import folder_of
from hetctl.runtime.frameworks import TrainableNetwork, finished
from hetctl.runtime.frameworks.packed_state import within
from hetctl.runtime.frameworks.stage_network import StageNetwork
from hetctl.runtime.worker.async_checkpoint import OnSaved, ShardSaver
from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, Loaded
from hetctl.runtime.worker.context import BuiltMember, WorkerContext
from hetctl.runtime.worker.hardware import busy_share, live_metrics_to
from hetctl.runtime.worker.member_trainer import (
    ACCESSES,
    BALANCE,
    GENERATORS,
    PREDICTIONS,
    MemberTrainer,
    Steps,
    StopSignal,
    check_metrics,
    load_together,
    own_arrays,
    random_state,
    refuse_early_end,
    set_random_state,
)
from hetctl.runtime.worker.messages import Assignment, TrainingSpec
from hetctl.runtime.worker.reporting import has_saved
from hetctl.runtime.worker.step_clock import EpochClock, RateClock
from hetctl.runtime.worker.tensorboard import Figures, TensorBoardWriter, rank_figures
from hetctl.storage.paths import tensorboard_file

if TYPE_CHECKING:
    from hetctl.runtime.worker.balancing import Balancer


@dataclass
class Trainer(MemberTrainer):
    """A member's training in one round, as in `MemberTrainer`.

    Parameters
    ----------
    balancer : Balancer or None
        Balancer of the group's batch sizes; None: they are constant.
    accesses : SampleAccesses or None
        Accesses of the samples of partitioned data; None: each sample is accessed once in an epoch.
    """

    network: TrainableNetwork
    balancer: Balancer | None = None
    accesses: SampleAccesses | None = None

    def __post_init__(self) -> None:
        if self.member.shard:
            self.saver = ShardSaver(self.checkpoints, self.network, self.group)
        super().__post_init__()
        # Only rank 0 reports the rate, and only what reports may wait for its device.
        is_first = self.group.rank == 0
        self._rate_clock = RateClock(self.member.step_samples(self.group.size)) if is_first else None
        if self.validation.is_in_order(self.group.size):
            self.network.keep_predictions(self.validation.samples, self.member.keep.predictions or 0)

    def _load(self) -> Loaded:
        """Return the newest checkpoint, all parts of which the ranks together have checked."""
        if not self.member.shard:
            return super()._load()

        def needs(name: str) -> bool:
            """Return true for arrays and this rank's share of the shards, whatever number of ranks wrote."""
            kind, _, number = name.partition("/")
            return kind != "shards" or int(number) % self.group.size == self.group.rank

        loaded = load_together(self.checkpoints, self.group, needs)
        if loaded.arrays is not None:
            self.network.open_shards(self.checkpoints.path / loaded.shards)
        return loaded

    def _restore_arrays(self, arrays: Arrays) -> None:
        managed = within(arrays, BALANCE)
        if managed and self.balancer is not None:
            self.balancer.restore(managed)
        before = within(arrays, ACCESSES)
        if before and self.accesses is not None:
            self.accesses.restore(before)
        elif self.state.part_samples:
            self._continue_in_other_order(before, self.state.part_samples, self.state.part_order)
        self.network.restore(own_arrays(arrays))

    def _continue_in_other_order(self, accesses: Arrays, done: int, order: Order) -> None:
        """Continue an epoch that now draws samples in another way: by accesses, or in a given order.

        Samples are drawn by accesses if nodes lack partitions. Data without partitions has its own order,
        whose key only its loader knows.
        """
        if accesses and isinstance(self.training, ArrayLoader):
            if len(accesses["visits"]) == self.training.samples:
                self.training.continue_after(most_accessed(accesses, done), order)
        elif not accesses and self.accesses is not None:
            self.accesses.begin_after(epoch_order(self.training.samples, *order)[:done])

    def _restore_generators(self, arrays: Arrays) -> None:
        super()._restore_generators(arrays)
        # Ranks that the last group did not have keep rank 0's.
        text = arrays.get(f"{GENERATORS}{self.group.rank}")
        if text is not None:
            of_process, of_framework = json.loads(text.tobytes())
            set_random_state(of_process)
            self.network.set_generators(of_framework)

    def _train_epoch(self) -> Steps:
        number, is_whole = len(self.state.epochs) + 1, not self.state.part_samples
        if names := self.network.metric_names():
            # An epoch may take hours.
            check_metrics(dict.fromkeys(("loss", *names), 0.0), self.member)
        clock = EpochClock(self.training.samples, self.member.step_samples(self.group.size))

        def after_step(position: int) -> None:
            clock.note(position, batches.loss)
            if self._rate_clock and (timed := self._rate_clock.note(position, batches.loss)):
                self._report_rate(*timed)
            self._after_step(number, position, batches.loss)
            if reported := self.network.take_reported():
                self.events.write(PART, epoch=number, samples=position, metrics=reported)

        batches = Batches(
            self.training,
            number,
            self.state.part_samples,
            self.group,
            self.stop,
            after_step,
            self.state.part_order or None,
            self.balancer,
            most=self.member.micro_batch_size,
            should_pause=self._is_pause_due,
            in_step=self.member.shard,
        )
        with closing(batches):
            while (yield from self._train_part(batches)):
                self._begin_save(self._report_checkpoint)
                if self._rate_clock:
                    self._rate_clock.interrupt()
                batches.resume()
        self._data_s = batches.waited_s
        if not batches.complete:
            refuse_early_end(self.group, self.stop, batches.position, self.training.samples, "an epoch")
            return False
        yield from self._finish_epoch(number, clock.rate, is_whole=is_whole)
        if self.accesses is not None:
            fewest, most = self.accesses.extremes
            self.events.write(
                "sample_accesses", epoch=number, fewest=fewest, most=most, held=self.accesses.held
            )
        return True

    def _is_pause_due(self) -> bool:
        # Training does not wait for the last checkpoint if the interval is a time; one in steps is kept to.
        waits = self.member.checkpoint.is_timed and self._saver.is_busy
        return self._clock.is_due() and not waits

    def _train_part(self, batches: Batches) -> Steps:
        """Train until the epoch ends, a stop, or a checkpoint is due; return true for a due checkpoint."""
        began = time.perf_counter()
        loss = yield from self.network.training(batches)
        done = batches.position - batches.start
        self.state = replace(
            self.state,
            part_samples=batches.position,
            part_order=batches.order or (),
            # The mean of no losses is no number.
            part_loss=self.state.part_loss + (loss * done if done else 0.0),
            part_s=self.state.part_s + time.perf_counter() - began,
        )
        return batches.paused

    def _evaluate(self, number: int) -> Steps:
        batches = validation_batches(self.validation, number, self.heartbeat)
        return (yield from self.network.evaluating(batches))

    def _end_epoch(self, metrics: Mapping[str, float]) -> None:
        self.network.end_epoch(metrics)

    def _save(self, report: OnSaved) -> None:
        self.state = replace(self.state, random_state=self._random_state())
        of_ranks = self._states_of_others()
        predictions = {} if self.state.part_samples else self.network.predictions()
        if self.group.rank != 0 and not self.member.shard:
            # All ranks have the same weights; copying them from each GPU would fill the node's memory.
            return
        arrays = self.network.save() | of_ranks
        arrays |= {f"{PREDICTIONS}{name}": array for name, array in predictions.items()}
        if self.balancer is not None:
            arrays.update({f"{BALANCE}{name}": array for name, array in self.balancer.state().items()})
        if self.accesses is not None:
            arrays.update({f"{ACCESSES}{name}": array for name, array in self.accesses.save().items()})
        self._saver.save(arrays, self.state, report)

    def _random_state(self) -> Any:
        """Return the states of the process's generators, as `random_state`."""
        return random_state()

    def _states_of_others(self) -> dict[str, npt.NDArray[Any]]:
        """Return, on rank 0, the states of the other ranks' generators; all ranks call it."""
        if self.group.size == 1:
            return {}
        states = self.network.gather([random_state(), self.network.generators()])
        others = enumerate(states[1:], 1) if self.group.rank == 0 else ()
        return {
            f"{GENERATORS}{rank}": np.frombuffer(json.dumps(state).encode(), np.uint8)
            for rank, state in others
        }


def train(assignment: Assignment, context: WorkerContext) -> None:
    """Train a member as its round specifies: until it has converged, or is told to stop."""
    spec = assignment.task.spec
    with ExitStack() as stack:
        built, fields = build_member(assignment, context, context, stack)
        events, timer, balancer, accesses = fields["events"], built.network.timer, None, None
        if built.group.size > 1 and timer is not None and spec.balance.mode != OFF:
            # Only balanced training imports the batch size managers.
            from hetctl.runtime.worker.balancing import make_balancer

            balancer = make_balancer(spec, built.group, timer, events, assignment.task.balance_log, stack)
        if isinstance(built.training, PartitionLoader):
            accesses = built.training.accesses
            workers, sample_bytes = spec.worker_names, sum(each.nbytes for each in built.training.sample)

            def report_migration(transfer: Transfer) -> None:
                events.write(
                    "migration",
                    source=workers[transfer.source],
                    target=workers[transfer.target],
                    samples=len(transfer.samples),
                    bytes=len(transfer.samples) * sample_bytes,
                )

            built.training.on_landed = report_migration
        trainer = Trainer(**fields, balancer=balancer, accesses=accesses)
        shares = tuple if balancer is None else balancer.shares
        finished(reporting(trainer, context, lambda _: rank_figures(shares()), shares))
    built.group.barrier_and_close()


def build_member(
    assignment: Assignment,
    context: WorkerContext,
    own: WorkerContext,
    keep: ExitStack,
    *,
    fused: bool = False,
) -> tuple[BuiltMember, dict[str, Any]]:
    """Build the member of an assignment; return it with the fields of its trainer.

    Parameters
    ----------
    own : WorkerContext
        Context by which the trainer sends and stops: that of the process, or the member's copy of it.
    keep : ExitStack
        Stack that closes the member's loaders.
    """
    spec, rank_info = assignment.task.spec, assignment.rank_info
    restarted_at, share = restart_time(assignment, context), spec.shares[rank_info.rank]
    sharing = sample_sharing(spec, share, context.binding.node)
    built = context.build(
        *(spec.ensemble, rank_info, sharing, share, keep, spec.network, spec.timeouts), fused=fused
    )
    loaders = built.training, built.validation
    return built, trainer_fields(assignment, own, built.network, *loaders, restarted_at)


def trainer_fields(
    assignment: Assignment,
    context: WorkerContext,
    network: TrainableNetwork | StageNetwork,
    training: Loader,
    validation: Loader,
    restarted_at: float | None,
) -> dict[str, Any]:
    """Return the fields of a `MemberTrainer` for the rank of an assignment."""
    task, spec = assignment.task, assignment.task.spec
    (member,) = spec.ensemble.members
    return {
        "member": member,
        "network": network,
        "training": training,
        "validation": validation,
        "checkpoints": CheckpointFolder(Path(spec.checkpoints), context.patience, member),
        "group": context.group,
        "events": context.reporter(task),
        "stop": make_stop_signal(context, spec, assignment),
        "allocation": spec.allocation,
        "busy": busy_share(context.binding.device),
        "joined": lambda: assignment.rank_info.key in context.joined,
        "launched_at": assignment.launched_at,
        "gpu_type": spec.gpu_type,
        "restarted_at": restarted_at,
        "heartbeat": context.heartbeat,
        "has_saved": lambda: has_saved(task, context.patience),
    }


def restart_time(assignment: Assignment, context: WorkerContext) -> float | None:
    """Return the time from which a restart counts; None if ranks that stay have loaded nothing yet."""
    if assignment.own_step:
        return assignment.launched_at
    return time.time() if context.data is not None else None


def reporting(
    trainer: MemberTrainer,
    context: WorkerContext,
    figures: Figures,
    shares: Callable[[], tuple[RankShare, ...]] = tuple,
) -> Steps:
    """Run a trainer in parts; rank 0 sends live metrics, and writes for TensorBoard.

    Parameters
    ----------
    figures : Figures
        Scalars of ranks or stages, for TensorBoard.
    shares : callable
        Function that returns the parts of the group's ranks in the last step.
    """
    if trainer.group.rank != 0:
        yield from trainer.steps()
        return
    path, samples = tensorboard_file(trainer.checkpoints.path), trainer.training.samples
    trainer.show = TensorBoardWriter(path, samples, figures).show
    busy = busy_share(context.binding.device)
    with live_metrics_to(context.send, samples, busy, shares) as trainer.note:
        yield from trainer.steps()


def sample_sharing(spec: TrainingSpec, share: InputShare, node: str) -> Sharing:
    """Return how this process shares samples, with preprocessors enough for later members, too."""
    most = max(1, share.preprocessors or 0, spec.preprocessors)
    return Sharing(spec.sharing, folder_of(spec.run_key, node), most, spec.timeouts)


def make_stop_signal(context: WorkerContext, spec: TrainingSpec, assignment: Assignment) -> StopSignal:
    """Return the stop signal of a member's group."""
    longest_s = spec.max_uninterrupted_s
    if longest_s is not None:
        longest_s -= time.time() - assignment.launched_at
    return StopSignal(lambda: context.stop_reason(assignment.rank_info.key), spec.deadline, longest_s)
