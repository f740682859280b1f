"""Command line ``hetctl``; its commands are imported when they are called, so that ``--help`` is fast."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hetctl import __version__
from hetctl.cli.output import fail, report_interruption
from hetctl.model.errors import DiskError, HetctlError, InterruptedCommandError, is_transient
from hetctl.model.interpreter import skip_last_collections, without_collections

if TYPE_CHECKING:
    from hetctl.app.project import Waits

COMMANDS = {
    "init": ("cmd_project", "Create a project from an example."),
    "partition": ("cmd_project", "Divide the training data into parts, for nodes with disks of their own."),
    "profile": ("cmd_profile", "Measure the training rate of every member."),
    "plan": ("cmd_plan", "Compute which members train together, and on how many GPUs."),
    "simulate": (
        "cmd_simulate",
        "Simulate a planner on a cluster of any size; or hops, pipelines or batches.",
    ),
    "hopper": ("cmd_hopper", "Write the visits of members that hopped over partitioned data."),
    "pipeline": ("cmd_pipeline", "Check members that trained as pipelines."),
    "render": ("cmd_run", "Print the batch script of a job; no machine is queried."),
    "submit": ("cmd_run", "Start a run, or continue the newest one."),
    "advance": ("cmd_run", "Submit a run's next job."),
    "status": ("cmd_run", "Show the progress of a run."),
    "runs": ("cmd_runs", "List all runs of the project."),
    "logs": ("cmd_runs", "Print or follow the log of a member or job."),
    "explain": ("cmd_runs", "Explain why a member waits, has its GPUs, failed or is done."),
    "compare": ("cmd_runs", "Show what differs between runs, and their results."),
    "search": ("cmd_search", "Show or export the trials of a search."),
    "cancel": ("cmd_run", "Cancel a run, or some of its members; checkpoints are kept."),
    "add": ("cmd_members", "Add members to a run, also while it trains."),
    "drop": ("cmd_members", "Take members out of a run for good."),
    "change": ("cmd_members", "Change the next jobs of a run, and when its members stop."),
    "pause": ("cmd_members", "Take members out of training for some time."),
    "resume": ("cmd_members", "Train paused or cancelled members again."),
    "retry": ("cmd_members", "Train failed members again."),
    "rm": ("cmd_runs", "Remove runs with their logs and checkpoints."),
    "prune": ("cmd_runs", "Delete checkpoints but those of best epochs."),
    "catalog": ("cmd_project", "Make the catalog anew from the files of runs and profiles."),
    "report": ("cmd_run", "Write an HTML page about a run: Gantt chart and learning curves."),
    "export": ("cmd_export", "Write the weights of a member for use without hetctl, with a model card."),
    "ensemble": (
        "cmd_export",
        "Choose and average trained members, and write them for use without hetctl.",
    ),
    "bundle": ("cmd_export", "Write a run into an archive for others, an RO-Crate."),
    "reproduce": ("cmd_export", "Compare code, data and packages with those of a bundle."),
    "sites": ("cmd_sites", "List the known sites, show one, or check a site file."),
    "doctor": ("cmd_sites", "Check a site and report what to fix."),
    "schema": ("cmd_project", "Print the JSON Schema of ensemble or site files."),
    "completion": ("cmd_project", "Print the script that completes commands and names in a shell."),
}
"""Module of each command, and its line in the help."""


FREE_SPACE = "free some space and try again"
WAIT = "the file system does not answer at present; repeat the command"
OTHER_FOLDER = "make it accessible; HETCTL_HOME can be set to another folder"
DISK_TROUBLES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EFBIG: FREE_SPACE,
    errno.EROFS: OTHER_FOLDER,
    errno.EACCES: OTHER_FOLDER,
    errno.EPERM: OTHER_FOLDER,
}


EXTRAS = {"matplotlib": "report", "ortools": "solvers", "scipy": "solvers"}
"""Extra of hetctl with each package that only some commands import."""


class LazyGroup(click.Group):
    """Group whose commands are imported by name when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        with without_collections():
            module = importlib.import_module(f"hetctl.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hetctl")
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
@click.pass_context
def cli(context: click.Context, /, debug: bool) -> None:  # noqa: ARG001
    """Train an ensemble of different neural networks on a Slurm, LSF, PBS or Flux cluster.

    \b
    Example:
      hetctl init demo --example digits
      cd demo
      hetctl submit --wait
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def start() -> None:
    """Run the command that this process was started for."""
    skip_last_collections()
    main()


def main(arguments: Sequence[str] | None = None, waits: Waits | None = None) -> None:
    """Run a command; every failure is reported by `fail` and ends with its exit code.

    Parameters
    ----------
    waits : Waits or None
        Waits of the command; None: the usual ones.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Also of a command line that cannot be parsed.
    as_json = "--json" in given
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s")
    try:
        # Click would otherwise print its errors itself and exit, without a JSON object for --json.
        code = cli.main(given, prog_name="hetctl", standalone_mode=False, obj=waits)
    except click.exceptions.Exit as exit_request:
        code = exit_request.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` shows the usage" if context else ""
        code = fail("bad-input", error.format_message(), hint, 2, as_json=as_json)
    except InterruptedCommandError as error:
        code = report_interruption(error, as_json=as_json)
    except HetctlError as error:
        code = fail(error.kind, error.message, error.hint, error.exit_code, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        code = fail("interrupted", "interrupted", "", 130, as_json=as_json)
    except OSError as error:
        if "--debug" in given:
            raise
        code = _disk_trouble(error, as_json=as_json)
    except Exception as error:
        if "--debug" in given:
            raise
        code = _bug(error, as_json=as_json)
    # Without standalone mode click returns the value of the command's function.
    sys.exit(code if isinstance(code, int) else 0)


def _disk_trouble(error: OSError, *, as_json: bool) -> int:
    """Report an error of the disk: a full disk as bad input, or a transient error; any other is a bug."""
    hint = DISK_TROUBLES.get(error.errno or 0)
    message = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    if hint is not None:
        return fail("bad-input", message, hint, 2, as_json=as_json)
    if is_transient(error):
        return fail(DiskError.kind, message, WAIT, DiskError.exit_code, as_json=as_json)
    return _bug(error, as_json=as_json)


def _bug(error: Exception, *, as_json: bool) -> int:
    """Report an internal error, or that a package of an extra is missing, which is bad input."""
    package = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    if package in EXTRAS:
        message = f"this needs the package {package}, which {sys.executable} does not have"
        return fail("bad-input", message, f"pip install 'hetctl[{EXTRAS[package]}]'", 2, as_json=as_json)
    message = f"internal error: {type(error).__name__}: {error}"
    return fail(
        "internal", message, "this is a bug in hetctl; `hetctl --debug ...` shows where", 1, as_json=as_json
    )
