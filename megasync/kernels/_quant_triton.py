"""Device functions that the quantising kernels share: pairs of elements, exact rounding to e4m3 and E2M1, exact division.

Imported only by the ``_*_triton`` modules, so only where Triton is installed. The specification is ``nvfp4_reference`` and
``fp8_reference`` in plain torch. Elements are worked on in pairs of neighbours along a row, since a pair makes one byte of
NVFP4 or two of FP8, and two bf16 are one load. All arithmetic is IEEE fp32, subnormals kept; what is fused is fused here
by name, because one rounding is wanted there, and the compiler may fuse nothing else (``enable_fp_fusion=False``).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

_BIG, _SMALL = tl.constexpr(2.0**64), tl.constexpr(2.0**-64)


@triton.jit
def from_bits(bits):
    """fp32 of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_bits(value):
    """int32 bits of fp32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def region_address(row_ptr, IS_BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Address and strides, in elements, of a region from its row of the table. ALIGNED: see ``amax.is_aligned``."""
    row_stride = tl.load(row_ptr + 1)
    column_stride = tl.load(row_ptr + 2)
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
def load_pairs(
    x_ptr,
    row,
    column,
    r,
    p,
    row_stride,
    column_stride,
    row_in,
    first_in,
    second_in,
    IS_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """fp32 bits (int32) of the elements ``2 p`` and ``2 p + 1`` from ``column`` on, of rows ``r`` from ``row`` on.

    ``r``: int32 ``[R]``; ``p``: int32 ``[P]``; masks of rows, of first and of second elements. Nothing is 0. With ALIGNED
    both elements of a pair are there or neither, and ``first_in`` alone is looked at.
    """
    x_ptr += row * row_stride + column * column_stride
    if ALIGNED:
        # A tile spans less than 2^31 elements, so that offsets in it are cheap.
        at = r[:, None] * (row_stride.to(tl.int32) // 2) + p[None, :]
        mask = row_in[:, None] & first_in[None, :]
        if IS_BF16:
            raw = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
            return raw << 16, raw & -65536
        else:
            both = tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
            return both.to(tl.int32), (both >> 32).to(tl.int32)
    else:
        at = r[:, None].to(tl.int64) * row_stride + (2 * p)[None, :].to(tl.int64) * column_stride
        first = tl.load(x_ptr + at, mask=row_in[:, None] & first_in[None, :], other=0).to(tl.int32)
        second = tl.load(x_ptr + at + column_stride, mask=row_in[:, None] & second_in[None, :], other=0).to(tl.int32)
        if IS_BF16:
            return first << 16, second << 16
        else:
            return first, second


@triton.jit
def e4m3(v):
    """Rounds v >= 0 to e4m3, nearest even, saturating at 448 (NaN too): byte (int32) and value (fp32).

    Adding 2^20 times the power of two below v (or the least normal one) leaves three bits of fraction, rounded by the
    addition itself; the low bits of the sum then count eighths of that power.
    """
    v = tl.minimum(v, 448.0)
    base = tl.maximum(from_bits(to_bits(v) & 0x7F800000), 0.015625)
    r = tl.fma(base, 1048576.0, v)
    bits = to_bits(r)
    return (bits + (bits >> 20) - 1128) & 0x7F, tl.fma(base, -1048576.0, r)


@triton.jit
def e2m1(y):
    """int32 code of the E2M1 value nearest to ``|y|``, ties to even, saturating (NaN too), as ``e4m3`` does it."""
    a = tl.minimum(tl.abs(y), 6.0)
    base = tl.maximum(from_bits(to_bits(a) & 0x7F800000), 1.0)
    bits = to_bits(tl.fma(base, 4194304.0, a))
    return (bits + (bits >> 22) - 2) & 7


@triton.jit
def divisor(d):
    """What ``divide`` needs of a divisor d > 0, once for all elements that it meets: power of two, scaled d, 1 / scaled d."""
    power = tl.where(d < _SMALL, _BIG, tl.where(d > _BIG, _SMALL, 1.0))
    scaled = d * power
    return power, scaled, tl.div_rn(tl.full(scaled.shape, 1.0, tl.float32), scaled)


@triton.jit
def divide(x, power, scaled, inverse):
    """``x / d`` rounded once where it is at least 2^-12 in magnitude, below it something below it, NaN where it overflows.

    Two corrections of a first quotient with exact remainders; the last one rounds correctly because ``inverse`` is the
    correctly rounded reciprocal and the quotient before it is within one unit (Markstein). ``power`` keeps remainders out
    of the subnormal range. IEEE division would do the same at three times the cost, since it must hold everywhere.
    """
    x = x * power
    q = x * inverse
    q = tl.fma(tl.fma(-q, scaled, x), inverse, q)
    return tl.fma(tl.fma(-q, scaled, x), inverse, q)
