"""Inputs and independent oracles of the kernel tests: shared by the CPU tests, the interpreter's and the GPU's.

The oracles are numpy and the layout floor's own evaluator; nothing here calls what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.digest import WordWeights
from megasync.kernels.planes import Planes, planes_reference, segments_of
from megasync.kernels.records import PackedRecords, pack_records
from megasync.kernels.scatter_plan import ScatterPlan, Tiles, plan_scatter
from megasync.layout.modes import Digit, Remap
from megasync.tiles import make_grid, spread
from megasync.types import Lanes

MASK64 = (1 << 64) - 1


@dataclass
class LiveTensor:
    """A canonical tensor on one rank: its records, and where its canonical words lie."""

    shape: tuple[int, ...]
    records: list[Remap]


def remap(shape, start, stop, digits, *, base=0, storage="s", primary=True, merge=None, unit="word", w=1, slice_=None):
    """A record; ``slice_`` is the rank's slice (origin, extents), by default the box itself."""
    origin, local = slice_ or (start, tuple(b - a for a, b in zip(start, stop, strict=True)))
    merge = merge or tuple((a,) for a in range(len(shape)))
    return Remap(
        shape, start, stop, origin, local, merge, tuple(Digit(*d) for d in digits), base, unit, w, storage, primary
    )


def layouts(w: int, rng: np.random.Generator) -> tuple[list[LiveTensor], dict[str, int]]:
    """Tensors of word size ``w`` in many layouts, and the units (words) of each storage."""
    rows, cols = 160, 450
    tensors = [
        # Identity, whole tensor.
        LiveTensor((3, 70, 41), [remap((3, 70, 41), (0, 0, 0), (3, 70, 41), [(0, 0, 1, 2870), (1, 0, 1, 41), (2, 0, 1, 1)], w=w)]),
        # Column slice of a row-parallel shard, stacked behind something else, with a copy.
        LiveTensor(
            (500, 300),
            [
                remap((500, 300), (0, 75), (500, 150), [(0, 0, 1, 75), (1, 0, 1, 1)], base=10_000, w=w),
                remap((500, 300), (0, 75), (500, 150), [(0, 0, 1, 75), (1, 0, 1, 1)], storage="copy", primary=False, w=w),
            ],
        ),
        # 64-row interleave, then the 128x4 swizzle, of a slice with a ragged last block: six digits in one record.
        LiveTensor(
            (2 * rows, cols),
            [
                remap(
                    (2 * rows, cols),
                    (rows, 0),
                    (2 * rows, cols),
                    [(0, 32, 1, 16), (0, 2, 32, 4), (0, 0, 64, 512 * 113), (1, 4, 1, 1), (1, 0, 4, 512)],
                    base=128 * 512,
                    storage="swizzled",
                    w=w,
                )
            ],
        ),
        # Merged axes of a slice, reversed in the storage.
        LiveTensor(
            (6, 50, 64),
            [
                remap(
                    (6, 50, 64),
                    (2, 0, 0),
                    (5, 50, 64),
                    [(0, 0, 1, 64), (1, 2, 1, 32), (1, 0, 2, 1)],
                    merge=((0, 1), (2,)),
                    storage="merged",
                    w=w,
                )
            ],
        ),
        # Two boxes of one tensor in two storages (tile padding or a fused neighbour between them).
        LiveTensor(
            (97,),
            [
                remap((97,), (0,), (40,), [(0, 0, 1, 1)], storage="head", w=w),
                remap((97,), (40,), (97,), [(0, 0, 1, 1)], storage="tail", base=3, w=w),
            ],
        ),
        # A scalar.
        LiveTensor((), [remap((1,), (0,), (1,), [], storage="head", base=41, w=w)]),
        # Nibbles of a packed weight, interleaved by eight.
        LiveTensor(
            (64, 1024 // w),
            [
                remap(
                    (64, 2048),
                    (0, 0),
                    (64, 2048),
                    [(0, 0, 1, 2048), (1, 2, 1, 4), (1, 4, 2, 1), (1, 0, 8, 8)],
                    base=5,
                    unit="nibble",
                    w=1,
                    storage="nibbles",
                )
            ],
        ),
    ]  # fmt: skip
    sizes = {"s": 60_000, "copy": 40_000, "swizzled": 512 * 512, "merged": 10_000, "head": 50, "tail": 70}
    return tensors, {**sizes, "nibbles": (64 * 2048 + 8) // 2 // w + 8}


def live_storages(sizes: dict[str, int], w: int, rng: np.random.Generator, device: str) -> dict[str, torch.Tensor]:
    """Storages of random bytes."""
    return {k: torch.from_numpy(rng.integers(0, 256, n * w, dtype=np.uint8)).to(device) for k, n in sizes.items()}


@dataclass
class ScatterCase:
    """Changed words of some tiles, and all that is needed to apply and to check them."""

    w: int
    tensors: list[LiveTensor]
    tiles: list[tuple[int, int]]
    words: list[np.ndarray]
    values: list[np.ndarray]
    storages: dict[str, torch.Tensor]
    records: PackedRecords
    plan: ScatterPlan
    planes: Planes


def scatter_case(w: int, density: float, seed: int, device: str = "cpu", digest: str = "primary") -> ScatterCase:
    """Random changes at ``density`` in every tile of the layouts; one segment stays empty."""
    rng = np.random.default_rng(seed)
    tensors, sizes = layouts(w, rng)
    storages = live_storages(sizes, w, rng, device)
    tiles, starts, extents, words, values = [], [], [], [], []
    for t, tensor in enumerate(tensors):
        grid = make_grid(tensor.shape, w)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            n = box.num_words
            k = max(1, int(n * density))
            at = np.sort(rng.choice(n, k, replace=False))
            if n > 65_536:
                at = at[at >= 65_536] if len(at[at >= 65_536]) else at[-1:]
            tiles.append((t, tile))
            starts.append([0] * (3 - len(box.start)) + list(box.start))
            extents.append([1] * (3 - len(box.start)) + list(box.extent))
            words.append(at)
            values.append(random_words(len(at), w, rng))
    table = Tiles(np.array([t for t, _ in tiles]), np.array(starts), np.array(extents))
    tile_of, _, segment_words = segments_of(table.words)
    first = np.searchsorted(tile_of, np.arange(len(tiles)))
    segment = np.concatenate([first[i] + at // 65_536 for i, at in enumerate(words)])
    planes = planes_reference(segment, np.concatenate(words) % 65_536, np.concatenate(values), segment_words, w)
    records = pack_records(w, [t.shape for t in tensors], [t.records for t in tensors], storages, digest=digest)
    counts = planes.counts.numpy()
    on_device = Planes(w, planes.counts, planes.entries.to(device), planes.dense.to(device))
    return ScatterCase(
        w, tensors, tiles, words, values, storages, records, plan_scatter(table, counts, records), on_device
    )


def random_words(n: int, w: int, rng: np.random.Generator) -> np.ndarray:
    """Random words of ``w`` bytes, never 0."""
    out = rng.integers(0, 256, n * w, dtype=np.uint8).view(f"<u{w}")
    return np.where(out == 0, np.array(1, dtype=f"<u{w}"), out)


def oracle(case: ScatterCase, *, copies: bool = False) -> tuple[dict[str, np.ndarray], list[tuple[Lanes, Lanes]]]:
    """Storages after the apply, and touched-old and new-minus-old sums of each tensor, word by word in numpy."""
    after = {k: v.cpu().numpy().copy() for k, v in case.storages.items()}
    before = {k: v.copy() for k, v in after.items()}
    sums = [(Lanes(), Lanes()) for _ in case.tensors]
    for (t, tile), at, value in zip(case.tiles, case.words, case.values, strict=True):
        tensor = case.tensors[t]
        shape = tensor.shape or (1,)
        grid = make_grid(tensor.shape, case.w)
        starts, extents = grid.boxes(np.array([tile]))
        coords = spread(starts, extents, at)
        flat = np.ravel_multi_index(tuple(coords), shape)
        for r in tensor.records:
            if r.unit == "nibble":
                touched = _nibbles(r, coords, value, before[r.storage], after[r.storage], case.w)
            else:
                mask, offsets = r.offsets(coords)
                view = after[r.storage].view(f"<u{case.w}")
                old = before[r.storage].view(f"<u{case.w}")[offsets]
                view[offsets] ^= value[mask]
                touched = (mask, old)
            if r.primary != copies:
                mask, old = touched
                weights = WordWeights.of(flat[mask], case.w)
                sums[t] = (sums[t][0] + weights.lanes(old), sums[t][1] + weights.change(old, old ^ value[mask]))
    return after, sums


def _nibbles(
    r: Remap, coords: list[np.ndarray], value: np.ndarray, before: np.ndarray, after: np.ndarray, w: int
) -> tuple[np.ndarray, np.ndarray]:
    """Nibble by nibble; returns the old words, whole where any nibble of them changes."""
    old = np.zeros(len(value), dtype=f"<u{w}")
    for j in range(2 * w):
        nibble = (value >> np.array(4 * j, dtype=value.dtype)).astype(np.uint8) & 15
        _, offset = r.offsets([*coords[:-1], coords[-1] * 2 * w + j])
        byte, shift = offset >> 1, ((offset & 1) * 4).astype(np.uint8)
        np.bitwise_xor.at(after, byte, nibble << shift)
        was = (before[byte] >> shift & 15).astype(old.dtype)
        old |= was << np.array(4 * j, dtype=old.dtype)
    return np.ones(len(value), dtype=np.bool_), old


def as_lanes(row: torch.Tensor) -> tuple[Lanes, Lanes]:
    """A row of kernel sums as the digest module's lanes."""
    a, b, c, d = (x & MASK64 for x in row.tolist())
    return Lanes(a, b), Lanes(c, d)
