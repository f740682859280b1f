"""Files of TensorFlow."""

from __future__ import annotations

import tempfile

import pytest

pytestmark = pytest.mark.training


def test_converted_functions_leave_no_files_after_a_task(tmp_path, monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow import FRAMEWORK

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @tf.function
    def halved(number):
        while number > 1:
            number = number / 2
        return number

    assert halved(tf.constant(8.0)) == 1
    assert list(tmp_path.glob("*.py"))
    FRAMEWORK.remove_temporary_files()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert halved(tf.constant([16.0])[0]) == 1
