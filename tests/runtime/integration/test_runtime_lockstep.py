"""Members in lockstep (FLEET, section 5): one stream, prepared once, in the same order for all."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing import get_context

import pytest
from numbered_samples import NumberedSamples, check_samples

from hetctl.model.run import LOCKSTEP
from hetctl.model.site import Timeouts
from hetctl.runtime.data import loaders
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.input_pipeline import Sharing, open_pipeline
from hetctl.runtime.data.round_inputs import Lockstep
from hetctl.runtime.data.sampler import Stream, epoch_order
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.worker.group import Group

SAMPLES, SEED = 50, 99
QUICK = {"check_s": 0.1, "help_s": 0.2}


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(loaders, "PREFETCH_SAMPLES", 24)
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


class Watched:
    """Loader that records its batches."""

    def __init__(self, loader, seen):
        self.loader, self.seen, self.samples = loader, seen, loader.samples

    def batches(self, *arguments):
        for (x, y), chunk in self.loader.batches(*arguments):
            self.seen.append(
                (x.copy(), y.copy(), chunk.order, chunk.start, chunk.numbers.tolist(), time.monotonic())
            )
            yield (x, y), chunk


class Crew:
    """Members as processes; they send their batches through a queue."""

    def __init__(
        self, log, batches, chunk, *, largest=None, rank_of=None, num_workers=None, patience_s=60.0, **limits
    ):
        self.context = get_context("fork")
        self.log, self.batches, self.chunk = log, batches, chunk
        self.largest = largest or max(batches)
        timeouts = Timeouts(lockstep_s=patience_s, **limits)
        self.sharing = Sharing(LOCKSTEP, "run", timeouts=timeouts, **QUICK)
        self.num_workers = num_workers or [None] * len(batches)
        self.rank_of = rank_of or [(0, 1)] * len(batches)
        self.results = self.context.Queue()
        self.processes = {}

    def start(self, reader, *, epochs=2, start=0, order=None, pause_s=0.0, die_after=None, gate=None):
        """Start a member; it waits for `gate`, if there is one, before its last epoch."""
        arguments = (reader, epochs, start, order, pause_s, die_after, gate)
        self.processes[reader] = self.context.Process(target=self._train, args=arguments)
        self.processes[reader].start()

    def _train(self, reader, epochs, start, order, pause_s, die_after, gate):
        rank, ranks = self.rank_of[reader]
        together = Lockstep("r.ring", SEED, self.chunk, self.largest, reader, len(self.batches))
        with ExitStack() as stack:
            open_loader = open_pipeline(NumberedSamples(SAMPLES, self.log), self.sharing, stack)
            stream = Stream(SAMPLES, self.batches[reader], reader, rank=rank, ranks=ranks)
            loader = open_loader(stream, self.num_workers[reader], together)
            stack.callback(loader.close)
            seen = []
            for epoch in range(1, epochs + 1):
                if gate is not None and epoch == epochs:
                    assert gate.wait(60)
                watched = Watched(loader, seen)
                for _ in Batches(watched, epoch, start, Group(), lambda: False, order=order):
                    time.sleep(pause_s)
                    if len(seen) == die_after:
                        os.kill(os.getpid(), signal.SIGKILL)
                start, order = 0, None
            self.results.put((reader, seen))

    def seen(self):
        """Return the batches of each member that was not killed."""
        alive = [process for process in self.processes.values() if process.exitcode in (None, 0)]
        found = dict(self.results.get(timeout=60) for _ in alive)
        for process in self.processes.values():
            process.join()
        return found


def check(seen, order):
    """Compare a member's batches of an epoch with its order."""
    mine = [part for part in seen if part[2] == order]
    assert [n for part in mine for n in part[4]] == epoch_order(SAMPLES, *order).tolist()
    for x, y, _, _, numbers, _ in mine:
        check_samples(x, y, numbers, *order)


def test_members_wait_for_a_slow_one_without_limit(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8, samples_s=1.0)
    gate = crew.context.Event()
    # 2,048 samples are prepared ahead, and the slow member keeps them before its second epoch.
    crew.start(0, epochs=60)
    crew.start(1, epochs=2, gate=gate)
    time.sleep(4)
    gate.set()
    seen = crew.seen()
    assert {part[2][1] for part in seen[0]} == set(range(1, 61))
    held = max(later[5] - part[5] for part, later in pairwise(seen[0]))
    assert held > 2 * crew.sharing.timeouts.samples_s


@pytest.mark.parametrize(("batches", "chunk"), [([8, 8, 8], 8), ([4, 8, 16], 4), ([6, 10, 50], 8)])
def test_all_members_see_the_same_samples_in_the_same_order(tmp_path, batches, chunk):
    crew = Crew(tmp_path / "log", batches, chunk)
    for reader in range(3):
        crew.start(reader, epochs=3)
    for reader, seen in crew.seen().items():
        for epoch in (1, 2, 3):
            check(seen, (SEED, epoch))
        assert {len(part[4]) for part in seen} <= {batches[reader], SAMPLES % batches[reader]}
    # Three members, three epochs; some of what comes after those has been prepared ahead.
    assert max(NumberedSamples(SAMPLES, tmp_path / "log").prepared()) < 3 * 3


def test_the_ranks_of_a_member_have_shares_of_the_same_batches(tmp_path):
    crew = Crew(tmp_path / "log", [16, 16, 8], 8, rank_of=[(0, 2), (1, 2), (0, 1)])
    for reader in range(3):
        crew.start(reader, epochs=1)
    seen = crew.seen()
    pairs = zip(seen[0], seen[1], strict=True)
    together = [(*one[:2], one[2], one[3], [*one[4], *other[4]]) for one, other in pairs]
    order = epoch_order(SAMPLES, SEED, 1).tolist()
    assert [part[4] for part in together] == [order[start : start + 16] for start in range(0, SAMPLES, 16)]
    check(seen[2], (SEED, 1))


def test_an_interrupted_member_joins_after_its_own_epoch(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8)
    crew.start(0, epochs=12, pause_s=0.02)
    crew.start(1, epochs=3, start=24, order=(5, 7))
    seen = crew.seen()
    rest = [part for part in seen[1] if part[2] == (5, 7)]
    assert [n for part in rest for n in part[4]] == epoch_order(SAMPLES, 5, 7)[24:].tolist()
    later = list(dict.fromkeys(part[2] for part in seen[1] if part[2] != (5, 7)))
    assert [epoch - later[0][1] for _, epoch in later] == [0, 1]
    for order in later:
        check(seen[1], order)


@pytest.mark.parametrize("die_after", [1, 5, 20])
def test_a_member_that_dies_does_not_hold_up_the_others(tmp_path, die_after):
    crew = Crew(tmp_path / "log", [8, 8, 8], 8)
    crew.start(0, epochs=20, die_after=die_after)
    for reader in (1, 2):
        crew.start(reader, epochs=20)
    while crew.processes[0].exitcode is None:
        time.sleep(0.01)
    found = crew.seen()
    assert sorted(found) == [1, 2]
    for seen in found.values():
        for epoch in range(1, 21):
            check(seen, (SEED, epoch))


def test_one_preprocessor_serves_all_members(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8, 8], 8, num_workers=[0, 1, 0])
    for reader in (0, 2):
        crew.start(reader, epochs=3, start=24 * (reader == 2), order=(5, 7) if reader == 2 else None)
    crew.start(1, epochs=3)
    for reader, seen in crew.seen().items():
        for epoch in (1, 2) if reader == 2 else (1, 2, 3):
            check(seen, (SEED, epoch))


@pytest.mark.parametrize("die_after", [1, 20])
def test_an_idle_preprocessor_takes_over_when_no_other_prepares(tmp_path, die_after):
    crew = Crew(tmp_path / "log", [8, 8], 8, num_workers=[1, 0])
    crew.start(0, epochs=20, die_after=die_after)
    crew.start(1, epochs=20)
    crew.processes[0].join()
    check(crew.seen()[1], (SEED, 20))


def test_preprocessors_leave_a_ring_in_use_for_another_one(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8, num_workers=[1, 0])
    gate = crew.context.Event()
    crew.start(1, epochs=30, pause_s=0.005, gate=gate)
    with ExitStack() as stack:
        open_loader = open_pipeline(
            NumberedSamples(SAMPLES, tmp_path / "log"), Sharing(LOCKSTEP, "run", **QUICK), stack
        )
        stream = Stream(SAMPLES, 8, 0)
        for ring, readers in (("r.ring", 2), ("next.ring", 1)):
            loader = open_loader(stream, 1, Lockstep(ring, SEED, 8, 8, 0, readers))
            seen = []
            list(Batches(Watched(loader, seen), 1, 0, Group(), lambda: False))
            check(seen, (SEED, 1))
            loader.close()
        gate.set()
        check(crew.seen()[1], (SEED, 30))


def test_the_slowest_member_sets_the_pace_until_it_leaves(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8)
    crew.start(0, epochs=1, pause_s=0.1)  # seven batches, and leaves
    crew.start(1, epochs=30)
    seen = crew.seen()
    check(seen[0], (SEED, 1))
    check(seen[1], (SEED, 30))
    slow, fast = ([part[5] for part in seen[reader]] for reader in (0, 1))
    # The fourth batch comes when the first has left the ring of three slots, and so on.
    assert all(later > earlier for later, earlier in zip(fast[3:7], slow, strict=False))


def test_an_absent_member_is_awaited_for_a_limited_time(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8, patience_s=0.5)
    crew.start(0, epochs=100)
    check(crew.seen()[0], (SEED, 100))


def test_the_last_reader_removes_the_ring_from_a_folder_in_use(tmp_path):
    crew = Crew(tmp_path / "log", [8, 8], 8)
    with node_folder.node_folder("run") as folder:  # as ranks do that stay for the next round
        for reader in range(2):
            crew.start(reader)
        assert set(crew.seen()) == {0, 1}
        assert list(folder.glob("*.ring")) == []
