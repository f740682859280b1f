"""Patience with a file system that does not answer: operations are repeated for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hetctl.model.errors import is_transient
from hetctl.model.values import dataclass

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 300.0
"""Seconds for which operations are repeated; a server's failover takes up to a few minutes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses between attempts; each is twice as long as the one before."""


@dataclass(frozen=True)
class Patience:
    """Repetition of operations on files while the file system does not answer.

    Parameters
    ----------
    limit_s : float
        Seconds after the first error after which the next one is raised.
    on_pause : callable
        Function called before each pause, such as a heartbeat.
    clock, sleep : callable
        Clock in seconds, and wait.
    before_attempt : callable
        Function called before each attempt, such as a check of the lease; its error is raised at once.
    """

    limit_s: float = PATIENCE_S
    on_pause: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    before_attempt: Callable[[], None] = lambda: None

    def call(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function until it raises no transient error; return its result.

        Parameters
        ----------
        function : callable
            Operation that may be repeated after any of its steps.

        Raises
        ------
        OSError
            Any other error at once, and a transient one when the time is over.
        """
        pause_s, limit = FIRST_PAUSE_S, None
        while True:
            self.before_attempt()
            try:
                return function(*arguments, **options)
            except OSError as error:
                now = self.clock()
                limit = now + self.limit_s if limit is None else limit
                if not is_transient(error) or now >= limit:
                    raise
                self._say(error, pause_s)
            self.on_pause()
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, error: OSError, pause_s: float) -> None:
        """Log the first error, and later ones after long pauses."""
        # Few processes ever need it.
        import logging

        if pause_s in (FIRST_PAUSE_S, LONGEST_PAUSE_S):
            logging.getLogger(__name__).warning("%s; trying again", error)


NO_RETRY = Patience(0.0)
"""No repetition: the first error is raised."""
PATIENT = Patience()
"""Repetition for callers that may wait."""
