"""Files of a project: paths, atomic writes, event files, and the state derived from a run's events."""
