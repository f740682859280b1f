"""A stand-in for PBS and PALS: their commands, before the daemon of the stand-in for LSF.

A job has a script whose first lines set what PBS sets, its environment is that of a login, and it is ended by
TERM and KILL. What the commands print follows what OpenPBS printed (tests/cluster/batch/captured).
"""

SERVER = "standin"
"""Name of the server, in the ids of jobs."""
