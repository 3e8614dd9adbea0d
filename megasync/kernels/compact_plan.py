"""Tables of the compaction: pieces of live rows beside their snapshot bytes. Host work, done once while addresses stay.

Comes after the ownership plan (regions) and ``compact_runs``, before ``compact``. Must import nothing of megasync but
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megasync.kernels.compact_runs import RUN_COLUMNS, Region, in_order, pieces_of, runs_of
from megasync.kernels.planes import segments_of
from megasync.kernels.scatter_plan import Tiles


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive segments handled together.

    Attributes:
        segments: First segment and end.
        pieces: First piece and end.
        vectors: First vector and end, counting those of all pieces.
    """

    segments: tuple[int, int]
    pieces: tuple[int, int]
    vectors: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """What a staging slot holds while a span is compared (see ``compact_feed``).

    Attributes:
        up: First snapshot byte, end, and place in the slot of each run that is copied up; short gaps are copied along.
        down: The same of what the pieces of the span cover, and nothing else.
        offsets: int64 ``[P]`` on the device, place of vector 0 of each piece, relative to the slot (may be negative).
        nbytes: Bytes of the slot.
    """

    up: tuple[tuple[int, int, int], ...]
    down: tuple[tuple[int, int, int], ...]
    offsets: torch.Tensor
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CompactPlan:
    """The compaction of some tiles of one word size.

    Attributes:
        word_nbytes: 1, 2, 4 or 8.
        num_tensors: Tensors; lanes have as many rows.
        tiles: The tiles; planes have their segments in this order.
        segment_words: int64 ``[S]``, words of each whole segment.
        regions: As given; they hold the live tensors.
        canonical: int64 ``[num_tensors, A]``, canonical shapes.
        rows: int64 ``[P, PIECE_COLUMNS]`` on the host, by segment and position.
        vector_nbytes: int64 ``[P]``, bytes of a vector of each piece.
        table: ``rows`` on the device.
        first_piece: int64 ``[S + 1]`` on the host: pieces before each segment.
        first_piece_table: int32, the same on the device.
        segment_words_table: int64 ``[S]``, ``segment_words`` on the device.
        classes: For each vector size that occurs: the size, the pieces (int32, ascending) on the host and on the
            device.
        device: Where the live words are.
        snapshot_nbytes: Bytes that the snapshot must have at least.
        nbytes: Live bytes compared.
        packings: Kept by ``compact_feed``.
        rooms: Entries that each span has room for next time, kept by ``compact_launch``.
    """

    word_nbytes: int
    num_tensors: int
    tiles: Tiles
    segment_words: np.ndarray
    regions: tuple[Region, ...]
    canonical: np.ndarray
    rows: np.ndarray
    vector_nbytes: np.ndarray
    table: torch.Tensor
    first_piece: np.ndarray
    first_piece_table: torch.Tensor
    segment_words_table: torch.Tensor
    classes: tuple[tuple[int, np.ndarray, torch.Tensor], ...]
    device: torch.device
    snapshot_nbytes: int
    nbytes: int
    packings: dict[Span, Packing] = field(default_factory=dict, repr=False)
    rooms: dict[Span, int] = field(default_factory=dict, repr=False)
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict, repr=False)

    def spans(self, max_nbytes: int) -> tuple[Span, ...]:
        """Cuts the plan into spans of whole segments of about ``max_nbytes`` live bytes (at least one segment each).

        Vectors count as 8 bytes: the scratch of a span is a quarter of ``max_nbytes`` whatever their size. The cut is
        kept, since it costs more than a span takes.
        """
        if max_nbytes not in self._spans:
            self._spans[max_nbytes] = tuple(self._cut(max_nbytes))
        return self._spans[max_nbytes]

    def _cut(self, max_nbytes: int) -> Iterator[Span]:
        vectors = np.append(self.rows[:, 14], self.rows[:, 6].sum())
        ends = vectors[self.first_piece] * 8
        begin = 0
        while begin < len(self.segment_words):
            end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + max_nbytes, side="right")) - 1)
            pieces = (int(self.first_piece[begin]), int(self.first_piece[end]))
            yield Span((begin, end), pieces, (int(vectors[pieces[0]]), int(vectors[pieces[1]])))
            begin = end


def plan_compact(
    word_nbytes: int, shapes: Sequence[Sequence[int]], tiles: Tiles, regions: Sequence[Region], snapshot_nbytes: int
) -> CompactPlan:
    """Makes the tables of a compaction.

    Args:
        word_nbytes: 1, 2, 4 or 8.
        shapes: Canonical shape of each tensor, in words; ``()`` is a scalar.
        tiles: The tiles; a tile may be listed twice, with regions that do not meet.
        regions: All regions, in any order; together they may cover a tile or only a part of it.
        snapshot_nbytes: Bytes of the snapshot.

    Returns:
        The plan, valid while the live tensors stay where they are (it holds them).

    Raises:
        ValueError: When a region leaves its tile or the snapshot, or live words have another size or device.
    """
    axes = tiles.starts.shape[1]
    canonical = np.ones((len(shapes), axes), dtype=np.int64)
    for i, shape in enumerate(shapes):
        canonical[i, axes - len(shape) :] = shape
    devices = {r.live.device for r in regions}
    if len(devices) > 1:
        raise ValueError(f"live words are on several devices: {sorted(map(str, devices))}; make one plan for each")
    found = [np.empty((0, RUN_COLUMNS), dtype=np.int64)]
    for region in regions:
        _check_region(word_nbytes, tiles, region, snapshot_nbytes)
        corner, extent = tiles.starts[region.tile].tolist(), tiles.extents[region.tile].tolist()
        found.append(runs_of(canonical[tiles.tensors[region.tile]].tolist(), corner, extent, region))
    tile_of, _, segment_words = segments_of(tiles.words)
    first_segment = np.searchsorted(tile_of, np.arange(len(tiles.tensors)))
    runs = in_order(np.concatenate(found), word_nbytes)
    table, vector_nbytes = pieces_of(runs, word_nbytes, tiles.tensors, first_segment)
    table[:, 14] = np.cumsum(table[:, 6]) - table[:, 6]
    first = np.searchsorted(table[:, 13], np.arange(len(segment_words) + 1))
    device = devices.pop() if devices else torch.device("cpu")
    classes = [(v, np.nonzero(vector_nbytes == v)[0].astype(np.int32)) for v in np.unique(vector_nbytes).tolist()]
    return CompactPlan(
        word_nbytes,
        len(shapes),
        tiles,
        segment_words,
        tuple(regions),
        canonical,
        table,
        vector_nbytes,
        torch.from_numpy(table).to(device),
        first,
        torch.from_numpy(first.astype(np.int32)).to(device),
        torch.from_numpy(segment_words).to(device),
        tuple((v, ids, torch.from_numpy(ids).to(device)) for v, ids in classes),
        device,
        int((table[:, 7] + (table[:, 5] + table[:, 6]) * vector_nbytes).max(initial=0)),
        int((table[:, 6] * vector_nbytes).sum()),
    )


def _check_region(w: int, tiles: Tiles, region: Region, snapshot_nbytes: int) -> None:
    """Refuses a region that leaves its tile or the snapshot, or whose words have another size.

    Raises:
        ValueError: See above.
    """
    if region.live.element_size() != w:
        raise ValueError(f"region of tile {region.tile} has {region.live.element_size()}-byte words, the plan {w}")
    if not 0 <= region.tile < len(tiles.tensors):
        raise ValueError(f"region names tile {region.tile} of {len(tiles.tensors)}")
    end = region.snapshot_offset + region.live.numel() * w
    if region.snapshot_offset < 0 or region.snapshot_offset % w or end > snapshot_nbytes:
        raise ValueError(
            f"region of tile {region.tile} takes snapshot bytes {region.snapshot_offset} to {end} of "
            f"{snapshot_nbytes}, on multiples of {w}"
        )
    start, extent = tiles.starts[region.tile], tiles.extents[region.tile]
    pad = len(start) - len(region.start)
    low = np.concatenate((np.zeros(pad, dtype=np.int64), region.start)) - start
    size = np.concatenate((np.ones(pad, dtype=np.int64), region.live.shape))
    if len(region.start) != region.live.dim() or (low < 0).any() or (low + size > extent).any():
        raise ValueError(
            f"region {region.start} + {tuple(region.live.shape)} leaves tile {region.tile}: {start} + {extent}"
        )
