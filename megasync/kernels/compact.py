"""Finds the changed words of live weights, in wire form, and brings the snapshot up to date.

Old and new are read once; the few vectors that differ are read again to make planes and digest sums and to write the
new bytes into the snapshot. The snapshot is in HBM, or in pinned host memory and comes up through staging slots while
only changed vectors go down. Comes after ``compact_plan``, before the outer codec. Must import nothing of megasync
but kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels import dispatch
from megasync.kernels.compact_plan import CompactPlan, Span
from megasync.kernels.compact_reference import compact_reference
from megasync.kernels.planes import Planes

SPAN_NBYTES = 1 << 29
"""Live bytes of a span by default: two scratches of a quarter of it are held, and a span fills the GPU many times
over."""

STAGED_SPAN_NBYTES = 1 << 26
"""Live bytes of a span by default where the snapshot is in host memory; as much HBM is held for each staging slot."""


@dataclass(frozen=True, slots=True)
class CompactPart:
    """The changed words of one span.

    Attributes:
        span: The segments.
        planes: On the live words' device; the counts are of the span's segments.
    """

    span: Span
    planes: Planes


@dataclass(slots=True)
class _Found:
    """What a span leaves on the device between the two passes."""

    span: Span
    classes: list[tuple[int, torch.Tensor | None, int]]
    found: torch.Tensor
    pieces: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor
    ends: torch.Tensor
    totals: torch.Tensor
    ready: torch.cuda.Event | None
    old_address: int
    slot: int


def compact_(
    plan: CompactPlan,
    snapshot: torch.Tensor,
    lanes: torch.Tensor,
    *,
    span_nbytes: int | None = None,
    num_slots: int = 3,
) -> Iterator[CompactPart]:
    """Compares live words with the snapshot, span by span.

    Args:
        plan: Tables.
        snapshot: uint8 ``[n]``, contiguous, on the live words' device or in pinned host memory, 8-byte aligned.
            Changed bytes are overwritten with the new ones.
        lanes: int64 ``[num_tensors, 4]``, live words' device, contiguous: sums of old and of new minus old at the
            changed words are added.
        span_nbytes: Live bytes of a span; None for the default of the snapshot's place.
        num_slots: Staging slots for a snapshot in host memory, at least 2.

    Yields:
        One part for each span, in order of segments. The snapshot of a span is written when its part's work is done.

    Raises:
        ValueError: On a snapshot or lanes that do not fit the plan.

    *Stream*: runs on the stream that is current at the first ``next`` (and a private copy stream); the host waits
    only for the sizes of each span, which are ready while the next span is being read. Live words must not change
    before the work of the last part is done. *Memory*: two scratches of a quarter of a span (2 bytes for each vector
    of 8), and the staging slots.
    """
    staged = _check(plan, snapshot, lanes)
    if num_slots < 2:
        raise ValueError(f"{num_slots} staging slots: at least 2, so that copy and comparison overlap")
    spans = plan.spans(span_nbytes or (STAGED_SPAN_NBYTES if staged else SPAN_NBYTES))
    if not dispatch.uses_triton(plan.device):
        return (CompactPart(s, compact_reference(plan, s, snapshot, lanes)) for s in spans)
    feed = _Staging(plan, snapshot, spans, num_slots) if staged else _Direct(snapshot)
    return _pipeline(plan, snapshot, lanes, spans, feed)


def _check(plan: CompactPlan, snapshot: torch.Tensor, lanes: torch.Tensor) -> bool:
    """Tests the arguments; returns whether the snapshot must be staged.

    Raises:
        ValueError: See `compact_`.
    """
    if snapshot.dtype is not torch.uint8 or snapshot.dim() != 1 or not snapshot.is_contiguous():
        raise ValueError(f"the snapshot must be contiguous uint8 [n], got {snapshot.dtype} {tuple(snapshot.shape)}")
    if snapshot.numel() and snapshot.data_ptr() % 8:
        raise ValueError(f"the snapshot starts at {snapshot.data_ptr():#x}, not on 8 bytes")
    if snapshot.numel() < plan.snapshot_nbytes:
        raise ValueError(f"the snapshot has {snapshot.numel()} bytes, the plan reads {plan.snapshot_nbytes}")
    if lanes.dtype is not torch.int64 or lanes.shape != (plan.num_tensors, 4) or not lanes.is_contiguous():
        raise ValueError(f"lanes must be contiguous int64 [{plan.num_tensors}, 4], got {lanes.dtype} {lanes.shape}")
    if lanes.device != plan.device:
        raise ValueError(f"lanes are on {lanes.device}, live words on {plan.device}")
    if snapshot.device == plan.device:
        return False
    if snapshot.device.type != "cpu" or not snapshot.is_pinned():
        raise ValueError(f"the snapshot is on {snapshot.device}: it must be on {plan.device} or in pinned host memory")
    return True


class _Direct:
    """Old bytes where the snapshot is: on the device."""

    def __init__(self, snapshot: torch.Tensor) -> None:
        self._address = snapshot.data_ptr()

    def open(self, index: int) -> int:
        """Address that snapshot offsets count from, for span ``index``."""
        return self._address

    def close(self, index: int) -> None:
        """The span's old bytes are no longer read."""


class _Staging:
    """Old bytes copied up from pinned memory, some spans ahead, on a stream of their own."""

    def __init__(self, plan: CompactPlan, snapshot: torch.Tensor, spans: tuple[Span, ...], num_slots: int) -> None:
        self._snapshot, self._spans = snapshot, spans
        size = max((s.snapshot[1] - s.snapshot[0] + 8 for s in spans), default=0)
        num = min(num_slots, len(spans))
        self._slots = [torch.empty(size, dtype=torch.uint8, device=plan.device) for _ in range(num)]
        self._stream = torch.cuda.Stream(plan.device)
        self._stream.wait_stream(torch.cuda.current_stream(plan.device))
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


def _pipeline(
    plan: CompactPlan, snapshot: torch.Tensor, lanes: torch.Tensor, spans: tuple[Span, ...], feed: _Direct | _Staging
) -> Iterator[CompactPart]:
    """Finds one span ahead of emitting, so that the device never waits for the host to learn a span's sizes."""
    widest = max((s.vectors[1] - s.vectors[0] for s in spans), default=0)
    scratch = [torch.empty(widest, dtype=torch.int16, device=plan.device) for _ in spans[:2]]
    ahead: deque[_Found] = deque()
    for i in range(len(spans) + 1):
        if i < len(spans):
            ahead.append(_find(plan, spans[i], scratch[i % 2], feed.open(i), i))
        if i > 0:
            done = ahead.popleft()
            planes = _emit(plan, done, snapshot, lanes)
            feed.close(done.slot)
            yield CompactPart(done.span, planes)


def _find(plan: CompactPlan, span: Span, scratch: torch.Tensor, old_address: int, index: int) -> _Found:
    """Launches the first pass of a span and asks for its sizes."""
    from megasync.kernels._compact_triton import close_kernel, find_kernel

    first, end = span.pieces
    num, segments = end - first, span.segments[1] - span.segments[0]
    classes: list[tuple[int, torch.Tensor | None, int]] = []
    for vector, numbers, table in plan.classes:
        low, high = np.searchsorted(numbers, span.pieces).tolist()
        if high > low:
            classes.append((vector, None if high - low == num else table[low:high], high - low))
    pieces = torch.empty((5, max(num, 1)), dtype=torch.int32, device=plan.device)
    stored, changed, last, base, before = pieces
    for vector, ids, count in classes:
        find_kernel[(count,)](
            pieces if ids is None else ids,
            plan.table,
            old_address,
            scratch,
            stored,
            changed,
            last,
            first,
            span.vectors[0],
            VB=vector,
            W=plan.word_nbytes,
            IDS=ids is not None,
            STEP=256,
            num_warps=1,
        )
    counts = torch.empty(segments, dtype=torch.int32, device=plan.device)
    sizes = torch.empty((2, segments), dtype=torch.int64, device=plan.device)
    close_kernel[(-(-segments // 128),)](
        plan.first_piece_table[span.segments[0] :],
        plan.segment_words_table[span.segments[0] :],
        stored,
        changed,
        last,
        base,
        before,
        counts,
        sizes,
        first,
        segments,
        W=plan.word_nbytes,
        BLOCK=128,
        num_warps=4,
    )
    ends = torch.cumsum(sizes, dim=1)
    if plan.device.type == "cpu":
        return _Found(span, classes, scratch, pieces, counts, sizes, ends, ends[:, -1], None, old_address, index)
    totals = torch.empty(2, dtype=torch.int64, pin_memory=True)
    totals.copy_(ends[:, -1], non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return _Found(span, classes, scratch, pieces, counts, sizes, ends, totals, ready, old_address, index)


def _emit(plan: CompactPlan, done: _Found, snapshot: torch.Tensor, lanes: torch.Tensor) -> Planes:
    """Launches the second pass of a span, once its sizes are known."""
    from megasync.kernels._compact_triton import emit_kernel

    if done.ready is not None:
        done.ready.synchronize()
    num_entries, num_dense = done.totals.tolist()
    w, device = plan.word_nbytes, plan.device
    entries = torch.empty((2 + w, num_entries), dtype=torch.uint8, device=device)
    dense = torch.zeros((w, num_dense), dtype=torch.uint8, device=device)
    for vector, ids, count in done.classes if num_entries + num_dense else []:
        emit_kernel[(count,)](
            done.pieces if ids is None else ids,
            plan.table,
            done.old_address,
            snapshot.data_ptr(),
            done.found,
            done.pieces[0],
            done.pieces[3],
            done.pieces[4],
            done.sizes,
            done.ends,
            entries,
            entries.stride(0),
            dense,
            dense.stride(0),
            lanes,
            done.span.pieces[0],
            done.span.vectors[0],
            done.span.segments[0],
            len(done.counts),
            VB=vector,
            W=w,
            IDS=ids is not None,
            BLOCK=64,
            num_warps=1,
        )
    return Planes(w, done.counts, entries, dense)
