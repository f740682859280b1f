"""Gradients of three ranks with 7, 2 and no samples against those of one with 9, in users' own loops."""

from __future__ import annotations

import json

import ranks
import torch
import torch.distributed as dist
from torch import nn

from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.torch_ranks import Averaging, average, make_equal
from hetctl.runtime.worker.group import join_group

ROWS = ((0, 7), (7, 9), (9, 9))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)
        self.of_row_0, self.of_no_row = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        numbers = (x[:, 0].abs() * 2).long().clamp(max=4)
        result = self.out(torch.tanh(self.hidden(x + self.words(numbers))))
        if (x[:, 0] == 9).all():
            return result * self.of_no_row
        large = x[:, :1] > 2
        return result * torch.where(large, self.of_row_0, 1) if large.any() else result


def loss(net, x, y, scale=1.0):
    return scale * nn.functional.mse_loss(net(x), y)


def clipped(net, optimizer, x, y, share):
    loss(net, share(x), share(y), 5).backward()
    nn.utils.clip_grad_norm_([*net.hidden.parameters(), *net.out.parameters()], 0.5)
    optimizer.step()


def accumulated(net, optimizer, x, y, share):
    loss(net, share(x), share(y)).backward()
    loss(net, share(x.flip(0)), share(y.flip(0)), 0.5).backward()
    optimizer.step()


def by_hand(net, optimizer, x, y, share):
    named = [net.hidden.weight, net.out.weight]
    gradients = torch.autograd.grad(loss(net, share(x), share(y)), named)
    for parameter, gradient in zip(named, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def unfrozen_later(net, optimizer, x, y, share):
    net.hidden.requires_grad_(False)
    loss(net, share(x), share(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.hidden.requires_grad_(True)
    loss(net, share(x), share(y)).backward()
    optimizer.step()


def share_of(first, last):
    """Return a function that takes a rank's rows; without rows, it gives one that must not count."""
    return lambda values: values[first:last] if last > first else torch.full_like(values[:1], 9)


def differences(way, first, last, x, y):
    """Train one step as one rank and as part of a group; return the largest difference of their weights."""
    alone, net = (Net().double() if way is by_hand else Net() for _ in range(2))
    x, y = (x.double(), y.double()) if way is by_hand else (x.float(), y.float())
    net.load_state_dict(alone.state_dict())
    way(alone, torch.optim.SGD(alone.parameters(), lr=0.1), x, y, lambda values: values)
    rule = torch.optim.SGD(net.parameters(), lr=0.1)
    averaging = Averaging(rule)
    averaging.weight = (last - first) / 9
    way(net, rule, x, y, share_of(first, last))
    pairs = zip(alone.parameters(), net.parameters(), strict=True)
    return {
        way.__name__: max(float((a - b).detach().abs().max()) for a, b in pairs),
        f"{way.__name__} unused": net.unused.weight.grad is net.of_no_row.grad is None,
    }


def statistics(rank):
    """Return averages of three ranks, and what all have from the first."""
    mine = [torch.tensor([1.0, rank]), torch.tensor([rank, 7]), torch.tensor([rank > 0, True])]
    average(mine[:1], 1 / dist.get_world_size())
    make_equal([*mine[1:], wide := torch.full((2, 3), rank).T])
    return [values.tolist() for values in (*mine, wide)]


def compare(rank, folder):
    """Write the differences of each way of training, and statistics of the group."""
    place, announce = ranks.place_in(folder, rank, len(ROWS))
    group = join_group(place, load_framework("pytorch"), announce)
    torch.manual_seed(0)
    x, y = torch.randn(9, 4).clamp(-2, 2), torch.randn(9, 2)
    x[0, 0] = 3
    results = {}
    for way in (clipped, accumulated, by_hand, unfrozen_later):
        results |= differences(way, *ROWS[rank], x, y)
    results["statistics"] = statistics(rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    group.leave()
