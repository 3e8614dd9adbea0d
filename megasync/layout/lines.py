"""Mixed-radix sums and how they split: the arithmetic under the composition of layouts.

A `Line` is one coordinate of an intermediate tensor, written as a base plus weighted digits of the rank-local canonical
coordinates. A `Piece` is a box of the canonical tensor with one line per axis of the intermediate tensor. Splitting an
axis at a radix splits its line; where digits do not divide, the piece is cut into a part before the boundary and the
rest. `compose` builds layouts from pieces. This module must import nothing of megasync but ``errors`` and
``layout.modes``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from megasync.errors import PlanError
from megasync.layout.modes import Digit, Remap

_T = TypeVar("_T")


class SplitError(Exception):
    """A line cannot be split at a radix as it stands; `split_piece` then regroups or cuts, or refuses."""


@dataclass(frozen=True, slots=True)
class Term:
    """One weighted digit of a line: ``((z[group] // src_stride) % extent) * weight``.

    Attributes:
        group: Merge group of the piece that the digit is taken from.
        src_stride: What one step of the digit is worth in the merged local coordinate.
        extent: Number of values that the digit takes, never 0 here.
        weight: What one step is worth along the line; may be negative.
    """

    group: int
    src_stride: int
    extent: int
    weight: int


@dataclass(frozen=True, slots=True)
class Line:
    """A coordinate of an intermediate tensor: ``base + sum of the terms``."""

    base: int = 0
    terms: tuple[Term, ...] = ()

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value of the line when its digits run freely (both inclusive)."""
        swings = [(t.extent - 1) * t.weight for t in self.terms]
        return self.base + sum(min(s, 0) for s in swings), self.base + sum(max(s, 0) for s in swings)

    def scaled(self, factor: int) -> Line:
        """The line times ``factor``."""
        if factor == 1:
            return self
        terms = tuple(Term(t.group, t.src_stride, t.extent, t.weight * factor) for t in self.terms)
        return Line(self.base * factor, terms)

    def shifted(self, offset: int) -> Line:
        """The line plus ``offset``."""
        return Line(self.base + offset, self.terms)

    def plus(self, other: Line) -> Line:
        """The sum of two lines."""
        return Line(self.base + other.base, (*self.terms, *other.terms))

    def split(self, radix: int) -> tuple[Line, Line]:
        """Splits the line into quotient and remainder by a radix.

        Args:
            radix: Positive divisor.

        Returns:
            ``(high, low)`` with ``value = high * radix + low`` and ``0 <= low < radix`` for every value of the digits.

        Raises:
            SplitError: A digit straddles the radix without dividing it, or a remainder would carry.
        """
        high: list[Term] = []
        low: list[Term] = []
        for t in self.terms:
            size = abs(t.weight)
            if size % radix == 0:
                high.append(Term(t.group, t.src_stride, t.extent, t.weight // radix))
            elif (t.extent - 1) * size < radix:
                low.append(t)
            elif radix % size == 0:
                inner = radix // size
                sign = 1 if t.weight > 0 else -1
                low.append(Term(t.group, t.src_stride, inner, t.weight))
                high.append(Term(t.group, t.src_stride * inner, -(-t.extent // inner), sign))
            else:
                raise SplitError(f"a digit of weight {t.weight} and extent {t.extent} straddles {radix}")
        rest = Line(self.base % radix, tuple(low))
        least, most = rest.bounds()
        if least < 0 or most >= radix:
            raise SplitError(f"remainders {least}..{most} would carry over {radix}")
        return Line(self.base // radix, tuple(high)), rest


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the canonical tensor and its coordinates in the intermediate tensor.

    Attributes:
        start: First canonical coordinate of the box, in units.
        stop: End of the box.
        origin: What is subtracted before the merge.
        local_shape: Radices of the merge.
        merge: Groups of canonical axes, as in `Remap.merge`.
        lines: One line per axis of the intermediate tensor.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    origin: tuple[int, ...]
    local_shape: tuple[int, ...]
    merge: tuple[tuple[int, ...], ...]
    lines: tuple[Line, ...]

    def with_lines(self, lines: tuple[Line, ...]) -> Piece:
        """The same box under other lines."""
        return Piece(self.start, self.stop, self.origin, self.local_shape, self.merge, lines)


def split_piece(piece: Piece, axis: int, radix: int) -> list[Piece]:
    """Replaces a line of a piece by its quotient and remainder.

    Args:
        piece: The piece.
        axis: Index of the line.
        radix: Positive divisor; the remainder becomes line ``axis + 1``.

    Returns:
        One piece, or two where the box had to be cut at the first multiple of ``radix``.

    Raises:
        PlanError: The digits do not divide and no cut or merge of axes makes them.
    """
    try:
        return [_split(piece, axis, radix)]
    except SplitError as first:
        reason = first
    regrouped = _regroup(piece, axis)
    if regrouped is not None:
        piece = regrouped
        try:
            return [_split(piece, axis, radix)]
        except SplitError as second:
            reason = second
    parts = _cut(piece, axis, radix)
    try:
        return [_split(p, axis, radix) for p in parts]
    except SplitError as third:
        raise PlanError(
            f"axis {axis} of the layout cannot be split at {radix} for canonical box {piece.start}..{piece.stop}: "
            f"{reason}; expected digits that divide the radix. Cut the slice there, or probe the engine instead"
        ) from third


def piece_of(record: Remap) -> Piece:
    """A record as a piece with one line: its physical offset.

    Args:
        record: Any record.

    Returns:
        The piece, whose line has the exact extents of the digits over the record's box.
    """
    terms = tuple(Term(d.axis, d.src_stride, digit_extent(record, d), d.dst_stride) for d in record.digits)
    line = Line(record.base, tuple(t for t in terms if t.extent > 1))
    return Piece(record.start, record.stop, record.origin, record.local_shape, record.merge, (line,))


def digit_extent(record: Remap, digit: Digit) -> int:
    """Values that a digit may take over the record's box: one more than the largest."""
    steps = record.group_range(digit.axis)[1] // digit.src_stride + 1
    return min(steps, digit.extent) if digit.extent else steps


def _split(piece: Piece, axis: int, radix: int) -> Piece:
    high, low = piece.lines[axis].split(radix)
    return piece.with_lines((*piece.lines[:axis], high, low, *piece.lines[axis + 1 :]))


def _regroup(piece: Piece, axis: int) -> Piece | None:
    """Merges canonical axes that the line already joins row-major, so that digits may cross their boundary."""
    line = piece.lines[axis]
    terms = sorted(line.terms, key=lambda t: t.group)
    groups = [t.group for t in terms]
    if len(terms) < 2 or groups != list(range(groups[0], groups[0] + len(groups))):
        return None
    if any(t.group in groups for i, other in enumerate(piece.lines) if i != axis for t in other.terms):
        return None
    weight = terms[-1].weight
    if weight < 1:
        return None
    expected = weight
    for t in reversed(terms):
        axes = piece.merge[t.group]
        extents = [piece.stop[a] - piece.origin[a] for a in axes]
        full = all(piece.start[a] == piece.origin[a] for a in axes) and extents[1:] == [
            piece.local_shape[a] for a in axes[1:]
        ]
        if t is not terms[0]:
            full = full and extents[0] == piece.local_shape[axes[0]]
        if t.src_stride != 1 or t.extent != prod(extents) or t.weight != expected or not full:
            return None
        expected *= t.extent
    first, last = groups[0], groups[-1]
    merged = tuple(a for g in piece.merge[first : last + 1] for a in g)
    whole = Term(first, 1, prod(t.extent for t in terms), weight)
    lines = [
        Line(
            other.base,
            tuple(replace(t, group=t.group - (last - first)) if t.group > last else t for t in other.terms),
        )
        for other in piece.lines
    ]
    lines[axis] = Line(line.base, (whole,))
    return replace(piece, merge=(*piece.merge[:first], merged, *piece.merge[last + 1 :]), lines=tuple(lines))


def _cut(piece: Piece, axis: int, radix: int) -> list[Piece]:
    """Cuts the box where the line first reaches a multiple of the radix; the rest gets its own origin."""
    line = piece.lines[axis]
    if len(line.terms) != 1:
        return [piece]
    t = line.terms[0]
    lead = piece.merge[t.group][0]
    others = [x for i, other in enumerate(piece.lines) if i != axis for x in other.terms if x.group == t.group]
    single = len(piece.merge[t.group]) == 1 and piece.start[lead] == piece.origin[lead]
    # A shift by a multiple of t.src_stride leaves lower digits as they are: only they may be in other lines.
    top = all(t.src_stride % (x.src_stride * x.extent) == 0 for x in others)
    gap = radix - line.base % radix
    if not single or not top or t.weight < 1 or gap % t.weight or gap // t.weight >= t.extent:
        return [piece]
    size = gap // t.weight
    step = size * t.src_stride
    edge = piece.start[lead] + step
    if edge >= piece.stop[lead]:
        return [piece]
    head_line = Line(line.base, (replace(t, extent=size),))
    rest_line = Line(line.base + size * t.weight, (replace(t, extent=t.extent - size),))
    head = replace(piece, stop=_put(piece.stop, lead, edge), lines=_put(piece.lines, axis, head_line))
    rest = replace(
        piece,
        start=_put(piece.start, lead, edge),
        origin=_put(piece.origin, lead, edge),
        local_shape=_put(piece.local_shape, lead, piece.local_shape[lead] - step),
        lines=_put(piece.lines, axis, rest_line),
    )
    return [head, rest]


def _put(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])
