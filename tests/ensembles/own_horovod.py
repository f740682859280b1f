"""A script of the user's own that meets by Horovod, twice, and adds its ranks up."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import horovod.tensorflow as hvd
import tensorflow as tf

import hetctl

for epoch in (1, 2):
    hvd.init()
    total = hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum, name="sum")
    if hvd.rank() == 0:
        hetctl.report(epoch=epoch, samples=2, val_loss=float(total), ranks=hvd.size())
    hvd.shutdown()
