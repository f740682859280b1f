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
    table = ruled_table("site", "batch", ">nodes", "", "launcher", "where", gap=1, fold="where")
    for site, where in sites:
        devices = f"x {site.gpus_per_node} {device_word(site.device, site.gpus_per_node)}"
        words = (site.name, site.batch_system, str(site.nodes), devices, site.launcher, where)
        table.add_row(*(Text(printable(word)) for word in words))
    return table


def keys_table(keys: Sequence[SiteKey]) -> RenderableType:
    """Return a table of a site's keys with their sources, and a list of the files."""
    files = list(dict.fromkeys(key.file for key in keys if key.file))
    marks = {file: f"[{number}]" for number, file in enumerate(files, start=1)}
    table = ruled_table("key", "where", "value", gap=1, fold="value")
    for key in keys:
        table.add_row(Text(key.key), Text(_place(key, marks), "dim"), Text(printable(_value(key))))
    notes = [Text(f"{marks[file]} {printable(file)}", "dim", overflow="fold") for file in files]
    return Group(table, Text(), *notes)


def check_table(site: str, cases: Sequence[str]) -> RenderableType:
    """Return a line that a site is valid, with the rendered cases."""
    return Text.assemble(
        (f"site {printable(site)} is valid", "green"), f"; rendered for it: {', '.join(cases)}"
    )


def doctor_table(site: str, checks: Sequence[CheckResult]) -> RenderableType:
    """Return a table of the checks of a site, with fixes below those that need one."""
    table = ruled_table("check", "status", f"site {printable(site)}", gap=1, fold=f"site {printable(site)}")
    for check in checks:
        text = Text(printable(check.message))
        if check.hint:
            text.append(f"\nto fix: {printable(check.hint)}", "dim")
        table.add_row(Text(check.name), Text(check.status.value, STYLES[check.status]), text)
    return Group(table, Text(), _summary(checks))


def _summary(checks: Sequence[CheckResult]) -> Text:
    counts = {status: sum(check.status is status for check in checks) for status in CheckStatus}
    return Text(", ".join(f"{count} {status.value}" for status, count in counts.items()))


def _place(key: SiteKey, marks: Mapping[str, str]) -> str:
    if key.measured_at is not None:
        return f"measured {time.strftime('%Y-%m-%d', time.localtime(key.measured_at))}"
    return f"{marks[key.file]}:{key.line}" if key.file else "default"


def _value(key: SiteKey) -> str:
    return key.value if isinstance(key.value, str) else json.dumps(key.value)
