"""Finds the changed words of live weights, in wire form, and brings the snapshot up to date.

Old and new are read once; the few vectors that differ are read again to make planes and digest sums and to write the
new bytes into the snapshot. The snapshot is in HBM, or in pinned host memory and comes up through staging slots while
only changed vectors go down. Comes after ``compact_plan``, before the outer codec. Must import nothing of megasync
but kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels import dispatch
from megasync.kernels.compact_feed import DirectFeed, OldBytes, StagedFeed
from megasync.kernels.compact_plan import CompactPlan, Span
from megasync.kernels.compact_reference import compact_reference
from megasync.kernels.planes import Planes

SPAN_NBYTES = 1 << 30
"""Live bytes of a span by default. Two scratches of a quarter of it are held; a span takes the GPU 0.5 ms, twice as
long as it takes the host to issue it, so that the GPU does not wait."""

STAGED_SPAN_NBYTES = 1 << 26
"""Live bytes of a span by default where the snapshot is in host memory; as much HBM is held for each staging slot."""


@dataclass(frozen=True, slots=True)
class CompactPart:
    """The changed words of one span.

    Attributes:
        span: The segments.
        planes: On the live words' device; the counts are of the span's segments.
        job: Number of the plan, where several are worked on together.
    """

    span: Span
    planes: Planes
    job: int = 0


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
    old: OldBytes


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
    return compact_jobs_([(plan, lanes)], snapshot, span_nbytes=span_nbytes, num_slots=num_slots)


def compact_jobs_(
    jobs: Sequence[tuple[CompactPlan, torch.Tensor]],
    snapshot: torch.Tensor,
    *,
    span_nbytes: int | None = None,
    num_slots: int = 3,
) -> Iterator[CompactPart]:
    """Several compactions (of different word sizes, say) as one pipeline, so that the GPU does not wait between them.

    Args:
        jobs: Plans with their lanes; all on one device.
        snapshot: As for `compact_`; all plans read it.
        span_nbytes: As for `compact_`.
        num_slots: As for `compact_`.

    Yields:
        The parts of the first job, then those of the second, and so on.

    Raises:
        ValueError: As `compact_`, or when the plans are of several devices.

    *Stream* and *Memory*: as `compact_`.
    """
    if len({plan.device for plan, _ in jobs}) > 1:
        raise ValueError(f"plans are of several devices: {sorted({str(plan.device) for plan, _ in jobs})}")
    staged = [_check(plan, snapshot, lanes) for plan, lanes in jobs]
    if num_slots < 2:
        raise ValueError(f"{num_slots} staging slots: at least 2, so that copy and comparison overlap")
    nbytes = span_nbytes or (STAGED_SPAN_NBYTES if any(staged) else SPAN_NBYTES)
    spans = [(i, span) for i, (plan, _) in enumerate(jobs) for span in plan.spans(nbytes)]
    if not spans:
        return iter(())
    device = jobs[0][0].device
    if not dispatch.uses_triton(device):
        return (CompactPart(s, compact_reference(jobs[i][0], s, snapshot, jobs[i][1]), i) for i, s in spans)
    with_plans = [(jobs[i][0], s) for i, s in spans]
    feed = StagedFeed(snapshot, with_plans, num_slots) if any(staged) else DirectFeed(snapshot, with_plans)
    return _pipeline(jobs, snapshot, spans, feed)


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


def _pipeline(
    jobs: Sequence[tuple[CompactPlan, torch.Tensor]],
    snapshot: torch.Tensor,
    spans: list[tuple[int, Span]],
    feed: DirectFeed | StagedFeed,
) -> Iterator[CompactPart]:
    """Finds one span ahead of emitting, so that the device never waits for the host to learn a span's sizes."""
    widest = max(s.vectors[1] - s.vectors[0] for _, s in spans)
    scratch = [torch.empty(widest, dtype=torch.int16, device=jobs[0][0].device) for _ in spans[:2]]
    ahead: deque[_Found] = deque()
    for i in range(len(spans) + 1):
        if i < len(spans):
            job, span = spans[i]
            ahead.append(_find(jobs[job][0], span, scratch[i % 2], feed.open(i)))
        if i > 0:
            job, span = spans[i - 1]
            planes = _emit(jobs[job][0], ahead.popleft(), snapshot, jobs[job][1])
            feed.close(i - 1)
            yield CompactPart(span, planes, job)


def _find(plan: CompactPlan, span: Span, scratch: torch.Tensor, old: OldBytes) -> _Found:
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
            old.address,
            old.offsets,
            old.step,
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
    ends = torch.cumsum(sizes.view(-1), dim=0)  # flat: a scan along two rows of a matrix is far slower
    last = ends[segments - 1 :: segments]
    if plan.device.type == "cpu":
        return _Found(span, classes, scratch, pieces, counts, sizes, ends, last, None, old)
    totals = torch.empty(2, dtype=torch.int64, pin_memory=True)
    totals.copy_(last, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return _Found(span, classes, scratch, pieces, counts, sizes, ends, totals, ready, old)


def _emit(plan: CompactPlan, done: _Found, snapshot: torch.Tensor, lanes: torch.Tensor) -> Planes:
    """Launches the second pass of a span, once its sizes are known."""
    from megasync.kernels._emit_triton import emit_kernel

    if done.ready is not None:
        done.ready.synchronize()
    num_entries, total = done.totals.tolist()
    num_dense = total - num_entries
    w, device = plan.word_nbytes, plan.device
    entries = torch.empty((2 + w, num_entries), dtype=torch.uint8, device=device)
    dense = torch.zeros((w, num_dense), dtype=torch.uint8, device=device)
    for vector, ids, count in done.classes if num_entries + num_dense else []:
        emit_kernel[(count,)](
            done.pieces if ids is None else ids,
            plan.table,
            done.old.address,
            done.old.offsets,
            done.old.step,
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
