"""Networks and partitions that a rank keeps between visits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetctl import partitions
from hetctl.model.ensemble import Member, Partitions
from hetctl.model.errors import TransientInputError
from hetctl.runtime.worker.hop_resources import KeptNetworks, OpenPartitions

A, B, C = (Member(name) for name in "abc")

COUNT, SAMPLES = 4, 1000
TRAINED_BYTES = 8 * SAMPLES + 8 * SAMPLES
PARTITION_BYTES = TRAINED_BYTES + 160
"""Bytes of the arrays of a partition: numbers of 8 bytes, and 10 validation samples."""


def kept_of(limit_bytes: int, *members: Member) -> tuple[KeptNetworks, dict[str, Any]]:
    kept, networks = KeptNetworks(limit_bytes), {member.name: object() for member in members}
    for member in members:
        kept.keep(member, 1, networks[member.name], 10)  # type: ignore[arg-type]
    return kept, networks


def test_the_one_not_used_for_longest_is_released() -> None:
    kept, networks = kept_of(25, A, B)
    assert kept.pop(A, 1) is networks["a"]
    kept.keep(A, 1, networks["a"], 10)
    kept.keep(C, 1, networks["b"], 10)
    assert len(kept) == 2
    assert kept.pop(B, 1) is None
    assert kept.pop(A, 1) is networks["a"]


def test_a_network_is_taken_once_and_used_only_for_its_settings_and_group() -> None:
    for wanted, ranks in ((A, 1), (replace(A, batch_size=1), 1), (A, 2)):
        kept, networks = kept_of(25, A)
        found = kept.pop(wanted, ranks)
        assert found is (networks["a"] if (wanted, ranks) == (A, 1) else None)
        assert len(kept) == 0
        assert kept.pop(A, 1) is None


def test_a_network_that_is_too_large_is_not_kept() -> None:
    kept, _ = kept_of(9, A)
    assert len(kept) == 0


class Reader:
    """An ``input_fn`` that notes what it reads."""

    def __init__(self, mapped: bool) -> None:
        self.mapped, self.read = mapped, list[int]()

    def __call__(self, _data: None, path: str) -> Any:
        self.read.append(int(Path(path).stem))
        if self.mapped:
            return partitions.read(path)
        with np.load(path) as part:
            return (part["x"], part["y"]), (part["x_validation"], part["y_validation"])


def opened(folder: Path, limit_bytes: int, mapped: bool = False) -> tuple[OpenPartitions, Reader]:
    for number in range(COUNT):
        x = np.full(SAMPLES, number)
        np.savez(folder / f"{number}.npz", x=x, y=x, x_validation=x[:10], y_validation=x[:10])
    reader = Reader(mapped)
    return OpenPartitions(
        Partitions(COUNT, str(folder / "{partition}.npz")), None, reader, limit_bytes
    ), reader


def test_the_partition_not_used_for_longest_is_closed(tmp_path: Path) -> None:
    kept, reader = opened(tmp_path, 2 * PARTITION_BYTES)
    for number in (0, 1, 0, 2, 0, 1):
        training, validation = kept.open(number)
        assert training.x[0] == validation.y[0] == number
        assert len(kept._open) <= 2
    assert reader.read == [0, 1, 2, 1]
    assert list(kept._open) == [0, 1]


def test_maps_of_files_are_all_kept(tmp_path: Path) -> None:
    kept, reader = opened(tmp_path, 0, mapped=True)
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        kept.open(number)
    assert reader.read == [0, 1, 2, 3]


def test_a_partition_larger_than_the_memory_is_read_each_time(tmp_path: Path) -> None:
    kept, reader = opened(tmp_path, PARTITION_BYTES - 1)
    for _ in range(2):
        assert kept.open(3)[0].x[0] == 3
    assert reader.read == [3, 3]
    assert not kept._open


def test_slices_of_one_array_count_once(tmp_path: Path) -> None:
    kept, _ = opened(tmp_path, 8 * SAMPLES)
    whole = np.arange(SAMPLES)
    slices = (whole[:500], whole[:500]), (whole[500:], whole[500:])
    kept._input_fn = lambda _data, _path: slices
    kept.open(0)
    assert list(kept._open) == [0]


def test_generators_are_seeded_before_a_partition_is_read(tmp_path: Path) -> None:
    kept, reader = opened(tmp_path, 2 * PARTITION_BYTES)
    seeded = list[int]()
    for _ in range(2):
        kept.open(1, lambda: seeded.append(len(reader.read)))
    assert seeded == [0]


def test_a_missing_partition_is_refused_with_its_path(tmp_path: Path) -> None:
    kept, _ = opened(tmp_path, 0)
    (tmp_path / "2.npz").unlink()
    with pytest.raises(TransientInputError, match=r"partition 2 is not on .*: there is no .*/2\.npz"):
        kept.open(2)
