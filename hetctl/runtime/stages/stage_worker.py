"""Stage of a virtual worker on this rank: its passes, and the admission of minibatches (HetPipe, 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from hetctl.methods.pipeline.wsp import Bounds, StageQueue, WspClock
from hetctl.model.pipelines import PipelineLayout, WaveRecord
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import Batch, Samples
from hetctl.runtime.data.sampler import parts_of
from hetctl.runtime.frameworks.stage_network import PassedTensor, StageNetwork, Tensor
from hetctl.runtime.stages.p2p_transport import P2PTransport, TensorMessage, receive
from hetctl.runtime.stages.parameter_server import CLOCK, END, SAVE, TRAIN, WEIGHTS, WaveClient


@dataclass(frozen=True)
class EpochPart:
    """Samples of an epoch that are trained without a pause.

    Parameters
    ----------
    number : int
        Number of the part since the ranks met.
    epoch : int
        Epoch, counted from 1.
    position : int
        Samples of the epoch that were trained before the part.
    samples : int
        Samples of the whole epoch.
    chunk : int
        Samples of one minibatch of all virtual workers together.
    first_wave : int
        Waves of the earlier parts.
    """

    number: int
    epoch: int
    position: int
    samples: int
    chunk: int
    first_wave: int

    @property
    def minibatches(self) -> int:
        """Most minibatches of a virtual worker."""
        return -(-(self.samples - self.position) // self.chunk)

    def minibatches_of(self, worker: int, workers: int) -> int:
        """Return a virtual worker's number of minibatches: the last chunk may have no samples for it."""
        last = self.samples - self.position - (self.minibatches - 1) * self.chunk
        return self.minibatches - (parts_of(last, (1,) * workers)[worker] == 0)

    def position_after(self, minibatch: int) -> int:
        """Return the samples of the epoch that are trained once all workers have completed a minibatch."""
        return min(self.samples, self.position + minibatch * self.chunk)


FORWARD, BACKWARD, INFER, SCORED = "forward", "backward", "infer", "scored"
PULL, FREEZE, FROZEN, FINISH = "pull", "freeze", "frozen", "finish"
POLL_S = 0.1
"""Longest wait for a message in seconds; then a stage sends a heartbeat, or checks for a stop."""


@dataclass(frozen=True)
class PartHooks:
    """Functions that a rank calls while it trains a part of an epoch.

    Parameters
    ----------
    should_stop : callable
        Returns true if training must stop after the waves that have begun; called on rank 0 alone.
    should_save : callable
        Returns true to save the end of the next wave; called on rank 0 alone.
    on_step : callable
        Called on first stages after each minibatch with its number and loss.
    save : callable
        Called on the stages of the first virtual worker with a minibatch's number and the arrays of the state
        after it.
    """

    should_stop: Callable[[], bool] = lambda: False
    should_save: Callable[[], bool] = lambda: False
    on_step: Callable[[int, float], None] = lambda _minibatch, _loss: None
    save: Callable[[int, dict[str, Tensor]], None] = lambda _minibatch, _arrays: None


class StageWorker:
    """Stage of a virtual worker on this rank.

    Parameters
    ----------
    log : callable
        Function called after each wave with the weights that its minibatches met.
    heartbeat : callable
        Function called regularly as a heartbeat.
    """

    def __init__(
        self,
        network: StageNetwork,
        layout: PipelineLayout,
        transport: P2PTransport,
        log: Callable[[WaveRecord], None] = lambda _: None,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.network, self.layout, self.transport = network, layout, transport
        self.log, self.heartbeat = log, heartbeat
        self.worker, self.stage = layout.place_of(transport.rank)
        self.ranks = tuple(plan.rank for plan in layout.workers[self.worker])
        self.heads = tuple(stages[0].rank for stages in layout.workers)
        self.held = layout.workers[self.worker][self.stage].held
        self.waves = WaveClient(network, layout, transport)

    @property
    def is_first(self) -> bool:
        """True for the stage that admits minibatches."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the loss."""
        return self.stage == len(self.ranks) - 1

    def train(
        self, part: EpochPart, feed: Iterator[Batch] | None, hooks: PartHooks | None = None
    ) -> StageRun:
        """Train a part of an epoch, and return it; all virtual workers have equal weights at its end.

        Parameters
        ----------
        feed : iterator of Batch or None
            Batches of this virtual worker; None on stages that are not the first.
        """
        run = StageRun(self, part, feed, hooks or PartHooks())
        run.train()
        return run

    def evaluate(self, feed: Iterator[tuple[Samples, int]] | None) -> tuple[dict[str, float], int]:
        """Evaluate; return the scores and their number of samples, which only the last stage has.

        Parameters
        ----------
        feed : iterator or None
            Validation batches of this virtual worker, each with its number of samples; None on other stages.
        """
        if feed is not None:
            self._stream(feed)
        else:
            while (message := self._await(INFER)).tensors:
                self._infer(*message.tensors)
        if not self.is_last:
            # A message without tensors ends the batches.
            self.transport.send(self.ranks[self.stage + 1], INFER)
            return {}, 0
        return self.network.scores()

    def _stream(self, feed: Iterator[tuple[Samples, int]]) -> None:
        """Send batches through the stages; as many are in flight as minibatches in training."""
        in_flight = 0
        for samples, count in feed:
            if not count:
                continue
            if in_flight == self.layout.in_flight:
                self._await(SCORED)
                in_flight -= 1
            self._infer(*samples)
            in_flight += not self.is_last
        for _ in range(in_flight):
            self._await(SCORED)

    def _infer(self, x: PassedTensor, y: Tensor) -> None:
        self.heartbeat()
        if not self.is_last:
            self.transport.send(self.ranks[self.stage + 1], INFER, (self.network.infer(x), y))
            return
        self.network.score(x, y)
        if not self.is_first:
            self.transport.send(self.ranks[0], SCORED)

    def _await(self, kind: str) -> TensorMessage:
        while (message := receive(self.transport.inbox, POLL_S)) is None or message.kind != kind:
            self.heartbeat()
        return message


class StageRun:
    """A stage in one part of an epoch; a first stage admits minibatches within the bounds of staleness.

    A pass that waits for its turn is the message with its tensors. Its fields are the number of the
    `minibatch`, its `samples`, and whether it `saves` the state after it; a forward pass also has the number
    of waves that its weights must contain (`pulled`), a backward pass the `loss`.

    Attributes
    ----------
    minibatches : int
        Most minibatches that a virtual worker completes.
    loss : float
        Sum of the loss over the samples of this virtual worker; on its first stage, else 0.
    samples : int
        Number of these samples.
    times : dict of str to float
        Times of the stage, named as in `StageReport`.
    """

    def __init__(
        self, stage: StageWorker, part: EpochPart, feed: Iterator[Batch] | None, hooks: PartHooks
    ) -> None:
        self._stage, self._part, self._feed, self._hooks = stage, part, feed, hooks
        self._network, self._transport, self._weights = stage.network, stage.transport, stage.waves
        self._wave = stage.layout.in_flight
        self.minibatches = part.minibatches
        self._count = part.minibatches_of(stage.worker, len(stage.heads))
        self._queue: StageQueue[TensorMessage] = StageQueue(stage.held)
        self._completed = self.samples = 0
        self._met: list[tuple[int, int, int]] = []
        self._saved: dict[int, tuple[int, dict[str, Tensor]]] = {}
        self.times = dict.fromkeys(("forward_s", "backward_s", "wave_wait_s", "idle_s"), 0.0)
        self.loss = 0.0
        # From here on, of first stages.
        self._clock = WspClock(Bounds(self._wave, stage.layout.distance))
        # Before its report, a server has at least the waves of the earlier parts.
        self._global = dict.fromkeys(stage.layout.servers, part.first_wave)
        self._pulling = part.first_wave
        self._decides = stage.transport.rank == 0
        self._started: dict[int, int] = {}
        self._frozen = self._asked_to_stop = self._knows_end = False

    def train(self) -> None:
        """Run all passes; then wait for the weights that contain all updates."""
        while self._completed < self._count or self._is_open:
            if self._feed is not None:
                self._admit(self._feed)
            self._take_all()
            self._advance()
        self._end()

    @property
    def waves(self) -> int:
        """Waves of the part: those with minibatches, and an empty one at the end."""
        return -(-self.minibatches // self._wave) + 1

    @property
    def _is_open(self) -> bool:
        """True while the last wave before a stop is unknown; no minibatch is admitted meanwhile."""
        return self._frozen or (self._asked_to_stop and not self._knows_end)

    def _advance(self) -> None:
        """Run one pass, or wait for a message; drop the tensor of the pass."""
        if (ready := self._queue.take(self._has_weights)) is None:
            self._wait()
            return
        began, (backward, message) = time.perf_counter(), ready
        (self._backward if backward else self._forward)(message)
        self.times["backward_s" if backward else "forward_s"] += time.perf_counter() - began
        self._stage.heartbeat()

    def _take_all(self) -> None:
        """Process all messages that have arrived."""
        while (message := receive(self._transport.inbox, 0)) is not None:
            _MESSAGES[message.kind](self, message)

    def _wait(self) -> None:
        clock, began = self._clock, time.perf_counter()
        blocked = clock.started - clock.completed < self._wave and not clock.may_start
        message = receive(self._transport.inbox, POLL_S)
        waits_for = "wave_wait_s" if blocked and clock.started < self._count else "idle_s"
        self.times[waits_for] += time.perf_counter() - began
        self._stage.heartbeat()
        if message is not None:
            _MESSAGES[message.kind](self, message)

    def _on_pass(self, message: TensorMessage) -> None:
        if message.kind == FORWARD:
            self._weights.ask(TRAIN, message.fields["pulled"])
        self._queue.add(message, backward=message.kind == BACKWARD)

    def _on_pull(self, message: TensorMessage) -> None:
        self._weights.ask(TRAIN, message.fields["waves"])

    def _on_weights(self, message: TensorMessage) -> None:
        self._weights.take(message)
        waves = message.fields["waves"]
        if message.fields["purpose"] == SAVE and self._weights.has(SAVE, waves):
            minibatch, arrays = self._saved.pop(waves)
            names = self._network.weight_names
            arrays.update(zip(names, self._weights.received(SAVE, waves), strict=True))
            self._hooks.save(minibatch, arrays)

    def _on_finish(self, message: TensorMessage) -> None:
        if message.fields["part"] == self._part.number:
            self.minibatches = message.fields["minibatches"]
            self._count = min(self._count, self.minibatches)
        self._knows_end, self._frozen = True, False

    def _has_weights(self, ready: TensorMessage) -> bool:
        pulled = ready.fields["pulled"]
        return pulled <= self._weights.pulled or self._weights.has(TRAIN, pulled)

    def _forward(self, ready: TensorMessage) -> None:
        minibatch, pulled = ready.fields["minibatch"], ready.fields["pulled"]
        self._weights.adopt(pulled)
        self._met.append((minibatch, self._completed, self._weights.pulled - self._part.first_wave))
        x, y = ready.tensors
        # No name for the version: the update would copy all weights while it is in use.
        if self._stage.is_last:
            loss, gradient = self._network.forward_backward(minibatch, self._network.version(), x, y)
            self._return(ready, gradient, loss)
        else:
            activations = self._network.forward(minibatch, self._network.version(), x)
            following = self._stage.ranks[self._stage.stage + 1]
            self._transport.send(following, FORWARD, (activations, y), **ready.fields)

    def _backward(self, ready: TensorMessage) -> None:
        gradient = self._network.backward(ready.fields["minibatch"], ready.tensors[0])
        self._return(ready, gradient, ready.fields["loss"])

    def _return(self, ready: TensorMessage, gradient: PassedTensor | None, loss: float) -> None:
        """Send the gradient to the waiting previous stage; then complete the minibatch."""
        fields = {name: ready.fields[name] for name in ("minibatch", "samples", "saves")}
        if gradient is not None:
            before = self._stage.ranks[self._stage.stage - 1]
            self._transport.send(before, BACKWARD, (gradient,), **fields, loss=loss)
        self._network.update(fields["minibatch"])
        self._queue.release()
        self._completed += 1
        self.samples += fields["samples"]
        if self._completed % self._wave == 0:
            self._end_wave(self._completed // self._wave - 1)
        if fields["saves"] and self._stage.worker == 0:
            self._save(fields["minibatch"])
        if self._feed is None:
            return
        self._clock = self._clock.complete()
        if not self._weights.shares:
            # A single virtual worker's weights are the global ones.
            self._clock = self._clock.pull(self._clock.waves)
        self.loss += loss * fields["samples"]
        self._hooks.on_step(self._completed, loss)

    def _end_wave(self, wave: int) -> None:
        self._weights.push(self._part.first_wave + wave)
        if not self._met:
            return
        numbers, completed, pulled = zip(*self._met, strict=True)
        self._met.clear()
        stage, part = self._stage, self._part
        stage.log(
            WaveRecord(part.epoch, part.position, stage.worker, stage.stage, numbers[0], completed, pulled)
        )

    def _save(self, minibatch: int) -> None:
        """Save the state at the end of a wave, with the weights that contain this wave of all workers."""
        # With several virtual workers, the servers send these weights.
        left_out = self._network.weight_names if self._weights.shares else ()
        arrays = {name: each.copy() for name, each in self._network.save().items() if name not in left_out}
        if not self._weights.shares:
            self._hooks.save(minibatch, arrays)
            return
        waves = self._part.first_wave + minibatch // self._wave
        self._saved[waves] = minibatch, arrays
        self._weights.ask(SAVE, waves)

    def _end(self) -> None:
        """Send the remaining waves, some of them empty, and take over the common weights."""
        for wave in range(self._completed // self._wave, self.waves - 1):
            self._end_wave(wave)
        end = self._part.first_wave + self.waves
        self._weights.push_statistics(end - 1, self.samples)
        self._weights.ask(END, end)
        while not self._weights.has(END, end) or self._saved:
            self._wait()
        self._weights.finish(end)

    def _admit(self, feed: Iterator[Batch]) -> None:
        """Start all minibatches that may start, and request the weights that the next ones need."""
        if self._decides and not self._asked_to_stop and self._hooks.should_stop():
            # All first stages admit no more; then all stop after the last wave that any has begun.
            self._asked_to_stop = True
            for head in self._stage.heads:
                self._transport.send(head, FREEZE, part=self._part.number)
        self._pull()
        while not self._is_open and self._clock.started < self._count and self._clock.may_start:
            self._start(feed)

    def _start(self, feed: Iterator[Batch]) -> None:
        (x, y), chunk = next(feed)
        self._clock = self._clock.start()
        minibatch = self._clock.started
        ends_wave = minibatch % self._wave == 0 and minibatch < self.minibatches
        fields = {
            "minibatch": minibatch,
            "samples": len(chunk.numbers),
            "pulled": self._part.first_wave + self._clock.pulled,
            "saves": self._decides and ends_wave and self._hooks.should_save(),
        }
        # The loader reuses its memory for the next batch.
        tensors = x.copy(), y.copy()
        self._queue.add(TensorMessage(self._transport.rank, FORWARD, fields, tensors), backward=False)

    def _pull(self) -> None:
        first = self._part.first_wave
        now = min(self._global.values(), default=first)
        wanted = first + self._clock.waves_wanted
        is_needed = self._clock.must_pull and self._clock.started < self._count
        if is_needed and self._pulling < wanted <= now:
            self._pulling = now
            for rank in self._stage.ranks[1:]:
                self._transport.send(rank, PULL, waves=now)
            self._weights.ask(TRAIN, now)
        if self._weights.shares and self._weights.has(TRAIN, self._pulling):
            self._clock = self._clock.pull(self._pulling - first)

    def _on_clock(self, message: TensorMessage) -> None:
        self._global[message.sender] = max(self._global[message.sender], message.fields["waves"])

    def _on_freeze(self, message: TensorMessage) -> None:
        self._frozen = True
        self._transport.send(message.sender, FROZEN, part=self._part.number, started=self._clock.started)

    def _on_frozen(self, message: TensorMessage) -> None:
        self._started[message.sender] = message.fields["started"]
        if len(self._started) < len(self._stage.heads):
            return
        begun = -(-max(self._started.values()) // self._wave)
        minibatches = min(self._part.minibatches, begun * self._wave)
        for rank in (plan.rank for stages in self._stage.layout.workers for plan in stages):
            self._transport.send(rank, FINISH, part=self._part.number, minibatches=minibatches)


_MESSAGES = {
    FORWARD: StageRun._on_pass,
    BACKWARD: StageRun._on_pass,
    PULL: StageRun._on_pull,
    WEIGHTS: StageRun._on_weights,
    CLOCK: StageRun._on_clock,
    FREEZE: StageRun._on_freeze,
    FROZEN: StageRun._on_frozen,
    FINISH: StageRun._on_finish,
}
"""Methods of a run by kind of message; only first stages get clocks, freezes and their answers."""
