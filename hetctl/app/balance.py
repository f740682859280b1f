"""Simulation of balanced batches: an algorithm sets the shares of unequal workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.inputs.csv_table import WorkerPoints, read_workers
from hetctl.inputs.input_errors import refusal, suggestion
from hetctl.methods.balance.manager import equal_batches
from hetctl.methods.balance.managers import make_manager
from hetctl.methods.balance.observation_log import (
    equal_batches_s,
    iteration_s,
    records_in,
    replay,
)
from hetctl.methods.balance.simulate import Conditions, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.simulation import BalanceReplay, BalanceSimulation, Simulated
from hetctl.model.training_settings import ON, BalanceSettings
from hetctl.model.values import dataclass

PREDICTING, USUAL_PREDICTOR = "cpu", "narx"
"""Algorithm that has a predictor of speeds, and its predictor by default."""


@dataclass(frozen=True)
class BalanceRequest:
    """Input of a simulation of balanced batches.

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
    """

    workers: Path
    batch: int
    iterations: int = 100
    algorithm: str = "curve"
    predictor: str | None = None
    changes: Sequence[tuple[int, Path]] = ()
    jitter: float = 0.0
    seed: int = 0

    def simulated(self) -> Simulated:
        """Simulate iterations, starting with equal batches.

        Raises
        ------
        BadInputError
            If a file or an option is wrong, or there are fewer samples than workers.
        InfeasibleError
            If the workers' memory has no room for the batch.
        """
        _check(self)
        workers = read_workers(self.workers)
        _check_room(self, workers)
        conditions = _conditions(self, workers)
        caps = [worker.max_batch for worker in workers]
        predictor = self.predictor or USUAL_PREDICTOR
        settings = BalanceSettings(ON, self.algorithm, predictor)
        manager = make_manager(settings, equal_batches(self.batch, caps), caps, self.seed)
        iterations = tuple(iterate(manager, conditions, self.iterations, self.jitter, self.seed))
        found = phases(iterations, conditions)
        result = BalanceSimulation(
            algorithm=self.algorithm,
            predictor=predictor if self.algorithm == PREDICTING else None,
            batch=self.batch,
            workers=tuple(worker.name for worker in workers),
            total_s=iterations[-1].start_s + iterations[-1].duration_s,
            t_star_s=found[-1].t_star_s,
            ratio=found[-1].ratio,
            reached_at=found[-1].reached_at,
            phases=found,
            iterations=iterations,
            warnings=tuple(f"worker {workers[number].name} {what}" for number, what in manager.warnings),
        )
        return Simulated(result, result)


@dataclass(frozen=True)
class BalanceReplayRequest:
    """Input of a repetition of a manager's decisions in training: the log of a run."""

    replay: Path

    def simulated(self) -> Simulated:
        """Repeat the decisions.

        Raises
        ------
        BadInputError
            If the file is no log of a manager, or has no iterations.
        """
        log = self.replay
        try:
            with log.open(encoding="utf-8") as lines:
                found = replay(records_in(lines))
        except OSError as error:
            hint = "give a file of the run's folder balance/; a trace of hops needs --unit-times, too"
            raise BadInputError(f"{log}: {error.strerror}", hint) from None
        except BadInputError as error:
            raise BadInputError(f"{log}: {error.message}") from None
        if not found.iterations:
            raise BadInputError(f"{log}: the log has no iterations", "wait until the member has trained")
        measured_s, equal_s = iteration_s(found.iterations), equal_batches_s(found.iterations)
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


def _check(request: BalanceRequest) -> None:
    numbers = [number for number, _ in request.changes]
    for number in numbers:
        if not 0 < number < request.iterations:
            raise BadInputError(
                f"--change {number}: must be after iteration 0 and before iteration {request.iterations}"
            )
        if numbers.count(number) > 1:
            raise BadInputError(f"--change {number}: is given twice", "merge both files")
    if request.predictor and request.algorithm != PREDICTING:
        raise BadInputError(f"--predictor requires --algorithm {PREDICTING}")
    if request.seed < 0:
        raise BadInputError(f"--seed {request.seed}: must be at least 0")


def _check_room(request: BalanceRequest, workers: Sequence[WorkerPoints]) -> None:
    if request.batch < len(workers):
        raise BadInputError(
            f"{request.workers}: names {len(workers)} workers, and --batch is {request.batch}",
            "each takes at least one sample",
        )
    caps = [worker.max_batch for worker in workers if worker.max_batch is not None]
    if len(caps) == len(workers) and sum(caps) < request.batch:
        raise InfeasibleError(
            f"{request.workers}: max_batch: the workers have room for {sum(caps)} samples,"
            f" --batch is {request.batch}",
            "lower --batch, or add workers",
        )


def _conditions(request: BalanceRequest, workers: Sequence[WorkerPoints]) -> list[Conditions]:
    now = {worker.name: worker for worker in workers}
    found = [Conditions(0, _curves(workers))]
    for number, path in sorted(request.changes):
        now |= _changed(path, now)
        found.append(Conditions(number, _curves(now.values())))
    return found


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
