"""Changed words as byte planes, the wire form of the sparse codec, and the rules that tie planes to segments.

A tile is walked row-major in segments of 65,536 words, the last one shorter; segments restart at each tile.
``compact`` makes planes, ``scatter`` reads them. Must import nothing of megasync but ``types``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.types import SEGMENT_WORDS

WORD_DTYPES: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Torch dtype to view words of 1, 2, 4 and 8 bytes as (signed where torch's unsigned support is thin: bits only)."""


@dataclass(frozen=True, slots=True)
class Planes:
    """The changed words of consecutive segments of one word size.

    Attributes:
        word_nbytes: 1, 2, 4 or 8.
        counts: int32 ``[S]``, CPU or the planes' device: changed words of each segment, dense ones included.
        entries: uint8 ``[2 + word_nbytes, n]``, rows contiguous (rows may be strided): gap low, gap high, value
            planes 0..w-1 of the sparse segments' changed words, one segment after the other.
        dense: uint8 ``[word_nbytes, m]``, rows contiguous: mask byte planes of the dense segments' words.
    """

    word_nbytes: int
    counts: torch.Tensor
    entries: torch.Tensor
    dense: torch.Tensor


def is_dense(counts: np.ndarray, words: np.ndarray, word_nbytes: int) -> np.ndarray:
    """Which segments the format stores as the mask itself: exactly when ``count * (2 + w) >= words * w``.

    Args:
        counts: Changed words of each segment, any integer dtype.
        words: Words of each segment.
        word_nbytes: 1, 2, 4 or 8.

    Returns:
        bool, of the same shape. A segment without changes is never dense.
    """
    return counts.astype(np.int64) * (2 + word_nbytes) >= np.maximum(words.astype(np.int64), 1) * word_nbytes


def segments_of(tile_words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The segments of tiles.

    Args:
        tile_words: Words of each tile, ``[T]``.

    Returns:
        int64 ``[S]`` each, tile by tile: tile index, number of the segment in its tile, words of the segment.
    """
    tile_words = np.asarray(tile_words, dtype=np.int64)
    num = -(-tile_words // SEGMENT_WORDS)
    tile = np.repeat(np.arange(len(tile_words)), num)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(num) - num, num)
    return tile, number, np.minimum(tile_words[tile] - number * SEGMENT_WORDS, SEGMENT_WORDS)


def words_from_planes(planes: torch.Tensor) -> torch.Tensor:
    """Joins value planes to words.

    Args:
        planes: uint8 ``[w, n]``, w of 1, 2, 4 or 8.

    Returns:
        int64 ``[n]``, zero-extended for w < 8.
    """
    out = planes[0].to(torch.int64)
    for i in range(1, planes.shape[0]):
        out = out | (planes[i].to(torch.int64) << (8 * i))
    return out


def planes_from_words(words: torch.Tensor, word_nbytes: int) -> torch.Tensor:
    """Splits words into value planes; the inverse of `words_from_planes`.

    Args:
        words: int64 ``[n]``; bits above ``word_nbytes`` are dropped.
        word_nbytes: 1, 2, 4 or 8.

    Returns:
        uint8 ``[word_nbytes, n]``, contiguous.
    """
    return torch.stack([((words >> (8 * i)) & 0xFF).to(torch.uint8) for i in range(word_nbytes)])


def expand_reference(planes: Planes, words: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Planes to changed words, in plain torch: the specification of what a decoder reads.

    Args:
        planes: On any device; the result is on the same one.
        words: Words of each segment, ``[S]``.

    Returns:
        int64 ``[n]`` each, ordered by segment and position: segment index, position in the segment, XOR value (never
        0; 8-byte values as signed).

    Raises:
        ValueError: When counts and planes do not agree in length.
    """
    device = planes.entries.device
    w = planes.word_nbytes
    counts = planes.counts.cpu().numpy().astype(np.int64)
    dense = is_dense(counts, words, w)
    sparse_counts = np.where(dense, 0, counts)
    dense_words = np.where(dense, words, 0)
    if len(counts) != len(words) or sparse_counts.sum() != planes.entries.shape[1]:
        raise ValueError(
            f"planes hold {planes.entries.shape[1]} entries of {len(words)} segments, counts say otherwise"
        )
    if dense_words.sum() != planes.dense.shape[1]:
        raise ValueError(f"planes hold {planes.dense.shape[1]} dense words, counts say {dense_words.sum()}")
    segment = torch.from_numpy(np.repeat(np.arange(len(counts)), sparse_counts)).to(device)
    steps = planes.entries[0].to(torch.int64) + (planes.entries[1].to(torch.int64) << 8) + 1
    running = torch.cumsum(steps, 0)
    first = torch.from_numpy((np.cumsum(sparse_counts) - sparse_counts)[sparse_counts > 0]).to(device)
    before = torch.zeros(len(counts), dtype=torch.int64, device=device)
    before[torch.from_numpy(np.nonzero(sparse_counts)[0]).to(device)] = running[first] - steps[first]
    position = running - before[segment] - 1
    value = words_from_planes(planes.entries[2:])
    if not dense.any():
        return segment, position, value
    dense_segment = torch.from_numpy(np.repeat(np.arange(len(counts)), dense_words)).to(device)
    start = np.cumsum(dense_words) - dense_words
    dense_position = torch.arange(len(dense_segment), device=device) - torch.from_numpy(start).to(device)[dense_segment]
    mask = words_from_planes(planes.dense)
    keep = mask != 0
    segment = torch.cat((segment, dense_segment[keep]))
    position = torch.cat((position, dense_position[keep]))
    value = torch.cat((value, mask[keep]))
    order = torch.argsort(segment * SEGMENT_WORDS + position)
    return segment[order], position[order], value[order]


def planes_reference(segment: np.ndarray, position: np.ndarray, value: np.ndarray, words: np.ndarray, w: int) -> Planes:
    """Changed words to planes, in numpy: the specification of what an encoder writes.

    Args:
        segment: Segment index of each changed word, ``[n]``, ascending.
        position: Position in the segment, ``[n]``, strictly ascending inside a segment.
        value: ``<u{w}`` ``[n]``, never 0.
        words: Words of each segment, ``[S]``.
        w: Bytes of a word.

    Returns:
        Planes on the CPU.
    """
    counts = np.bincount(segment, minlength=len(words)).astype(np.int64)
    dense = is_dense(counts, words, w)
    sparse = ~dense[segment]
    first = np.ones(len(segment), dtype=np.bool_)
    first[1:] = segment[1:] != segment[:-1]
    gap = position.astype(np.int64).copy()
    gap[1:] -= np.where(first[1:], 0, position[:-1].astype(np.int64) + 1)
    values = np.ascontiguousarray(value).view(np.uint8).reshape(-1, w).T
    entries = np.empty((2 + w, int(sparse.sum())), dtype=np.uint8)
    entries[0], entries[1] = gap[sparse] & 0xFF, gap[sparse] >> 8
    entries[2:] = values[:, sparse]
    dense_words = np.where(dense, words, 0)
    start = np.cumsum(dense_words) - dense_words
    mask = np.zeros((w, int(dense_words.sum())), dtype=np.uint8)
    mask[:, (start[segment] + position)[~sparse]] = values[:, ~sparse]
    return Planes(w, torch.from_numpy(counts.astype(np.int32)), torch.from_numpy(entries), torch.from_numpy(mask))
