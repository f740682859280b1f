"""The file of a partition: what is written is read again, mapped, and equal arrays give equal bytes."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from hetctl.model.errors import TransientInputError
from hetctl.partitions import read
from hetctl.runtime.data.partition_files import ARRAYS, write

KINDS = {
    "floats": np.arange(24, dtype=np.float32).reshape(6, 2, 2),
    "columns": np.asfortranarray(np.arange(12, dtype=">i4").reshape(6, 2)),
    "text": np.array(["a", "bc", "äé", "", "e", "f"]),
    "records": np.zeros(6, [("é", "i2"), ("b", "f8")]),
    "empty": np.zeros((6, 0)),
}


def arrays_of(x):
    return dict(zip(ARRAYS, (x, np.arange(6), x[:2], np.arange(2)), strict=True))


def flat(partitions):
    return dict(zip(ARRAYS, (array for pair in partitions for array in pair), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(tmp_path, kind):
    arrays = arrays_of(KINDS[kind])
    with (tmp_path / "0.npz").open("wb") as file:
        write(file, arrays)
    for name, array in flat(read(tmp_path / "0.npz")).items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
        np.testing.assert_array_equal(np.load(tmp_path / "0.npz")[name], arrays[name])


@pytest.mark.parametrize(("save", "is_mapped"), [(np.savez, True), (np.savez_compressed, False)])
def test_partitions_that_numpy_wrote_are_read(tmp_path, save, is_mapped):
    arrays = arrays_of(KINDS["floats"])
    save(tmp_path / "0.npz", **arrays)
    for name, array in flat(read(tmp_path / "0.npz")).items():
        assert isinstance(array, np.memmap) is is_mapped
        np.testing.assert_array_equal(array, arrays[name])


def test_mapped_arrays_are_read_only(tmp_path):
    np.savez(tmp_path / "0.npz", **arrays_of(KINDS["floats"]))
    (x, _), _ = read(tmp_path / "0.npz")
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1


def test_equal_arrays_give_equal_bytes():
    first, second = io.BytesIO(), io.BytesIO()
    for file in (first, second):
        write(file, arrays_of(KINDS["floats"]))
    assert second.getvalue() == first.getvalue()
    dates = {entry.date_time for entry in zipfile.ZipFile(first).infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("x")
    np.savez(tmp_path / "some.npz", x=np.zeros(1))
    np.savez(tmp_path / "objects.npz", **arrays_of(np.array([None] * 6)))
    for name, reason in [("text", "not a zip file"), ("some.npz", "y.npy"), ("objects.npz", "allow_pickle")]:
        with pytest.raises(TransientInputError, match=f"{name} is not a partition: .*{reason}") as told:
            read(tmp_path / name)
        assert "`hetctl partition` writes such" in told.value.hint
    with pytest.raises(TransientInputError, match=r"gone\.npz cannot be read: No such file or directory"):
        read(tmp_path / "gone.npz")
