"""Launches of the compaction's kernels for one span. Between ``compact_launch``, which decides what is queued when with
how much room, and the Triton modules. Must import nothing of megasync but kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.compact_feed import OldBytes
from megasync.kernels.compact_plan import CompactPlan, Span

_BLOCK = 128  # segments of a program that closes


@dataclass(slots=True)
class Found:
    """What the first pass of a span leaves on the device for the second.

    Attributes:
        classes: For each vector size: the size, its pieces (None for all of the span), their number.
        pieces: int32 ``[5, P]``: vectors stored, words, last position, words before in the segment, position before.
        counts: int32 ``[S]``.
        starts: int64 ``[2, S]``: where a segment's entries and dense words begin in those of its block.
        blocks: int64 ``[2, num_blocks]``: where a block's begin.
        num_blocks: Blocks of segments.
        totals: As given.
    """

    classes: list[tuple[int, torch.Tensor | None, int]]
    pieces: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor
    num_blocks: int
    totals: torch.Tensor


def queue_find(
    plan: CompactPlan,
    span: Span,
    old: OldBytes,
    scratch: torch.Tensor,
    finished: torch.Tensor,
    totals: torch.Tensor,
    host_totals: torch.Tensor,
) -> Found:
    """Queue the first pass of a span on the current stream.

    Args:
        plan: Tables.
        span: Of the plan.
        old: Where its old bytes are.
        scratch: int16, a number for each vector of the span.
        finished: int32, its first element is 0; counted up.
        totals: int64 ``[2]`` on the device: entries and dense words of the span.
        host_totals: int64 ``[2]``, pinned: the same.
    """
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
    num_blocks = -(-segments // _BLOCK)
    counts = torch.empty(segments, dtype=torch.int32, device=plan.device)
    starts = torch.empty((2, segments), dtype=torch.int64, device=plan.device)
    blocks = torch.empty((2, num_blocks), dtype=torch.int64, device=plan.device)
    close_kernel[(num_blocks,)](
        plan.first_piece_table[span.segments[0] :],
        plan.segment_words_table[span.segments[0] :],
        stored,
        changed,
        last,
        base,
        before,
        counts,
        starts,
        blocks,
        finished,
        totals,
        host_totals.data_ptr(),
        first,
        segments,
        W=plan.word_nbytes,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Found(classes, pieces, counts, starts, blocks, num_blocks, totals)


def queue_emit(
    plan: CompactPlan,
    span: Span,
    old: OldBytes,
    scratch: torch.Tensor,
    found: Found,
    entries: torch.Tensor,
    entries_room: int,
    dense: torch.Tensor,
    dense_room: int,
    lanes: torch.Tensor,
) -> None:
    """Queue the second pass of a span on the current stream; it does nothing where there is too little room.

    Args:
        plan: As for `queue_find`.
        span: As for `queue_find`.
        old: Old bytes; the new ones take their place.
        scratch: As the first pass left it.
        found: From the first pass.
        entries: uint8, contiguous, takes ``[2 + w, n]`` for the n entries that there are.
        entries_room: Entries that fit.
        dense: uint8, contiguous, all 0, takes ``[w, m]`` for the m dense words.
        dense_room: Dense words that fit.
        lanes: int64 ``[num_tensors, 4]``, added to.
    """
    from megasync.kernels._emit_triton import emit_kernel

    for vector, ids, count in found.classes:
        emit_kernel[(count,)](
            found.pieces if ids is None else ids,
            plan.table,
            old.address,
            old.offsets,
            old.step,
            scratch,
            found.pieces[0],
            found.pieces[3],
            found.pieces[4],
            found.counts,
            plan.segment_words_table[span.segments[0] :],
            found.starts,
            found.blocks,
            found.totals,
            entries,
            entries_room,
            dense,
            dense_room,
            lanes,
            span.pieces[0],
            span.vectors[0],
            span.segments[0],
            len(found.counts),
            found.num_blocks,
            VB=vector,
            W=plan.word_nbytes,
            IDS=ids is not None,
            BLOCK=64,
            CLOSED=_BLOCK,
            num_warps=1,
        )
