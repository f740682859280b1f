"""Running the commands of a batch system."""

from __future__ import annotations

import sys

import pytest

from hetctl.batch import process
from hetctl.core.errors import BatchSystemError


def python(code):
    return [sys.executable, "-c", code]


def test_output_and_exit_code_are_kept():
    answer = process.run(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert answer == process.Answer("out\n", "err\n", 3)


def test_a_missing_command_is_named_with_the_next_step():
    with pytest.raises(BatchSystemError, match="no-such-command is not on the PATH") as caught:
        process.run(["no-such-command"])
    assert "--site" in caught.value.hint


def test_a_file_that_cannot_be_run_is_a_batch_system_error(tmp_path):
    (tmp_path / "sbatch").write_text("text")
    with pytest.raises(BatchSystemError, match="sbatch"):
        process.run([str(tmp_path / "sbatch")])


def test_a_command_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(process, "TIMEOUT_S", 0.2)
    with pytest.raises(BatchSystemError, match=r"did not answer in 0\.2 s"):
        process.run(["sleep", "30"])


def test_output_that_is_no_text_is_read_all_the_same():
    assert process.run(["printf", r"a\377b"]).stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_the_last_words_of_a_failing_order_are_quoted():
    code = "import sys; print('\\n'.join('line %d' % n for n in range(9)), file=sys.stderr); sys.exit(2)"
    with pytest.raises(BatchSystemError, match=r"failed \(2\): line 6 / line 7 / line 8$"):
        process.order(python(code))


def test_an_order_that_fails_without_a_word():
    with pytest.raises(BatchSystemError, match=r"failed \(1\): it said nothing"):
        process.order(["false"])


def test_an_order_returns_what_was_printed():
    assert process.order(["echo", "12"]) == "12\n"


def test_a_command_may_read_a_file_and_else_reads_nothing(tmp_path):
    (tmp_path / "job.sh").write_text("the script\n")
    assert process.order(["cat"], tmp_path / "job.sh") == "the script\n"
    assert process.order(["cat"]) == ""
