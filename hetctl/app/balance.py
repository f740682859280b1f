"""Simulation of balanced batches: an algorithm sets the shares of unequal workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.inputs.csv_table import WorkerPoints, read_workers
from hetctl.inputs.input_errors import refusal, suggestion
from hetctl.methods.balance import observation_log
from hetctl.methods.balance.manager import equal_batches
from hetctl.methods.balance.managers import make_manager
from hetctl.methods.balance.simulate import Conditions, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.simulation import BalanceReplay, BalanceSimulation, Simulated
from hetctl.model.training_settings import ON, BalanceSettings

PREDICTING, USUAL_PREDICTOR = "cpu", "narx"
"""Algorithm that has a predictor of speeds, and its predictor by default."""


def simulated_batches(
    workers: Path,
    batch: int,
    iterations: int = 100,
    algorithm: str = "curve",
    predictor: str | None = None,
    changes: Sequence[tuple[int, Path]] = (),
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """Simulate iterations with balanced batches, starting with equal ones.

    Parameters
    ----------
    workers : Path
        File of batch times by worker.
    batch : int
        Samples of all workers together per iteration.
    predictor : str or None
        Name of the predictor of speeds, which only Algorithm 1 (``cpu``) has; None: the usual one.
    changes : sequence of (int, Path)
        Iterations from which on the workers in a file have the times given there.
    jitter : float
        Standard deviation of a worker's time, as a share of it.
    seed : int
        Seed of jitter and predictor.

    Raises
    ------
    BadInputError
        If a file or an option is wrong, or there are fewer samples than workers.
    InfeasibleError
        If the workers' memory has no room for the batch.
    """
    _check_changes([number for number, _ in changes], iterations)
    if predictor and algorithm != PREDICTING:
        raise BadInputError(f"--predictor requires --algorithm {PREDICTING}")
    if seed < 0:
        raise BadInputError(f"--seed {seed}: must be at least 0")
    points = read_workers(workers)
    caps = [worker.max_batch for worker in points]
    _check_room(workers, batch, caps)
    now = {worker.name: worker for worker in points}
    conditions = [Conditions(0, _curves(points))]
    for number, path in sorted(changes):
        now |= _changed(path, now)
        conditions.append(Conditions(number, _curves(now.values())))
    predictor = predictor or USUAL_PREDICTOR
    settings = BalanceSettings(ON, algorithm, predictor)
    manager = make_manager(settings, equal_batches(batch, caps), caps, seed)
    done = tuple(iterate(manager, conditions, iterations, jitter, seed))
    found = phases(done, conditions)
    result = BalanceSimulation(
        algorithm=algorithm,
        predictor=predictor if algorithm == PREDICTING else None,
        batch=batch,
        workers=tuple(worker.name for worker in points),
        total_s=done[-1].start_s + done[-1].duration_s,
        t_star_s=found[-1].t_star_s,
        ratio=found[-1].ratio,
        reached_at=found[-1].reached_at,
        phases=found,
        iterations=done,
        warnings=tuple(f"worker {points[number].name} {what}" for number, what in manager.warnings),
    )
    return Simulated(result, result)


def repeated_decisions(replay: Path) -> Simulated:
    """Repeat a manager's decisions in training: the log of a run.

    Raises
    ------
    BadInputError
        If the file is no log of a manager, or has no iterations.
    """
    try:
        with replay.open(encoding="utf-8") as lines:
            found = observation_log.replay(observation_log.records_in(lines))
    except OSError as error:
        hint = "give a file of the run's folder balance/; a trace of hops needs --unit-times, too"
        raise BadInputError(f"{replay}: {error.strerror}", hint) from None
    except BadInputError as error:
        raise BadInputError(f"{replay}: {error.message}") from None
    if not found.iterations:
        raise BadInputError(f"{replay}: the log has no iterations", "wait until the member has trained")
    measured_s, equal_s = (
        observation_log.iteration_s(found.iterations),
        observation_log.equal_batches_s(found.iterations),
    )
    newest = found.segments[-1]
    result = BalanceReplay(
        manager=newest.settings.manager,
        workers=newest.workers,
        iterations=len(found.iterations),
        segments=len(found.segments),
        repeated=found.repeated,
        equal=found.difference is None,
        difference=found.difference,
        first_batches=found.iterations[0].batches,
        last_batches=found.iterations[-1].answer,
        iteration_s=measured_s,
        equal_batches_s=equal_s,
        gain=equal_s / measured_s,
    )
    return Simulated(result, result)


def _check_changes(numbers: Sequence[int], iterations: int) -> None:
    for number in numbers:
        if not 0 < number < iterations:
            raise BadInputError(
                f"--change {number}: must be after iteration 0 and before iteration {iterations}"
            )
        if numbers.count(number) > 1:
            raise BadInputError(f"--change {number}: is given twice", "merge both files")


def _check_room(path: Path, batch: int, caps: Sequence[int | None]) -> None:
    if batch < len(caps):
        raise BadInputError(
            f"{path}: names {len(caps)} workers, and --batch is {batch}", "each takes at least one sample"
        )
    known = [cap for cap in caps if cap is not None]
    if len(known) == len(caps) and sum(known) < batch:
        raise InfeasibleError(
            f"{path}: max_batch: the workers have room for {sum(known)} samples, --batch is {batch}",
            "lower --batch, or add workers",
        )


def _changed(path: Path, known: Mapping[str, WorkerPoints]) -> dict[str, WorkerPoints]:
    """Read the workers that change; they keep their memory limits."""
    changed = {worker.name: worker for worker in read_workers(path)}
    problems = [
        (worker.place, f"worker: there is no '{name}'" + suggestion(name, known))
        for name, worker in changed.items()
        if name not in known
    ]
    problems += [
        (worker.place, f"max_batch: must be left out, or as in {known[name].place}")
        for name, worker in changed.items()
        if name in known and worker.max_batch not in (None, known[name].max_batch)
    ]
    if problems:
        raise refusal(problems)
    return {name: replace(worker, max_batch=known[name].max_batch) for name, worker in changed.items()}


def _curves(workers: Iterable[WorkerPoints]) -> tuple[TimeCurve, ...]:
    return tuple(TimeCurve(worker.points, worker.max_batch) for worker in workers)
