"""Ranks that members visit: real processes that share nothing but the store of their node, and files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
from ensembles.handwriting import digits
from tiny_networks import ENSEMBLES, MODULES

from hetctl.model.ensemble import Ensemble, Functions, Partitions
from hetctl.model.plan import HOPPER, Allocation, Placement
from hetctl.model.serialization import decode, encode
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data import state_file
from hetctl.runtime.data.sharing.node_folder import state_folder
from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.context import InputShare
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import (
    VISIT,
    Assignment,
    StateSaved,
    StopMessage,
    TaskMessage,
    TrainingSpec,
    VisitReport,
    VisitSpec,
)

PATIENCE_S = 120.0
NODE, RUN = "n1", "r"
PARTS = ((150, 40), (170, 60), (140, 30), (180, 70))
"""Training and validation samples of each partition: the last batches of none are full."""

RANK = """
import json, socket, sys
from pathlib import Path
from hetctl.model.serialization import decode
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.worker import context
from hetctl.runtime.worker.worker import serve
memory, binding, channel, networks_bytes = json.loads(sys.argv[1])
node_folder.MEMORY = Path(memory)
context.NETWORKS_BYTES = networks_bytes
sys.exit(serve(decode(Binding, binding), socket.socket(fileno=channel)))
"""

ALONE = """
import json, os, sys
import numpy as np
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.serialization import decode
from hetctl.partitions import read
from hetctl.runtime.data.batches import Batches, held_out_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import SingleRank
from hetctl.runtime.worker.user_functions import load_functions
ensemble, member, parts, visits, out = json.loads(sys.argv[1])
ensemble, member = decode(Ensemble, ensemble), decode(Member, member)
os.sched_setaffinity(0, (0,))
framework, functions = load_framework(ensemble.framework), load_functions(ensemble)
loaded = [read(part) for part in parts]
def loader(pair, seed):
    source = ArraySource(*pair, "part")
    return ArrayLoader(source, Stream(len(source), member.batch_size, seed))
training = [loader(pair, member.seed) for pair, _ in loaded]
held_out = [loader(pair, UNSHUFFLED) for _, pair in loaded]
framework.prepare((0,), None, member.seed)
network = framework.build(member, functions, SingleRank(), training[0].sample)
done, metrics = 0, []
for epoch, number, evaluates in visits:
    if evaluates:
        network.evaluate(held_out_batches(held_out[number], epoch, lambda: None))
        continue
    done += 1
    last = done % len(parts) == 0
    network.train(Batches(training[number], epoch, 0, SingleRank(), lambda: False, is_last=last))
    if last:
        every = tuple(np.concatenate([pair[part] for _, pair in loaded]) for part in (0, 1))
        metrics.append(network.evaluate(held_out_batches(loader(every, UNSHUFFLED), epoch, lambda: None)))
np.savez(out, **network.save())
json.dump(metrics, open(out + ".json", "w"))
"""


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

    def assignment(self, member, visit, *, gpu=0, deadline_s=3600.0):
        place = Placement(NODE, (gpu,))
        training = TrainingSpec(
            run=RUN,
            round=0,
            ensemble=replace(self.ensemble, members=(member,)),
            allocation=Allocation(member.name, 1, HOPPER, 100.0, (place,)),
            checkpoints=str(self.checkpoints(member)),
            deadline=time.time() + deadline_s,
            shares=(InputShare(),),
            visit=visit,
        )
        task = TaskMessage(VISIT, str(self.folder / "run"), member.name, training)
        return Assignment(task, RankInfo(0, 1, f"key-{next(self._keys)}"), time.time())


class VisitedRank:
    """A rank in a process of its own, and what it has sent."""

    def __init__(self, visits, gpu, networks_bytes=2**30):
        self.visits, self.gpu = visits, gpu
        ours, theirs = socket.socketpair()
        binding = Binding(NODE, gpu, None, (0,))
        memory = str(visits.folder / "memory")
        arguments = json.dumps([memory, encode(binding), theirs.fileno(), networks_bytes])
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, arguments], pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._connection = Connection(ours)
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
        assignment = self.visits.assignment(member, visit, gpu=self.gpu, **how)
        self._key = assignment.place.key
        self._connection.send({"task": encode(assignment)})

    def stop(self):
        """Tell the visit at work to stop."""
        self._connection.send({"stop": encode(StopMessage(self._key, "test"))})

    def finish(self):
        """Wait for the end of a visit; return its report, None if it was stopped."""
        before = len(self.messages)
        self.wait_for("done")
        reports = [message["visited"] for message in self.messages[before:] if "visited" in message]
        return decode(VisitReport, reports[0]) if reports else None

    def visit(self, member, visit, **how):
        self.start(member, visit, **how)
        return self.finish()

    def wait_for(self, key):
        """Wait for a message with a key; return it."""
        while True:
            message = self._arrived.get(timeout=PATIENCE_S)
            assert message is not None, f"the rank has ended with {self.process.wait()}"
            self.messages.append(message)
            if key in message:
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
        self._connection.close()
        return self.process.wait(PATIENCE_S)

    def _listen(self):
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._arrived.put(self._connection.receive())
        self._arrived.put(None)


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

    `order` has epoch, partition and `evaluates` of each visit; the metrics are those of all validation
    samples at once.
    """
    parts = [ensemble.partitions.path.replace("{partition}", str(number)) for number in range(len(PARTS))]
    out = str(folder / f"{member.name}-alone.npz")
    arguments = json.dumps([encode(ensemble), encode(member), parts, order, out])
    done = subprocess.run([sys.executable, "-c", ALONE, arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(out) as arrays:
        return digest(dict(arrays)), json.loads(Path(out + ".json").read_text())


def hops(member, orders, first=0, step=1):
    """Yield the visits of a member; `orders` has the partitions of each pass: training, evaluation, .."""
    state = None
    number = first
    for index, order in enumerate(orders):
        for partition in order:
            yield VisitSpec(number, index // 2 + 1, partition, bool(index % 2), state)
            state = f"{member.name}-{number}"
            number += step


def order_of(visits):
    return [astuple(visit)[1:4] for visit in visits]
