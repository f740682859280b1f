"""What it costs to feed K trainers with images, shared or not, beside a PyTorch DataLoader for each.

Trainers are processes that take batches as fast as they come. Every way has the same JPEG files, the same
random part and the same number of preprocessors for each trainer.

    python tests/benchmarks/sharing_bench.py
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tables import Figure, Table

from hetctl.core.run import CACHED, LOCKSTEP, NONE
from hetctl.images import ImageFolder, in_turn, random_crop_and_flip, scale
from hetctl.runtime.feeds import Lockstep
from hetctl.runtime.pipeline import Sharing, open_pipeline
from hetctl.runtime.sharing.node_folder import node_folder
from hetctl.runtime.sources import as_source
from hetctl.runtime.stream import Stream

FILES, PIXELS, CROP, BATCH = 2000, 256, 224, 32
EPOCHS, ROUNDS, TRAINERS = 3, 3, (1, 2, 4)
LOADER = "DataLoader"


@dataclass(frozen=True)
class Fed:
    """What feeding all trainers came to: samples/s of all together, and the CPU time of preprocessing."""

    rate: float
    cpu_s: float


def images(folder: Path) -> ImageFolder:
    """Return the training samples."""
    return ImageFolder(folder, size=PIXELS, augment=in_turn(random_crop_and_flip(CROP), scale))


def make_files(folder: Path, files: int = FILES) -> None:
    """Write noise that is smooth enough to be a photograph to a decoder."""
    rng = np.random.default_rng(0)
    for number in range(files):
        target = folder / f"class-{number % 4}"
        target.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8))
        coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC).save(target / f"{number}.jpg", quality=90)


def by_hetctl(mode: str) -> Callable[[Path, int, int], None]:
    """Return a trainer that is fed in that way of sharing."""

    def train(folder: Path, seed: int, trainers: int) -> None:
        source = as_source(images(folder), "training")
        together = Lockstep(f"{trainers}.ring", 0, BATCH, BATCH, seed, trainers) if mode == LOCKSTEP else None
        with ExitStack() as stack:
            open_feed = open_pipeline(source, Sharing(mode, f"bench-{os.getppid()}"), stack)
            feed = open_feed(Stream(len(source), BATCH, seed), lockstep=together)
            stack.callback(feed.close)
            for epoch in range(1, EPOCHS + 1):
                for (x, _), _ in feed.batches(epoch, 0):
                    x[:, ::64].max()

    return train


def by_loader(folder: Path, seed: int, _trainers: int) -> None:
    """Train on a DataLoader of PyTorch's, with one worker."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        def __init__(self):
            self.images = images(folder)

        def __len__(self):
            return len(self.images)

        def __getitem__(self, number):
            x = self.images.prepare(self.images.folder / self.images.files[number])
            return self.images.augment(x, np.random.default_rng()), self.images.labels[number]

    torch.manual_seed(seed)
    for _ in range(EPOCHS):
        for x, _ in DataLoader(Files(), BATCH, shuffle=True, num_workers=1):
            x[:, ::64].max()


WAYS = {**{mode: by_hetctl(mode) for mode in (NONE, CACHED, LOCKSTEP)}, LOADER: by_loader}


def feed(way: str, folder: Path, trainers: int) -> Fed:
    """Feed so many trainers at once, `EPOCHS` epochs each."""
    context = get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_train, args=(way, folder, seed, trainers, results))
        for seed in range(trainers)
    ]
    began = time.perf_counter()
    with node_folder(f"bench-{os.getpid()}"):
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert not any(process.exitcode for process in processes), way
    seconds = time.perf_counter() - began
    return Fed(trainers * EPOCHS * FILES / seconds, sum(results.get() for _ in processes))


def _train(way: str, folder: Path, seed: int, trainers: int, results: Any) -> None:
    """Train; tell the CPU time of the trainer's children, which are its preprocessors."""
    WAYS[way](folder, seed, trainers)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    results.put(used.ru_utime + used.ru_stime)


def measured() -> dict[tuple[str, int], Fed]:
    """Return the medians of some rounds; each round has every way and number of trainers in turn."""
    found: dict[tuple[str, int], list[Fed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        feed(NONE, Path(folder), 1)  # files come from the page cache from now on
        for _ in range(ROUNDS):
            for way in WAYS:
                for trainers in TRAINERS:
                    found.setdefault((way, trainers), []).append(feed(way, Path(folder), trainers))
    return {
        key: Fed(statistics.median(f.rate for f in many), statistics.median(f.cpu_s for f in many))
        for key, many in found.items()
    }


def table() -> Table:
    """Set the medians out."""
    found = measured()
    rows = tuple(
        (
            way,
            *(f"{found[way, n].rate:,.0f}" for n in TRAINERS),
            *(f"{found[way, n].cpu_s:.1f}" for n in TRAINERS),
        )
        for way in WAYS
    )
    header = ("way", *(f"samples/s, {n}" for n in TRAINERS), *(f"CPU s, {n}" for n in TRAINERS))
    most = TRAINERS[-1]
    figures = (
        *(
            Figure(f"CPU time of {most} trainers over that of one, {way}", _cpu_ratio(found, way), 1.10)
            for way in (CACHED, LOCKSTEP)
        ),
        *(
            Figure(
                f"{alone} over {shared}, samples/s, {most} trainers",
                found[alone, most].rate / found[shared, most].rate,
                1 / 3,
            )
            for alone in (NONE, LOADER)
            for shared in (CACHED, LOCKSTEP)
        ),
    )
    note = f"{FILES} JPEG files of {PIXELS} pixels, {EPOCHS} epochs; {os.cpu_count()} cores; {ROUNDS} rounds."
    return Table("Feeding several trainers", header, rows, figures, note)


def _cpu_ratio(found: dict[tuple[str, int], Fed], way: str) -> float:
    return found[way, TRAINERS[-1]].cpu_s / found[way, 1].cpu_s


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table()
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
