"""The records of the layout remap: where the canonical words of one tensor lie in an engine's live storages.

A `Remap` sends the words of a box of the canonical tensor to offsets of one live storage by mixed-radix digits; a
`Layout` is the tuple of records that places one canonical tensor on one rank. `compose` and `named` make layouts,
`probe` discovers them; `evaluate` runs them with numpy, `prove` checks them by arithmetic, `encoding` writes them
down; the receiver and the kernels evaluate the same records. This module must import nothing of megasync but
``errors`` and ``types``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from megasync.layout.rules import boxes_apart, broken_rule

Unit = Literal["word", "nibble"]

CHUNK_WORDS = 1 << 15
"""Coordinates evaluated at a time: the temporaries of a chunk stay in a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class Digit:
    """One mixed-radix digit of a local coordinate: ``((z[axis] // src_stride) % extent) * dst_stride``.

    Attributes:
        axis: Merged axis (index of `Remap.merge`) that the digit is taken from.
        extent: Number of values of the digit; 0 = unbounded (no modulo), allowed for the top digit of an axis only.
        src_stride: What one step of the digit is worth in the local coordinate; >= 1.
        dst_stride: What one step of the digit is worth in the physical offset, in units; never 0, may be negative.
    """

    axis: int
    extent: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True)
class Remap:
    """One record: the words of a box of the canonical tensor, sent into one live storage.

    Evaluation order: canonical coordinate ``x`` -> bounds test ``start <= x < stop`` -> ``y = x - origin`` -> ``z`` =
    axes of each merge group joined row-major with the extents of ``local_shape`` -> ``base + sum of the digits of z``.

    Attributes:
        shape: Canonical extents in units (unit nibble: the last axis counts nibbles, 2 x bytes).
        start: First coordinate of the record's own box, canonical, in units.
        stop: End of the record's own box; words outside do not go through this record.
        origin: Start of the rank's slice (or of a rim of it); ``y = x - origin``.
        local_shape: Extents of the rank-local canonical tensor; they are the radices of the merge.
        merge: Groups of consecutive axes, all axes once and in order; ``((0,), (1,))`` merges nothing.
        digits: At most `MAX_DIGITS`.
        base: Physical offset, in units, from the start of the untyped storage viewed as words of ``word_nbytes``.
        unit: ``word``, or ``nibble`` (low nibble of a byte = even element).
        word_nbytes: Canonical word size, 1 for unit nibble.
        storage: Name of the live storage: parameter or buffer name in the engine.
        primary: True for the one destination of a word that enters digest sums; copies are kept equal to it.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    origin: tuple[int, ...]
    local_shape: tuple[int, ...]
    merge: tuple[tuple[int, ...], ...]
    digits: tuple[Digit, ...]
    base: int
    unit: Unit
    word_nbytes: int
    storage: str
    primary: bool

    def __post_init__(self) -> None:
        """Refuses a record that breaks the contract.

        Raises:
            ValueError: A field is out of range or inconsistent with another.
        """
        reason = broken_rule(self)
        if reason:
            raise ValueError(f"layout record into storage {self.storage!r} is not valid: {reason}; record {self}")

    @property
    def num_units(self) -> int:
        """Units (words or nibbles) inside the record's box."""
        return prod(b - a for a, b in zip(self.start, self.stop, strict=True))

    def group_strides(self, group: int) -> tuple[int, ...]:
        """Row-major strides that join the axes of a merge group.

        Args:
            group: Index into ``merge``.

        Returns:
            One stride per axis of the group, the last one 1.
        """
        axes = self.merge[group]
        return tuple(prod(self.local_shape[a] for a in axes[i + 1 :]) for i in range(len(axes)))

    def group_range(self, group: int) -> tuple[int, int]:
        """Smallest and largest merged coordinate that the record's box reaches in a group (both inclusive)."""
        axes = self.merge[group]
        if len(axes) == 1:
            first = self.origin[axes[0]]
            return self.start[axes[0]] - first, self.stop[axes[0]] - 1 - first
        strides = self.group_strides(group)
        low = sum((self.start[a] - self.origin[a]) * s for a, s in zip(axes, strides, strict=True))
        high = sum((self.stop[a] - 1 - self.origin[a]) * s for a, s in zip(axes, strides, strict=True))
        return low, high

    def terms(self) -> tuple[tuple[int, int, int], ...]:
        """The digits in telescoped form: ``offset = base + sum((z[axis] // divisor) * factor)``.

        A digit ``((z // s) % e) * t`` equals ``(z // s) * t - (z // (s * e)) * e * t``, so neighbouring digits share
        their divisions and no modulo is left. Terms whose quotient is 0 all over the box are dropped.

        Returns:
            ``(axis, divisor, factor)`` triples, sorted, factors never 0.
        """
        factors: dict[tuple[int, int], int] = {}
        highest = [self.group_range(g)[1] for g in range(len(self.merge))]
        for d in self.digits:
            factors[d.axis, d.src_stride] = factors.get((d.axis, d.src_stride), 0) + d.dst_stride
            if d.extent:
                above = (d.axis, d.src_stride * d.extent)
                factors[above] = factors.get(above, 0) - d.extent * d.dst_stride
        return tuple((a, s, f) for (a, s), f in sorted(factors.items()) if f and s <= highest[a])

    def inside(self, coords: Sequence[np.ndarray]) -> np.ndarray:
        """Tests canonical coordinates against the record's box.

        Args:
            coords: One int64 ``[n]`` array per canonical axis, in units.

        Returns:
            bool ``[n]``.
        """
        mask = np.ones(coords[0].shape, dtype=np.bool_)
        for axis, (lo, hi) in enumerate(zip(self.start, self.stop, strict=True)):
            if lo > 0:
                mask &= coords[axis] >= lo
            if hi < self.shape[axis]:
                mask &= coords[axis] < hi
        return mask

    def offsets(self, coords: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Evaluates the record at canonical coordinates.

        Args:
            coords: One int64 ``[n]`` array per canonical axis, in units, inside ``shape``.

        Returns:
            ``(mask, offsets)``: bool ``[n]``, which coordinates go through this record, and int64 ``[mask.sum()]``,
            their physical offsets in units from the start of the storage, in the order of the coordinates.

        Raises:
            ValueError: The number of arrays is not the rank of the tensor.
        """
        if len(coords) != len(self.shape):
            raise ValueError(f"a record of rank {len(self.shape)} takes as many coordinate arrays, got {len(coords)}")
        mask = self.inside(coords)
        if mask.all():
            return mask, self.local_offsets(coords)
        return mask, self.local_offsets([c[mask] for c in coords])

    def local_offsets(self, coords: Sequence[np.ndarray]) -> np.ndarray:
        """Evaluates the record at canonical coordinates already known to lie in its box (no bounds test).

        Args:
            coords: One int64 ``[n]`` array per canonical axis, in units.

        Returns:
            int64 ``[n]`` physical offsets in units.
        """
        n = coords[0].shape[0]
        out = np.empty(n, dtype=np.int64)
        by_group: dict[int, list[tuple[int, int]]] = {}
        for group, divisor, factor in self.terms():
            by_group.setdefault(group, []).append((divisor, factor))
        for lo in range(0, n, CHUNK_WORDS):
            part = out[lo : lo + CHUNK_WORDS]
            part.fill(self.base)
            for group, terms in by_group.items():
                z = self._merged(group, [coords[a][lo : lo + CHUNK_WORDS] for a in self.merge[group]])
                for divisor, factor in terms:
                    part += _divide(z, divisor) * factor
        return out

    def _merged(self, group: int, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Joins the axes of a group row-major after subtracting the origin."""
        z: np.ndarray | None = None
        for axis, stride, column in zip(self.merge[group], self.group_strides(group), columns, strict=True):
            y = column - self.origin[axis] if self.origin[axis] else column
            y = y * stride if stride != 1 else y
            z = y if z is None else z + y
        assert z is not None  # a merge group is never empty
        return z


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one canonical tensor lies on one rank.

    Attributes:
        shape: Canonical extents in words; a scalar is ``(1,)``.
        word_nbytes: Canonical word size: 1, 2, 4 or 8.
        start: Start of the rank's slice of the canonical tensor, in words.
        stop: End of the rank's slice, in words.
        records: The leading ones (`leading`) cover every word of the slice exactly once: the primaries, and copies of
            words whose primary is another rank's (a replicated KV head). Empty where the slice is empty.
        partial: The rank holds only some words of the slice (two runs of rows of a fused tensor).
    """

    shape: tuple[int, ...]
    word_nbytes: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    records: tuple[Remap, ...]
    partial: bool = False

    def __post_init__(self) -> None:
        """Refuses records of another tensor.

        Raises:
            ValueError: Ranks, extents or word sizes disagree.
        """
        rank = len(self.shape)
        if self.word_nbytes not in (1, 2, 4, 8):
            raise ValueError(f"word_nbytes must be 1, 2, 4 or 8, got {self.word_nbytes}")
        if not rank or len(self.start) != rank or len(self.stop) != rank:
            raise ValueError(f"shape {self.shape}, start {self.start}, stop {self.stop} must have one rank >= 1")
        if any(not 0 <= a <= b <= n for a, b, n in zip(self.start, self.stop, self.shape, strict=True)):
            raise ValueError(f"the slice {self.start}..{self.stop} is not inside the tensor {self.shape}")
        for r in self.records:
            scale = self.units_per_word(r)
            units = (*self.shape[:-1], self.shape[-1] * scale)
            if r.shape != units or r.word_nbytes != (1 if r.unit == "nibble" else self.word_nbytes):
                raise ValueError(f"record {r} is not of a tensor {self.shape} of {self.word_nbytes}-byte words")
            low = (*self.start[:-1], self.start[-1] * scale)
            high = (*self.stop[:-1], self.stop[-1] * scale)
            if any(a < b for a, b in zip(r.start, low, strict=True)) or any(
                a > b for a, b in zip(r.stop, high, strict=True)
            ):
                raise ValueError(f"record box {r.start}..{r.stop} leaves the slice {low}..{high}")

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Extents of the rank's slice, in words."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slice_nbytes(self) -> int:
        """Canonical bytes of the rank's slice."""
        return prod(self.slice_shape) * self.word_nbytes

    @property
    def storages(self) -> tuple[str, ...]:
        """Names of the live storages that the records write, sorted."""
        return tuple(sorted({r.storage for r in self.records}))

    def units_per_word(self, record: Remap) -> int:
        """Units of a record in one canonical word: 1, or 2 x word_nbytes for unit nibble."""
        return 2 * self.word_nbytes if record.unit == "nibble" else 1

    def moved(self, offset: int, storage: str | None = None) -> Layout:
        """The same layout further on: the next expert of a stack, or the same place of another layer.

        Args:
            offset: Added to the base of every record, in units.
            storage: New name of the live storage; unchanged by default.

        Returns:
            The layout; making it is cheaper than composing it again.
        """
        records = tuple(replace(r, base=r.base + offset, storage=storage or r.storage) for r in self.records)
        return replace(self, records=records)

    def leading(self) -> tuple[Remap, ...]:
        """The records that hold each word once: the primaries, then copies of words that have no primary here."""
        chosen = [r for r in self.records if r.primary]
        for r in self.records:
            if not r.primary and all(boxes_apart(r, c) for c in chosen):
                chosen.append(r)
        return tuple(chosen)


def _divide(z: np.ndarray, divisor: int) -> np.ndarray:
    """``z // divisor`` for non-negative ``z``; a shift where the divisor is a power of two (4 x faster)."""
    if divisor == 1:
        return z
    if divisor & (divisor - 1) == 0:
        return z >> (divisor.bit_length() - 1)
    return z // divisor
