"""Makes one layout of the copies that a probe found: one primary per word, the rest copies.

Before it comes `probe_fit`; after it the proof and the verification of `probe`. This module must import nothing of
megasync but ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from megasync.layout.modes import Layout, Remap
from megasync.layout.probe_fit import MAX_RECORDS, NoFitError

_Span = tuple[tuple[int, ...], tuple[int, ...]]


def layout_of(shape: tuple[int, ...], word_nbytes: int, copies: Sequence[Sequence[Remap]]) -> Layout:
    """Joins the copies of one tensor; the copy that holds most words comes first, and is primary.

    Args:
        shape: Canonical extents in words.
        word_nbytes: Canonical word size.
        copies: Per copy, records with disjoint boxes.

    Returns:
        The layout; its slice is the hull of the primaries, partial where they leave gaps in it. A record that only in
        part repeats earlier ones is cut.

    Raises:
        NoFitError: Boxes cut words, or too many cuts are needed.
    """
    records: list[Remap] = []
    held: list[_Span] = []
    for copy in sorted(copies, key=lambda c: -sum(r.num_units for r in c)):
        for r in copy:
            fresh = [(r.start, r.stop)]
            again: list[_Span] = []
            for span in held:
                common = _common((r.start, r.stop), span)
                if common is not None:
                    again.append(common)
                fresh = [part for one in fresh for part in _without(one, span)]
            records += [replace(r, start=a, stop=b, primary=True) for a, b in fresh]
            records += [replace(r, start=a, stop=b, primary=False) for a, b in again]
            held += fresh
            if len(records) > 2 * MAX_RECORDS:
                raise NoFitError(f"its copies overlap in more than {2 * MAX_RECORDS} boxes")
    scale = records[0].shape[-1] // shape[-1]
    low = tuple(min(a[i] for a, _ in held) for i in range(len(shape)))
    high = tuple(max(b[i] for _, b in held) for i in range(len(shape)))
    if low[-1] % scale or high[-1] % scale:
        raise NoFitError("the nibbles that were moved do not make whole words")
    size = sum(prod(b - a for a, b in zip(*span, strict=True)) for span in held)
    partial = size < prod(b - a for a, b in zip(low, high, strict=True))
    start, stop = (*low[:-1], low[-1] // scale), (*high[:-1], high[-1] // scale)
    return Layout(shape, word_nbytes, start, stop, tuple(records), partial)


def without(layout: Layout, wrong: Sequence[int]) -> Layout | None:
    """A layout without some of its records, where the others still hold every word that it held.

    Args:
        layout: A layout that `layout_of` made.
        wrong: Numbers of the records to leave out.

    Returns:
        The layout of the other records; None where words are lost.
    """
    kept = [r for i, r in enumerate(layout.records) if i not in wrong]
    if not kept:
        return None
    try:
        rest = layout_of(layout.shape, layout.word_nbytes, [(r,) for r in kept])
    except NoFitError:
        return None
    held = [sum(r.num_units for r in x.records if r.primary) for x in (layout, rest)]
    return rest if held[0] == held[1] else None


def _common(one: _Span, two: _Span) -> _Span | None:
    start = tuple(max(a, b) for a, b in zip(one[0], two[0], strict=True))
    stop = tuple(min(a, b) for a, b in zip(one[1], two[1], strict=True))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def _without(one: _Span, two: _Span) -> list[_Span]:
    """The boxes that are left of a box when another is taken out."""
    common = _common(one, two)
    if common is None:
        return [one]
    out: list[_Span] = []
    low, high = list(one[0]), list(one[1])
    for axis in range(len(low)):
        if low[axis] < common[0][axis]:
            out.append((tuple(low), (*high[:axis], common[0][axis], *high[axis + 1 :])))
            low[axis] = common[0][axis]
        if common[1][axis] < high[axis]:
            out.append(((*low[:axis], common[1][axis], *low[axis + 1 :]), tuple(high)))
            high[axis] = common[1][axis]
    return out
