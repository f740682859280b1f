"""A search over a script with a warm Python: predicted time, start-up and imports in a whole run.

python tests/benchmarks/script_search_bench.py
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table

from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

SCRIPT = Path(__file__).with_name("script_search_job.py")
TRIALS, SLOTS, LAST = 12, 2, 9
ENSEMBLE = """\
name: script
command: {command}
preload: torch
samples_per_epoch: 12800
search:
  method: asha
  trials: {trials}
  epochs: {last}
  min_epochs: 1
  eta: 3
  seed: 1
  max_gpus: 1
  stop: {{metric: val_loss}}
  space: {{lr: {{log_uniform: [0.0001, 0.1]}}}}
"""
NOTE = """\
`hetctl profile` and `hetctl submit --wait` of a PyTorch script on {slots} slots of one node. Its epochs
take 3 s and more, and it goes on from its checkpoints: ASHA with {trials} trials of 1, 3 or {last} epochs.
Start-up is the time from the launch of a start to its first step. Both ranks wait once for the rest of the
import, which begins before them; its share is one of all seconds of slots. At the end {load:.1f} processes
wanted the {cores} cores of the machine, in the mean of a minute.\
"""


def table(quick: bool = False) -> Table:
    """Profile and search once."""
    trials = 4 if quick else TRIALS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SCRIPT, folder)
        command = json.dumps([sys.executable, SCRIPT.name, "{lr}"])
        text = ENSEMBLE.format(command=command, trials=trials, last=LAST)
        (folder / "ensemble.yaml").write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
        environment = {**kept, "HETCTL_SITE": "local"}
        hetctl(folder, environment, "profile")
        status = hetctl(folder, environment, "submit", "--gpus", str(SLOTS), "--wait")
        run = Home(folder / ".hetctl").run("script-001")
        events = sorted(events_in(run), key=lambda event: event.time)
    ready = next(event.time for event in events if event.kind == "started")
    first, *others = (event for event in events if event.kind == "first_step")
    import_s = first.time - first.record.restart_s - ready
    later = statistics.median(event.record.startup_s for event in others)
    measured_s = status["measured_s"]
    ratio = status["predicted_s"] / measured_s
    return Table(
        "A search over a script with a warm Python",
        ("", "value"),
        (
            ("predicted, s", f"{status['predicted_s']:.1f}"),
            ("measured, s", f"{measured_s:.1f}"),
            ("starts", str(len(others) + 1)),
            ("first start-up, s", f"{first.record.startup_s:.2f}"),
            ("of that, wait for the import, s", f"{import_s:.2f}"),
            ("median of the others, s", f"{later:.2f}"),
        ),
        (
            Figure("measured over predicted, or the reverse", max(ratio, 1 / ratio), 1.15),
            Figure("share of the import in the seconds of slots", import_s / measured_s, 0.05),
        ),
        NOTE.format(
            trials=trials, slots=SLOTS, last=LAST, load=os.getloadavg()[0], cores=os.cpu_count()
        ).replace("\n", " "),
    )


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
