"""Pauses of the garbage collector end with their block, also by an error."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from hetctl.model.interpreter import frozen_afterwards, without_collections

pytestmark = pytest.mark.usefixtures("collector")
PAUSES = [without_collections, frozen_afterwards]


@pytest.fixture
def collector():
    """Restore the garbage collector's state after a test."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("pause", PAUSES)
def test_collections_are_off_within_and_on_after_an_error(pause):
    with suppress(KeyError), pause():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("pause", PAUSES)
def test_collections_that_were_off_before_stay_off(pause):
    with pause():
        with pause():
            pass
        assert not gc.isenabled()
    gc.disable()
    with pause():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize(("pause", "is_frozen"), [(without_collections, False), (frozen_afterwards, True)])
def test_objects_are_frozen_where_the_name_says_so(pause, is_frozen):
    gc.unfreeze()
    with pause():
        pass
    assert bool(gc.get_freeze_count()) is is_frozen


@pytest.mark.parametrize(("call", "printed"), [("", "collected\n"), ("skip_last_collections()", "")])
def test_the_end_of_a_process_collects_nothing_if_told(call, printed):
    program = f"""
from hetctl.model.interpreter import skip_last_collections
class Cycle:
    def __init__(self): self.own = self
    def __del__(self, out=print): out("collected")
{call}
Cycle()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == printed
