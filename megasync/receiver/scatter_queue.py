"""The stream that a device backend works on: one piece of work at a time, waits with a limit, and device faults told apart.

An exception of the host between launches can be undone. A fault of the device, or work that does not end, cannot: nobody
knows which bytes were written. Used by ``scatter`` and ``stream``. Must import nothing above errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from time import perf_counter, sleep

import torch

from megasync.errors import TaintedError

_POLL_S = 20e-6


class WorkQueue:
    """A stream of a device and the right to use it. On the CPU work is done at once.

    Args:
        device: The device.
        timeout_s: Longest that queued work may take.
    """

    def __init__(self, device: torch.device, timeout_s: float = 60.0) -> None:
        self.device, self.timeout_s = device, timeout_s
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = RLock()

    @contextmanager
    def running(self, *, after_all: bool = False) -> Iterator[None]:
        """Make the stream current; other threads wait for their turn.

        Args:
            after_all: Begin after what is queued on the device's default stream.
        """
        with self._lock:
            if self.stream is None:
                yield
                return
            if after_all:
                self.stream.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield

    def wait(self, *, eager: bool = False) -> None:
        """Wait until everything queued here is done.

        Args:
            eager: Ask all the time, where the engine waits too; else other threads get the processor between looks.

        Raises:
            TaintedError: It takes longer than the limit.
            RuntimeError: The device failed.
        """
        if self.stream is None:
            return
        done = torch.cuda.Event()
        done.record(self.stream)
        deadline = perf_counter() + self.timeout_s
        while not done.query():
            if perf_counter() > deadline:
                raise TaintedError(
                    f"work on {self.device} did not end within {self.timeout_s} s: what it wrote is unknown, replace the "
                    "replica"
                )
            sleep(0.0 if eager else _POLL_S)

    def judge(self, error: BaseException) -> None:
        """Tell a fault of the device from an exception of the host, after something failed while live memory was written.

        Raises:
            TaintedError: The device failed or does not answer. Returns where the device is well: undo what was written.
        """
        if isinstance(error, TaintedError):
            raise error
        try:
            self.synchronize()
        except Exception as fault:
            raise TaintedError(
                f"{self.device} failed while weights were written ({error}; then {fault}): their bytes are in an unknown "
                "state, replace the replica"
            ) from error

    def synchronize(self) -> None:
        """Wait for all work on the device; raises what the device reports."""
        if self.stream is not None:
            self.wait()
            torch.cuda.synchronize(self.device)
