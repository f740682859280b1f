"""Parameter server of a rank: holds the global weights of some layers (HetPipe, section 5)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hetctl.methods.pipeline.global_weights import GlobalWeights, Weights
from hetctl.runtime.stages.tensor_mail import LOST, Parcel, TensorMail

INIT, PUSH, FETCH, LEAVE = "init", "push", "fetch", "leave"
TO_SERVER = (INIT, PUSH, FETCH, LEAVE)
"""Kinds of the parcels for servers."""
WEIGHTS, CLOCK = "weights", "clock"
"""Kinds of the parcels from servers: weights of a layer; number of waves in all layers of a server."""

TRAIN, SAVE, END = "train", "save", "end"
"""Purposes of a fetch: to go on training, to write a checkpoint, and to end a part of an epoch."""


class WaveServer:
    """Thread that answers the stages of all virtual workers.

    A parcel belongs to one layer. ``init`` has its weights before the first wave. ``push`` has the aggregated
    update of a wave, or, in the empty wave that ends a part of an epoch, the statistics of the layer with
    their number of samples. ``fetch`` asks for the weights with a number of waves, which are sent as soon as
    they exist.

    Parameters
    ----------
    layers : sequence of int
        Layers of this server.
    heads : sequence of int
        Ranks that are told about the clock of this server: the first stages.
    """

    def __init__(
        self,
        mail: TensorMail,
        box: queue.SimpleQueue[Parcel],
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        self._mail, self._box = mail, box
        self._layers, self._heads = tuple(layers), tuple(heads)
        self._held: dict[int, GlobalWeights] = {}
        self._statistics: dict[int, dict[int, tuple[int, Weights]]] = {}
        self._waiting: list[Parcel] = []
        # Parcels of other virtual workers may come before the initial weights.
        self._early: list[Parcel] = []
        self._now = 0
        self._thread = threading.Thread(target=self._run, name="parameter-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._box.put(Parcel(self._mail.rank, LEAVE))
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # Or the stages would wait for weights in silence.
            self._mail.fail(f"the parameter server on rank {self._mail.rank} failed: {error!r}")
            raise

    def _serve(self) -> None:
        # The stage of this rank gets the same parcel, and reports the loss.
        while (parcel := self._box.get()).kind not in (LOST, LEAVE):
            if parcel.kind == INIT:
                self._init(parcel)
            else:
                self._act(parcel)

    def _act(self, parcel: Parcel) -> None:
        if parcel.fields["layer"] in self._held:
            _ACTIONS[parcel.kind](self, parcel)
        else:
            self._early.append(parcel)

    def _init(self, parcel: Parcel) -> None:
        layer, workers = parcel.fields["layer"], len(self._heads)
        self._held[layer] = GlobalWeights(list(parcel.tensors), workers)
        # At once: the next wave of the same virtual worker may be in the queue already.
        early, self._early = self._early, []
        for before in early:
            self._act(before)

    def _push(self, parcel: Parcel) -> None:
        fields, tensors = parcel.fields, list(parcel.tensors)
        layer, worker = fields["layer"], fields["worker"]
        if fields["samples"] is not None:
            self._statistics.setdefault(layer, {})[worker] = fields["samples"], tensors
            tensors = []
        self._held[layer].push(worker, fields["wave"], tensors)
        self._answer_waiting()
        self._report_clock()

    def _fetch(self, parcel: Parcel) -> None:
        if not self._answer(parcel):
            self._waiting.append(parcel)

    def _answer_waiting(self) -> None:
        self._waiting = [parcel for parcel in self._waiting if not self._answer(parcel)]

    def _answer(self, parcel: Parcel) -> bool:
        """Send weights that were asked for; return false if they do not exist yet."""
        fields = parcel.fields
        layer, waves, purpose = fields["layer"], fields["waves"], fields["purpose"]
        weights = self._held[layer].at(waves)
        if weights is None:
            return False
        if purpose != SAVE:
            self._held[layer].note_read(fields["worker"], waves)
        statistics = self._means(layer) if purpose == END else []
        self._mail.send(
            parcel.sender,
            WEIGHTS,
            [*weights, *statistics],
            layer=layer,
            waves=waves,
            purpose=purpose,
            weights=len(weights),
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

    def _report_clock(self) -> None:
        if len(self._held) < len(self._layers):
            return
        now = min(weights.clock.now for weights in self._held.values())
        if now > self._now:
            self._now = now
            for head in self._heads:
                self._mail.send(head, CLOCK, waves=now)


_ACTIONS: dict[str, Callable[[WaveServer, Parcel], None]] = {
    PUSH: WaveServer._push,
    FETCH: WaveServer._fetch,
}
