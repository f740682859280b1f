"""Check of a site file without access to any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.app.doctor.sample_jobs import case_text, cases_of
from hetctl.app.project import Project
from hetctl.model.errors import BadInputError, HetctlError


@dataclass(frozen=True)
class SiteCheck:
    """A valid site, and the cases that were rendered for it."""

    site: str
    cases: tuple[str, ...]


def check_site(project: Project, name: str) -> SiteCheck:
    """Read a site by name or file, and render every case for it.

    Raises
    ------
    BadInputError
        If anything in its file is wrong, with a line for each problem: ``FILE:LINE: key: rule``; or if a
        case cannot be rendered, with the case, the most likely key, and its place.
    """
    site, keys = project.traced_site(name)
    where = {key.key: f"{key.file}:{key.line}: " for key in keys if key.file}
    problems: dict[str, list[str]] = {}
    for case in cases_of(site):
        try:
            case_text(site, case, project.template_folders)
        except HetctlError as error:
            problems.setdefault(_placed(error.message, where), []).append(case.name)
    if problems:
        lines = (f"{problem} (rendering {', '.join(names)})" for problem, names in problems.items())
        raise BadInputError("\n".join(lines), "`hetctl sites show` says where each key comes from")
    return SiteCheck(site.name, tuple(case.name for case in cases_of(site)))


CAUSES = {
    "template": "template",
    "TMPDIR": "environment",
    "the environment": "environment",
    "a directive": "directives",
    "no queue": "queues",
    "nodes; the launcher": "launcher",
    "jsrun needs equally": "launcher",
}
"""Keys of the site file that cause errors, by words in the message."""


def _placed(message: str, where: Mapping[str, str]) -> str:
    key = next((key for words, key in CAUSES.items() if words in message), "")
    return f"{where.get(key, '')}{key}: {message}" if key else message
