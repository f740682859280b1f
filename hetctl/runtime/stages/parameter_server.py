"""Parameter servers, which update layers by whole waves, and their clients (HetPipe, 5)."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.methods.pipeline.wsp import GlobalClock
from hetctl.model.pipelines import PipelineLayout
from hetctl.runtime.frameworks.stage_network import LAYER, StageNetwork, Tensor
from hetctl.runtime.stages.p2p_transport import LOST, P2PTransport, TensorMessage

Weights = list[npt.NDArray[Any]]


class GlobalWeights:
    """Global weights of one layer.

    Version c is w_global with the waves 0 to c - 1 of every virtual worker, added wave by wave in the order
    of the virtual workers: the order of arrival does not matter.

    Parameters
    ----------
    weights : list of array
        Initial weights, version 0.
    workers : int
        Number of virtual workers.
    """

    def __init__(self, weights: Weights, workers: int) -> None:
        self.clock = GlobalClock((0,) * workers)
        self._versions = {0: weights}
        self._waves: dict[tuple[int, int], Weights] = {}
        self._read = [0] * workers

    def push(self, worker: int, wave: int, updates: Sequence[npt.NDArray[Any]]) -> None:
        """Add the aggregated update of a wave; empty if a virtual worker had no minibatches in it.

        Raises
        ------
        ValueError
            If earlier waves of that virtual worker are missing.
        """
        now = self.clock.now
        self.clock = self.clock.push(worker, wave)
        self._waves[worker, wave] = list(updates)
        for complete in range(now, self.clock.now):
            self._versions[complete + 1] = self._with(complete)
        self._forget()

    def at(self, waves: int) -> Weights | None:
        """Return the weights after a number of waves; None until these have arrived."""
        return self._versions[waves] if waves <= self.clock.now else None

    def note_read(self, worker: int, waves: int) -> None:
        """Note that a virtual worker has the weights after some waves, and will not ask for earlier ones."""
        self._read[worker] = max(self._read[worker], waves)
        self._forget()

    def _with(self, wave: int) -> Weights:
        """Return the newest version plus a wave of all virtual workers."""
        before = self._versions[wave]
        weights = before
        for worker in range(len(self.clock.pushed)):
            updates = self._waves.pop((worker, wave))
            if updates and weights is before:
                weights = [weight + update for weight, update in zip(before, updates, strict=True)]
            elif updates:
                for weight, update in zip(weights, updates, strict=True):
                    np.add(weight, update, out=weight)
        return weights

    def _forget(self) -> None:
        oldest = min(*self._read, self.clock.now)
        for waves in [waves for waves in self._versions if waves < oldest]:
            del self._versions[waves]


INIT, PUSH, FETCH, SHUTDOWN = "init", "push", "fetch", "shutdown"
TO_SERVER = (INIT, PUSH, FETCH, SHUTDOWN)
"""Kinds of the messages for servers."""
WEIGHTS, CLOCK = "weights", "clock"
"""Kinds of the messages from servers: weights of a layer; number of waves in all layers of a server."""

TRAIN, SAVE, END = "train", "save", "end"
"""Purposes of a fetch: to go on training, to write a checkpoint, and to end a part of an epoch."""


class WaveServer:
    """Parameter server of a rank: a thread that answers the stages of all virtual workers.

    A message belongs to one layer. ``init`` has its initial weights. ``push`` has the aggregated update of a
    wave; in the empty wave that ends a part of an epoch it has the layer's statistics and their number of
    samples. ``fetch`` asks for the weights after a number of waves, which are sent once they exist.

    Parameters
    ----------
    layers : sequence of int
        Layers of this server.
    heads : sequence of int
        Ranks that get this server's clock: the first stages.
    """

    def __init__(
        self,
        transport: P2PTransport,
        messages: queue.SimpleQueue[TensorMessage],
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        self._transport, self._messages = transport, messages
        self._layers, self._heads = tuple(layers), tuple(heads)
        self._held: dict[int, GlobalWeights] = {}
        self._statistics: dict[int, dict[int, tuple[int, Weights]]] = {}
        self._waiting: list[TensorMessage] = []
        # Messages of other virtual workers may come before the initial weights.
        self._early: list[TensorMessage] = []
        self._now = 0
        self._thread = threading.Thread(target=self._run, name="parameter-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._messages.put(TensorMessage(self._transport.rank, SHUTDOWN))
        self._thread.join()

    def _run(self) -> None:
        try:
            # This rank's stage gets the same message of a loss, and reports it.
            while (message := self._messages.get()).kind not in (LOST, SHUTDOWN):
                self._act(message)
        except Exception as error:
            # Otherwise the stages would wait for weights in silence.
            self._transport.fail(f"the parameter server on rank {self._transport.rank} failed: {error!r}")
            raise

    def _act(self, message: TensorMessage) -> None:
        layer = message.fields["layer"]
        if message.kind == INIT:
            self._held[layer] = GlobalWeights(list(message.tensors), len(self._heads))
            # At once: the queue may hold the next wave of the same virtual worker.
            early, self._early = self._early, []
            for before in early:
                self._act(before)
        elif layer not in self._held:
            self._early.append(message)
        elif message.kind == PUSH:
            self._push(message)
        elif not self._answer(message):
            self._waiting.append(message)

    def _push(self, message: TensorMessage) -> None:
        fields, tensors = message.fields, list(message.tensors)
        layer, worker = fields["layer"], fields["worker"]
        if fields["samples"] is not None:
            self._statistics.setdefault(layer, {})[worker] = fields["samples"], tensors
            tensors = []
        self._held[layer].push(worker, fields["wave"], tensors)
        self._waiting = [message for message in self._waiting if not self._answer(message)]
        is_held = len(self._held) == len(self._layers)
        now = min(weights.clock.now for weights in self._held.values()) if is_held else 0
        if now > self._now:
            self._now = now
            for head in self._heads:
                self._transport.send(head, CLOCK, waves=now)

    def _answer(self, message: TensorMessage) -> bool:
        """Send requested weights; return false if they do not exist yet."""
        fields = message.fields
        layer, waves, purpose = fields["layer"], fields["waves"], fields["purpose"]
        weights = self._held[layer].at(waves)
        if weights is None:
            return False
        if purpose != SAVE:
            self._held[layer].note_read(fields["worker"], waves)
        statistics = self._means(layer) if purpose == END else []
        self._transport.send(
            message.sender,
            WEIGHTS,
            [*weights, *statistics],
            layer=layer,
            waves=waves,
            purpose=purpose,
        )
        return True

    def _means(self, layer: int) -> Weights:
        """Return the statistics of a layer as means over the samples of all virtual workers."""
        given = [self._statistics[layer][worker] for worker in sorted(self._statistics.get(layer, {}))]
        total = sum(samples for samples, _ in given)
        columns = zip(*(tensors for _, tensors in given), strict=True)
        # A part that was stopped before its first minibatch has no samples.
        shares = [samples / total if total else 1 / len(given) for samples, _ in given]
        return [np.tensordot(shares, np.stack(tensors), 1).astype(tensors[0].dtype) for tensors in columns]


class WaveClient:
    """Exchange of a stage with the parameter servers of its layers; idle with a single virtual worker.

    Waves count from the first part of an epoch that the ranks train together.
    """

    def __init__(self, network: StageNetwork, layout: PipelineLayout, transport: P2PTransport) -> None:
        self._network, self._transport = network, transport
        self._servers = layout.servers
        self._worker, _ = layout.place_of(transport.rank)
        self.shares = len(layout.workers) > 1
        self._weights = {layer: _places(layer, network.weight_names) for layer in network.layers}
        self._statistics = {layer: _places(layer, network.statistic_names) for layer in network.layers}
        self.pulled = 0
        """Waves of all virtual workers in the weights."""
        self._distance = layout.distance
        self._own: dict[int, list[Tensor]] = {}
        self._asked: set[tuple[str, int]] = set()
        self._arrived: dict[tuple[str, int], dict[int, TensorMessage]] = {}

    def begin(self) -> None:
        """Send the servers the initial weights, which are equal in all virtual workers."""
        if not self.shares:
            return
        self._network.updates()
        if self._worker == 0:
            weights = self._network.weights()
            for layer, places in self._weights.items():
                self._transport.send(self._servers[layer], INIT, [weights[at] for at in places], layer=layer)

    def push(self, wave: int) -> None:
        """Send the sum of the updates since the last wave, as the wave with this number."""
        if not self.shares:
            return
        updates = self._own[wave] = self._network.updates()
        # The next global weights lack at most the waves of that distance.
        self._own = {kept: own for kept, own in self._own.items() if kept > wave - self._distance}
        self._push(wave, updates, self._weights)

    def push_statistics(self, wave: int, samples: int) -> None:
        """End a part of an epoch: send an empty wave with the statistics of the part's samples."""
        if self.shares:
            self._push(wave, self._network.statistics(), self._statistics, samples)

    def _push(
        self, wave: int, arrays: list[Tensor], of_layers: dict[int, list[int]], samples: int | None = None
    ) -> None:
        for layer, places in of_layers.items():
            tensors, fields = [arrays[at] for at in places], {"layer": layer, "worker": self._worker}
            self._transport.send(self._servers[layer], PUSH, tensors, **fields, wave=wave, samples=samples)

    def ask(self, purpose: str, waves: int) -> None:
        """Request weights after a number of waves, which are sent once they exist, unless training has them.

        A request for a part's final weights is the last one of the part: servers then forget older versions.
        """
        is_ending = any(asked == END for asked, _ in self._asked)
        is_known = (purpose, waves) in self._asked or (purpose == TRAIN and waves <= self.pulled)
        if not self.shares or is_ending or is_known:
            return
        self._asked.add((purpose, waves))
        for layer in self._weights:
            self._transport.send(
                self._servers[layer],
                FETCH,
                layer=layer,
                worker=self._worker,
                waves=waves,
                purpose=purpose,
            )

    def take(self, message: TensorMessage) -> None:
        """Keep weights that have arrived."""
        key = message.fields["purpose"], message.fields["waves"]
        self._arrived.setdefault(key, {})[message.fields["layer"]] = message

    def has(self, purpose: str, waves: int) -> bool:
        """Return true if the weights of all layers have arrived."""
        return not self.shares or len(self._arrived.get((purpose, waves), ())) == len(self._weights)

    def adopt(self, waves: int) -> None:
        """Replace the weights by the global ones after `waves` waves, plus own updates that these lack."""
        if waves > self.pulled and self.shares:
            self._own = {wave: updates for wave, updates in self._own.items() if wave >= waves}
            self._network.set_global_weights(self._with_own(deque(self.received(TRAIN, waves))))
        self.pulled = max(self.pulled, waves)

    def _with_own(self, weights: deque[Tensor]) -> Iterator[Tensor]:
        """Yield weights plus all own updates that are kept; only the caller keeps the results."""
        own = [self._own[wave] for wave in sorted(self._own)]
        for place in range(len(weights)):
            weight = weights.popleft()
            for updates in own:
                weight = weight + updates[place]
            yield weight

    def finish(self, waves: int) -> None:
        """Replace weights and statistics by a part's final ones, with all updates of all virtual workers."""
        if not self.shares:
            return
        messages = self._arrived[END, waves]
        statistics = self._network.statistics()
        for layer, places in self._statistics.items():
            sent = messages[layer].tensors[len(self._weights[layer]) :]
            for at, tensor in zip(places, sent, strict=True):
                statistics[at] = tensor
        self._network.set_global_weights(self.received(END, waves))
        self._network.set_statistics(statistics)
        self._own.clear()
        self._arrived.clear()
        self._asked.clear()
        self.pulled = waves

    def received(self, purpose: str, waves: int) -> list[Tensor]:
        """Return weights that have arrived, in the order of `StageNetwork.weights`."""
        messages = self._arrived.pop((purpose, waves))
        found: dict[int, Tensor] = {}
        for layer, places in self._weights.items():
            # Those of a part's end have statistics after the weights.
            found.update(zip(places, messages[layer].tensors, strict=purpose != END))
        return [found[at] for at in sorted(found)]


def _places(layer: int, names: Sequence[str]) -> list[int]:
    return [at for at, name in enumerate(names) if name.startswith(LAYER.format(layer))]
