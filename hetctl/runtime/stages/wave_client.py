"""Waves of a stage: its updates to the parameter servers, and weights from them (HetPipe, section 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from hetctl.model.pipelines import PipelineLayout
from hetctl.runtime.frameworks.stage_network import StageNetwork, Tensor
from hetctl.runtime.stages.tensor_mail import Parcel, TensorMail
from hetctl.runtime.stages.wave_server import END, FETCH, INIT, PUSH, TRAIN

LAYER = "layer-{}/"
"""Beginning of the names of what belongs to a layer, as in `StageNetwork.save`."""


class WaveClient:
    """Exchange of a stage with the parameter servers of its layers; nothing if there is one virtual worker.

    Waves count from the first part of an epoch that the ranks have trained together.
    """

    def __init__(self, network: StageNetwork, layout: PipelineLayout, mail: TensorMail) -> None:
        self._network, self._mail = network, mail
        self._servers = layout.servers
        self._worker, _ = layout.place_of(mail.rank)
        self.shares = len(layout.workers) > 1
        self._weights = {layer: _places(layer, network.weight_names) for layer in network.layers}
        self._statistics = {layer: _places(layer, network.statistic_names) for layer in network.layers}
        self.pulled = 0
        """Waves of all virtual workers in the weights."""
        self._distance = layout.distance
        self._own: dict[int, list[Tensor]] = {}
        self._asked: set[tuple[str, int]] = set()
        self._is_ending = False
        self._arrived: dict[tuple[str, int], dict[int, Parcel]] = {}

    def begin(self) -> None:
        """Give the servers the initial weights, which are equal in all virtual workers."""
        if not self.shares:
            return
        self._network.updates()
        if self._worker == 0:
            weights = self._network.weights()
            for layer, places in self._weights.items():
                self._mail.send(self._servers[layer], INIT, [weights[at] for at in places], layer=layer)

    def push(self, wave: int) -> None:
        """Send the sum of the updates since the last wave, as the wave with this number."""
        if not self.shares:
            return
        updates = self._own[wave] = self._network.updates()
        # The next global weights lack no more waves than that.
        self._own = {kept: own for kept, own in self._own.items() if kept > wave - self._distance}
        for layer, places in self._weights.items():
            self._push(layer, wave, [updates[at] for at in places])

    def push_statistics(self, wave: int, samples: int) -> None:
        """Send a wave without updates, which ends a part of an epoch, with the statistics of its samples."""
        if not self.shares:
            return
        statistics = self._network.statistics()
        for layer, places in self._statistics.items():
            self._push(layer, wave, [statistics[at] for at in places], samples=samples)

    def _push(self, layer: int, wave: int, tensors: list[Tensor], samples: int | None = None) -> None:
        self._mail.send(
            self._servers[layer], PUSH, tensors, layer=layer, worker=self._worker, wave=wave, samples=samples
        )

    def ask(self, purpose: str, waves: int) -> None:
        """Request weights with a number of waves, which are sent once they exist.

        After a request for those at the end of a part there is no other one in it: servers then forget what
        all virtual workers have left behind.
        """
        if not self.shares or self._is_ending or (purpose, waves) in self._asked:
            return
        self._is_ending = purpose == END
        self._asked.add((purpose, waves))
        for layer in self._weights:
            self._mail.send(
                self._servers[layer],
                FETCH,
                layer=layer,
                worker=self._worker,
                waves=waves,
                purpose=purpose,
            )

    def take(self, parcel: Parcel) -> None:
        """Keep weights that have arrived."""
        key = parcel.fields["purpose"], parcel.fields["waves"]
        self._arrived.setdefault(key, {})[parcel.fields["layer"]] = parcel

    def has(self, purpose: str, waves: int) -> bool:
        """Return true if the weights of all layers have arrived."""
        return not self.shares or len(self._arrived.get((purpose, waves), ())) == len(self._weights)

    def adopt(self, waves: int) -> None:
        """Replace the weights by those with `waves` waves of all, plus the own updates that these lack."""
        if waves <= self.pulled:
            return
        if not self.shares:
            self.pulled = waves
            return
        self._own = {wave: updates for wave, updates in self._own.items() if wave >= waves}
        self._network.rebase(self._with_own(deque(self.received(TRAIN, waves))))
        self.pulled = waves

    def _with_own(self, weights: deque[Tensor]) -> Iterator[Tensor]:
        """Yield weights plus all own updates that are kept; what is yielded is left to the caller alone."""
        own = [self._own[wave] for wave in sorted(self._own)]
        for place in range(len(weights)):
            weight = weights.popleft()
            for updates in own:
                weight = weight + updates[place]
            yield weight

    def finish(self, waves: int) -> None:
        """Replace weights and statistics by those at the end of a part: all updates of all are in them."""
        if not self.shares:
            return
        parcels = self._arrived[END, waves]
        statistics = self._network.statistics()
        for layer, places in self._statistics.items():
            sent = parcels[layer].tensors[parcels[layer].fields["weights"] :]
            for at, tensor in zip(places, sent, strict=True):
                statistics[at] = tensor
        self._network.rebase(self.received(END, waves))
        self._network.set_statistics(statistics)
        self._own.clear()
        self._arrived.clear()
        self._asked.clear()
        self._is_ending = False
        self.pulled = waves

    def received(self, purpose: str, waves: int) -> list[Tensor]:
        """Return weights that have arrived, in the order of `StageNetwork.weights`."""
        parcels = self._arrived.pop((purpose, waves))
        found: dict[int, Tensor] = {}
        for layer, places in self._weights.items():
            count = parcels[layer].fields["weights"]
            found.update(zip(places, parcels[layer].tensors[:count], strict=True))
        return [found[at] for at in sorted(found)]


def _places(layer: int, names: Sequence[str]) -> list[int]:
    """Return the places of a layer's names."""
    return [at for at, name in enumerate(names) if name.startswith(LAYER.format(layer))]
