"""Weights of a member, written from its checkpoint into a file that its framework loads without hetctl."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hetctl.app.project import Project
from hetctl.app.run.select_run import record_of, require_folder, split_names
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError
from hetctl.model.exports import BEST, LAST, Exported
from hetctl.model.run import RunSpec
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.model.values import dataclass
from hetctl.storage.event_files import read_events
from hetctl.storage.kept_modules import code_digest, with_kept_modules
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import checkpoint_folder
from hetctl.storage.run_state import state_in

NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
"""Variables by which a framework uses no GPU, which may be in use."""
OF_FRAMEWORK = {
    "pytorch": ("numpy", "torch", "safetensors"),
    "tensorflow": ("numpy", "tensorflow", "tensorflow-cpu", "keras"),
}
"""Packages that write the files of a framework."""


@dataclass(frozen=True)
class Source:
    """Member whose weights are exported, with its run."""

    spec: RunSpec
    folder: RunFolder
    member: Member
    progress: Progress

    @property
    def checkpoints(self) -> Path:
        """Folder of the member's checkpoints."""
        return checkpoint_folder(self.spec, self.member.name)

    @property
    def ensemble(self) -> Ensemble:
        """The member alone, with the modules that trained it."""
        spec = with_kept_modules(self.spec, self.folder)
        return replace(spec.ensemble.of(self.member), members=(self.member,))


def export(
    project: Project, names: Sequence[str], epoch: int | str, output: Path, *, force: bool = False
) -> Exported:
    """Write the weights of a member's epoch.

    Parameters
    ----------
    names : sequence of str
        Run and member, or one of them. By default the newest run, and its member with the best metric.
    epoch : int or str
        Number of an epoch, `BEST` or `LAST`.
    output : Path
        File whose ending gives the format, or an existing folder. For a command: file or folder of the copy.

    Raises
    ------
    BadInputError
        If there is no such run or member, the epoch is not kept, the file exists already or has another
        ending, or the framework is not installed.
    """
    source = _source(project, names)
    write = _copied if source.member.command else _written
    return write(source, epoch, output, force)


def _source(project: Project, names: Sequence[str]) -> Source:
    with project.reading() as catalog:
        runs = catalog.run_names()
    of_run, named = split_names(runs, names, most=1)
    run, found = sources_of(project, of_run)
    wanted = next(iter(named), None)
    if wanted is not None and wanted not in found:
        of_runs = f"; runs: {', '.join(runs)}" if of_run is None else ""
        raise BadInputError(
            f"run {run} has no member {wanted!r}, but {', '.join(found)}{of_runs}", "name one of these"
        )
    return found[wanted or _best_member(found, run)]


def sources_of(project: Project, run: str | None) -> tuple[str, dict[str, Source]]:
    """Return the name of a run, by default the newest, and its members by name; trials that began, too.

    Raises
    ------
    BadInputError
        If there is no such run, or its folder is gone.
    """
    with project.reading() as catalog:
        record = record_of(catalog, run)
        folder = require_folder(project, record, catalog.jobs(record.spec.run))
    spec, state = record.spec, state_in(folder, record.spec)
    members = _members(spec.ensemble, {name: e.record.config for name, e in state.facts.trials.items()})
    return spec.run, {
        name: Source(spec, folder, member, state.progress[name]) for name, member in members.items()
    }


def _members(ensemble: Ensemble, trials: Mapping[str, Mapping[str, Any]]) -> dict[str, Member]:
    """Return the members by name; a trial has the config that its search has asked for."""
    return {
        member.name: replace(member, config=trials[member.name]) if member.name in trials else member
        for member in ensemble.members
        if member.name in trials or member.name not in ensemble.trials
    }


def _best_member(found: Mapping[str, Source], run: str) -> str:
    """Return the member with the best metric."""
    trained = {name: source for name, source in found.items() if source.progress.epochs}
    rules = {(source.member.stop.metric, source.member.stop.mode) for source in trained.values()}
    if len(rules) != 1:
        problem = "no member with a finished epoch" if not rules else "members with several metrics"
        raise BadInputError(f"run {run} has {problem}", f"name a member: {', '.join(found)}")
    return best_first(trained)[0]


def best_first(trained: Mapping[str, Source]) -> list[str]:
    """Return members with finished epochs, all of one stop rule, by their best metric."""
    best = {name: one.member.stop.ranked(one.progress.epochs)[0] for name, one in trained.items()}
    rule = next(iter(trained.values())).member.stop
    place = {id(done): number for number, done in enumerate(rule.ranked(list(best.values())))}
    return sorted(best, key=lambda name: place[id(best[name])])


def _chosen(source: Source, wanted: int | str, kept: Sequence[int], best: int | None) -> int:
    """Return the number of an epoch that is kept."""
    of_words = {BEST: best, LAST: kept[-1] if kept else None}
    epoch = of_words[wanted] if isinstance(wanted, str) else wanted
    if epoch is not None and epoch in kept:
        return epoch
    name = source.member.name
    if not kept:
        hint = "`keep:` in the ensemble file says which epochs stay"
        if source.member.command:
            hint = "let the script name it with `checkpoint=` in the report of its epoch"
        raise BadInputError(f"no checkpoint of a finished epoch of {name} is kept", hint)
    raise BadInputError(
        f"the checkpoint of {'the best epoch' if epoch is None else f'epoch {epoch}'} of {name} is not kept,"
        f" but that of {', '.join(map(str, kept))}",
        f"name one of these with --epoch, such as --epoch {kept[-1]}",
    )


def _written(source: Source, wanted: int | str, output: Path, force: bool) -> Exported:
    """Write a file of the member's framework."""
    from hetctl.runtime.frameworks import load_framework
    from hetctl.runtime.worker.checkpoint import CheckpointFolder

    member, ensemble = source.member, source.ensemble
    entry = FRAMEWORKS[ensemble.framework]
    file = _target(output, f"{member.name}{entry.endings[0]}", force)
    if not file.name.endswith(entry.endings):
        raise BadInputError(
            f"{file.name} must end with {' or '.join(entry.endings)}: the network is one of {entry.name}",
            f"name it {file.name.partition('.')[0]}{entry.endings[0]}",
        )
    folder = CheckpointFolder(source.checkpoints, member=member)
    folder.look_for_best(folder.newest_state())
    kept = folder.finished_epochs()
    epoch = _chosen(source, wanted, kept, folder.best.epoch)
    os.environ.update(NO_GPU)
    framework = load_framework(ensemble.framework)
    loaded = folder.load(lambda state: len(state.epochs) == epoch and not state.part_samples)
    if loaded.arrays is None:
        others = [str(each) for each in kept if each != epoch]
        raise BadInputError(
            f"the checkpoint of epoch {epoch} in {source.checkpoints} is damaged",
            f"restore its files, or name another epoch: {', '.join(others) or 'there is none'}",
        )
    with replacing(file) as unfinished:
        note = framework.write_weights(saved_network(source, ensemble, loaded), unfinished)
    # Events may lack the last epoch, if the trainer was killed between it and its event.
    history = max(loaded.state.epochs, source.progress.epochs, key=len)
    return _described(
        source, file, epoch=epoch, best=folder.best.epoch, kept=kept, note=note, history=history
    )


def saved_network(source: Source, ensemble: Ensemble, loaded: Any) -> Any:
    """Return the loaded network with what builds it; the user's modules are imported on use."""
    from hetctl.runtime.data.sources import as_sources
    from hetctl.runtime.frameworks.stage_network import SavedNetwork
    from hetctl.runtime.worker.member_trainer import own_arrays
    from hetctl.runtime.worker.user_functions import load_functions

    def sample() -> tuple[Any, Any]:
        import numpy as np

        source, _ = as_sources(load_functions(ensemble).input_fn(ensemble.data))
        of = getattr(source, "spec", None)
        if of is None:
            raise BadInputError(
                "model_fn returns a model without shapes, and samples of input_fn have none that are fixed",
                "begin the model with a keras.Input, or call its build(..) in model_fn",
            )
        return np.zeros((1, *of.x_shape), of.x_dtype), np.zeros((1, *of.y_shape), of.y_dtype)

    def build() -> Any:
        return load_functions(ensemble).model_fn(dict(source.member.config))

    shards = source.checkpoints / loaded.shards if loaded.shards else None
    return SavedNetwork(
        *(source.member, own_arrays(loaded.arrays), shards),
        build=_naming(ensemble.functions.model_fn, build),
        sample=_naming(ensemble.functions.input_fn, sample),
    )


def _naming(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """Return the user's function with errors that name it."""

    def call() -> Any:
        try:
            return function()
        except BadInputError:
            raise
        except Exception as error:
            raise BadInputError(f"{name} has failed: {type(error).__name__}: {error}") from error

    return call


def _copied(source: Source, wanted: int | str, output: Path, force: bool) -> Exported:
    """Copy the checkpoint of a command, a file or a folder."""
    from hetctl.runtime.worker.scripts.best_copies import BestCopies, copied_epochs
    from hetctl.runtime.worker.scripts.command_training import NAMED

    events = read_events(source.folder.events_of(source.member.name), {NAMED})
    # A path that was named again holds a later epoch.
    named = {Path(event.data["path"]): event.data["epoch"] for event in events}
    found = {epoch: path for path, epoch in named.items() if epoch is not None and path.exists()}
    found |= copied_epochs(source.checkpoints)
    kept = sorted(found)
    history = list(source.progress.epochs)
    best = BestCopies(source.checkpoints, source.member).best(history).epoch
    epoch = _chosen(source, wanted, kept, best)
    target = _target(output, found[epoch].name, force)
    with replacing(target) as unfinished:
        (shutil.copytree if found[epoch].is_dir() else shutil.copy2)(found[epoch], unfinished)
    note = "it is a checkpoint of the script, which loads it as after a restart"
    return _described(source, target, epoch=epoch, best=best, kept=kept, note=note, history=history)


def _target(output: Path, name: str, force: bool) -> Path:
    """Return the path to write; BadInputError if it exists and may not be replaced."""
    file = output / name if output.is_dir() else output
    if not file.parent.is_dir():
        raise BadInputError(f"there is no folder {file.parent}", "make it, or name another file with -o")
    if file.exists() and not force:
        raise BadInputError(f"{file} exists already", "name another file, or replace it with --force")
    return file


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path of the same name in a folder beside it; what is written there replaces it at the end."""
    with tempfile.TemporaryDirectory(prefix=".hetctl-", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        yield unfinished
        if target.is_dir():
            shutil.rmtree(target)
        unfinished.replace(target)


def _described(
    source: Source,
    path: Path,
    *,
    epoch: int,
    best: int | None,
    kept: Sequence[int],
    note: str,
    history: Sequence[EpochResult],
) -> Exported:
    files = path.rglob("*") if path.is_dir() else [path]
    ensemble, functions = source.ensemble, {}
    if not source.member.command:
        functions = {key: name for key, name in vars(ensemble.functions).items() if name}
    return Exported(
        *(source.spec.run, source.member, str(path.resolve()), epoch, best, tuple(kept)),
        bytes=sum(file.stat().st_size for file in files if file.is_file()),
        note=note,
        history=history,
        framework=ensemble.framework,
        data=ensemble.data,
        functions=functions,
        code=code_digest(source.spec.modules) if source.spec.modules else "",
        revision=source.spec.revision,
        versions=dict(_versions(ensemble.framework)),
    )


def _versions(framework: str) -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in ("hetctl", *OF_FRAMEWORK.get(framework, ())):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
