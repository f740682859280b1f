"""Contents of a run's bundle: digests of its data, the versions of packages, and differences here."""

from __future__ import annotations

from collections.abc import Mapping

from hetctl.model.values import dataclass


@dataclass(frozen=True)
class DataFile:
    """File of the training data: its size in bytes and, unless it is left out, its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Origin:
    """Origin of a run's results besides its specification and code.

    Parameters
    ----------
    revision : str
        Revision of the ensemble's folder, as Git describes it; empty: none.
    data : mapping of str to DataFile
        Files of the training data by path, relative to the ensemble's folder if they are in it.
    versions : mapping of str to str
        Versions of Python and of installed packages.
    """

    revision: str
    data: Mapping[str, DataFile]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Bundled:
    """Bundle of a run: its path, its files, and their size together in bytes."""

    run: str
    path: str
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class BundleDifference:
    """Value in a bundle, and the one found here; None: there is none."""

    what: str
    bundled: str | None
    here: str | None


@dataclass(frozen=True)
class BundleCheck:
    """Comparison of a bundle with its own digests, and with the code, data and packages found here."""

    run: str
    compared: int
    differences: tuple[BundleDifference, ...]
