"""Kinds of data that ``input_fn`` may return, as samples that can be read by number."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.named_arrays import Collated, CollatedSource, NamedArrays, record_of
from hetctl.runtime.data.shards import Shards, ShardSource

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

HINT = (
    "return a pair of arrays (x, y), a tf.data.Dataset, a PyTorch map-style Dataset, an ImageFolder, or "
    "Collated(dataset, collate_fn) or Shards(shards, read, samples) of hetctl.samples"
)

LINE = 64
"""Alignment in bytes: arrays that begin at a multiple of it can be passed to frameworks without a copy."""
USELESS_LENGTHS = {0: "no samples", -1: "no end", -2: "an unknown length"}
"""Descriptions of unusable results of ``tf.data.Dataset.cardinality``."""


@dataclass(frozen=True)
class SampleSpec:
    """Shape and type of one sample's x and y, before the random part."""

    x_shape: tuple[int, ...]
    x_dtype: np.dtype[Any]
    y_shape: tuple[int, ...]
    y_dtype: np.dtype[Any]

    @classmethod
    def of(cls, x: Array, y: Array, place: str) -> SampleSpec:
        """Return the specification of a sample.

        Raises
        ------
        BadInputError
            If x or y is of a type without a fixed size; `place` names the sample in the message.
        """
        for part, array in (("x", x), ("y", y)):
            if array.dtype.hasobject:
                raise BadInputError(
                    f"{part} of {place} is of type {array.dtype}, which has no fixed size",
                    "convert it to numbers, or text with .astype(str)",
                )
        return cls(x.shape, x.dtype, y.shape, y.dtype)

    @property
    def record(self) -> np.dtype[Any]:
        """Type of an aligned record with the fields ``x`` and ``y``."""
        return np.dtype([("x", self.x_dtype, self.x_shape), ("y", self.y_dtype, self.y_shape)], align=True)

    def slot_bytes(self, samples: int) -> int:
        """Return the size of a ring's slot for the x of some samples, followed by their y."""
        return self._y_start(samples) + samples * np.dtype((self.y_dtype, self.y_shape)).itemsize

    def slot_views(self, slot: npt.NDArray[np.uint8], samples: int) -> tuple[Array, Array]:
        """Return the x and the y in such a slot, in place."""
        return (
            np.ndarray((samples, *self.x_shape), self.x_dtype, slot.data),
            np.ndarray((samples, *self.y_shape), self.y_dtype, slot.data, self._y_start(samples)),
        )

    def _y_start(self, samples: int) -> int:
        return -(-samples * np.dtype((self.x_dtype, self.x_shape)).itemsize // LINE) * LINE

    def empty(self, samples: int) -> tuple[Array, Array]:
        """Return uninitialised arrays x and y for some samples."""
        return (
            np.empty((samples, *self.x_shape), self.x_dtype),
            np.empty((samples, *self.y_shape), self.y_dtype),
        )

    def check(self, x: Array, y: Array, place: str) -> None:
        """Compare a sample with the specification.

        Raises
        ------
        BadInputError
            If it differs; `place` names the sample in the message.
        """
        wanted = (("x", x, self.x_shape, self.x_dtype), ("y", y, self.y_shape, self.y_dtype))
        for part, array, shape, dtype in wanted:
            if array.shape != shape or array.dtype != dtype:
                raise BadInputError(
                    f"{part} of {place} has shape {array.shape} and type {array.dtype}, "
                    f"that of sample 0 {shape} and {dtype}",
                    "all samples must have the same; a dataset must give single samples, not batches",
                )


class SampleSource(Protocol):
    """Samples that can be read by number, from any process and in any order."""

    @property
    def spec(self) -> SampleSpec:
        """Shapes and types of the arrays that `prepare` returns."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def prepare(self, number: int) -> tuple[Array, Array]:
        """Return x and y of one sample before the random part."""

    def augment(self, x: Array, rng: np.random.Generator, out: Array | None = None) -> Array:
        """Return x after the random part; all random numbers come from `rng`, which is for this sample.

        The result may be written to `out`, which is then returned.
        """


Source = SampleSource | CollatedSource | ShardSource
"""Single samples, batches of a ``collate_fn``, or batches from shards."""


def as_sources(data: Any) -> tuple[Source, Source]:
    """Return training and validation samples from the checked result of ``input_fn``.

    Raises
    ------
    BadInputError
        If the result is no pair, or `as_source` rejects a part of it.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise BadInputError(
            f"input_fn returned {type(data).__name__}, not (training, validation)",
            f"for each of the two, {HINT}",
        )
    training, validation = as_source(data[0], "training"), as_source(data[1], "validation")
    if isinstance(training, ImageSource) and isinstance(validation, ImageSource):
        differing = sorted(set(training.classes) ^ set(validation.classes))
        if differing:
            raise TransientInputError(
                f"the ImageFolders of training and validation have different classes: {', '.join(differing)}",
                "labels are positions among the sub-folders: make an empty one where there are no images",
            )
    return training, validation


def as_source(value: Any, name: str) -> Source:
    """Adapt the training or validation part of the result of ``input_fn``.

    Parameters
    ----------
    name : str
        Name of the part, for messages.

    Raises
    ------
    BadInputError
        If it is of no known kind, empty, in a closed file, or its first sample cannot be used.
    """
    for part in value if isinstance(value, tuple | list) else ():
        for array in part.values() if isinstance(part, Mapping) else (part,):
            # Only arrays of h5py tell that their file was closed, by their truth value.
            if type(array).__module__.startswith("h5py") and not array:
                raise BadInputError(
                    f"input_fn returned an h5py dataset for {name} whose file is closed",
                    "leave the file open: rows are read from it as long as members train",
                )
    adapt = next((adapter for fits, adapter in ADAPTERS if fits(value)), None)
    if adapt is None:
        raise BadInputError(f"input_fn returned {type(value).__name__} for {name}", HINT)
    return adapt(value, name)


class _Checked(ABC):
    """Samples of any kind; each is compared with the first."""

    def __init__(self, name: str) -> None:
        self.name = name
        if len(self) == 0:
            raise TransientInputError(f"input_fn returned 0 {name} samples")
        self.spec = SampleSpec.of(*self._arrays(0), self._place(0))

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def _read(self, number: int) -> Any:
        """Return x and y in any form that NumPy can convert to arrays."""

    def prepare(self, number: int) -> tuple[Array, Array]:
        x, y = self._arrays(number)
        self.spec.check(x, y, self._place(number))
        return x, y

    def augment(self, x: Array, _rng: np.random.Generator, _out: Array | None = None) -> Array:
        return x

    def _arrays(self, number: int) -> tuple[Array, Array]:
        return _pair(self._read(number), self._place(number))

    def _place(self, number: int) -> str:
        return f"{self.name} sample {number}"


class ArraySource(_Checked):
    """Two arrays, or objects with a length that can be indexed with an array of integers."""

    def __init__(self, x: Any, y: Any, name: str) -> None:
        if len(x) != len(y) or len(x) == 0:
            raise BadInputError(f"input_fn returned {len(x)} {name} inputs and {len(y)} targets")
        self.x, self.y = x, y
        super().__init__(name)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.x)

    def batch(self, numbers: Numbers) -> tuple[Any, Any]:
        """Return x and y of samples."""
        return self.x[numbers], self.y[numbers]

    def _read(self, number: int) -> Any:
        # The dots keep the array's own type: a single text taken from an array has only its own width.
        return tuple(np.asarray(part)[0, ...] for part in self.batch(np.array([number])))


class MapSource(_Checked):
    """A dataset with ``__len__`` and ``__getitem__``, as PyTorch defines it.

    The result of ``__getitem__`` counts as constant: there is no random part.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        super().__init__(name)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def _read(self, number: int) -> Any:
        return self._dataset[number]


class ImageSource(_Checked):
    """A `hetctl.images.ImageFolder`."""

    def __init__(self, images: Any, name: str) -> None:
        self._images = images
        self._takes_out = sys.modules["hetctl.images"].takes_out(images.augment)
        self.is_augmented: bool = images.is_augmented
        self.classes: tuple[str, ...] = images.classes
        super().__init__(name)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._images)

    def augment(self, x: Array, rng: np.random.Generator, out: Array | None = None) -> Array:
        """Apply the folder's random part."""
        if out is not None and self._takes_out:
            return np.asarray(self._images.augment(x, rng, out))
        return np.asarray(self._images.augment(x, rng))

    def _read(self, number: int) -> Any:
        images = self._images
        return images.prepare(images.folder / images.files[number]), images.labels[number]

    def _place(self, number: int) -> str:
        return f"{self.name} sample {number} ({self._images.files[number]})"


def _pair(sample: Any, place: str) -> tuple[Array, Array]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise BadInputError(f"{place} is {type(sample).__name__}, not a pair (x, y)")
    x, y = sample
    _check_targets(y, f"y of {place}")
    return record_of(x, f"x of {place}") if isinstance(x, Mapping) else np.asarray(x), np.asarray(y)


def _check_targets(y: Any, place: str) -> None:
    if isinstance(y, Mapping):
        raise BadInputError(f"{place} is a mapping", "return one array of targets; only x may be a mapping")


def _of_arrays(value: Any, name: str) -> ArraySource:
    inputs, targets = value
    _check_targets(targets, f"y of {name}")
    if not isinstance(inputs, Mapping):
        return ArraySource(_indexable(inputs), _indexable(targets), name)
    place = f"x of {name}"
    for key, array in inputs.items():
        if not _has_rows(array):
            raise BadInputError(
                f"{key} of {place} is {type(array).__name__}", "return arrays with a row a sample"
            )
    rows = NamedArrays({key: _indexable(array) for key, array in inputs.items()}, place)
    return ArraySource(rows, _indexable(targets), name)


def _indexable(part: Any) -> Any:
    """Return what can be indexed with an array of integers."""
    if is_on_disk(part):
        return DiskArray(part)
    return np.asarray(part) if isinstance(part, tuple | list) else part


def _of_tensorflow(dataset: Any, name: str) -> ArraySource:
    """Read all elements into memory, once: they cannot be read by number."""
    samples = int(dataset.cardinality())
    if samples in USELESS_LENGTHS:
        raise BadInputError(
            f"the tf.data.Dataset for {name} has {USELESS_LENGTHS[samples]}",
            "return it without batch() and repeat(), and state its length with assert_cardinality()",
        )
    elements = dataset.as_numpy_iterator()
    first = _pair(next(elements), f"{name} sample 0")
    spec = SampleSpec.of(*first, f"{name} sample 0")
    x, y = spec.empty(samples)
    for number, element in enumerate(chain([first], elements)):
        place = f"{name} sample {number}"
        sample = _pair(element, place)
        spec.check(*sample, place)
        x[number], y[number] = sample
    return ArraySource(x, y, name)


def _is_images(value: Any) -> bool:
    # An ImageFolder exists only if its module is imported, so this check needs no import.
    images = sys.modules.get("hetctl.images")
    return images is not None and isinstance(value, images.ImageFolder)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_has_rows, value))


def _is_map(value: Any) -> bool:
    by_key = hasattr(value, "__getitem__") and not isinstance(value, tuple | list | dict | str | bytes)
    return by_key and _has_length(value) and not hasattr(value, "__array__")


def _has_rows(value: Any) -> bool:
    # Arrays of zarr have a shape, but no length.
    return is_on_disk(value) or _has_length(value)


def _has_length(value: Any) -> bool:
    try:
        return len(value) >= 0
    except TypeError:
        return False


WITHOUT_STORE = (ArraySource, CollatedSource, ShardSource)
"""Kinds of samples that each rank prepares itself, unshared."""
# Kinds are recognised by their attributes: no framework is imported for it.
ADAPTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, str], Source]], ...] = (
    (lambda value: isinstance(value, Collated), CollatedSource),
    (lambda value: isinstance(value, Shards), ShardSource),
    (_is_images, ImageSource),
    (lambda value: hasattr(value, "cardinality") and hasattr(value, "as_numpy_iterator"), _of_tensorflow),
    (_is_pair, _of_arrays),
    (_is_map, MapSource),
)


PACKAGES = frozenset({"h5py", "zarr"})


class DiskArray:
    """An array of h5py or zarr that is indexed with an array of integers, in any order.

    h5py takes increasing numbers only, and selects them one by one. Here each chunk of the file with wanted
    rows is read once: a compressed one is decompressed whole anyway.

    Parameters
    ----------
    array : h5py.Dataset or zarr.Array
        The open array; its first axis is that of the samples.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        chunks = array.chunks
        # Rows of an array without chunks are read on their own, unless they are neighbours.
        self._chunk_rows = int(chunks[0]) if chunks else 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._array.shape[0])

    def __getitem__(self, numbers: npt.ArrayLike) -> Array:
        """Return a row for each number, in the order of the numbers."""
        wanted, places = np.unique(np.asarray(numbers), return_inverse=True)
        rows = np.empty((len(wanted), *self._array.shape[1:]), self._array.dtype)
        apart = np.diff(wanted // self._chunk_rows) > 0 if self._chunk_rows else np.diff(wanted) > 1
        ends = [0, *(np.flatnonzero(apart) + 1).tolist(), len(wanted)] if len(wanted) else []
        # Increasing numbers that are read together.
        for first, stop in pairwise(ends):
            start, end = int(wanted[first]), int(wanted[stop - 1]) + 1
            rows[first:stop] = np.asarray(self._array[start:end])[wanted[first:stop] - start]
        chosen: Array = rows[places]
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows, read into memory."""
        return np.asarray(self._array[:], dtype)


def is_on_disk(value: Any) -> bool:
    """Return true for an array of h5py or zarr; neither is imported for it."""
    package = type(value).__module__.partition(".")[0]
    return package in PACKAGES and hasattr(value, "chunks")
