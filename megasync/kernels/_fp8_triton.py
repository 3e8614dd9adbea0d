"""Triton side of ``kernels.fp8_batch``: imported only where Triton is installed, and only by that module.

Bit-identical with ``fp8_reference``: see ``_quant_triton`` for how.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._quant_triton import divide, divisor, e4m3, from_bits, load_pairs, region_address, to_bits

_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_DEEPGEMM = tl.constexpr(0)
_TE = tl.constexpr(1)
_DIVIDE = tl.constexpr(2)


@triton.jit
def _scale_and_factor(a, ORDER: tl.constexpr, POW2: tl.constexpr):
    """Decode scale of amaxes, and the factor or divisor that the elements meet."""
    one = tl.full(a.shape, 1.0, tl.float32)
    top = tl.full(a.shape, 448.0, tl.float32)
    if ORDER == _TE:
        factor = tl.where(a == 0.0, 1.0, tl.minimum(tl.div_rn(top, a), _FLT_MAX))
        if POW2:
            factor = from_bits(to_bits(factor) & 0x7F800000)
        return tl.div_rn(one, factor), factor
    elif ORDER == _DEEPGEMM:
        scale = tl.div_rn(tl.maximum(a, 1e-4), top)
        if POW2:
            bits = to_bits(scale)
            exponent = (bits >> 23) + ((bits & 0x007FFFFF) != 0).to(tl.int32)
            scale = from_bits(tl.minimum(tl.maximum(exponent, 1), 254) << 23)
        return scale, tl.div_rn(one, scale)
    else:
        scale = tl.div_rn(a, top)
        scale = tl.where(scale == 0.0, 1.0, scale)
        return scale, scale


@triton.jit
def _byte(bits, met, power, scaled, inverse, ORDER: tl.constexpr):
    """e4m3 byte (int32) of an element, given its fp32 bits and what it meets."""
    x = from_bits(bits)
    if ORDER == _DIVIDE:
        y = divide(x, power, scaled, inverse)
    else:
        y = x * met
    byte, _ = e4m3(tl.abs(y))
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def _store_codes(
    codes_ptr,
    codes_stride,
    row,
    column,
    r,
    p,
    even,
    odd,
    met,
    row_in,
    first_in,
    second_in,
    ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Codes of a tile; ``met`` has one value, or one a row (``[R, 1]``)."""
    if ORDER == _DIVIDE:
        power, scaled, inverse = divisor(met)
    else:
        power, scaled, inverse = met, met, met
    low = _byte(even, met, power, scaled, inverse, ORDER)
    high = _byte(odd, met, power, scaled, inverse, ORDER)
    base_ptr = codes_ptr + row * codes_stride + column
    if ALIGNED:
        at = r[:, None] * (codes_stride.to(tl.int32) // 2) + p[None, :]
        to_ptr = base_ptr.to(tl.pointer_type(tl.uint16)) + at
        tl.store(to_ptr, (low | (high << 8)).to(tl.uint16), mask=row_in[:, None] & first_in[None, :])
    else:
        at = r[:, None].to(tl.int64) * codes_stride + 2 * p[None, :]
        tl.store(base_ptr + at, low.to(tl.uint8), mask=row_in[:, None] & first_in[None, :])
        tl.store(base_ptr + at + 1, high.to(tl.uint8), mask=row_in[:, None] & second_in[None, :])


@triton.jit
def _destinations(row_ptr, ALIGNED: tl.constexpr):
    codes = tl.load(row_ptr + 7)
    codes_stride = tl.load(row_ptr + 8)
    codes_ptr = codes.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        codes_ptr = tl.multiple_of(codes_ptr, 8)
        codes_stride = tl.multiple_of(codes_stride, 8)
    return codes, codes_ptr, codes_stride


@triton.jit
def _store_scale(row_ptr, row, column, scale, mask):
    """A scale, or one a row, to where the region wants it: fp32, or its exponent."""
    plain = tl.load(row_ptr + 9)
    if plain != 0:
        at = row * tl.load(row_ptr + 10) + column
        tl.store(plain.to(tl.pointer_type(tl.float32)) + at, scale, mask=mask)
    exponents = tl.load(row_ptr + 11)
    if exponents != 0:
        at = row * tl.load(row_ptr + 12) + column
        tl.store(exponents.to(tl.pointer_type(tl.uint8)) + at, (to_bits(scale) >> 23).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["steps"])
def tile_kernel(
    table_ptr,
    region_ptr,
    constants_ptr,
    steps,
    ORDER: tl.constexpr,
    POW2: tl.constexpr,
    BLOCKED: tl.constexpr,
    IS_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Scales of blocks (BLOCKED: a tile is a block) or of whole tensors (``constants_ptr``: scale and factor a slot).

    One program per ``steps`` tiles of ROWS x 2 PAIRS elements of a region. Table: see ``fp8_batch``.
    """
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = region_address(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 3).to(tl.int32)
    columns = tl.load(row_ptr + 4).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    codes, codes_ptr, codes_stride = _destinations(row_ptr, ALIGNED)
    across = tl.cdiv(columns, 2 * PAIRS)
    first = (pid - tl.load(row_ptr + 6).to(tl.int32)) * steps
    last = tl.minimum(first + steps, across * tl.cdiv(rows, ROWS))
    r = tl.arange(0, ROWS)
    p = tl.arange(0, PAIRS)
    for tile in range(first, last):
        row = (tile // across) * ROWS
        column = (tile % across) * (2 * PAIRS)
        row_in = row + r < rows
        second_in = column // 2 + p < columns // 2
        first_in = second_in
        if not ALIGNED:
            first_in = column // 2 + p < (columns + 1) // 2
        even, odd = load_pairs(
            x_ptr,
            row.to(tl.int64),
            column.to(tl.int64),
            r,
            p,
            row_stride,
            column_stride,
            row_in,
            first_in,
            second_in,
            IS_BF16,
            ALIGNED,
        )
        if BLOCKED:
            top = tl.maximum(tl.abs(from_bits(even)), tl.abs(from_bits(odd)))
            a = tl.max(tl.max(top, axis=1, keep_dims=True), axis=0, keep_dims=True)
            scale, met = _scale_and_factor(a, ORDER, POW2)
            one = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
            _store_scale(row_ptr, (tile // across).to(tl.int64), tile % across + one, scale, one == 0)
        else:
            slot = tl.load(row_ptr + 5)
            met = tl.load(constants_ptr + slot * 2 + 1) + tl.zeros((1, 1), tl.float32)
        if codes != 0:
            _store_codes(
                codes_ptr,
                codes_stride,
                row.to(tl.int64),
                column.to(tl.int64),
                r,
                p,
                even,
                odd,
                met,
                row_in,
                first_in,
                second_in,
                ORDER,
                ALIGNED,
            )


@triton.jit(do_not_specialize=["steps"])
def row_kernel(
    table_ptr,
    region_ptr,
    constants_ptr,
    steps,
    ORDER: tl.constexpr,
    POW2: tl.constexpr,
    BLOCKED: tl.constexpr,
    IS_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One scale a row: a program reads its ROWS rows for their amaxes, and again (from cache) for their codes.

    Arguments as for ``tile_kernel``; ``steps`` is 1.
    """
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = region_address(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 3).to(tl.int32)
    columns = tl.load(row_ptr + 4).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    codes, codes_ptr, codes_stride = _destinations(row_ptr, ALIGNED)
    row = (pid - tl.load(row_ptr + 6).to(tl.int32)) * ROWS
    r = tl.arange(0, ROWS)
    p = tl.arange(0, PAIRS)
    row_in = row + r < rows
    top = tl.zeros((ROWS, PAIRS), tl.float32)
    for column in range(0, columns, 2 * PAIRS):
        second_in = column // 2 + p < columns // 2
        first_in = second_in
        if not ALIGNED:
            first_in = column // 2 + p < (columns + 1) // 2
        even, odd = load_pairs(
            x_ptr,
            row.to(tl.int64),
            column + tl.zeros((), tl.int64),
            r,
            p,
            row_stride,
            column_stride,
            row_in,
            first_in,
            second_in,
            IS_BF16,
            ALIGNED,
        )
        top = tl.maximum(top, tl.maximum(tl.abs(from_bits(even)), tl.abs(from_bits(odd))))
    scale, met = _scale_and_factor(tl.max(top, axis=1, keep_dims=True), ORDER, POW2)
    none = tl.arange(0, 1)[None, :]
    _store_scale(row_ptr, row.to(tl.int64) + r[:, None], none, scale, row_in[:, None] & (none == 0))
    if codes != 0:
        for column in range(0, columns, 2 * PAIRS):
            second_in = column // 2 + p < columns // 2
            first_in = second_in
            if not ALIGNED:
                first_in = column // 2 + p < (columns + 1) // 2
            even, odd = load_pairs(
                x_ptr,
                row.to(tl.int64),
                column + tl.zeros((), tl.int64),
                r,
                p,
                row_stride,
                column_stride,
                row_in,
                first_in,
                second_in,
                IS_BF16,
                ALIGNED,
            )
            _store_codes(
                codes_ptr,
                codes_stride,
                row.to(tl.int64),
                column + tl.zeros((), tl.int64),
                r,
                p,
                even,
                odd,
                met,
                row_in,
                first_in,
                second_in,
                ORDER,
                ALIGNED,
            )
