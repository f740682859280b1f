"""Runs in MLflow: a run for each member, nested in the run of all, in an experiment of the ensemble."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from hetctl.app.run.tracking import GOES_ON, TrackedMember, TrackedRun
from hetctl.model.training_progress import EpochResult

ADDRESS = "MLFLOW_TRACKING_URI"
OF_RUN, OF_MEMBER, PARENT = "hetctl.run", "hetctl.member", "mlflow.parentRunId"
"""Tags: key of the run, name of the member, and the id of the run around it."""
MOST_METRICS, MOST_RUNS, LONGEST_PARAM = 1000, 1000, 500
"""Limits of one request (https://mlflow.org/docs/latest/rest-api.html), and characters of a parameter."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Variables of MLflow's client, which else tries for minutes."""


def address(folder: Path) -> str:
    """Return the address of MLflow: the user's, or that of a database in a folder, MLflow's own default."""
    return os.environ.get(ADDRESS) or f"sqlite:///{folder.resolve() / 'mlflow.db'}"


class MlflowTracker:
    """MLflow server, or a database of it."""

    def __init__(self, folder: Path) -> None:
        self._address = address(folder)
        self.target = f"MLflow at {self._address}"

    @cached_property
    def _client(self) -> MlflowClient:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        # It tells of each step of making a database.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        return MlflowClient(tracking_uri=self._address)

    def send(self, run: TrackedRun, sent: Mapping[str, int]) -> None:
        """Send the epochs that it lacks, and the states that have changed."""
        found = self._client.get_experiment_by_name(run.ensemble)
        experiment = found.experiment_id if found else self._client.create_experiment(run.ensemble)
        known = {each.data.tags.get(OF_MEMBER, ""): each for each in self._runs(experiment, run.key)}
        around = known.get("") or self._create(experiment, run.name, {OF_RUN: run.key})
        # A command may have been killed before it sent these.
        if not around.data.params:
            self._client.log_batch(around.info.run_id, params=list(_params(run.params)))
        for member in run.members:
            own = known.get(member.name)
            if own is None or not own.data.params or len(member.epochs) > sent.get(member.name, 0):
                tags = {OF_RUN: run.key, OF_MEMBER: member.name, PARENT: around.info.run_id}
                own = own or self._create(experiment, member.name, tags)
                self._send_epochs(own.info.run_id, member)
            self._set_state(own, member.state)
        self._set_state(around, run.state)

    def _runs(self, experiment: str, key: str) -> Iterator[Run]:
        token = None
        while True:
            page = self._client.search_runs(
                [experiment], f"tags.`{OF_RUN}` = '{key}'", max_results=MOST_RUNS, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def _create(self, experiment: str, name: str, tags: Mapping[str, str]) -> Run:
        return self._client.create_run(experiment, tags=dict(tags), run_name=name)

    def _send_epochs(self, run: str, member: TrackedMember) -> None:
        names = dict.fromkeys(name for done in member.epochs for name in _values(done))
        # A command may have been killed after a part of an epoch.
        has = {(name, each.step) for name in names for each in self._client.get_metric_history(run, name)}
        metrics = [
            Metric(name, value, round(1000 * done.finished_at), done.epoch)
            for done in member.epochs
            for name, value in _values(done).items()
            if (name, done.epoch) not in has
        ]
        self._client.log_batch(run, params=list(_params(member.params)))
        for part in _parts(metrics):
            self._client.log_batch(run, metrics=part)

    def _set_state(self, run: Run, state: str) -> None:
        if run.info.status == state:
            return
        if state == GOES_ON:
            self._client.update_run(run.info.run_id, status=state)
        else:
            self._client.set_terminated(run.info.run_id, status=state)


def _values(done: EpochResult) -> dict[str, float]:
    """Return the metrics of an epoch by name, those of its training included; only finite ones."""
    own = {"duration_s": done.duration_s, "rate": done.rate, "gpus": float(done.gpus)}
    values = {**done.metrics, **own}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _params(values: Mapping[str, Any]) -> Iterator[Param]:
    yield from (Param(name, str(value)[:LONGEST_PARAM]) for name, value in values.items())


def _parts(metrics: Sequence[Metric]) -> Iterator[list[Metric]]:
    for start in range(0, len(metrics), MOST_METRICS):
        yield list(metrics[start : start + MOST_METRICS])
