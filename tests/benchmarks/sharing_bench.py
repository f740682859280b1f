"""Cost of feeding K trainers with images, shared or not, and with a PyTorch DataLoader for each.

Trainers are processes that take batches as fast as they come. Every way has the same JPEG files, the same
random part and a preprocessor for each core, but one for each trainer at least; in lockstep, where one
serves all, no more than there are cores.

    python tests/benchmarks/sharing_bench.py
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensor_socket
from tables import Figure, Table
from trainers import BATCH, at_once, children_s, fed, images, jpeg_files

from hetctl.images import Array, decode_and_crop
from hetctl.model.run import CACHED, LOCKSTEP, NONE
from hetctl.runtime.data.sources import as_source

FILES, PIXELS, CROP = 2000, 256, 224
CORES = len(os.sched_getaffinity(0))
ROUNDS, TRAINERS = 3, (1, 2, 4)
LOADER, SOCKET = "DataLoader", "TensorSocket"
EPOCHS = {NONE: 2, CACHED: 6, LOCKSTEP: 6, LOADER: 1}
"""What is done once counts as little as in training if it is spread over several: FLEET has 12 to 16."""

Feeder = Callable[["Setting", int, int], Iterator[Any]]
"""Yields the inputs of the batches of one among so many trainers, until it has had enough."""


@dataclass(frozen=True)
class Fed:
    """Samples/s of all trainers together, and what feeding them took.

    Parameters
    ----------
    cpu_s : float
        CPU time of all preprocessors.
    decoded : float
        Images that they decoded.
    decoding_s : float
        CPU time of decoding alone.
    """

    rate: float
    cpu_s: float
    decoded: float
    decoding_s: float


@dataclass(frozen=True)
class Setting:
    """The files, and a log to which whoever decodes one adds the CPU time that it took."""

    folder: Path
    log: Path

    def decode(self, path: Path) -> Array:
        began = time.thread_time()
        image = decode_and_crop(PIXELS)(path)
        with self.log.open("ab") as log:
            log.write(np.float64(time.thread_time() - began).tobytes())
        return image


class Files:
    """The samples as a DataLoader takes them."""

    def __init__(self, setting: Setting) -> None:
        self._images = images(setting.folder, PIXELS, CROP, setting.decode)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Array, int]:
        chosen = self._images
        x = chosen.prepare(chosen.folder / chosen.files[number])
        return chosen.augment(x, np.random.default_rng()), chosen.labels[number]


def preprocessors(mode: str, number: int, trainers: int) -> int:
    """Return how many a trainer has at work."""
    total = CORES if mode == LOCKSTEP else max(CORES, trainers)
    return total // trainers + (number < total % trainers)


def loader(setting: Setting, workers: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    # More workers than cores are wanted here.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    torch.set_num_threads(1)
    return DataLoader(Files(setting), BATCH, shuffle=True, num_workers=workers, persistent_workers=True)


def by_hetctl(mode: str, setting: Setting, number: int, trainers: int) -> Iterator[Any]:
    source = as_source(images(setting.folder, PIXELS, CROP, setting.decode), "training")
    with fed(source, mode, number, trainers, preprocessors(mode, number, trainers)) as feed:
        for epoch in range(1, EPOCHS[mode] + 1):
            for (x, _), _ in feed.batches(epoch, 0):
                yield x


def by_loader(setting: Setting, number: int, trainers: int) -> Iterator[Any]:
    batches = loader(setting, preprocessors(LOADER, number, trainers))
    for _ in range(EPOCHS[LOADER]):
        for x, _ in batches:
            yield x


def by_socket(setting: Setting, number: int, _trainers: int) -> Iterator[Any]:
    with tensor_socket.produced(partial(loader, setting, CORES), number == 0):
        yield from tensor_socket.consumed(BATCH)


WAYS: dict[str, Feeder] = {
    **{mode: partial(by_hetctl, mode) for mode in (NONE, CACHED, LOCKSTEP)},
    LOADER: by_loader,
}


def feed(way: Feeder, folder: Path, trainers: int) -> Fed:
    """Feed so many trainers at once."""
    setting = Setting(folder, folder / "decoded")
    setting.log.unlink(missing_ok=True)

    def train(number: int) -> tuple[int, float, float, float]:
        samples, began = 0, 0.0
        for x in way(setting, number, trainers):
            x[:, ::64].max()
            samples += len(x) if began else 0
            began = began or time.perf_counter()
        return samples, began, time.perf_counter(), children_s()

    samples, began, ended, cpu_s = zip(*at_once(trainers, train), strict=True)
    rate = sum(samples) / (max(ended) - min(began))
    decodings_s = np.fromfile(setting.log)
    return Fed(rate, sum(cpu_s), len(decodings_s), float(decodings_s.sum()))


def measured(rounds: int = ROUNDS) -> dict[tuple[str, int], Fed]:
    """Return the medians of some rounds; each round has every way and number of trainers in turn."""
    found: dict[tuple[str, int], list[Fed]] = {}
    with jpeg_files(FILES, PIXELS) as folder:
        # These do not count: files come from the page cache and PyTorch is there from now on.
        feed(WAYS[LOCKSTEP], folder, 1)
        loader(Setting(folder, folder / "decoded"), 1)
        for _ in range(rounds):
            for way, feeder in WAYS.items():
                for trainers in TRAINERS:
                    found.setdefault((way, trainers), []).append(feed(feeder, folder, trainers))
        if tensor_socket.installed():
            for trainers in TRAINERS:
                found[SOCKET, trainers] = [feed(by_socket, folder, trainers)]
    return {
        key: Fed(*(statistics.median(getattr(f, name) for f in many) for name in Fed.__annotations__))
        for key, many in found.items()
    }


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    rounds = 1 if quick else ROUNDS
    found = measured(rounds)
    columns = (("samples/s", "rate", ",.0f"), ("CPU s", "cpu_s", ".1f"), ("decoded", "decoded", ",.0f"))
    header = ("method", *(f"{what}, {n}" for what, _, _ in columns for n in TRAINERS))
    rows = [
        (way, *(format(getattr(found[way, n], name), form) for _, name, form in columns for n in TRAINERS))
        for way in WAYS
    ]
    sent = [f"{found[SOCKET, n].rate:,.0f}" if (SOCKET, n) in found else "" for n in TRAINERS]
    rows.append((SOCKET, *sent, *[""] * 2 * len(TRAINERS)))
    epochs = ", ".join(f"{count} of `{way}`" for way, count in EPOCHS.items())
    socket = f"ran for {tensor_socket.SECONDS:g} s" if (SOCKET, 1) in found else "is not installed"
    note = (
        f"{FILES} JPEG files of {PIXELS} pixels, {', '.join(map(str, TRAINERS))} trainers, "
        f"{CORES} cores, epochs: {epochs}; medians of {rounds} rounds. CPU time is that of the "
        f"preprocessors, random part included. {SOCKET} {socket}."
    )
    return Table("Feeding several trainers", header, tuple(rows), figures(found), note)


def figures(found: dict[tuple[str, int], Fed]) -> tuple[Figure, ...]:
    """Hold the largest number of trainers against one, and against not sharing."""
    most = TRAINERS[-1]
    times = (
        ("CPU time", "cpu_s", CACHED),
        ("CPU time", "cpu_s", LOCKSTEP),
        ("CPU time of decoding", "decoding_s", CACHED),
        ("CPU time of decoding", "decoding_s", LOCKSTEP),
        ("images decoded", "decoded", CACHED),
        ("images decoded", "decoded", LOCKSTEP),
    )
    over_one = (
        Figure(
            f"{what} for {most} trainers over one, {way}",
            getattr(found[way, most], name) / getattr(found[way, 1], name),
            1.10,
        )
        for what, name, way in times
    )
    over_shared = (
        Figure(
            f"{alone} over {shared}, samples/s, {most} trainers",
            found[alone, most].rate / found[shared, most].rate,
            1 / 3,
        )
        for alone in (NONE, LOADER)
        for shared in (CACHED, LOCKSTEP)
    )
    return *over_one, *over_shared


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
