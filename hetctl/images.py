"""Folders of JPEG and PNG files as data of ``input_fn``.

An image is prepared in two parts: `prepare` is the same in every epoch, and members can share its result;
`augment` is random, and each trainer runs it.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError, TransientInputError

SUFFIXES = (".jpg", ".jpeg", ".png")

Array = npt.NDArray[Any]
Prepare = Callable[[Path], Array]
Augment = Callable[..., Array]


class ImageFolder:
    """JPEG and PNG files in one sub-folder per class.

    Parameters
    ----------
    folder : path
        Folder with the sub-folders; names that begin with a dot and suffixes not in `SUFFIXES` are ignored.
    size : int
        Height and width in pixels after the default `prepare`.
    prepare : callable, optional
        ``prepare(path) -> array``, the deterministic part; by default `decode_and_crop` of `size`.
        Its results must have one shape and type.
    augment : callable, optional
        ``augment(array, rng) -> array``, the random part; all randomness must come from `rng`, which is valid
        for this call only. It is applied to every sample on every use, in validation too. With a third
        parameter `out`, it may write its result into that array and return it.

    Attributes
    ----------
    classes : tuple of str
        Names of the sub-folders, sorted; a label is an index into them.
    files : tuple of str
        Paths relative to the folder, sorted by class and name.
    labels : array of int64, shape (files,)

    Raises
    ------
    BadInputError
        If the folder cannot be read or has no sub-folders.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int = 256,
        prepare: Prepare | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.prepare = prepare or decode_and_crop(size)
        self.augment = augment or _unchanged
        self.classes = _classes(self.folder)
        images = [_images(self.folder / name) for name in self.classes]
        self.files = tuple(
            f"{name}/{file}" for name, files in zip(self.classes, images, strict=True) for file in files
        )
        self.labels = np.repeat(np.arange(len(images)), [len(files) for files in images])

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.files)

    @property
    def is_augmented(self) -> bool:
        """True if an `augment` was given."""
        return self.augment is not _unchanged


def decode_and_crop(size: int) -> Prepare:
    """Return the default `prepare`: decode, convert to RGB, scale the shorter side, crop the centre.

    Returns
    -------
    callable
        ``(path) -> array`` of uint8, shape (size, size, 3); it raises `BadInputError` for a file that
        Pillow cannot decode.
    """

    def prepare(path: Path) -> Array:
        pillow = _pillow()
        try:
            with pillow.open(path) as image:
                # A JPEG much larger than needed is decoded at a reduced scale, not smaller than `size`.
                image.draft("RGB", (size, size))
                return np.array(_centre(image.convert("RGB"), size, pillow.Resampling.BILINEAR))
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise TransientInputError(f"{path} cannot be decoded: {error}") from error

    return prepare


def random_crop_and_flip(size: int) -> Augment:
    """Return an `augment`: a random square of `size` pixels, mirrored with probability 1/2.

    Returns
    -------
    callable
        ``(array, rng) -> array`` of shape (size, size, channels); `array` itself is not changed.
    """

    def augment(array: Array, rng: np.random.Generator) -> Array:
        height, width = array.shape[:2]
        if min(height, width) < size:
            raise BadInputError(f"no square of {size} pixels fits into an image of {height} by {width}")
        top = int(rng.integers(height - size + 1))
        left = int(rng.integers(width - size + 1))
        crop = array[top : top + size, left : left + size]
        return flip_horizontal(crop) if rng.random() < 0.5 else crop

    return augment


def flip_horizontal(image: Array) -> Array:
    """Return an image with left and right exchanged.

    Taking whole rows, channel by channel, is several times faster than copying a reversed view.
    """
    height, width, channels = image.shape
    rows = np.ascontiguousarray(image).reshape(height, width * channels)
    return rows.take(_mirror(width, channels), axis=1).reshape(image.shape)


@lru_cache(maxsize=8)
def _mirror(width: int, channels: int) -> Array:
    return np.arange(width * channels).reshape(width, channels)[::-1].ravel()


def scale(array: Array, _rng: np.random.Generator | None = None, out: Array | None = None) -> Array:
    """Scale uint8 to float32 in [0, 1]; a deterministic `augment`."""
    scaled = np.empty(array.shape, np.float32) if out is None else out
    np.copyto(scaled, array)
    scaled /= 255
    return scaled


def in_turn(*parts: Augment) -> Augment:
    """Return an `augment` that applies `parts` from left to right."""
    *others, last = parts
    writes = takes_out(last)

    def augment(array: Array, rng: np.random.Generator, out: Array | None = None) -> Array:
        for part in others:
            array = part(array, rng)
        return last(array, rng, out) if writes else last(array, rng)

    return augment


def takes_out(augment: Augment) -> bool:
    """Return true if an `augment` can write its result into a given array."""
    return "out" in inspect.signature(augment).parameters


def _unchanged(array: Array, _rng: np.random.Generator) -> Array:
    return array


def _centre(image: Any, size: int, resampling: Any) -> Any:
    """Scale the centre square in one step; equivalent to scaling the shorter side, then cropping."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), resampling, box=(left, top, left + side, top + side))


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        names = _names(folder, lambda entry: entry.is_dir())
    except OSError as error:
        raise TransientInputError(f"the images in {folder} cannot be read: {error.strerror}") from error
    if not names:
        raise TransientInputError(
            f"{folder} has no sub-folders", "put the images of each class into one of its own"
        )
    return tuple(names)


def _images(folder: Path) -> list[str]:
    return _names(folder, lambda entry: entry.name.lower().endswith(SUFFIXES) and entry.is_file())


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and wanted(entry))


def _pillow() -> Any:
    """Import ``PIL.Image`` only when needed, so that projects without images need no Pillow."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise TransientInputError(
            "an ImageFolder needs Pillow, which is not installed", "pip install 'hetctl[data]'"
        ) from None
