"""Trainers on this machine that are fed as those of a flotilla are, and do not train."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hetctl.images import ImageFolder, Prepare, in_turn, random_crop_and_flip, scale
from hetctl.model.run import LOCKSTEP
from hetctl.runtime.data.input_pipeline import Sharing, open_pipeline
from hetctl.runtime.data.loaders import Loader, Lockstep
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sharing.node_folder import node_folder
from hetctl.runtime.data.sources import SampleSource

BATCH = 32


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return ``work(number)`` of so many processes that run at once, in any order."""
    context = get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=lambda number: results.put(work(number)), args=(number,))
        for number in range(count)
    ]
    with node_folder(_folder_of(os.getpid())):
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert not any(process.exitcode for process in processes)
    return [results.get() for _ in processes]


@contextmanager
def fed(
    source: SampleSource, mode: str, number: int, trainers: int, preprocessors: int = 1
) -> Iterator[Loader]:
    """Feed one of the processes that `at_once` runs, with so many preprocessors of its own at work."""
    together = Lockstep(f"{trainers}.ring", 0, BATCH, BATCH, number, trainers) if mode == LOCKSTEP else None
    with ExitStack() as stack:
        open_loader = open_pipeline(
            source, Sharing(mode, _folder_of(os.getppid()), max(1, preprocessors)), stack
        )
        loader = open_loader(Stream(len(source), BATCH, number), preprocessors, together)
        stack.callback(loader.close)
        yield loader


def children_s() -> float:
    """Return the CPU time of this process' children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def jpeg_files(files: int, pixels: int) -> Iterator[Path]:
    """Write noise that is smooth enough to be a photograph to a decoder."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(files):
            folder = Path(name, f"class-{number % 4}")
            folder.mkdir(exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (pixels // 8, pixels // 8, 3), np.uint8))
            fine = coarse.resize((pixels, pixels), Image.Resampling.BICUBIC)
            fine.save(folder / f"{number}.jpg", quality=90)
        yield Path(name)


def images(folder: Path, pixels: int, crop: int, prepare: Prepare | None = None) -> ImageFolder:
    """Return the training samples."""
    return ImageFolder(folder, pixels, prepare, in_turn(random_crop_and_flip(crop), scale))


def _folder_of(process: int) -> str:
    return f"bench-{process}"
