"""Projects to start from: ``hetctl init FOLDER --example NAME`` copies one."""
