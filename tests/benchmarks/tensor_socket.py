"""TensorSocket, where it is installed: one DataLoader for all trainers, batches sent through sockets.

Tensors that are in the CPU's memory are sent as bytes; TensorSocket hands only those of a GPU on in place.
"""

from __future__ import annotations

import importlib.util
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any

SECONDS = 8.0
"""How long a trainer takes batches: TensorSocket's epochs are not of equal length."""
TOGETHER = 2
"""Batches that are sent at once: fewer fail, more are sent several times over from the CPU's memory."""


def installed() -> bool:
    return importlib.util.find_spec("tensorsocket") is not None


@contextmanager
def produced(loader: Callable[[], Any], here: bool) -> Iterator[None]:
    """Let one of the trainers have the process that serves all."""
    if not here:
        yield
        return
    process = get_context("fork").Process(target=_produce, args=(loader,))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def consumed(batch: int) -> Iterator[Any]:
    """Yield the inputs of batches for `SECONDS` from the first one on, even if no other one comes."""
    _quiet()
    from tensorsocket import TensorConsumer

    consumer = TensorConsumer(batch_size=batch)
    signal.signal(signal.SIGALRM, _enough)
    began = False
    with suppress(TimeoutError):
        while True:
            for x, _ in consumer:
                if not began:
                    signal.setitimer(signal.ITIMER_REAL, SECONDS)
                    began = True
                yield x


def _produce(loader: Callable[[], Any]) -> None:
    _quiet()
    from tensorsocket import TensorProducer
    from tensorsocket.producer import pack

    def pack_copies(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        # A part of a tensor would be sent with the whole of it.
        return pack(tuple(tensor.clone() for tensor in tensors))

    producer = TensorProducer(loader(), producer_batch_size=TOGETHER, pack_fn=pack_copies)
    while True:
        for _ in producer:
            pass


def _quiet() -> None:
    """Be there before TensorSocket, which logs everything of everybody."""
    logging.basicConfig(level=logging.WARNING)


def _enough(*_: Any) -> None:
    raise TimeoutError
