"""A stand-in for LSF: its commands, and the daemon behind them, on hosts that are all this machine.

The daemon (mbatchd.py) keeps the queue in its memory, starts the jobs and ends them. The commands talk to it
through a socket in the folder ``LSF_STANDIN``, and take it for away as long as there is a file ``away``.
"""
