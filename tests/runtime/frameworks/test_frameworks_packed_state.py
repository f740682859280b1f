"""States as bytes, and what no state can hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.packed_state import from_bytes, to_bytes


def test_a_state_is_the_same_after_its_bytes():
    state = [{"a": np.arange(3), 7: (1, None, True)}, float("inf"), 2**100, "é", np.float32(0.5)]
    found = from_bytes(to_bytes(state))
    np.testing.assert_array_equal(found[0].pop("a"), state[0].pop("a"))
    assert found == state


def test_numbers_that_numpy_lacks_keep_their_type():
    array = np.array([0.5, -2, 3], ml_dtypes.bfloat16).reshape(3, 1)
    found = from_bytes(to_bytes((array,)))[0]
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_objects_are_refused_and_not_pickled():
    with pytest.raises(BadInputError, match="holds ndarray at 0"):
        to_bytes([np.array(["a", object()])])
