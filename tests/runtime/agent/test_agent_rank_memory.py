"""Memory of a node: limits, kills counted by control groups, and ranks above their share."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.agent.messages import Overuse
from hetctl.runtime.agent.rank_memory import (
    MemoryUse,
    MemoryWatch,
    bytes_with_commands,
    limited_groups,
    machine_memory,
    most_above,
    oom_kills,
    private_bytes,
    remove_shared_files,
)
from hetctl.storage.processes import commands_below

MIB = 2**20
VERSIONS = {
    "version 2": ("0::/job/step\n", "job/step/memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n"),
    "version 1": (
        "5:cpuset:/\n4:memory:/job/step\n0::/\n",
        "memory/job/step/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    ),
}
UNLIMITED = "9223372036854771712"
LIMITS = {
    "version 2": (
        "0::/job/step\n",
        {
            "job/memory.max": "1000",
            "job/memory.current": "960",
            "job/memory.stat": "anon 800\ninactive_file 100\n",
            "job/step/memory.max": "max",
            "job/step/memory.current": "950",
        },
    ),
    "version 1": (
        "4:memory:/job/step\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": "1000",
            "memory/job/memory.usage_in_bytes": "960",
            "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            "memory/job/step/memory.limit_in_bytes": UNLIMITED,
            "memory/job/step/memory.usage_in_bytes": "950",
        },
    ),
}


@pytest.mark.parametrize(("membership", "counter", "text"), VERSIONS.values(), ids=VERSIONS)
def test_kills_of_the_own_group_are_counted(tmp_path, membership, counter, text):
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / counter).parent.mkdir(parents=True)
    (tmp_path / counter).write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 2


def test_without_control_groups_nothing_is_counted(tmp_path):
    assert oom_kills(tmp_path / "none", tmp_path) == 0
    (tmp_path / "cgroup").write_text("0::/\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    assert list(limited_groups(tmp_path / "none", tmp_path)) == []
    assert list(limited_groups(tmp_path / "cgroup", tmp_path)) == []


def test_counting_kills_on_this_machine_raises_no_error():
    assert isinstance(oom_kills(), int)


@pytest.mark.parametrize(("membership", "files"), LIMITS.values(), ids=LIMITS)
def test_the_limit_may_be_that_of_a_group_around_the_own_one(tmp_path, membership, files):
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    memories = {group.limit: group.memory() for group in limited_groups(tmp_path / "cgroup", tmp_path)}
    assert memories.pop(1000) == MemoryUse(860, 1000)  # files that are only kept for later do not count
    assert all(limit == int(UNLIMITED) for limit in memories)


def test_the_memory_of_the_machine_is_what_is_not_available(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 300 kB\nCached: 9 kB\n"
    )
    assert machine_memory(tmp_path) == MemoryUse(700 * 1024, 1000 * 1024)
    here = machine_memory()
    assert 0 < here.used < here.limit


def test_shared_memory_and_files_are_no_ranks_own(tmp_path):
    before = private_bytes(os.getpid())
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(64 * MIB)
        with mmap.mmap(file.fileno(), 64 * MIB) as of_file, mmap.mmap(-1, 64 * MIB) as shared:
            for memory in (of_file, shared):
                memory[:] = b"x" * (64 * MIB)
            assert private_bytes(os.getpid()) - before < 96 * MIB
    own = b"x" * (128 * MIB)
    assert private_bytes(os.getpid()) - before > 120 * MIB
    del own


FORKS = """
import os, sys, time
os.setsid()
kept = b"x" * {size}
for _ in range(3):
    if not os.fork():
        time.sleep(1000)
print("has it", flush=True)
time.sleep(1000)
"""
"""A command whose processes share its memory until they write to it."""
STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {command!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print("has it", flush=True)
try:
    time.sleep(1000)
finally:
    child.kill()
"""


def test_the_command_of_a_rank_counts_for_it_once(hoard):
    watch = MemoryWatch(200 * MIB, 2)
    pids = {0: hoard(HOARD.format(150 * MIB)), 1: hoard(STARTS.format(command=FORKS.format(size=250 * MIB)))}
    gpu, overuse = watch.check(pids, {})
    assert (gpu, overuse.share) == (1, 200 * MIB)
    assert 250 * MIB < overuse.peak < 320 * MIB


def test_a_command_that_another_process_has_forked_counts_for_its_rank(hoard):
    rank, other = hoard(HOARD.format(1)), hoard(STARTS.format(command=FORKS.format(size=250 * MIB)))
    alone, both = (bytes_with_commands([rank], forked)[rank] for forked in ({}, {rank: other}))
    assert both - alone > 250 * MIB


def test_what_a_rank_starts_in_its_own_session_does_not_count(hoard):
    pid = hoard(STARTS.format(command=HOARD.format(250 * MIB)))
    assert bytes_with_commands([pid], {})[pid] == private_bytes(pid) < 100 * MIB


def test_an_ended_process_has_no_private_memory():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert private_bytes(process.pid) == 0


FULL, ROOM = MemoryUse(96, 100), MemoryUse(95, 100)


@pytest.mark.parametrize(
    ("private", "memories", "ended"),
    [
        ({0: 30, 1: 60, 2: 50}, [ROOM, FULL], (1, Overuse(60, 40))),
        ({0: 30, 1: 60, 2: 50}, [ROOM, ROOM], None),
        ({0: 40, 1: 40}, [FULL], None),
        ({0: 41}, [FULL], (0, Overuse(41, 40))),
        ({}, [FULL], None),
        ({0: 90}, [], None),
    ],
)
def test_the_rank_most_above_its_share_ends_if_memory_is_full(private, memories, ended):
    assert most_above(private, 40, memories) == ended


def test_of_ranks_that_share_a_slot_the_largest_ends_if_together_they_are_above_its_share():
    full = [MemoryUse(99, 100)]
    assert most_above({0: 30, 4: 25, 1: 35}, 40, full, 4) == (0, Overuse(30, 40))
    assert most_above({0: 30, 5: 4, 1: 35}, 40, full, 4) is None


@given(
    private=st.dictionaries(st.integers(0, 7), st.integers(0, 1000)),
    share=st.integers(1, 500),
    memories=st.lists(st.builds(MemoryUse, st.integers(0, 2000), st.integers(1, 1000))),
)
def test_no_rank_is_ended_within_its_share_or_with_free_memory(private, share, memories):
    found = most_above(private, share, memories)
    if found:
        gpu, overuse = found
        assert overuse == Overuse(private[gpu], share)
        assert share < overuse.peak == max(private.values())
        assert any(memory.used > 0.95 * memory.limit for memory in memories)
    elif any(memory.nearly_full for memory in memories):
        assert all(used <= share for used in private.values())


HOARD = "import sys, time; kept = b'x' * {}; print('has it', flush=True); time.sleep(1000)"


@pytest.fixture
def hoard():
    """Start a program that prints a line once it holds its memory; return its process."""
    made = []

    def make(program):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, preexec_fn=os.setpgrp
        )
        made.append(process)
        process.stdout.readline()
        return process.pid

    yield make
    commands = commands_below((process.pid for process in made), {}).values()
    for process in made:
        os.killpg(process.pid, signal.SIGKILL)
    for pid in set().union(*commands):
        os.kill(pid, signal.SIGKILL)
    for process in made:
        process.communicate()


def test_a_process_above_its_share_is_found_if_the_sum_is_high(hoard):
    watch = MemoryWatch(200 * MIB, 2)
    pids = {0: hoard(HOARD.format(20 * MIB)), 1: hoard(HOARD.format(250 * MIB))}
    assert watch.check(pids, {}) is None  # one may have more as long as the other has less
    pids[0] = hoard(HOARD.format(150 * MIB))
    gpu, overuse = watch.check(pids, {})
    assert (gpu, overuse.share) == (1, 200 * MIB)
    assert 250 * MIB < overuse.peak < 300 * MIB
    assert MemoryWatch(2**50, 2).check(pids, {}) is None


def test_no_share_is_larger_than_the_machine_allows():
    assert MemoryWatch(2**50, 4)._share <= machine_memory().limit // 4


def test_files_of_the_process_alone_are_removed(tmp_path):
    user = f"{os.getuid():x}"
    own = ["torch_300_17_0", "torch_300_18_1", f"cuda.shm.{user}.12c.1"]
    others = [
        "torch_3001_17_0",
        f"cuda.shm.{user}.12c1.1",
        "cuda.shm.fff.12c.1",
        "torch_30_300_0",
        "hetctl-300",
    ]
    for name in own + others:
        (tmp_path / name).touch()
    remove_shared_files(300, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    remove_shared_files(300, tmp_path / "none")
