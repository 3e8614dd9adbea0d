"""Follow: look at the head, update, wait; the loop of an engine that serves.

What passes (a sink that does not answer, a head that cannot be read, an update that was undone) is reported and tried
again with growing waits: the version held keeps serving. What does not pass is raised. Must import nothing above
results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event
from typing import Protocol

from megasync.errors import FormatError, MegasyncError, RefetchError, RetryError, UndoneError
from megasync.receiver.results import UpdateResult

LONGEST_WAIT_S = 30.0

_PASSES = (RetryError, RefetchError, FormatError, UndoneError)
_log = logging.getLogger(__name__)


class Updates(Protocol):
    """What is followed with: an applier."""

    def update(self, version: int | None = None) -> UpdateResult:
        """Apply what the head names."""


def follow(
    applier: Updates,
    stop: Event,
    *,
    poll_s: float,
    stopped: Callable[[], bool] | None = None,
    wait: Callable[[float], object] | None = None,
    on_update: Callable[[UpdateResult], None] | None = None,
    on_problem: Callable[[MegasyncError], None] | None = None,
    give_up_after: int | None = None,
) -> None:
    """Follow the head until stopped.

    Args:
        applier: Joined.
        stop: Ends the loop when set.
        poll_s: Seconds between looks at the head while all is well.
        stopped: Whether to end before the next look; whether ``stop`` is set by default.
        wait: Waits so many seconds or until ``stop`` is set; ``stop.wait`` by default.
        on_update: Called with every result that applied something.
        on_problem: Called with every error that is tried again.
        give_up_after: Raise after so many problems in a row; None goes on for ever.

    Raises:
        MegasyncError: An error that trying again does not help, or the last of ``give_up_after``.
    """
    pause = wait or stop.wait
    failures = 0
    while not (stopped or stop.is_set)():
        delay = poll_s
        try:
            result = applier.update()
        except _PASSES as e:
            failures += 1
            _log.warning("update failed (%d in a row), the version held is kept: %s", failures, e)
            if on_problem is not None:
                on_problem(e)
            if give_up_after is not None and failures >= give_up_after:
                raise
            delay = min(poll_s * 2**failures, LONGEST_WAIT_S)
        else:
            failures = 0
            if result.versions and on_update is not None:
                on_update(result)
        pause(delay)
