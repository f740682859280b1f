"""The documentation: every command, option, key, event and exit code is in it, and what it shows works."""

import ast
import dataclasses
import importlib.resources
import json
import re
import shlex
import typing
from pathlib import Path

import click
import pytest
from test_house import MAY_IMPORT

from hetctl.cli.main import cli
from hetctl.inputs.quantities import format_duration
from hetctl.model import errors
from hetctl.model.combinations import TABLE
from hetctl.model.event_records import FORMS
from hetctl.model.events import Event
from hetctl.model.hops import VisitEnd
from hetctl.model.job import Job
from hetctl.model.pipelines import PipelineLayout
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.run_status import RunStatus
from hetctl.model.searches import SearchStatus
from hetctl.model.site import Timeouts
from hetctl.scheduling.planners import PLANNERS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "hetctl"
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def walk(command, path):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), f"{path} {name}")


COMMANDS = dict(walk(cli, "hetctl"))
every_command = pytest.mark.parametrize("path", [path for path in COMMANDS if path != "hetctl"])


def options_of(path):
    parameters = [p for p in COMMANDS[path].params if isinstance(p, click.Option)]
    return {name for option in parameters for name in (*option.opts, *option.secondary_opts)}


def section(page, heading):
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading}"
    return found[1]


def parse(line):
    """Parse a command line as hetctl would, without running it."""
    name, *arguments = shlex.split(line, comments=True)
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    while arguments and f"{name} {arguments[0]}" in COMMANDS:
        name = f"{name} {arguments.pop(0)}"
    COMMANDS[name].make_context(name, arguments)


def commands_shown(text):
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("hetctl ")]


def example_of(path):
    found = re.search(r"^ *Example: (hetctl .+)$", COMMANDS[path].help, re.MULTILINE)
    assert found, f"the help of {path} has no example"
    return found[1]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "rates.csv").touch()
    monkeypatch.chdir(tmp_path)


@every_command
@pytest.mark.usefixtures("project")
def test_help_has_an_example_that_parses(path):
    example = example_of(path)
    assert example == path or example.startswith(f"{path} ")
    parse(example)


@every_command
def test_every_command_has_its_section_with_its_example(path):
    assert example_of(path) in section("cli.md", path)


@every_command
def test_every_option_is_described(path):
    text = section("cli.md", path)
    if "(#shared-options)" in text:
        text += section("cli.md", "Shared options")
    missing = {name for name in options_of(path) if f"`{name}" not in text}
    assert missing <= {"-h", "--help"}


def test_no_option_is_described_that_does_not_exist():
    described = set(re.findall(r"`(--?[a-z][a-z-]*)", (DOCS / "cli.md").read_text(encoding="utf-8")))
    assert described == set().union(*map(options_of, COMMANDS)) | {"-h", "--help"}


def test_every_variable_is_described():
    parameters = [parameter for command in COMMANDS.values() for parameter in command.params]
    variables = {parameter.envvar for parameter in parameters if parameter.envvar}
    assert len(variables) > 3
    assert [name for name in variables if f"`{name}`" not in section("cli.md", "Shared options")] == []


@every_page
@pytest.mark.usefixtures("project")
def test_commands_that_pages_show_parse(page):
    for line in commands_shown(page.read_text(encoding="utf-8")):
        if line not in ("hetctl --help", "hetctl --version"):
            parse(line)


def test_a_wrong_command_line_would_be_seen():
    with pytest.raises(click.UsageError):
        parse("hetctl plan --gpu-count 3")


def test_every_exit_code_is_described():
    text = section("files.md", "Exit codes")
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in classes:
        assert f"| {kind.exit_code} | `{kind.kind}` |" in text


def events_written():
    """Return the kind and the named fields of every event that the runtime writes."""
    for path in sorted((ROOT / "hetctl/runtime").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "write" or not node.args:
                continue
            if isinstance(node.args[0], ast.Constant):  # anything else is a file's content
                yield node.args[0].value, [keyword.arg for keyword in node.keywords if keyword.arg]


def test_every_event_is_described_with_its_fields():
    rows = section("files.md", "Events").splitlines()
    events = list(events_written())
    assert len(events) > 10
    for kind, fields in events:
        row = next((row for row in rows if row.startswith(f"| `{kind}` |")), "")
        assert row, f"event {kind} is not in docs/files.md"
        assert [field for field in fields if f"`{field}`" not in row] == [], kind


def test_every_event_is_written_with_the_fields_that_are_read():
    checked = set()
    for kind, given in events_written():
        needed = {
            f.name for f in dataclasses.fields(FORMS.get(kind, Event)) if f.default is dataclasses.MISSING
        }
        if kind in FORMS and not needed.isdisjoint(given):  # others write a whole value
            assert needed <= set(given), kind
            checked.add(kind)
    assert len(checked) > 10


def dataclasses_in(kind):
    """Yield a dataclass, and those of which its fields are made."""
    yield kind
    for hint in typing.get_type_hints(kind).values():
        for part in (
            hint,
            *(inner for one in typing.get_args(hint) for inner in (one, *typing.get_args(one))),
        ):
            if dataclasses.is_dataclass(part):
                yield from dataclasses_in(part)


@pytest.mark.parametrize("kind", [RunStatus, SearchStatus, Plan])
def test_every_key_of_json_is_described(kind):
    text = (DOCS / "files.md").read_text(encoding="utf-8")
    own = {Job, PipelineLayout, VisitEnd}  # described where they are stored; of hops none is shown
    found = {part for part in dataclasses_in(kind) if part not in own}
    keys = {f.name for part in found for f in dataclasses.fields(part)}
    assert len(keys) > 10
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_every_key_of_run_json_is_described():
    rows = section("files.md", "run.json").splitlines()
    described = {key for row in rows if row[:3] == "| `" for key in re.findall("`(\\w+)`", row.split("|")[1])}
    assert described == {field.name for field in dataclasses.fields(RunSpec)}


def keys_of(schema):
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from keys_of(part)


@pytest.mark.parametrize(("kind", "page"), [("ensemble", "ensemble.md"), ("site", "sites.md")])
def test_every_key_is_described(kind, page):
    schema = importlib.resources.files("hetctl.inputs").joinpath(f"{kind}.schema.json").read_text("utf-8")
    text = (DOCS / page).read_text(encoding="utf-8")
    keys = set(keys_of(json.loads(schema)))
    assert len(keys) > 15
    assert [key for key in sorted(keys) if not re.search(rf"`{key}[`:]", text)] == []


def test_every_timeout_is_described_with_its_default():
    rows = section("sites.md", "Time-outs").splitlines()
    described = {row.split("|")[1].strip(" `"): row.split("|")[2].strip() for row in rows if row[:3] == "| `"}
    usual = dataclasses.asdict(Timeouts())
    assert described == {key.removesuffix("_s"): format_duration(value) for key, value in usual.items()}


def test_every_planner_and_shipped_site_is_described():
    planning = (DOCS / "planning.md").read_text(encoding="utf-8")
    assert [name for name in PLANNERS if f"**`{name}`**" not in planning] == []
    sites = section("sites.md", "The sites that come with hetctl")
    shipped = [path.stem for path in (ROOT / "site-configs").glob("*.yaml")]
    assert [name for name in shipped if f"**`{name}`**" not in sites] == []


def test_what_does_not_go_together_is_described():
    rows = [(", ".join(ones), ", ".join(others), reason, hint) for ones, others, reason, hint in TABLE]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    assert table in section("planning.md", "What does not go together"), table


def test_the_house_is_described_as_it_is():
    rows = [row.split("|") for row in section("structure.md", "Packages").splitlines() if row[:3] == "| `"]
    described = {cells[1].strip(" `"): set(re.findall(r"`([\w.]+)`", cells[3])) for cells in rows}
    assert described == MAY_IMPORT


@every_page
def test_links_of_a_page_lead_to_existing_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).is_file()] == []


@pytest.mark.parametrize("file", [*PAGES, DOCS / "images/status.svg"], ids=lambda file: file.name)
def test_no_path_of_the_writers_machine_is_shown(file):
    allowed = {"path", "shared"}
    roots = set(re.findall(r"(?<![\w.:/<>~*})])/([a-z]\w*)", file.read_text(encoding="utf-8")))
    assert roots <= allowed


def test_modules_and_types_named_in_structure_exist():
    """So that its ways through the code stay true."""
    text = (DOCS / "structure.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert [m for m in modules if not list(PACKAGE.glob(f"**/{m}")) and not (ROOT / m).exists()] == []
    classes = {name for path in PACKAGE.glob("**/*.py") for name in CLASS.findall(path.read_text("utf-8"))}
    named = set(re.findall(r"`([A-Z][a-z]\w*)`", text))
    assert named
    assert named - classes == set()


def test_options_of_one_name_have_one_vocabulary():
    """Choices of one option are, in every command, some of the same words."""
    words = {}
    for command in COMMANDS.values():
        for option in command.params:
            choices = getattr(option.type, "choices", None)
            for name in option.opts if isinstance(option, click.Option) else ():
                words.setdefault(name, []).append(frozenset(choices) if choices else None)
    for name, found in words.items():
        largest = max(found, key=lambda choices: len(choices or ()))
        assert all((choices or frozenset()) <= (largest or frozenset()) for choices in found), name
        assert len({choices is None for choices in found}) == 1, name


BY_TYPE = {"--gpus"}
"""Options whose value may have a number for each type of GPU in a simulation, and is one number elsewhere."""
BY_WORD = {"--best"}
"""Options that read as one word: the best N trials, and of the best epoch, beside ``--last``."""


def test_options_of_one_name_take_one_kind_of_value():
    """A FILE of one command is no MEMBER of another, and what is a flag somewhere is one everywhere."""
    kinds = {}
    for command in COMMANDS.values():
        for option in command.params:
            for name in option.opts if isinstance(option, click.Option) else ():
                kinds.setdefault(name, set()).add((option.is_flag, option.metavar or option.type.name))
    assert {name for name, found in kinds.items() if len(found) > 1} == BY_TYPE | BY_WORD
