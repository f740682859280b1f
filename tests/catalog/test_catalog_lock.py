from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.catalog import lock
from hetctl.catalog.lock import Holder, ProjectLock
from hetctl.model.errors import BadInputError, LockedError
from hetctl.model.serialization import encode
from hetctl.storage.processes import HostBoot, Process

# Tries to take the lock on each line of its input; what it has it gives back on the next line.
CONTENDER = """
import sys
from pathlib import Path
from hetctl.catalog.lock import ProjectLock
from hetctl.model.errors import LockedError

path = Path(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    lock = ProjectLock(path, "hetctl submit")
    try:
        with lock:
            print("won", flush=True)
            sys.stdin.readline()
    except LockedError as error:
        print("lost", error.message, flush=True)
        sys.stdin.readline()
    print("done", flush=True)
"""


class Contender:
    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", CONTENDER, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.answers = self.process.stdout
        assert self.hear() == "ready"

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        return self.answers.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "lock"


@pytest.fixture
def two(path: Path) -> Iterator[tuple[Contender, Contender]]:
    with ExitStack() as stack:
        contenders = (Contender(path), Contender(path))
        for contender in contenders:
            stack.callback(contender.end)
        yield contenders


@pytest.fixture
def dead() -> Process:
    process = subprocess.Popen(["sleep", "60"])
    identity = Process.of(process.pid)
    process.kill()
    process.wait()
    return identity


def put(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def put_holder(path: Path, process: Process, **machine: str) -> None:
    holder = Holder(replace(HostBoot.this(), **machine), process, "hetctl submit", 0.0)
    put(path, json.dumps(encode(holder)))


def pid_in(path: Path) -> int:
    return int(json.loads(path.read_text())["process"]["pid"])


def contend(contenders: tuple[Contender, Contender]) -> list[str]:
    for contender in contenders:
        contender.tell()
    answers = [contender.hear().split()[0] for contender in contenders]
    for contender in contenders:
        contender.tell()
    assert [contender.hear() for contender in contenders] == ["done", "done"]
    return sorted(answers)


def test_the_lock_names_its_holder_and_leaves_nothing(path: Path) -> None:
    before = os.umask(0)
    try:
        with ProjectLock(path, "hetctl plan"):
            text = json.loads(path.read_text())
            assert text["machine"]["host"] == socket.gethostname()
            assert pid_in(path) == os.getpid()
            assert text["command"] == "hetctl plan"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert list(path.parent.iterdir()) == [path]
    finally:
        os.umask(before)
    assert list(path.parent.iterdir()) == []


def test_the_second_to_come_is_told_who_was_first(path: Path) -> None:
    with ProjectLock(path, "hetctl submit"):
        held = path.read_text()
        with pytest.raises(LockedError) as caught, ProjectLock(path, "hetctl plan"):
            pytest.fail("two hold the lock")
        who = f"`hetctl submit` (process {os.getpid()} on host {socket.gethostname()}, since "
        assert who in caught.value.message
        assert caught.value.exit_code == 6
        assert path.read_text() == held
        assert list(path.parent.iterdir()) == [path]


def test_a_lock_that_is_released_in_time_is_taken(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as first:
        first.enter_context(ProjectLock(path, "hetctl submit"))
        release = threading.Timer(1.5, first.pop_all().close)
        release.start()
        with ProjectLock(path, "hetctl plan", patience_s=60.0):
            assert json.loads(path.read_text())["command"] == "hetctl plan"
        release.join()
    assert len(caplog.messages) == 1
    assert "`hetctl submit`" in caplog.messages[0]
    assert "waiting up to 60 s" in caplog.messages[0]
    assert list(path.parent.iterdir()) == []


def test_the_lock_is_given_back_after_an_error(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ProjectLock(path, "hetctl plan"):
        raise ZeroDivisionError
    assert not path.exists()


def test_of_two_processes_exactly_one_wins(two: tuple[Contender, Contender], path: Path) -> None:
    for _ in range(20):
        assert contend(two) == ["lost", "won"]
        assert list(path.parent.iterdir()) == []


def test_of_two_processes_exactly_one_takes_over_a_stale_lock(
    two: tuple[Contender, Contender], path: Path, dead: Process
) -> None:
    for _ in range(20):
        put_holder(path, dead)
        assert contend(two) == ["lost", "won"]
        assert list(path.parent.iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(two: tuple[Contender, Contender], path: Path) -> None:
    killed, _ = two
    killed.tell()
    assert killed.hear() == "won"
    killed.process.send_signal(signal.SIGKILL)
    # Not waited for: until then it is a zombie, which holds nothing either.
    os.waitid(os.P_PID, killed.process.pid, os.WEXITED | os.WNOWAIT)
    assert pid_in(path) == killed.process.pid
    with ProjectLock(path, "hetctl submit"):
        assert pid_in(path) == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_a_stale_lock_taken_by_another_is_not_taken_again(
    path: Path, dead: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_holder(path, dead)
    first, second = ProjectLock(path, "hetctl submit"), ProjectLock(path, "hetctl plan")
    gone = Holder.gone.fget
    assert gone is not None

    def slow_to_judge(holder: Holder) -> bool:
        monkeypatch.setattr(Holder, "gone", property(gone))
        stale = gone(holder)
        # The other one has replaced the file since it was opened.
        path.unlink()
        first.__enter__()
        return stale

    monkeypatch.setattr(Holder, "gone", property(slow_to_judge))
    with pytest.raises(LockedError, match="hetctl submit"), second:
        pytest.fail("two hold the lock")
    assert json.loads(path.read_text())["command"] == "hetctl submit"
    first.__exit__(None, None, None)


def test_the_lock_of_another_host_holds_as_long_as_it_is_touched(path: Path, dead: Process) -> None:
    put_holder(path, dead, host="login-17")
    with pytest.raises(LockedError) as caught, ProjectLock(path, "hetctl plan"):
        pytest.fail("taken over")
    assert "on host login-17" in caught.value.message
    assert "if host login-17 is down" in caught.value.hint
    assert path.exists()


def test_a_lock_of_a_silent_host_is_taken_over_with_a_warning(
    path: Path, dead: Process, caplog: pytest.LogCaptureFixture
) -> None:
    put_holder(path, dead, host="login-17")
    silent = time.time() - lock.SILENT_S - 1
    os.utime(path, (silent, silent))
    with ProjectLock(path, "hetctl plan"):
        assert pid_in(path) == os.getpid()
    assert "on host login-17" in caplog.text
    assert "taken over" in caplog.text
    assert list(path.parent.iterdir()) == []


def test_a_held_lock_is_touched(path: Path) -> None:
    with ProjectLock(path, "hetctl plan", heartbeat_s=0.01):
        os.utime(path, (0, 0))
        end = time.monotonic() + 10
        while path.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        path.unlink()
        path.touch()
        os.utime(path, (0, 0))
        time.sleep(0.1)
        assert path.stat().st_mtime == 0, "a lock that is not ours was touched"


def test_a_lock_of_a_dead_process_with_a_reused_pid_is_taken(path: Path) -> None:
    living = Process.of(os.getppid())
    for process, boot in ((replace(living, started=1), {}), (living, {"boot": "another"})):
        put_holder(path, process, **boot)
        with ProjectLock(path, "hetctl plan"):
            assert pid_in(path) == os.getpid()


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0\0", '{"command": "hetctl submit", "since": 1}'])
def test_a_lock_that_names_nobody_does_not_lock_out(path: Path, text: str) -> None:
    put(path, text)
    with ProjectLock(path, "hetctl plan"):
        assert pid_in(path) == os.getpid()
    assert not path.exists()


@pytest.mark.parametrize("name", ["unlink", "open"])
def test_a_lock_left_while_the_disk_failed_is_taken_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """When it is given back, or as soon as it is taken; others have to wait for the end of this process."""
    owner = Path if name == "unlink" else os
    works = getattr(owner, name)

    def no_answer(file: Path, *how: object, **more: object) -> object:
        if file == path:
            raise OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown")
        return works(file, *how, **more)

    monkeypatch.setattr(owner, name, no_answer)
    with suppress(OSError), ProjectLock(path, "hetctl advance"):
        pass
    monkeypatch.undo()
    assert pid_in(path) == os.getpid()
    with ProjectLock(path, "hetctl advance"), pytest.raises(LockedError), ProjectLock(path, "hetctl plan"):
        pytest.fail("locked twice")
    assert not path.exists()


def test_only_our_own_lock_is_given_back(path: Path) -> None:
    with ProjectLock(path, "hetctl plan"):
        put_holder(path, Process.of(os.getppid()))
    assert pid_in(path) == os.getppid()


def test_a_home_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with (
        pytest.raises(BadInputError, match="cannot be written"),
        ProjectLock(tmp_path / "home" / "lock", "x"),
    ):
        pytest.fail("locked without a file")


def test_a_read_only_home_is_bad_input(folder: Path, make_read_only: Callable[[], None]) -> None:
    make_read_only()
    with pytest.raises(BadInputError, match="Permission denied"), ProjectLock(folder / "lock", "x"):
        pytest.fail("locked without a file")
