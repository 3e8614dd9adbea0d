"""Device functions that several kernels share: digest weights, and the evaluation of a remap record.

Imported only by the ``_*_triton`` modules, so only where Triton is installed. The specification is ``weights`` and
``records`` in plain torch.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels.records import AXIS_HEAD, HEAD
from megasync.kernels.weights import LANE_C, LANE_S

_C00, _C01, _C02, _C03 = (tl.constexpr(c) for c in LANE_C[0])
_C10, _C11, _C12, _C13 = (tl.constexpr(c) for c in LANE_C[1])
_S0, _S1 = (tl.constexpr(s) for s in LANE_S)
_HEAD, _AXIS_HEAD = tl.constexpr(HEAD), tl.constexpr(AXIS_HEAD)


@triton.jit
def group_weight(group, LANE: tl.constexpr):
    """``splitmix64(group + S_lane) | 1`` as uint64; ``group`` is int64, the number of a 16-byte group."""
    seed: tl.constexpr = _S0 if LANE == 0 else _S1
    z = group.to(tl.uint64) + seed
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def unit_factor(k, LANE: tl.constexpr):
    """``C_lane[k]`` as uint64 for ``k`` of 0 to 3."""
    if LANE == 0:
        return tl.where(k < 2, tl.where(k == 0, _C00, _C01), tl.where(k == 2, _C02, _C03)).to(tl.uint64)
    return tl.where(k < 2, tl.where(k == 0, _C10, _C11), tl.where(k == 2, _C12, _C13)).to(tl.uint64)


@triton.jit
def factor_at(K: tl.constexpr, LANE: tl.constexpr):
    """``C_lane[K]`` as a constant."""
    if LANE == 0:
        c: tl.constexpr = _C00 if K == 0 else (_C01 if K == 1 else (_C02 if K == 2 else _C03))
    else:
        c: tl.constexpr = _C10 if K == 0 else (_C11 if K == 1 else (_C12 if K == 2 else _C13))
    return c


@triton.jit
def unit_weight(unit, LANE: tl.constexpr):
    """``K_lane(unit)`` as uint64; ``unit`` is int64, the number of a 4-byte unit of the canonical tensor."""
    return group_weight(unit >> 2, LANE) * unit_factor(unit & 3, LANE)


@triton.jit
def word_term(flat, value, bit, LANE: tl.constexpr, W: tl.constexpr):
    """What a word (or the part of it from ``bit`` on) contributes to a lane, as uint64.

    ``flat``: int64 canonical word number. ``value``: uint64 word, part of a word, or wrapped difference of such (of
    8-byte words the word itself: differences there are taken per unit by the caller). ``bit``: first bit of the part.
    """
    if W == 8:
        unit = flat * 2
        low = unit_weight(unit, LANE) * (value & 0xFFFFFFFF)
        return low + unit_weight(unit + 1, LANE) * (value >> 32)
    else:
        shift = (((flat * W) & 3) * 8 + bit).to(tl.uint64)
        return (unit_weight((flat * W) >> 2, LANE) << shift) * value


@triton.jit
def remap(
    row_ptr, tile_ptr, position, part, ND: tl.constexpr, TT: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr
):
    """Evaluates one record at row-major positions of a tile.

    ``row_ptr``: the record's row. ``tile_ptr``: int32 pairs (start, extent), one per axis. ``position``: int32.
    ``part``: nibble of the word, 0 for unit word. ``PARTS``: units per word. Returns whether the position goes
    through the record, the physical offset in units (int64) and the canonical word number (int64).
    """
    offset = tl.load(row_ptr + 1) + position.to(tl.int64) * 0
    flat = position.to(tl.int64) * 0
    inside = position >= 0
    rest = position
    z = position * 0
    if WIDE:
        z = z.to(tl.int64)
    for i in tl.static_range(ND):
        axis = row_ptr + _HEAD + (ND - 1 - i) * (_AXIS_HEAD + 3 * TT)
        x = rest
        if i < ND - 1:
            extent = tl.load(tile_ptr + 2 * (ND - 1 - i) + 1)
            rest = rest // extent
            x = x - rest * extent
        x = x + tl.load(tile_ptr + 2 * (ND - 1 - i))
        flat += x.to(tl.int64) * tl.load(axis + 5)
        if WIDE:
            x = x.to(tl.int64)
        if i == 0 and PARTS > 1:
            x = x * PARTS + part
        inside = inside & (x >= tl.load(axis).to(x.dtype)) & (x < tl.load(axis + 1).to(x.dtype))
        z += (x - tl.load(axis + 2).to(x.dtype)) * tl.load(axis + 3).to(x.dtype)
        for t in tl.static_range(TT):
            m = tl.load(axis + _AXIS_HEAD + 3 * t)
            factor = tl.load(axis + _AXIS_HEAD + 3 * t + 2)
            if WIDE:
                # Words that do not go through the record may have a negative z: any quotient will do.
                quotient = tl.maximum(z, 0) // m
            else:
                quotient = (z.to(tl.int64) * m) >> tl.load(axis + _AXIS_HEAD + 3 * t + 1)
            offset += quotient * factor
        z = z * tl.load(axis + 4).to(z.dtype)
    return inside, offset, flat


@triton.jit
def unsigned(word, W: tl.constexpr):
    """A word of W bytes held in int32 or int64 as zero-extended uint64."""
    if W == 8:
        return word.to(tl.uint64)
    return word.to(tl.uint64) & ((1 << (8 * W)) - 1)


@triton.jit
def touch_word(
    address, offset, change, mask, WRITE: tl.constexpr, ATOMIC: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr
):
    """XORs ``change`` in at physical ``offset`` (units) of a storage, and returns the old unit as zero-extended uint64.

    With WRITE off it only reads. Without a use of the result the atomic becomes a reduction that waits for nothing,
    which wins where changes are far apart. With ATOMIC off the word is read and written back: no two changes of a
    launch meet in one word, and where many changes share a sector the write is combined (nibbles share bytes and need
    the atomic).
    """
    if WRITE and not ATOMIC and PARTS == 1:
        if W == 8:
            plain_ptr = (address + offset * 8).to(tl.pointer_type(tl.int64))
        elif W == 4:
            plain_ptr = (address + offset * 4).to(tl.pointer_type(tl.int32))
        elif W == 2:
            plain_ptr = (address + offset * 2).to(tl.pointer_type(tl.uint16))
        else:
            plain_ptr = (address + offset).to(tl.pointer_type(tl.uint8))
        plain = tl.load(plain_ptr, mask=mask, other=0)
        tl.store(plain_ptr, plain ^ change.to(plain.dtype), mask=mask)
        if W == 4:
            return plain.to(tl.uint32).to(tl.uint64)
        return plain.to(tl.uint64)
    elif W == 8 and PARTS == 1:
        word_ptr = (address + offset * 8).to(tl.pointer_type(tl.int64))
        if WRITE:
            word = tl.atomic_xor(word_ptr, change, mask=mask, sem="relaxed")
        else:
            word = tl.load(word_ptr, mask=mask, other=0)
        return word.to(tl.uint64)
    else:
        if PARTS > 1:
            byte = offset >> 1
            shift = (byte & 3).to(tl.int32) * 8 + (offset & 1).to(tl.int32) * 4
            bits: tl.constexpr = 15
        else:
            byte = offset * W
            shift = (byte & 3).to(tl.int32) * 8
            bits: tl.constexpr = (1 << (8 * W)) - 1
        unit_ptr = (address + (byte & -4)).to(tl.pointer_type(tl.int32))
        if WRITE:
            unit = tl.atomic_xor(unit_ptr, change << shift, mask=mask, sem="relaxed")
        else:
            unit = tl.load(unit_ptr, mask=mask, other=0)
        return (unit.to(tl.uint32) >> shift.to(tl.uint32)).to(tl.uint64) & bits


@triton.jit
def change_terms(flat, old, new, part, LANE: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr):
    """Contributions of old, and of new minus old, of words (or nibbles ``part`` of words) to a lane, as uint64.

    ``flat``: int64 canonical word number. ``old`` and ``new``: zero-extended uint64.
    """
    if PARTS > 1:
        # A nibble lies in one 4-byte unit: number the unit by byte, whatever the word size.
        byte = flat * W + part // 2
        bit = (part % 2) * 4
        return word_term(byte, old, bit, LANE, 1), word_term(byte, new - old, bit, LANE, 1)
    elif W == 8:
        # Differences are per unit, so each side is summed by itself.
        was = word_term(flat, old, 0, LANE, W)
        return was, word_term(flat, new, 0, LANE, W) - was
    else:
        return word_term(flat, old, 0, LANE, W), word_term(flat, new - old, 0, LANE, W)


@triton.jit
def word_flags(x, W: tl.constexpr):
    """Bit 0 of each W-byte word of ``x`` (uint64) that is not zero; carries of the addition stay inside a word."""
    if W == 1:
        return ((((x & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | x) >> 7) & 0x0101010101010101
    elif W == 2:
        return ((((x & 0x7FFF7FFF7FFF7FFF) + 0x7FFF7FFF7FFF7FFF) | x) >> 15) & 0x0001000100010001
    elif W == 4:
        return ((((x & 0x7FFFFFFF7FFFFFFF) + 0x7FFFFFFF7FFFFFFF) | x) >> 31) & 0x0000000100000001
    else:
        return (x != 0).to(tl.uint64)


@triton.jit
def word_mask(x, W: tl.constexpr):
    """All bits of each W-byte word of ``x`` (uint64) that is not zero."""
    if W == 8:
        return tl.where(x != 0, 0xFFFFFFFFFFFFFFFF, 0).to(tl.uint64)
    return word_flags(x, W) * ((1 << (8 * W)) - 1)
