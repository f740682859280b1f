"""A stand-in for Flux: its command, before the daemon of the stand-in for LSF.

A job is an instance of its own, which takes no jobs of the user's: those are for its parent. What the command
prints follows what flux-core printed (tests/cluster/batch/captured).
"""
