"""From a packed remap record and a box to a flat enumeration: the order in which a kernel walks a live weight.

Sparse work asks where one word lies; whole-tensor work (audit, dense XOR) must stream. So a box of a record is
enumerated by mixed-radix digits instead: a digit has a count, and what one step of it adds to the physical address,
to the canonical position and to the position in the mask. Sorted by physical step the walk reads memory in order
whatever the layout; sorted by canonical step it reads the mask in order. A step of the walk is a group of 16
canonical bytes (one weight of the state digest), which lies in memory as one piece, two of 8 bytes or four of 4 at a
constant distance (128x4 swizzle). Boxes that do not fit (nibbles, odd alignment, slices inside merged axes) are
walked word by word through the remap instead.

Comes before ``walk_plan``. Must import nothing of megasync but ``kernels.records``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from megasync.kernels.records import AXIS_HEAD, HEAD, RecordGroup

GROUP_NBYTES = 16
"""Canonical bytes of a step: the four 4-byte units that share a weight."""

MAX_WALK_DIGITS, MAX_CHECKS = 8, 2


@dataclass(frozen=True, slots=True)
class WalkDigit:
    """One digit of the enumeration.

    Attributes:
        count: Values it takes.
        physical: Bytes that a step adds to the address.
        canonical: Groups that a step adds to the canonical position.
        mask: Bytes that a step adds to the position in the mask.
        axis: Joined axis that it belongs to.
        z: Words that a step adds to the coordinate of that axis.
    """

    count: int
    physical: int
    canonical: int
    mask: int
    axis: int
    z: int


@dataclass(frozen=True, slots=True)
class Walk:
    """How to walk one box of one record.

    Attributes:
        piece_nbytes: 8 or 4: bytes of a group that lie together for sure.
        piece_step: Bytes from one piece of a group to the next.
        physical: Bytes from the record's base to the first step.
        canonical: Canonical group of the first step.
        mask: Byte of the first step in the mask.
        digits: First varies fastest.
        checks: Joined axes whose coordinate must be tested, with that of the first step (relative to the box) and the
            extent of the box: digits overshoot a box that cuts them.
    """

    piece_nbytes: int
    piece_step: int
    physical: int
    canonical: int
    mask: int
    digits: tuple[WalkDigit, ...]
    checks: tuple[tuple[int, int, int], ...]

    @property
    def num_groups(self) -> int:
        """Steps of the walk, those outside the box included."""
        return prod(d.count for d in self.digits)


@dataclass(frozen=True, slots=True)
class _JoinedAxis:
    """A merge group as one axis: ``z`` runs from ``low`` to ``high``; strides are of one step of ``z``, in words."""

    low: int
    high: int
    canonical: int
    canonical_0: int
    mask: int
    mask_0: int
    terms: tuple[tuple[int, int], ...]


def walk_of(
    group: RecordGroup,
    record: int,
    shape: np.ndarray,
    word_nbytes: int,
    low: np.ndarray,
    high: np.ndarray,
    tile: tuple[np.ndarray, np.ndarray] | None,
    *,
    physical_order: bool,
) -> Walk | None:
    """Enumerates a box of a record.

    Args:
        group: The records.
        record: Row of the record.
        shape: Canonical extents in words, one per axis of the group.
        word_nbytes: Canonical word size.
        low: First coordinate of the box, inside the record's bounds.
        high: End of the box.
        tile: Start and extents of the tile whose row-major mask is read along, None without a mask.
        physical_order: Walk memory in order, else the canonical bytes.

    Returns:
        The walk, or None where the box must go word by word.
    """
    if group.nibble:
        return None
    axes = _joined(group, record, shape, low, high, tile)
    if axes is None:
        return None
    found = _digits(axes, word_nbytes)
    if found is None:
        return None
    base = int(group.rows[record, 0]) + int(group.rows[record, 1]) * word_nbytes
    walk = _ordered(found, physical_order)
    grain = walk.piece_nbytes
    steps = [walk.piece_step, base + walk.physical, *(d.physical for d in walk.digits)]
    masks = [walk.mask, *(d.mask for d in walk.digits)]
    if any(x % grain for x in steps) or any(x % 8 for x in masks) or walk.num_groups >= 1 << 31:
        return None
    return walk if len(walk.digits) <= MAX_WALK_DIGITS and len(walk.checks) <= MAX_CHECKS else None


def _joined(
    group: RecordGroup,
    record: int,
    shape: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    tile: tuple[np.ndarray, np.ndarray] | None,
) -> list[_JoinedAxis] | None:
    """Merge groups as single axes; None where a slice or the box cuts an inner axis of a group."""
    width = AXIS_HEAD + 3 * group.num_terms
    row = group.rows[record]
    out: list[_JoinedAxis] = []
    tile_stride = 1
    inner_canonical = inner_mask = 0
    begins = True
    for a in range(len(shape) - 1, -1, -1):
        origin, merge_stride, keep, stride = row[HEAD + a * width + 2 : HEAD + a * width + 6].tolist()
        if begins:
            inner_canonical, inner_mask = stride, tile_stride if tile else 0
        begins = not keep
        if keep and (low[a] != 0 or high[a] != shape[a] or origin or (tile and tile[1][a] != shape[a])):
            return None
        if merge_stride * inner_canonical != stride:
            return None  # the slice cuts an inner axis of the group
        if not keep:
            divisors = group.divisors[record, a].tolist()
            factors = row[HEAD + a * width + AXIS_HEAD + 2 : HEAD + (a + 1) * width : 3].tolist()
            out.append(
                _JoinedAxis(
                    (int(low[a]) - origin) * merge_stride,
                    (int(high[a]) - origin) * merge_stride,
                    inner_canonical,
                    origin * stride,
                    inner_mask,
                    (origin - int(tile[0][a])) * tile_stride if tile else 0,
                    tuple((s, f) for s, f in zip(divisors, factors, strict=True) if s),
                )
            )
        tile_stride *= int(tile[1][a]) if tile else 1
    return out


def _digits(axes: list[_JoinedAxis], w: int) -> Walk | None:
    """Digits of all axes (the first of ``axes`` is the contiguous one), in groups of 16 canonical bytes."""
    physical = canonical = mask = 0
    digits: list[WalkDigit] = []
    checks: list[tuple[int, int, int]] = []
    piece = step = 8
    for i, axis in enumerate(axes):
        canonical += axis.canonical_0 * w
        mask += axis.mask_0 * w
        radices = _radices(axis.terms) if axis.high - axis.low > 1 else []
        if radices is None or (axis.high - axis.low > 1 and not radices):
            return None
        if not radices:
            physical += sum(axis.low // s * f for s, f in axis.terms) * w
            canonical += axis.low * axis.canonical * w
            mask += axis.low * axis.mask * w
            if i == 0:
                return None  # one word in a row: no group of 16 bytes lies together
            continue
        if i == 0:
            grouped = _grouped(radices, axis, w)
            if grouped is None:
                return None
            radices, piece, step = grouped
        elif axis.canonical * w % GROUP_NBYTES:
            return None
        top = radices[-1][0]
        first, count = axis.low // top, -(-axis.high // top) - axis.low // top
        for j, (s, extent, t) in enumerate(radices):
            last = j == len(radices) - 1
            digits.append(
                WalkDigit(
                    count if last else extent,
                    t * w,
                    s * axis.canonical * w // GROUP_NBYTES,
                    s * axis.mask * w,
                    i,
                    s,
                )
            )
        physical += first * radices[-1][2] * w
        canonical += first * top * axis.canonical * w
        mask += first * top * axis.mask * w
        if (first * top, (first + count) * top) != (axis.low, axis.high):
            checks.append((i, first * top - axis.low, axis.high - axis.low))
    if canonical % GROUP_NBYTES:
        return None
    return Walk(piece, step, physical, canonical // GROUP_NBYTES, mask, tuple(digits), tuple(checks))


def _radices(terms: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]] | None:
    """Terms back as digits ``(source stride, extent, target stride)``, the last one unbounded (extent 0)."""
    out: list[tuple[int, int, int]] = []
    if not terms or terms[0][0] != 1:
        return None
    target = 0
    for i, (s, f) in enumerate(terms):
        above = terms[i + 1][0] if i + 1 < len(terms) else 0
        if above % s:
            return None
        target = f + (out[-1][1] * target if out else 0)
        if target == 0:
            return None
        out.append((s, above // s, target))
    return out


def _grouped(
    radices: list[tuple[int, int, int]], axis: _JoinedAxis, w: int
) -> tuple[list[tuple[int, int, int]], int, int] | None:
    """The contiguous axis in steps of 16 bytes: its digits, bytes of a group that lie together, their distance."""
    words = GROUP_NBYTES // w
    (_, extent, target), rest = radices[0], radices[1:]
    if axis.canonical != 1 or target != 1 or axis.low % words or axis.high % words:
        return None
    if extent * w % GROUP_NBYTES == 0:  # unbounded, or whole groups
        return [(words, extent // words, words), *rest], 8, 8
    piece = extent * w
    if piece not in (4, 8) or not rest or rest[0][1] * piece % GROUP_NBYTES:
        return None
    pieces = GROUP_NBYTES // piece
    _, above, step = rest[0]
    return [(words, above // pieces, step * pieces), *rest[1:]], piece, step * w


def _ordered(walk: Walk, physical_order: bool) -> Walk:
    """Digits sorted, and neighbours that continue each other joined."""
    checked = {axis for axis, _, _ in walk.checks}
    key = (lambda d: (abs(d.physical), d.canonical)) if physical_order else (lambda d: (d.canonical, abs(d.physical)))
    out: list[WalkDigit] = []
    for d in sorted((d for d in walk.digits if d.count > 1), key=key):
        below = out[-1] if out else None
        if (
            below is not None
            and below.axis not in checked
            and d.axis not in checked
            and all(
                getattr(d, name) == getattr(below, name) * below.count for name in ("physical", "canonical", "mask")
            )
        ):
            out[-1] = replace(below, count=below.count * d.count)
        else:
            out.append(d)
    return replace(walk, digits=tuple(out))
