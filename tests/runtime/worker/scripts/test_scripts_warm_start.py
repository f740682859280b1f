"""Starts of a script by a warm Python: all that a script sees is as in a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from workbench import wait_for

from hetctl.model.ensemble import COMMAND, Ensemble, Functions, Member
from hetctl.model.interpreter import python_start
from hetctl.runtime.worker.scripts.command_process import CommandProcess
from hetctl.runtime.worker.scripts.warm_start import WarmPythons, pythons_ahead, start_warm, warm_python_of
from hetctl.storage.processes import Process

SEEN = """
import __main__, atexit, gc, json, os, pickle, signal, sys, threading
class Own: pass
assert pickle.loads(pickle.dumps(Own())).__class__ is Own is __main__.Own
open_ends = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
seen = dict(
    argv=sys.argv, orig=sys.orig_argv, path=sys.path, cwd=os.getcwd(), flags=str(sys.flags),
    env={name: value for name, value in os.environ.items() if not name.endswith("_FD")},
    name=__name__, file=__file__, spec=__spec__ and __spec__.name, package=__package__,
    globals=sorted(globals()),
    signals=[str(signal.getsignal(number)) for number in signal.valid_signals()],
    mask=str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    leads=os.getsid(0) == os.getpgrp() == os.getpid(), threads=threading.active_count(),
    gc=gc.isenabled(), cores=sorted(os.sched_getaffinity(0)), umask=os.umask(0o77),
    stdin=os.read(0, 1).decode(), buffered=sys.stdout.line_buffering,
    ends=sorted(os.readlink(end).split(":")[0] for end in open_ends if os.path.exists(end)),
)
atexit.register(lambda: print("at exit", flush=True))
threading.Timer(0.1, lambda: print("a thread")).start()
print(json.dumps(seen, sort_keys=True))
"""
ENDS = {
    "exit": ("import sys; sys.exit(3)", 3),
    "message": ("import sys; sys.exit('no data')", 1),
    "error": ("def inner():\n    raise ValueError('wrong')\ninner()", 1),
    "syntax": ("x = = 1", 1),
    "interrupt": ("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)", -2),
    "killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -9),
    "hook": ("import sys\nsys.excepthook = lambda *e: print(e[2].tb_lineno, file=sys.stderr)\n1/0", 1),
    "end": ("import hetctl; hetctl.report(epoch=1, val_loss=0.5)\nprint('done')", 0),
}
RANK = """
import sys, time
from pathlib import Path
from test_scripts_warm_start import Starts
starts = Starts(Path(sys.argv[1]), None)
process = starts.process([sys.executable, "count.py"], is_warm=True)
while True:
    process.ended()
    time.sleep(0.01)
"""


class Starts:
    """Starts of Python, and the output of each, as a rank has it."""

    def __init__(self, folder: Path, capfd) -> None:
        self.folder, self.capfd = folder, capfd
        self.pythons = WarmPythons()

    def process(self, words: list[str], *, is_warm: bool, modules=("decimal",), **variables: str):
        environment, warm = os.environ | variables, None
        if is_warm:
            python = warm_python_of(Member("a", preload=modules), words, self.folder)
            requests = self.pythons.requests.fileno()
            warm = partial(start_warm, python, words, self.folder, environment, requests)
        process = CommandProcess(words, self.folder, environment, 1.0, warm)
        if is_warm:
            self.pythons.serve(1)
        return process

    def run(self, *words: str, is_warm: bool, **more):
        """Return exit code, output, errors and reports of a start."""
        self.capfd.readouterr()
        with closing(self.process([sys.executable, *words], is_warm=is_warm, **more)) as process:
            reports: list[bytes] = []
            while (code := process.ended()) is None:
                reports.extend(process.reports(0.05))
            reports.extend(process.reports(0.0))
            errors = process.last_errors()
        return code, self.capfd.readouterr().out, errors, reports


@pytest.fixture
def starts(tmp_path, capfd):
    found = Starts(tmp_path, capfd)
    yield found
    found.pythons.close()


@pytest.mark.parametrize(
    "words",
    [
        ["-u", "see.py", "--a", "two words", ""],
        ["-W", "error", "inner/see.py", "-m"],
        ["-m", "inner.see", "x"],
        ["-I", "-X", "utf8", "./see.py"],
        ["-uBm", "inner.see"],
        ["-OO", "see.py"],
    ],
    ids=" ".join,
)
def test_a_script_sees_what_it_would_in_a_new_process(starts, tmp_path, words):
    (tmp_path / "inner").mkdir()
    for path in (tmp_path / "see.py", tmp_path / "inner" / "see.py"):
        path.write_text(SEEN)
    code, output, errors, _ = starts.run(*words, is_warm=False, MINE="new")
    assert code == 0, errors
    new, *end = sorted(output.splitlines(), reverse=True)
    for _ in range(2):
        code, output, errors, _ = starts.run(*words, is_warm=True, MINE="new")
        assert code == 0, errors
        warm, *ended = sorted(output.splitlines(), reverse=True)
        assert json.loads(warm) == json.loads(new)
        assert ended == end == ["at exit", "a thread"]


@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_as_in_a_new_process(starts, tmp_path, how):
    text, code = ENDS[how]
    (tmp_path / "end.py").write_text(text)
    new, *warm = (starts.run("end.py", is_warm=is_warm) for is_warm in (False, True, True))
    assert new[0] == code
    assert warm == [new, new]


def test_modules_are_imported_once_and_draw_other_numbers(starts, tmp_path):
    (tmp_path / "slow.py").write_text("import os; pid = os.getpid(); print('imported')")
    (tmp_path / "draw.py").write_text(
        "import numpy, os, random, slow\nprint(slow.pid, os.getpid(), numpy.random.rand(), random.random())"
    )
    modules = ("slow", "nowhere", "numpy")
    code, output, errors, _ = starts.run("draw.py", is_warm=True, modules=modules)
    assert code == 0
    assert "nowhere cannot be imported ahead: ModuleNotFoundError: No module named" in errors
    said, first = output.splitlines()
    assert said == "imported"
    second = starts.run("draw.py", is_warm=True, modules=modules)[1]
    imported, *own = zip(first.split(), second.split(), strict=True)
    assert imported[0] == imported[1]
    assert all(one != other for one, other in own)


def test_a_script_that_is_stopped_before_it_begins_leaves_its_python_to_others(starts, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
    )
    (tmp_path / "see.py").write_text("import os; print(os.getppid()); open(f'begun-{os.getpid()}', 'w')")
    with closing(starts.process([sys.executable, "see.py"], is_warm=True, modules=("slow",))) as process:
        process.stop()
        while (code := process.ended()) is None:
            process.escalate()
            list(process.reports(0.05))
    assert code == -signal.SIGTERM
    (tmp_path / "go").touch()
    parents = {starts.run("see.py", is_warm=True, modules=("slow",))[1] for _ in range(2)}
    assert len(parents) == 1
    assert len([*tmp_path.glob("begun-*")]) == 2


def test_a_python_that_was_killed_is_started_again(starts, tmp_path):
    (tmp_path / "see.py").write_text("import os; print(os.getppid())")
    parents = []
    for _ in range(2):
        parents.append(int(starts.run("see.py", is_warm=True)[1]))
        python = Process.of(parents[-1])
        os.kill(python.pid, signal.SIGKILL)
        wait_for(lambda python=python: not python.alive)
    assert len({*parents}) == 2


def test_a_python_that_cannot_be_started_fails_the_command(starts, tmp_path):
    (tmp_path / "see.py").touch()
    (tmp_path / "python").write_text("#!/nowhere/python\n")
    (tmp_path / "python").chmod(0o700)
    with closing(starts.process(["./python", "see.py"], is_warm=True)) as process:
        wait_for(lambda: process.ended() is not None)
        assert "./python cannot be started: No such file" in process.last_errors()


def test_a_python_that_was_started_ahead_has_imported_for_the_first_start(starts, tmp_path):
    (tmp_path / "slow.py").write_text("import os; open('imported', 'a').write(f'{os.getpid()} ')")
    (tmp_path / "see.py").write_text("import os; print(os.getppid())")
    command = (sys.executable, "see.py")
    members = tuple(Member(name, command=command, preload=("slow",)) for name in "abc")
    others = Member("d", command=command, preload=("fractions",)), Member("e", command=command), Member("f")
    ensemble = Ensemble("own", COMMAND, Functions("a:b", "a:c"), (*members, *others), str(tmp_path))
    assert len(pythons_ahead(ensemble, 6)) == 2
    (python,) = pythons_ahead(ensemble, 2)
    starts.pythons.close()
    starts.pythons = WarmPythons([python])
    wait_for((tmp_path / "imported").exists)
    first, second = (int(starts.run("see.py", is_warm=True, modules=("slow",))[1]) for _ in range(2))
    assert (tmp_path / "imported").read_text() == f"{first} "
    assert first == second


def test_a_script_that_is_no_file_needs_no_python(tmp_path):
    (tmp_path / "see.py").touch()
    for words, needs in (("see.py", True), ("-m see", True), ("other.py", False), ("-c pass", False)):
        found = warm_python_of(Member("a", preload=("decimal",)), [sys.executable, *words.split()], tmp_path)
        assert bool(found) == needs


def test_the_least_used_python_makes_room(starts, tmp_path):
    (tmp_path / "see.py").write_text("import os; print(os.getppid())")
    first = Process.of(int(starts.run("see.py", is_warm=True)[1]))
    assert int(starts.run("see.py", is_warm=True, modules=("fractions",))[1]) != first.pid
    wait_for(lambda: not first.alive)


def test_what_a_script_leaves_open_is_written_as_it_ends(starts, tmp_path):
    (tmp_path / "leave.py").write_text(
        "file = open('file', 'w'); file.write('text')\n"
        "class Own:\n    def __del__(self, open=open): open('deleted', 'w').write('too')\n"
        "own = Own()"
    )
    for is_warm in (False, True):
        assert starts.run("leave.py", is_warm=is_warm)[::2] == (0, "")
        written = [tmp_path / name for name in ("file", "deleted")]
        assert [path.read_text() for path in written] == ["text", "too"]
        for path in written:
            path.unlink()


def test_a_stop_is_a_signal_and_a_closed_pipe(starts, tmp_path):
    text = "import hetctl, os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('told'))\n"
    text += "hetctl.report(epoch=1)\nwhile not hetctl.should_stop():\n    time.sleep(0.01)\n"
    (tmp_path / "wait.py").write_text(text)
    with closing(starts.process([sys.executable, "wait.py"], is_warm=True)) as process:
        wait_for(lambda: list(process.reports(0.1)))
        process.stop()
        wait_for(lambda: process.ended() == 0)
        assert process.cpu_seconds() >= 0
    assert "told" in starts.capfd.readouterr().out


def test_all_ends_with_the_rank(tmp_path):
    (tmp_path / "count.py").write_text(
        "import os, time\nos.fork()\nopen(str(os.getpid()), 'w')\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], env=environment)
    started = wait_for(
        lambda: len(pids := [p.name for p in tmp_path.iterdir() if p.name.isdigit()]) == 2 and pids
    )
    rank.kill()
    rank.wait()
    wait_for(lambda: not any(Path("/proc", pid, "fd").exists() for pid in started))


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (
            "python3.11 -u -Xdev -W ignore a.py -m x",
            (("python3.11", "-u", "-Xdev", "-Wignore"), "", "a.py -m x"),
        ),
        ("/opt/python -um a.b x", (("/opt/python", "-u"), "a.b", "-m x")),
        ("python -ma.b", (("python",), "a.b", "-m")),
        ("python -c pass", None),
        ("python -i a.py", None),
        ("python --version a.py", None),
        ("python - a.py", None),
        ("python a.zip", None),
        ("python -m", None),
        ("python", None),
        ("pythonic a.py", None),
        ("./a.py", None),
    ],
)
def test_the_start_of_python_is_read(words, start):
    found = python_start(words.split())
    assert (found and (found.python, found.module, " ".join(found.argv))) == start
