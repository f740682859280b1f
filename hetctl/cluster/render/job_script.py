"""Script of a batch job, and the command that submits it."""

from __future__ import annotations

import importlib.resources
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.errors import BadInputError, DiskError
from hetctl.model.job import SUPERSEDED_EXIT, TRAIN
from hetctl.model.site import GPUS_PER_NODE, GRES, MEMBERS, Queue, Site, is_overridable
from hetctl.model.values import dataclass
from hetctl.storage.paths import JobFiles, RunFolder

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


@dataclass(frozen=True)
class QuotingRule:
    """Rule for a place in a script: pattern of valid values, its description, and the quoting function."""

    place: str
    pattern: re.Pattern[str]
    wanted: str
    quote: Callable[[str], str] = shlex.quote

    def __call__(self, value: object) -> str:
        """Return the quoted value.

        Raises
        ------
        BadInputError
            If the value is not valid in this place.
        """
        text = str(value)
        if not self.pattern.fullmatch(text):
            raise BadInputError(
                f"{text!r} in {self.place} must have {self.wanted}",
                "change it in the site file, or choose another name or folder",
            )
        return self.quote(text)


PRINTABLE = r"[^\x00-\x1f\x7f]*"

# sbatch accepts both kinds of quotes, but treats a backslash as an escape even within single quotes (tested
# with 22.05). bsub's parsing of quotes is undocumented, so its values must not contain any.
FILTERS: dict[str, Callable[[object], str]] = {
    "shell": QuotingRule("the script", re.compile(PRINTABLE), "no control characters"),
    "variable": QuotingRule(
        "the environment", re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "the form of a variable's name"
    ),
    "line": QuotingRule("a directive", re.compile(PRINTABLE), "no control characters", str),
    "sbatch": QuotingRule(
        "a line #SBATCH", re.compile(r"[^\x00-\x1f\x7f\\]+"), "neither backslashes nor control characters"
    ),
    "bsub": QuotingRule(
        "a line #BSUB",
        re.compile(r"[\w./:,+=@][\w./:,+=@-]*", re.ASCII),
        "letters, digits and ._/:,+=@- only",
    ),
    # Flux fills in what is in braces.
    "flux": QuotingRule(
        "a line # flux:", re.compile(r"[^\x00-\x1f\x7f{}]+"), "neither braces nor control characters"
    ),
    # A colon in the path of a log would separate a host from it.
    "qsub": QuotingRule(
        "a line #PBS",
        re.compile(r"[\w./,+=@][\w./,+=@-]*", re.ASCII),
        "letters, digits and ._/,+=@- only",
    ),
}


MEBIBYTE = 2**20


@dataclass(frozen=True)
class JobScript:
    """Complete input of a script.

    Parameters
    ----------
    folder : RunFolder
        Folder of the run, of a profiling job or of a test.
    name : str
        Name of the job at the batch system.
    home : Path
        ``$HETCTL_HOME``.
    mode : str
        ``TRAIN``, ``PROFILE`` or ``PROBE``.
    job : int
        Number of the job in its run.
    grace_s : int
        Seconds before the limit at which the script gets USR2; 0: never.
    python : str
        Interpreter on the compute nodes if the site names none.
    after : str or None
        Id of the job that must be over before this one starts.
    exclude : tuple of str
        Nodes that the job must not use.
    chain : bool
        If true, submit the next job as soon as this one starts.
    ahead : bool
        If true, the next job may be queued before this one starts, and awaits its end.
    """

    folder: RunFolder
    name: str
    site: Site
    queue: Queue
    nodes: int
    wall_s: int
    home: Path
    mode: str = TRAIN
    job: int = 0
    grace_s: int = 0
    python: str = field(default_factory=lambda: sys.executable)
    after: str | None = None
    exclude: tuple[str, ...] = ()
    chain: bool = False
    ahead: bool = False

    @property
    def files(self) -> JobFiles:
        """Script, log and other files of the job."""
        return self.folder.job(self.job)


def render_job(job: JobScript, template_folders: Sequence[Path] = ()) -> str:
    """Return the text of the job's script.

    Parameters
    ----------
    template_folders : sequence of Path
        Template folders searched in order before hetctl's own: the project's, then the user's.

    Raises
    ------
    BadInputError
        If a value is not valid in a script, the grace is too long, or the template is missing or wrong.
    """
    # Only now: it is a tenth of the time of `hetctl advance`, which renders nothing once a run is over.
    from jinja2 import TemplateError, TemplateNotFound

    _check(job)
    name = job.site.template or f"{job.site.batch_system}.sh.j2"
    folders = [*map(str, template_folders), str(importlib.resources.files("hetctl") / "templates")]
    try:
        return _environment(folders).get_template(name).render(_values(job))
    except TemplateNotFound as error:
        raise BadInputError(
            f"template {error.name!r} of site {job.site.name!r} is in none of {', '.join(folders)}",
            "set template in the site file to the name of a file in one of these folders",
        ) from None
    except TemplateError as error:
        raise BadInputError(f"template {name!r} of site {job.site.name!r}: {error}") from None


def submit_command(job: JobScript) -> tuple[str, ...]:
    """Return the command that submits the script; it reads standard input with ``submit_by: stdin``."""
    command = BATCH_SYSTEMS[job.site.batch_system].submit
    return command if job.site.submit_by == "stdin" else (*command, str(job.files.script))


def refuse_unknown_options(site: Site) -> None:
    """Raise BadInputError if the batch system of a site has none of a name in its `job_options`."""
    known = BATCH_SYSTEMS[site.batch_system].job_options
    for name in site.job_options.keys() - known.keys():
        raise BadInputError(
            f"job option {name!r} is none of {site.batch_system}'s: {', '.join(known) or 'none'}",
            "correct --job-option or job_options in the site file; `directives` takes any option",
        )


def _check(job: JobScript) -> None:
    unit = BATCH_SYSTEMS[job.site.batch_system].time_unit_s
    if _ceil(job.grace_s, unit) >= _ceil(job.wall_s, unit):
        raise BadInputError(
            f"grace of {job.grace_s} s must be shorter than the limit of {job.wall_s} s (units of {unit} s)",
            "raise --time",
        )
    launcher = LAUNCHERS[job.site.launcher]
    if launcher.most_nodes is not None and job.nodes > launcher.most_nodes:
        raise BadInputError(
            f"{job.nodes} nodes; the launcher {launcher.name!r} has at most {launcher.most_nodes}",
            "choose another launcher in the site file",
        )
    refuse_unknown_options(job.site)
    if job.site.launch == MEMBERS and job.site.device == "gpu" and not job.site.requests_gpus:
        raise BadInputError(
            "launch: members with request: {gpus: none}: the members of a node would share its first GPUs",
            "set launch: nodes",
        )
    for variable in launcher.forbidden_variables:
        if variable in job.site.environment:
            raise BadInputError(
                f"{variable} in the environment of site {job.site.name!r}: {launcher.name} fails with it",
                "remove it from the site file",
            )


def _values(job: JobScript) -> dict[str, Any]:
    """Return the variables of templates: plain values only, since a Path would give access to files."""
    options, (gres, directives) = BATCH_SYSTEMS[job.site.batch_system].job_options, split_gres(job.site)
    return {
        "mode": job.mode,
        "run": job.folder.name,
        "job": job.job,
        "name": job.name,
        "run_folder": str(job.folder.path),
        "log": str(job.files.log),
        "stop": str(job.files.stop),
        "claim": str(job.files.claim),
        "superseded_exit": SUPERSEDED_EXIT,
        "of_disk": DiskError.exit_code,
        # The file whose existence means that the next job has the run.
        "next": str(job.files.of_next.claim if job.ahead else job.files.of_next.script),
        "site": job.site,
        "queue": job.queue.name,
        "nodes": job.nodes,
        "cores": job.site.requested_cores,
        "memory_mib": job.site.memory_per_node // MEBIBYTE,
        "wall_s": job.wall_s,
        "grace_s": job.grace_s,
        "python": job.site.python or job.python,
        "home": str(job.home),
        "after": job.after,
        "exclude": job.exclude,
        "chain": job.chain,
        "whole_nodes": LAUNCHERS[job.site.launcher].whole_nodes,
        # A job that measures would measure again what is in its files already.
        "requeue": job.site.requeue and job.mode == TRAIN,
        "gres": gres,
        "directives": directives,
        "job_options": [(options[name], value) for name, value in job.site.job_options.items()],
    }


GRES_OPTION = re.compile(r"--gres[= ]\s*(?P<resources>.*\S)\s*")


def split_gres(site: Site) -> tuple[list[str], list[str]]:
    """Return the generic resources that Slurm's jobs request on each node, and a site's other directives.

    Of several lines ``--gres`` Slurm uses the last one, so those of the site are merged with the GPUs. Where
    they name GPUs themselves, such as ``gpu:a100:4``, these are the node's.

    Raises
    ------
    BadInputError
        If they name another number of GPUs, or the site requests GPUs by another option.
    """
    found = [(directive, GRES_OPTION.fullmatch(directive)) for directive in site.directives]
    named = [one for _, match in found if match for one in match["resources"].split(",")]
    own = [one for one in named if one.partition(":")[0] == "gpu"]
    # Without a number, or with the cores near a GPU in brackets: gpu, gpu:a100, gpu:4(S:0-1).
    counts = [re.search(r":(\d{1,6})(\(|$)", one, re.ASCII) for one in own]
    count = sum(int(match[1]) if match else 1 for match in counts)
    if own and (site.request.gpus == GPUS_PER_NODE or count != site.gpus_per_node):
        raise BadInputError(
            f"--gres={','.join(own)} in a directive requests {count} GPUs, beside the {site.gpus_per_node} of"
            f" gpus_per_node by --{site.request.gpus}",
            "correct directives, gpus_per_node or request in the site file",
        )
    gpus = site.requests_gpus and site.request.gpus == GRES and not own
    others = [directive for directive, match in found if not match]
    return [*([f"gpu:{site.gpus_per_node}"] if gpus else []), *named], others


def _environment(folders: Sequence[str]) -> SandboxedEnvironment:
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests["of_communication"] = is_overridable
    environment.filters.update(FILTERS, hours_minutes=hours_minutes, minutes=minutes, clock=clock)
    return environment


def clock(seconds: int) -> str:
    """Return a time in Slurm's form hours:minutes:seconds."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def minutes(seconds: int) -> int:
    """Return a time in minutes, rounded up, because LSF has no smaller unit."""
    return _ceil(seconds, 60)


def hours_minutes(seconds: int) -> str:
    """Return a time in LSF's form hours:minutes, rounded up."""
    whole = minutes(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
