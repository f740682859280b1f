"""Nothing that a user names is run: every kind of script, whatever names, accounts and paths hold."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.app.doctor.sample_jobs import cases_of, script_of
from hetctl.cluster.render import JobScript, render_job
from hetctl.inputs.site_file import find_site, list_sites
from hetctl.model.errors import BadInputError
from hetctl.storage.paths import Home

SITES = {name: find_site(name, project=None, home=None) for name, _ in list_sites(project=None, home=None)}
UNLIKE = {(site.batch_system, site.launcher, site.template): name for name, site in SITES.items()}.values()
"""A site for each kind of script: those of one kind differ in values that no user gives."""
CANARY = "$(touch canary)"
PIECES = [
    *(
        "a",
        "B7",
        "é",
        " ",
        "'",
        '"',
        "\\",
        "\n",
        "\t",
        "\r",
        "\0",
        "-",
        "--wrap=ls",
        "/",
        "..",
        "%j",
        "%",
        "#",
    ),
    *(
        "=",
        "~",
        "&",
        "|",
        "<",
        ">",
        "(",
        ")",
        "{",
        "}",
        "!",
        "*",
        "?",
        "[a]",
        "\u2028",
        "\x7f",
        "\u202e",
        "EOF",
    ),
    *(CANARY, "`touch canary`", "${x}", "$x", ";touch canary", "\n#SBATCH --wrap=x\n", "\ntouch canary\n"),
]
NASTY = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


def nasty_job(name: str, values: dict[str, str]) -> JobScript:
    """Put nasty values wherever a user's own words come into a script."""
    site = SITES[name]
    job = script_of(site, cases_of(site)[-1])
    home = Home(Path("/", values["folder"]))
    return dataclasses.replace(
        job,
        folder=home.run(values["run"]),
        name=values["name"],
        home=home.path,
        python=values["python"],
        exclude=(values["node"],),
        queue=dataclasses.replace(job.queue, name=values["queue"]),
        site=dataclasses.replace(
            site, account=values["account"], environment={"NASTY": values["value"]}, setup=(), directives=()
        ),
    )


WORDS = ("run", "name", "account", "folder", "python", "node", "queue", "value")
VALUES = st.fixed_dictionaries({word: st.one_of(st.just("plain"), NASTY) for word in WORDS})
EACH_ALONE = st.sampled_from(WORDS).flatmap(
    lambda word: NASTY.map(lambda text: {**dict.fromkeys(WORDS, "plain"), word: text})
)


def rendered(name: str, values: dict[str, str]) -> str | None:
    try:
        return render_job(nasty_job(name, values))
    except BadInputError:
        return None


def as_function(number: int, script: str) -> str:
    """Wrap a script so that bash checks many at once, each on its own."""
    return f"script_{number}() {{\n{script}\n}}\n"


@pytest.mark.parametrize("name", UNLIKE)
@settings(max_examples=2)
@given(many=st.lists(EACH_ALONE, min_size=15, max_size=30))
def test_bash_accepts_every_script_with_nasty_values(name: str, many: list[dict[str, str]]) -> None:
    scripts = [script for values in many if (script := rendered(name, values)) is not None]
    text = "".join(as_function(number, script) for number, script in enumerate(scripts))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNLIKE)
@settings(max_examples=10)
@given(values=VALUES)
def test_no_value_adds_a_line(name: str, values: dict[str, str]) -> None:
    script = rendered(name, values)
    if script is not None:
        plain = rendered(name, dict.fromkeys(WORDS, "plain"))
        assert plain is not None
        assert len(script.split("\n")) == len(plain.split("\n"))
        starts = [line.split("=")[0].split(" ")[:2] for line in script.split("\n") if line.startswith("#")]
        assert starts == [
            line.split("=")[0].split(" ")[:2] for line in plain.split("\n") if line.startswith("#")
        ]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["local", "slurm", "lsf"])
def test_bash_runs_none_of_it(name: str, word: str, tmp_path: Path) -> None:
    """Run the script down to where the driver would start, with values that would leave a file behind."""
    pieces = (CANARY, "`touch canary`", "'; touch canary; '", '"; touch canary; "', "\ntouch canary\n")
    for piece in pieces:
        values = {**dict.fromkeys(WORDS, "plain"), word: piece}
        script = rendered(name, values)
        if script is None:
            continue
        head = script.partition("\n# Of several scripts")[0]
        assert head != script
        lines = [line for line in head.splitlines() if not line.startswith("exec ")]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines) + '\nprintf %s "$NASTY"'],
            cwd=tmp_path,
            env={**os.environ, "SLURM_JOB_ID": "7", "LSB_JOBID": "7"},
            capture_output=True,
            text=True,
        )
        assert list(tmp_path.iterdir()) == []
        assert done.stdout == values["value"]


@pytest.mark.parametrize("name", SITES)
def test_what_is_plain_is_accepted_everywhere(name: str) -> None:
    assert rendered(name, dict.fromkeys(WORDS, "plain")) is not None


@settings(max_examples=30)
@given(text=NASTY)
def test_a_folder_is_quoted_for_the_shell_or_refused(text: str) -> None:
    script = rendered("local", {**dict.fromkeys(WORDS, "plain"), "folder": text})
    if script is not None:
        line = next(line for line in script.split("\n") if line.startswith("export HETCTL_HOME="))
        assert shlex.split(line.partition("=")[2]) == [str(Path("/", text))]
