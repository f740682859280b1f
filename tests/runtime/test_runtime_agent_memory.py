"""Kills for want of memory, as control groups count them."""

from __future__ import annotations

import pytest

from hetctl.runtime.agent.memory import oom_kills

VERSIONS = {
    "version 2": ("0::/job/step\n", "job/step/memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n"),
    "version 1": (
        "5:cpuset:/\n4:memory:/job/step\n0::/\n",
        "memory/job/step/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
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


def test_they_are_counted_on_this_machine():
    assert oom_kills() >= 0
