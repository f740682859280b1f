"""Leader of a node in lockstep: ``python -m hetctl.runtime.data.node_exchange LINEUPS --round N``.

Each node has one such process: it has the node's share of the samples prepared, and exchanges chunks with the
other leaders. MPI is used only here, so that the death of one trainer does not end the others.

A leader never blocks: it starts the operations that can start, tests which have completed, and sleeps. A
blocking broadcast would keep a core busy (FLEET, section 5).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.cluster.launchers.nodes import node_named
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.interpreter import skip_last_collections
from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.values import dataclass
from hetctl.perf.preprocessing import preprocessors_needed
from hetctl.runtime.agent.binding import hide_gpus
from hetctl.runtime.data.loaders import PreprocessorPool
from hetctl.runtime.data.preprocessors import Preprocessors
from hetctl.runtime.data.round_inputs import RoundInputs, nodes_of, read_round
from hetctl.runtime.data.sampler import Chunk, Stream
from hetctl.runtime.data.sharing.node_folder import folder_of, node_folder
from hetctl.runtime.data.sharing.ring import Bytes, Ring, RingTimeoutError
from hetctl.runtime.data.sharing.shared_file import announce
from hetctl.runtime.data.sources import WITHOUT_STORE, SampleSpec, as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.context import DATA_SEED
from hetctl.runtime.worker.user_functions import load_functions

# Measured: Ibcast with Test and a sleep of 0.5 ms feeds 3,010 to 3,160 images/s per group, a blocking
# Bcast, which spins on a core, 2,200.
PAUSE_S, IDLE_S = 0.0005, 0.005
"""Sleep of a leader in seconds, while broadcasts are in flight and while none is."""
CHECK_EVERY_S = 1.0
IN_FLIGHT = 10
"""Chunks in flight at a time, FLEET's third queue."""
RETRY_S = 0.005
"""Seconds between two attempts to claim a slot of a full ring."""

IBCAST = {"OMPI_MCA_coll_libnbc_ibcast_algorithm": "1"}
"""Setting of Open MPI to send chunks whole: each segment would wait for the leader's next poll."""


def main() -> int:
    """Serve the trainers of a round until all have left."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.data.node_exchange", description=__doc__)
    parser.add_argument("round_inputs", type=Path)
    parser.add_argument("--round", type=int, required=True)
    arguments = parser.parse_args()
    try:
        lead(read_round(arguments.round_inputs, arguments.round))
    except Exception:
        traceback.print_exc()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            # MPI_Abort ends this process at once: a traceback in the buffer would be lost.
            sys.stderr.flush()
            # The other leaders would wait for this one without end.
            mpi.COMM_WORLD.Abort(1)
        return 1
    return 0


def lead(inputs: RoundInputs) -> None:
    """Lead a node through a round; return at once for samples that are not shared."""
    if inputs.ensemble.reads_partitions:
        return
    # Only trainers use GPUs.
    hide_gpus()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    load_framework(inputs.ensemble.framework).prepare(cores, None, DATA_SEED)
    source, _ = as_sources(load_functions(inputs.ensemble).input_fn(inputs.ensemble.data))
    if isinstance(source, WITHOUT_STORE):
        return
    nodes = nodes_of(inputs.allocations)
    count = preprocessors_of_a_node(inputs.allocations, inputs.preprocess, inputs.cores)
    with ExitStack() as stack:
        preprocessors = Preprocessors(source, count)
        stack.callback(preprocessors.stop)
        # MPI may try to connect without end, and blocks all Python threads while it does.
        faulthandler.dump_traceback_later(inputs.timeouts.leaders_s, exit=True)
        world = _world(len(nodes))
        node = node_here(nodes, world.Get_rank())
        folder = stack.enter_context(node_folder(folder_of(inputs.run_key, node)))
        pool = PreprocessorPool(preprocessors, folder, timeouts=inputs.timeouts)
        lockstep, spec = inputs.lockstep_on(node), preprocessors.spec
        stream = Stream(len(source), lockstep.chunk, lockstep.seed)
        digests = (zlib.crc32(part.tobytes()) for part in preprocessors.sample)
        _check_that_all_have_the_same(world, (stream, spec, *digests))
        own = NodeStream(**vars(stream), node=world.Get_rank(), nodes=world.Get_size())
        pool.ring(lockstep.name, lockstep.readers, stream, lockstep.largest).close()
        exchange = Exchange(
            *(world, pool.own_ring(own), RingWriter(pool.folder / lockstep.name), stream, spec),
            partial(_watch, pool),
            # Less than the trainers wait for a batch: they need time to go on alone.
            stall_s=inputs.timeouts.samples_s / 2,
        )
        faulthandler.cancel_dump_traceback_later()
        chunks = exchange.run()
        print(f"leader {world.Get_rank()} of {world.Get_size()}: {chunks} chunks")


def node_here(nodes: Sequence[str], rank: int) -> str:
    """Return a leader's node: named by the environment, or else by its rank in the placement's order."""
    named = node_named(os.environ)
    return named if named is not None and named in nodes else nodes[rank]


def preprocessors_of_a_node(
    allocations: Sequence[Allocation], points: Sequence[PreprocessPoint], cores: int
) -> int:
    """Return the preprocessors per node with which all nodes together supply the slowest member.

    Parameters
    ----------
    points, cores
        Parameters of `roles_of`.
    """
    demand = min(allocation.rate for allocation in allocations) / len(nodes_of(allocations))
    return preprocessors_needed(points, demand, cores)


def _world(nodes: int) -> Any:
    """Start MPI, after all processes have been forked."""
    for name, value in IBCAST.items():
        os.environ.setdefault(name, value)
    try:
        # The import itself calls MPI_Init_thread(), and MPI starts threads: nothing may be forked after it.
        from mpi4py import MPI
    except ImportError as error:
        raise BadInputError(
            f"lockstep on several nodes needs mpi4py: {error}",
            "install it as docs/install.md says, or share with --sharing cached",
        ) from None
    world = MPI.COMM_WORLD
    # A wrong srun --mpi shows here: Open MPI formed one world with pmix, but neither with pmi2 nor with none.
    if world.Get_size() != nodes:
        raise BadInputError(
            f"the launcher started {world.Get_size()} MPI ranks as leaders of {nodes} nodes",
            "check `mpi:` and `launcher:` in the site file",
        )
    return world


def _watch(pool: PreprocessorPool) -> None:
    """Raise the error that has ended a preprocessor; else tell trainers how fast they prepare."""
    pool.preprocessors.check()
    # The leader has no file of events: those of the trainers have the rate.
    pool.share_rate()


def _check_that_all_have_the_same(world: Any, data: object) -> None:
    """Reject data that differ between nodes: MPI would truncate chunks, or mix them up."""
    # Sent as text: mpi4py would pickle the values, and run what another process has put into them.
    own, lengths = np.frombuffer(str(data).encode(), np.uint8), np.empty(world.Get_size(), np.int32)
    world.Allgather(np.array([len(own)], np.int32), lengths)
    texts = np.empty(lengths.sum(), np.uint8)
    world.Allgatherv(own, [texts, lengths])
    seen = [text.tobytes().decode() for text in np.split(texts, np.cumsum(lengths)[:-1])]
    for rank, there in enumerate(seen):
        if there != seen[0]:
            raise BadInputError(
                f"input_fn gives leader {rank} other samples than leader 0: {there}, not {seen[0]}",
                "it must return the same data on every node",
            )


@dataclass(frozen=True)
class NodeStream(Stream):
    """Chunks of a stream that one node prepares: every `nodes`-th, from number `node` on."""

    node: int = 0
    nodes: int = 1

    def at(self, position: int) -> Chunk:
        """Return the chunk at a position of the node's own chunks."""
        return super().at(position * self.nodes + self.node)


class RingWriter:
    """Destination of chunks on this node: its ring while that has readers, then unused memory.

    This must be the ring's only producer. If there is another, trainers no longer rely on the leader, which
    then leaves the ring to them.

    Parameters
    ----------
    path : Path
        File of the ring; the leader announces itself as long as it fills the ring.
    """

    def __init__(self, path: Path) -> None:
        self._ring = Ring(path)
        self._service = announce(path)
        self._read = True
        self._held: set[int] = set()
        self._spare = np.empty((IN_FLIGHT, self._ring.shape.slot_bytes), np.uint8)
        self._retry_at = 0.0

    @property
    def left(self) -> bool:
        """True once this leader has left the ring to others."""
        return self._service.closed

    def buffer(self, position: int) -> Bytes | None:
        """Return memory for a position, None if there is none yet; `IN_FLIGHT` positions never overlap."""
        if self._read and position not in self._held and time.monotonic() >= self._retry_at:
            self._claim(position)
        if position in self._held:
            return self._ring.buffer(position)
        return None if self._read else self._spare[position % IN_FLIGHT]

    def publish(self, position: int, used_bytes: int) -> None:
        """Publish a position if it is in the ring."""
        if position in self._held:
            self._ring.publish(position, used_bytes)
            self._held.remove(position)
        self._close_if_done()

    def _claim(self, position: int) -> None:
        try:
            claimed = self._ring.claim(0.0)
        except RingTimeoutError:
            self._retry_at = time.monotonic() + RETRY_S
            # A claim of a full ring fails both while readers are slow and after the last one was killed.
            self._read = not self._ring.deserted
        else:
            self._read = claimed == position
            self._held |= {position} if self._read else set()
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close the ring after all positions in flight are published: others may fill it then."""
        if not self._read and not self._held:
            self._ring.close()
            self._service.close()


class Exchange:
    """One leader's part in the broadcasts.

    All leaders post all positions in the same order, as MPI demands, so a leader with a full ring stalls the
    others once their rings are full. A leader whose trainers have all left continues for the others.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator of the leaders; leader i prepares the chunks of `NodeStream` i.
    outbox : Ring
        Ring with that stream's chunks; the exchange is its only reader.
    watch : callable
        Function called every `CHECK_EVERY_S` seconds; it raises the error of processes that fill the outbox.
    stall_s : float
        Seconds without any progress after which an exchange fails; trainers, whose limit is longer, then
        continue by themselves.
    """

    def __init__(
        self,
        comm: Any,
        outbox: Ring,
        writer: RingWriter,
        stream: Stream,
        spec: SampleSpec,
        watch: Callable[[], None],
        stall_s: float,
    ) -> None:
        # Collectives of one communicator must come in one order on all ranks (MPI 3.1, 5.12), but leaders
        # reach the barrier at different positions: it has a communicator of its own.
        self._data, self._votes = comm.Dup(), comm.Dup()
        self._rank, self._ranks = int(comm.Get_rank()), int(comm.Get_size())
        self._outbox, self._ring_writer, self._watch = outbox, writer, watch
        self._stall_s = stall_s
        self._stream, self._spec = stream, spec
        self._in_flight: deque[tuple[int, int, Any]] = deque()
        self._position = 0
        self._size = self._next_size()
        self._moved_at = self._watched_at = time.monotonic()

    def run(self) -> int:
        """Serve until no node has readers; return the number of broadcast chunks.

        Raises
        ------
        HetctlError
            If there is no progress for `stall_s`, or from `watch`. The caller must end the other leaders.
        """
        end: Any = None
        # A barrier that all leaders have entered: no node has readers.
        while end is None or not end.Test():
            moved = [self._publish_arrived(), self._post()]
            if not any(moved):
                self._pause()
            if end is None and self._ring_writer.left:
                end = self._votes.Ibarrier()
        self._drain()
        return self._position

    def _publish_arrived(self) -> bool:
        """Publish the chunks that have arrived, in order."""
        before = len(self._in_flight)
        # Test() also drives the transfer: without calls into MPI, most implementations make no progress.
        while self._in_flight and self._in_flight[0][-1].Test():
            position, size, _ = self._in_flight.popleft()
            self._ring_writer.publish(position, size)
            self._moved_at = time.monotonic()
        return len(self._in_flight) < before

    def _post(self) -> bool:
        """Post the next position if there is space for it and, if it is this node's, it is prepared."""
        own = self._position % self._ranks == self._rank
        if len(self._in_flight) == IN_FLIGHT or (own and self._prepared() is None):
            return False
        buffer = self._ring_writer.buffer(self._position)
        if buffer is None:
            if not self._in_flight:
                self._moved_at = time.monotonic()  # This node's readers may be slow, which is no error.
            return False
        if own:
            buffer[: self._size] = self._prepared()
            self._outbox.release(self._position // self._ranks)
        self._send(buffer)
        return True

    def _prepared(self) -> Bytes | None:
        try:
            return self._outbox.read(self._position // self._ranks, 0.0)
        except RingTimeoutError:
            return None

    def _send(self, buffer: Bytes) -> None:
        request = self._data.Ibcast(buffer[: self._size], root=self._position % self._ranks)
        self._in_flight.append((self._position, self._size, request))
        self._position += 1
        self._size = self._next_size()
        self._moved_at = time.monotonic()

    def _next_size(self) -> int:
        return self._spec.slot_bytes(len(self._stream.at(self._position).numbers))

    def _drain(self) -> None:
        """Post the positions that others have posted, with any content: no process reads them."""
        positions = np.zeros(self._ranks, np.int64)
        self._await(self._votes.Iallgather(np.array([self._position]), positions))
        furthest = int(positions.max())
        while self._in_flight or self._position < furthest:
            moved = self._publish_arrived()
            if self._position < furthest and len(self._in_flight) < IN_FLIGHT:
                buffer = self._ring_writer.buffer(self._position)
                assert buffer is not None
                self._send(buffer)
            elif not moved:
                self._pause()
        self._await(self._votes.Ibarrier())

    def _await(self, request: Any) -> None:
        while not request.Test():
            self._pause()

    def _pause(self) -> None:
        now = time.monotonic()
        if now > self._moved_at + self._stall_s:
            leader = f"leader {self._rank} of {self._ranks}"
            raise HetctlError(
                f"{leader} made no progress at chunk {self._position} for {self._stall_s:g} s",
                "check trainers and leaders on the other nodes, and the file system of the data",
            )
        if now > self._watched_at + CHECK_EVERY_S:
            self._watch()
            self._watched_at = now
        time.sleep(PAUSE_S if self._in_flight else IDLE_S)


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main())
