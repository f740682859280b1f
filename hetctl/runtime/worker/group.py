"""The ranks that train one member together: they connect when it starts and disconnect when it stops.

Any processes can form a group and leave it again. A rank that dies ends only its own group; an MPI world of
all ranks would die with it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hetctl.model.errors import HetctlError, TransientInputError
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.interfaces import chosen_interface, control_address, interface_of, plain_address
from hetctl.runtime.transport import LOCALHOST, Address, Connection, JobIdentity, Listener, connect

PEER_FAILURE_CHECK_S = 1.0
"""Seconds in which a failing rank checks whether another rank failed before it."""


class LostPeerError(HetctlError):
    """Loss of another rank of the group, which caused this rank's error."""


@contextmanager
def _losing_peers() -> Iterator[None]:
    """Raise LostPeerError for a connection that has ended."""
    try:
        yield
    except ConnectionError as error:
        raise LostPeerError(f"lost another rank of the group: {error}") from None


class Group:
    """The ranks of a member, one by default; rank 0 decides, reports and writes checkpoints."""

    size: int = 1
    rank: int = 0

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; a JSON value."""
        return value

    def report(self, value: Any) -> None:
        """Send rank 0 a JSON value other than None, without waiting, for its `reports`."""

    def reports(self, wait: bool = False) -> Iterator[tuple[int, Any]]:  # noqa: ARG002
        """Yield, on rank 0, the values that have arrived since the last call, with their ranks.

        Parameters
        ----------
        wait : bool
            If true, wait until each of the other ranks has sent at least one value.
        """
        yield from ()

    def peer_failed(self) -> bool:
        """Return true if another rank has ended."""
        return False

    def barrier_and_close(self) -> None:
        """Wait for the others, and disconnect."""


class CollectiveBackend:
    """Collective operations that exchange a group's gradients; each framework has its own.

    By default there are none, for ranks that only connect, such as a pipeline's stages.

    Attributes
    ----------
    needs : str
        Names of the packages it needs, for messages.
    """

    needs = "nothing"

    def load(self) -> None:
        """Import the packages; ImportError if one is missing."""

    def initialize(self, group: ProcessGroup) -> None:
        """Initialize it on a group of several ranks."""

    def shutdown(self) -> None:
        """Shut it down, so that other groups can be formed."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in a group.

    Parameters
    ----------
    key : str
        Secret that only the ranks of this group have.
    master : Address or None
        Address at which rank 0 waits for the others; None for rank 0 itself.
    identity : JobIdentity or None
        Identity of the job, for a group on several nodes; None: all its ranks are on one.
    """

    rank: int
    size: int
    key: str = ""
    master: Address | None = None
    identity: JobIdentity | None = None


class ProcessGroup(Group):
    """A group of several ranks: rank 0 has a connection to each of the others.

    Parameters
    ----------
    connections : sequence of Connection
        On rank 0 the connections to ranks 1, 2, ..; on another rank its connection to rank 0.
    host : str
        Address of one interface at which all ranks reach rank 0: the loopback if all are on one node. Rank 0
        should listen at this address alone.
    interface : str
        Network interface for Gloo.
    hang_s : float
        Time limit of collective operations in seconds: a rank that takes longer hangs.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Sequence[Connection],
        host: str,
        interface: str,
        backend: CollectiveBackend,
        hang_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.interface = interface
        self.hang_s = hang_s
        self._connections = connections
        self._backend = backend
        self._watch: PeerWatch | None = None

    def broadcast(self, value: Any) -> Any:
        """Send or receive rank 0's value; LostPeerError if another rank has ended."""
        with _losing_peers():
            if self.rank != 0:
                return self._connections[0].receive()
            for connection in self._connections:
                connection.send(value)
        return value

    def report(self, value: Any) -> None:
        """Send rank 0 a value; LostPeerError if it has ended."""
        with _losing_peers():
            self._connections[0].send(value)

    def reports(self, wait: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield the values that have arrived on rank 0; LostPeerError if another rank has ended."""
        with _losing_peers():
            for rank, connection in enumerate(self._connections, 1):
                if wait:
                    yield rank, connection.receive()
                for value in connection.arrived():
                    yield rank, value

    def on_peer_loss(self, call: Callable[[], None]) -> None:
        """Call a function, in a thread of its own, when another rank has ended."""
        self._watch = PeerWatch(self._connections, call)

    def peer_failed(self, patience_s: float = PEER_FAILURE_CHECK_S) -> bool:
        """Watch the connections for `patience_s`; a rank that fails closes its own."""
        limit = time.monotonic() + patience_s
        while time.monotonic() < limit:
            try:
                for _ in self.reports():
                    pass
            except LostPeerError:
                return True
            time.sleep(0.02)
        return False

    def barrier_and_close(self) -> None:
        """Wait for all ranks, shut down the collective backend, and close the connections."""
        if self._watch:
            # From here on the other ranks may end in order.
            self._watch.end()
        with _losing_peers():
            if self.rank != 0:
                # A barrier: the first rank that shuts Horovod down would end all others.
                self._connections[0].send(None)
            for connection in self._connections:
                # Reports of the last steps may still be on the way.
                while connection.receive() is not None:
                    pass
            if self.rank == 0:
                self.broadcast(None)
        self._backend.shutdown()
        for connection in self._connections:
            connection.close()


class PeerWatch:
    """Thread that calls a function once the other end of a connection has ended or is cut off.

    It reads nothing: the main thread, which may be blocked meanwhile, reads the messages.
    """

    def __init__(self, connections: Sequence[Connection], call: Callable[[], None]) -> None:
        self._call = call
        self._end = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._end, select.POLLIN)
        for connection in connections:
            # Not POLLIN: it would be set as long as a message waits for the main thread.
            self._poll.register(connection, select.POLLRDHUP)
        self._thread = threading.Thread(target=self._run, name="peer watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch without a call of the function."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)

    def _run(self) -> None:
        if self._end not in dict(self._poll.poll()):
            self._call()


def all_gather(group: Group, value: Any) -> list[Any]:
    """Return on every rank the values of all ranks, by rank: JSON values other than None."""
    if group.rank != 0:
        group.report(value)
    others = dict(group.reports(wait=True)) if group.rank == 0 else {}
    values: list[Any] = group.broadcast([value, *(others[rank] for rank in sorted(others))])
    return values


def join_group(
    rank_info: RankInfo,
    backend: CollectiveBackend,
    publish_address: Callable[[Address], None],
    interfaces: NetworkInterfaces = ANY_INTERFACES,
    timeouts: Timeouts = USUAL_TIMEOUTS,
) -> Group:
    """Connect to the other ranks of a member, one on each of its GPUs.

    Parameters
    ----------
    publish_address : callable
        Function called on rank 0 with its address, to pass on to the other ranks.

    Raises
    ------
    TransientInputError
        If a package is missing, or no interface of this node matches.
    LostPeerError
        If another rank does not connect in time.
    """
    if rank_info.size == 1:
        return Group()
    try:
        backend.load()
    except ImportError as error:
        raise TransientInputError(
            f"a member with more than one GPU needs {backend.needs}: {error}",
            "install it as docs/install.md says, or give the member gpus: 1",
        ) from None
    try:
        if rank_info.master is None:
            group = _lead(rank_info, backend, publish_address, interfaces, timeouts)
        else:
            group = _follow(rank_info, rank_info.master, backend, interfaces, timeouts)
    # A timeout here means a lost peer: a lost node must not count against the member.
    except (TimeoutError, ConnectionError) as error:
        raise LostPeerError(f"the ranks of the group did not connect: {error}") from None
    # Two to four ranks connect in 0.1 to 0.2 s. Process sets of an MPI world regroup in 5 ms, but the whole
    # world fails with its first rank.
    backend.initialize(group)
    return group


def _lead(
    rank_info: RankInfo,
    backend: CollectiveBackend,
    publish_address: Callable[[Address], None],
    interfaces: NetworkInterfaces,
    timeouts: Timeouts,
) -> ProcessGroup:
    host = socket.gethostname()
    configured = chosen_interface(interfaces.gloo)
    listener = Listener(rank_info.key, control_address(interfaces.control), rank_info.identity)
    try:
        publish_address(listener.address)
        peers = [listener.wait(timeouts.meeting_s) for _ in range(rank_info.size - 1)]
    finally:
        listener.close()
    connections = [connection for _, connection in sorted(peers, key=lambda peer: int(peer[0]["rank"]))]
    remote = [connection for peer, connection in peers if peer["host"] != host]
    own = plain_address(remote[0].local_host) if remote else LOCALHOST
    # Gloo's default is an address of the host name, which other nodes may be unable to reach.
    interface = configured or interface_of(own)
    for connection in connections:
        connection.send({"host": host, "address": own, "interface": interface})
    return ProcessGroup(0, rank_info.size, connections, own, interface, backend, timeouts.hang_s)


def _follow(
    rank_info: RankInfo,
    master: Address,
    backend: CollectiveBackend,
    interfaces: NetworkInterfaces,
    timeouts: Timeouts,
) -> ProcessGroup:
    host = socket.gethostname()
    configured = chosen_interface(interfaces.gloo)
    name = {"rank": rank_info.rank, "host": host}
    connection = connect(master, name, timeouts.meeting_s, rank_info.identity)
    leader = connection.receive(timeouts.meeting_s)
    same_host = leader["host"] == host
    interface = configured or (leader["interface"] if same_host else interface_of(connection.local_host))
    return ProcessGroup(
        rank_info.rank, rank_info.size, [connection], leader["address"], interface, backend, timeouts.hang_s
    )
