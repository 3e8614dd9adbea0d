"""Triton side of ``kernels.scatter``: imported only by that module, only where Triton is installed.

A program takes one segment, sums its gaps to positions, evaluates the records at each changed word, and XORs with
relaxed 32-bit atomics: neighbouring words of one 4-byte unit may belong to other programs, and without a use of the
result the instruction is a reduction that never waits for memory.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import remap, word_term
from megasync.kernels.records import AXIS_HEAD, HEAD

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
def _touch(address, byte, bit, value, mask, WRITE: tl.constexpr, W: tl.constexpr):
    """XORs ``value`` in at ``address + byte`` (bit ``bit`` of that byte) and returns what was there, shifted down."""
    if W == 8:
        wide_ptr = (address + byte).to(tl.pointer_type(tl.int64))
        if WRITE:
            old8 = tl.atomic_xor(wide_ptr, value, mask=mask, sem="relaxed")
        else:
            old8 = tl.load(wide_ptr, mask=mask, other=0)
        return old8.to(tl.uint64)
    else:
        unit_ptr = (address + (byte & -4)).to(tl.pointer_type(tl.int32))
        shift = (byte & 3).to(tl.int32) * 8 + bit
        if WRITE:
            old = tl.atomic_xor(unit_ptr, value << shift, mask=mask, sem="relaxed")
        else:
            old = tl.load(unit_ptr, mask=mask, other=0)
        return (old.to(tl.uint32) >> shift.to(tl.uint32)).to(tl.uint64)


@triton.jit
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
    SUMS: tl.constexpr,
    CHECK: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One segment.

    SUMS: 0 none, 2 new minus old, 4 touched-old too. CHECK counts positions past the end and zero values.
    """
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
                    inside = inside & (change != 0)
                    old = _touch(address, offset >> 1, (offset & 1).to(tl.int32) * 4, change, inside, WRITE, 1)
                    old = old & 15
                else:
                    change = value
                    old = _touch(address, offset * W, 0, change, inside, WRITE, W)
                    if W < 8:
                        old = old & ((1 << (8 * W)) - 1)
                if SUMS > 0:
                    seen = inside & counted
                    changed = change.to(tl.uint64)
                    if W == 4:
                        changed = changed & 0xFFFFFFFF
                    new = tl.where(seen, old ^ changed, 0)
                    old = tl.where(seen, old, 0)
                    if PARTS > 1:
                        # A nibble lies in one 4-byte unit: number the unit by byte, whatever the word size.
                        byte = flat * W + part // 2
                        bit = (part % 2) * 4
                        delta = new - old
                        new_a += word_term(byte, delta, bit, 0, 1)
                        new_b += word_term(byte, delta, bit, 1, 1)
                        if SUMS > 2:
                            old_a += word_term(byte, old, bit, 0, 1)
                            old_b += word_term(byte, old, bit, 1, 1)
                    elif W == 8:
                        before_a = word_term(flat, old, 0, 0, W)
                        before_b = word_term(flat, old, 0, 1, W)
                        new_a += word_term(flat, new, 0, 0, W) - before_a
                        new_b += word_term(flat, new, 0, 1, W) - before_b
                        if SUMS > 2:
                            old_a += before_a
                            old_b += before_b
                    else:
                        delta = new - old
                        new_a += word_term(flat, delta, 0, 0, W)
                        new_b += word_term(flat, delta, 0, 1, W)
                        if SUMS > 2:
                            old_a += word_term(flat, old, 0, 0, W)
                            old_b += word_term(flat, old, 0, 1, W)
            row += _ROW_HEAD + ND * (_ROW_AXIS + 3 * TT)
    if SUMS > 0:
        sums_ptr = lanes_ptr + tl.load(tile_ptr + 2).to(tl.int64) * 4
        tl.atomic_add(sums_ptr + 2, tl.sum(new_a.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 3, tl.sum(new_b.to(tl.int64), 0), sem="relaxed")
        if SUMS > 2:
            tl.atomic_add(sums_ptr, tl.sum(old_a.to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(old_b.to(tl.int64), 0), sem="relaxed")
    if CHECK:
        bad = tl.sum(faults, 0)
        if bad > 0:
            tl.atomic_add(faults_ptr, bad, sem="relaxed")
