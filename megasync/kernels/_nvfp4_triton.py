"""Triton side of ``kernels.nvfp4_batch``: imported only where Triton is installed, and only by that module.

Bit-identical with ``nvfp4_reference``: see ``_quant_triton`` for how. The inputs of a GPU test have subnormals, underflow
and overflow of every step.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._quant_triton import divide, divisor, e2m1, e4m3, from_bits, load_pairs, region_address, to_bits

_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_ORDER_TE = tl.constexpr(0)
_ORDER_MODELOPT = tl.constexpr(1)
_TINY = tl.constexpr(2.0**-50)  # times 2^-100 it is half the least subnormal
_HUGE = tl.constexpr(2.0**100)


@triton.jit
def _block_scale(b, c0, c1, ORDER: tl.constexpr, IS_BF16: tl.constexpr):
    """Scale byte (int32) of block amaxes, and the factor (TE) or divisor that the elements meet."""
    if ORDER == _ORDER_TE:
        byte, s = e4m3(b * c0)
        met = tl.minimum(tl.div_rn(tl.full(b.shape, 1.0, tl.float32), s * c1), _FLT_MAX)
    elif ORDER == _ORDER_MODELOPT:
        v = tl.div_rn(b, tl.broadcast_to(c0, b.shape))
        byte, s = e4m3(tl.maximum(tl.where(v == 0.0, 1.0, v), 0.001953125))
        met = s * c1
    else:
        sixth = tl.div_rn(b, tl.full(b.shape, 6.0, tl.float32))
        if IS_BF16:
            bits = to_bits(sixth)
            sixth = from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
        byte, s = e4m3(c0 * sixth)
        s = tl.where(byte == 0, 0.125, s)
        byte = tl.where(byte == 0, 0x20, byte)
        met = tl.div_rn(s, tl.broadcast_to(c1, b.shape))
    if ORDER != _ORDER_TE:
        met = tl.where(met == 0.0, 1.0, met)
    return byte, met


@triton.jit
def _nibble_by_factor(x, factor):
    """Code and sign of ``x * factor``; -0.0, be it of an underflow, is code 0."""
    y = x * factor + 0.0
    return e2m1(y) | ((to_bits(y) >> 28) & 8)


@triton.jit
def _nibble_by_divisor(x, power, scaled, inverse, tiny):
    """Code and sign of ``x / d``; ``tiny`` is ``-d`` times 2^-50: what rounds to zero has no sign."""
    return e2m1(divide(x, power, scaled, inverse)) | ((x * _HUGE < tiny).to(tl.int32) << 3)


@triton.jit
def _spread(block, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """One value per pair from one per block."""
    return tl.reshape(tl.broadcast_to(block[:, :, None], (ROWS, BLOCKS, 8)), (ROWS, BLOCKS * 8))


@triton.jit(do_not_specialize=["steps"])
def quantize_kernel(
    table_ptr,
    region_ptr,
    constants_ptr,
    steps,
    ORDER: tl.constexpr,
    IS_BF16: tl.constexpr,
    TWO_D: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Many regions; one program per ``steps`` tiles of ROWS x 16 BLOCKS elements of one of them. Table: see ``nvfp4_batch``.

    Two-dimensional blocks need ROWS = 16.
    """
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = region_address(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 3).to(tl.int32)
    blocks = tl.load(row_ptr + 4).to(tl.int32)
    slot = tl.load(row_ptr + 5)
    codes = tl.load(row_ptr + 7)
    codes_stride = tl.load(row_ptr + 8)
    scales = tl.load(row_ptr + 9)
    scales_stride = tl.load(row_ptr + 10)
    codes_ptr = codes.to(tl.pointer_type(tl.uint8))
    scales_ptr = scales.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        codes_ptr = tl.multiple_of(codes_ptr, 8)
        codes_stride = tl.multiple_of(codes_stride, 8)
    c0 = tl.load(constants_ptr + slot * 2)
    c1 = tl.load(constants_ptr + slot * 2 + 1)
    across = tl.cdiv(blocks, BLOCKS)
    first = (pid - tl.load(row_ptr + 6).to(tl.int32)) * steps
    last = tl.minimum(first + steps, across * tl.cdiv(rows, ROWS))
    r = tl.arange(0, ROWS)
    p = tl.arange(0, BLOCKS * 8)
    k = tl.arange(0, BLOCKS)
    for tile in range(first, last):
        row = (tile // across) * ROWS
        block = (tile % across) * BLOCKS
        row_in = row + r < rows
        pair_in = block * 8 + p < blocks * 8
        even, odd = load_pairs(
            x_ptr,
            row.to(tl.int64),
            block.to(tl.int64) * 16,
            r,
            p,
            row_stride,
            column_stride,
            row_in,
            pair_in,
            pair_in,
            IS_BF16,
            ALIGNED,
        )
        even, odd = from_bits(even), from_bits(odd)
        top = tl.maximum(tl.abs(even), tl.abs(odd))
        b = tl.max(tl.reshape(top, (ROWS, BLOCKS, 8)), axis=2)
        if TWO_D:
            b = tl.max(b, axis=0)[None, :]
        byte, met = _block_scale(b, c0, c1, ORDER, IS_BF16)
        if scales != 0:
            to = row.to(tl.int64) * scales_stride + block + r[:, None].to(tl.int64) * scales_stride + k[None, :]
            stored = tl.broadcast_to(byte.to(tl.uint8), (ROWS, BLOCKS))
            tl.store(scales_ptr + to, stored, mask=row_in[:, None] & (block + k < blocks)[None, :])
        if codes != 0:
            if ORDER == _ORDER_TE:
                factor = _spread(tl.broadcast_to(met, (ROWS, BLOCKS)), ROWS, BLOCKS)
                low, high = _nibble_by_factor(even, factor), _nibble_by_factor(odd, factor)
            else:
                power, scaled, inverse = divisor(met)
                tiny = _spread(tl.broadcast_to(-met * _TINY, (ROWS, BLOCKS)), ROWS, BLOCKS)
                power = _spread(tl.broadcast_to(power, (ROWS, BLOCKS)), ROWS, BLOCKS)
                scaled = _spread(tl.broadcast_to(scaled, (ROWS, BLOCKS)), ROWS, BLOCKS)
                inverse = _spread(tl.broadcast_to(inverse, (ROWS, BLOCKS)), ROWS, BLOCKS)
                low = _nibble_by_divisor(even, power, scaled, inverse, tiny)
                high = _nibble_by_divisor(odd, power, scaled, inverse, tiny)
            to = r[:, None].to(tl.int64) * codes_stride + p[None, :]
            base_ptr = codes_ptr + (row.to(tl.int64) * codes_stride + block * 8)
            tl.store(base_ptr + to, (low | (high << 4)).to(tl.uint8), mask=row_in[:, None] & pair_in[None, :])
