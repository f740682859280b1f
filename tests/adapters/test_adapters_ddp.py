"""The vote of ranks to stop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_ranks

from hetctl.model.training_settings import STOP_VARIABLE

pytestmark = pytest.mark.training

LAST_STEP = 100


def vote(rank: int, folder: str) -> None:
    """Vote after each step; the pipe of rank 1 alone says stop, before its fourth step."""
    import torch.distributed as dist

    from hetctl.adapters.ddp import StopVote, wait_for_ranks

    told, other = os.pipe()
    os.environ[STOP_VARIABLE] = str(told)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    stops, step = StopVote(), 0
    while step < LAST_STEP:
        step += 1
        if rank == 1 and step == 4:
            os.close(other)
        if stops():
            break
    assert stops(), "it is true from then on"
    wait_for_ranks()
    dist.destroy_process_group()
    Path(folder, f"stopped-{rank}").write_text(str(step))


def test_ranks_stop_after_the_same_step(tmp_path):
    run_ranks(vote, 3, tmp_path, str(tmp_path))
    assert [path.read_text() for path in tmp_path.glob("stopped-*")] == ["5"] * 3


def test_one_rank_asks_for_itself(start_script):
    from hetctl.adapters.ddp import StopVote

    ends, stops = start_script(), StopVote()
    assert not stops()
    ends.tell_to_stop()
    assert stops()
