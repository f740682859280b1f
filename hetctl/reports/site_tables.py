"""Terminal output for sites: their list, the keys of one, the rendered cases, and results of `doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.site import Site, SiteKey
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import device_word, printable

STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "bold red"}


def sites_table(sites: Iterable[tuple[Site, str]]) -> RenderableType:
    """Return a table of sites with the paths of their files."""
    rows = (
        (
            *(site.name, site.batch_system, str(site.nodes)),
            f"x {site.gpus_per_node} {device_word(site.device, site.gpus_per_node)}",
            *(site.launcher, where),
        )
        for site, where in sites
    )
    return ruled_table(("site", "batch", ">nodes", "", "launcher", "where"), rows, gap=1, fold="where")


def keys_table(keys: Sequence[SiteKey]) -> RenderableType:
    """Return a table of a site's keys with their sources, and a list of the files."""
    files = list(dict.fromkeys(key.file for key in keys if key.file))
    marks = {file: f"[{number}]" for number, file in enumerate(files, start=1)}
    rows = ((key.key, Text(_place(key, marks), "dim"), _value(key)) for key in keys)
    table = ruled_table(("key", "where", "value"), rows, gap=1, fold="value")
    notes = [Text(f"{marks[file]} {printable(file)}", "dim", overflow="fold") for file in files]
    return Group(table, Text(), *notes)


def check_table(site: str, cases: Sequence[str]) -> RenderableType:
    """Return a line that a site is valid, with the rendered cases."""
    return Text.assemble(
        (f"site {printable(site)} is valid", "green"), f"; rendered for it: {', '.join(cases)}"
    )


def doctor_table(site: str, checks: Sequence[CheckResult]) -> RenderableType:
    """Return a table of the checks of a site, with fixes below those that need one."""
    title = f"site {printable(site)}"
    rows = ((one.name, Text(one.status.value, STYLES[one.status]), _message(one)) for one in checks)
    table = ruled_table(("check", "status", title), rows, gap=1, fold=title)
    return Group(table, Text(), _summary(checks))


def _message(check: CheckResult) -> Text:
    fix = f"\nto fix: {printable(check.hint)}" if check.hint else ""
    return Text.assemble(printable(check.message), (fix, "dim"))


def _summary(checks: Sequence[CheckResult]) -> Text:
    counts = {status: sum(check.status is status for check in checks) for status in CheckStatus}
    return Text(", ".join(f"{count} {status.value}" for status, count in counts.items()))


def _place(key: SiteKey, marks: Mapping[str, str]) -> str:
    if key.measured_at is not None:
        return f"measured {time.strftime('%Y-%m-%d', time.localtime(key.measured_at))}"
    return f"{marks[key.file]}:{key.line}" if key.file else "default"


def _value(key: SiteKey) -> str:
    return key.value if isinstance(key.value, str) else json.dumps(key.value)
