"""Triton side of ``kernels.amax``: imported only where Triton is installed, and only by that module."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from megasync.kernels._quant_triton import load_pairs, region_address


@triton.jit(do_not_specialize=["steps"])
def amax_kernel(
    table_ptr,
    region_ptr,
    values_ptr,
    steps,
    IS_BF16: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Many regions; one program per ``steps`` tiles of ROWS x 2 PAIRS elements of one of them. Table: see ``amax``.

    Magnitudes are compared as integers, which order like them, NaN above infinity above all; MAX does not care for the
    order of the atomic updates.
    """
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(region_ptr + pid).to(tl.int64) * WIDTH
    x_ptr, row_stride, column_stride = region_address(row_ptr, IS_BF16, ALIGNED)
    rows = tl.load(row_ptr + 3).to(tl.int32)
    columns = tl.load(row_ptr + 4).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    across = tl.cdiv(columns, 2 * PAIRS)
    first = (pid - tl.load(row_ptr + 6).to(tl.int32)) * steps
    last = tl.minimum(first + steps, across * tl.cdiv(rows, ROWS))
    r = tl.arange(0, ROWS)
    p = tl.arange(0, PAIRS)
    top = tl.zeros((ROWS, PAIRS), tl.int32)
    for tile in range(first, last):
        row = (tile // across) * ROWS
        column = (tile % across) * (2 * PAIRS)
        first_in = column // 2 + p < (columns + 1) // 2
        second_in = column // 2 + p < columns // 2
        even, odd = load_pairs(
            x_ptr,
            row.to(tl.int64),
            column.to(tl.int64),
            r,
            p,
            row_stride,
            column_stride,
            row + r < rows,
            second_in if ALIGNED else first_in,
            second_in,
            IS_BF16,
            ALIGNED,
        )
        top = tl.maximum(top, tl.maximum(even & 0x7FFFFFFF, odd & 0x7FFFFFFF))
    found = tl.max(tl.max(top, axis=1), axis=0)
    if found > 0:
        tl.atomic_max(values_ptr + tl.load(row_ptr + 5), found, sem="relaxed")
