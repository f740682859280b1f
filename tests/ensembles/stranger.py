"""A script that knows nothing of hetctl: options as `--key=value`, checkpoints of its own, DDP by `RANK`."""

import os
import signal
import sys
import time
from pathlib import Path

out_dir, init_from, steps, harm = "out", "scratch", 6, False
for argument in sys.argv[1:]:
    key, value = argument[2:].split("=")
    globals()[key] = type(globals()[key])(value)
assert "RANK" not in os.environ, "this is a DDP run"
assert "decimal" in sys.modules
checkpoint = Path(out_dir, "ckpt.txt")
step = 0
if init_from == "resume":
    step = int(checkpoint.read_text())
print(f"{init_from} at step {step}", flush=True)
while step < steps:
    time.sleep(0.1)
    step += 1
    if step % 2 == 0:
        checkpoint.write_text(str(step))
    if harm and step == 5 and init_from == "scratch":
        os.kill(os.getpid(), signal.SIGKILL)
