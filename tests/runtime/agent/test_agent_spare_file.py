"""Memory that is allocated before a state comes."""

from __future__ import annotations

import pytest

from hetctl.runtime.agent.spare_file import SpareFile


@pytest.fixture
def spare(tmp_path):
    return SpareFile(tmp_path, most_bytes=8192)


@pytest.mark.parametrize(("size_bytes", "found"), [(5000, 5000), (8192, 8192), (9000, 8192)])
def test_a_file_is_as_large_as_the_last_one_up_to_a_limit(spare, tmp_path, size_bytes, found):
    spare.renew(size_bytes)
    spare.renew(1)
    spare.take(tmp_path / "next")
    assert (tmp_path / "next").stat().st_size == found
    assert (tmp_path / "next").stat().st_blocks * 512 >= found
    assert not spare.path.exists()


def test_without_a_file_nothing_is_taken(spare, tmp_path):
    spare.renew(0)
    spare.take(tmp_path / "next")
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_does_not_fit_leaves_no_file(tmp_path):
    spare = SpareFile(tmp_path, most_bytes=2**60)
    spare.renew(2**60)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_made_after_the_close(spare, tmp_path):
    spare.renew(100)
    spare.close()
    spare.renew(100)
    assert list(tmp_path.iterdir()) == []
