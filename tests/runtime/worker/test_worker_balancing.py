"""Balanced batches: exchange of times and sizes, the leader's decisions, and the log of a long training."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from thread_groups import groups_of_threads

from hetctl.methods.balance.manager import LASTING, WINDOW, Observation
from hetctl.methods.balance.managers import dump_state, make_manager
from hetctl.methods.balance.observation_log import ManagerStart, json_line, logged, records_in, replay
from hetctl.methods.balance.predictors import learner
from hetctl.model.serialization import encode
from hetctl.model.training_settings import AUTO, FRAMEWORKS, ON, BalanceSettings
from hetctl.runtime.frameworks.packed_state import pack, unpack
from hetctl.runtime.worker.background_training import DUTY, BackgroundTraining
from hetctl.runtime.worker.balancing import WARM_UP, BalanceLog, Balancer, LeadingBalancer, logging_interval
from hetctl.runtime.worker.group import Group

CHUNK = 64
SETTINGS = BalanceSettings(ON, "curve", "memoryless")


class Timer:
    """Times of steps by a rate, as if they had been trained."""

    def __init__(self, seconds):
        self.seconds, self.step, self.balancer = seconds, None, None

    def begin(self, step):
        self.step = step

    def taken(self):
        if self.step is None:
            return []
        return [(self.step, self.seconds(self.step, self.balancer.batch_size))]


class Records:
    """Events and log of a leader."""

    def __init__(self):
        self.segments, self.iterations = [], []
        self.events = {"balance_started": [], "batch_sizes": [], "straggler": []}

    def write(self, kind, **data):
        self.events[kind].append(data)

    def add(self, record):
        (self.segments if isinstance(record, ManagerStart) else self.iterations).append(record)

    def flush(self):
        pass

    @property
    def reasons(self):
        return [event["reason"] for event in self.events["balance_started"]]


def run(
    speeds,
    steps,
    *,
    mode=ON,
    manager="curve",
    predictor="memoryless",
    sizes=None,
    state=(),
    left=10**9,
    types_differ=False,
    ends=lambda _: False,
    duty=DUTY,
):
    """Run ranks whose times follow `speeds`, until enough is recorded or for a number of steps.

    Return the sizes of each step by rank, records, and leader.
    """
    size = len(speeds)
    sizes = sizes or (CHUNK // size,) * size
    workers = tuple(f"node:{rank}" for rank in range(size))
    start = ManagerStart(BalanceSettings(mode, manager, predictor), workers, sizes, 0)
    records, seen = Records(), [[] for _ in speeds]
    ranks, timers = groups_of_threads(size), [Timer(own) for own in speeds]
    background = BackgroundTraining(duty)
    leader = LeadingBalancer(
        ranks[0], timers[0], start, records, records, background, types_differ=types_differ
    )
    leader.restore(dict(state))
    average = threading.Barrier(size)

    def train(rank):
        balancer = Balancer(ranks[rank], timers[rank], sum(sizes)) if rank else leader
        timers[rank].balancer = balancer
        for step in range(steps + 1):
            if balancer.before_step(rank == 0 and (step == steps or ends(records)), left):
                break
            seen[rank].append(balancer.sizes)
            assert balancer.batch_size == balancer.sizes[rank]
            average.wait(timeout=60)
        ranks[rank].barrier_and_close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    background.close()
    assert all(sizes == seen[0] for sizes in seen)
    return seen[0], records, leader


def speed(per_sample, launch=0.001):
    return lambda _step, batch: launch + per_sample * batch


@pytest.mark.parametrize("manager", ["curve", "cpu", "gpu"])
def test_ranks_agree_on_sizes_that_fit_their_speeds(manager):
    sizes, records, _ = run([speed(0.001), speed(0.003)], 150, manager=manager)
    assert all(sum(step) == CHUNK for step in sizes)
    # 48 and 16 samples take the same time.
    assert sizes[-1] == pytest.approx((48, 16), abs=2)
    assert records.reasons == ["balance: on"]
    assert all(
        sum(rank["batch"] for rank in event["ranks"]) == CHUNK for event in records.events["batch_sizes"]
    )


class Gpus:
    """GPU of each thread, with memory for 50 samples."""

    def __init__(self):
        self._own = threading.local()

    def hold(self, samples):
        self._own.peak = max(samples, self.peak_gpu_memory())

    def gpu_memory(self):
        return 50

    def peak_gpu_memory(self):
        return getattr(self._own, "peak", 0)

    def reset_peak_memory(self):
        self._own.peak = 0


@pytest.mark.parametrize("manager", ["curve", "cpu", "gpu"])
def test_a_rank_that_was_slow_gets_its_samples_back(manager, monkeypatch):
    for entry in FRAMEWORKS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    gpus = Gpus()
    monkeypatch.setitem(sys.modules, FRAMEWORKS["pytorch"].module, SimpleNamespace(FRAMEWORK=gpus))

    def slow_for_a_while(step, batch):
        gpus.hold(batch)
        return batch * (0.009 if 200 < step <= 400 else 0.001)

    def steady(_step, batch):
        gpus.hold(batch)
        return batch * 0.003

    sizes, *_ = run([slow_for_a_while, steady], 600, manager=manager)
    assert sizes[199] == pytest.approx((48, 16), abs=2)
    assert sizes[399] == pytest.approx((16, 48), abs=2)
    assert sizes[-1] == pytest.approx((48, 16), abs=2)


def test_equal_ranks_keep_equal_batches_in_auto_mode():
    sizes, records, leader = run([speed(0.001)] * 3, 200, mode=AUTO, sizes=(22, 22, 22))
    assert set(sizes) == {(22, 22, 22)}
    assert (records.reasons, leader.state()) == ([], {})
    assert [rank.worker for rank in leader.shares()] == ["node:0", "node:1", "node:2"]


def test_auto_mode_switches_on_when_a_rank_slows_down():
    def slowing(step, batch):
        return 0.001 * batch * (3 if step > 50 else 1)

    sizes, records, _ = run([speed(0.001, 0), slowing], 50 + WINDOW * (LASTING + 1) + 60, mode=AUTO)
    assert set(sizes[:50]) == {(32, 32)}
    assert sizes[-1] == pytest.approx((48, 16), abs=2)
    (reason,) = records.reasons
    assert reason.startswith("node:1 takes 0.096 s for its 32 samples, node:0 0.032 s")


def test_gpus_of_two_types_are_managed_from_the_first_step():
    sizes, records, _ = run([speed(0.001), speed(0.003)], 5, mode=AUTO, sizes=(48, 16), types_differ=True)
    assert sizes[0] == (48, 16)
    assert records.reasons == ["several types of GPU"]


def test_a_leader_goes_on_from_its_state_with_the_same_sizes():
    speeds = [speed(0.001), speed(0.003)]
    sizes, _, leader = run(speeds, 40)
    again, records, _ = run(speeds, 3, state=leader.state())
    assert again[0] == sizes[-1]
    assert records.reasons == []
    assert records.segments[0].continued > 20


@pytest.mark.parametrize("change", ["other workers", "another total"])
def test_a_state_of_another_group_is_not_used(change):
    _, _, leader = run([speed(0.001), speed(0.003)], 40)
    state, first = unpack(leader.state()), (32, 32)
    if change == "other workers":
        state["workers"] = ("node:7", "node:8")
    else:
        first = (40, 40)
    again, *_ = run(
        [speed(0.001), speed(0.003)],
        1,
        sizes=first,
        state=pack(state),
    )
    assert again[0] == first


def with_manager(**changed):
    """Return a state with a manager of which some parts are changed."""
    manager = dump_state(make_manager(SETTINGS, (32, 32)))
    manager["state"].update(changed)
    workers = ("node:0", "node:1")
    return {"settings": encode(SETTINGS), "workers": workers, "iterations": 9, "manager": manager}


class ProgramOfAnother:
    """An object whose pickle writes a file where it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["RUN_BY_PICKLE"]),)


UNREADABLE = {
    "nothing": lambda: {},
    "no structure": lambda: {"structure": np.frombuffer(b"[", np.uint8)},
    "deep structure": lambda: {"structure": np.frombuffer(b"[" * 10**5, np.uint8)},
    "a number": lambda: pack(3),
    "no manager": lambda: pack({**with_manager(), "manager": None}),
    "another class": lambda: pack({**with_manager(), "manager": {"class": "Popen", "state": {}}}),
    "another part": lambda: pack(with_manager(_noise=None)),
    "an additional part": lambda: pack(with_manager(more=1)),
    "other shapes": lambda: pack(with_manager(_launch=np.zeros(3))),
    "text for batches": lambda: pack(with_manager(batches="ab")),
    "a pickle": lambda: {"manager": np.frombuffer(pickle.dumps(ProgramOfAnother()), np.uint8)},
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_state_that_cannot_be_read_begins_anew(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_BY_PICKLE", str(tmp_path / "touched"))
    again, records, _ = run([speed(0.001), speed(0.003)], 2, state=UNREADABLE[name]())
    assert again[0] == (32, 32)
    assert records.reasons == ["balance: on"]
    assert not (tmp_path / "touched").exists()


def test_an_unchanged_state_is_continued():
    again, records, _ = run([speed(0.001), speed(0.003)], 2, state=pack(with_manager(batches=(40, 24))))
    assert (again[0], records.reasons) == ((40, 24), [])


def test_the_first_steps_and_smaller_chunks_do_not_count():
    _, records, _ = run([speed(0.001), speed(0.003)], WARM_UP + 1)
    assert len(records.iterations) <= 1
    _, records, _ = run([speed(0.001), speed(0.003)], 50, left=CHUNK - 1)
    assert records.iterations == []


def test_a_rank_that_cannot_give_more_is_reported_as_a_straggler():
    _, records, _ = run([speed(0.001), speed(1.0)], 120, manager="gpu")
    event = records.events["straggler"][0]
    assert (event["rank"]["worker"], event["rank"]["step_s"] > event["rank"]["batch"]) == ("node:1", True)
    assert "is the slowest" in event["message"]


def test_a_rank_without_a_timed_step_stops_no_other():
    """As with a ``train_fn`` that averages nothing in some steps."""

    class Silent(Timer):
        def taken(self):
            return []

    start = ManagerStart(BalanceSettings(ON, "cpu", "memoryless"), ("a:0", "b:0"), (32, 32), 0)
    ranks, records = groups_of_threads(2), Records()
    leader = LeadingBalancer(ranks[0], Silent(None), start, records, records, BackgroundTraining())
    balancers = leader, Balancer(ranks[1], Silent(None), CHUNK)
    other = threading.Thread(target=lambda: [balancers[1].before_step(False, CHUNK) for _ in range(5)])
    other.start()
    for _ in range(5):
        assert not balancers[0].before_step(False, CHUNK)
    other.join(timeout=60)
    assert records.iterations == []


def test_a_group_of_one_rank_has_no_reports():
    assert list(Group().reports(wait=True)) == []


@pytest.mark.parametrize("manager", ["curve", "cpu", "gpu"])
def test_a_log_over_two_jobs_repeats_to_the_same_sizes(manager):
    speeds = [speed(0.001), speed(0.003)]
    _, first, leader = run(speeds, 40, manager=manager)
    _, second, _ = run(speeds, 40, manager=manager, state=leader.state())
    log = [*first.segments, *first.iterations, *second.segments, *second.iterations]
    found = replay(records_in([json_line(record) for record in log]))
    assert (len(found.segments), found.difference) == (2, None)
    assert found.iterations == (*first.iterations, *second.iterations)


def adoptions(count):
    return lambda records: sum(bool(one.adopted) for one in records.iterations) >= count


def test_a_log_of_networks_in_the_background_is_repeated(monkeypatch):
    """The second job goes on with a training that had no result in the first one."""
    monkeypatch.setattr(learner, "LEARNS_FROM", 20)
    monkeypatch.setattr(learner, "PREDICTS_FROM", 40)

    def shaky(step, batch):
        time.sleep(0.002)
        return batch * (0.001 + 0.0005 * (step // 5 % 3))

    narx = {"manager": "cpu", "predictor": "narx", "sizes": (640, 640), "duty": 1e9}
    speeds = [shaky, speed(0.003)]
    _, first, leader = run(speeds, 10**5, **narx, ends=adoptions(3))
    _, second, _ = run(speeds, 10**5, **narx, state=leader.state(), ends=adoptions(2))
    assert second.segments[0].continued == len(first.iterations)
    log = [*first.segments, *first.iterations, *second.segments, *second.iterations]
    found = replay(records_in([json_line(record) for record in log]))
    assert (len(found.segments), found.difference) == (2, None)
    assert found.iterations == (*first.iterations, *second.iterations)


OF_LOG, BATCHES = BalanceSettings(ON, "curve"), (32, 32)
WORKERS = ("a:0", "b:0")
FULL_LOG_BYTES = 8000


@pytest.fixture
def log(tmp_path):
    return tmp_path / "balance" / "m.jsonl"


def train(log, manager, first, last, full_log_bytes=FULL_LOG_BYTES):
    """Log iterations of a manager as one process does."""
    recorder = BalanceLog(log, full_log_bytes)
    recorder.add(ManagerStart(OF_LOG, WORKERS, manager.batches, 3, first))
    for number in range(first, last):
        seen = [Observation(b, s * b) for b, s in zip(manager.batches, (0.001, 0.003), strict=True)]
        recorder.add(logged(float(number), number, seen, manager.update(seen)))
    recorder.flush()


def replayed(log):
    with log.open() as lines:
        return replay(records_in(lines))


def test_a_short_log_has_all_iterations(log):
    train(log, make_manager(OF_LOG, BATCHES, (), 3), 0, 100, full_log_bytes=10**6)
    found = replayed(log)
    assert (found.repeated, len(found.iterations), found.difference) == (100, 100, None)


def test_a_long_log_is_thinner_and_its_beginning_is_repeated(log):
    manager = make_manager(OF_LOG, BATCHES, (), 3)
    train(log, manager, 0, 5000)
    found = replayed(log)
    assert log.stat().st_size < 2 * FULL_LOG_BYTES
    assert found.difference is None
    whole = found.repeated
    assert 0.5 * FULL_LOG_BYTES < sum(map(len, log.read_text().splitlines()[:whole])) < FULL_LOG_BYTES
    times = [one.time for one in found.iterations]
    assert times[:whole] == [*range(whole)]
    gaps = [later - time for time, later in zip(times[whole:], times[whole + 1 :], strict=False)]
    assert gaps[0] == 16
    assert gaps[1:] == sorted(gaps[1:])
    assert max(gaps) > 16
    train(log, manager, 5000, 9000)
    assert log.stat().st_size < 2 * FULL_LOG_BYTES
    again = replayed(log)
    assert (again.repeated, again.iterations[: len(times)]) == (whole, found.iterations)
    assert again.difference is None


def test_intervals_double_and_end_at_some_thousands():
    sizes = [*range(0, 30 * 800, 800)]
    found = [logging_interval(size, 6400) for size in sizes]
    assert found[:8] == [1] * 8
    assert found[8:12] == [16, 32, 64, 128]
    assert found[-1] == found[-2] == 2**14
