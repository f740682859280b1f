"""A member's training in one round, on one rank of its group."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from hetctl.core.layout import RoundFolder, RunFolder
from hetctl.core.run import LOCKSTEP, RoundFile, read_round
from hetctl.runtime.assignment import Assignment
from hetctl.runtime.board import Board
from hetctl.runtime.checkpoint import CheckpointFolder
from hetctl.runtime.desk import Built, Desk, Share
from hetctl.runtime.heart import beating, cores_used, gpu_used
from hetctl.runtime.leaders import folder_of, lockstep_of
from hetctl.runtime.pipeline import Sharing
from hetctl.runtime.reporting import reporter
from hetctl.runtime.roles import Role, role_of, roles_of
from hetctl.runtime.trainer import StopSignal, Trainer


def train(assignment: Assignment, desk: Desk) -> None:
    """Train a member as the round file says: until it has converged, or is told to stop."""
    restarted_at = _restarted_at(assignment, desk)
    folder = RoundFolder(Path(assignment.task.folder))
    round_file = read_round(folder.file)
    name, place = assignment.task.name, assignment.place
    roles = roles_of(round_file.allocations, round_file.sharing, round_file.preprocess, round_file.cores)
    role = role_of(roles, name, place.rank)
    with ExitStack() as stack:
        built = desk.build(
            round_file.ensemble,
            round_file.ensemble.member(name),
            place,
            _sharing(round_file, role),
            _share(round_file, roles, role),
            stack,
            round_file.network,
            round_file.timeouts,
        )
        _run(folder, round_file, assignment, built, desk, restarted_at)
    built.group.leave()


def _restarted_at(assignment: Assignment, desk: Desk) -> float | None:
    """Return since when this start is like any later one; None if that was the first of ranks that stay."""
    if assignment.own_step:
        return assignment.launched_at
    return time.time() if desk.is_supplied else None


def _run(
    folder: RoundFolder,
    round_file: RoundFile,
    assignment: Assignment,
    built: Built,
    desk: Desk,
    restarted_at: float | None,
) -> None:
    name = assignment.task.name
    allocation = round_file.allocation_of(name)
    trainer = Trainer(
        member=round_file.ensemble.member(name),
        network=built.network,
        training=built.training,
        validation=built.validation,
        checkpoints=CheckpointFolder(round_file.checkpoint_folder(name)),
        group=built.group,
        events=reporter(folder.events, name, built.group),
        stop=_stop_signal(desk, round_file, assignment),
        gpus=allocation.gpus,
        expected_epoch_s=built.training.samples / allocation.rate,
        launched_at=assignment.launched_at,
        gpu_type=round_file.gpu_types.get(name),
        restarted_at=restarted_at,
        sign=desk.sign,
    )
    if built.group.rank != 0:
        trainer.run()
        return
    trainer.show = Board(RunFolder(folder.path.parent).board_of(name), built.training.samples).show
    device = desk.binding.device
    busy = cores_used() if device is None else gpu_used(device)
    with beating(desk.send_pulse, built.training.samples, busy) as trainer.note:
        trainer.run()


def _sharing(round_file: RoundFile, role: Role) -> Sharing:
    """Say how this process comes by samples; a later member may want more preprocessors than this one."""
    most = max(1, role.preprocessors, round_file.cores // round_file.gpus_per_node)
    return Sharing(round_file.sharing, folder_of(round_file.run, role.node), most, round_file.timeouts)


def _share(round_file: RoundFile, roles: tuple[Role, ...], role: Role) -> Share:
    if round_file.sharing != LOCKSTEP:
        return Share(role.preprocessors)
    return Share(role.preprocessors, lockstep_of(round_file, roles, role))


def _stop_signal(desk: Desk, round_file: RoundFile, assignment: Assignment) -> StopSignal:
    started_up_s = time.time() - assignment.launched_at
    longest_s = None if round_file.longest_s is None else round_file.longest_s - started_up_s
    return StopSignal(lambda: desk.told(assignment.place.key), round_file.deadline, longest_s)
