"""Arrays of h5py and zarr: any order of rows, each chunk read once, and closed files."""

import numpy as np
import pytest

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.sources import DiskArray, as_source

ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)
ORDERS = [[7, 2, 19, 2, 0], [0], list(range(20)), [19, 18, 1], []]


def of_h5py(path, rows, chunk):
    h5py = pytest.importorskip("h5py")
    chunks = chunk and (chunk, *rows.shape[1:])
    return h5py.File(path / "rows.h5", "a").create_dataset("rows", data=rows, chunks=chunks)


def of_zarr(path, rows, chunk):
    zarr = pytest.importorskip("zarr")
    shape, store = rows.shape, str(path / "rows.zarr")
    made = zarr.open(store, mode="w", shape=shape, dtype=rows.dtype, chunks=(chunk or 1, *shape[1:]))
    made[:] = rows
    return zarr.open(store, mode="r")


KINDS = {"h5py": of_h5py, "zarr": of_zarr}


class Counted:
    """An array that notes the slices which are read."""

    def __init__(self, chunk):
        self.shape, self.dtype, self.chunks, self.read = ROWS.shape, ROWS.dtype, chunk and (chunk, 3), []

    def __getitem__(self, rows):
        self.read.append((rows.start, rows.stop))
        return ROWS[rows]


@pytest.mark.parametrize("chunk", [None, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_the_order_asked_for(tmp_path, kind, chunk):
    source = as_source((KINDS[kind](tmp_path, ROWS, chunk), np.arange(20)), "training")
    for numbers in ORDERS:
        np.testing.assert_array_equal(source.x[np.array(numbers, int)], ROWS[numbers])
    np.testing.assert_array_equal(np.asarray(source.x), ROWS)
    assert len(source) == 20


APART = [(2, 4), (9, 10), (19, 20)]


@pytest.mark.parametrize(("chunk", "read"), [(None, APART), (5, APART), (10, [(2, 10), (19, 20)])])
def test_each_chunk_is_read_once(chunk, read):
    counted = Counted(chunk)
    assert DiskArray(counted)[[19, 3, 9, 2, 3]][:, 0].tolist() == [57, 9, 27, 6, 9]
    assert counted.read == read


def test_a_closed_file_is_refused(tmp_path):
    rows = of_h5py(tmp_path, ROWS, 4)
    rows.file.close()
    with pytest.raises(BadInputError, match="training whose file is closed"):
        as_source((rows, np.arange(20)), "training")
