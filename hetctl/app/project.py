"""Project that a command runs in: its folder, home, ensemble and site, and its start from an example.

Pydantic, which checks the users' files, is only imported when one is read, and SQLAlchemy when the catalog
is opened: each takes a third of a command's time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hetctl.catalog.lock import ProjectLock
from hetctl.cluster.batch import batch_system_of
from hetctl.cluster.batch.base import BatchSystem
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.site import LEFT_OUT, Site, SiteKey
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import is_shared, make_private_folder, share_with_group
from hetctl.storage.paths import Home

if TYPE_CHECKING:
    from hetctl.catalog.catalog import Catalog


ENSEMBLE_FILE = "ensemble.yaml"
DEFAULT_SITE = "local"
LOCK_PATIENCE_S = 10.0
"""Seconds that a command waits for the project's lock; a job's script holds it for a moment at its end."""


@dataclass(frozen=True)
class Waits:
    """Times in seconds for which commands wait.

    Parameters
    ----------
    settle_s : float
        Time in which a request of a killed process may still reach the batch system.
    run_poll_s : float
        Time between two reads of a run that is shown until it ends.
    profile_poll_s : float
        Time between two reads of the files of a profiling job.
    """

    settle_s: float = 3.0
    run_poll_s: float = 1.0
    profile_poll_s: float = 0.5


USUAL_WAITS = Waits()


@dataclass(frozen=True)
class Project:
    """A folder with an ensemble file, hetctl's own folder, and the waits of commands."""

    folder: Path
    home: Home
    waits: Waits = USUAL_WAITS

    @classmethod
    def here(cls, waits: Waits | None = None) -> Project:
        """Return the project of the working directory; ``$HETCTL_HOME`` may be elsewhere."""
        folder = Path.cwd()
        home = Path(os.environ.get("HETCTL_HOME") or folder / ".hetctl")
        return cls(folder, Home(home.resolve()), waits or USUAL_WAITS)

    @property
    def template_folders(self) -> tuple[Path, ...]:
        """Folders that are searched for templates before the shipped ones."""
        return self.folder / "templates", Path.home() / ".config" / "hetctl" / "templates"

    def require_catalog(self, *, create: bool = False) -> None:
        """Raise BadInputError if there is no catalog, unless it is to be created and there are no runs.

        If there are runs, the catalog was lost, and the error is an UnusableCatalogError.
        """
        # An empty file, as a full disk may leave it, would be taken for a new catalog.
        if self.home.catalog.exists() and self.home.catalog.stat().st_size:
            return
        if runs := self.home.every_run():
            # Imported on use: SQLAlchemy takes a third of a command's time.
            from hetctl.catalog.database import REBUILD, UnusableCatalogError

            raise UnusableCatalogError(
                f"the catalog {self.home.catalog} is missing, although {self.home.runs} has"
                f" {len(runs)} run{'s' * (len(runs) > 1)}",
                REBUILD,
            )
        if not create:
            raise BadInputError(
                f"there is no catalog in {self.home.path}",
                "`hetctl submit` starts a run; of one that was started elsewhere, go to its folder",
            )

    @contextmanager
    def reading(self, *, or_empty: bool = False) -> Iterator[Catalog]:
        """Open the catalog for reading only; with `or_empty`, if there is none yet, an empty one elsewhere.

        Raises
        ------
        BadInputError
            If there is no catalog yet.
        """
        self.require_catalog(create=or_empty)
        from hetctl.catalog.catalog import Catalog

        if or_empty and not self.home.catalog.exists():
            with TemporaryDirectory() as folder, Catalog.open(Home(Path(folder)).catalog) as catalog:
                yield catalog
            return
        with Catalog.open_to_read(self.home.catalog) as catalog:
            yield catalog

    @contextmanager
    def writing(self, *, create: bool = False, patience_s: float = LOCK_PATIENCE_S) -> Iterator[Catalog]:
        """Open the catalog under the project's lock; `create` it if there is none yet.

        Parameters
        ----------
        patience_s : float
            Seconds to wait while another process has the lock.

        Raises
        ------
        BadInputError
            If there is none and it is not to be created.
        LockedError
            If another process still has the lock after `patience_s`.
        """
        self.require_catalog(create=create)
        from hetctl.catalog.catalog import Catalog

        with self.lock(patience_s), Catalog.open(self.home.catalog) as catalog:
            yield catalog

    def lock(self, patience_s: float = LOCK_PATIENCE_S) -> ProjectLock:
        """Return the project's lock, which is taken in a ``with`` block, as by `writing`."""
        return ProjectLock(self.home.lock, " ".join(("hetctl", *sys.argv[1:])), patience_s)

    def ensemble(self, reference: str | None) -> Ensemble:
        """Return the ensemble of a file or a catalog name; by default the project's only one."""
        from hetctl.inputs.ensemble_file import read_ensemble

        path = Path(reference) if reference else self.folder / ENSEMBLE_FILE
        if path.suffix in {".yaml", ".yml"} and (reference or path.exists()):
            return read_ensemble(path)
        return self._ensemble_of_catalog(reference)

    def site(self, name: str | None) -> Site:
        """Return a site by name or file; by default the site of this machine.

        Raises
        ------
        BadInputError
            If there is no such site, or its file is wrong; or if none is named and none matches, although
            jobs could be submitted from this machine.
        """
        from hetctl.inputs.site_file import find_site

        site = find_site(name or self._site_of_this_machine(), project=self.folder, home=Path.home())
        if site.shared_with != LEFT_OUT:
            self._share()
        return site

    def _share(self) -> None:
        """Share what hetctl keeps with the group of the folder that it is in."""
        make_private_folder(self.home.path)
        try:
            if not is_shared(self.home.path):
                share_with_group(self.home.path)
        except PermissionError as error:
            raise BadInputError(
                f"{self.home.path} cannot be shared: {error.strerror}",
                "its owner must run a hetctl command with `shared_with: group` first",
            ) from None

    def traced_site(self, name: str) -> tuple[Site, tuple[SiteKey, ...]]:
        """Return a site by name or file, with the source of each of its keys."""
        from hetctl.inputs.site_file import trace_site

        return trace_site(name, project=self.folder, home=Path.home())

    def sites(self) -> list[tuple[str, Path]]:
        """Return the names and paths of all site files."""
        from hetctl.inputs.site_file import list_sites

        return list_sites(project=self.folder, home=Path.home())

    def batch_system(self, site: Site) -> BatchSystem:
        """Return the batch system of a site."""
        return batch_system_of(site, self.home.local_jobs)

    def _site_of_this_machine(self) -> str:
        # Imported on use: pydantic is a quarter of the import time of commands that read no user's file.
        import socket

        from hetctl.inputs.site_file import detect_site

        # Patterns of sites contain domains, since login nodes of many sites are called `login1`.
        host = socket.getfqdn()
        try:
            known = [self.site(name) for name, _ in self.sites()]
        except BadInputError as error:
            ways_out = filter(None, (error.hint, "or name a site with --site: no other file is read then"))
            raise BadInputError(error.message, ", ".join(ways_out)) from None
        if found := detect_site(host, known):
            return found
        _refuse_login_node(host)
        return DEFAULT_SITE

    def _ensemble_of_catalog(self, name: str | None) -> Ensemble:
        names: list[str] = []
        if self.home.catalog.exists():
            with self.reading() as catalog:
                names = catalog.ensembles()
                if found := catalog.ensemble(name or next(reversed(names), "")):
                    return found
        if name is None:
            raise BadInputError(
                f"there is no {ENSEMBLE_FILE} in {self.folder}",
                "go to the project's folder, name a file with --ensemble, or start with `hetctl init`",
            )
        raise BadInputError(
            f"no ensemble {name!r} in the catalog, which has: {', '.join(names) or 'none'}",
            "name an ensemble file with --ensemble FILE.yaml",
        )


def _refuse_login_node(host: str) -> None:
    """Raise BadInputError if a batch system's submit command is on the PATH."""
    those = [entry for entry in BATCH_SYSTEMS.values() if entry.commands]
    found = {entry.name: path for entry in those if (path := shutil.which(entry.commands[0]))}
    if not found:
        return
    systems = " and ".join(f"{BATCH_SYSTEMS[name].title} ({path})" for name, path in found.items())
    general = " or ".join(found)
    raise BadInputError(
        f"no site fits host {host}, from which jobs can be submitted to {systems}:"
        " it may be a login node, which is not to be trained on",
        "name its site with --site or HETCTL_SITE; `hetctl sites` lists them, and a site file of yours can"
        f" extend {general}; --site local trains on this machine",
    )


EXAMPLES = Path(__file__).parent.parent / "examples"
IMPORTED_BY = {"digits": ("keras", "sklearn"), "digits-pytorch": ("torch", "sklearn"), "script": ()}
"""Packages that examples import, those of functions first."""


def examples() -> list[str]:
    """Return the names of the examples that come with hetctl."""
    return sorted(entry.name for entry in EXAMPLES.iterdir() if entry.is_dir() and entry.name[0] != "_")


def start_project(folder: Path, example: str | None) -> list[Path]:
    """Copy an example into a folder, which is created if needed; return the files.

    Parameters
    ----------
    example : str or None
        Name of the example; None: the folder's name, or else the first of `IMPORTED_BY`, if this Python has
        its packages.

    Raises
    ------
    BadInputError
        If there is no such example, a file would be replaced, or the folder cannot be written.
    """
    if example is None:
        names = [name for name in (folder.resolve().name, *IMPORTED_BY) if name in examples()]
        example = next(name for name in names if all(map(find_spec, IMPORTED_BY.get(name, ()))))
    if example not in examples():
        raise BadInputError(f"no example {example!r}", f"choose one of: {', '.join(examples())}")
    contents = {entry.name: entry.read_bytes() for entry in (EXAMPLES / example).iterdir() if entry.is_file()}
    for name in contents:
        if (folder / name).exists():
            raise BadInputError(f"{folder / name} exists already", "choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise BadInputError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in sorted(contents)]
