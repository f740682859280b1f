"""What is shown of a site's keys and of what the doctor found."""

from __future__ import annotations

from rich.console import Console

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.site import SiteKey
from hetctl.reports.setup_tables import doctor_table, keys_table


def show(renderable) -> list[str]:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


def test_keys_name_their_file_by_a_number():
    keys = [
        SiteKey("nodes", 9, "/a/mine.yaml", 4),
        SiteKey("mpi", None),
        SiteKey("launcher", "srun", "/b.yaml", 2),
    ]
    lines = [line.split() for line in show(keys_table(keys))]
    assert ["nodes", "[1]:4", "9"] in lines
    assert ["mpi", "default", "null"] in lines
    assert ["launcher", "[2]:2", "srun"] in lines
    assert lines[-2:] == [["[1]", "/a/mine.yaml"], ["[2]", "/b.yaml"]]


def test_measured_links_have_a_date_instead_of_a_file():
    lines = [line.split() for line in show(keys_table([SiteKey("links", {}, measured_at=86400.0 * 200)]))]
    assert ["links", "measured", "1970-07-20", "{}"] in lines


def test_findings_say_what_to_fix_and_hide_control_characters():
    checks = [
        CheckResult("commands", CheckStatus.OK, "sbatch"),
        CheckResult("queue main", CheckStatus.FAILED, "none\x1b[31m of this name", "correct `queues`"),
    ]
    lines = show(doctor_table("lab", checks))
    assert any(line.split() == ["queue", "main", "failed", "none", "of", "this", "name"] for line in lines)
    assert any(line.strip() == "to fix: correct `queues`" for line in lines)
    assert lines[-1].strip() == "1 ok, 0 warning, 1 failed"
    assert max(map(len, lines)) <= 80
