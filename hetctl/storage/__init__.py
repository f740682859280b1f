"""Files of a project: paths, atomic writes, event files, and what a run's events come to."""
