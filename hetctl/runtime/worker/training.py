"""Training of a member in one round, on one rank of its group."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hetctl.model.training_progress import RankShare
from hetctl.model.training_settings import OFF
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.input_share import InputShare
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.partition_loader import PartitionLoader
from hetctl.runtime.data.sample_accesses import Transfer
from hetctl.runtime.data.sharing.node_folder import folder_of
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.context import BuiltMember, WorkerContext
from hetctl.runtime.worker.live_metrics import busy_share, live_metrics_to
from hetctl.runtime.worker.member_trainer import MemberTrainer, Reporter, StopSignal
from hetctl.runtime.worker.messages import Assignment, TaskMessage, TrainingSpec
from hetctl.runtime.worker.reporting import has_saved, reporter
from hetctl.runtime.worker.tensorboard import Figures, TensorBoardWriter, figures_of_ranks
from hetctl.runtime.worker.trainer import ShardedTrainer, Trainer, TrainingBalancer
from hetctl.storage.paths import tensorboard_file

TRAINERS: dict[bool, Callable[..., Trainer]] = {False: Trainer, True: ShardedTrainer}
"""Trainers of members, by whether these are divided among their ranks."""


def train(assignment: Assignment, context: WorkerContext) -> None:
    """Train a member as its round specifies: until it has converged, or is told to stop."""
    restarted_at = restarted_at_of(assignment, context)
    spec, rank_info = assignment.task.training, assignment.rank_info
    assert spec is not None
    (member,) = spec.ensemble.members
    share = spec.shares[rank_info.rank]
    sharing = sharing_of(spec, share, context.binding.node)
    with ExitStack() as stack:
        built = context.build(
            *(spec.ensemble, member, rank_info, sharing, share, stack, spec.network, spec.timeouts)
        )
        _run(spec, assignment, built, context, restarted_at, stack)
    built.group.barrier_and_close()


def restarted_at_of(assignment: Assignment, context: WorkerContext) -> float | None:
    """Return the time from which a restart counts; None for the first start of ranks that stay."""
    if assignment.own_step:
        return assignment.launched_at
    return time.time() if context.has_data else None


def _run(
    spec: TrainingSpec,
    assignment: Assignment,
    built: BuiltMember,
    context: WorkerContext,
    restarted_at: float | None,
    stack: ExitStack,
) -> None:
    (member,) = spec.ensemble.members
    checkpoints = CheckpointFolder(Path(spec.checkpoints), context.patience)
    events = reporter(assignment.task, built.group, context.send_written, context.patience)
    balancer = _balancer(spec, assignment.task, built, events, stack)
    accesses = None
    if isinstance(built.training, PartitionLoader):
        accesses = built.training.accesses
        built.training.on_landed = partial(
            _report_migration, events, worker_names(spec), built.training.sample
        )
    trainer = TRAINERS[member.shard](
        member=member,
        network=built.network,
        training=built.training,
        validation=built.validation,
        checkpoints=checkpoints,
        group=built.group,
        events=events,
        stop=stop_signal_of(context, spec, assignment),
        gpus=spec.allocation.gpus,
        expected_epoch_s=built.training.samples / spec.allocation.rate,
        launched_at=assignment.launched_at,
        gpu_type=spec.gpu_type,
        restarted_at=restarted_at,
        heartbeat=context.heartbeat,
        has_saved=lambda: has_saved(assignment.task, context.patience),
        balancer=balancer,
        accesses=accesses,
    )
    shares = tuple if balancer is None else balancer.shares
    run_shown(trainer, context, lambda _: figures_of_ranks(shares()), shares)


def run_shown(
    trainer: MemberTrainer,
    context: WorkerContext,
    figures: Figures,
    shares: Callable[[], tuple[RankShare, ...]] = tuple,
) -> None:
    """Run a trainer; rank 0 sends live metrics, and writes for TensorBoard.

    Parameters
    ----------
    figures : Figures
        Scalars of ranks or stages, for TensorBoard.
    shares : callable
        Function that returns the parts of the group's ranks in the last step.
    """
    if trainer.group.rank != 0:
        trainer.run()
        return
    path, samples = tensorboard_file(trainer.checkpoints.path), trainer.training.samples
    trainer.show = TensorBoardWriter(path, samples, figures).show
    busy = busy_share(context.binding.device)
    with live_metrics_to(context.send_metrics, samples, busy, shares) as trainer.note:
        trainer.run()


def _balancer(
    spec: TrainingSpec, task: TaskMessage, built: BuiltMember, events: Reporter, stack: ExitStack
) -> TrainingBalancer | None:
    """Return the balancer of a group of several ranks, unless balancing is off."""
    timer, group = built.network.timer, built.group
    if group.size == 1 or timer is None or spec.balance.mode == OFF:
        return None
    # Only trainings that balance import the managers of batch sizes.
    from hetctl.runtime.worker.balancing import balancer_of

    return balancer_of(spec, worker_names(spec), group, timer, events, task.balance_log, stack)


def worker_names(spec: TrainingSpec) -> tuple[str, ...]:
    """Return node and GPU of each rank."""
    return tuple(f"{place.node}:{gpu}" for place in spec.allocation.placement for gpu in place.gpus)


def _report_migration(
    events: Reporter, workers: tuple[str, ...], sample: Samples, transfer: Transfer
) -> None:
    events.write(
        "migration",
        source=workers[transfer.source],
        target=workers[transfer.target],
        samples=len(transfer.samples),
        bytes=len(transfer.samples) * sum(array.nbytes for array in sample),
    )


def sharing_of(spec: TrainingSpec, share: InputShare, node: str) -> Sharing:
    """Return how this process shares samples; later members may need more preprocessors than this one."""
    most = max(1, share.preprocessors or 0, spec.preprocessors)
    return Sharing(spec.sharing, folder_of(spec.run_key, node), most, spec.timeouts)


def stop_signal_of(context: WorkerContext, spec: TrainingSpec, assignment: Assignment) -> StopSignal:
    """Return the signal to stop of a member's group."""
    started_up_s = time.time() - assignment.launched_at
    max_uninterrupted_s = (
        None if spec.max_uninterrupted_s is None else spec.max_uninterrupted_s - started_up_s
    )
    return StopSignal(
        lambda: context.stop_reason(assignment.rank_info.key), spec.deadline, max_uninterrupted_s
    )
