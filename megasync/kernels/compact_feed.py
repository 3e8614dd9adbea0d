"""Where a compaction finds the old bytes: in HBM, or coming up from pinned host memory some spans ahead.

A slot holds only what the pieces of a span read, packed: regions of one word size may lie far apart in the snapshot.
Comes with ``compact``, which asks for each span in turn. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.compact_plan import CompactPlan, Packing, Span

_JOIN_NBYTES = 1 << 16  # gaps up to this are copied along: cheaper than another copy


@dataclass(frozen=True, slots=True)
class OldBytes:
    """Old bytes of a span on the device.

    Attributes:
        address: Where offsets count from.
        offsets: int64 on the device; entry ``step * i`` is the offset of vector 0 of the span's piece ``i``.
        step: 1, or the columns of the plan's table.
    """

    address: int
    offsets: torch.Tensor
    step: int


class DirectFeed:
    """Old bytes where the snapshot is: on the device."""

    def __init__(self, snapshot: torch.Tensor, spans: list[tuple[CompactPlan, Span]]) -> None:
        self._snapshot, self._spans = snapshot, spans

    def open(self, index: int) -> OldBytes:
        """The old bytes of span ``index``."""
        plan, span = self._spans[index]
        return OldBytes(self._snapshot.data_ptr(), plan.table[span.pieces[0] :, 7], plan.table.shape[1])

    def close(self, index: int) -> None:
        """The span's old bytes are no longer read."""


def _packing(plan: CompactPlan, span: Span) -> Packing:
    """Packs what the pieces of a span read; kept in the plan, since the same spans come at every step."""
    if span not in plan.packings:
        plan.packings[span] = _pack(plan, span)
    return plan.packings[span]


def _pack(plan: CompactPlan, span: Span) -> Packing:
    rows, vector = plan.rows[slice(*span.pieces)], plan.vector_nbytes[slice(*span.pieces)]
    if not len(rows):
        return Packing((), torch.zeros(0, dtype=torch.int64, device=plan.device), 0)
    low = rows[:, 7] + rows[:, 5] * vector
    high = low + rows[:, 6] * vector
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = low[order][1:] > reach[:-1] + _JOIN_NBYTES
    begin = low[order][first]
    end = reach[np.append(np.nonzero(first)[0][1:] - 1, len(order) - 1)]
    # A run keeps its place modulo 8, so that vectors stay aligned.
    aligned = begin // 8 * 8
    place = np.append(0, np.cumsum(-(-(end - aligned) // 8) * 8))
    run = np.empty(len(order), dtype=np.int64)
    run[order] = np.cumsum(first) - 1
    offsets = place[run] + rows[:, 7] - aligned[run]
    runs = zip(begin.tolist(), end.tolist(), (place[:-1] + begin - aligned).tolist(), strict=True)
    return Packing(tuple(runs), torch.from_numpy(offsets).to(plan.device), int(place[-1]))


class StagedFeed:
    """Old bytes copied up from pinned memory, some spans ahead, on a stream of their own."""

    def __init__(self, snapshot: torch.Tensor, spans: list[tuple[CompactPlan, Span]], num_slots: int) -> None:
        device = spans[0][0].device
        self._snapshot = snapshot
        self._packings = [_packing(*s) for s in spans]
        size = max(p.nbytes for p in self._packings)
        num = min(num_slots, len(spans))
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num)]
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied: deque[torch.cuda.Event] = deque()
        self._next = 0
        for _ in self._slots:
            self._copy()

    def _copy(self) -> None:
        if self._next >= len(self._packings):
            return
        slot = self._slots[self._next % len(self._slots)]
        with torch.cuda.stream(self._stream):
            for begin, end, place in self._packings[self._next].runs:
                slot[place : place + end - begin].copy_(self._snapshot[begin:end], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied.append(event)
        self._next += 1

    def open(self, index: int) -> OldBytes:
        """Waits on the current stream for the copy of span ``index``, and says where its old bytes are."""
        slot = self._slots[index % len(self._slots)]
        torch.cuda.current_stream(slot.device).wait_event(self._copied.popleft())
        return OldBytes(slot.data_ptr(), self._packings[index].offsets, 1)

    def close(self, index: int) -> None:
        """The span's slot may be filled again once the current stream has come this far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._slots[0].device))
        self._stream.wait_event(event)
        self._copy()
