"""Triton side of ``kernels.nvfp4``: imported only where Triton is installed, and only by that module.

Bit-identical with ``nvfp4_reference``: bf16 is widened and both roundings are done on bits or by comparing, divisions
are ``tl.div_rn`` (IEEE), and no product feeds a sum, so there is nothing to contract into an FMA. Every fp32
operation keeps subnormals (Triton sets no flush-to-zero for plain arithmetic; the test on a GPU has subnormal
inputs).
"""

from __future__ import annotations

import triton
import triton.language as tl

_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_ORDER_TE = tl.constexpr(0)
_ORDER_MODELOPT = tl.constexpr(1)


@triton.jit
def _magnitude_bits(raw, IS_BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 bits of |x| (int32) from the stored bits of x (int16 of bf16, or int32 of fp32)."""
    if IS_BF16:
        bits = (raw.to(tl.int32) & 0x7FFF) << 16
    else:
        bits = raw & 0x7FFFFFFF
    return bits


@triton.jit
def _from_bits(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_byte(v):  # type: ignore[no-untyped-def]
    """Round 0 <= v to e4m3, nearest even, saturating at 448; int32 byte value."""
    v = tl.minimum(v, 448.0)
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: count the midpoints passed, ties going to the even count.
    step = 0.0009765625  # 2^-10, half a step
    low = (v > 1 * step).to(tl.int32) + (v >= 3 * step).to(tl.int32)
    low += (v > 5 * step).to(tl.int32) + (v >= 7 * step).to(tl.int32)
    low += (v > 9 * step).to(tl.int32) + (v >= 11 * step).to(tl.int32)
    low += (v > 13 * step).to(tl.int32) + (v >= 15 * step).to(tl.int32)
    return tl.where(v < 0.015625, low, normal)


@triton.jit
def _e4m3_value(byte):  # type: ignore[no-untyped-def]
    """fp32 value of a non-negative e4m3 byte (int32)."""
    normal = _from_bits((byte + (120 << 3)) << 20)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _e2m1_code(y):  # type: ignore[no-untyped-def]
    """int32 code of the nearest E2M1 value, ties to even, saturating; -0.0 is code 0."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((y < 0.0).to(tl.int32) << 3)


@triton.jit
def _tile_amax(x_ptr, r, c, rows, columns, row_stride, column_stride, IS_BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude of a tile as int32 fp32 bits, which order like integers, NaN above infinity above all."""
    at = r[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * column_stride
    raw = tl.load(x_ptr + at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0)
    return tl.max(tl.max(_magnitude_bits(raw, IS_BF16), axis=1), axis=0)


@triton.jit
def amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    IS_BF16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per ROWS x COLUMNS elements; MAX does not care for the order of the atomic updates."""
    across = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    r = (pid // across) * ROWS + tl.arange(0, ROWS)
    c = (pid % across) * COLUMNS + tl.arange(0, COLUMNS)
    top = _tile_amax(x_ptr, r, c, rows, columns, row_stride, column_stride, IS_BF16)
    tl.atomic_max(out_ptr, top, sem="relaxed")


@triton.jit
def _quantize_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    c0,
    c1,
    codes_ptr,
    scales_ptr,
    r,
    first,
    rows,
    blocks,
    row_stride,
    column_stride,
    codes_stride,
    scales_stride,
    with_codes,
    with_scales,
    ORDER: tl.constexpr,
    IS_BF16: tl.constexpr,
    TWO_D: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantise 16 rows x BLOCKS blocks of 16 elements: a whole number of blocks, one-dimensional or 16 x 16."""
    c = first * 16 + tl.arange(0, BLOCKS * 16)
    row_in = (r < rows)[:, None]
    at = r[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * column_stride
    raw = tl.load(x_ptr + at, mask=row_in & (c < blocks * 16)[None, :], other=0)
    magnitude = _magnitude_bits(raw, IS_BF16)
    top = tl.max(tl.reshape(magnitude, (16, BLOCKS, 16)), axis=2)
    if TWO_D:
        top = tl.broadcast_to(tl.max(top, axis=0)[None, :], (16, BLOCKS))
    b = _from_bits(top)
    if ORDER == _ORDER_TE:
        byte = _e4m3_byte(b * c0)
        factor = tl.minimum(tl.div_rn(1.0, _e4m3_value(byte) * c1), _FLT_MAX)
    elif ORDER == _ORDER_MODELOPT:
        v = tl.div_rn(b, tl.broadcast_to(c0, (16, BLOCKS)))
        v = tl.maximum(tl.where(v == 0.0, 1.0, v), 0.001953125)
        byte = _e4m3_byte(v)
        factor = _e4m3_value(byte) * c1
    else:
        sixth = tl.div_rn(b, tl.full((16, BLOCKS), 6.0, tl.float32))
        if IS_BF16:
            bits = sixth.to(tl.int32, bitcast=True)
            sixth = _from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
        byte = _e4m3_byte(c0 * sixth)
        byte = tl.where(byte == 0, 0x20, byte)
        factor = tl.div_rn(_e4m3_value(byte), tl.broadcast_to(c1, (16, BLOCKS)))
    if with_scales:
        k = first + tl.arange(0, BLOCKS)
        to = r[:, None].to(tl.int64) * scales_stride + k[None, :]
        tl.store(scales_ptr + to, byte.to(tl.uint8), mask=row_in & (k < blocks)[None, :])
    if with_codes:
        if IS_BF16:
            x = _from_bits(raw.to(tl.int32) << 16)
        else:
            x = _from_bits(raw)
        x = tl.reshape(x, (16, BLOCKS, 16))
        spread = tl.broadcast_to(factor[:, :, None], (16, BLOCKS, 16))
        if ORDER == _ORDER_TE:
            y = x * spread
        else:
            y = tl.div_rn(x, tl.where(spread == 0.0, 1.0, spread))
        low, high = tl.split(tl.reshape(_e2m1_code(y), (16, BLOCKS * 8, 2)))
        j = first * 8 + tl.arange(0, BLOCKS * 8)
        to = r[:, None].to(tl.int64) * codes_stride + j[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(codes_ptr + to, packed, mask=row_in & (j < blocks * 8)[None, :])


@triton.jit
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    constants_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    blocks,
    row_stride,
    column_stride,
    codes_stride,
    scales_stride,
    ORDER: tl.constexpr,
    IS_BF16: tl.constexpr,
    TWO_D: tl.constexpr,
    WITH_CODES: tl.constexpr,
    WITH_SCALES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One box; one program per 16 rows x BLOCKS blocks."""
    across = tl.cdiv(blocks, BLOCKS)
    pid = tl.program_id(0)
    r = (pid // across) * 16 + tl.arange(0, 16)
    _quantize_tile(
        x_ptr,
        tl.load(constants_ptr),
        tl.load(constants_ptr + 1),
        codes_ptr,
        scales_ptr,
        r,
        (pid % across) * BLOCKS,
        rows,
        blocks,
        row_stride,
        column_stride,
        codes_stride,
        scales_stride,
        WITH_CODES,
        WITH_SCALES,
        ORDER,
        IS_BF16,
        TWO_D,
        BLOCKS,
    )


@triton.jit
def _source(row_ptr, IS_BF16: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address and strides of a region from its row of the table; ALIGNED: adjacent elements, 16-byte rows."""
    row_stride = tl.load(row_ptr + 3)
    column_stride = tl.load(row_ptr + 4)
    if IS_BF16:
        x_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.int16))
    else:
        x_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
        row_stride = tl.multiple_of(row_stride, 8 if IS_BF16 else 4)
        column_stride = 1
    return x_ptr, row_stride, column_stride


@triton.jit
def batch_amax_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    region_ptr,
    values_ptr,
    IS_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Many regions; one program per 16 rows x BLOCKS * STEPS blocks of one of them. Table: see ``nvfp4_batch``."""
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = _source(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 1)
    columns = tl.load(row_ptr + 2) * 16
    tile = pid - tl.load(row_ptr + 10)
    across = tl.cdiv(columns, BLOCKS * STEPS * 16)
    r = (tile // across) * 16 + tl.arange(0, 16)
    c = (tile % across) * (BLOCKS * STEPS * 16) + tl.arange(0, BLOCKS * 16)
    top = 0
    for step in range(STEPS):
        found = _tile_amax(x_ptr, r, c + step * (BLOCKS * 16), rows, columns, row_stride, column_stride, IS_BF16)
        top = tl.maximum(top, found)
    tl.atomic_max(values_ptr + tl.load(row_ptr + 9), top, sem="relaxed")


@triton.jit
def batch_quantize_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    region_ptr,
    constants_ptr,
    ORDER: tl.constexpr,
    IS_BF16: tl.constexpr,
    TWO_D: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Many regions; one program per 16 rows x BLOCKS * STEPS blocks of one of them. Table: see ``nvfp4_batch``."""
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = _source(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 1)
    blocks = tl.load(row_ptr + 2)
    codes = tl.load(row_ptr + 5)
    scales = tl.load(row_ptr + 7)
    codes_ptr = codes.to(tl.pointer_type(tl.uint8))
    codes_stride = tl.load(row_ptr + 6)
    if ALIGNED:
        codes_ptr = tl.multiple_of(codes_ptr, 8)
        codes_stride = tl.multiple_of(codes_stride, 8)
    constants_ptr += tl.load(row_ptr + 9) * 2
    c0 = tl.load(constants_ptr)
    c1 = tl.load(constants_ptr + 1)
    tile = pid - tl.load(row_ptr + 10)
    across = tl.cdiv(blocks, BLOCKS * STEPS)
    r = (tile // across) * 16 + tl.arange(0, 16)
    first = (tile % across) * (BLOCKS * STEPS)
    for step in range(STEPS):
        _quantize_tile(
            x_ptr,
            c0,
            c1,
            codes_ptr,
            scales.to(tl.pointer_type(tl.uint8)),
            r,
            first + step * BLOCKS,
            rows,
            blocks,
            row_stride,
            column_stride,
            codes_stride,
            tl.load(row_ptr + 8),
            codes != 0,
            scales != 0,
            ORDER,
            IS_BF16,
            TWO_D,
            BLOCKS,
        )
