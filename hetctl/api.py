"""hetctl in Python: ensembles, plans and runs, by the functions of the command line and with its options."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hetctl.app.project import Project
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.events import Request

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from hetctl.model.ensemble import Ensemble as Definition
    from hetctl.model.plan import Plan
    from hetctl.model.run_status import RunStatus

F = TypeVar("F", bound=Callable[..., Any])
ENTRY = "hetctl_member"
"""Attribute of a function that builds a network: its keys as a member."""
FRAMES = ("epochs", "members", "trials")


def member(function: F | None = None, **keys: Any) -> Any:
    """Make a function that builds a network a member, with the keys of a member in an ensemble file.

    Its name is the function's, unless ``name`` is given::

        @hetctl.member(config={"units": 64}, batch_size=32)
        def small(config): ...
    """

    def decorated(of: F) -> F:
        setattr(of, ENTRY, {"name": of.__name__, **keys})
        return of

    return decorated if function is None else decorated(function)


class Ensemble:
    """Members to be trained, from an ensemble file or by the same keys in Python.

    Parameters
    ----------
    file : path or None
        File, or name in the catalog; None: `keys` define the ensemble, or, without any, ``ensemble.yaml``.
    **keys
        Keys of an ensemble file. ``input_fn``, ``model_fn``, ``train_fn`` and ``evaluate_fn`` are functions
        of a module in a file, which ranks import; a member is a mapping, or a function with `member`.

    Raises
    ------
    BadInputError
        If a key is wrong, or a function has no file.
    """

    def __init__(self, file: str | Path | None = None, **keys: Any) -> None:
        if file is not None and keys:
            raise BadInputError(f"both the file {file} and keys were given", "give one of them")
        named = None if file is None else str(file)
        self.definition: Definition = _defined(keys) if keys else Project.here().ensemble(named)

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    def __repr__(self) -> str:
        return f"<ensemble {self.name}: {len(self.definition.members)} members>"


def plan(ensemble: Ensemble | None = None, **options: Any) -> Plan:
    """Plan an ensemble, by default that of ``ensemble.yaml``, and store the plan, as ``hetctl plan`` does.

    Parameters
    ----------
    **options
        Options of the command, with ``_`` for ``-``: ``gpus=16, time="2h"``.
    """
    from hetctl.app.plan.planning import plan_and_save
    from hetctl.cli.cmd_plan import plan_command
    from hetctl.cli.options import called, plan_request

    project = Project.here()
    with called(plan_command, options) as context:
        of_plan = {name: value for name, value in context.params.items() if name != "ensemble"}
        request, _ = plan_request(project, (ensemble or Ensemble()).definition, **of_plan)
    return plan_and_save(project, request)


def submit(ensemble: Ensemble | None = None, *, wait: bool = False, **options: Any) -> Run:
    """Start or continue a run of an ensemble, as ``hetctl submit`` does; with `wait`, follow it to its end.

    Parameters
    ----------
    **options
        Options of the command, with ``_`` for ``-``: ``site="frontier", gpus=16, time="2h"``.
    """
    from hetctl.cli.cmd_run import begin, submit_command
    from hetctl.cli.options import called

    with called(submit_command, options) as context:
        outcome, _ = begin(context, Project.here(), (ensemble or Ensemble()).definition)
    begun = Run(outcome.run)
    return begun.wait() if wait else begun


def run(name: str | None = None) -> Run:
    """Return a run of the project in this folder, by default the newest; BadInputError without one."""
    from hetctl.app.run.select_run import named_run

    return Run(named_run(Project.here(), name).name)


class Run:
    """Run of the project in the working directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<run {self.name}>"

    def status(self) -> RunStatus:
        """Return its present status, with all members; times are seconds."""
        from hetctl.app.run.status import run_status

        return run_status(Project.here(), self.name)

    def wait(self) -> Run:
        """Show the run until it ends, on a terminal or in a notebook, and submit its jobs where needed.

        Raises
        ------
        MembersFailedError, RunStalledError
            If members have failed, or the run is stalled.
        """
        from hetctl.cli.cmd_run import status_command
        from hetctl.cli.options import called
        from hetctl.cli.watch import follow

        with called(status_command, {}):
            follow(Project.here(), self.name, advancing=True)
        return self

    def cancel(self, *members: str) -> None:
        """Cancel its jobs, or stop training some of its members for good."""
        from hetctl.app.run.lifecycle import cancel

        if members:
            self._request(Request.CANCEL, members)
        else:
            cancel(Project.here(), self.name)

    def pause(self, *members: str) -> None:
        """Stop members, and keep their places in the run."""
        self._request(Request.PAUSE, members)

    def resume(self, *members: str) -> None:
        """Train members again that were paused or cancelled."""
        self._request(Request.RESUME, members)

    def retry(self, *members: str) -> None:
        """Train members again that have failed."""
        self._request(Request.RETRY, members)

    def add(self, *members: str, ensemble: str | Path | None = None) -> None:
        """Add members of the ensemble file, by default all new ones."""
        from hetctl.app.run.edit_run import add_members

        project = Project.here()
        found = project.ensemble(None if ensemble is None else str(ensemble))
        add_members(project, (self.name, *members), found)

    def drop(self, *members: str) -> None:
        """Take members out of the run; what they have written stays."""
        from hetctl.app.run.edit_run import drop_members

        drop_members(Project.here(), (self.name, *members))

    def change(self, *members: str, **options: Any) -> None:
        """Change its next jobs, and when its members stop, or some of them.

        Parameters
        ----------
        options : mapping
            Those of ``hetctl change``, with ``_`` for ``-``; without any, the ensemble file counts.
        """
        from hetctl.cli.cmd_members import change, change_command
        from hetctl.cli.options import called

        with called(change_command, options) as context:
            change(Project.here(), (self.name, *members), context.params)

    def _request(self, want: Request, members: Sequence[str]) -> None:
        from hetctl.app.run.edit_run import request

        request(Project.here(), (self.name, *members), want)

    def frame(self, what: str = "epochs") -> pd.DataFrame:
        """Return its finished epochs, its members, or the trials of its search, as a table of pandas.

        Each row has the values of its member's config in columns ``config.NAME``; times are seconds, rates
        samples/s.

        Parameters
        ----------
        what : str
            ``epochs``, ``members`` or ``trials``.
        """
        try:
            import pandas as pd
        except ImportError:
            raise BadInputError("pandas is not installed", "`pip install pandas`") from None
        if what not in FRAMES:
            raise BadInputError(f"there is no frame {what!r}", f"it is one of {', '.join(FRAMES)}")
        return pd.DataFrame(list(self._rows(what)))

    def ensemble(
        self, path: str | Path | None = None, *, way: str = "greedy", soups: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Average its members, and return what ``hetctl ensemble --json`` says.

        Parameters
        ----------
        path : path or None
            Folder that is written, by the ensemble `way`; None: none is.
        """
        words = [self.name, "--way", way, *["--soups"] * soups, *["--force"] * force]
        return _said("ensemble", *words, *([] if path is None else ["-o", str(path)]))

    def best(self, member: str | None = None) -> Trained:
        """Return a member's best epoch, by default that of the member with the best metric."""
        return Trained(self.name, member)

    def _rows(self, what: str) -> Iterator[dict[str, Any]]:
        from hetctl.app.run.status import search_in

        project, status = Project.here(), self.status()
        if what == "trials":
            search = search_in(project, status)
            for trial in search.trials if search else ():
                yield {**_plain(trial, "config"), **_config(trial.config)}
            return
        for each in status.members:
            config = _config(each.config)
            if what == "members":
                yield {
                    **_plain(each, "config", "live_metrics", "log"),
                    "gpus": max(each.gpus_by_round, default=0),
                    **config,
                }
                continue
            for done in status.history[each.member]:
                yield {"member": each.member, **_plain(done), **done.metrics, **config}


class Trained:
    """Weights of a member's best epoch.

    Parameters
    ----------
    member : str or None
        Name of the member; None: the one with the best metric.
    """

    def __init__(self, run: str, member: str | None) -> None:
        self._names = (run,) if member is None else (run, member)

    def export(self, path: str | Path, *, force: bool = False) -> dict[str, Any]:
        """Write the weights, and return what ``hetctl export --json`` says: member, epoch, path, curve.

        Parameters
        ----------
        path : path
            File whose ending gives the format, or a folder; see ``hetctl export``.
        """
        return _said("export", *self._names, "-o", str(path), *["--force"] * force)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a PyTorch network on the CPU; BadInputError for another framework."""
        with self._file(".pt") as path:
            import torch

            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state

    def model(self) -> Any:
        """Return the Keras model with these weights; BadInputError for another framework."""
        with self._file(".keras") as path:
            import keras

            return keras.models.load_model(path)

    @contextmanager
    def _file(self, ending: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="hetctl-") as folder:
            path = Path(folder) / f"weights{ending}"
            self.export(path)
            yield path


def _said(*words: str) -> dict[str, Any]:
    """Return what a command says with ``--json``; BadInputError if it fails."""
    # In another process: it hides GPUs from itself, and imports the user's modules as they were.
    done = subprocess.run([sys.executable, "-m", "hetctl", *words, "--json"], capture_output=True, text=True)
    said: dict[str, Any] = json.loads(done.stdout)
    if error := said.get("error"):
        raise BadInputError(error["message"], error["hint"])
    return said


def _plain(value: object, *but: str) -> dict[str, Any]:
    """Return the fields of a record that are numbers or text."""
    kinds = (str, int, float, type(None))
    fields = {name: field for name, field in vars(value).items() if isinstance(field, kinds)}
    return {name: field for name, field in fields.items() if name not in but}


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {f"config.{name}": value for name, value in config.items()}


def _defined(keys: Mapping[str, Any]) -> Definition:
    """Return the ensemble of these keys; its folder is that of the functions' module."""
    from hetctl.inputs.ensemble_file import ensemble_of
    from hetctl.inputs.input_errors import SourceLine
    from hetctl.inputs.yaml_source import YamlSource
    from hetctl.model.ensemble import Functions

    files: set[Path] = set()

    def named(function: Any) -> Any:
        return _reference(function, files) if callable(function) else function

    own = {name: named(keys[name]) for name in vars(Functions("", "")) if name in keys}
    rest = {name: value for name, value in keys.items() if name not in own}
    members = [_entry(each, own, named) for each in keys.get("members", ())]
    functions = {**own, **{name: named(value) for name, value in keys.get("functions", {}).items()}}
    if members and "model_fn" not in functions and callable(keys["members"][0]):
        functions |= members[0]["functions"]
    values = {**rest, **({"functions": functions} if functions else {}), "members": members}
    if len(folders := {file.parent for file in files}) > 1:
        raise BadInputError(
            f"functions are in several folders: {', '.join(map(str, sorted(folders)))}",
            "put their modules into one folder, from which ranks import them",
        )
    path = min(files, default=Path.cwd() / "python")
    return ensemble_of(YamlSource(path, json.loads(json.dumps(values)), {(): SourceLine(path, 1)}))


def _entry(given: Any, own: Mapping[str, Any], named: Callable[[Any], Any]) -> Any:
    """Return a member's entry of an ensemble file."""
    if not callable(given):
        return given
    return {**getattr(given, ENTRY, {"name": given.__name__}), "functions": {**own, "model_fn": named(given)}}


def _reference(function: Callable[..., Any], files: set[Path]) -> str:
    """Return a function as ``module:name``, and add the file of its module to `files`."""
    file = getattr(sys.modules[function.__module__], "__file__", None)
    if file is None:
        raise BadInputError(
            f"function {function.__name__} is in no file, so that ranks cannot import it",
            "put it into a module, in a notebook with `%%writefile nets.py`, and import it from there",
        )
    files.add(Path(file).resolve())
    name = Path(file).stem if function.__module__ == "__main__" else function.__module__
    return f"{name}:{function.__qualname__}"


__all__ = ["BadInputError", "Ensemble", "HetctlError", "Run", "Trained", "member", "plan", "run", "submit"]
