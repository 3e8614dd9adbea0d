"""Chains, inverts and normalises records.

`chained` sends a layout through a second one, `inverse` turns a record around, `normalised` gives the form with the
fewest digits. Before it come records from `compose.Arrangement` or `probe`; after it the same kinds of record. This
module must import nothing of megasync but ``errors`` and ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from megasync.errors import PlanError
from megasync.layout.lines import Line, Piece, Term, piece_of, split_piece
from megasync.layout.modes import Digit, Layout, Remap, Unit
from megasync.layout.rules import MAX_DIGITS
from megasync.layout.views import physical_range


def chained(inner: Layout, outer: Layout, *, extents: Sequence[int] | None = None) -> Layout:
    """Chains two layouts: canonical to intermediate, then intermediate to live.

    Args:
        inner: Records into one intermediate storage, which is the row-major tensor that ``outer`` starts from.
        outer: Where that intermediate tensor lies in the live storages; same unit size.
        extents: Of the intermediate tensor in units, as ``inner`` made it (``Arrangement.extents``): ``outer`` must then be of
            a tensor of as many units. Records do not tell it, since padding and neighbours are never addressed.

    Returns:
        The layout of the canonical tensor in the live storages; a destination is primary where both are.

    Raises:
        PlanError: Digits do not divide, units differ, a record of ``outer`` holds only a part of a piece, or ``outer`` is of
            a tensor of another size than ``extents``.
    """
    records: list[Remap] = []
    sizes = sorted({prod(q.shape) for q in outer.records})
    if extents is not None and any(size != prod(extents) for size in sizes):
        raise PlanError(
            f"the intermediate tensor {tuple(extents)} has {prod(extents)} units, the layout that it is chained to is of "
            f"{sizes[0]}"
        )
    reach = max((physical_range(r)[1] + 1 for r in inner.records), default=0)
    if sizes and reach > sizes[0]:
        raise PlanError(f"the layout reaches {reach} units, the one that it is chained to is of a tensor of {sizes[0]}")
    for r in inner.records:
        for q in outer.records:
            if (q.unit, q.word_nbytes) != (r.unit, r.word_nbytes):
                raise PlanError(f"layouts in units {r.unit}/{r.word_nbytes} and {q.unit}/{q.word_nbytes} do not chain")
            pieces = [piece_of(r)]
            for extent in reversed(q.shape[1:]):
                pieces = [p for piece in pieces for p in split_piece(piece, 0, extent)]
            for p in pieces:
                for part, line in _through(p, q):
                    made = record_of(inner, r.unit, part, line, q.storage, r.primary and q.primary)
                    records.append(made)
    return replace(inner, records=tuple(records))


def inverse(record: Remap) -> Remap:
    """The record from the physical offsets back to the flat canonical slice.

    Args:
        record: A record whose box is its whole local tensor and whose image has no holes.

    Returns:
        A record of a one-axis tensor (the image, ``base`` first) into a row-major tensor of ``local_shape`` called
        ``canonical``.

    Raises:
        PlanError: The image has holes (padding, neighbours), so that no record can tell its offsets apart.
    """
    line = piece_of(record).lines[0]
    strides = row_major(record.local_shape)
    digits = sorted(line.terms, key=lambda t: t.weight)
    reach = 1
    out = []
    for t in digits:
        if t.weight != reach:
            raise PlanError(
                f"the image of record {record} has holes or overlaps at stride {t.weight}: no inverse record"
            )
        out.append(Digit(0, t.extent, t.weight, t.src_stride * strides[record.merge[t.group][-1]]))
        reach *= t.extent
    if reach != record.num_units or record.start != record.origin:
        raise PlanError(
            f"record {record} covers {record.num_units} units but its digits reach {reach}: no inverse record"
        )
    n = record.num_units
    made = Remap(
        (n,), (0,), (n,), (0,), (n,), ((0,),), tuple(out), 0, record.unit, record.word_nbytes, "canonical", True
    )
    return normalised(made)


def _through(piece: Piece, q: Remap) -> list[tuple[Piece, Line]]:
    """Runs a piece, whose lines are the coordinates of an intermediate tensor, through a record of that tensor."""
    for line, lo, hi in zip(piece.lines, q.start, q.stop, strict=True):
        least, most = line.bounds()
        if most < lo or least >= hi:
            return []
        if least < lo or most >= hi:
            raise PlanError(f"coordinates {least}..{most} lie partly outside the box {lo}..{hi}: cut the slice there")
    merged = []
    for g, axes in enumerate(q.merge):
        z = Line()
        for a, s in zip(axes, q.group_strides(g), strict=True):
            z = z.plus(piece.lines[a].shifted(-q.origin[a]).scaled(s))
        merged.append(z)
    edges = [_edges(q, g) for g in range(len(q.merge))]
    pieces = [piece.with_lines(tuple(merged))]
    # From the last group back, so that the lines of groups not yet split keep their places; every digit of the piece
    # is in exactly one line at any time, which is what lets split_piece cut and regroup.
    for g in reversed(range(len(edges))):
        for below, above in pairwise(edges[g]):
            pieces = [p for one in pieces for p in split_piece(one, g, above // below)]
    return [(p, _sum_of_digits(p, q, edges)) for p in pieces]


def _edges(q: Remap, group: int) -> list[int]:
    """The source strides at which the digits of a group begin or end, 1 first; each must divide the next."""
    found = {1}
    for d in q.digits:
        if d.axis == group:
            found |= {d.src_stride, d.src_stride * d.extent} if d.extent else {d.src_stride}
    edges = sorted(found)
    if any(b % a for a, b in pairwise(edges)):
        raise PlanError(f"the digits of record {q} overlap: it cannot be chained")
    return edges


def _sum_of_digits(piece: Piece, q: Remap, edges: Sequence[Sequence[int]]) -> Line:
    """The physical offset from the atomic lines of each group (highest first, between consecutive edges)."""
    total = Line(q.base)
    place = 0
    for g, marks in enumerate(edges):
        atoms = dict(zip(reversed(marks), piece.lines[place : place + len(marks)], strict=True))
        place += len(marks)
        for d in q.digits:
            for mark, line in atoms.items():
                below_top = not d.extent or mark < d.src_stride * d.extent
                if d.axis == g and d.src_stride <= mark and below_top:
                    total = total.plus(line.scaled(mark // d.src_stride * d.dst_stride))
    return total


def record_of(whole: Layout, unit: Unit, piece: Piece, line: Line, storage: str, primary: bool) -> Remap:
    """Makes a record from a piece and the line of its physical offset.

    Args:
        whole: Canonical shape, word size and slice.
        unit: Unit of the piece's boxes and of the line.
        piece: The box, its origin and its merge; its own lines are not read.
        line: Physical offset in units.
        storage: Name of the live storage.
        primary: Whether the record's destinations enter digest sums.

    Returns:
        The record with the fewest digits.

    Raises:
        PlanError: More than `MAX_DIGITS` digits are needed.
    """
    scale = 2 * whole.word_nbytes if unit == "nibble" else 1
    shape = (*whole.shape[:-1], whole.shape[-1] * scale)
    word_nbytes = 1 if unit == "nibble" else whole.word_nbytes
    joined = _joined(line.terms)
    if len(joined) > MAX_DIGITS:
        raise PlanError(f"the layout into {storage!r} needs {len(joined)} digits, at most {MAX_DIGITS} are supported")
    digits = tuple(Digit(t.group, t.extent, t.src_stride, t.weight) for t in joined)
    return normalised(
        Remap(
            shape,
            piece.start,
            piece.stop,
            piece.origin,
            piece.local_shape,
            piece.merge,
            digits,
            line.base,
            unit,
            word_nbytes,
            storage,
            primary,
        )
    )


def _joined(terms: Sequence[Term]) -> list[Term]:
    """Terms with neighbours of one axis joined where the outer weight continues the inner one."""
    out: list[Term] = []
    for t in sorted(terms, key=lambda t: (t.group, t.src_stride)):
        below = out[-1] if out else None
        if t.extent == 1 or t.weight == 0:
            continue
        if (
            below is not None
            and below.group == t.group
            and below.src_stride * below.extent == t.src_stride
            and below.weight * below.extent == t.weight
        ):
            out[-1] = replace(below, extent=below.extent * t.extent)
        else:
            out.append(t)
    return out


def row_major(extents: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, last axis fastest."""
    return tuple(prod(extents[i + 1 :]) for i in range(len(extents)))


def normalised(record: Remap) -> Remap:
    """The same function with the fewest digits: neighbours joined, digits that are 0 all over the box dropped.

    Args:
        record: Any valid record.

    Returns:
        A record with equal offsets at every coordinate of its box; digits sorted by axis, then by source stride; the
        top digit of each axis unbounded where the box allows it.
    """
    digits: list[Digit] = []
    for group in range(len(record.merge)):
        high = record.group_range(group)[1]
        mine = sorted((d for d in record.digits if d.axis == group), key=lambda d: d.src_stride)
        joined: list[Digit] = []
        for d in mine:
            if d.src_stride > high:
                continue
            below = joined[-1] if joined else None
            if (
                below is not None
                and below.extent
                and below.src_stride * below.extent == d.src_stride
                and below.dst_stride * below.extent == d.dst_stride
            ):
                joined[-1] = Digit(group, below.extent * d.extent, below.src_stride, below.dst_stride)
            else:
                joined.append(d)
        if joined and high < joined[-1].src_stride * joined[-1].extent:
            joined[-1] = Digit(group, 0, joined[-1].src_stride, joined[-1].dst_stride)
        digits += joined
    return replace(record, digits=tuple(digits))
