"""Means and copies of buffers over the ranks of a group."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hetctl.runtime.frameworks.torch_ranks import average, make_equal

pytestmark = pytest.mark.training


@pytest.fixture(autouse=True)
def group():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_infinite_numbers_keep_their_places_in_a_mean_and_without_samples_count_nothing():
    mask = torch.triu(torch.full((3, 3), -math.inf), 1)
    before = mask.clone()
    average([mask], 0.5)
    assert torch.equal(mask.isinf(), before.isinf())
    average([mask], 0.0)
    assert mask.tolist() == torch.zeros(3, 3).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_short_numbers_keep_their_type(dtype):
    values = torch.linspace(0.1, 1, 7).to(dtype)
    before = values.clone()
    average([values], 1.0)
    assert values.dtype == dtype
    assert torch.equal(values, before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        torch.tensor(7, dtype=torch.uint16),
        torch.tensor([True, False]),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([1 + 2j]),
    ],
)
def test_buffers_of_any_type_are_made_equal(tensor):
    before = tensor.clone()
    make_equal([tensor])
    assert torch.equal(tensor, before)
