"""Order of the passes of a stage: as they became ready, within its memory."""

from __future__ import annotations

from hetctl.methods.pipeline.stage_queue import StageQueue


def queue_of(capacity, *items):
    queue = StageQueue(capacity)
    for item in items:
        queue.add(item, backward=item.startswith("b"))
    return queue


def test_passes_start_in_the_order_in_which_they_became_ready():
    queue = queue_of(3, "f2", "b1", "f3")
    assert [queue.take() for _ in range(4)] == [(False, "f2"), (True, "b1"), (False, "f3"), None]


def test_backward_passes_overtake_when_memory_is_full():
    queue = queue_of(1, "f1", "f2", "b0", "f3")
    assert queue.take() == (False, "f1")
    assert queue.take() == (True, "b0")
    assert queue.take() is None
    queue.release()
    assert queue.take() == (False, "f2")


def test_a_wait_for_weights_holds_up_later_forward_passes():
    queue = queue_of(2, "f1", "f2", "b0")
    assert queue.take(lambda item: item != "f1") == (True, "b0")
    assert queue.take(lambda item: item != "f1") is None
    assert queue.take() == (False, "f1")
