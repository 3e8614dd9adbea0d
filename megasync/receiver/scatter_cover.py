"""How many changed words of a tile this rank holds, where it holds the tile only in part.

A trainer's or an engine's odd cut (TP 3, a padded vocabulary) leaves such tiles; all their entries are staged, since the
kernel tests bounds anyway, but results count canonical words. Used by ``scatter_stage``. Must import nothing above leads.
"""

from __future__ import annotations

import numpy as np

from megasync.codecs.sparse_batch import RawFrames
from megasync.receiver.bind import Binding
from megasync.tiles import spread


def num_covered(
    binding: Binding, raw: RawFrames, chosen: np.ndarray, entries: np.ndarray, dense: np.ndarray, segments: np.ndarray
) -> int:
    """Changed words of some tiles that this rank holds.

    Args:
        binding: The rank.
        raw: Frames.
        chosen: bool ``[T]``, the tiles.
        entries: uint8 ``[2 + w, n]``, entries of ``segments``.
        dense: uint8 ``[w, m]``, masks of ``segments``.
        segments: int64, numbers of the segments whose planes these are, ascending.
    """
    counts, is_mask, words = raw.counts[segments], raw.dense[segments], raw.segments.words[segments]
    num, size = np.where(is_mask, 0, counts), np.where(is_mask, words, 0)
    entry_at, mask_at = np.cumsum(num) - num, np.cumsum(size) - size
    tile = raw.segment_tile[segments]
    total = 0
    for i in np.flatnonzero(chosen[tile]).tolist():
        if is_mask[i]:
            mask = dense[:, mask_at[i] : mask_at[i] + size[i]]
            position = np.flatnonzero(mask.any(axis=0))
        else:
            gap = entries[:2, entry_at[i] : entry_at[i] + num[i]].astype(np.int64)
            position = np.cumsum(gap[0] + 256 * gap[1] + 1) - 1
        tensor_id = int(raw.tensor_ids[tile[i]])
        starts, extents = binding.schema.grids[tensor_id].boxes(raw.tiles[tile[i] : tile[i] + 1])
        coords = spread(starts, extents, position + int(raw.segments.base[segments[i]]))
        total += int(_held(binding, tensor_id, coords).sum())
    return total


def _held(binding: Binding, tensor_id: int, coords: list[np.ndarray]) -> np.ndarray:
    """Which canonical words a rank holds, bool ``[n]``."""
    reading = binding.held[tensor_id].reading
    out = np.zeros(len(coords[0]), dtype=bool)
    for r in reading.records:
        scale = reading.units_per_word(r)
        out |= r.inside([*coords[:-1], coords[-1] * scale])
    return out
