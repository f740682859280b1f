"""The ranks that train one member together: they meet when it starts and part when it leaves.

Each group is a world of its own, which any processes can form and leave again: a rank that dies takes
only its own group along, which an MPI world of all ranks would not survive.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.runtime.interfaces import chosen_interface, control_address, interface_of
from hetctl.runtime.transport import LOCALHOST, Address, Connection, Listener, connect

BROKEN_S = 1.0
"""Who fails looks so long whether another rank failed before."""


class LostPeerError(HetctlError):
    """Another rank of the group is gone: what follows from that is not this rank's fault."""


class Group(Protocol):
    """A member's ranks; rank 0 decides, reports and writes checkpoints."""

    size: int
    rank: int

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, one that JSON knows, on every rank."""

    def peer_failed(self) -> bool:
        """Whether another rank is gone."""

    def leave(self) -> None:
        """Wait for the others, and part."""


class WiredGroup(Protocol):
    """A group of several ranks, as a link sees it.

    Attributes
    ----------
    host : str
        Where this rank reaches rank 0.
    interface : str
        The network interface for Gloo.
    hang_s : float
        What ranks do together takes at most so long: one of them hangs if it does not come.
    """

    size: int
    rank: int
    host: str
    interface: str
    hang_s: float

    def broadcast(self, value: Any) -> Any:
        """As of any group."""


class CollectiveBackend(Protocol):
    """How the ranks of a group exchange gradients; each framework has its own.

    Attributes
    ----------
    needs : str
        The packages that it takes, in words.
    """

    needs: str

    def load(self) -> None:
        """Import what it takes; ImportError where a package is missing."""

    def meet(self, group: WiredGroup) -> None:
        """Start it on the ranks of a group of several."""

    def part(self) -> None:
        """End it, so that other groups can be formed."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in a group.

    Parameters
    ----------
    key : str
        What the ranks of this group alone know.
    master : Address or None
        Where rank 0 waits for the others; None for itself.
    """

    rank: int
    size: int
    key: str = ""
    master: Address | None = None


class SingleRank:
    """A group of one."""

    size = 1
    rank = 0

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def peer_failed(self) -> bool:
        """Nobody else can be gone."""
        return False

    def leave(self) -> None:
        """Nobody to wait for."""


class ProcessGroup:
    """A group of several: rank 0 has a connection to each of the others.

    Parameters
    ----------
    connections : sequence of Connection
        Of rank 0 those to ranks 1, 2, ..; of any other rank the one to rank 0.
    hang_s : float
        As of a `WiredGroup`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Sequence[Connection],
        host: str,
        interface: str,
        link: CollectiveBackend,
        hang_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.interface = interface
        self.hang_s = hang_s
        self._connections = connections
        self._link = link

    def broadcast(self, value: Any) -> Any:
        """Tell the others, or be told; LostPeerError if one of them is gone."""
        try:
            if self.rank != 0:
                return self._connections[0].receive()
            for connection in self._connections:
                connection.send(value)
        except ConnectionError as error:
            raise LostPeerError(f"another rank of the group is gone: {error}") from None
        return value

    def peer_failed(self) -> bool:
        """Look for `BROKEN_S`; ranks that fail let go of their connections."""
        limit = time.monotonic() + BROKEN_S
        while time.monotonic() < limit:
            try:
                for connection in self._connections:
                    for _ in connection.arrived():
                        pass
            except ConnectionError:
                return True
            time.sleep(0.02)
        return False

    def leave(self) -> None:
        """Meet once more, end what connects the ranks, let go."""
        try:
            if self.rank != 0:
                self._connections[0].send(None)
            for connection in self._connections:
                connection.receive()
            if self.rank == 0:
                self.broadcast(None)
        except ConnectionError as error:
            raise LostPeerError(f"another rank of the group is gone: {error}") from None
        self._link.part()
        for connection in self._connections:
            connection.close()


def join_group(
    place: RankInfo,
    link: CollectiveBackend,
    announce: Callable[[Address], None],
    interfaces: NetworkInterfaces = ANY_INTERFACES,
    timeouts: Timeouts = USUAL_TIMEOUTS,
) -> Group:
    """Meet the other ranks of a member, one for each of its GPUs.

    Parameters
    ----------
    announce : callable
        Told by rank 0 where it waits, for the others to be told.

    Raises
    ------
    BadInputError
        If a package is missing, or this node has none of the interfaces.
    LostPeerError
        If another rank did not come in time.
    """
    if place.size == 1:
        return SingleRank()
    try:
        link.load()
    except ImportError as error:
        raise BadInputError(
            f"a member with more than one GPU needs {link.needs}: {error}",
            "install it as docs/install.md says, or give the member max_gpus: 1",
        ) from None
    try:
        if place.master is None:
            group = _lead(place, link, announce, interfaces, timeouts)
        else:
            group = _follow(place, place.master, link, interfaces, timeouts)
    except (TimeoutError, ConnectionError) as error:
        raise LostPeerError(f"the ranks of the group did not meet: {error}") from None
    link.meet(group)
    return group


def _lead(
    place: RankInfo,
    link: CollectiveBackend,
    announce: Callable[[Address], None],
    interfaces: NetworkInterfaces,
    timeouts: Timeouts,
) -> ProcessGroup:
    here = socket.gethostname()
    named = chosen_interface(interfaces.gloo)
    listener = Listener(place.key, control_address(interfaces.control))
    address = listener.address
    try:
        announce(address)
        peers = [listener.wait(timeouts.meeting_s) for _ in range(place.size - 1)]
    finally:
        listener.close()
    connections = [connection for _, connection in sorted(peers, key=lambda peer: int(peer[0]["rank"]))]
    far = [connection for who, connection in peers if who["host"] != here]
    interface = named or interface_of(far[0].local_host if far else LOCALHOST)
    for connection in connections:
        connection.send({"host": here, "address": address.host, "interface": interface})
    return ProcessGroup(0, place.size, connections, LOCALHOST, interface, link, timeouts.hang_s)


def _follow(
    place: RankInfo,
    master: Address,
    link: CollectiveBackend,
    interfaces: NetworkInterfaces,
    timeouts: Timeouts,
) -> ProcessGroup:
    here = socket.gethostname()
    named = chosen_interface(interfaces.gloo)
    connection = connect(master, {"rank": place.rank, "host": here}, timeouts.meeting_s)
    theirs = connection.receive(timeouts.meeting_s)
    near = theirs["host"] == here
    host = LOCALHOST if near else theirs["address"]
    interface = named or (theirs["interface"] if near else interface_of(connection.local_host))
    return ProcessGroup(place.rank, place.size, [connection], host, interface, link, timeouts.hang_s)
