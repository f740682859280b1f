"""Running the commands of a batch system."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.command import Answer, CommandRunner, NoAnswerError
from hetctl.model.errors import BatchSystemError
from hetctl.storage.processes import Process

AWAY = ("the controller is away",)


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def fails_first(tmp_path):
    """A command that fails so many times before it answers, and counts how often it was run."""

    def command(times, words=AWAY[0], code=1):
        return [
            "bash",
            "-c",
            f"echo . >>{tmp_path}/runs; (( $(wc -l <{tmp_path}/runs) > {times} )) && echo here && exit 0;"
            f" echo {words} >&2; exit {code}",
        ]

    command.runs = lambda: len((tmp_path / "runs").read_text().splitlines())
    return command


QUICK = CommandRunner(pauses_s=(0.0, 0.01, 0.02))


def test_output_and_exit_code_are_kept():
    answer = QUICK.run(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert answer == Answer("out\n", "err\n", 3)


def test_a_missing_command_is_named_with_the_next_step():
    with pytest.raises(BatchSystemError, match="no-such-command is not on the PATH") as caught:
        QUICK.run(["no-such-command"])
    assert "--site" in caught.value.hint


def test_a_file_that_cannot_be_run_is_a_batch_system_error(tmp_path):
    (tmp_path / "sbatch").write_text("text")
    with pytest.raises(BatchSystemError, match="sbatch"):
        QUICK.run([str(tmp_path / "sbatch")])


def test_a_missing_script_is_not_taken_for_a_missing_command(tmp_path):
    with pytest.raises(BatchSystemError, match=r"cannot read .*gone\.sh"):
        QUICK.run(["cat"], tmp_path / "gone.sh")


def test_a_command_that_hangs_is_given_up():
    with pytest.raises(NoAnswerError, match=r"did not answer in 0\.2 s"):
        CommandRunner(timeout_s=0.2).run(["sleep", "30"])


def test_output_that_is_no_text_is_read_all_the_same():
    assert QUICK.run(["printf", r"a\377b"]).stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_a_command_may_read_a_file_and_else_reads_nothing(tmp_path):
    (tmp_path / "job.sh").write_text("the script\n")
    assert QUICK.submit(["cat"], tmp_path / "job.sh", ()) == "the script\n"
    assert QUICK.submit(["cat"], None, ()) == ""


def test_the_users_own_defaults_for_the_commands_are_not_heeded(monkeypatch):
    for name in ("SQUEUE_PARTITION", "SACCT_FORMAT", "SBATCH_JOB_NAME", "SBATCH_ARRAY_INX", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "mine")
    assert QUICK.run(["bash", "-c", "env | grep -E '^(SQUEUE|SACCT|SBATCH)_'"]).stdout == (
        "SBATCH_ACCOUNT=mine\n"
    )


def test_the_last_words_of_a_failing_order_are_quoted():
    code = "import sys; print('\\n'.join('line %d' % n for n in range(9)), file=sys.stderr); sys.exit(2)"
    with pytest.raises(BatchSystemError, match=r"failed \(2\): line 6 / line 7 / line 8$"):
        QUICK.check_output(python(code))


def test_an_order_that_fails_without_a_word():
    with pytest.raises(BatchSystemError, match=r"failed \(1\): no output"):
        QUICK.check_output(["false"])


def test_an_order_returns_what_was_printed():
    assert QUICK.check_output(["echo", "12"]) == "12\n"


def test_a_question_is_asked_again_until_it_is_answered(fails_first):
    assert QUICK.run_with_retry(fails_first(2), AWAY).stdout == "here\n"
    assert fails_first.runs() == 3


def test_the_last_refusal_is_the_answer(fails_first):
    assert QUICK.run_with_retry(fails_first(9), AWAY).code == 1
    assert fails_first.runs() == 4


def test_a_refusal_that_stays_is_not_asked_again(fails_first):
    assert QUICK.run_with_retry(fails_first(9, "invalid user"), AWAY).stderr == "invalid user\n"
    assert fails_first.runs() == 1


def test_nobody_is_asked_longer_than_patience_lasts(fails_first):
    assert CommandRunner(patience_s=1.0, pauses_s=(30.0,)).run_with_retry(fails_first(1), AWAY).code == 1
    assert fails_first.runs() == 1


def test_a_command_that_hung_is_asked_again(tmp_path):
    hasty = CommandRunner(timeout_s=1.0, pauses_s=(0.0, 0.01, 0.02))
    again = f"[ -e {tmp_path}/asked ] && echo here && exit; touch {tmp_path}/asked; sleep 30"
    assert hasty.run_with_retry(["bash", "-c", again], ()).stdout == "here\n"


def test_a_submission_is_tried_once_and_in_doubt_unless_refused(fails_first):
    with pytest.raises(SubmissionInDoubtError, match="the controller is away"):
        QUICK.submit(fails_first(1), None, ("no such account",))
    assert fails_first.runs() == 1
    with pytest.raises(BatchSystemError, match="no such account") as refused:
        QUICK.submit(fails_first(9, "no such account"), None, ("no such account",))
    assert not isinstance(refused.value, SubmissionInDoubtError)


def test_a_submission_that_hangs_is_in_doubt():
    with pytest.raises(SubmissionInDoubtError, match="did not answer"):
        CommandRunner(timeout_s=0.2).submit(["sleep", "30"], None, ())


def test_a_submission_that_was_killed_is_in_doubt():
    with pytest.raises(SubmissionInDoubtError, match="-9"):
        QUICK.submit(["bash", "-c", "kill -9 $$"], None, ())


AT_FORK = """
import os, signal
from hetctl.cluster.batch.command import CommandRunner
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.{name}))
signal.signal(signal.SIGTERM, signal.default_int_handler)
CommandRunner().run(["sleep", "300"])
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_just_after_a_fork_is_not_lost(name):
    done = subprocess.run(python(AT_FORK.format(name=name)), capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in done.stderr


def test_a_command_has_no_signal_blocked():
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert QUICK.check_output(python(code)) == f"{signal.pthread_sigmask(signal.SIG_BLOCK, [])}\n"


def test_a_command_does_not_outlive_the_one_that_ran_it(tmp_path):
    """Else a submission could still go through after hetctl was killed and looked for."""
    slow = f"echo $$ >{tmp_path}/pid; sleep 100; touch {tmp_path}/submitted"
    code = f"""
from hetctl.cluster.batch.command import CommandRunner
CommandRunner().run(['bash', '-c', {slow!r}])
"""
    hetctl = subprocess.Popen(python(code))
    child = _pid_in(tmp_path / "pid")
    hetctl.kill()
    hetctl.wait()
    limit = time.monotonic() + 60
    while child.alive and time.monotonic() < limit:
        time.sleep(0.02)
    assert not child.alive


def _pid_in(path):
    limit = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return Process.of(int(path.read_text()))
