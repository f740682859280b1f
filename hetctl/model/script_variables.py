"""Variables by which a rank and the script that it runs find each other's descriptors."""

PROGRESS_VARIABLE = "HETCTL_PROGRESS_FD"
"""Variable with the descriptor to which the script writes its reports, one line of JSON each."""
STOP_VARIABLE = "HETCTL_STOP_FD"
"""Variable with a descriptor whose other end is closed when the script has to stop."""
