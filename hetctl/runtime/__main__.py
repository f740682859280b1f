"""``python -m hetctl.runtime ROUND_FILE --member NAME``: one rank of a member's group."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from hetctl.core.layout import RoundFolder, RunFolder
from hetctl.core.plan import Allocation
from hetctl.core.run import LOCKSTEP, RoundFile, read_round
from hetctl.runtime.board import Board
from hetctl.runtime.checkpoint import CheckpointFolder
from hetctl.runtime.group import Group, launched_rank
from hetctl.runtime.heart import beating, cores_used, gpu_used
from hetctl.runtime.pipeline import Sharing
from hetctl.runtime.roles import role_of, roles_of, together
from hetctl.runtime.step import Rank, build_rank, launched_at, reporter, run_step
from hetctl.runtime.trainer import StopSignal, Trainer


def main() -> int:
    """Train; the exit code is 0 whether the member converged or was told to stop."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime", description=__doc__)
    parser.add_argument("round_file", type=Path)
    parser.add_argument("--member", required=True)
    arguments = parser.parse_args()
    folder = RoundFolder(arguments.round_file.resolve().parent)
    return run_step(lambda: train(folder, arguments.member), folder.events, arguments.member)


def train(folder: RoundFolder, name: str) -> Group:
    """Train a member as the round file says."""
    launched = launched_at()
    round_file = read_round(folder.file)
    member = round_file.ensemble.member(name)
    allocation = round_file.allocation_of(name)
    with ExitStack() as stack:
        sharing = _sharing(round_file, name)
        rank = build_rank(round_file.ensemble, member, allocation.gpus, round_file.device, stack, sharing)
        _run(folder, round_file, allocation, rank, launched)
    return rank.group


def _run(
    folder: RoundFolder, round_file: RoundFile, allocation: Allocation, rank: Rank, launched: float
) -> None:
    name = allocation.member
    trainer = Trainer(
        member=round_file.ensemble.member(name),
        network=rank.network,
        training=rank.training,
        validation=rank.validation,
        checkpoints=CheckpointFolder(round_file.checkpoint_folder(name)),
        group=rank.group,
        events=reporter(folder.events, name, rank.group),
        stop=_stop_signal(folder, round_file, name, launched),
        gpus=allocation.gpus,
        expected_epoch_s=rank.training.samples / allocation.rate,
        launched_at=launched,
    )
    if rank.group.rank != 0:
        trainer.run()
        return
    trainer.show = Board(RunFolder(folder.path.parent).board_of(name), rank.training.samples).show
    busy = gpu_used() if round_file.device == "gpu" else cores_used()
    with beating(folder.pulse_of(name), rank.training.samples, busy) as trainer.note:
        trainer.run()


def _sharing(round_file: RoundFile, name: str) -> Sharing:
    """Say how this rank comes by its samples; it has not met its group yet, but the launcher knows it."""
    roles = roles_of(round_file.allocations, round_file.sharing, round_file.preprocess, round_file.cores)
    role = role_of(roles, name, launched_rank())
    lockstep = None
    if round_file.sharing == LOCKSTEP:
        batch_sizes = {member.name: member.batch_size for member in round_file.ensemble.members}
        batches = {a.member: a.gpus * batch_sizes[a.member] for a in round_file.allocations}
        lockstep = together(roles, role, batches, round_file.run, round_file.index)
    return Sharing(round_file.sharing, round_file.run, role.preprocessors, lockstep)


def _stop_signal(folder: RoundFolder, round_file: RoundFile, name: str, launched: float) -> StopSignal:
    started_up_s = time.time() - launched
    longest_s = None if round_file.longest_s is None else round_file.longest_s - started_up_s
    return StopSignal(folder.stops(name, round_file.job), round_file.deadline, longest_s)


if __name__ == "__main__":
    sys.exit(main())
