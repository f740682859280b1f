"""A small ResNet in PyTorch's DistributedDataParallel, after its ImageNet example, on generated images.

A checkpoint counts samples, not steps, so that any number of ranks goes on after the same sample.
"""

import argparse
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import hetctl
from hetctl.adapters.checkpoint_place import checkpoint_folder
from hetctl.adapters.ddp import StopVote

CLASSES, SAMPLES, VALIDATION = 4, 512, 128
FILE = checkpoint_folder() / "resnet.pt"


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3, whose output is added to their input."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.way = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images):
        """Return the features of images."""
        return torch.relu(self.body(images) + self.way(images))


def resnet(width, blocks):
    """Return a residual network for images of 3 x 16 x 16."""
    widths = [3, *(width * 2**block for block in range(blocks))]
    body = [ResidualBlock(*pair, stride=2) for pair in pairwise(widths)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def images_of(seed, samples):
    """Return images, each with a pattern of its class under noise, and their labels."""
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=source)
    return patterns[labels] + 2 * torch.randn(samples, 3, 16, 16, generator=source), labels


def evaluate(network, rank, size, device):
    """Return loss and accuracy on all validation images, of which each rank takes its share."""
    images, labels = (part[rank::size].to(device) for part in images_of(2, VALIDATION))
    network.eval()
    with torch.no_grad():
        outputs = network(images)
    network.train()
    loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
    sums = torch.stack([loss, (outputs.argmax(1) == labels).sum()])
    dist.all_reduce(sums)
    return dict(zip(("val_loss", "val_accuracy"), (sums / VALIDATION).tolist(), strict=True))


def save(network, optimizer, epoch, done, metrics):
    """Write a checkpoint, under another name until it is whole."""
    state = {"network": network.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epoch": epoch, "done": done, "metrics": metrics}, FILE.with_suffix(".new"))
    FILE.with_suffix(".new").replace(FILE)


def main():
    """Train to the last epoch, or until hetctl says stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    train(options, torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"))
    # Once the network is gone: if that is the last to let go of the group, PyTorch may wait for itself.
    dist.destroy_process_group()


def train(options, device):
    """Train from the checkpoint, if there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seed = int(os.environ.get("HETCTL_SEED", "0"))
    torch.manual_seed(seed)
    plain = resnet(options.width, options.blocks).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=options.learning_rate, momentum=0.9)
    epoch, done, metrics = 1, 0, {}
    if FILE.exists():
        saved = torch.load(FILE, map_location=device, weights_only=True)
        plain.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, done, metrics = saved["epoch"], saved["done"], saved["metrics"]
        if metrics and rank == 0:
            hetctl.report(epoch=epoch - 1, samples=SAMPLES, **metrics)
    network = nn.parallel.DistributedDataParallel(plain)
    images, labels = (part.to(device) for part in images_of(1, SAMPLES))
    stop_requested = StopVote()
    if rank == 0:
        print(f"start at sample {done} of epoch {epoch} on {size} ranks", flush=True)

    while epoch <= options.epochs:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch))
        while done < SAMPLES:
            own = order[done : done + options.batch_size][rank::size].to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[own]), labels[own]).backward()
            optimizer.step()
            done += options.batch_size
            if stop_requested():
                if rank == 0:
                    save(network, optimizer, epoch, done, metrics)
                return
        metrics = evaluate(network, rank, size, device)
        epoch, done = epoch + 1, 0
        if rank == 0:
            save(network, optimizer, epoch, done, metrics)
            hetctl.report(epoch=epoch - 1, samples=SAMPLES, **metrics)


if __name__ == "__main__":
    main()
