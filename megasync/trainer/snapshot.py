"""The snapshot: the bytes of the newest version that an owner keeps for its tiles.

Third stop of the flow (plan -> snapshot -> mask -> encode -> gather -> publish). It is seeded from version 0 or rebuilt
from the head's version, never from the trainer's values; the mask stage advances it tentatively, and a withdrawn
version is XORed back out of it. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from megasync.digest import box_lanes
from megasync.errors import MemoryPlanError
from megasync.schema import Schema
from megasync.tiles import spread
from megasync.trainer.regions import Region
from megasync.types import WORD_DTYPES, Box, Entries, Lanes

_ALIGN = 16

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Torch dtype that words of 1, 2, 4 and 8 bytes are viewed as: bits only."""


class Snapshot:
    """Bytes of every owned region, row-major, one after the other in one arena.

    *Memory*: owns the arena; only this class and the mask stage write to it.

    Args:
        schema: The run's schema.
        regions: Owned regions in (tensor id, tile) order.
        allocate: Makes the arena (uint8, contiguous) of a number of bytes; host memory by default.

    Raises:
        MemoryPlanError: The arena cannot be had, with the bytes needed.
    """

    def __init__(
        self, schema: Schema, regions: Sequence[Region], allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.schema = schema
        self.regions = tuple(regions)
        sizes = np.array([r.box.num_words * schema.tensors[r.tensor_id].word_nbytes for r in self.regions], np.int64)
        padded = -(-sizes // _ALIGN) * _ALIGN
        self.offsets = np.cumsum(padded) - padded
        self.nbytes = int(padded.sum())
        try:
            self.arena = (allocate or _host)(self.nbytes)
        except (RuntimeError, MemoryError) as e:
            raise MemoryPlanError(
                f"snapshot of {self.nbytes / 1e9:.2f} GB for {len(self.regions)} regions does not fit: {e}"
            ) from e
        self._of_tile: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, r in enumerate(self.regions):
            self._of_tile[r.tensor_id, r.tile].append(i)

    def word_nbytes(self, i: int) -> int:
        """Bytes of a word of region ``i``."""
        return self.schema.tensors[self.regions[i].tensor_id].word_nbytes

    def words(self, i: int) -> np.ndarray:
        """Words of region ``i`` (``<u{w}``, 1-D): a writable view of a host arena, a copy of a device's."""
        return self._bytes(i).cpu().numpy().view(WORD_DTYPES[self.word_nbytes(i)])

    @cached_property
    def host_views(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of every region the words kept (1-D) and the live ones (shape and strides of the box), all on the host.

        Making views costs as much as comparing a small tile, so they are made once: neither memory ever moves.
        """
        return [(self.words(i), words_of(r.data)) for i, r in enumerate(self.regions)]

    @cached_property
    def host_units(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Of every region the words kept and the live ones as 8-byte units (``<u8``), views, as ``host_views``.

        Zeros fill up the last unit of those kept. Live ones are None where words do not lie together or fill whole units:
        ``versions.changes.units_of`` copies those.
        """
        out: list[tuple[np.ndarray, np.ndarray | None]] = []
        for i, (kept, live) in enumerate(self.host_views):
            start = int(self.offsets[i])
            padded = self.arena[start : start - kept.nbytes // -8 * 8].numpy()
            padded[kept.nbytes :] = 0  # nothing else uses what lies between regions
            together = live.flags.c_contiguous and live.nbytes % 8 == 0
            out.append((padded.view("<u8"), live.reshape(-1).view("<u8") if together else None))
        return out

    def tensor(self, i: int) -> torch.Tensor:
        """Words of region ``i`` where the arena is: an integer dtype of the word size, shape of the box."""
        return self._bytes(i).view(SAME_SIZE[self.word_nbytes(i)]).view(self.regions[i].box.extent)

    def _bytes(self, i: int) -> torch.Tensor:
        start = int(self.offsets[i])
        return self.arena[start : start + self.regions[i].box.num_words * self.word_nbytes(i)]

    def fill(self, read: Callable[[str, Box], np.ndarray]) -> None:
        """Seed every region.

        Args:
            read: Gives the words of a box of a canonical tensor by name.
        """
        for i, region in enumerate(self.regions):
            self._write(i, read(self.schema.tensors[region.tensor_id].name, region.box).reshape(-1))

    def _write(self, i: int, words: np.ndarray) -> None:
        self.words(i)[:] = words

    def fill_live(self) -> None:
        """Seed every region from the live weights, wherever they are."""
        for i, region in enumerate(self.regions):
            self.tensor(i).copy_(region.data.detach().view(SAME_SIZE[self.word_nbytes(i)]))

    def clear(self) -> None:
        """All bytes to zero, the base of anchors."""
        self.arena.zero_()

    def xor_(self, entries: Entries) -> None:
        """XOR the entries that fall in owned regions into the snapshot; others are passed over."""
        for i, index, values in self.places(entries):
            self.words(i)[index] ^= values

    def places(self, entries: Entries) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The entries that fall in owned regions: region, word index in it (int64), values."""
        stops = np.cumsum(entries.counts, dtype=np.int64)
        for t in range(len(entries.tiles)):
            key = int(entries.tensor_ids[t]), int(entries.tiles[t])
            if key not in self._of_tile:
                continue
            span = slice(int(stops[t]) - int(entries.counts[t]), int(stops[t]))
            position, values = entries.positions[span], entries.values[span]
            for i in self._of_tile[key]:
                inside, index = to_region(self.schema, self.regions[i], position)
                yield i, index, values if inside is None else values[inside]

    def lanes(self) -> Iterator[tuple[int, Lanes]]:
        """Tensor id and digest sum of each region."""
        for i, region in enumerate(self.regions):
            shape = self.schema.grids[region.tensor_id].shape
            yield region.tensor_id, box_lanes(shape, region.box, self.words(i))


def words_of(data: torch.Tensor) -> np.ndarray:
    """Words of a tensor as ``<u{w}``, with its shape: a view with its strides on the CPU, a copy from a device."""
    same = SAME_SIZE[data.element_size()]
    return data.detach().cpu().view(same).numpy().view(WORD_DTYPES[data.element_size()])


def _host(nbytes: int) -> torch.Tensor:
    # numpy asks for huge pages where torch does not: fewer faults, and fewer walks of the page table in every pass.
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


def to_tile(schema: Schema, region: Region, index: np.ndarray) -> np.ndarray:
    """Word index in the tile (int64) of words given by their index in the region."""
    if region.whole:
        return index
    tile = schema.grids[region.tensor_id].box(region.tile)
    start = np.array([[a - b for a, b in zip(region.box.start, tile.start, strict=True)]])
    coords = spread(start, np.array([region.box.extent]), index)
    flat = coords[0]
    for extent, x in zip(tile.extent[1:], coords[1:], strict=True):
        flat = flat * extent + x
    return flat


def to_region(schema: Schema, region: Region, position: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Index in the region of words given by their position in the tile.

    Returns:
        Which words are inside (None: all), and the region index of those.
    """
    if region.whole:
        return None, position.astype(np.int64)
    tile = schema.grids[region.tensor_id].box(region.tile)
    coords = spread(np.array([tile.start]), np.array([tile.extent]), position)
    inside = np.ones(len(position), dtype=bool)
    for x, start, extent in zip(coords, region.box.start, region.box.extent, strict=True):
        inside &= (x >= start) & (x < start + extent)
    flat = np.zeros(int(inside.sum()), dtype=np.int64)
    for x, start, extent in zip(coords, region.box.start, region.box.extent, strict=True):
        flat = flat * extent + x[inside] - start
    return inside, flat
