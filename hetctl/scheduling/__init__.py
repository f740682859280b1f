"""The scheduling of a batch job: one state machine, which the driver and the simulator both carry out."""
