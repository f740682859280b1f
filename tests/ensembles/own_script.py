"""A script of the user's own in plain Python: it counts epochs, and does harm if told to."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import hetctl

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--epoch-s", type=float, default=0.1)
parser.add_argument("--parts", type=int, default=1)
parser.add_argument("--harm", default="none")
options = parser.parse_args()
folder = Path(os.environ["HETCTL_CHECKPOINT_DIR"])
state = folder / "epochs.txt"


def once(name):
    """Return true at the first call in all processes of a member."""
    mark = folder / name
    if mark.exists():
        return False
    mark.touch()
    return True


done = int(state.read_text()) if state.exists() else 0
print(f"start after {done} epochs with {os.environ['WORLD_SIZE']} ranks", flush=True)
print(f"named before: {hetctl.last_checkpoint()}", flush=True)
if options.harm == "unresponsive":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.harm == "garbage":
    os.write(int(os.environ["HETCTL_PROGRESS_FD"]), b'\x1b[31m epoch one is done\n{"epoch": 0}\n[1, 2]\n')
if options.harm == "fail":
    sys.exit("the data are not there")
if done and options.harm != "blind":
    hetctl.report(epoch=done, val_loss=1 / done)
while done < options.epochs:
    if hetctl.should_stop() and options.harm != "unresponsive":
        print(f"stopped after {done} epochs", flush=True)
        sys.exit(0)
    for part in range(1, options.parts + 1):
        time.sleep(options.epoch_s / options.parts)
        if options.parts > 1:
            so_far = 100 * part // options.parts
            hetctl.report(epoch=done + 1, finished=False, samples=so_far, loss=1 / (done + part))
    done += 1
    # All ranks write the same file: with one name for the new ones, a rank could rename that of another.
    whole = state.with_suffix(f".{os.environ['RANK']}")
    whole.write_text(str(done))
    whole.replace(state)
    if options.harm != "blind":
        hetctl.report(epoch=done, samples=100, checkpoint=state, val_loss=1 / done)
    if options.harm == "child" and done == 2 and once("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.harm == "rank" and done == 2 and once("killed"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
