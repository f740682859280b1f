"""The search for garbage is off while much is read, and as before afterwards."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from hetctl.storage.gc_pause import without_collections


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_it_is_off_and_on_again_also_after_an_error():
    with suppress(KeyError), without_collections():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_whoever_has_it_off_keeps_it_off():
    with without_collections():
        with without_collections():
            pass
        assert not gc.isenabled()
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()
