"""Fits mixed-radix digits to what a probe saw, with no rule about any engine.

What was seen of one tensor in one storage is a set of (canonical atom, physical offset) pairs. Where an atom has
several offsets they are told apart as copies; the atoms of a copy must form boxes; inside a box the offset must be a
sum of one table per axis (or per group of merged axes); and each table must be a few runs of mixed-radix digits.
Before it comes `probe_codes`; after it `probe`, which verifies on random bytes. This module must import nothing of
megasync but ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np

from megasync.layout.chain import normalised
from megasync.layout.modes import Digit, Remap, Unit
from megasync.layout.rules import MAX_DIGITS

MAX_COPIES = 16
"""Places of one atom in one storage; more is a broadcast, which no record expresses."""

MAX_RECORDS = 64
"""Records of one copy; more means that the places follow no digits (a table of indices, an expert map)."""

_CUT_CANDIDATES = 64


class NoFitError(Exception):
    """What was seen is no small set of digit records; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of one table that mixed-radix digits explain.

    Attributes:
        start: First index of the stretch.
        stop: End of the stretch.
        base: Table value at ``start``.
        digits: ``(extent, source stride, physical stride)``, from ``start``.
    """

    start: int
    stop: int
    base: int
    digits: tuple[tuple[int, int, int], ...]


def fit(
    shape: Sequence[int], atoms: np.ndarray, offsets: np.ndarray, *, storage: str, unit: Unit, word_nbytes: int
) -> list[tuple[Remap, ...]]:
    """Fits records to the places of one tensor in one storage.

    Args:
        shape: Canonical extents in units.
        atoms: int64 ``[n]``, row-major number of each atom seen.
        offsets: int64 ``[n]``, ascending, its physical offset in units.
        storage: Name of the storage.
        unit: Unit of the records.
        word_nbytes: Word size of the records.

    Returns:
        One tuple of records per copy, each record marked primary; the boxes of a copy are disjoint.

    Raises:
        NoFitError: No few records explain the places.
    """
    copies: list[tuple[Remap, ...]] = []
    while atoms.size:
        if len(copies) == MAX_COPIES:
            raise NoFitError(f"its words are broadcast to more than {MAX_COPIES} places")
        table = np.full(prod(shape), -1, dtype=np.int64)
        # Of several assignments to one place the last stays, so the smallest offset of each atom wins.
        table[atoms[::-1]] = offsets[::-1]
        used = table[atoms] == offsets
        copies.append(_fit_copy(table.reshape(tuple(shape)), storage, unit, word_nbytes))
        atoms, offsets = atoms[~used], offsets[~used]
    return copies


def digits_of(table: np.ndarray) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The longest prefix of a table that mixed-radix digits explain.

    Args:
        table: int64 ``[n]``, ``n >= 1``, all values different.

    Returns:
        ``(length, digits)`` with ``table[z] - table[0]`` equal to the sum of the digits of ``z`` for ``z < length``;
        each digit as long as it can be.
    """
    n = table.size
    values = table - table[0]
    digits: list[tuple[int, int, int]] = []
    size = 1
    while size < n:
        step = int(values[size])
        whole = -(-n // size)
        expected = (values[:size] + np.arange(whole, dtype=np.int64)[:, None] * step).reshape(-1)[:n]
        wrong = np.flatnonzero(expected != values)
        if not wrong.size:
            return n, (*digits, (whole, size, step))
        count, inside = divmod(int(wrong[0]), size)
        digits.append((count if not inside else count + 1, size, step))
        if inside:
            return int(wrong[0]), tuple(digits)
        size *= count
    return n, tuple(digits)


def runs_of(table: np.ndarray, limit: int = MAX_RECORDS) -> list[Run]:
    """Cuts a table into few stretches of mixed-radix digits.

    Args:
        table: int64 ``[n]``, ``n >= 1``.
        limit: Stretches allowed.

    Returns:
        The stretches, in order, covering the table.

    Raises:
        NoFitError: More stretches than allowed are needed.
    """
    runs: list[Run] = []
    start = 0
    while start < table.size:
        if len(runs) >= limit:
            raise NoFitError(f"its places are no mixed-radix digits: more than {limit} runs along one axis")
        rest = table[start:]
        length, digits = digits_of(rest)
        if length < rest.size:
            length = _best_cut(rest, length)
            length, digits = digits_of(rest[:length])
        runs.append(Run(start, start + length, int(rest[0]), digits))
        start += length
    return runs


def _best_cut(table: np.ndarray, longest: int) -> int:
    """Where to end the first stretch: a jump after which one stretch reaches the end, else as far as it goes.

    A stretch that begins inside a tile of the engine explains more than its own rim by accident; ending it at the
    right jump leaves a rest that begins at a tile and needs one record.
    """
    steps = np.diff(table[: longest + 1])
    jumps = np.flatnonzero(steps != steps[0])[:_CUT_CANDIDATES] + 1
    for cut in [*(int(j) for j in jumps if j <= longest), longest]:
        if digits_of(table[cut:])[0] == table.size - cut:
            return cut
    return longest


def _fit_copy(table: np.ndarray, storage: str, unit: Unit, word_nbytes: int) -> tuple[Remap, ...]:
    seen = table >= 0
    spans = []
    for axis in range(table.ndim):
        along = seen.any(axis=tuple(a for a in range(table.ndim) if a != axis))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], along.astype(np.int8), [0]))))
        spans.append([(int(a), int(b)) for a, b in edges.reshape(-1, 2)])
    boxed = prod(sum(b - a for a, b in axis) for axis in spans)
    if boxed != int(seen.sum()):
        raise NoFitError("the words that were moved form no box of the tensor; the others are computed or dropped")
    if prod(len(s) for s in spans) > MAX_RECORDS:
        raise NoFitError(f"the words that were moved form more than {MAX_RECORDS} boxes")
    records: list[Remap] = []
    for box in product(*spans):
        records += _fit_box(table, box, storage, unit, word_nbytes)
        if len(records) > MAX_RECORDS:
            raise NoFitError(f"its places need more than {MAX_RECORDS} records")
    return tuple(records)


def _fit_box(
    table: np.ndarray, box: Sequence[tuple[int, int]], storage: str, unit: Unit, word_nbytes: int
) -> list[Remap]:
    part = table[tuple(slice(a, b) for a, b in box)]
    reasons = ["its places depend on several axes at once"]
    for merge in _merges(part.shape):
        extents = tuple(prod(part.shape[a] for a in group) for group in merge)
        joined = part.reshape(extents)
        tables = _separate(joined)
        if tables is None:
            continue
        try:
            runs = [runs_of(t) for t in tables]
        except NoFitError as e:
            reasons.append(str(e))
            continue
        if any(len(r) > 1 and len(group) > 1 for r, group in zip(runs, merge, strict=True)):
            continue
        combinations = list(product(*runs))
        if len(combinations) > MAX_RECORDS:
            reasons.append(f"its places need more than {MAX_RECORDS} records")
            continue
        if max(sum(len(r.digits) for r in c) for c in combinations) > MAX_DIGITS:
            reasons.append(f"its places need more than {MAX_DIGITS} digits")
            continue
        corner = int(joined.reshape(-1)[0])
        return [_record(table.shape, box, merge, c, corner, storage, unit, word_nbytes) for c in combinations]
    raise NoFitError(reasons[min(1, len(reasons) - 1)])


def _merges(shape: Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to merge neighbouring axes, fewest merges first."""
    rank = len(shape)
    ways = []
    for joins in product((False, True), repeat=rank - 1):
        edges = [0, *(i + 1 for i, join in enumerate(joins) if not join), rank]
        ways.append(tuple(tuple(range(a, b)) for a, b in pairwise(edges)))
    return sorted(ways, key=len, reverse=True)


def _separate(values: np.ndarray) -> list[np.ndarray] | None:
    """Tables per axis, 0 at the corner, whose sum plus the corner gives all values; None where there are none."""
    corner = values.reshape(-1)[0]
    tables = []
    total = np.full((1,) * values.ndim, corner, dtype=np.int64)
    for axis in range(values.ndim):
        line = values[tuple(slice(None) if a == axis else 0 for a in range(values.ndim))] - corner
        tables.append(line)
        total = total + line.reshape(tuple(-1 if a == axis else 1 for a in range(values.ndim)))
    return tables if np.array_equal(total, values) else None


def _record(
    shape: tuple[int, ...],
    box: Sequence[tuple[int, int]],
    merge: tuple[tuple[int, ...], ...],
    runs: Sequence[Run],
    corner: int,
    storage: str,
    unit: Unit,
    word_nbytes: int,
) -> Remap:
    start, stop = [a for a, _ in box], [b for _, b in box]
    digits: list[Digit] = []
    for group, (axes, run) in enumerate(zip(merge, runs, strict=True)):
        if len(axes) == 1:
            start[axes[0]], stop[axes[0]] = box[axes[0]][0] + run.start, box[axes[0]][0] + run.stop
        digits += [Digit(group, extent, s, t) for extent, s, t in run.digits]
    extents = tuple(b - a for a, b in zip(start, stop, strict=True))
    return normalised(
        Remap(
            shape=shape,
            start=tuple(start),
            stop=tuple(stop),
            origin=tuple(start),
            local_shape=extents,
            merge=merge,
            digits=tuple(digits),
            base=corner + sum(r.base for r in runs),
            unit=unit,
            word_nbytes=word_nbytes,
            storage=storage,
            primary=True,
        )
    )
