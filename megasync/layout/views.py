"""A record as strided views, as a range and as an enumeration: the integer geometry that evaluation and proofs share.

A record over a box is a handful of strided views of the storage, because a mixed-radix digit is an axis of a view.
Before it come records from `compose` or `probe`; `evaluate` copies through the views and `prove` reasons about them.
This module must import nothing of megasync but ``layout.modes``, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from megasync.layout.modes import Digit, Layout, Remap

_MAX_PARTS = 512
_CHUNK_UNITS = 1 << 20

_Block = tuple[int, int, tuple[tuple[int, int, int], ...]]
"""First merged coordinate, its offset, and ``(count, source stride, physical stride)`` per axis of the view."""


@dataclass(frozen=True, slots=True)
class StridedPart:
    """A sub-box of a record as two strided views of equal extents; all numbers in units.

    Attributes:
        extents: Extents of both views.
        slice_offset: First unit in the row-major slice of the canonical tensor.
        slice_strides: Strides of the canonical view.
        live_offset: First unit in the live storage.
        live_strides: Strides of the live view; may be negative.
    """

    extents: tuple[int, ...]
    slice_offset: int
    slice_strides: tuple[int, ...]
    live_offset: int
    live_strides: tuple[int, ...]


def strided_parts(layout: Layout, record: Remap) -> tuple[StridedPart, ...] | None:
    """Writes a record as strided views of the canonical slice and of the live storage.

    Args:
        layout: The layout that the record is of; gives the extents of the slice.
        record: One of its records.

    Returns:
        The parts, disjoint, covering the record's box; one where the top digits divide, a few at rims. None where the
        digits of an axis overlap or a merge does not fit the slice: evaluate offsets instead.
    """
    scale = layout.units_per_word(record)
    low = (*layout.start[:-1], layout.start[-1] * scale)
    extents = (*layout.slice_shape[:-1], layout.slice_shape[-1] * scale)
    strides = tuple(prod(extents[i + 1 :]) for i in range(len(extents)))
    per_group: list[list[_Block]] = []
    offset = 0
    for g, axes in enumerate(record.merge):
        inner = axes[1:]
        if any(
            record.local_shape[a] != extents[a] or record.origin[a] != low[a] or record.start[a] != low[a]
            for a in inner
        ) or any(record.stop[a] != low[a] + extents[a] for a in inner):
            return None
        offset += (record.origin[axes[0]] - low[axes[0]]) * strides[axes[0]]
        digits = sorted((d for d in record.digits if d.axis == g), key=lambda d: d.src_stride)
        blocks = _blocks(digits, *record.group_range(g))
        if blocks is None:
            return None
        per_group.append(blocks)
    if prod(len(b) for b in per_group) > _MAX_PARTS:
        return None
    parts = []
    for combination in product(*per_group):
        first, place = offset, record.base
        dims: list[tuple[int, int, int]] = []
        for g, (z, at, own) in enumerate(combination):
            unit = strides[record.merge[g][-1]]
            first, place = first + z * unit, place + at
            dims += [(n, s * unit, t) for n, s, t in own]
        parts.append(
            StridedPart(
                tuple(n for n, _, _ in dims),
                first,
                tuple(s for _, s, _ in dims),
                place,
                tuple(t for _, _, t in dims),
            )
        )
    return tuple(parts)


def box_offsets(record: Remap) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Evaluates a record at every unit of its box, row-major, in chunks.

    Args:
        record: Any record.

    Yields:
        ``(coords, offsets)``: one int64 array per canonical axis, and the int64 physical offsets in units.
    """
    extents = tuple(b - a for a, b in zip(record.start, record.stop, strict=True))
    for lo in range(0, record.num_units, _CHUNK_UNITS):
        flat = np.arange(lo, min(lo + _CHUNK_UNITS, record.num_units), dtype=np.int64)
        coords = [c + s for c, s in zip(np.unravel_index(flat, extents), record.start, strict=True)]
        yield coords, record.local_offsets(coords)


def physical_range(record: Remap) -> tuple[int, int]:
    """Smallest and largest physical offset of a record, in units, both inclusive.

    Args:
        record: Any record.

    Returns:
        Exact where the digits of each axis follow on one another; bounds from outside otherwise.
    """
    low = high = record.base
    for g in range(len(record.merge)):
        digits = sorted((d for d in record.digits if d.axis == g), key=lambda d: d.src_stride)
        lo, hi = record.group_range(g)
        blocks = _blocks(digits, lo, hi)
        ends = [(at, dims) for _, at, dims in blocks] if blocks is not None else [(0, _free(digits, hi))]
        low += min(at + sum(min(0, (n - 1) * t) for n, _, t in dims) for at, dims in ends)
        high += max(at + sum(max(0, (n - 1) * t) for n, _, t in dims) for at, dims in ends)
    return low, high


def free_parts(record: Remap) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...] | None:
    """Cuts a record's box into parts over which every digit runs freely.

    Args:
        record: Any record.

    Returns:
        ``(base, ((count, stride), ...))`` per part, in units: the offsets of the part are exactly the base plus every
        combination of the digits. None where the digits of an axis overlap, or there are too many parts.
    """
    per_group = []
    for g in range(len(record.merge)):
        digits = sorted((d for d in record.digits if d.axis == g), key=lambda d: d.src_stride)
        blocks = _blocks(digits, *record.group_range(g))
        if blocks is None:
            return None
        per_group.append(blocks)
    if prod(len(b) for b in per_group) > _MAX_PARTS:
        return None
    return tuple(
        (record.base + sum(at for _, at, _ in c), tuple((n, t) for _, _, dims in c for n, _, t in dims))
        for c in product(*per_group)
    )


def _blocks(digits: list[Digit], lo: int, hi: int) -> list[_Block] | None:
    """Cuts an interval of one merged coordinate into blocks over which every digit runs freely."""
    if not digits:
        return [(lo, 0, ())] if lo == hi else None
    top, rest = digits[-1], digits[:-1]
    s, t = top.src_stride, top.dst_stride
    if (top.extent and hi >= s * top.extent) or (s == 1) != (not rest):
        return None
    if rest and rest[-1].src_stride * rest[-1].extent != s:
        return None
    a, b = lo // s, hi // s
    below = s - 1
    runs: list[tuple[int, int, int, int]] = []
    if a == b:
        runs.append((a, 1, lo - a * s, hi - a * s))
    else:
        if lo != a * s:
            runs.append((a, 1, lo - a * s, below))
            a += 1
        whole = b if hi == b * s + below else b - 1
        if whole >= a:
            runs.append((a, whole - a + 1, 0, below))
        if whole < b:
            runs.append((b, 1, 0, hi - b * s))
    out: list[_Block] = []
    for first, count, least, most in runs:
        inner = _blocks(rest, least, most) if rest else [(0, 0, ())]
        if inner is None:
            return None
        lead = ((count, s, t),) if count > 1 else ()
        out += [(first * s + z, first * t + at, lead + dims) for z, at, dims in inner]
    return out


def _free(digits: list[Digit], hi: int) -> tuple[tuple[int, int, int], ...]:
    """Digits as if they ran independently: bounds for records whose digits overlap."""
    steps = [(hi // d.src_stride + 1, d) for d in digits]
    return tuple((min(n, d.extent) if d.extent else n, d.src_stride, d.dst_stride) for n, d in steps)
