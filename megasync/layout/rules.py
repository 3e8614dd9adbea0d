"""The rules of a layout record, apart from the records so that those stay readable.

Before it comes a record being made (`modes`); after it a ``ValueError`` or nothing. This module must import nothing of
megasync but ``layout.modes``, for annotations only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.layout.modes import Remap

MAX_DIGITS = 8
"""Digits a record may have: what the kernels keep in registers, and what every known engine layout fits."""


def boxes_apart(a: Remap, b: Remap) -> bool:
    """Whether the boxes of two records of one tensor share no word; compared in the finer of their units."""
    fa, fb = max(1, b.shape[-1] // a.shape[-1]), max(1, a.shape[-1] // b.shape[-1])
    last = len(a.shape) - 1
    for axis in range(last + 1):
        ga, gb = (fa, fb) if axis == last else (1, 1)
        if a.stop[axis] * ga <= b.start[axis] * gb or b.stop[axis] * gb <= a.start[axis] * ga:
            return True
    return False


def broken_rule(r: Remap) -> str:
    """The first rule of the record contract that a record breaks, empty where it keeps all.

    Args:
        r: The record.

    Returns:
        The rule, in words.
    """
    rank = len(r.shape)
    if not rank or any(len(t) != rank for t in (r.start, r.stop, r.origin, r.local_shape)):
        return "shape, start, stop, origin and local_shape must have one rank >= 1"
    for n, a, b, o, m in zip(r.shape, r.start, r.stop, r.origin, r.local_shape, strict=True):
        if not 0 <= o <= a < b <= o + m <= n:
            return "an axis breaks 0 <= origin <= start < stop <= origin + local_shape <= shape"
    if [a for group in r.merge for a in group] != list(range(rank)) or not all(r.merge):
        return "merge must list every axis once, in order, in non-empty groups"
    if len(r.digits) > MAX_DIGITS:
        return f"{len(r.digits)} digits, at most {MAX_DIGITS} allowed"
    tops: dict[int, int] = {}
    for d in r.digits:
        if not 0 <= d.axis < len(r.merge) or d.extent < 0 or d.src_stride < 1 or d.dst_stride == 0:
            return f"{d} has an axis, extent or stride out of range"
        tops[d.axis] = max(tops.get(d.axis, 0), d.src_stride)
    if any(d.extent == 0 and d.src_stride != tops[d.axis] for d in r.digits):
        return "only the top digit of an axis may be unbounded"
    if any(a == b for a, b in pairwise(sorted((d.axis, d.src_stride) for d in r.digits))):
        return "two digits of one axis have the same source stride"
    if r.unit not in ("word", "nibble") or r.word_nbytes not in (1, 2, 4, 8) or not r.storage:
        return "unit, word_nbytes or storage name out of range"
    if r.unit == "nibble" and r.word_nbytes != 1:
        return "unit nibble needs word_nbytes 1"
    return ""
