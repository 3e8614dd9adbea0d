"""Where a compaction finds the old bytes and leaves the new ones: in HBM, or in slots between HBM and pinned host memory.

A slot holds only what the pieces of a span read, packed: regions of one word size may lie far apart in the snapshot.
Copy engines bring slots up some spans ahead and down again whole: only the changed words would be fewer bytes, but kernels would
have to write them across PCIe, and copies down cost a step nothing (``launch.bench.bench_one_queue``). Comes with
``compact_launch``, which asks for each span in turn. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.compact_plan import CompactPlan, Packing, Span

_COPY_NBYTES = 32 << 20  # at a time: the trainer's own copies get in between
_JOIN_NBYTES = 1 << 16  # gaps up to this are copied along: cheaper than another copy


@dataclass(frozen=True, slots=True)
class OldBytes:
    """Old bytes of a span on the device; the new ones take their place.

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
        """The span's kernels are queued."""

    def finish(self) -> None:
        """The snapshot has what was written so far."""


def _packing(plan: CompactPlan, span: Span) -> Packing:
    """Packs what the pieces of a span read; kept in the plan, since the same spans come at every step."""
    if span not in plan.packings:
        plan.packings[span] = _pack(plan, span)
    return plan.packings[span]


def _pack(plan: CompactPlan, span: Span) -> Packing:
    rows, vector = plan.rows[slice(*span.pieces)], plan.vector_nbytes[slice(*span.pieces)]
    if not len(rows):
        return Packing((), (), torch.zeros(0, dtype=torch.int64, device=plan.device), 0)
    low = rows[:, 7] + rows[:, 5] * vector
    high = low + rows[:, 6] * vector
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    gap = low[order][1:] - reach[:-1]
    begin, end, first = _runs(low[order], reach, gap > _JOIN_NBYTES)
    # A run keeps its place modulo 8, so that vectors stay aligned.
    aligned = begin // 8 * 8
    place = np.append(0, np.cumsum(-(-(end - aligned) // 8) * 8))
    shift = place[:-1] - aligned
    run = np.empty(len(order), dtype=np.int64)
    run[order] = np.cumsum(first) - 1
    offsets = rows[:, 7] + shift[run]
    up = zip(begin.tolist(), end.tolist(), (begin + shift).tolist(), strict=True)
    # Down only what the pieces own: bytes in a gap may be another span's, and newer by then.
    begin, end, _ = _runs(low[order], reach, gap > 0)
    places = begin + shift[np.searchsorted(aligned, begin, "right") - 1]
    down = zip(begin.tolist(), end.tolist(), places.tolist(), strict=True)
    return Packing(tuple(up), tuple(down), torch.from_numpy(offsets).to(plan.device), int(place[-1]))


def _runs(low: np.ndarray, reach: np.ndarray, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First byte and end of each run, and which pieces begin one; ``cut`` says where one ends."""
    first = np.append(True, cut)
    return low[first], reach[np.append(cut, True)], first


class StagedFeed:
    """Old bytes copied up from pinned memory some spans ahead, and slots copied down when their span is done.

    Every wait is the host's. Where all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), a stream
    that waited at its head would hold up the trainer's work behind it.

    Args:
        snapshot: Pinned.
        spans: In the order of ``open``.
        num_slots: As many slots of the widest span are taken from the device; 3 keep both copy engines busy.
    """

    def __init__(self, snapshot: torch.Tensor, spans: list[tuple[CompactPlan, Span]], num_slots: int) -> None:
        device = spans[0][0].device
        self._snapshot, self._device = snapshot, device
        self._packings = [_packing(*s) for s in spans]
        size = max(p.nbytes for p in self._packings)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(num_slots, len(spans)))]
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._up.wait_stream(torch.cuda.current_stream(device))
        self._raised: deque[torch.cuda.Event] = deque()
        self._lowered: deque[torch.cuda.Event] = deque()
        self._next = 0
        for _ in self._slots:
            self._raise()

    def open(self, index: int) -> OldBytes:
        """Waits on the host for the copy of span ``index``, and says where its old bytes are."""
        self._raised.popleft().synchronize()
        return OldBytes(self._slots[index % len(self._slots)].data_ptr(), self._packings[index].offsets, 1)

    def close(self, index: int) -> None:
        """The span's kernels are queued: waits for them, and sends its slot down and the one before up again."""
        _event(torch.cuda.current_stream(self._device)).synchronize()
        slot = self._slots[index % len(self._slots)]
        with torch.cuda.stream(self._down):
            for begin, end, place in self._packings[index].down:
                for at in range(begin, end, _COPY_NBYTES):
                    to = min(at + _COPY_NBYTES, end)
                    self._snapshot[at:to].copy_(slot[place + at - begin : place + to - begin], non_blocking=True)
        self._lowered.append(_event(self._down))
        if len(self._lowered) > 1:
            self._lowered.popleft().synchronize()
            self._raise()

    def finish(self) -> None:
        """Waits on the host until nothing is copied any more: the snapshot has what was written so far."""
        for events in (self._lowered, self._raised):
            for event in events:
                event.synchronize()

    def _raise(self) -> None:
        if self._next >= len(self._packings):
            return
        slot = self._slots[self._next % len(self._slots)]
        with torch.cuda.stream(self._up):
            for begin, end, place in self._packings[self._next].up:
                for at in range(begin, end, _COPY_NBYTES):
                    to = min(at + _COPY_NBYTES, end)
                    slot[place + at - begin : place + to - begin].copy_(self._snapshot[at:to], non_blocking=True)
        self._raised.append(_event(self._up))
        self._next += 1


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """A point in a stream that the host can wait for without keeping a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
