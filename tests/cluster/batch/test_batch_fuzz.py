"""Ten thousand broken answers for each parser: no traceback, and nothing finished that is not.

To add the parsers of another batch system, name them in ``PARSERS`` with captured answers and a function
that tells which jobs they take for finished; ``FINISHED`` has the words without which no job is.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from hetctl.cluster.batch.flux import parse_jobs
from hetctl.cluster.batch.lsf import parse_bhist, parse_bjobs
from hetctl.cluster.batch.lsf import parse_found as parse_found_lsf
from hetctl.cluster.batch.lsf import parse_found_gone as parse_found_gone_lsf
from hetctl.cluster.batch.pbs import parse_found as parse_found_pbs
from hetctl.cluster.batch.pbs import parse_qstat
from hetctl.cluster.batch.slurm import parse_failed_nodes, parse_found, parse_sacct, parse_squeue
from hetctl.model.job import JobState

CAPTURED = Path(__file__).parent / "captured"
INPUTS = 10_000
NOISE = "|\n[]-,%_+:* \t\0\u00a0\u0661\u00df\ufffd0123456789COMPLETEDRUNNING"


def finished_by_slurm(parse):
    def finished(text):
        return [job for job, record in parse(text).items() if record.status.state is JobState.FINISHED]

    return finished


def finished_by_lsf(parse):
    def finished(text):
        return [job for job, status in parse(text).items() if status.state is JobState.FINISHED]

    return finished


PARSERS = {
    "squeue": (finished_by_slurm(parse_squeue), "slurm-*-squeue*.txt"),
    "sacct": (finished_by_slurm(parse_sacct), "slurm-*-sacct*.txt"),
    "bjobs": (finished_by_lsf(parse_bjobs), "lsf-*-bjobs*.json"),
    "bhist": (finished_by_lsf(parse_bhist), "lsf-*-bhist*.txt"),
    "qstat": (finished_by_lsf(parse_qstat), "openpbs-*-qstat.txt"),
    "flux": (finished_by_lsf(parse_jobs), "flux-*-jobs.txt"),
}
CONTINUED = {"bhist": r"\n {21}", "qstat": r"\n\t"}
"""Between the parts of a line that goes on in the next one."""
FINISHED = {
    "squeue": r"^\s*{}\s*\|\s*COMPLETED?",
    "sacct": r"^\s*{}\s*\|\s*COMPLETED?",
    "bjobs": r'"STAT"\s*:\s*"\s*DONE\s*"',
    "bhist": r": Done successfully\.",
    "flux": r"^{}\|INACTIVE\|COMPLETED\|",
    "qstat": r"^    Exit_status = -?0+\s*$",
}


def unfinished(text):
    for word, other in (
        ("COMPLETED", "COMPLETING"),
        ("DONE", "RUN"),
        ("Done", "Gone"),
        ("Exit_status = 0", "Exit_status = 3"),
    ):
        text = text.replace(word, other)
    return text


def mutated(rng, texts):
    """Break a text in a few places, as torn pipes, other versions and other programs do."""
    text = rng.choice(texts)
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((0, 0, 1, 1, 2, 10, 200)))
        piece = text[start:end]
        text = text[:start] + rng.choice(_CHANGES)(rng, piece, texts) + text[end:]
    return text


_CHANGES = (
    lambda _rng, _piece, _texts: "",
    lambda rng, piece, _texts: piece + rng.choice(NOISE),
    lambda rng, piece, _texts: piece * rng.choice((2, 3, 50)),
    lambda rng, piece, _texts: "".join(rng.sample(piece, len(piece))),
    lambda rng, _piece, _texts: str(rng.choice((-1, 10**30, 1e308))),
    lambda rng, _piece, texts: rng.choice(rng.choice(texts).splitlines() or [""]),
)


@pytest.mark.parametrize("name", PARSERS)
def test_broken_answers_raise_nothing_and_finish_no_job(name):
    finished, pattern = PARSERS[name]
    texts = [path.read_text() for path in sorted(CAPTURED.glob(pattern))]
    assert any(finished(text) for text in texts)
    rng = random.Random(20)
    for _ in range(INPUTS):
        text = mutated(rng, texts)
        for job in finished(text):
            line = FINISHED[name].format(re.escape(job))
            whole = re.sub(CONTINUED[name], "", text) if name in CONTINUED else text
            assert re.search(line, whole, re.MULTILINE), (job, text)


@pytest.mark.parametrize("name", PARSERS)
def test_no_job_is_finished_where_nothing_says_so(name):
    finished, pattern = PARSERS[name]
    texts = [unfinished(path.read_text()) for path in CAPTURED.glob(pattern)]
    rng = random.Random(21)
    for _ in range(INPUTS // 10):
        text = mutated(rng, texts)
        if not any(word in text for word in ("COMPLETE", "DONE", "Done success", "Exit_status = 0")):
            assert finished(text) == [], text


@pytest.mark.parametrize(
    "parse", [parse_found, parse_failed_nodes, parse_found_lsf, parse_found_gone_lsf, parse_found_pbs]
)
def test_broken_lists_are_read_without_a_traceback(parse):
    texts = [path.read_text() for path in sorted(CAPTURED.glob("*-*.*"))]
    rng = random.Random(22)
    for _ in range(INPUTS):
        parse(mutated(rng, texts))
