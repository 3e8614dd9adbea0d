"""Device functions of the compaction: vectors of 1 to 8 bytes, the words in them, and rows of a run.

Imported only by the compaction's kernels, so only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_flags(flags, W: tl.constexpr):
    """Number of flags, int32: the product gathers all fields in the topmost one."""
    if W == 1:
        return ((flags * 0x0101010101010101) >> 56).to(tl.int32)
    elif W == 2:
        return ((flags * 0x0001000100010001) >> 48).to(tl.int32)
    elif W == 4:
        return ((flags * 0x0000000100000001) >> 32).to(tl.int32)
    else:
        return flags.to(tl.int32)


@triton.jit
def top_word(x, VB: tl.constexpr, W: tl.constexpr):
    """Number of the highest word of ``x`` (uint64, not zero) that is not zero."""
    top = (x != x).to(tl.int32)
    for b in tl.static_range(1, VB // W):
        top += ((x >> (8 * W * b)) != 0).to(tl.int32)
    return top


@triton.jit
def load_vectors(address, mask, VB: tl.constexpr):
    """Vectors of VB bytes at addresses, zero-extended to uint64."""
    if VB == 8:
        return tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
    elif VB == 4:
        return tl.load(address.to(tl.pointer_type(tl.uint32)), mask=mask, other=0).to(tl.uint64)
    elif VB == 2:
        return tl.load(address.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint64)
    else:
        return tl.load(address.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.uint64)


@triton.jit
def store_vectors(address, value, mask, VB: tl.constexpr):
    """Stores the low VB bytes of uint64 values."""
    if VB == 8:
        tl.store(address.to(tl.pointer_type(tl.uint64)), value, mask=mask)
    elif VB == 4:
        tl.store(address.to(tl.pointer_type(tl.uint32)), value.to(tl.uint32), mask=mask)
    elif VB == 2:
        tl.store(address.to(tl.pointer_type(tl.uint16)), value.to(tl.uint16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint8)), value.to(tl.uint8), mask=mask)


@triton.jit
def row_of(k, multiplier, shift, per_row):
    """Row and column (vectors) of vector ``k`` of a run; int32."""
    row = ((k.to(tl.int64) * multiplier) >> shift).to(tl.int32)
    return row, k - row * per_row
