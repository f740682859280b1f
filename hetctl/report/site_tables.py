"""What the terminal shows of a site: its keys, what was checked, and what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.site import SiteKey
from hetctl.report.table_style import ruled_table
from hetctl.report.units import printable

STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "bold red"}


def keys_table(keys: Sequence[SiteKey]) -> RenderableType:
    """Show every key of a site on a line or more, with where it stands, file by file."""
    files = list(dict.fromkeys(key.file for key in keys if key.file))
    marks = {file: f"[{number}]" for number, file in enumerate(files, start=1)}
    table = ruled_table("key", "where", "value", gap=1, fold="value")
    for key in keys:
        place = f"{marks[key.file]}:{key.line}" if key.file else "default"
        table.add_row(Text(key.key), Text(place, "dim"), Text(printable(_value(key))))
    notes = [Text(f"{marks[file]} {printable(file)}", "dim", overflow="fold") for file in files]
    return Group(table, Text(), *notes)


def check_table(site: str, cases: Sequence[str]) -> RenderableType:
    """Say that a site is right, and what was tried."""
    return Text.assemble(
        (f"site {printable(site)} is right", "green"), f"; rendered for it: {', '.join(cases)}"
    )


def findings_table(site: str, findings: Sequence[CheckResult]) -> RenderableType:
    """Show what was found about a site, what to fix below each line that needs it."""
    table = ruled_table("check", "outcome", f"site {printable(site)}", gap=1, fold=f"site {printable(site)}")
    for finding in findings:
        text = Text(printable(finding.found))
        if finding.fix:
            text.append(f"\nto fix: {printable(finding.fix)}", "dim")
        table.add_row(Text(finding.check), Text(finding.outcome.value, STYLES[finding.outcome]), text)
    return Group(table, Text(), _summary(findings))


def _summary(findings: Sequence[CheckResult]) -> Text:
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in CheckStatus}
    return Text(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items()))


def _value(key: SiteKey) -> str:
    return key.value if isinstance(key.value, str) else json.dumps(key.value)
