"""Place: the layout of one kind evaluated at the changed words of many tiles at once.

Position in the tile -> canonical coordinate -> bounds and digits -> physical offset. Comes after decode, used by
``cpu``; ``runs`` has what it makes. Must import nothing above kinds.
"""

from __future__ import annotations

import numpy as np

from megasync.layout.modes import Remap
from megasync.receiver.kinds import Kind, Kinds
from megasync.receiver.runs import Part, Run
from megasync.schema import runs_of_equal


def place_run(
    kinds: Kinds,
    number: int,
    ids: np.ndarray,
    tiles: np.ndarray,
    counts: np.ndarray,
    positions: np.ndarray,
    values: np.ndarray,
) -> Run | None:
    """Evaluate a kind's layout at the changed words of some tiles.

    Args:
        kinds: All kinds.
        number: Which kind all tensors concerned are of.
        ids: int64 ``[T]``, tensor of each tile; equal ids follow on one another.
        tiles: ``[T]``, tile numbers.
        counts: int64 ``[T]``, changed words of each tile, none 0.
        positions: u32 ``[n]``.
        values: ``<u{w}`` ``[n]``.

    Returns:
        The run, None where this rank holds none of the words.
    """
    kind = kinds.kinds[number]
    rows = kinds.row[ids]
    bases, storages = kinds.bases[number][rows], kinds.storages[number][rows]
    flat = kind.grid.flat_words(tiles, counts, positions)
    units: list[_Units]
    if all(bool(straight[tiles].all()) for _, straight in kinds.lines[number]):
        units = [
            [(None, lines.at(tiles, counts, positions, bases[:, i]), 0)]
            for i, (lines, _) in enumerate(kinds.lines[number])
        ]
    else:
        starts, extents = kinds.starts[number][tiles], kinds.extents[number][tiles]
        coords = coordinates(starts, extents, counts, positions)
        units = [_units(kind, r, coords, starts, extents) for r in kind.records]
        held = _covered(units, kind.lead, len(positions))
        if held is not None:
            tile = np.repeat(np.arange(len(ids)), counts)[held]
            if not len(tile):
                return None
            counts = np.bincount(tile, minlength=len(ids))
            some = counts > 0
            ids, bases, storages, counts = ids[some], bases[some], storages[some], counts[some]
            coords, flat, values = [c[held] for c in coords], flat[held], values[held]
            units = [_units(kind, r, coords, starts, extents) for r in kind.records]
        for i, found in enumerate(units):
            for select, offsets, _ in found:
                _add(offsets, select, bases[:, i], counts)
    parts: list[Part] = []
    for i, (record, found) in enumerate(zip(kind.records, units, strict=True)):
        for select, offsets, k in found:
            parts += _parts(record, kind.lead[i], select, offsets, k, counts, storages[:, i])
    parts.sort(key=lambda p: not p.lead)
    segments = runs_of_equal(ids)
    ends = np.cumsum(counts)
    bounds = np.array([0, *(int(ends[stop - 1]) for _, stop in segments)], dtype=np.int64)
    counted = _covered(units, kind.primary, len(values))
    tensor = ids[[a for a, _ in segments]]
    return Run(tensor, tensor + len(kinds.of), bounds, flat, values, tuple(parts), counted)


def coordinates(starts: np.ndarray, extents: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    """Canonical coordinates of words given by tile box and position in it.

    Args:
        starts: int64 ``[T, ndim]``.
        extents: int64 ``[T, ndim]``; a tile holds fewer than 2^32 words.
        counts: Words of each tile.
        positions: u32 ``[n]``, row-major.

    Returns:
        One int64 array ``[n]`` per axis.
    """
    rest = positions
    out: list[np.ndarray] = [rest] * extents.shape[1]
    one = len(starts) == 1
    for axis in range(extents.shape[1] - 1, -1, -1):
        inside = rest
        if axis:
            # Divisions by one number, of 32-bit numbers, are what numpy vectorises best.
            same = bool((extents[:, axis] == extents[0, axis]).all())
            by = np.uint32(extents[0, axis]) if same else np.repeat(extents[:, axis].astype(np.uint32), counts)
            quotient = rest // by
            inside, rest = rest - quotient * by, quotient
        begin = starts[:, axis]
        if one or bool((begin == begin[0]).all()):
            out[axis] = inside.astype(np.int64)
            if begin[0]:
                out[axis] += begin[0]
        else:
            out[axis] = np.repeat(begin, counts)
            out[axis] += inside
    return out


_Units = list[tuple[np.ndarray | None, np.ndarray, int]]
"""Words (None: all), offsets without base, and nibble number, for each nibble of a word or once."""


def _units(kind: Kind, record: Remap, coords: list[np.ndarray], starts: np.ndarray, extents: np.ndarray) -> _Units:
    scale = 2 * kind.word_nbytes if record.unit == "nibble" else 1
    low = np.array(record.start)
    high = np.array(record.stop)
    low[-1], high[-1] = -(-low[-1] // scale), high[-1] // scale
    within = bool(((starts >= low) & (starts + extents <= high)).all())
    out: _Units = []
    for k in range(scale):
        at = coords if scale == 1 else [*coords[:-1], coords[-1] * scale + k]
        if within:
            out.append((None, record.local_offsets(at), k))
            continue
        mask, offsets = record.offsets(at)
        if len(offsets) == len(mask):
            out.append((None, offsets, k))
        elif len(offsets):
            out.append((np.flatnonzero(mask), offsets, k))
    return out


def _covered(units: list[_Units], chosen: tuple[bool, ...], n: int) -> np.ndarray | None:
    """Words that one of the chosen records holds, bool ``[n]``; None where all are."""
    found = [u for units_of, ok in zip(units, chosen, strict=True) if ok for u in units_of]
    if any(select is None for select, _, _ in found):
        return None
    out = np.zeros(n, dtype=bool)
    for select, _, _ in found:
        out[select] = True
    return None if out.all() else out


def _add(offsets: np.ndarray, select: np.ndarray | None, bases: np.ndarray, counts: np.ndarray) -> None:
    """Add the bases of the words' tensors to their offsets."""
    if bool((bases == bases[0]).all()):
        offsets += bases[0]
    else:
        each = np.repeat(bases, counts)
        offsets += each if select is None else each[select]


def _parts(
    record: Remap,
    lead: bool,
    select: np.ndarray | None,
    offsets: np.ndarray,
    k: int,
    counts: np.ndarray,
    storages: np.ndarray,
) -> list[Part]:
    segments: tuple[tuple[int, int, int], ...]
    if bool((storages == storages[0]).all()):
        segments = ((int(storages[0]), 0, len(offsets)),)
    else:
        each = np.repeat(storages, counts)
        each = each if select is None else each[select]
        segments = tuple((int(each[a]), a, b) for a, b in runs_of_equal(each))
    if record.unit == "word":
        return [Part(lead, offsets, select, segments, record.word_nbytes)]
    return _nibble_parts(lead, select, offsets, k, segments)


def _nibble_parts(
    lead: bool, select: np.ndarray | None, offsets: np.ndarray, k: int, segments: tuple[tuple[int, int, int], ...]
) -> list[Part]:
    """Low and high nibbles of bytes apart: in each, every byte comes once, so that fancy indexing may write it."""
    storage = np.repeat([s for s, _, _ in segments], [b - a for _, a, b in segments])
    out = []
    for high in (0, 1):
        mine = np.flatnonzero((offsets & 1) == high)
        if len(mine):
            place = storage[mine]
            spans = tuple((int(place[a]), a, b) for a, b in runs_of_equal(place))
            which = mine if select is None else select[mine]
            out.append(Part(lead, offsets[mine] >> 1, which, spans, 1, (k, 4 * high)))
    return out
