"""Where a compaction finds the old bytes: in HBM, or coming up from pinned host memory some spans ahead.

Comes with ``compact``, which asks for the address of each span in turn. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

from collections import deque

import torch

from megasync.kernels.compact_plan import Span


class DirectFeed:
    """Old bytes where the snapshot is: on the device."""

    def __init__(self, snapshot: torch.Tensor) -> None:
        self._address = snapshot.data_ptr()

    def open(self, index: int) -> int:
        """Address that snapshot offsets count from, for span ``index``."""
        return self._address

    def close(self, index: int) -> None:
        """The span's old bytes are no longer read."""


class StagedFeed:
    """Old bytes copied up from pinned memory, some spans ahead, on a stream of their own."""

    def __init__(self, device: torch.device, snapshot: torch.Tensor, spans: list[Span], num_slots: int) -> None:
        self._snapshot, self._spans = snapshot, spans
        size = max((s.snapshot[1] - s.snapshot[0] + 8 for s in spans), default=0)
        num = min(num_slots, len(spans))
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num)]
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied: deque[torch.cuda.Event] = deque()
        self._next = 0
        for _ in self._slots:
            self._copy()

    def _copy(self) -> None:
        if self._next >= len(self._spans):
            return
        low, high = self._spans[self._next].snapshot
        slot = self._slots[self._next % len(self._slots)]
        with torch.cuda.stream(self._stream):
            slot[low % 8 : low % 8 + high - low].copy_(self._snapshot[low:high], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied.append(event)
        self._next += 1

    def open(self, index: int) -> int:
        """Waits on the current stream for the span's copy; returns the address that snapshot offsets count from."""
        torch.cuda.current_stream(self._slots[0].device).wait_event(self._copied.popleft())
        low = self._spans[index].snapshot[0]
        return self._slots[index % len(self._slots)].data_ptr() + low % 8 - low

    def close(self, index: int) -> None:
        """The span's slot may be filled again once the current stream has come this far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._slots[0].device))
        self._stream.wait_event(event)
        self._copy()
