"""Functions as jobs, through submitit; nothing else in hetctl knows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetctl.batch.base import FunctionCall
from hetctl.core.errors import BatchSystemError
from hetctl.core.layout import make_private_folder


def submit_function(call: FunctionCall, executor_name: str, parameters: Mapping[str, Any]) -> str:
    """Submit a call through one of submitit's executors; return the job's id.

    Raises
    ------
    BatchSystemError
        If the batch system cannot be reached or refuses.
    """
    import submitit

    make_private_folder(call.folder)
    before = os.umask(0o077)  # submitit's pickles would be readable by all
    try:
        executor = submitit.AutoExecutor(call.folder, cluster=executor_name, **_no_requeue(executor_name))
        executor.update_parameters(**{k: v for k, v in parameters.items() if v is not None})
        return str(executor.submit(call.function, call.argument).job_id)
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise BatchSystemError(f"submitit could not submit to {executor_name}: {error}") from None
    finally:
        os.umask(before)


def has_result(folder: Path, job: str) -> bool:
    """Whether the function has returned or raised."""
    return (folder / f"{job}_0_result.pkl").exists()


def _no_requeue(executor_name: str) -> dict[str, int]:
    """Stop submitit from counting a short job as timed out at once and queueing it again."""
    return {f"{executor_name}_max_num_timeout": 0}
