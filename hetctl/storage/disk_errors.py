"""Errors of file systems: those of a full disk, those that pass by themselves, and waiting for the latter."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# EDQUOT: the quota is used up. EFBIG: the limit of a file's size is reached (write(2), RLIMIT_FSIZE).
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

SERVER_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.ESHUTDOWN})
"""Errors of an operation on a file while Lustre evicts a client, or a server of Lustre or NFS fails over."""

# Those of sockets, too: a server that does not answer. Then: a node without free descriptors for a moment.
# EROFS: a file system that was remounted after an error, until it is repaired.
TRANSIENT_ERRORS = SERVER_ERRORS | {
    *(errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
    errno.EROFS,
}
"""Errors of any operation on a file that say nothing about the file: the same operation may succeed later."""

PATIENCE_S = 300.0
"""Seconds for which operations are repeated; a failover of a server takes some of them to a few minutes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
"""Pauses between attempts; each is twice as long as the one before."""


def is_transient(error: BaseException) -> bool:
    """Return true for an error of the file system that may pass by itself."""
    return isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS


@dataclass(frozen=True)
class Patience:
    """Repetition of operations on files while the file system does not answer.

    Parameters
    ----------
    limit_s : float
        Seconds after the first error after which the next one is raised.
    meanwhile : callable
        Function called before each pause, such as a heartbeat.
    clock, sleep : callable
        Clock in seconds, and wait.
    """

    limit_s: float = PATIENCE_S
    meanwhile: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def call(self, function: Callable[[], T]) -> T:
        """Call a function until it raises no transient error; return its result.

        Parameters
        ----------
        function : callable
            Whole operation, which has the same effect if it is repeated after any of its steps.

        Raises
        ------
        OSError
            Any other error at once, and a transient one when the time is over.
        """
        pause_s, limit = FIRST_PAUSE_S, None
        while True:
            try:
                return function()
            except OSError as error:
                now = self.clock()
                limit = now + self.limit_s if limit is None else limit
                if not is_transient(error) or now >= limit:
                    raise
                self._say(error, pause_s)
            self.meanwhile()
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, error: OSError, pause_s: float) -> None:
        """Log the first error, and later ones after long pauses."""
        # Few processes ever need it.
        import logging

        if pause_s in (FIRST_PAUSE_S, LONGEST_PAUSE_S):
            logging.getLogger(__name__).warning("%s; trying again", error)


AT_ONCE = Patience(0.0)
"""No repetition: the first error is raised."""
PATIENT = Patience()
"""Repetition where nothing else has to go on."""
