"""Runs coroutines on a thread of their own, with a deadline that really cancels them.

For sinks whose library is asynchronous; ``object_store.py`` uses it. Must not import trainer or receiver.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megasync.sinks.base import Deadline

T = TypeVar("T")
_GRACE_S = 10.0


class LoopThread:
    """An event loop on a daemon thread, started by the first call, and again after a fork or ``close``."""

    def __init__(self, name: str) -> None:
        """Name the thread; nothing is started."""
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._owner = 0

    def run(self, work: Callable[[], Awaitable[T]], deadline: Deadline, what: str) -> T:
        """Run work to its end.

        Args:
            work: Makes the awaitable, on the loop's thread; it has ended when this returns or raises.
            deadline: When it is cancelled.
            what: For the message.

        Raises:
            RetryError: The deadline passed.
        """

        async def bounded() -> T:
            return await asyncio.wait_for(work(), deadline.left_s())

        future = asyncio.run_coroutine_threadsafe(bounded(), self._started())
        try:
            # wait_for ends it; waiting here is bounded as well, in case the library does not let itself be cancelled.
            return future.result(deadline.left_s() + _GRACE_S)
        except (TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise deadline.passed(what) from error
        except BaseException:
            # Interrupted while waiting: the work must not outlive the call, it may write into the caller's memory.
            future.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._owner != os.getpid():
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                self._thread.start()
                self._loop, self._owner = loop, os.getpid()
            return self._loop

    def close(self) -> None:
        """Stop the thread; idempotent."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and self._owner == os.getpid():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=_GRACE_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
