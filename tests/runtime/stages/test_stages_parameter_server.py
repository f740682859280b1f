"""Parameter servers, their clients, and the versions of their weights."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_chain import DenseChain
from stage_ranks import layout_of, run_ranks

from hetctl.runtime.stages.p2p_transport import TensorMessage, receive
from hetctl.runtime.stages.parameter_server import (
    CLOCK,
    END,
    FETCH,
    INIT,
    PUSH,
    TRAIN,
    WEIGHTS,
    GlobalWeights,
    WaveClient,
    WaveServer,
)
from hetctl.runtime.worker.group import LostPeerError

TWO = layout_of(2, 1, 1, in_flight=1)


def test_weights_are_sent_once_their_waves_are_there():
    def work(rank):
        transport, own = rank.transport, rank.transport.rank
        about = {"layer": 0, "worker": own}
        # Before the initial weights, as another virtual worker may be quicker.
        transport.send(0, PUSH, [np.full(3, own + 1.0)], **about, wave=0, samples=None)
        transport.send(0, FETCH, **about, waves=1, purpose=TRAIN)
        if own == 0:
            transport.send(0, INIT, [np.zeros(3)], layer=0)
        found = [receive(transport.inbox, 10) for _ in range(2)]
        (weights,) = [message for message in found if message.kind == WEIGHTS]
        (clock,) = [message for message in found if message.kind == CLOCK]
        return weights.tensors[0].tolist(), clock.fields["waves"]

    assert run_ranks(TWO, work) == [([3.0, 3.0, 3.0], 1)] * 2


def test_waves_before_the_initial_weights_stay_in_their_order():
    messages, sent = queue.SimpleQueue(), queue.SimpleQueue()
    transport = SimpleNamespace(
        rank=0, send=lambda *message, **fields: sent.put((message, fields)), fail=print
    )
    pushes = [
        TensorMessage(
            0, PUSH, {"layer": 0, "worker": 0, "wave": wave, "samples": None}, (np.full(2, 10.0**wave),)
        )
        for wave in range(3)
    ]
    fetch = TensorMessage(0, FETCH, {"layer": 0, "worker": 0, "waves": 3, "purpose": TRAIN})
    # One wave is there before the initial weights are, the next ones before they have been read.
    for message in (pushes[0], TensorMessage(0, INIT, {"layer": 0}, (np.zeros(2),)), *pushes[1:], fetch):
        messages.put(message)
    WaveServer(transport, messages, [0], [0]).close()
    *clocks, ((_, kind, (weights,)), fields) = [sent.get_nowait() for _ in range(sent.qsize())]
    assert [fields["waves"] for _, fields in clocks] == [1, 2, 3]
    assert (kind, fields["waves"], weights.tolist()) == (WEIGHTS, 3, [111.0, 111.0])


def test_statistics_are_means_over_the_samples_of_all():
    def work(rank):
        transport, own = rank.transport, rank.transport.rank
        about = {"layer": 0, "worker": own}
        if own == 0:
            transport.send(0, INIT, [], layer=0)
        transport.send(0, PUSH, [np.array([4.0 * own])], **about, wave=0, samples=10 + 20 * own)
        transport.send(0, FETCH, **about, waves=1, purpose=END)
        while (message := receive(transport.inbox, 10)).kind != WEIGHTS:
            pass
        return message.tensors[0].tolist()

    assert run_ranks(TWO, work) == [[3.0]] * 2


def test_a_failure_of_a_server_ends_the_wait_for_it():
    def work(rank):
        if rank.transport.rank == 0:
            rank.transport.send(0, INIT, [np.zeros(3)], layer=0)
            rank.transport.send(0, FETCH, layer=0, worker=0, waves=-1, purpose=TRAIN)
            with pytest.raises(LostPeerError, match="parameter server on rank 0 failed"):
                receive(rank.transport.inbox, 10)
        return "noticed"

    assert run_ranks(TWO, work, ends={1}) == ["noticed", None]


def test_nothing_is_asked_for_twice_or_after_the_end_of_a_part():
    sent = queue.SimpleQueue()
    transport = SimpleNamespace(rank=0, send=lambda _, kind, **fields: sent.put((kind, fields["purpose"])))
    client = WaveClient(DenseChain([2, 2]).build(range(1)), TWO, transport)
    client.ask(TRAIN, 0)  # of which it has begun
    client.ask(TRAIN, 1)
    client.ask(TRAIN, 1)
    client.ask(END, 3)
    client.ask(TRAIN, 2)
    assert [sent.get_nowait() for _ in range(sent.qsize())] == [(FETCH, TRAIN), (FETCH, END)]


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_a_version_has_its_waves_of_all_in_any_order(data, workers, waves):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    updates = {(w, c): [rng.standard_normal(3)] for w in range(workers) for c in range(waves)}
    sent = [0] * workers
    held = GlobalWeights([np.zeros(3)], workers)
    while any(count < waves for count in sent):
        worker = data.draw(st.sampled_from([w for w in range(workers) if sent[w] < waves]))
        held.push(worker, sent[worker], updates[worker, sent[worker]])
        sent[worker] += 1
        assert held.at(min(sent) + 1) is None
    expected = np.zeros(3)
    for wave in range(waves):
        assert np.array_equal(held.at(wave)[0], expected)
        for worker in range(workers):
            expected = expected + updates[worker, wave][0]
    assert np.array_equal(held.at(waves)[0], expected)


def test_versions_that_all_have_left_behind_are_forgotten():
    held = GlobalWeights([np.zeros(2)], 2)
    for wave in range(3):
        for worker in (0, 1):
            held.push(worker, wave, [np.ones(2)])
    held.note_read(0, 2)
    assert held.at(0) is not None
    held.note_read(1, 1)
    with pytest.raises(KeyError):
        held.at(0)
    assert np.array_equal(held.at(1)[0], [2.0, 2.0])


def test_a_wave_may_be_empty_but_not_missing():
    held = GlobalWeights([np.zeros(2)], 2)
    held.push(0, 0, [])
    held.push(1, 0, [np.ones(2)])
    assert np.array_equal(held.at(1)[0], [1.0, 1.0])
    with pytest.raises(ValueError, match="after 1 waves"):
        held.push(0, 2, [])
