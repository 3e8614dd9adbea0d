"""Builds layouts by composition: slice, split, merge, permute, pad, concat, stack, interleave, swizzle, shuffle, block.

`arrange` starts from the rank's slice of a canonical tensor; each step of the `Arrangement` says what the engine's
loader does to it, in the loader's own order; `Arrangement.to` ends in the records of a `Layout`. Padding is never
addressed. Before it comes the knowledge of one engine (`named`, an adapter); after it `prove`, `evaluate` and the
kernels. This module must import nothing of megasync but ``errors`` and ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index

from megasync.errors import PlanError
from megasync.layout.chain import record_of, row_major
from megasync.layout.checks import require_inside, require_strides
from megasync.layout.lines import Line, Piece, Term, split_piece
from megasync.layout.modes import Layout, Unit


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A slice of a canonical tensor on its way to its physical place; every step returns a new value.

    Attributes:
        whole: The layout to be, without records: canonical shape, word size and slice.
        unit: ``word`` or ``nibble``; all extents below are in units.
        extents: Extents of the intermediate tensor, padding and neighbours included.
        pieces: Boxes of the slice with their coordinates in the intermediate tensor.
    """

    whole: Layout
    unit: Unit
    extents: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def split(self, axis: int, inner: int) -> Arrangement:
        """Splits an axis in two, the inner one of extent ``inner``.

        Args:
            axis: Axis to split; negative counts from the end.
            inner: Extent of the inner axis; must divide the extent (use `pad` first).

        Returns:
            The arrangement with axes ``(outer, inner)`` in place of ``axis``.

        Raises:
            PlanError: ``inner`` does not divide the extent, or the digits of the axis cannot be split there.
        """
        axis = self._axis(axis)
        extent = self.extents[axis]
        if inner < 1 or extent % inner:
            raise PlanError(f"axis {axis} of extent {extent} cannot be split by {inner}: pad it to a multiple first")
        pieces = tuple(p for piece in self.pieces for p in split_piece(piece, axis, inner))
        extents = (*self.extents[:axis], extent // inner, inner, *self.extents[axis + 1 :])
        return Arrangement(self.whole, self.unit, extents, pieces)

    def merge(self, axis: int) -> Arrangement:
        """Joins an axis and the next one row-major.

        Args:
            axis: The outer axis; negative counts from the end.

        Returns:
            The arrangement with one axis in place of two.

        Raises:
            PlanError: There is no next axis.
        """
        axis = self._axis(axis)
        if axis + 1 >= len(self.extents):
            raise PlanError(f"axis {axis} is the last of {self.extents}: there is nothing to merge it with")
        inner = self.extents[axis + 1]
        extents = (*self.extents[:axis], self.extents[axis] * inner, *self.extents[axis + 2 :])
        pieces = []
        for p in self.pieces:
            joined = p.lines[axis].scaled(inner).plus(p.lines[axis + 1])
            pieces.append(p.with_lines((*p.lines[:axis], joined, *p.lines[axis + 2 :])))
        return Arrangement(self.whole, self.unit, extents, tuple(pieces))

    def permute(self, order: Sequence[int]) -> Arrangement:
        """Reorders the axes as ``torch.permute`` does: axis ``i`` of the result is axis ``order[i]``."""
        if sorted(order) != list(range(len(self.extents))):
            raise PlanError(f"{tuple(order)} is not an order of the {len(self.extents)} axes")
        pieces = tuple(p.with_lines(tuple(p.lines[a] for a in order)) for p in self.pieces)
        return Arrangement(self.whole, self.unit, tuple(self.extents[a] for a in order), pieces)

    def pad(self, axis: int, *, to: int = 0, multiple: int = 1) -> Arrangement:
        """Grows an axis at its end; the padding is never addressed.

        Args:
            axis: Axis to grow; negative counts from the end.
            to: New extent at least.
            multiple: The new extent is a multiple of this.

        Returns:
            The arrangement with the larger extent.

        Raises:
            PlanError: ``multiple`` is below 1.
        """
        axis = self._axis(axis)
        if multiple < 1:
            raise PlanError(f"axis {axis} cannot be padded to a multiple of {multiple}")
        extent = -(-max(self.extents[axis], to) // multiple) * multiple
        return self._resized(axis, extent, self.pieces)

    def concat(self, axis: int, *, offset: int, total: int) -> Arrangement:
        """Places the tensor as one part of a concatenation.

        Args:
            axis: Axis of the concatenation; negative counts from the end.
            offset: Extents of the parts before it.
            total: Extent of the whole.

        Returns:
            The arrangement with extent ``total``.

        Raises:
            PlanError: The part does not fit.
        """
        axis = self._axis(axis)
        if offset < 0 or offset + self.extents[axis] > total:
            raise PlanError(f"a part of {self.extents[axis]} at {offset} does not fit in axis {axis} of {total}")
        pieces = tuple(
            p.with_lines((*p.lines[:axis], p.lines[axis].shifted(offset), *p.lines[axis + 1 :])) for p in self.pieces
        )
        return self._resized(axis, total, pieces)

    def stack(self, index: int, count: int, axis: int = 0) -> Arrangement:
        """Inserts an axis of ``count`` and takes place ``index`` of it (an expert of a stack, a part of a whole)."""
        if not 0 <= index < count or not 0 <= axis <= len(self.extents):
            raise PlanError(f"index {index} of {count} at axis {axis} is out of range for {self.extents}")
        pieces = tuple(p.with_lines((*p.lines[:axis], Line(index), *p.lines[axis:])) for p in self.pieces)
        return Arrangement(self.whole, self.unit, (*self.extents[:axis], count, *self.extents[axis:]), pieces)

    def reverse(self, axis: int) -> Arrangement:
        """Runs an axis backwards, as ``torch.flip`` does."""
        axis = self._axis(axis)
        top = self.extents[axis] - 1
        pieces = tuple(
            p.with_lines((*p.lines[:axis], p.lines[axis].scaled(-1).shifted(top), *p.lines[axis + 1 :]))
            for p in self.pieces
        )
        return Arrangement(self.whole, self.unit, self.extents, pieces)

    def swap_halves(self, axis: int) -> Arrangement:
        """Exchanges the halves of an axis (gate-first to up-first of a canonical tensor that is already fused)."""
        axis = self._axis(axis)
        if self.extents[axis] % 2:
            raise PlanError(f"axis {axis} of extent {self.extents[axis]} has no halves")
        return self.split(axis, self.extents[axis] // 2).reverse(axis).merge(axis)

    def interleave(self, axis: int, group: int, part: int, parts: int = 2) -> Arrangement:
        """Interleaves this tensor, as one of ``parts``, in groups: ``[part 0: group rows][part 1: group rows]...``

        Args:
            axis: Axis to interleave; negative counts from the end. Padded to a multiple of ``group`` first.
            group: Consecutive rows of one part.
            part: Which part this tensor is.
            parts: How many parts there are.

        Returns:
            The arrangement with ``parts`` times the extent.

        Raises:
            PlanError: No rows in a group, or no such part.
        """
        axis = self._axis(axis)
        if group < 1 or not 0 <= part < parts:
            raise PlanError(f"part {part} of {parts} cannot be interleaved in groups of {group} rows")
        grouped = self.pad(axis, multiple=group).split(axis, group)
        return grouped.stack(part, parts, axis + 1).merge(axis + 1).merge(axis)

    def shuffle(self, axis: int, radices: Sequence[int], order: Sequence[int]) -> Arrangement:
        """Permutes an axis inside blocks by reordering the digits of the index.

        Args:
            axis: Axis to shuffle; its extent must be a multiple of the product of ``radices``.
            radices: Digits of the index inside a block, outermost first.
            order: New order of those digits.

        Returns:
            The arrangement with the same extents.

        Raises:
            PlanError: The extent is not a multiple of the block, or ``order`` is not an order of the digits.
        """
        if sorted(order) != list(range(len(radices))):
            raise PlanError(f"{tuple(order)} is not an order of the {len(radices)} digits {tuple(radices)}")
        axis, rank = self._axis(axis), len(self.extents)
        out = self
        for i in range(len(radices)):
            out = out.split(axis + i, prod(radices[i:]))
        moved = [axis + 1 + o for o in order]
        after = range(axis + 1 + len(radices), rank + len(radices))
        out = out.permute([*range(axis + 1), *moved, *after])
        for _ in radices:
            out = out.merge(axis)
        return out

    def shuffle_rows(self, block: int, axis: int = -2) -> Arrangement:
        """TRT-LLM's row shuffle: row ``i`` of a block of 16 goes to ``8 (i % 2) + i // 2``, of 32 to ``8 (i % 4) + i
        // 4``.

        Args:
            block: 16 or 32.
            axis: Axis of the rows.

        Returns:
            The arrangement with the same extents.
        """
        if block not in (16, 32):
            raise PlanError(f"rows are shuffled in blocks of 16 or 32, got {block}")
        return self.shuffle(axis, (8, block // 8), (1, 0))

    def block_major_k(self, block: int) -> Arrangement:
        """Moves blocks of ``block`` columns outermost: ``[rows, cols]`` becomes ``[cols / block, rows, block]``."""
        rank = len(self.extents)
        split = self.split(rank - 1, block)
        return split.permute([*range(rank - 2), rank - 1, rank - 2, rank])

    def swizzle_128x4(self) -> Arrangement:
        """The block-scale swizzle of the last two axes: rows padded to 128, columns to 4, tiles of 32 x 4 x 4.

        Returns:
            The arrangement with axes ``[..., rows/128, cols/4, 32, 4, 4]``: offset ``((rb * CB + cb) * 32 + r % 32) *
            16 + (r / 32 % 4) * 4 + c % 4``, the scale layout that the tensor cores of compute capability 10 read.
        """
        rank = len(self.extents)
        lead = range(rank - 2)
        padded = self.pad(rank - 2, multiple=128).pad(rank - 1, multiple=4)
        tiles = padded.split(rank - 1, 4).split(rank - 2, 128).split(rank - 1, 32)
        return tiles.permute([*lead, rank - 2, rank + 1, rank, rank - 1, rank + 2])

    def to(self, storage: str, *, base: int = 0, strides: Sequence[int] | None = None, primary: bool = True) -> Layout:
        """Ends the composition in one live storage.

        Args:
            storage: Name of the live storage.
            base: Offset, in units, of the live tensor's first element from the start of its storage.
            strides: Strides of the live tensor in units, one per axis; row-major contiguous by default.
            primary: False where this is a copy of words whose primary is elsewhere.

        Returns:
            The layout, with one record per piece.

        Raises:
            PlanError: A record would need more than `MAX_DIGITS` digits, lie before the storage, or have two words in one
                place (stride 0).
            TypeError: The storage is no name.
        """
        if not isinstance(storage, str):
            raise TypeError(f"a live storage goes by its name, got {storage!r}")
        steps = row_major(self.extents) if strides is None else tuple(strides)
        require_strides(storage, self.extents, steps)
        records = []
        for p in self.pieces:
            line = Line(base)
            for step, axis_line in zip(steps, p.lines, strict=True):
                line = line.plus(axis_line.scaled(step))
            records.append(record_of(self.whole, self.unit, p, line, storage, primary))
            if line.bounds()[0] < 0:  # digits that run freely may; those of the box must not
                require_inside(records[-1])
        return replace(self.whole, records=tuple(records))

    def _resized(self, axis: int, extent: int, pieces: tuple[Piece, ...]) -> Arrangement:
        extents = (*self.extents[:axis], extent, *self.extents[axis + 1 :])
        return Arrangement(self.whole, self.unit, extents, pieces)

    def _axis(self, axis: int) -> int:
        rank = len(self.extents)
        if not -rank <= axis < rank:
            raise PlanError(f"axis {axis} is out of range for {self.extents}")
        return axis % rank


def arrange(
    shape: Sequence[int],
    *,
    word_nbytes: int,
    start: Sequence[int] | None = None,
    stop: Sequence[int] | None = None,
    unit: Unit = "word",
) -> Arrangement:
    """Starts a composition from a rank's slice of a canonical tensor.

    Args:
        shape: Canonical extents in words; ``()`` is treated as ``(1,)``.
        word_nbytes: Canonical word size: 1, 2, 4 or 8.
        start: Start of the rank's slice, in words; the whole tensor by default.
        stop: End of the rank's slice; an empty slice gives a layout without records.
        unit: ``nibble`` where the engine moves 4-bit elements apart: the last axis then counts nibbles.

    Returns:
        The arrangement whose extents are those of the slice.

    Raises:
        TypeError: An extent is no integer.
        ValueError: No such unit or word size, or the slice is not inside the tensor.
    """
    if unit not in ("word", "nibble"):
        raise ValueError(f"unit {unit!r} is neither 'word' nor 'nibble'")
    full = tuple(index(n) for n in shape) or (1,)
    low = tuple(start) if start is not None else (0,) * len(full)
    high = tuple(stop) if stop is not None else full
    whole = Layout(full, word_nbytes, low, high, ())
    scale = 2 * word_nbytes if unit == "nibble" else 1
    low, high = (*low[:-1], low[-1] * scale), (*high[:-1], high[-1] * scale)
    extents = tuple(b - a for a, b in zip(low, high, strict=True))
    lines = tuple(Line(0, (Term(g, 1, n, 1),) if n > 1 else ()) for g, n in enumerate(extents))
    piece = Piece(low, high, low, extents, tuple((a,) for a in range(len(full))), lines)
    return Arrangement(whole, unit, extents, (piece,) if prod(extents) else ())


def with_copies(first: Layout, *others: Layout) -> Layout:
    """Adds the destinations of other layouts of the same slice as copies.

    Args:
        first: The layout whose records keep their primary flags.
        others: Layouts of the same tensor and slice; their records become copies.

    Returns:
        One layout with all records.

    Raises:
        PlanError: The layouts are of different slices.
    """
    records = list(first.records)
    for other in others:
        if replace(other, records=()) != replace(first, records=()):
            raise PlanError(f"a copy of another slice: {other.start}..{other.stop}, not {first.start}..{first.stop}")
        records += [replace(r, primary=False) for r in other.records]
    return replace(first, records=tuple(records))
