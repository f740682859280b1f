"""A script with a loss that depends on its hyper-parameters, and on the epochs that its checkpoint has."""

import os
import sys
import time
from pathlib import Path

import hetctl

learning_rate, width = float(sys.argv[1]), int(sys.argv[2])
state = Path(os.environ["HETCTL_CHECKPOINT_DIR"]) / "state"
done = int(state.read_text()) if state.exists() else 0
print(f"start after {done} epochs", flush=True)
if done:
    # The last report is lost if the script was killed before it.
    hetctl.report(
        epoch=done, samples=100, loss=abs(learning_rate - 0.02) + 1 / (done + width), fit=learning_rate
    )
while done < int(os.environ["HETCTL_LAST_EPOCH"]) and not hetctl.should_stop():
    time.sleep(0.02)
    if least := os.environ.get("LEAST_RATE"):
        hetctl.report(epoch=done + 1, samples=50, finished=False, fit=learning_rate)
        # A trial that is to be ended in its midst waits for that.
        until = time.monotonic() + 60 * (learning_rate < float(least))
        while time.monotonic() < until and not hetctl.should_stop():
            time.sleep(0.05)
        if hetctl.should_stop():
            break
    done += 1
    whole = state.with_suffix(f".{os.environ['RANK']}")
    whole.write_text(str(done))
    whole.replace(state)
    hetctl.report(
        epoch=done, samples=100, loss=abs(learning_rate - 0.02) + 1 / (done + width), fit=learning_rate
    )
