"""Moments on the clock that all processes of a host share: spans of telemetry and operations of a sink, when they ended.

Used by bench_end_to_end and trainer_process, whose times are compared with each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from megasync.manifest import decode_head
from megasync.sinks.base import Sink
from megasync.sinks.forward import ForwardingSink
from megasync.telemetry import Telemetry

T = TypeVar("T")


@dataclass
class StampedTelemetry(Telemetry):
    """Telemetry that remembers when spans began and ended.

    Attributes:
        begun: ns by span, of the last one.
        ended: ns by span, of the last one.
    """

    begun: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See ``Telemetry.span``."""
        self.begun[name] = time.monotonic_ns()
        try:
            with super().span(name):
                yield
        finally:
            self.ended[name] = time.monotonic_ns()


class StampedSink(ForwardingSink):
    """Remembers when operations ended.

    Attributes:
        ended: ns by operation and kind of object (``create payload``, ``create manifest``, ``swap_head``), of the last.
        seen: ns at which a head of a version was first read, by version.
    """

    def __init__(self, inner: Sink) -> None:
        super().__init__(inner)
        self.ended: dict[str, int] = {}
        self.seen: dict[int, int] = {}
        self._head: bytes | None = None

    def _run(self, operation: str, key: str, timeout_s: float, effect: Callable[[], T]) -> T:
        found = effect()
        now = time.monotonic_ns()
        if operation == "create":
            kind = "payload" if "payload" in key else "manifest" if "manifest" in key else "other"
            self.ended[f"create {kind}"] = now
        elif operation == "swap_head":
            self.ended[operation] = now
        elif operation == "read_head" and isinstance(found, bytes) and found != self._head:
            self._head = found
            self.seen.setdefault(decode_head(found, key).version, now)
        return found
