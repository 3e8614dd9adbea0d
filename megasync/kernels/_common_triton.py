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
