"""State machine that schedules one batch job; the driver and the simulator both carry out its commands."""
