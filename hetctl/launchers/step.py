"""The value that every launcher returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetctl.core.plan import Allocation
from hetctl.core.site import Site


@dataclass(frozen=True)
class Step:
    """How to start the ranks of one member.

    Parameters
    ----------
    argv : tuple of str
        The command line, from the launcher's name to the last argument of what each rank runs.
    environment : mapping
        Variables to set on top of the driver's own.
    file : tuple of str or None
        Lines that the launcher reads. Whoever starts the step writes them to a file, and sets
        `file_variable` to its path. None if the launcher needs no such file.
    """

    member: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    file: tuple[str, ...] | None = None
    file_variable: str = "HETCTL_STEP_FILE"


Launcher = Callable[[Site, Allocation, tuple[str, ...]], Step]


def common_environment(site: Site) -> dict[str, str]:
    """Return what every step gets: the site's variables, and output that is not held back."""
    return {"PYTHONUNBUFFERED": "1", **site.environment}
