"""Exchange of samples between the ranks of a group, directly from node to node, beside their training."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from hetctl.model.serialization import decode, encode
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.sources import Array, SampleSpec
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Listener, connect
from hetctl.runtime.worker.group import Group, LostPeerError, RankInfo, all_gather

POLL_S = 0.2
"""Seconds between two checks of the receiving thread whether the exchange was closed."""


class SampleExchange:
    """Sends samples to other ranks and receives theirs, in a thread each.

    Parameters
    ----------
    rank_info : RankInfo
        Place of this rank in the group, with the group's key.
    spec : SampleSpec
        Shapes and types of a sample, equal on all ranks.
    interfaces : NetworkInterfaces
        Interfaces for the connections: those of control messages.
    timeouts : Timeouts
        Time limits; samples have to arrive within that of a collective operation.
    """

    def __init__(
        self,
        group: Group,
        rank_info: RankInfo,
        spec: SampleSpec,
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
    ) -> None:
        self._identity = rank_info.identity
        self._listener = Listener(rank_info.key, control_address(interfaces.control), self._identity)
        addresses = all_gather(group, encode(self._listener.address))
        self._peers = [decode(Address, address) for address in addresses]
        self._spec = spec
        self._timeouts = timeouts
        self._arrived: dict[int, Samples] = {}
        self._error = ""
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="samples-out")
        self._receiver = threading.Thread(target=self._receive_all, name="samples-in", daemon=True)
        self._receiver.start()

    def send(self, number: int, target: int, samples: Samples) -> None:
        """Send samples in the background, under a number that no other transfer of the group has."""
        self._sender.submit(self._send, number, target, samples)

    def receive(self, number: int) -> Samples:
        """Wait for the samples with a number.

        Raises
        ------
        LostPeerError
            If a connection has broken, or they do not arrive in time.
        """
        limit_s = self._timeouts.hang_s
        with self._changed:
            self._changed.wait_for(lambda: number in self._arrived or self._error, limit_s)
            if number in self._arrived:
                return self._arrived.pop(number)
        reason = self._error or f"none arrived in {limit_s:g} s"
        raise LostPeerError(f"lost the samples of another rank of the group: {reason}")

    def close(self) -> None:
        """End both threads, after all that was to be sent."""
        self._sender.shutdown()
        self._closed.set()
        self._receiver.join()
        self._listener.close()

    def _send(self, number: int, target: int, samples: Samples) -> None:
        try:
            about = {"number": number, "samples": len(samples[0])}
            connection = connect(self._peers[target], about, self._timeouts.meeting_s, self._identity)
            for array in samples:
                connection.send_bytes(_bytes_of(np.ascontiguousarray(array)))
            connection.close()
        except OSError as error:
            self._fail(error)

    def _receive_all(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                transfer, connection = self._listener.wait(POLL_S)
                arrays = self._empty(transfer["samples"])
                try:
                    for array in arrays:
                        connection.receive_bytes(_bytes_of(array))
                except OSError as error:
                    self._fail(error)
                    return
                connection.close()
                with self._changed:
                    self._arrived[transfer["number"]] = arrays
                    self._changed.notify_all()

    def _empty(self, samples: int) -> Samples:
        spec = self._spec
        return (
            np.empty((samples, *spec.x_shape), spec.x_dtype),
            np.empty((samples, *spec.y_shape), spec.y_dtype),
        )

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._error = str(error)
            self._changed.notify_all()


def _bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
