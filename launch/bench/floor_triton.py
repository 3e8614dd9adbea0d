"""Floors of the kernel benchmarks: the least that any kernel doing the same work must do, as Triton kernels.

``address_kernel`` writes down where a scatter would go, ``floor_kernel`` XORs at ready-made addresses,
``read_kernel`` reads a buffer once. Nothing of the library is timed here.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._common_triton import remap
from megasync.kernels.records import AXIS_HEAD, HEAD

_HEAD, _AXIS = tl.constexpr(HEAD), tl.constexpr(AXIS_HEAD)


@triton.jit
def address_kernel(
    segments_ptr,
    tiles_ptr,
    records_ptr,
    entries_ptr,
    entries_stride,
    address_ptr,
    value_ptr,
    W: tl.constexpr,
    ND: tl.constexpr,
    TT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Address of the 4-byte unit and shifted XOR value of each entry (one record a tensor, words of 1 or 2 bytes)."""
    segment = segments_ptr + tl.program_id(0).to(tl.int64) * 4
    first = tl.load(segment).to(tl.int64)
    count = tl.load(segment + 1)
    tile_ptr = tiles_ptr + tl.load(segment + 2).to(tl.int64) * (4 + 2 * ND)
    begin = tl.load(segment + 3)
    row = records_ptr + tl.load(tile_ptr).to(tl.int64) * (_HEAD + ND * (_AXIS + 3 * TT))
    before = -1
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        valid = i < count
        low = tl.load(entries_ptr + first + i, mask=valid, other=0).to(tl.int32)
        high = tl.load(entries_ptr + entries_stride + first + i, mask=valid, other=0).to(tl.int32)
        step = tl.where(valid, low + (high << 8) + 1, 0)
        position = before + tl.cumsum(step, 0) + begin
        before += tl.sum(step, 0)
        value = tl.load(entries_ptr + 2 * entries_stride + first + i, mask=valid, other=0).to(tl.int32)
        if W == 2:
            value |= tl.load(entries_ptr + 3 * entries_stride + first + i, mask=valid, other=0).to(tl.int32) << 8
        inside, offset, _ = remap(row, tile_ptr + 4, position, 0, ND, TT, 1, False)
        byte = tl.load(row) + offset * W
        tl.store(address_ptr + first + i, tl.where(inside, byte & -4, 0), mask=valid)
        tl.store(value_ptr + first + i, value << ((byte & 3).to(tl.int32) * 8), mask=valid)


@triton.jit
def floor_kernel(address_ptr, value_ptr, num, BLOCK: tl.constexpr):
    """XORs values at addresses."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < num
    address = tl.load(address_ptr + i, mask=valid, other=0)
    value = tl.load(value_ptr + i, mask=valid, other=0)
    tl.atomic_xor(address.to(tl.pointer_type(tl.int32)), value, mask=valid & (address != 0), sem="relaxed")


@triton.jit
def read_kernel(data_ptr, out_ptr, num, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Reads int64 words once and keeps their OR."""
    base = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    total = tl.zeros((BLOCK,), tl.int64)
    for s in range(STEPS):
        i = base + s * BLOCK + tl.arange(0, BLOCK)
        total |= tl.load(data_ptr + i, mask=i < num, other=0)
    if tl.sum(total, 0) == 0x123456789:
        tl.store(out_ptr, 1)
