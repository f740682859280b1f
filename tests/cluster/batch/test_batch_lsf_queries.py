"""Queues, by answers of LSF."""

from hypothesis import given
from hypothesis import strategies as st

from hetctl.cluster.batch.lsf_queries import parse_queue
from hetctl.cluster.batch.queue_info import QueueFacts

LSF_QUEUE = """
QUEUE: normal
  -- For normal low priority jobs, running only if hosts are lightly loaded.

PARAMETERS/STATISTICS
PRIO NICE STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN SSUSP USUSP  RSV PJOBS
 30    0  Open:Active       -    -    -    -     0     0     0     0     0    0     0

DEFAULT LIMITS:
 RUNLIMIT
 15.0 min of hostA

MAXIMUM LIMITS:
 RUNLIMIT
 720.0 min of hostA

SCHEDULING PARAMETERS
"""


def test_the_maximum_of_a_queue_counts():
    assert parse_queue(LSF_QUEUE, "normal") == QueueFacts(True, None, 720 * 60)
    assert parse_queue(LSF_QUEUE.replace("Open:Active", "Closed:Inact"), "normal") == QueueFacts(
        False, None, 720 * 60
    )
    assert parse_queue(LSF_QUEUE.partition("MAXIMUM")[0], "normal") == QueueFacts(True)
    assert parse_queue("xyz: No such queue\n", "xyz") is None


@given(st.text(alphabet="QUEUE: mainRLIT.0123456789-\n", max_size=200))
def test_any_text_is_read_without_a_traceback(text):
    assert parse_queue(text, "main") is None or "main" in text
