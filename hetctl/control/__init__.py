"""Decisions that are taken while training runs: pure, shared by the driver and the simulator."""
