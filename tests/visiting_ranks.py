"""Ranks that members visit: real processes that share nothing but the store of their node, and files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from ensembles.handwriting import digits
from ranks import fork
from tiny_networks import ENSEMBLES, MODULES

from hetctl.model.ensemble import Ensemble, Functions, Partitions
from hetctl.model.hops import StateSaved, Visit, VisitEnd
from hetctl.model.plan import HOPPER, Allocation, Placement
from hetctl.model.serialization import decode, encode
from hetctl.partitions import read
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data import state_file
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.data.sharing.node_folder import state_folder
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.transport import Address, Connection
from hetctl.runtime.worker import hop_resources
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.group import Group, RankInfo
from hetctl.runtime.worker.messages import (
    VISIT,
    Assignment,
    TaskMessage,
    TrainingSpec,
)
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.runtime.worker.worker import serve

PATIENCE_S = 120.0
NODE, RUN = "n1", "r"
PARTS = ((150, 40), (170, 60), (140, 30), (180, 70))
"""Training and validation samples of each partition: the last batches of none are full."""


def serve_visits(memory, binding, channel, networks_bytes):
    """Be a rank whose store of states is in a folder; return the exit code."""
    node_folder.MEMORY = memory
    hop_resources.NETWORKS_BYTES = networks_bytes
    return serve(binding, channel)


def serve_without_saving(memory, binding, channel, networks_bytes):
    """Be such a rank whose checkpoints cannot be written, however long it tries."""

    def no_answer(*_):
        raise OSError(errno.EIO, "Input/output error")

    CheckpointFolder.save = no_answer
    return serve_visits(memory, binding, channel, networks_bytes)


def loader_of(pair, member, seed, gpus=1):
    source = ArraySource(*pair, "part")
    return ArrayLoader(source, Stream(len(source), member.batch_size * gpus, seed))


def follow(ensemble, member, parts, visits, out):
    """Train a member by visits on partitions of this process; write its state, and metrics of each epoch."""
    os.sched_setaffinity(0, (0,))
    framework, functions = load_framework(ensemble.framework), load_functions(ensemble)
    loaded = [read(part) for part in parts]
    held_out = [loader_of(pair, member, UNSHUFFLED) for _, pair in loaded]
    every = tuple(np.concatenate([pair[part] for _, pair in loaded]) for part in (0, 1))
    whole = loader_of(every, member, UNSHUFFLED)
    framework.prepare((0,), None, member.seed)
    network = framework.build(member, functions, Group(), held_out[0].sample)
    done, scale, metrics = 0, 1, []
    for epoch, number, evaluates, gpus in visits:
        network.scale_learning_rate(gpus / scale)
        scale = gpus
        if evaluates:
            network.evaluate(validation_batches(held_out[number], epoch, lambda: None))
            continue
        done += 1
        last = done % len(parts) == 0
        training = loader_of(loaded[number][0], member, member.seed, gpus)
        network.train(Batches(training, epoch, 0, Group(), lambda: False, is_last=last))
        if last:
            metrics.append(network.evaluate(validation_batches(whole, epoch, lambda: None)))
    np.savez(out, **network.save())
    Path(f"{out}.json").write_text(json.dumps(metrics))


def write_parts(folder):
    """Write partitions of digits; return their path with the number to be filled in."""
    x, y = digits()
    start = 0
    for number, (samples, validation) in enumerate(PARTS):
        middle, end = start + samples, start + samples + validation
        np.savez(
            folder / f"{number}.npz",
            x=x[start:middle],
            y=y[start:middle],
            x_validation=x[middle:end],
            y_validation=y[middle:end],
        )
        start = end
    return str(folder / "{partition}.npz")


def ensemble_of(framework, path, train_fn=None):
    """Return the ensemble, without members."""
    module = MODULES[framework]
    functions = Functions(
        "handwriting:staged_input_fn", f"{module}:model_fn", train_fn and f"{module}:{train_fn}"
    )
    return Ensemble("e", framework, functions, (), str(ENSEMBLES), partitions=Partitions(len(PARTS), path))


class Visits:
    """Tasks of visits to one node, as a driver would make them."""

    def __init__(self, folder, ensemble):
        self.folder, self.ensemble = folder, ensemble
        self._keys = itertools.count()
        for name in ("memory", "run/events", "run/logs"):
            (folder / name).mkdir(parents=True)

    def checkpoints(self, member):
        return self.folder / "checkpoints" / member.name

    def assignment(self, member, visit, *, gpus=(0,), info=None, deadline_s=3600.0):
        place = Placement(NODE, gpus)
        training = TrainingSpec(
            run=RUN,
            run_key=RUN,
            round=0,
            ensemble=replace(self.ensemble, members=(member,)),
            allocation=Allocation(member.name, len(gpus), HOPPER, 100.0, (place,)),
            checkpoints=str(self.checkpoints(member)),
            deadline=time.time() + deadline_s,
            shares=(InputShare(),),
            visit=replace(visit, config=member.name),
        )
        task = TaskMessage(VISIT, str(self.folder / "run"), member.name, training)
        return Assignment(task, info or RankInfo(0, 1, self.key()), time.time())

    def key(self):
        """Return the key of a new group."""
        return f"key-{next(self._keys)}"


class VisitedRank:
    """A rank in a process of its own, and what it has sent."""

    def __init__(self, visits, gpu, networks_bytes=2**30, serving=serve_visits):
        self.visits, self.gpu = visits, gpu
        ours, theirs = socket.socketpair()
        binding = Binding(NODE, gpu, None, (0,))
        with theirs:
            self.process = fork(serving, visits.folder / "memory", binding, theirs, networks_bytes)
        self._end, self._connection = ours, Connection(ours)
        self._arrived = queue.SimpleQueue()
        self.messages = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait_for("ready")

    @property
    def store(self):
        """The folder of states; only while a rank that uses it runs."""
        (folder,) = (self.visits.folder / "memory").glob(f"*/{state_folder(RUN, NODE)}")
        return folder

    def start(self, member, visit, **how):
        """Assign a visit."""
        assignment = self.visits.assignment(member, visit, **{"gpus": (self.gpu,), **how})
        self._key = assignment.rank_info.key
        self._connection.send({"task": encode(assignment)})

    def stop(self):
        """Tell the visit at work to stop."""
        self._connection.send({"stop": self._key, "reason": "test"})

    def finish(self):
        """Wait for the end of a visit; return its report, None if it was stopped."""
        before = len(self.messages)
        self.wait_for("done")
        reports = [message["visited"] for message in self.messages[before:] if "visited" in message]
        return decode(VisitEnd, reports[0]) if reports else None

    def visit(self, member, visit, **how):
        self.start(member, visit, **how)
        return self.finish()

    def wait_for(self, key):
        """Wait for a message with a key; return it."""
        return self._wait_for(lambda message: key in message)

    def sign(self):
        """Wait for a heartbeat."""
        self._wait_for(lambda message: not message)

    def _wait_for(self, is_wanted):
        while True:
            message = self._arrived.get(timeout=PATIENCE_S)
            assert message is not None, f"the rank has ended with {self.end()}"
            self.messages.append(message)
            if is_wanted(message):
                return message

    def saved(self, number):
        """Wait until the state of a visit is in a checkpoint; return what the rank says of it."""
        while True:
            for message in self.messages:
                if message.get("saved", {}).get("number") == number:
                    return decode(StateSaved, message["saved"])
            self.wait_for("saved")

    def release(self):
        """End the rank as the end of its driver would; return its exit code."""
        # After close(2) alone the rank would see no end as long as the other thread waits in poll(2).
        self._end.shutdown(socket.SHUT_RDWR)
        return self.end()

    def end(self):
        """Wait for the end of the process; return its exit code."""
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def _listen(self):
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._arrived.put(self._connection.receive())
        self._arrived.put(None)


class VisitedGroup:
    """Ranks that make visits together."""

    def __init__(self, *ranks):
        self.ranks = ranks
        self._gpus = tuple(rank.gpu for rank in ranks)

    def start(self, member, visit):
        """Assign a visit: the others get it with the address at which rank 0 waits."""
        leader, *others = self.ranks
        info = RankInfo(0, len(self.ranks), leader.visits.key())
        leader.start(member, visit, gpus=self._gpus, info=info)
        address = decode(Address, leader.wait_for("master")["master"])
        for number, rank in enumerate(others, 1):
            rank.start(member, visit, gpus=self._gpus, info=replace(info, rank=number, master=address))

    def visit(self, member, visit):
        """Make a visit; return the report of rank 0, the only one."""
        self.start(member, visit)
        report, *others = [rank.finish() for rank in self.ranks]
        assert others == [None] * len(others)
        return report


def digest(arrays):
    """Return the SHA-256 of names, types, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha256.update(repr((name, array.dtype.str, array.shape)).encode() + array.tobytes())
    return sha256.hexdigest()


def digest_in(store, name):
    return digest(state_file.read(store, name)[0])


def train_alone(folder, ensemble, member, order):
    """Train in one process without files in between; return the digest, and metrics of each epoch.

    `order` has epoch, partition and `evaluates` of each visit, and its GPUs, of whose samples each step takes
    all; the metrics are those of all validation samples at once.
    """
    arrays, metrics = trained_alone(folder, ensemble, member, order)
    return digest(arrays), metrics


def trained_alone(folder, ensemble, member, order):
    """Return what `train_alone` does, but the arrays themselves."""
    parts = [ensemble.partitions.path.replace("{partition}", str(number)) for number in range(len(PARTS))]
    out = folder / f"{member.name}-alone.npz"
    process = fork(follow, ensemble, member, parts, order, out)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    with np.load(out) as arrays:
        return dict(arrays), json.loads(Path(f"{out}.json").read_text())


def visit_to(number, epoch, partition, evaluates, state=None):
    """Return a visit of whatever member, with its epoch from 1 and the number of the partition."""
    return Visit(number, "any", 2 * (epoch - 1) + evaluates, f"p{partition}", f"{NODE}:0", state)


def state_after(end):
    """Return the name of the state after a visit that has ended."""
    return f"{end.member}-{end.number}"


def hops(member, orders, first=0, step=1):
    """Yield the visits of a member; `orders` has the partitions of each pass: training, evaluation, .."""
    state = None
    number = first
    for index, order in enumerate(orders):
        for partition in order:
            yield visit_to(number, index // 2 + 1, partition, bool(index % 2), state)
            state = f"{member.name}-{number}"
            number += step


def order_of(visits, gpus=()):
    """Return epoch, partition, `evaluates` and number of GPUs, by default 1, of each visit."""
    counts = gpus or (1,) * len(visits)
    return [
        (v.training_epoch, v.partition_number, v.evaluates, count)
        for v, count in zip(visits, counts, strict=True)
    ]
