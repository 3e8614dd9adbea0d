"""Triton side of ``kernels.compact``: imported only by that module, only where Triton is installed.

Three kernels. ``find`` reads old and new once, at copy bandwidth, and keeps only the numbers of the vectors that
differ (two bytes each, so the scratch holds any density). ``close`` adds up pieces to segments. ``emit`` reads the
few vectors that differ again, writes planes and sums, and then the snapshot.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import group_weight, unit_factor, unit_weight, word_flags, word_mask
from megasync.kernels.compact_runs import PIECE_COLUMNS

_COLUMNS = tl.constexpr(PIECE_COLUMNS)


@triton.jit
def _count(flags, W: tl.constexpr):
    """Number of flags, int32: the product gathers all fields in the topmost one."""
    if W == 1:
        return ((flags * 0x0101010101010101) >> 56).to(tl.int32)
    elif W == 2:
        return ((flags * 0x0001000100010001) >> 48).to(tl.int32)
    elif W == 4:
        return ((flags * 0x0000000100000001) >> 32).to(tl.int32)
    else:
        return flags.to(tl.int32)


@triton.jit
def _top(x, VB: tl.constexpr, W: tl.constexpr):
    """Number of the highest word of ``x`` (uint64, not zero) that is not zero."""
    top = (x != x).to(tl.int32)
    for b in tl.static_range(1, VB // W):
        top += ((x >> (8 * W * b)) != 0).to(tl.int32)
    return top


@triton.jit
def _load(address, mask, VB: tl.constexpr):
    """Vectors of VB bytes at addresses, zero-extended to uint64."""
    if VB == 8:
        return tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
    elif VB == 4:
        return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=mask, other=0).to(tl.uint64)
    elif VB == 2:
        return tl.load(address.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint64)
    else:
        return tl.load(address.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.uint64)


@triton.jit
def _store(address, value, mask, VB: tl.constexpr):
    """Stores the low VB bytes of uint64 values."""
    if VB == 8:
        tl.store(address.to(tl.pointer_type(tl.uint64)), value, mask=mask)
    elif VB == 4:
        tl.store(address.to(tl.pointer_type(tl.uint32)), value.to(tl.uint32), mask=mask)
    elif VB == 2:
        tl.store(address.to(tl.pointer_type(tl.uint16)), value.to(tl.uint16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint8)), value.to(tl.uint8), mask=mask)


@triton.jit
def _row_of(k, multiplier, shift, per_row):
    """Row and column (vectors) of vector ``k`` of a run; int32."""
    row = ((k.to(tl.int64) * multiplier) >> shift).to(tl.int32)
    return row, k - row * per_row


@triton.jit
def find_kernel(
    ids_ptr,
    pieces_ptr,
    old_address,
    found_ptr,
    stored_ptr,
    words_ptr,
    last_ptr,
    first_piece,
    first_vector,
    VB: tl.constexpr,
    W: tl.constexpr,
    IDS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One piece: which vectors differ, how many words, and where the last one is.

    ``old_address`` + snapshot offset is where the old bytes are. Outputs count pieces from ``first_piece``, the scratch
    vectors from ``first_vector``.
    """
    piece = tl.program_id(0) + first_piece
    if IDS:
        piece = tl.load(ids_ptr + tl.program_id(0))
    piece_ptr = pieces_ptr + piece.to(tl.int64) * _COLUMNS
    piece -= first_piece
    found_ptr += tl.load(piece_ptr + 14) - first_vector
    live = tl.load(piece_ptr)
    live_step = tl.load(piece_ptr + 1)
    multiplier = tl.load(piece_ptr + 2)
    shift = tl.load(piece_ptr + 3)
    per_row = tl.load(piece_ptr + 4).to(tl.int32)
    begin = tl.load(piece_ptr + 5).to(tl.int32)
    num = tl.load(piece_ptr + 6).to(tl.int32)
    old_address += tl.load(piece_ptr + 7)
    lane = tl.arange(0, STEP)
    stored = 0
    words = 0
    last = -1
    for start in range(0, num, STEP):
        i = start + lane
        valid = i < num
        k = begin + i
        row, column = _row_of(k, multiplier, shift, per_row)
        old = _load(old_address + k.to(tl.int64) * VB, valid, VB)
        new = _load(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
        x = old ^ new
        hit = x != 0
        if tl.max(hit.to(tl.int32), 0) > 0:
            # Both counts in one scan: a step has at most 2,048 words, so neither half overflows.
            both = hit.to(tl.int32) + (_count(word_flags(x, W), W) << 16)
            scan = tl.cumsum(both, 0)
            tl.store(found_ptr + stored + (scan & 0xFFFF) - 1, i.to(tl.int16), mask=hit)
            total = tl.sum(both, 0)
            stored += total & 0xFFFF
            words += total >> 16
            last = tl.max(tl.where(hit, i, -1), 0)
    tl.store(stored_ptr + piece, stored)
    tl.store(words_ptr + piece, words)
    if last >= 0:
        k = begin + last
        row, column = _row_of(k, multiplier, shift, per_row)
        old = _load(old_address + k.to(tl.int64) * VB, True, VB)
        x = old ^ _load(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, True, VB)
        step = tl.load(piece_ptr + 9).to(tl.int32)
        last = tl.load(piece_ptr + 8).to(tl.int32) + row * step + column * (VB // W) + _top(x, VB, W)
    tl.store(last_ptr + piece, last)


@triton.jit
def close_kernel(
    first_piece_ptr,
    segment_words_ptr,
    stored_ptr,
    words_ptr,
    last_ptr,
    base_ptr,
    before_ptr,
    counts_ptr,
    sizes_ptr,
    first_piece,
    num_segments,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of segments: changed words of each, its part of the planes, and where each of its pieces begins."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = s < num_segments
    begin = tl.load(first_piece_ptr + s, mask=valid, other=0) - first_piece
    end = tl.load(first_piece_ptr + s + 1, mask=valid, other=0) - first_piece
    longest = tl.max(tl.where(valid, end - begin, 0), 0)
    total = tl.zeros((BLOCK,), tl.int32)
    before = tl.full((BLOCK,), -1, tl.int32)
    for j in range(0, longest):
        piece = begin + j
        mine = valid & (piece < end)
        tl.store(base_ptr + piece, total, mask=mine)
        tl.store(before_ptr + piece, before, mask=mine)
        total += tl.load(words_ptr + piece, mask=mine, other=0)
        last = tl.load(last_ptr + piece, mask=mine, other=-1)
        before = tl.where(last >= 0, last, before)
    words = tl.load(segment_words_ptr + s, mask=valid, other=1)
    dense = total.to(tl.int64) * (2 + W) >= words * W
    tl.store(counts_ptr + s, total, mask=valid)
    tl.store(sizes_ptr + s, tl.where(dense, 0, total.to(tl.int64)), mask=valid)
    tl.store(sizes_ptr + num_segments + s, tl.where(dense, words, 0), mask=valid)


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


@triton.jit
def emit_kernel(
    ids_ptr,
    pieces_ptr,
    old_address,
    snapshot_address,
    found_ptr,
    stored_ptr,
    base_ptr,
    before_ptr,
    sizes_ptr,
    ends_ptr,
    entries_ptr,
    entries_stride,
    dense_ptr,
    dense_stride,
    lanes_ptr,
    first_piece,
    first_vector,
    first_segment,
    num_segments,
    VB: tl.constexpr,
    W: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece: the entries of its changed words, their sums, then the new bytes into the snapshot."""
    piece = tl.program_id(0) + first_piece
    if IDS:
        piece = tl.load(ids_ptr + tl.program_id(0))
    piece_ptr = pieces_ptr + piece.to(tl.int64) * _COLUMNS
    piece -= first_piece
    stored = tl.load(stored_ptr + piece)
    if stored > 0:
        found_ptr += tl.load(piece_ptr + 14) - first_vector
        live = tl.load(piece_ptr)
        live_step = tl.load(piece_ptr + 1)
        multiplier = tl.load(piece_ptr + 2)
        shift = tl.load(piece_ptr + 3)
        per_row = tl.load(piece_ptr + 4).to(tl.int32)
        begin = tl.load(piece_ptr + 5).to(tl.int32)
        offset = tl.load(piece_ptr + 7)
        position_0 = tl.load(piece_ptr + 8).to(tl.int32)
        position_step = tl.load(piece_ptr + 9).to(tl.int32)
        flat_0 = tl.load(piece_ptr + 10)
        flat_step = tl.load(piece_ptr + 11)
        segment = tl.load(piece_ptr + 13) - first_segment
        mask_words = tl.load(sizes_ptr + num_segments + segment)
        mask_start = tl.load(ends_ptr + num_segments + segment) - tl.load(ends_ptr + num_segments - 1) - mask_words
        slot_0 = tl.load(ends_ptr + segment) - tl.load(sizes_ptr + segment) + tl.load(base_ptr + piece)
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
            row, column = _row_of(k, multiplier, shift, per_row)
            old = _load(old_address + offset + k.to(tl.int64) * VB, valid, VB)
            new = _load(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
            x = old ^ new
            flags = word_flags(x, W)
            count = _count(flags, W)
            slot = slot_0 + tl.cumsum(count, 0) - count
            slot_0 += tl.sum(count, 0)
            # The word before the first of this vector is the last of the vector found before it.
            k_before = begin + tl.load(found_ptr + j - 1, mask=valid & (j > 0), other=0).to(tl.int32)
            row_before, column_before = _row_of(k_before, multiplier, shift, per_row)
            x_before = _load(old_address + offset + k_before.to(tl.int64) * VB, valid & (j > 0), VB)
            live_before = live + row_before.to(tl.int64) * live_step + column_before.to(tl.int64) * VB
            x_before = x_before ^ _load(live_before, valid & (j > 0), VB)
            before = position_0 + row_before * position_step + column_before * (VB // W) + _top(x_before, VB, W)
            before = tl.where(j > 0, before, before_0)
            position = position_0 + row * position_step + column * (VB // W)
            for b in tl.static_range(VB // W):
                word = x >> (8 * W * b)
                if W < 8:
                    word = word & ((1 << (8 * W)) - 1)
                there = valid & (word != 0)
                if mask_words > 0:
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
            row, column = _row_of(k, multiplier, shift, per_row)
            new = _load(live + row.to(tl.int64) * live_step + column.to(tl.int64) * VB, valid, VB)
            _store(snapshot_address + offset + k.to(tl.int64) * VB, new, valid, VB)
