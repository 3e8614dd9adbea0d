"""Second pass of ``kernels.compact``: imported only by that module, only where Triton is installed.

Reads the few vectors that differ again, writes planes and sums, and then the new bytes over the old ones. Comes after ``_compact_triton``.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import group_weight, unit_factor, unit_weight, word_flags, word_mask
from megasync.kernels._vectors_triton import count_flags, load_vectors, row_of, store_vectors, top_word
from megasync.kernels.compact_runs import PIECE_COLUMNS

_COLUMNS = tl.constexpr(PIECE_COLUMNS)

# Sizes, offsets and slices differ from span to span: a variant compiled for one value would stall the next span.
_SIZES = [
    "first_piece",
    "first_vector",
    "first_segment",
    "num_segments",
    "num_blocks",
    "entries_room",
    "dense_room",
    "old_step",
]


@triton.jit
def _unit_terms(byte, old, new, LANE: tl.constexpr, VB: tl.constexpr):
    """Contributions of old, and of new minus old, of vectors at canonical byte ``byte`` (int64) to a lane
    (uint64)."""
    if VB == 8:
        # Both units of an aligned 8-byte vector lie in one group of four.
        weight = group_weight(byte >> 4, LANE)
        k = (byte >> 2) & 3
        low = weight * unit_factor(k, LANE)
        high = weight * unit_factor(k + 1, LANE)
        was = (old & 0xFFFFFFFF) * low + (old >> 32) * high
        now = (new & 0xFFFFFFFF) * low + (new >> 32) * high
    else:
        weight = unit_weight(byte >> 2, LANE) << ((byte & 3) * 8).to(tl.uint64)
        was = old * weight
        now = new * weight
    return was, now - was


@triton.jit(
    do_not_specialize=_SIZES, do_not_specialize_on_alignment=["ids_ptr", "old_offsets_ptr", "segment_words_ptr"]
)
def emit_kernel(
    ids_ptr,
    pieces_ptr,
    old_address,
    old_offsets_ptr,
    old_step,
    found_ptr,
    stored_ptr,
    base_ptr,
    before_ptr,
    counts_ptr,
    segment_words_ptr,
    starts_ptr,
    blocks_ptr,
    totals_ptr,
    entries_ptr,
    entries_room,
    dense_ptr,
    dense_room,
    lanes_ptr,
    first_piece,
    first_vector,
    first_segment,
    num_segments,
    num_blocks,
    VB: tl.constexpr,
    W: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLOSED: tl.constexpr,
):
    """One piece: the entries of its changed words, their sums, then the new bytes in place of the old ones.

    Does nothing at all where the span's words do not fit into ``entries_room`` and ``dense_room``: the host sees the
    same totals and does the span again. Rows of the planes are as long as the totals say. ``CLOSED`` is the block of
    ``close_kernel``.
    """
    piece = tl.program_id(0) + first_piece
    if IDS:
        piece = tl.load(ids_ptr + tl.program_id(0))
    piece_ptr = pieces_ptr + piece.to(tl.int64) * _COLUMNS
    piece -= first_piece
    stored = tl.load(stored_ptr + piece)
    entries_stride = tl.load(totals_ptr)
    dense_stride = tl.load(totals_ptr + 1)
    if (stored > 0) & (entries_stride <= entries_room) & (dense_stride <= dense_room):
        found_ptr += tl.load(piece_ptr + 14) - first_vector
        live = tl.load(piece_ptr)
        live_step = tl.load(piece_ptr + 1)
        multiplier = tl.load(piece_ptr + 2)
        shift = tl.load(piece_ptr + 3)
        per_row = tl.load(piece_ptr + 4).to(tl.int32)
        begin = tl.load(piece_ptr + 5).to(tl.int32)
        old_address += tl.load(old_offsets_ptr + piece.to(tl.int64) * old_step)
        position_0 = tl.load(piece_ptr + 8).to(tl.int32)
        position_step = tl.load(piece_ptr + 9).to(tl.int32)
        flat_0 = tl.load(piece_ptr + 10)
        flat_step = tl.load(piece_ptr + 11)
        segment = tl.load(piece_ptr + 13) - first_segment
        block = segment // CLOSED
        dense = tl.load(counts_ptr + segment).to(tl.int64) * (2 + W) >= tl.load(segment_words_ptr + segment) * W
        mask_start = tl.load(starts_ptr + num_segments + segment) + tl.load(blocks_ptr + num_blocks + block)
        slot_0 = tl.load(starts_ptr + segment) + tl.load(blocks_ptr + block) + tl.load(base_ptr + piece)
        before_0 = tl.load(before_ptr + piece)
        lane = tl.arange(0, BLOCK)
        old_a = tl.zeros((BLOCK,), tl.uint64)
        old_b = tl.zeros((BLOCK,), tl.uint64)
        new_a = tl.zeros((BLOCK,), tl.uint64)
        new_b = tl.zeros((BLOCK,), tl.uint64)
        for start in range(0, stored, BLOCK):
            j = start + lane
            valid = j < stored
            k = begin + tl.load(found_ptr + j, mask=valid, other=0).to(tl.int32)
            row, column = row_of(k, multiplier, shift, per_row)
            old = load_vectors(old_address + k.to(tl.int64) * VB, valid, VB)
            new = load_vectors(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
            x = old ^ new
            flags = word_flags(x, W)
            count = count_flags(flags, W)
            slot = slot_0 + tl.cumsum(count, 0) - count
            slot_0 += tl.sum(count, 0)
            # The word before the first of this vector is the last of the vector found before it.
            k_before = begin + tl.load(found_ptr + j - 1, mask=valid & (j > 0), other=0).to(tl.int32)
            row_before, column_before = row_of(k_before, multiplier, shift, per_row)
            x_before = load_vectors(old_address + k_before.to(tl.int64) * VB, valid & (j > 0), VB)
            live_before = live + row_before.to(tl.int64) * live_step + column_before.to(tl.int64) * VB
            x_before = x_before ^ load_vectors(live_before, valid & (j > 0), VB)
            before = position_0 + row_before * position_step + column_before * (VB // W) + top_word(x_before, VB, W)
            before = tl.where(j > 0, before, before_0)
            position = position_0 + row * position_step + column * (VB // W)
            for b in tl.static_range(VB // W):
                word = x >> (8 * W * b)
                if W < 8:
                    word = word & ((1 << (8 * W)) - 1)
                there = valid & (word != 0)
                if dense:
                    for p in tl.static_range(W):
                        at = dense_ptr + p * dense_stride + mask_start + position
                        tl.store(at, ((word >> (8 * p)) & 0xFF).to(tl.uint8), mask=there)
                else:
                    gap = position - before - 1
                    tl.store(entries_ptr + slot, (gap & 0xFF).to(tl.uint8), mask=there)
                    tl.store(entries_ptr + entries_stride + slot, (gap >> 8).to(tl.uint8), mask=there)
                    for p in tl.static_range(W):
                        at = entries_ptr + (2 + p) * entries_stride + slot
                        tl.store(at, ((word >> (8 * p)) & 0xFF).to(tl.uint8), mask=there)
                    slot += there.to(tl.int64)
                    before = tl.where(there, position, before)
                position += 1
            # Old bytes of words that did not change are left out of the sums on both sides.
            touched = word_mask(x, W)
            byte = (flat_0 + row.to(tl.int64) * flat_step) * W + column.to(tl.int64) * VB
            was_a, change_a = _unit_terms(byte, old & touched, new & touched, 0, VB)
            was_b, change_b = _unit_terms(byte, old & touched, new & touched, 1, VB)
            old_a += was_a
            old_b += was_b
            new_a += change_a
            new_b += change_b
        sums_ptr = lanes_ptr + tl.load(piece_ptr + 12) * 4
        tl.atomic_add(sums_ptr, tl.sum(old_a.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 1, tl.sum(old_b.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 2, tl.sum(new_a.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 3, tl.sum(new_b.to(tl.int64), 0), sem="relaxed")
        # Only now may old bytes go: every vector's predecessor was compared above, by whichever warp.
        tl.debug_barrier()
        for start in range(0, stored, BLOCK):
            j = start + lane
            valid = j < stored
            k = begin + tl.load(found_ptr + j, mask=valid, other=0).to(tl.int32)
            row, column = row_of(k, multiplier, shift, per_row)
            new = load_vectors(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
            store_vectors(old_address + k.to(tl.int64) * VB, new, valid, VB)
