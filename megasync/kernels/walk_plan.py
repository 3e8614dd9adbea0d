"""Tables of whole-tensor work: which boxes of which records are walked, fast or word by word.

``plan_audit`` covers everything the records hold, ``plan_dense`` the tiles whose masks were decoded. Boxes of equal
shape and place in their stacks share one enumeration, so planning costs little a box. Comes before ``walk``. Must
import nothing of megasync but kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.records import AXIS_HEAD, HEAD, PackedRecords, RecordGroup, magic
from megasync.kernels.scatter_plan import Tiles
from megasync.kernels.walk_digits import MAX_CHECKS, Walk, walk_of

WALK_HEAD, WALK_DIGIT = 12, 8
"""Columns of an item: address of the first step, canonical group, mask byte, distance of pieces, steps, tensor, digest
flag, coordinate and extent of two checked axes, unused. Then for each digit: count, multiplier, shift, address step,
canonical step, mask step, steps of the two checked coordinates."""

CHUNK = 4096
"""Steps (word by word: words) of a program."""

_GENERIC_WORDS = 1 << 30  # a box walked word by word is cut below this


@dataclass(frozen=True, slots=True)
class WalkClass:
    """Boxes that one variant of the streaming kernel walks.

    Attributes:
        piece_nbytes: 8 or 4.
        num_digits: 1, 2, 4 or 8; shorter enumerations are padded with counts of 1.
        num_checks: 0 or 2.
        items: int64 ``[I, WALK_HEAD + WALK_DIGIT * num_digits]`` on the device.
        pieces: int32 ``[P, 2]`` on the device: item, number of the chunk.
    """

    piece_nbytes: int
    num_digits: int
    num_checks: int
    items: torch.Tensor
    pieces: torch.Tensor


@dataclass(frozen=True, slots=True)
class WordClass:
    """Boxes of one record group that are walked word by word.

    Attributes:
        group: The records.
        boxes: int32 ``[I, 4 + 2 A]`` on the device: record, tensor, words, unused, then start and extent per axis.
        masks: int64 ``[I, 1 + A]`` on the device: mask byte of the box's first word, then its step per axis in bytes.
        pieces: int32 ``[P, 2]`` on the device: box, number of the chunk.
    """

    group: RecordGroup
    boxes: torch.Tensor
    masks: torch.Tensor
    pieces: torch.Tensor


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes to walk, all of one record group; int64 on the host.

    Attributes:
        record: ``[B]``, row of the record.
        low: ``[B, A]``, first canonical coordinate, in words.
        high: ``[B, A]``, end.
        mask: ``[B]``, byte at which the tile's mask starts; all 0 without masks.
        tile_start: ``[B, A]``, start of the tile; None without masks.
        tile_extent: ``[B, A]``, extents of the tile; None without masks.
    """

    record: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    tile_start: np.ndarray | None
    tile_extent: np.ndarray | None


@dataclass(frozen=True, slots=True)
class WalkPlan:
    """Everything one audit or one dense XOR walks.

    Attributes:
        records: The layout.
        boxes: For each record group, what is walked (the reference walks these).
        fast: Streaming launches.
        slow: Launches word by word.
        mask_nbytes: Bytes that the masks take from the start of their buffer; 0 without masks.
    """

    records: PackedRecords
    boxes: tuple[tuple[RecordGroup, Boxes], ...]
    fast: tuple[WalkClass, ...]
    slow: tuple[WordClass, ...]
    mask_nbytes: int


def plan_audit(records: PackedRecords) -> WalkPlan:
    """Plans the digest of all that the records marked for digests hold.

    Args:
        records: The layout.

    Returns:
        The plan, its tables on the records' device; valid as long as the pack.
    """
    boxes = []
    for group in records.groups:
        record = np.nonzero(group.rows[:, 2])[0]
        low, high = _bounds(records, group, record)
        if len(record):
            boxes.append((group, Boxes(record, low, high, np.zeros(len(record), dtype=np.int64), None, None)))
    return _plan(records, boxes, 0, physical_order=True)


def plan_dense(tiles: Tiles, mask_offsets: np.ndarray, records: PackedRecords) -> WalkPlan:
    """Plans the XOR of the decoded masks of some tiles, usually those of one layer.

    Args:
        tiles: The tiles.
        mask_offsets: int64 ``[T]``, byte in the mask buffer at which each tile's row-major words start; multiples of
            the word size, of 16 for speed.
        records: The layout.

    Returns:
        The plan, its tables on the records' device.

    Raises:
        ValueError: On offsets that are negative or misaligned.
    """
    w = records.word_nbytes
    if len(mask_offsets) != len(tiles.tensors) or (mask_offsets < 0).any() or (mask_offsets % w).any():
        raise ValueError(f"{len(mask_offsets)} mask offsets for {len(tiles.tensors)} tiles: multiples of {w}, >= 0")
    boxes = []
    for group in records.groups:
        first = np.searchsorted(group.owners, tiles.tensors, side="left")
        num = np.searchsorted(group.owners, tiles.tensors, side="right") - first
        tile = np.repeat(np.arange(len(first)), num)
        record = np.arange(len(tile)) - np.repeat(np.cumsum(num) - num, num) + first[tile]
        low, high = _bounds(records, group, record)
        start, extent = tiles.starts[tile], tiles.extents[tile]
        low, high = np.maximum(low, start), np.minimum(high, start + extent)
        keep = (low < high).all(axis=1)
        if keep.any():
            mask = np.asarray(mask_offsets, dtype=np.int64)[tile][keep]
            boxes.append((group, Boxes(record[keep], low[keep], high[keep], mask, start[keep], extent[keep])))
    end = int((mask_offsets + tiles.words * w).max(initial=0)) if len(tiles.tensors) else 0
    return _plan(records, boxes, end, physical_order=False)


def _bounds(records: PackedRecords, group: RecordGroup, record: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of records, in words (a word whose nibbles a record holds in part counts)."""
    width = AXIS_HEAD + 3 * group.num_terms
    rows = group.rows[record]
    low = rows[:, HEAD : HEAD + records.num_axes * width : width].copy()
    high = rows[:, HEAD + 1 : HEAD + records.num_axes * width : width].copy()
    if group.nibble:
        low[:, -1] //= 2 * records.word_nbytes
        high[:, -1] = -(-high[:, -1] // (2 * records.word_nbytes))
    return low, high


def _plan(
    records: PackedRecords, boxes: list[tuple[RecordGroup, Boxes]], mask_nbytes: int, *, physical_order: bool
) -> WalkPlan:
    """Sorts boxes into launches."""
    fast: dict[tuple[int, int, int], list[np.ndarray]] = {}
    slow: list[WordClass] = []
    for group, mine in boxes:
        rest = []
        for walk, at in _walks(records, group, mine, physical_order):
            if walk is None:
                rest.append(at)
                continue
            digits = next(n for n in (1, 2, 4, 8) if n >= max(1, len(walk.digits)))
            key = (walk.piece_nbytes, digits, MAX_CHECKS if walk.checks else 0)
            fast.setdefault(key, []).append(_items(records, group, mine, walk, at, digits))
        if rest:
            slow += _words(records, group, mine, np.sort(np.concatenate(rest)))
    classes = []
    for key, parts in sorted(fast.items()):
        items = np.concatenate(parts)
        items = items[np.argsort(items[:, 0] if physical_order else items[:, 2], kind="stable")]
        classes.append(WalkClass(*key, _upload(records, items), _upload(records, _chunks(items[:, 4]))))
    return WalkPlan(records, tuple(boxes), tuple(classes), tuple(slow), mask_nbytes)


def _walks(
    records: PackedRecords, group: RecordGroup, boxes: Boxes, physical_order: bool
) -> Iterator[tuple[Walk | None, np.ndarray]]:
    """Each distinct enumeration, with the boxes that share it."""
    rows = group.rows[boxes.record]
    place = (rows[:, :1] + rows[:, 1:2] * records.word_nbytes) % 16
    shape = records.shapes[group.owners[boxes.record]]
    parts = [rows[:, HEAD:], place, shape, boxes.low, boxes.high]
    if boxes.tile_start is not None and boxes.tile_extent is not None:
        parts += [boxes.tile_start, boxes.tile_extent, boxes.mask[:, None] % 16]
    key = np.ascontiguousarray(np.concatenate(parts, axis=1))
    packed = key.view(np.dtype((np.void, key.dtype.itemsize * key.shape[1]))).ravel()
    _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.append(0, np.cumsum(np.bincount(inverse, minlength=len(first)))).tolist()
    for n, i in enumerate(first.tolist()):
        tile = None
        if boxes.tile_start is not None and boxes.tile_extent is not None:
            tile = (boxes.tile_start[i], boxes.tile_extent[i])
        walk = walk_of(
            group,
            int(boxes.record[i]),
            shape[i],
            records.word_nbytes,
            boxes.low[i],
            boxes.high[i],
            tile,
            physical_order=physical_order,
        )
        if walk is not None and (int(boxes.mask[i]) + walk.mask) % 8:
            walk = None
        yield walk, order[ends[n] : ends[n + 1]]


def _items(
    records: PackedRecords, group: RecordGroup, boxes: Boxes, walk: Walk, at: np.ndarray, num_digits: int
) -> np.ndarray:
    """Rows of the boxes ``at``, which share an enumeration."""
    rows = group.rows[boxes.record[at]]
    out = np.zeros((len(at), WALK_HEAD + WALK_DIGIT * num_digits), dtype=np.int64)
    out[:, 0] = rows[:, 0] + rows[:, 1] * records.word_nbytes + walk.physical
    out[:, 1] = walk.canonical
    out[:, 2] = boxes.mask[at] + walk.mask
    out[:, 3], out[:, 4] = walk.piece_step, walk.num_groups
    out[:, 5], out[:, 6] = group.owners[boxes.record[at]], rows[:, 2]
    for i in range(MAX_CHECKS):
        out[:, 7 + 2 * i : 9 + 2 * i] = walk.checks[i][1:] if i < len(walk.checks) else (0, 1)
    for i in range(num_digits):
        cells = out[:, WALK_HEAD + WALK_DIGIT * i : WALK_HEAD + WALK_DIGIT * (i + 1)]
        if i >= len(walk.digits):
            cells[:, 0], cells[:, 1:3] = 1, magic(1)
            continue
        d = walk.digits[i]
        cells[:, 0], cells[:, 1:3] = d.count, magic(d.count)
        cells[:, 3:6] = (d.physical, d.canonical, d.mask)
        for j, (axis, _, _) in enumerate(walk.checks):
            cells[:, 6 + j] = d.z if d.axis == axis else 0
    return out


def _words(records: PackedRecords, group: RecordGroup, boxes: Boxes, at: np.ndarray) -> list[WordClass]:
    """The launch of the boxes ``at`` word by word."""
    w, axes = records.word_nbytes, records.num_axes
    rows, masks = [], []
    for i in at.tolist():
        stride = np.zeros(axes, dtype=np.int64)
        if boxes.tile_extent is not None:
            stride = np.append(np.cumprod(boxes.tile_extent[i][:0:-1])[::-1], 1) * w
        start = boxes.tile_start[i] if boxes.tile_start is not None else boxes.low[i]
        inner = max(1, int((boxes.high[i] - boxes.low[i])[1:].prod()))
        step = max(1, _GENERIC_WORDS // inner)
        for begin in range(int(boxes.low[i][0]), int(boxes.high[i][0]), step):
            low, high = boxes.low[i].copy(), boxes.high[i].copy()
            low[0], high[0] = begin, min(begin + step, int(high[0]))
            pairs = np.stack((low, high - low), axis=1).ravel()
            words = int((high - low).prod())
            rows.append([int(boxes.record[i]), int(group.owners[boxes.record[i]]), words, 0, *pairs.tolist()])
            masks.append([int(boxes.mask[i] + ((low - start) * stride).sum()), *stride.tolist()])
    table = np.array(rows, dtype=np.int32)
    chunks = _chunks(table[:, 2].astype(np.int64))
    return [
        WordClass(group, _upload(records, table), _upload(records, np.array(masks)), _upload(records, chunks)),
    ]


def _chunks(sizes: np.ndarray) -> np.ndarray:
    """int32 ``[P, 2]``: index and chunk number of every chunk of items of these sizes."""
    num = -(-sizes // CHUNK)
    item = np.repeat(np.arange(len(sizes)), num)
    return np.stack((item, np.arange(len(item)) - np.repeat(np.cumsum(num) - num, num)), axis=1).astype(np.int32)


def _upload(records: PackedRecords, table: np.ndarray) -> torch.Tensor:
    """A table on the device of the records."""
    return torch.from_numpy(np.ascontiguousarray(table)).to(records.device)
