"""Finds the changed words of live weights, in wire form, and brings the snapshot up to date.

Old and new are read once; the few vectors that differ are read again to make planes and digest sums and to write the
new bytes into the snapshot. The snapshot is in HBM, or in pinned host memory and goes up and down through staging slots.
Comes after ``compact_plan``, before the outer codec; ``compact_launch`` queues the
kernels. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megasync.kernels import dispatch
from megasync.kernels.compact_launch import CompactPart, Launches
from megasync.kernels.compact_plan import CompactPlan, Span
from megasync.kernels.compact_reference import compact_reference

SPAN_NBYTES = 1 << 30
"""Live bytes of a span by default; a scratch of a quarter of it is held."""

STAGED_SPAN_NBYTES = 384 << 20
"""The most where the snapshot is in host memory; as much HBM is held for each staging slot. Each span interrupts what
computes beside it for a moment, so that a few long ones cost less than many short ones."""

_LEAST_STAGED_NBYTES = 64 << 20
_STAGED_RATIO = 1 / 8


def staged_span_nbytes(live_nbytes: int) -> int:
    """Live bytes of a span by default where the snapshot is in host memory.

    Args:
        live_nbytes: Of the whole compaction: slots are there to save device memory, so they stay a part of it.
    """
    return max(_LEAST_STAGED_NBYTES, min(STAGED_SPAN_NBYTES, int(live_nbytes * _STAGED_RATIO)))


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

    *Stream*: runs on the stream that is current at the first ``next``, which must be the one of the call (and a private
    copy stream that begins to read the snapshot at once). The kernels of all spans are queued without a wait, but for
    copies of a snapshot in host memory, which the host waits for: a stream that waited for them would hold up other
    streams where all share one queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Live words must not change before the last part was
    given. *Memory*: a scratch of a quarter of a span (2 bytes for each vector of 8), the staging slots, and room for
    the planes of some spans (``compact_launch``).
    """
    return compact_jobs_([(plan, lanes)], snapshot, span_nbytes=span_nbytes, num_slots=num_slots)


def compact_jobs_(
    jobs: Sequence[tuple[CompactPlan, torch.Tensor]],
    snapshot: torch.Tensor,
    *,
    span_nbytes: int | None = None,
    num_slots: int = 3,
    queued: Callable[[], None] | None = None,
) -> Iterator[CompactPart]:
    """Several compactions (of different word sizes, say) as one pipeline, so that the GPU does not wait between them.

    Args:
        jobs: Plans with their lanes; all on one device.
        snapshot: As for `compact_`; all plans read it.
        span_nbytes: As for `compact_`.
        num_slots: As for `compact_`.
        queued: Called on the stream when every read of live words is queued, before the first of the last parts is
            given; once more where a span had to be done over.

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
    default = staged_span_nbytes(sum(plan.nbytes for plan, _ in jobs)) if any(staged) else SPAN_NBYTES
    nbytes = span_nbytes or default
    spans = [(i, span) for i, (plan, _) in enumerate(jobs) for span in plan.spans(nbytes)]
    if not spans:
        return iter(())  # nothing to read, so nothing to queue
    if dispatch.uses_triton(jobs[0][0].device):
        return Launches(jobs, snapshot, spans, num_slots if any(staged) else 0, queued).parts()
    return _on_host(jobs, snapshot, spans, queued)


def _on_host(
    jobs: Sequence[tuple[CompactPlan, torch.Tensor]],
    snapshot: torch.Tensor,
    spans: Sequence[tuple[int, Span]],
    queued: Callable[[], None] | None,
) -> Iterator[CompactPart]:
    """The reference, span by span."""
    for number, (i, span) in enumerate(spans, 1):
        planes = compact_reference(jobs[i][0], span, snapshot, jobs[i][1])
        if number == len(spans) and queued is not None:
            queued()
        yield CompactPart(span, planes, i)


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
