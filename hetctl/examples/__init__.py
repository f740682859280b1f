"""Example projects: ``hetctl init FOLDER --example NAME`` copies one."""
