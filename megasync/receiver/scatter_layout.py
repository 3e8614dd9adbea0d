"""The layouts of a binding as the GPU kernels read them: packed once, used by every apply, audit and check.

One pack a word size has every place of every word; primaries enter its digest sums. Words that lead here though their
primary is on another rank, and copies that must equal what leads, have small packs of their own, whose sums are kept apart.
Tensors in host memory (canonical shadows beside a GPU) are left to the CPU backend. Comes after bind. Must import nothing
above leads but kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch

from megasync.kernels.records import PackedRecords, RecordLike, pack_records
from megasync.kernels.scatter_plan import TILE_HEAD
from megasync.layout.modes import Remap
from megasync.receiver.bind import Binding
from megasync.receiver.leads import Held, clip
from megasync.receiver.scatter_view import StageView, WordView
from megasync.tiles import TileGrid
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class WordLayout:
    """All tensors of one word size on a device.

    Attributes:
        word_nbytes: Canonical word size.
        ids: int64 ``[n]``, schema ids, ascending: tensor ``i`` of the packs is ``ids[i]``.
        places: Every place of every word; primaries enter digest sums.
        replicas: Words that lead here and are no primaries, None where there are none.
        copies: For the first, second ... copy of each tensor: the copy, and what leads in its box.
    """

    word_nbytes: int
    ids: np.ndarray
    places: PackedRecords
    replicas: PackedRecords | None
    copies: tuple[tuple[PackedRecords, PackedRecords], ...]


@dataclass(frozen=True)
class DeviceLayout:
    """What the kernels need to know of one engine rank.

    Attributes:
        binding: The rank.
        device: Where its weights live.
        words: By word size.
        row: int32 ``[num_tensors]``, row of each tensor in the packs of its word size; -1 where it is not on the device.
        host_ids: Tensors in host memory beside a GPU, ascending.
    """

    binding: Binding
    device: torch.device
    words: dict[int, WordLayout]
    row: np.ndarray
    host_ids: tuple[int, ...]

    @cached_property
    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and extents of all tiles of all tensors in id order, int32 ``[num_tiles, ndim]``; short shapes are padded
        with leading axes of extent 1."""
        ndim = max((x.places.num_axes for x in self.words.values()), default=1)
        of: dict[TileGrid, tuple[np.ndarray, np.ndarray]] = {}
        for grid in set(self.binding.schema.grids):
            starts, extents = grid.boxes(np.arange(grid.num_tiles))
            pad = ((0, 0), (max(ndim - starts.shape[1], 0), 0))
            of[grid] = (
                np.pad(starts, pad)[:, -ndim:].astype(np.int32),
                np.pad(extents, pad, constant_values=1)[:, -ndim:].astype(np.int32),
            )
        both = [of[g] for g in self.binding.schema.grids]
        return np.concatenate([b[0] for b in both]), np.concatenate([b[1] for b in both])

    @cached_property
    def partly(self) -> np.ndarray:
        """Tiles of which this rank holds only some words, bool ``[num_tiles]`` over all tiles in id order."""
        schema = self.binding.schema
        starts, extents = self.boxes
        low = np.zeros((len(schema.tensors), starts.shape[1]), dtype=np.int64)
        high = np.zeros_like(low)
        for i, held in self.binding.held.items():
            if not held.reading.partial:
                n = len(held.layout.start)
                low[i, -n:], high[i, -n:], high[i, :-n] = held.layout.start, held.layout.stop, 1
        num = np.diff(schema.first_tile)
        low, high = np.repeat(low, num, axis=0), np.repeat(high, num, axis=0)
        return ((starts < low) | (starts + extents > high)).any(axis=1)

    @cached_property
    def view(self) -> StageView:
        """What staging needs, as plain arrays."""
        schema = self.binding.schema
        num = np.diff(schema.first_tile)
        ids = np.repeat(np.arange(len(schema.tensors)), num)
        tiles = np.arange(int(schema.first_tile[-1])) - schema.first_tile[ids]
        keep = self.binding.needs(ids, tiles) & (self.row[ids] >= 0)
        partly = self.partly & keep
        return StageView(
            schema.first_tile,
            schema.tile_words(ids, tiles),
            keep,
            partly,
            *self.boxes,
            self.row,
            {w: _word_view(x) for w, x in self.words.items()},
            TILE_HEAD,
            self.device.type == "cpu",
            {i: self._held_boxes(i) for i in np.unique(ids[partly]).tolist()},
        )

    def _held_boxes(self, tensor_id: int) -> np.ndarray:
        """Boxes of a tensor's leading records, in words, padded like ``boxes``."""
        reading = self.binding.held[tensor_id].reading
        ndim = self.boxes[0].shape[1]
        out = np.zeros((len(reading.records), 2, ndim), dtype=np.int64)
        out[:, 1] = 1
        for box, r in zip(out, reading.records, strict=True):
            scale = reading.units_per_word(r)
            for side, x in zip(box, (r.start, r.stop), strict=True):
                side[ndim - len(x) :] = (*x[:-1], x[-1] // scale)
        return out

    @cached_property
    def share(self) -> dict[int, float]:
        """Of the canonical bytes of the tensors of each word size, how much this rank holds."""
        schema, held = self.binding.schema, self.binding.held
        return {
            w: sum(held[i].layout.slice_nbytes for i in x.ids.tolist())
            / max(sum(schema.tensors[i].nbytes for i in x.ids.tolist()), 1)
            for w, x in self.words.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all record tables on the device."""
        packs = [p for x in self.words.values() for p in packs_of(x)]
        return sum(g.table.numel() * 8 for p in packs for g in p.groups)


def _word_view(words: WordLayout) -> WordView:
    rows = np.arange(len(words.ids))
    groups = tuple(
        tuple(
            np.stack([np.searchsorted(g.owners, rows, side=s) for s in ("left", "right")]).astype(np.int32)  # type: ignore[call-overload]
            for g in pack.groups
        )
        for pack in packs_of(words)
    )
    return WordView(words.places.num_axes, len(words.ids), groups)


def packs_of(words: WordLayout) -> list[PackedRecords]:
    """All packs of a word size."""
    return [p for p in (words.places, words.replicas, *(q for pair in words.copies for q in pair)) if p is not None]


def device_layout(binding: Binding, device: torch.device) -> DeviceLayout:
    """Pack the layouts of a binding; made once and kept with it.

    Args:
        binding: The rank.
        device: Where its weights live; tensors in host memory are left out unless this is the CPU.

    Raises:
        ValueError: A tensor lies on another device or on several, or storage that the kernels cannot address.
    """
    key = f"layout on {device}"
    found = binding.made.get(key)
    if not isinstance(found, DeviceLayout):
        found = binding.made[key] = _pack(binding, device, binding.held)
    return found


def some_layout(binding: Binding, device: torch.device, ids: Iterable[int]) -> DeviceLayout:
    """Like ``device_layout`` for some tensors only, made anew."""
    return _pack(binding, device, {i: binding.held[i] for i in ids})


def _pack(binding: Binding, device: torch.device, held: dict[int, Held]) -> DeviceLayout:
    schema = binding.schema
    by_size: dict[int, list[int]] = {}
    host: list[int] = []
    for i in sorted(held):
        found = {binding.storages[r.storage].device for r in held[i].layout.records}
        if found == {device}:
            by_size.setdefault(held[i].layout.word_nbytes, []).append(i)
        elif {d.type for d in found} == {"cpu"}:
            host.append(i)
        else:
            raise ValueError(
                f"{schema.tensors[i].name} lies on {sorted(map(str, found))}: one engine rank writes one GPU, {device}, and "
                "keeps all copies of a tensor on it"
            )
    row = np.full(len(schema.tensors), -1, dtype=np.int32)
    storages = {n: s for n, s in binding.storages.items() if s.device == device}
    words = {}
    for w, ids in sorted(by_size.items()):
        row[ids] = np.arange(len(ids))
        words[w] = _pack_words(w, ids, [held[i] for i in ids], storages)
    return DeviceLayout(binding, device, words, row, tuple(host))


def _pack_words(w: int, ids: list[int], held: list[Held], storages: dict[str, torch.Tensor]) -> WordLayout:
    shapes = [h.layout.shape for h in held]

    def pack(records: list[list[Remap]], digest: str = "primary") -> PackedRecords:
        names = {r.storage for one in records for r in one}
        mine = {n: s for n, s in storages.items() if n in names}
        return pack_records(w, shapes, cast("list[list[RecordLike]]", records), mine, digest=digest)

    replicas = [[r for r, ok in zip(h.layout.records, h.lead, strict=True) if ok and not r.primary] for h in held]
    copies = []
    for k in range(max((len(h.copies) for h in held), default=0)):
        mine = [list(h.copies[k : k + 1]) for h in held]
        copies.append((pack(mine, "copies"), pack([_leading(h, one) for h, one in zip(held, mine, strict=True)])))
    return WordLayout(
        w,
        np.array(ids, dtype=np.int64),
        pack([list(h.layout.records) for h in held]),
        pack(replicas, "copies") if any(replicas) else None,
        tuple(copies),
    )


def _leading(held: Held, copy: list[Remap]) -> list[Remap]:
    """What leads in the box of a copy, all as primaries."""
    if not copy:
        return []
    scale = held.layout.units_per_word(copy[0])
    start = (*copy[0].start[:-1], copy[0].start[-1] // scale)
    stop = (*copy[0].stop[:-1], copy[0].stop[-1] // scale)
    part = clip(held.reading, Box(start, tuple(b - a for a, b in zip(start, stop, strict=True))))
    return [replace(r, primary=True) for r in part.records] if part is not None else []
