"""Streams and marks of a device, and their stand-ins on the CPU, where work is done when a call returns.

So the mask stage has one text for both. And ``Done`` and ``Worker``, by which the
trainer's thread waits and hands work over. Must import nothing of megasync.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import torch

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05


class Mark:
    """A point in the work of the stream that is current when it is made.

    Args:
        device: Whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._at = perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def hold(self) -> None:
        """Let the current stream wait for this point; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Let the host wait for this point."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def passed(self) -> bool:
        """Whether the stream has come this far."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: Mark) -> float:
        """Time between two marks that have passed."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._at - earlier._at


class Done:
    """Said once by a thread, waited for by one that may be interrupted at any instruction.

    An interrupt inside ``threading.Event.wait`` can leave its lock taken, and ``set`` would wait for ever; here none is.
    """

    def __init__(self) -> None:
        self._said = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def say(self) -> None:
        """It is done."""
        self._said = True
        self._wake.put(None)

    def wait(self) -> None:
        """Wait until it is."""
        while not self._said:
            with suppress(queue.Empty):  # another took the wake-up call
                self._wake.get(timeout=_LOOK_AGAIN_S)


class Worker:
    """One thread that does calls in order. Who hands them over may be interrupted at any instruction: it takes no lock.

    Futures and executors have locks of Python, which an interrupt inside them leaves taken (see ``Done``).

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Have it done; what it raises is its own affair.

        Raises:
            RuntimeError: After ``close``: nobody would do it.
        """
        if self._closed:
            raise RuntimeError(f"{self._thread.name} has ended: the publisher is closed")
        self._jobs.put(call)

    def run(self, call: Callable[[], None]) -> None:
        """Have it done, wait, and raise what it raised; as ``submit``."""
        done, errors = Done(), list[BaseException]()

        def job() -> None:
            try:
                call()
            except BaseException as e:
                errors.append(e)
            done.say()

        self.submit(job)
        done.wait()
        if errors:
            raise errors[0]

    def close(self, timeout_s: float | None = None) -> None:
        """End behind what was handed over; wait for it, at most so long."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (call := self._jobs.get()) is not None:
            try:
                call()
            except BaseException:  # its own affair, as said; those who wait for later ones must not wait for ever
                log.exception("megasync: work on %s failed", threading.current_thread().name)


class SideStream:
    """A stream of its own beside the compute stream.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's current stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Let the host wait for everything queued on it."""
        if self._stream is not None:
            self._stream.synchronize()
