"""ASP and SSP, with which LB-BSP is compared: a parameter server and its workers, a process each.

    python parameter_server.py RUNS.json

Each worker takes the weights, computes the gradient of its own next batch and sends it, over and over. The
server applies every gradient alone, as soon as it comes. With a bound (SSP), a worker that is so many
iterations ahead of the slowest one waits.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paced_digits import PER_SAMPLE_S, TRAINING, input_fn
from paced_torch import Config, Log, model_fn, paced_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WORKERS = len(PER_SAMPLE_S)


@dataclass(frozen=True)
class Run:
    """A run until the validation loss is at the target, or the time is over.

    Parameters
    ----------
    bound : int or None
        Iterations by which a worker may be ahead of the slowest one; None for no bound.
    batch : int
        Samples of each worker.
    """

    config: Config
    bound: int | None
    batch: int
    target: float
    limit_s: float


def serve(run: Run) -> None:
    """Train, and write the log that the config names."""
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(WORKERS)]
    workers = [
        context.Process(target=_work, args=(far, number, run)) for number, (_, far) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    connections = [near for near, _ in pipes]
    for connection in connections:
        connection.recv()
    _coordinate(run, connections)
    for connection in connections:
        connection.send(None)
    for worker in workers:
        worker.join()


def _coordinate(run: Run, connections: list[Connection]) -> None:
    """Apply gradients as they come, and send weights to the workers that may go on."""
    parts = model_fn(run.config)
    model, optimizer = parts["model"], parts["optimizer"]
    iterations, waiting = [0] * WORKERS, set(range(WORKERS))
    log, loss = Log(run.config["out"]), math.inf
    deadline = time.monotonic() + run.limit_s
    while loss > run.target and time.monotonic() < deadline:
        for worker in sorted(waiting):
            if run.bound is None or iterations[worker] - min(iterations) < run.bound:
                connections[worker].send(_weights(model))
                waiting.remove(worker)
        for ready in wait(connections):
            _set_gradient(model, ready.recv())
            optimizer.step()
            loss = log.note(model)
            worker = connections.index(ready)
            iterations[worker] += 1
            waiting.add(worker)
    log.write()


def _work(server: Connection, number: int, run: Run) -> None:
    """Send a gradient for each weights that come; end when none come any more."""
    model = model_fn(run.config)["model"]
    x, y = (torch.as_tensor(values) for values in input_fn(None)[0])
    batches = _batches(run.config["seed"] * WORKERS + number, run.batch)
    server.send("ready")
    while (weights := server.recv()) is not None:
        vector_to_parameters(torch.as_tensor(weights), model.parameters())
        numbers = next(batches)
        loss = paced_loss(model, x[numbers], y[numbers], number)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        server.send(parameters_to_vector(gradients).numpy())


def _batches(seed: int, size: int) -> Iterator[Any]:
    """Yield the numbers of samples, each pass over the data in another order."""
    rng, left = np.random.default_rng(seed), np.empty(0, dtype=int)
    while True:
        if len(left) < size:
            left = np.concatenate([left, rng.permutation(TRAINING)])
        yield left[:size]
        left = left[size:]


def _weights(model: Any) -> Any:
    with torch.no_grad():
        return parameters_to_vector(model.parameters()).numpy()


def _set_gradient(model: Any, gradient: Any) -> None:
    rest = torch.as_tensor(gradient)
    for parameter in model.parameters():
        parameter.grad = rest[: parameter.numel()].view_as(parameter)
        rest = rest[parameter.numel() :]


def main(path: str) -> None:
    """Run what the file lists, one after another."""
    torch.set_num_threads(1)
    runs = [Run(**run) for run in json.loads(Path(path).read_text(encoding="utf-8"))]
    # The first optimizer imports much, which forked workers then have.
    model_fn(runs[0].config)
    for run in runs:
        serve(run)


if __name__ == "__main__":
    main(sys.argv[1])
