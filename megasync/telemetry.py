"""Spans and counters: one ``span`` is an NVTX range, a profiler range and a timer at once.

Every stage runs inside exactly one span, so that stage times add up to the whole. Must import no other megasync module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

import torch


@dataclass
class Telemetry:
    """Times and counts of one trainer rank or applier. Thread-safe.

    Attributes:
        seconds: Total seconds by span name.
        counts: Totals by counter name.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _lock: Lock = field(default_factory=Lock, repr=False)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under ``megasync.name``; host time, since no device is synchronised."""
        start = perf_counter()
        nvtx = torch.cuda.is_available()
        if nvtx:
            torch.cuda.nvtx.range_push(f"megasync.{name}")
        try:
            with torch.profiler.record_function(f"megasync.{name}"):
                yield
        finally:
            if nvtx:
                torch.cuda.nvtx.range_pop()
            with self._lock:
                self.seconds[name] += perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere (by device events, say)."""
        with self._lock:
            self.seconds[name] += seconds

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self.counts[name] += by

    def drain(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and counts since the last drain."""
        with self._lock:
            out = dict(self.seconds), dict(self.counts)
            self.seconds.clear()
            self.counts.clear()
        return out
