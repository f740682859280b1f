"""Tensors on a GPU between two ranks, as they are opened, copied and released."""

from __future__ import annotations

import json
import time

import pytest
import torch
from stage_ranks import layout_of, run_ranks
from workbench import wait_for

from hetctl.runtime.frameworks.torch_measuring import (
    ComputeClock,
    GpuTensors,
    arguments_of,
    handle_of,
)
from hetctl.runtime.stages.p2p_transport import LEAST_OPENED_BYTES, receive

pytestmark = pytest.mark.training
TWO = layout_of(1, 2, 2, in_flight=1)
LARGE = LEAST_OPENED_BYTES // 4
TIMES = 20


def on_gpu():
    torch.cuda.set_device(0)
    return GpuTensors(torch.device("cuda"))


def test_a_handle_is_json_of_all_that_opens_a_tensor():
    shape, rest = (torch.Size([3, 2]), (2, 1), 5), [b"\0\xff", 24, 0, False, b"counter", 8, b"", True]
    arguments = (torch.Tensor, *shape, torch.TypedStorage, torch.bfloat16, 0, *rest)
    handle = handle_of(arguments)
    assert json.loads(handle)[0] == [3, 2]
    assert arguments_of(handle, 1) == (*arguments[:6], 1, *rest)


def allocated():
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


def passed(numbers, nodes):
    """Pass tensors from rank 0 to rank 1, which squares them and returns them; return what rank 0 gets."""

    def work(rank):
        memory = rank.memory
        assert isinstance(memory, GpuTensors)
        if rank.transport.rank == 1:
            for _ in range(TIMES):
                (tensor,) = receive(rank.transport.inbox).tensors
                kind = type(tensor).__name__
                own = memory.received(tensor) ** 2
                del tensor
                torch.cuda.synchronize()
                rank.transport.send(0, "squared", (own,), kind=kind)
            assert receive(rank.transport.inbox).kind == "end"
            return None
        first = allocated()
        found = []
        for number in range(TIMES):
            tensor = memory.filled(float(number), numbers)
            rank.transport.send(1, "number", (tensor[1:],))
            del tensor
            answer = receive(rank.transport.inbox)
            (squared,) = answer.tensors
            found.append((float(memory.array(squared)[-1]), len(squared), answer.fields["kind"]))
            del answer, squared
        # The thread that sends may still have the last message.
        wait_for(lambda: allocated() == first)
        rank.transport.send(1, "end")
        return found

    found, _ = run_ranks(TWO, work, nodes, memory=on_gpu)
    assert [value for value, _, _ in found] == [float(number**2) for number in range(TIMES)]
    assert {length for _, length, _ in found} == {numbers - 1}
    (kind,) = {kind for *_, kind in found}
    return kind


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("numbers", "nodes", "kind"),
    [(2 * LARGE, ["a", "a"], "Tensor"), (1000, ["a", "a"], "ndarray"), (2 * LARGE, ["a", "b"], "ndarray")],
    ids=["large ones are opened", "small ones are copied", "those of other nodes are copied"],
)
def test_tensors_reach_the_other_rank_and_are_released(numbers, nodes, kind):
    assert passed(numbers, nodes) == kind


@pytest.mark.gpu
def test_the_gpu_is_timed_without_the_launches():
    def work(rank):
        if rank.transport.rank == 1:
            return None
        clock, numbers = ComputeClock(), torch.ones(1000, device="cuda")
        for _ in range(4):
            with clock.running():
                for _ in range(50):
                    time.sleep(0.0002)
                    numbers.mul_(1.0)
            found = clock.taken()
        return found

    found, _ = run_ranks(TWO, work, memory=on_gpu)
    assert found.launch_s > 50 * 0.0002
    # Each kernel takes a few microseconds.
    assert 0 < found.compute_s < found.launch_s / 10
