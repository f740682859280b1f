"""Options of a run given by the user: on the command line, or in variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetctl.model.run import Budget


@dataclass(frozen=True)
class Asked:
    """Options given for a run; None means not given.

    Parameters
    ----------
    site : str or None
        Name or file of the site.
    options : mapping
        Options of the planner, as in `planners.base.Options`, without those that were not given.
    """

    site: str | None = None
    account: str | None = None
    launch: str | None = None
    gpus: int | None = None
    wall_s: int | None = None
    queue: str | None = None
    planner: str | None = None
    sharing: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int | None = None
    chain: bool | None = None
    budget: Budget = field(default_factory=Budget)

    @property
    def given(self) -> dict[str, str]:
        """Options that a run has to store, as in `RunSpec`."""
        site = self.site and (str(Path(self.site).resolve()) if _is_file(self.site) else self.site)
        named = {
            "site": site,
            "account": self.account,
            "launch": self.launch,
            "queue": self.queue,
            "planner": self.planner,
        }
        return {name: value for name, value in named.items() if value is not None}


def _is_file(site: str) -> bool:
    return "/" in site or site.endswith(".yaml")
