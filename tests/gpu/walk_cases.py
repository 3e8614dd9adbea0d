"""Inputs and oracle of the tests of audit and dense XOR. Like ``kernel_cases``, nothing here calls what it tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.digest import WordWeights
from megasync.kernels.records import PackedRecords, pack_records
from megasync.kernels.scatter_plan import Tiles
from megasync.tiles import make_grid
from megasync.types import Lanes
from tests.gpu.kernel_cases import LiveTensor, ScatterCase, layouts, live_storages, random_words, remap


def aligned_layouts(w: int) -> tuple[list[LiveTensor], dict[str, int]]:
    """Layouts that stream: rows of whole 16-byte groups, interleaves, swizzles, slices and stacks."""
    c = 256 // w
    tensors = [
        LiveTensor(
            (70, c), [remap((70, c), (0, 0), (70, c), [(0, 0, 1, c), (1, 0, 1, 1)], base=16, storage="rows", w=w)]
        ),
        LiveTensor(
            (70, c),
            [
                remap(
                    (70, c),
                    (0, c // 4),
                    (70, c // 2),
                    [(0, 0, 1, c // 4), (1, 0, 1, 1)],
                    base=20_000,
                    storage="rows",
                    w=w,
                )
            ],
        ),
        LiveTensor(  # interleave of 16 rows
            (3, 64, c),
            [
                remap(
                    (3, 64, c),
                    (1, 0, 0),
                    (3, 64, c),
                    [(0, 16, 1, c), (0, 0, 16, 32 * c), (1, 0, 1, 1)],
                    merge=((0, 1), (2,)),
                    base=16 * c,
                    storage="interleaved",
                    w=w,
                )
            ],
        ),
        LiveTensor(  # 128x4 swizzle with a ragged last block
            (160, c),
            [
                remap(
                    (160, c),
                    (0, 0),
                    (160, c),
                    [(0, 32, 1, 16), (0, 4, 32, 4), (0, 0, 128, 128 * c), (1, 4, 1, 1), (1, 0, 4, 512)],
                    storage="swizzled16",
                    w=w,
                ),
                remap((160, c), (0, 0), (160, c), [(0, 0, 1, c), (1, 0, 1, 1)], storage="plain", primary=False, w=w),
            ],
        ),
        LiveTensor((4096,), [remap((4096,), (16,), (4096,), [(0, 0, 1, 1)], storage="plain", base=41_008, w=w)]),
    ]
    sizes = {"rows": 40_000, "interleaved": 17_000 + 300 * c, "swizzled16": 256 * c, "plain": 50_000}
    return tensors, sizes


@dataclass
class WalkCase:
    """Live weights in many layouts, with decoded masks of all tiles."""

    w: int
    tensors: list[LiveTensor]
    storages: dict[str, torch.Tensor]
    records: PackedRecords
    tiles: Tiles
    tile_ids: list[tuple[int, int]]
    offsets: np.ndarray
    mask: torch.Tensor


def walk_case(w: int, density: float, seed: int, device: str = "cpu", tiny: bool = False) -> WalkCase:
    """Aligned and odd layouts; ``tiny`` leaves out the odd ones."""
    rng = np.random.default_rng(seed)
    tensors, sizes = aligned_layouts(w)
    if not tiny:
        more, more_sizes = layouts(w, rng)
        tensors, sizes = tensors + more, {**more_sizes, **sizes}
    storages = live_storages(sizes, w, rng, device)
    records = pack_records(w, [t.shape for t in tensors], [t.records for t in tensors], storages)
    ids, starts, extents, offsets, masks = [], [], [], [], []
    at = 0
    for t, tensor in enumerate(tensors):
        grid = make_grid(tensor.shape, w)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            n = box.num_words
            ids.append((t, tile))
            starts.append([0] * (3 - len(box.start)) + list(box.start))
            extents.append([1] * (3 - len(box.start)) + list(box.extent))
            offsets.append(at)
            mask = np.where(rng.random(n) < density, random_words(n, w, rng), 0).astype(f"<u{w}").view(np.uint8)
            masks.append(np.pad(mask, (0, -len(mask) % 16)))
            at += len(masks[-1])
    tiles = Tiles(np.array([t for t, _ in ids]), np.array(starts), np.array(extents))
    mask = torch.from_numpy(np.concatenate(masks)).to(device)
    return WalkCase(w, tensors, storages, records, tiles, ids, np.array(offsets), mask)


def audit_oracle(case: WalkCase) -> list[Lanes]:
    """Sums of every canonical word that primary records hold."""
    out = []
    for tensor in case.tensors:
        total = Lanes()
        shape = tensor.shape or (1,)
        for r in tensor.records:
            if not r.primary:
                continue
            scale = r.shape[-1] // shape[-1]
            stop = (*r.stop[:-1], r.stop[-1] // scale)
            box = [np.arange(a, b) for a, b in zip((*r.start[:-1], r.start[-1] // scale), stop, strict=True)]
            coords = [x.ravel() for x in np.meshgrid(*box, indexing="ij")]
            flat = np.ravel_multi_index(tuple(coords), shape)
            live = case.storages[r.storage].cpu().numpy()
            if r.unit == "nibble":
                words = np.zeros(len(flat), dtype=f"<u{case.w}")
                for j in range(scale):
                    _, offset = r.offsets([*coords[:-1], coords[-1] * scale + j])
                    nibble = live[offset >> 1] >> ((offset & 1) * 4).astype(np.uint8) & 15
                    words |= nibble.astype(words.dtype) << np.array(4 * j, dtype=words.dtype)
            else:
                words = live.view(f"<u{case.w}")[r.offsets(coords)[1]]
            total = total + WordWeights.of(flat, case.w).lanes(words)
        out.append(total)
    return out


def dense_as_scatter(case: WalkCase) -> ScatterCase:
    """The masks as changed words, for the scatter's oracle."""
    words, values = [], []
    flat = case.mask.cpu().numpy()
    for offset, n in zip(case.offsets, case.tiles.words, strict=True):
        mask = flat[offset : offset + n * case.w].view(f"<u{case.w}")
        words.append(np.nonzero(mask)[0])
        values.append(mask[words[-1]])
    return ScatterCase(case.w, case.tensors, case.tile_ids, words, values, case.storages, case.records, None, None)
