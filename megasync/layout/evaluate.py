"""Runs layouts over whole slices: gather canonical bytes from live storages, XOR canonical masks into them.

A record over a box is a handful of strided views of the storage (`views`), so both directions run at copy
speed on CPU and GPU alike. This is the reference of the dense kernels and what audits and probes use; the sparse path
evaluates `Remap.offsets` per changed word instead. Before it come layouts from `compose` or `probe`; after it state
digests and the content proof. This module must import nothing of megasync but ``errors`` and ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np
import torch

from megasync.errors import PlanError
from megasync.layout.modes import Layout, Remap
from megasync.layout.views import StridedPart, box_offsets, physical_range, strided_parts

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(layout: Layout, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Reads the canonical bytes of the rank's slice back from the live storages.

    Args:
        layout: The layout of one canonical tensor.
        live: uint8 ``[nbytes]`` tensor over each whole storage the layout names, any one device, contiguous.

    Returns:
        uint8 ``[slice_nbytes]``, same device, contiguous: the slice row-major. Words that a partial layout does not
        hold are 0.

    Raises:
        PlanError: A storage is missing or too small.
    """
    device = live[layout.storages[0]].device if layout.records and layout.storages[0] in live else torch.device("cpu")
    held = layout.leading()
    whole = sum(r.num_units / layout.units_per_word(r) for r in held) * layout.word_nbytes >= layout.slice_nbytes
    out = (torch.empty if whole else torch.zeros)(layout.slice_nbytes, dtype=torch.uint8, device=device)
    by_unit: dict[str, list[Remap]] = {}
    for r in held:
        by_unit.setdefault(r.unit, []).append(r)
    for unit, records in by_unit.items():
        words = unpack_nibbles(out) if unit == "nibble" else out.view(_WORDS[layout.word_nbytes])
        for r in records:
            storage = _storage(r, live)
            if unit == "nibble":
                lo, hi = _nibble_bytes(r)
                _move(layout, r, unpack_nibbles(storage[lo:hi]), words, shift=-2 * lo, read=True)
            else:
                _move(layout, r, _as_words(storage, r.word_nbytes), words, shift=0, read=True)
        if unit == "nibble":
            out = pack_nibbles(words)
    return out


def xor_(layout: Layout, live: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
    """XORs a canonical mask of the rank's slice into the live storages, copies included.

    Args:
        layout: The layout of one canonical tensor.
        live: uint8 ``[nbytes]`` tensor over each whole storage the layout names, written in place, contiguous.
        mask: uint8 ``[slice_nbytes]``, same device, contiguous: ``old XOR new`` of the slice, row-major.

    Raises:
        ValueError: The mask has another size than the slice.
        PlanError: A storage is missing or too small; nothing was written.
    """
    if mask.dtype != torch.uint8 or mask.numel() != layout.slice_nbytes:
        raise ValueError(f"the mask has {mask.numel()} {mask.dtype} values, the slice {layout.slice_nbytes} bytes")
    storages = [_storage(r, live) for r in layout.records]
    flat = mask.reshape(-1)
    if flat.storage_offset() % layout.word_nbytes:
        flat = flat.clone()
    for r, storage in zip(layout.records, storages, strict=True):
        if r.unit == "nibble":
            lo, hi = _nibble_bytes(r)
            spread = torch.zeros(2 * (hi - lo), dtype=torch.uint8, device=storage.device)
            _move(layout, r, spread, unpack_nibbles(flat), shift=-2 * lo, read=False)
            storage[lo:hi].bitwise_xor_(pack_nibbles(spread))
        else:
            words = flat.contiguous().view(_WORDS[layout.word_nbytes])
            _move(layout, r, _as_words(storage, r.word_nbytes), words, shift=0, read=False)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Spreads bytes over nibbles, low nibble first.

    Args:
        packed: uint8 ``[n]``, any device.

    Returns:
        uint8 ``[2 n]`` of values below 16, same device.
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(-1)


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Joins nibbles to bytes, low nibble first.

    Args:
        nibbles: uint8 ``[2 n]`` of values below 16, any device.

    Returns:
        uint8 ``[n]``, same device.
    """
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _move(layout: Layout, r: Remap, live: torch.Tensor, canonical: torch.Tensor, *, shift: int, read: bool) -> None:
    """Copies live units to canonical ones (read), or XORs canonical units into live ones."""
    parts = strided_parts(layout, r)
    if parts is None or any(t < 0 for p in parts for t in p.live_strides):
        _move_by_index(layout, r, live, canonical, shift=shift, read=read)
        return
    for p in parts:
        wide = _widened(p, live, canonical, shift) if r.unit == "word" else 1
        q, far, near = (
            (p, live, canonical) if wide == 1 else (_scaled(p, wide), _wide(live, wide), _wide(canonical, wide))
        )
        here = far.as_strided(q.extents, q.live_strides, far.storage_offset() + q.live_offset + shift)
        there = near.as_strided(q.extents, q.slice_strides, near.storage_offset() + q.slice_offset)
        if read:
            there.copy_(here)
        else:
            here.bitwise_xor_(there)


def _widened(p: StridedPart, live: torch.Tensor, canonical: torch.Tensor, shift: int) -> int:
    """How many words of a part can be moved as one: words that are neighbours on both sides, aligned throughout."""
    runs = [n for n, s, t in zip(p.extents, p.slice_strides, p.live_strides, strict=True) if s == t == 1]
    if not runs:
        return 1
    others = [
        x
        for n, s, t in zip(p.extents, p.slice_strides, p.live_strides, strict=True)
        if (s, t) != (1, 1)
        for x in (s, t)
    ]
    offsets = [p.slice_offset, p.live_offset, shift, live.storage_offset(), canonical.storage_offset()]
    return gcd(8 // live.element_size(), runs[0], *others, *offsets)


def _scaled(p: StridedPart, wide: int) -> StridedPart:
    """The part in words ``wide`` times as large."""
    extents = tuple(
        n // wide if s == t == 1 else n for n, s, t in zip(p.extents, p.slice_strides, p.live_strides, strict=True)
    )
    return StridedPart(
        extents,
        p.slice_offset // wide,
        tuple(max(s // wide, 1) for s in p.slice_strides),
        p.live_offset // wide,
        tuple(max(t // wide, 1) for t in p.live_strides),
    )


def _wide(words: torch.Tensor, wide: int) -> torch.Tensor:
    return words[: words.numel() // wide * wide].view(_WORDS[words.element_size() * wide])


def _move_by_index(
    layout: Layout, r: Remap, live: torch.Tensor, canonical: torch.Tensor, *, shift: int, read: bool
) -> None:
    scale = layout.units_per_word(r)
    low = (*layout.start[:-1], layout.start[-1] * scale)
    extents = (*layout.slice_shape[:-1], layout.slice_shape[-1] * scale)
    for coords, offsets in box_offsets(r):
        flat = np.ravel_multi_index([c - o for c, o in zip(coords, low, strict=True)], extents)
        there = torch.from_numpy(flat).to(live.device)
        here = torch.from_numpy(offsets + shift).to(live.device)
        if read:
            canonical[there] = live[here]
        else:
            live[here] = live[here] ^ canonical[there]


def _storage(record: Remap, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The storage of a record, checked to hold all of its offsets."""
    storage = live.get(record.storage)
    if storage is None:
        raise PlanError(f"the layout needs live storage {record.storage!r}; given are {sorted(live)[:8]}")
    if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
        raise ValueError(f"live storage {record.storage!r} must be a contiguous uint8 vector, got {storage.dtype}")
    low, high = physical_range(record)
    size = storage.numel() * 2 if record.unit == "nibble" else storage.numel() // record.word_nbytes
    if low < 0 or high >= size:
        raise PlanError(
            f"the layout reaches offsets {low}..{high} of live storage {record.storage!r}, which has {size} "
            f"{record.unit}s; the engine's tensor is not the one that the layout was made for"
        )
    return storage


def _as_words(storage: torch.Tensor, word_nbytes: int) -> torch.Tensor:
    return storage[: storage.numel() // word_nbytes * word_nbytes].view(_WORDS[word_nbytes])


def _nibble_bytes(record: Remap) -> tuple[int, int]:
    """The byte range of a storage that a nibble record reaches."""
    low, high = physical_range(record)
    return low // 2, high // 2 + 1
