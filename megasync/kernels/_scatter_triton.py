"""Triton side of ``kernels.scatter``: imported only by that module, only where Triton is installed.

A program takes one segment, sums its gaps to positions, evaluates the records at each changed word, and XORs with
relaxed 32-bit atomics: neighbouring words of one 4-byte unit may belong to other programs, and without a use of the
result the instruction is a reduction that never waits for memory.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import change_terms, remap, touch_word, unsigned, word_term
from megasync.kernels.records import AXIS_HEAD, HEAD

# Sizes and offsets differ from launch to launch: a variant compiled for one value would stall the next launch.
_SIZES = ["entries_stride", "dense_stride", "entries_before", "dense_before"]

_ROW_HEAD, _ROW_AXIS = tl.constexpr(HEAD), tl.constexpr(AXIS_HEAD)


@triton.jit
def _value(planes_ptr, stride, at, mask, W: tl.constexpr):
    """Words from W byte planes: int32 for W up to 4, else int64."""
    value = tl.load(planes_ptr + at, mask=mask, other=0)
    if W == 8:
        value = value.to(tl.int64)
    else:
        value = value.to(tl.int32)
    for i in tl.static_range(1, W):
        value |= tl.load(planes_ptr + i * stride + at, mask=mask, other=0).to(value.dtype) << (8 * i)
    return value


@triton.jit
def _value_term(flat, value, part, LANE: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr):
    """Contribution of words (or nibbles ``part`` of words) to a lane, as uint64; arguments as for ``change_terms``."""
    if PARTS > 1:
        return word_term(flat * W + part // 2, value, (part % 2) * 4, LANE, 1)
    return word_term(flat, value, 0, LANE, W)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["entries_ptr", "dense_ptr"])
def scatter_kernel(
    segments_ptr,
    tiles_ptr,
    records_ptr,
    entries_ptr,
    entries_stride,
    dense_ptr,
    dense_stride,
    lanes_ptr,
    faults_ptr,
    entries_before,
    dense_before,
    W: tl.constexpr,
    ND: tl.constexpr,
    TT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    WRITE: tl.constexpr,
    ATOMIC: tl.constexpr,
    SUMS: tl.constexpr,
    CHECK: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One segment.

    SUMS: 0 none, 1 the new words, 2 new minus old, 4 touched-old and new minus old. CHECK counts positions past the end and zero values.
    """
    entries_stride = entries_stride.to(tl.int64)
    dense_stride = dense_stride.to(tl.int64)
    segment = segments_ptr + tl.program_id(0).to(tl.int64) * 4
    first = tl.load(segment).to(tl.int64)
    count = tl.load(segment + 1)
    tile_ptr = tiles_ptr + tl.load(segment + 2).to(tl.int64) * (4 + 2 * ND)
    begin = tl.load(segment + 3)
    first_record = tl.load(tile_ptr)
    last_record = tl.load(tile_ptr + 1)
    words = tl.load(tile_ptr + 3)
    lane = tl.arange(0, BLOCK)
    old_a = tl.zeros((BLOCK,), tl.uint64)
    old_b = tl.zeros((BLOCK,), tl.uint64)
    new_a = tl.zeros((BLOCK,), tl.uint64)
    new_b = tl.zeros((BLOCK,), tl.uint64)
    faults = tl.zeros((BLOCK,), tl.int32)
    before = -1
    is_mask = False
    if DENSE:
        is_mask = count < 0
    num = tl.abs(count)
    for start in range(0, num, BLOCK):
        i = start + lane
        valid = i < num
        if is_mask:
            position = i
            value = _value(dense_ptr, dense_stride, first - dense_before + i, valid, W)
            valid = valid & (value != 0)
        else:
            at = first - entries_before + i
            low = tl.load(entries_ptr + at, mask=valid, other=0).to(tl.int32)
            high = tl.load(entries_ptr + entries_stride + at, mask=valid, other=0).to(tl.int32)
            step = tl.where(valid, low + (high << 8) + 1, 0)
            position = before + tl.cumsum(step, 0)
            before += tl.sum(step, 0)
            value = _value(entries_ptr + 2 * entries_stride, entries_stride, at, valid, W)
        # Gaps of a broken frame could sum to anything: nothing outside the tile is ever addressed.
        good = (position < 65536) & (position + begin < words)
        if CHECK:
            faults += (valid & ((value == 0) | (good == 0))).to(tl.int32)
        valid = valid & good
        position = position + begin
        row = records_ptr + first_record.to(tl.int64) * (_ROW_HEAD + ND * (_ROW_AXIS + 3 * TT))
        for _ in range(first_record, last_record):
            address = tl.load(row)
            if SUMS > 0:
                counted = tl.load(row + 2) != 0
            for part in tl.static_range(PARTS):
                inside, offset, flat = remap(row, tile_ptr + 4, position, part, ND, TT, PARTS, WIDE)
                inside = inside & valid
                if PARTS > 1:
                    change = ((value >> (4 * part)) & 15).to(tl.int32)
                    if SUMS == 0 or SUMS == 2:  # sums of old or new words are of whole ones, nibbles that stay included
                        inside = inside & (change != 0)
                else:
                    change = value
                old = touch_word(address, offset, change, inside, WRITE, ATOMIC, W, PARTS)
                if SUMS > 0:
                    seen = inside & counted
                    new = tl.where(seen, old ^ unsigned(change, 1 if PARTS > 1 else W), 0)
                    if SUMS == 1:
                        new_a += _value_term(flat, new, part, 0, W, PARTS)
                        new_b += _value_term(flat, new, part, 1, W, PARTS)
                    else:
                        old = tl.where(seen, old, 0)
                        was_a, change_a = change_terms(flat, old, new, part, 0, W, PARTS)
                        was_b, change_b = change_terms(flat, old, new, part, 1, W, PARTS)
                        new_a += change_a
                        new_b += change_b
                        if SUMS > 2:
                            old_a += was_a
                            old_b += was_b
            row += _ROW_HEAD + ND * (_ROW_AXIS + 3 * TT)
    if SUMS > 0:
        sums_ptr = lanes_ptr + tl.load(tile_ptr + 2).to(tl.int64) * 4
        news_ptr = sums_ptr if SUMS == 1 else sums_ptr + 2
        tl.atomic_add(news_ptr, tl.sum(new_a.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(news_ptr + 1, tl.sum(new_b.to(tl.int64), 0), sem="relaxed")
        if SUMS > 2:
            tl.atomic_add(sums_ptr, tl.sum(old_a.to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(old_b.to(tl.int64), 0), sem="relaxed")
    if CHECK:
        bad = tl.sum(faults, 0)
        if bad > 0:
            tl.atomic_add(faults_ptr, bad, sem="relaxed")
