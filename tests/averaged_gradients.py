"""Gradients of a group against those of one rank with all samples, in users' own loops."""

from __future__ import annotations

import copy
import json
from functools import partial

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from workbench import wait_for

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks import load_framework, torch_ranks
from hetctl.runtime.frameworks.torch_ranks import Averaging, average, make_equal
from hetctl.runtime.worker.group import join_group

ROWS = ((0, 7), (7, 9), (9, 9))
"""Samples of three ranks: 7, 2 and none."""
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.unused, self.square = nn.Linear(2, 2), nn.Linear(4, 4)
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
    own = [gradient.clone() for gradient in gradients]
    optimizer.step()
    assert all(map(torch.equal, own, gradients))


def unfrozen_later(net, optimizer, x, y, share):
    net.hidden.requires_grad_(False)
    loss(net, share(x), share(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.hidden.requires_grad_(True)
    loss(net, share(x), share(y)).backward()
    optimizer.step()


def checkpointed(net, optimizer, x, y, share):
    """Use a layer in two stretches that are computed again for their gradients, in passes within the pass."""
    stretch = partial(checkpoint, lambda rows: torch.tanh(net.square(rows)), use_reentrant=True)
    rows = share(x).requires_grad_()
    nn.functional.mse_loss(stretch(stretch(rows))[:, :2] * net.of_row_0, share(y)).backward()
    optimizer.step()


def grown(net, optimizer, x, y, share):
    """Train parameters that the optimizer was given later."""
    loss(net, share(x), share(y)).backward()
    optimizer.step()
    if not hasattr(net, "late"):
        net.late = nn.Parameter(torch.ones(2, dtype=x.dtype))
        optimizer.add_param_group({"params": [net.late]})
    optimizer.zero_grad()
    nn.functional.mse_loss(net(share(x)) * net.late, share(y)).backward()
    optimizer.step()


def share_of(first, last):
    """Return a function that takes a rank's rows; without rows, it gives one that must not count."""
    return lambda values: values[first:last] if last > first else torch.full_like(values[:1], 9)


def differences(way, first, last, x, y):
    """Train as one rank and as part of a group; return the largest difference of their weights."""
    alone, net = (Net().double() if way is by_hand else Net() for _ in range(2))
    x, y = (x.double(), y.double()) if way is by_hand else (x.float(), y.float())
    net.load_state_dict(alone.state_dict())
    rules = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, net)]
    Averaging(rules[1]).expect((last - first) / 9, ends_step=True)
    for _ in range(STEPS):
        for rule in rules:
            rule.zero_grad()
        way(alone, rules[0], x, y, lambda values: values)
        way(net, rules[1], x, y, share_of(first, last))
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
    group = joined(rank, folder, len(ROWS))
    torch_ranks.FIRST_BUCKET_BYTES = torch_ranks.BUCKET_BYTES = 40
    torch.manual_seed(0)
    x, y = torch.randn(9, 4).clamp(-2, 2), torch.randn(9, 2)
    x[0, 0] = 3
    results = {}
    for way in (clipped, accumulated, by_hand, unfrozen_later, checkpointed, grown):
        results |= differences(way, *ROWS[rank], x, y)
    results["statistics"] = statistics(rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    group.barrier_and_close()


def blocking(net, weight):
    """Average all gradients at once, after the backward pass."""
    message = torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()]) * weight
    dist.all_reduce(message)
    for parameter in net.parameters():
        parameter.grad, message = (
            message[: parameter.numel()].view_as(parameter),
            message[parameter.numel() :],
        )


def overlap(rank, folder):
    """Write whether two ranks train as with one average after each pass, and what they sent before.

    Before its last pass the second rank waits until the first one's step is timed, so that the first could
    not have waited for it.
    """
    group = joined(rank, folder, 2)
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.Tanh())))
    plain = copy.deepcopy(net)
    # The last parameter of each optimizer, which would be sent first, never gets a gradient.
    lists = [[*each.parameters(), nn.Parameter(torch.ones(300))] for each in (net, plain)]
    rules = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in lists]
    torch_ranks.FIRST_BUCKET_BYTES, torch_ranks.BUCKET_BYTES = 2**10, 2**18
    averaging, weight = Averaging(rules[0]), (0.75, 0.25)[rank]
    averaging.expect(weight, ends_step=True)
    sent = []
    net[0].bias.register_post_accumulate_grad_hook(lambda _: sent.append(len(averaging._average._sent)))
    for step, x in enumerate(torch.randn(STEPS, 2, 8, 300)[:, rank], start=1):
        if step == STEPS:
            meet_at(folder / "timed", rank, averaging.timer)
        for each, rule in zip((net, plain), rules, strict=True):
            rule.zero_grad()
            each(x).square().mean().backward()
            if each is plain:
                blocking(plain, weight)
            rule.step()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    results = {"equal": all(torch.equal(a, b) for a, b in pairs), "sent": [*sent], "error": error_of(net)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    group.barrier_and_close()


def meet_at(path, rank, timer):
    """Have the first rank's timer make a file at its end, for which the second waits now."""
    if rank == 1:
        wait_for(path.exists)
        return
    end = timer.end
    timer.end = lambda: (path.touch(), end())


def error_of(net):
    """Return the error of a pass that computes gradients again which were sent."""
    stretch = partial(checkpoint, net[:2], use_reentrant=True)
    try:
        net[2:](stretch(stretch(torch.zeros(1, 300, requires_grad=True)))).sum().backward()
    except BadInputError as error:
        return error.message


def joined(rank, folder, size):
    rank_info, publish_address = ranks.rank_info_in(folder, rank, size)
    return join_group(rank_info, load_framework("pytorch"), publish_address)
