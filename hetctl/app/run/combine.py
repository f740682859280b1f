"""Ensembles of a run's trained members: which to choose, what they gain, and files that need no hetctl."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hetctl.app.project import Project
from hetctl.app.run.export import NO_GPU, Source, best_first, replacing, saved_network, sources_of
from hetctl.app.run.weight_averages import Trained, averaged_network, of_one_shape, outputs_of_averages
from hetctl.model.errors import BadInputError
from hetctl.model.exports import (
    ACCURACY,
    AVERAGE,
    BEST_MEMBER,
    GREEDY,
    GREEDY_SOUP,
    LOSS,
    SOUPS,
    UNIFORM_SOUP,
    WEIGHTED,
    Candidate,
    Combination,
    EnsembleResult,
    OutputForm,
)
from hetctl.model.profile import some_of
from hetctl.model.values import dataclass
from hetctl.perf import ensemble_selection as selection
from hetctl.perf.ensemble_selection import SCORES, Array, Choose, Task, Weights
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import PREDICTIONS
from hetctl.runtime.worker.scripts import best_copies

MOST_CANDIDATES = 50
"""Members to choose from: the best by their stop rule."""
MOST_NUMBERS = 2**27
"""Predicted numbers of all candidates: 1 GiB. Of more, a random part of the samples is used."""
WEIGHTS: dict[str, Callable[[Task], Weights]] = {
    BEST_MEMBER: selection.best,
    GREEDY: selection.greedy,
    AVERAGE: selection.average,
    WEIGHTED: selection.weighted,
}
ENDINGS = {"pytorch": ".pt", "tensorflow": ".weights.h5"}
"""Files of weights, which load into what ``model_fn`` builds."""
NUMBERS = {*"biuf"}
"""Kinds of arrays that predictions may have."""
MOST_NAMED = 5
"""Members that a message names."""


@dataclass(frozen=True)
class _Known:
    """Member with predictions of its best epoch."""

    source: Source
    epoch: int
    outputs: Array
    targets: Array

    @property
    def trained(self) -> Trained:
        """The member with that epoch."""
        return self.source, self.epoch


@dataclass(frozen=True)
class _Library:
    """Members to choose from, the best first, and their predictions.

    Parameters
    ----------
    rows : array of int
        Samples that are used.
    classes : int
        Number of classes; 0: values are predicted.
    """

    known: Sequence[_Known]
    forms: Sequence[OutputForm]
    task: Task
    rows: Array
    classes: int

    def form_of(self, name: str) -> OutputForm:
        """Return the form of a member's outputs."""
        return next(
            form for one, form in zip(self.known, self.forms, strict=True) if one.source.member.name == name
        )


@dataclass(frozen=True)
class _Way:
    """A way to combine members: what it predicts without having seen a sample, and what it is in the end.

    Parameters
    ----------
    judged, fitted : array
        Predictions of each sample by what was chosen without it, and by what all samples have chosen.
    members : mapping of str to float
        Weights of members, chosen by all samples.
    """

    judged: Array
    fitted: Array
    members: Mapping[str, float]


def combine(
    project: Project,
    run: str | None,
    way: str = GREEDY,
    output: Path | None = None,
    *,
    soups: bool = False,
    force: bool = False,
) -> EnsembleResult:
    """Choose ensembles of a run's members, and write one of them if `output` names a folder.

    Parameters
    ----------
    run : str or None
        Name of the run; None: the newest.
    way : str
        Ensemble that is written: one of `AVERAGES` or `SOUPS`.
    soups : bool
        Average weights, too: the networks run on the validation samples here, without a GPU.

    Raises
    ------
    BadInputError
        If there is no such run, it has fewer than two members with predictions, or the folder exists.
    """
    if output is not None and output.exists() and not force:
        raise BadInputError(f"{output} exists already", "name another folder, or replace it with --force")
    run, found = sources_of(project, run)
    library, left_out = _library(run, found)
    ways = {name: _weighted_way(library, weights_of) for name, weights_of in WEIGHTS.items()}
    with ExitStack() as stack:
        if soups or way in SOUPS:
            ways |= _soups(library, stack)
        if way not in ways:
            raise BadInputError(
                f"no two members of {run} have weights of one shape, which {way} averages",
                f"name another way, such as --way {GREEDY}",
            )
        combinations = tuple(
            _combination(name, one, ways[BEST_MEMBER], library) for name, one in ways.items()
        )
        if output is not None:
            _write(output, run, library, next(one for one in combinations if one.way == way))
    names = [one.source.member.name for one in library.known]
    values = [
        float(SCORES[library.task.metric](p, library.task.targets).mean()) for p in library.task.predictions
    ]
    return EnsembleResult(
        run,
        library.task.metric,
        len(library.rows),
        tuple(map(Candidate, names, [one.epoch for one in library.known], values)),
        left_out,
        combinations,
        None if output is None else str(output.resolve()),
    )


def _library(run: str, found: Mapping[str, Source]) -> tuple[_Library, dict[str, str]]:
    trained = {name: source for name, source in found.items() if source.progress.epochs}
    left_out = {name: "it has no finished epoch" for name in found if name not in trained}
    rules = {(source.member.stop.metric, source.member.stop.mode) for source in trained.values()}
    names = best_first(trained) if len(rules) == 1 else list(trained)
    left_out |= dict.fromkeys(names[MOST_CANDIDATES:], f"it is not one of the best {MOST_CANDIDATES}")
    known: list[_Known] = []
    for name in names[:MOST_CANDIDATES]:
        one = (_handed_in if trained[name].member.command else _known)(trained[name])
        if isinstance(one, _Known) and known and not _is_same_task(one, known[0]):
            one = f"its validation samples or classes are not those of {known[0].source.member.name}"
        if isinstance(one, _Known):
            known.append(one)
        else:
            left_out[name] = one
    if len(known) < 2:
        reasons = [f"{name}: {reason}" for name, reason in left_out.items()]
        raise BadInputError(
            f"an ensemble of {run} needs two members with predictions, and {len(known)} has some"
            + (f"; {some_of(reasons, MOST_NAMED)}" if reasons else ""),
            "members of functions keep them with the checkpoint of each best epoch; raise"
            " `keep: {predictions: SIZE}` in the ensemble file if they are too large, and train on;"
            " scripts hand them in by `hetctl.report(.., predictions=FILE)`",
        )
    return _of(known), left_out


def _known(source: Source) -> _Known | str:
    """Return a member's predictions, or why there are none."""
    folder = CheckpointFolder(source.checkpoints, member=source.member)
    folder.look_for_best(folder.newest_state())
    epoch = folder.best.epoch
    if epoch is None:
        return "no checkpoint of a best epoch is kept"
    loaded = folder.load(
        lambda state: len(state.epochs) == epoch and not state.part_samples,
        lambda name: name.startswith(PREDICTIONS),
    )
    if loaded.arrays is None:
        return "the checkpoint of its best epoch is damaged"
    arrays = [loaded.arrays.get(f"{PREDICTIONS}{name}") for name in ("outputs", "targets")]
    if arrays[0] is None or arrays[1] is None:
        return "the checkpoint of its best epoch has no predictions"
    return _Known(source, epoch, arrays[0], arrays[1])


def _handed_in(source: Source) -> _Known | str:
    """Return the predictions that a script has handed in, or why there are none."""
    kept = best_copies.copied_epochs(source.checkpoints, best_copies.PREDICTIONS)
    ranked = source.member.stop.ranked([done for done in source.progress.epochs if done.epoch in kept])
    if not ranked:
        return "its script has handed in no predictions"
    path = kept[ranked[0].epoch]
    try:
        with np.load(path, allow_pickle=False) as arrays:
            outputs, targets = arrays["outputs"], arrays["targets"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, BadZipFile) as error:
        return f"{path} has no arrays `outputs` and `targets`: {error}"
    if (
        not outputs.ndim
        or not len(outputs) == len(targets) > 0
        or {outputs.dtype.kind, targets.dtype.kind} - NUMBERS
    ):
        return f"`outputs` and `targets` in {path} must have a row of numbers for each sample"
    return _Known(source, ranked[0].epoch, outputs, targets)


def _is_same_task(one: _Known, first: _Known) -> bool:
    return one.outputs[0].size == first.outputs[0].size and np.array_equal(one.targets, first.targets)


def _of(known: Sequence[_Known]) -> _Library:
    first = known[0]
    targets, classes = selection.read_targets(first.targets, first.outputs)
    forms = [selection.form_of(one.outputs, classes) for one in known]
    width = max(1, first.outputs[0].size, classes)
    order = np.random.default_rng(selection.SEED).permutation(len(targets))
    rows = np.sort(order[: max(2, MOST_NUMBERS // (width * len(known)))])
    predictions = np.stack(
        [selection.predictions_of(one.outputs[rows], form) for one, form in zip(known, forms, strict=True)]
    )
    metric = selection.metric_like(first.source.member.stop.metric, classes)
    return _Library(known, forms, Task(predictions, targets[rows], metric), rows, classes)


def _weighted_way(library: _Library, weights_of: Callable[[Task], Weights]) -> _Way:
    task = library.task
    weights = weights_of(task)
    return _Way(
        selection.judged(selection.choosing(task, weights_of), task.predictions.shape[1:]),
        selection.averaged(task.predictions, weights),
        {
            one.source.member.name: float(weight)
            for one, weight in zip(library.known, weights, strict=True)
            if weight
        },
    )


def _soups(library: _Library, stack: ExitStack) -> dict[str, _Way]:
    """Return averages of weights of the most members with one shape; none if all shapes differ."""
    networks = [at for at, one in enumerate(library.known) if not one.source.member.command]
    alike = of_one_shape([library.known[at].trained for at in networks])
    group = [networks[at] for at in alike]
    if len(group) < 2:
        return {}
    members = [library.known[index].source.member.name for index in group]
    forms = [library.forms[index] for index in group]
    outputs_of = outputs_of_averages([library.known[index].trained for index in group], stack)
    task = library.task

    def predictions(chosen: tuple[int, ...]) -> Array:
        return selection.predictions_of(outputs_of(chosen)[library.rows], forms[chosen[0]])

    def chosen_by(rows: Array) -> tuple[int, ...]:
        part = task.of(rows)
        own = [part.loss(part.predictions[index]) for index in group]
        order = sorted(range(len(group)), key=own.__getitem__)
        return selection.greedy_soup(order, lambda chosen: part.loss(predictions(chosen)[rows]))

    def choose(rows: Array) -> Callable[[Array], Array]:
        chosen = chosen_by(rows)
        return lambda others: predictions(chosen)[others]

    def way(chosen: tuple[int, ...], how: Choose) -> _Way:
        judged = selection.judged(how, task.predictions.shape[1:])
        return _Way(judged, predictions(chosen), {members[one]: 1 / len(chosen) for one in chosen})

    every = tuple(range(len(group)))
    return {
        UNIFORM_SOUP: way(every, lambda _: lambda others: predictions(every)[others]),
        GREEDY_SOUP: way(chosen_by(np.arange(len(library.rows))), choose),
    }


def _combination(name: str, way: _Way, before: _Way, library: _Library) -> Combination:
    task = library.task
    score = SCORES[task.metric]
    scores = score(way.judged, task.targets)
    found = Combination(
        name, way.members, float(scores.mean()), float(score(way.fitted, task.targets).mean())
    )
    if name != BEST_MEMBER:
        best = score(before.judged, task.targets)
        found = replace(found, gain=selection.gain_of(scores, best, larger_is_better=task.metric == ACCURACY))
    if not task.has_classes:
        return found

    def choose(rows: Array) -> Callable[[Array], Array]:
        by = selection.temperature(way.judged[rows], task.targets[rows])
        return lambda others: selection.scaled(way.judged[others], by)

    loss = SCORES[LOSS]
    return replace(
        found,
        loss=float(loss(way.judged, task.targets).mean()),
        scaled_loss=float(loss(selection.judged(choose, way.judged.shape), task.targets).mean()),
        temperature=selection.temperature(way.judged, task.targets),
    )


def _write(output: Path, run: str, library: _Library, chosen: Combination) -> None:
    """Write the folder: weights, the average, the modules that build the networks, and `predict_fn`."""
    from hetctl.runtime.frameworks import exported_ensemble, load_framework

    known = {one.source.member.name: one for one in library.known}
    if scripts := [name for name in chosen.weights if known[name].source.member.command]:
        raise BadInputError(
            f"{some_of(scripts, MOST_NAMED)} trained by scripts, whose networks hetctl cannot build",
            f"the table has the weights; `hetctl export {run} {scripts[0]}` copies a checkpoint",
        )
    is_soup = chosen.way in SOUPS
    os.environ.update(NO_GPU)
    with replacing(output) as folder:
        folder.mkdir()
        members = []
        for name, weight in ({next(iter(chosen.weights)): 1.0} if is_soup else chosen.weights).items():
            one = known[name]
            ensemble = one.source.ensemble
            file = f"{chosen.way if is_soup else name}{ENDINGS[ensemble.framework]}"
            parts = [known[part].trained for part in (chosen.weights if is_soup else [name])]
            saved = saved_network(one.source, ensemble, averaged_network(parts))
            load_framework(ensemble.framework).write_weights(saved, folder / file)
            members.append(
                {
                    "member": name,
                    "epoch": one.epoch,
                    "weight": weight,
                    "form": library.form_of(name).value,
                    "framework": ensemble.framework,
                    "model_fn": ensemble.functions.model_fn,
                    "config": dict(one.source.member.config),
                    "file": file,
                }
            )
        about = {
            "run": run,
            "way": chosen.way,
            "averaged": dict(chosen.weights),
            "metric": library.task.metric,
            "value": chosen.value,
            "temperature": chosen.temperature,
            "members": members,
        }
        (folder / "ensemble.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(exported_ensemble.__file__, folder / "predict.py")
        _copy_modules(library.known[0].source, folder / "code")


def _copy_modules(source: Source, target: Path) -> None:
    ensemble: Any = source.ensemble
    for name in source.spec.modules:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(ensemble.folder) / name, place)
