"""Files of states: all types of arrays that frameworks save, mapped without a copy, complete or absent."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hetctl.model.training_progress import EpochResult
from hetctl.runtime.data.state_file import ALIGNMENT, read, write
from hetctl.runtime.worker.checkpoint import TrainingState

STATE = TrainingState(
    epochs=(EpochResult(1, {"loss": 1 / 3, "val_loss": 0.5}, 2.0, 1, 1000.0),),
    part_samples=640,
    part_loss=1 / 7,
    random_state={"numpy": ["MT19937", [1, 2**32 - 1], 624, 0, 0.0]},
    visited=(3, 0),
    evaluating=True,
    scores={"val_loss": 0.1 + 0.2},
    scored=80,
    visit=17,
)
TYPES = [
    "f2",
    "f4",
    "f8",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "?",
    "c8",
    "c16",
    ">f4",
    "U5",
    "S3",
]


def numbers(dtype: str) -> npt.NDArray[np.generic]:
    return np.arange(-3, 9).reshape(3, 4).astype(dtype)


ARRAYS = {
    **{f"of type {dtype}": numbers(dtype) for dtype in TYPES},
    "one number": np.array(0.25),
    "one integer": np.array(7, np.int64),
    "empty": np.empty((0, 3), np.float32),
    "empty in the middle": np.empty((2, 0, 4), np.int16),
    "turned": numbers("f4").T,
    "every second": np.arange(10, dtype=np.float32)[::2],
    "reversed": np.arange(5)[::-1],
    "large": np.random.default_rng(0).normal(size=(300, 1000)),
    "structure": np.frombuffer('{"ä": [1]}'.encode(), np.uint8),
    "last": np.array([True]),
}


def test_all_arrays_and_the_rest_come_back(tmp_path: Path) -> None:
    size_bytes = write(tmp_path, "m-17", ARRAYS, STATE)
    arrays, state = read(tmp_path, "m-17")
    assert size_bytes == (tmp_path / "m-17").stat().st_size
    assert state == STATE
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        mapped = arrays[name]
        assert (mapped.dtype, mapped.shape, mapped.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_types_that_numpy_lacks_keep_their_names(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    write(tmp_path, "m-0", {"w": array}, STATE)
    assert read(tmp_path, "m-0")[0]["w"].dtype == array.dtype


def test_arrays_are_aligned_maps_that_nobody_can_change(tmp_path: Path) -> None:
    write(tmp_path, "m-0", ARRAYS, STATE)
    arrays, _ = read(tmp_path, "m-0")
    for array in arrays.values():
        assert array.size == 0 or isinstance(array, np.memmap)
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_map_outlives_its_file(tmp_path: Path) -> None:
    write(tmp_path, "m-0", {"w": np.arange(5)}, STATE)
    arrays, _ = read(tmp_path, "m-0")
    write(tmp_path, "m-0", {"w": np.zeros(5)}, STATE)
    (tmp_path / "m-0").unlink()
    assert arrays["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_file_has_its_name_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "m-0", {"w": np.arange(5)}, STATE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, "m-0", {"w": np.zeros(5)}, STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["m-0"]
    assert read(tmp_path, "m-0")[0]["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_state_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path, "m-0", {}, STATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m-0").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"{}", b"hetctl state 2\n\0", b"x" * 500], ids=["short", "cut", "other"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m-0").write_bytes(content)
    with pytest.raises(ValueError, match="m-0 is no state of a member"):
        read(tmp_path, "m-0")


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    size_bytes = write(tmp_path, "m-0", {"w": np.arange(5)}, STATE)
    os.truncate(tmp_path / "m-0", size_bytes - 1)
    with pytest.raises(ValueError, match=f"m-0 has {size_bytes - 1} bytes of at least {size_bytes}"):
        read(tmp_path, "m-0")


def test_objects_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w is of type object"):
        write(tmp_path, "m-0", {"w": np.array([object()])}, STATE)
    assert list(tmp_path.iterdir()) == []
