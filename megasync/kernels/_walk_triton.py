"""Triton side of ``kernels.walk``: imported only by that module, only where Triton is installed.

``walk_kernel`` streams boxes in steps of 16 canonical bytes along their enumeration, ``word_kernel`` goes word by
word through the remap for what has no such enumeration. Both digest, or XOR a mask in and digest what changed.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import (
    change_terms,
    factor_at,
    group_weight,
    remap,
    touch_word,
    unsigned,
    word_mask,
)
from megasync.kernels.records import AXIS_HEAD, HEAD
from megasync.kernels.walk_plan import CHUNK, WALK_DIGIT, WALK_HEAD

_HEAD, _AXIS = tl.constexpr(HEAD), tl.constexpr(AXIS_HEAD)
_WALK_HEAD, _WALK_DIGIT, _CHUNK = tl.constexpr(WALK_HEAD), tl.constexpr(WALK_DIGIT), tl.constexpr(CHUNK)


@triton.jit
def _sum8(value, K: tl.constexpr, LANE: tl.constexpr):
    """Two units of a group, the lower one number K, times their factors."""
    return (value & 0xFFFFFFFF) * factor_at(K, LANE) + (value >> 32) * factor_at(K + 1, LANE)


@triton.jit
def _piece(address, mask, PIECE: tl.constexpr):
    """4 or 8 bytes at addresses as uint64."""
    if PIECE == 4:
        return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=mask, other=0).to(tl.uint64)
    return tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)


@triton.jit
def _xor_piece(address, change, PIECE: tl.constexpr, WRITE: tl.constexpr):
    """XORs 4 or 8 bytes where they change, and returns the old ones there (0 elsewhere).

    With WRITE off it only reads.
    """
    touched = change != 0
    old = _piece(address, touched, PIECE)
    if WRITE:
        if PIECE == 4:
            tl.store(address.to(tl.pointer_type(tl.uint32)), (old ^ change).to(tl.uint32), mask=touched)
        else:
            tl.store(address.to(tl.pointer_type(tl.uint64)), old ^ change, mask=touched)
    return old


@triton.jit
def walk_kernel(
    items_ptr,
    pieces_ptr,
    mask_address,
    lanes_ptr,
    DIGITS: tl.constexpr,
    CHECKS: tl.constexpr,
    PIECE: tl.constexpr,
    XOR: tl.constexpr,
    WRITE: tl.constexpr,
    SUMS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one box.

    PIECE: bytes that lie together. WRITE: with XOR on; off it only reads. SUMS: 1 changed words as they are after, 2 all
    bytes, 4 changed words as they were, and the change.
    """
    item = items_ptr + tl.load(pieces_ptr + 2 * tl.program_id(0)).to(tl.int64) * (_WALK_HEAD + _WALK_DIGIT * DIGITS)
    begin = tl.load(pieces_ptr + 2 * tl.program_id(0) + 1) * _CHUNK
    address_0 = tl.load(item)
    canonical_0 = tl.load(item + 1)
    mask_0 = tl.load(item + 2) + mask_address
    step = tl.load(item + 3)
    end = tl.minimum(tl.load(item + 4).to(tl.int32), begin + _CHUNK)
    lane = tl.arange(0, BLOCK)
    old_a = tl.zeros((BLOCK,), tl.uint64)
    old_b = tl.zeros((BLOCK,), tl.uint64)
    new_a = tl.zeros((BLOCK,), tl.uint64)
    new_b = tl.zeros((BLOCK,), tl.uint64)
    for start in range(begin, end, BLOCK):
        k = start + lane
        valid = k < end
        rest = k
        address = address_0 + k.to(tl.int64) * 0
        canonical = canonical_0 + k.to(tl.int64) * 0
        at_mask = mask_0 + k.to(tl.int64) * 0
        if CHECKS > 0:
            z0 = tl.load(item + 7).to(tl.int32) + k * 0
            z1 = tl.load(item + 9).to(tl.int32) + k * 0
        for d in tl.static_range(DIGITS):
            cell = item + _WALK_HEAD + d * _WALK_DIGIT
            digit = rest
            if d < DIGITS - 1:
                rest = ((rest.to(tl.int64) * tl.load(cell + 1)) >> tl.load(cell + 2)).to(tl.int32)
                digit = digit - rest * tl.load(cell).to(tl.int32)
            wide = digit.to(tl.int64)
            address += wide * tl.load(cell + 3)
            canonical += wide * tl.load(cell + 4)
            if XOR:
                at_mask += wide * tl.load(cell + 5)
            if CHECKS > 0:
                z0 += digit * tl.load(cell + 6).to(tl.int32)
                z1 += digit * tl.load(cell + 7).to(tl.int32)
        if CHECKS > 0:
            valid = valid & (z0 >= 0) & (z0 < tl.load(item + 8)) & (z1 >= 0) & (z1 < tl.load(item + 10))
        if XOR:
            change_0 = _piece(at_mask, valid, 8)
            change_1 = _piece(at_mask + 8, valid, 8)
            if tl.max(((change_0 | change_1) != 0).to(tl.int32), 0) > 0:
                if PIECE == 4:
                    old_0 = _xor_piece(address, change_0 & 0xFFFFFFFF, 4, WRITE)
                    old_0 |= _xor_piece(address + step, change_0 >> 32, 4, WRITE) << 32
                    old_1 = _xor_piece(address + 2 * step, change_1 & 0xFFFFFFFF, 4, WRITE)
                    old_1 |= _xor_piece(address + 3 * step, change_1 >> 32, 4, WRITE) << 32
                else:
                    old_0 = _xor_piece(address, change_0, 8, WRITE)
                    old_1 = _xor_piece(address + step, change_1, 8, WRITE)
                if SUMS > 0:
                    touched_0 = word_mask(change_0, W)
                    touched_1 = word_mask(change_1, W)
                    new_0 = (old_0 ^ change_0) & touched_0
                    new_1 = (old_1 ^ change_1) & touched_1
                    weight_a = group_weight(canonical, 0)
                    weight_b = group_weight(canonical, 1)
                    is_a = weight_a * (_sum8(new_0, 0, 0) + _sum8(new_1, 2, 0))
                    is_b = weight_b * (_sum8(new_0, 0, 1) + _sum8(new_1, 2, 1))
                    if SUMS == 1:
                        old_a += is_a
                        old_b += is_b
                    else:
                        old_0 = old_0 & touched_0
                        old_1 = old_1 & touched_1
                        was_a = weight_a * (_sum8(old_0, 0, 0) + _sum8(old_1, 2, 0))
                        was_b = weight_b * (_sum8(old_0, 0, 1) + _sum8(old_1, 2, 1))
                        old_a += was_a
                        old_b += was_b
                        new_a += is_a - was_a
                        new_b += is_b - was_b
        else:
            if PIECE == 4:
                all_0 = _piece(address, valid, 4) | (_piece(address + step, valid, 4) << 32)
                all_1 = _piece(address + 2 * step, valid, 4) | (_piece(address + 3 * step, valid, 4) << 32)
            else:
                all_0 = _piece(address, valid, 8)
                all_1 = _piece(address + step, valid, 8)
            old_a += group_weight(canonical, 0) * (_sum8(all_0, 0, 0) + _sum8(all_1, 2, 0))
            old_b += group_weight(canonical, 1) * (_sum8(all_0, 0, 1) + _sum8(all_1, 2, 1))
    if SUMS > 0:  # noqa: SIM102 (the outer test is at compile time)
        if tl.load(item + 6) != 0:
            sums_ptr = lanes_ptr + tl.load(item + 5) * 4
            tl.atomic_add(sums_ptr, tl.sum(old_a.to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(old_b.to(tl.int64), 0), sem="relaxed")
            if SUMS > 2:
                tl.atomic_add(sums_ptr + 2, tl.sum(new_a.to(tl.int64), 0), sem="relaxed")
                tl.atomic_add(sums_ptr + 3, tl.sum(new_b.to(tl.int64), 0), sem="relaxed")


@triton.jit
def word_kernel(
    records_ptr,
    boxes_ptr,
    masks_ptr,
    pieces_ptr,
    mask_address,
    lanes_ptr,
    ND: tl.constexpr,
    TT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    XOR: tl.constexpr,
    WRITE: tl.constexpr,
    SUMS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one box, word by word. SUMS as in ``walk_kernel``."""
    index = tl.load(pieces_ptr + 2 * tl.program_id(0)).to(tl.int64)
    box = boxes_ptr + index * (4 + 2 * ND)
    row = records_ptr + tl.load(box).to(tl.int64) * (_HEAD + ND * (_AXIS + 3 * TT))
    begin = tl.load(pieces_ptr + 2 * tl.program_id(0) + 1) * _CHUNK
    end = tl.minimum(tl.load(box + 2), begin + _CHUNK)
    address = tl.load(row)
    counted = tl.load(row + 2) != 0
    mask_ptr = masks_ptr + index * (1 + ND)
    lane = tl.arange(0, BLOCK)
    old_a = tl.zeros((BLOCK,), tl.uint64)
    old_b = tl.zeros((BLOCK,), tl.uint64)
    new_a = tl.zeros((BLOCK,), tl.uint64)
    new_b = tl.zeros((BLOCK,), tl.uint64)
    for start in range(begin, end, BLOCK):
        position = start + lane
        valid = position < end
        if XOR:
            at = tl.load(mask_ptr) + mask_address + position.to(tl.int64) * 0
            rest = position
            for i in tl.static_range(ND):
                a = ND - 1 - i
                extent = tl.load(box + 4 + 2 * a + 1)
                at += (rest % extent).to(tl.int64) * tl.load(mask_ptr + 1 + a)
                rest = rest // extent
            if W == 8:
                value = tl.load(at.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
            elif W == 4:
                value = tl.load(at.to(tl.pointer_type(tl.int32)), mask=valid, other=0)
            elif W == 2:
                value = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=valid, other=0).to(tl.int32)
            else:
                value = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=valid, other=0).to(tl.int32)
        for part in tl.static_range(PARTS):
            inside, offset, flat = remap(row, box + 4, position, part, ND, TT, PARTS, WIDE)
            inside = inside & valid
            if XOR:
                change = value
                if PARTS > 1:
                    change = ((value >> (4 * part)) & 15).to(tl.int32)
                # Old sums are of whole touched words, nibbles that stay included.
                inside = inside & ((value if SUMS > 0 else change) != 0)
                old = touch_word(address, offset, change, inside, WRITE, True, W, PARTS)
                seen = inside & counted
                new = tl.where(seen, old ^ unsigned(change, 1 if PARTS > 1 else W), 0)
            else:
                old = touch_word(address, offset, position, inside, False, True, W, PARTS)
                seen = inside & counted
                new = tl.where(seen, old, 0)
            if SUMS > 0:
                # After a write: what the words are now goes where the sums of old words would.
                old = new if SUMS == 1 else tl.where(seen, old, 0)
                was_a, change_a = change_terms(flat, old, new, part, 0, W, PARTS)
                was_b, change_b = change_terms(flat, old, new, part, 1, W, PARTS)
                old_a += was_a
                old_b += was_b
                if SUMS > 2:
                    new_a += change_a
                    new_b += change_b
    if SUMS > 0:
        sums_ptr = lanes_ptr + tl.load(box + 1).to(tl.int64) * 4
        tl.atomic_add(sums_ptr, tl.sum(old_a.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 1, tl.sum(old_b.to(tl.int64), 0), sem="relaxed")
        if SUMS > 2:
            tl.atomic_add(sums_ptr + 2, tl.sum(new_a.to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(sums_ptr + 3, tl.sum(new_b.to(tl.int64), 0), sem="relaxed")
