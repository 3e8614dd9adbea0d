"""The part of decoded frames that a rank needs: planes of its tiles packed side by side, checked, with their table rows.

Runs on a thread of the engine's process or in a worker process. Comes after ``codecs.sparse_batch``, before
``scatter_stage``. Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.codecs.sparse_batch import RawFrames, check_planes
from megasync.receiver.scatter_rows import Part, make_part
from megasync.receiver.scatter_view import StageView
from megasync.tiles import spread


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tiles of some frames are kept, and where their planes are.

    Attributes:
        at: int64 ``[T]``, number of each tile among all tiles of all tensors.
        keep: bool ``[T]``.
        entries: Frame, first and end in the frame's entries of each run of kept tiles.
        masks: The same in the frame's masks.
        num_entries: Entries of the kept tiles.
        num_dense: Mask words of the kept tiles.
    """

    at: np.ndarray
    keep: np.ndarray
    entries: list[tuple[int, int, int]]
    masks: list[tuple[int, int, int]]
    num_entries: int
    num_dense: int


def keep_part(view: StageView, raw: RawFrames) -> Part | None:
    """What a rank needs of some frames, checked, in memory of its own; None where it holds none of their tiles.

    Args:
        view: The rank.
        raw: Frames of one word size.

    Raises:
        FormatError: A position or value breaks the format.
    """
    choice = choose(view, raw)
    if choice is None:
        return None
    entries = np.empty((2 + raw.word_nbytes, choice.num_entries), dtype=np.uint8)
    masks = np.empty((raw.word_nbytes, choice.num_dense), dtype=np.uint8)
    for rows, planes, chosen in ((entries, raw.entries, choice.entries), (masks, raw.masks, choice.masks)):
        if chosen:
            for row, plane in zip(rows, planes, strict=True):
                np.concatenate([plane[f][a:b] for f, a, b in chosen], out=row)
    mine = np.flatnonzero(choice.keep[raw.segment_tile])
    check_planes(entries, masks, raw.counts[mine], raw.segments.words[mine], raw.dense[mine], raw.word_nbytes)
    partly = choice.keep & view.partly[choice.at]
    tile_counts = np.add.reduceat(raw.counts, raw.segments.first)
    changed = int(tile_counts[choice.keep & ~partly].sum())
    if partly.any():
        changed += _num_held(view, raw, choice.at, partly, entries, masks, mine)
    return make_part(view, raw, choice.keep, choice.at, mine, (entries, masks), changed)


def choose(view: StageView, raw: RawFrames) -> Choice | None:
    """The tiles that this rank holds on its device; None where there are none."""
    at = view.first_tile[raw.tensor_ids] + raw.tiles
    keep = view.keep[at]
    if not keep.any():
        return None
    masked = bool(raw.dense.any())
    entries = _spans(raw, keep, np.where(raw.dense, 0, raw.counts) if masked else raw.counts)
    masks = _spans(raw, keep, np.where(raw.dense, raw.segments.words, 0)) if masked else []
    return Choice(at, keep, entries, masks, sum(b - a for _, a, b in entries), sum(b - a for _, a, b in masks))


def _spans(raw: RawFrames, keep: np.ndarray, num: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of kept tiles in the planes of their frames, where ``num`` counts each segment's part."""
    tile = np.add.reduceat(num, raw.segments.first)
    end = np.cumsum(tile)
    other = np.ones(len(keep), dtype=bool)
    other[1:] = raw.frame_of[1:] != raw.frame_of[:-1]
    before = (end - tile)[np.flatnonzero(other)][raw.frame_of]
    first, last = keep.copy(), keep.copy()
    first[1:] &= ~keep[:-1] | other[1:]
    last[:-1] &= ~keep[1:] | other[1:]
    a, b = (end - tile - before)[first], (end - before)[last]
    used = b > a
    return list(zip(raw.frame_of[first][used].tolist(), a[used].tolist(), b[used].tolist(), strict=True))


def _num_held(
    view: StageView,
    raw: RawFrames,
    at: np.ndarray,
    chosen: np.ndarray,
    entries: np.ndarray,
    masks: np.ndarray,
    segments: np.ndarray,
) -> int:
    """Changed words of tiles held in part that this rank holds, one by one.

    A trainer's or an engine's odd cut (TP 3, a padded vocabulary) leaves such tiles; all their entries are staged, since
    the kernel tests bounds anyway, but results count canonical words.
    """
    counts, dense, words = raw.counts[segments], raw.dense[segments], raw.segments.words[segments]
    num, size = np.where(dense, 0, counts), np.where(dense, words, 0)
    entry_at, mask_at = np.cumsum(num) - num, np.cumsum(size) - size
    tile = raw.segment_tile[segments]
    total = 0
    for i in np.flatnonzero(chosen[tile]).tolist():
        if dense[i]:
            position = np.flatnonzero(masks[:, mask_at[i] : mask_at[i] + size[i]].any(axis=0))
        else:
            gap = entries[:2, entry_at[i] : entry_at[i] + num[i]].astype(np.int64)
            position = np.cumsum(gap[0] + 256 * gap[1] + 1) - 1
        where = slice(at[tile[i]], at[tile[i]] + 1)
        coords = spread(view.starts[where], view.extents[where], position + int(raw.segments.base[segments[i]]))
        inside = np.zeros(len(position), dtype=bool)
        for start, stop in view.held[int(raw.tensor_ids[tile[i]])]:
            inside |= np.all([(x >= a) & (x < b) for x, a, b in zip(coords, start, stop, strict=True)], axis=0)
        total += int(inside.sum())
    return total
