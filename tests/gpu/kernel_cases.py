"""Inputs and independent oracles of the kernel tests: shared by the CPU tests, the interpreter's and the GPU's.

The oracles are numpy and the layout floor's own evaluator; nothing here calls what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.digest import WordWeights
from megasync.kernels.compact_plan import CompactPlan, plan_compact
from megasync.kernels.compact_runs import Region
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


@dataclass
class CompactCase:
    """Live weights beside a snapshot, with the canonical old and new tensors."""

    w: int
    shapes: list[tuple[int, ...]]
    old: list[np.ndarray]
    new: list[np.ndarray]
    owned: list[np.ndarray]
    snapshot: torch.Tensor
    plan: CompactPlan


def _scattered(new: np.ndarray, rng: np.random.Generator, kind: int, device: str) -> torch.Tensor:
    """A torch view that holds ``new`` (any rank >= 1) in memory of another shape."""
    w = new.dtype.itemsize
    words = torch.from_numpy(np.ascontiguousarray(new).view(f"<i{w}" if w > 1 else np.uint8))
    if kind == 0 or new.ndim < 2:
        buffer = torch.zeros(new.size + 32, dtype=words.dtype, device=device)
        view = buffer[kind * 3 : kind * 3 + new.size].view(new.shape)
    elif kind == 1:  # wider rows: a column slice of a fused weight
        pad = 5 if w == 1 else 16
        buffer = torch.zeros((*new.shape[:-1], new.shape[-1] + pad), dtype=words.dtype, device=device)
        view = buffer[..., pad : pad + new.shape[-1]]
    elif kind == 2:  # transposed weight
        view = torch.zeros(new.shape[::-1], dtype=words.dtype, device=device).permute(*range(new.ndim)[::-1])
    else:  # every other row: interleaved gate and up
        buffer = torch.zeros((*new.shape[:-2], new.shape[-2], 2, new.shape[-1]), dtype=words.dtype, device=device)
        view = buffer[..., 1, :]
    view.copy_(words)
    return view


def compact_case(
    w: int, density: float, seed: int, device: str = "cpu", tiny: bool = False, pinned: bool = False
) -> CompactCase:
    """Tensors whose tiles lie whole, in slices, transposed, in row halves and in column halves; one tile is partly owned."""
    rng = np.random.default_rng(seed)
    shapes = [(), (7,), (300, 512), (90, 257), (3, 64, 1024 // w), (40, 64), (1,), (66_000,)]
    if tiny:
        shapes = [(), (7,), (24, 64), (9, 107), (2, 8, 64), (16, 64), (1,), (66_000,)]
    old = [rng.integers(0, 256, int(np.prod(s)) * w, dtype=np.uint8).view(f"<u{w}").reshape(s or (1,)) for s in shapes]
    new, owned = [], []
    for o in old:
        mask = rng.random(o.shape) < density
        if tiny and 500 < o.size < 2_000:
            mask |= rng.random(o.shape) < 0.3
        if o.size > 150_000:  # a stretch without changes, and one where all changes
            mask.reshape(-1)[:70_000] = False
            mask.reshape(-1)[-66_000:] = True
        new.append(np.where(mask, o ^ random_words(o.size, w, rng).reshape(o.shape), o))
        owned.append(np.zeros(o.shape, dtype=np.bool_))
    tensors, starts, extents, regions = [], [], [], []
    offset = 0
    for t, shape in enumerate(shapes):
        grid = make_grid(shape, w)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            index = len(tensors)
            tensors.append(t)
            starts.append([0] * (3 - len(box.start)) + list(box.start))
            extents.append([1] * (3 - len(box.start)) + list(box.extent))
            for begin, extent in _parts(box.start, box.extent, t):
                cut = tuple(slice(a, a + b) for a, b in zip(begin, extent, strict=True))
                kind = int(rng.integers(0, 4)) if len(extent) > 1 else 0
                view = _scattered(new[t][cut], rng, kind, device)
                if not shape:
                    view = view.reshape(())
                regions.append(Region(index, begin if shape else (), view, offset))
                owned[t][cut] = True
                offset += -(-new[t][cut].size * w // 8) * 8 + int(rng.integers(0, 2)) * 8
    snapshot = np.zeros(offset + 64, dtype=np.uint8)
    for r in regions:
        begin = r.start or (0,)
        size = tuple(r.live.shape) or (1,)
        cut = tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))
        data = np.ascontiguousarray(old[tensors[r.tile]][cut]).view(np.uint8).reshape(-1)
        snapshot[r.snapshot_offset : r.snapshot_offset + data.size] = data
    table = Tiles(np.array(tensors), np.array(starts), np.array(extents))
    order = rng.permutation(len(regions))
    plan = plan_compact(w, shapes, table, [regions[i] for i in order], len(snapshot))
    held = torch.from_numpy(snapshot)
    held = held.pin_memory() if pinned else held.to(device)
    return CompactCase(w, shapes, old, new, owned, held, plan)


def _parts(
    start: tuple[int, ...], extent: tuple[int, ...], tensor: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """How a tile is held: whole, in row parts, in column parts, or only in part."""
    if len(extent) < 2 or extent[-2] < 4:
        return [(start, extent)]
    row, column = len(extent) - 2, len(extent) - 1
    cuts = {
        2: (row, [0, extent[row] // 3 // 4 * 4, extent[row]]),
        3: (column, [0, 100, 101, extent[column]]),
        5: (column, [8, 40]),
    }
    if tensor not in cuts:
        return [(start, extent)]
    axis, at = cuts[tensor]
    out = []
    for a, b in zip(at, at[1:], strict=False):
        if b > a:
            begin, size = list(start), list(extent)
            begin[axis] += a
            size[axis] = b - a
            out.append((tuple(begin), tuple(size)))
    return out


def compact_oracle(case: CompactCase) -> tuple[Planes, list[tuple[Lanes, Lanes]]]:
    """Planes of all segments and the sums of each tensor, from the canonical tensors."""
    tiles = case.plan.tiles
    tile_of, _, words = segments_of(tiles.words)
    first = np.searchsorted(tile_of, np.arange(len(tiles.tensors)))
    segment, position, value = [], [], []
    for i, t in enumerate(tiles.tensors.tolist()):
        n = len(case.shapes[t]) or 1
        cut = tuple(slice(a, a + b) for a, b in zip(tiles.starts[i][3 - n :], tiles.extents[i][3 - n :], strict=True))
        x = (np.where(case.owned[t], case.old[t] ^ case.new[t], 0)[cut]).reshape(-1)
        at = np.nonzero(x)[0]
        segment.append(first[i] + at // 65_536)
        position.append(at % 65_536)
        value.append(x[at])
    planes = planes_reference(np.concatenate(segment), np.concatenate(position), np.concatenate(value), words, case.w)
    sums = []
    for old, new, owned in zip(case.old, case.new, case.owned, strict=True):
        at = np.nonzero(((old != new) & owned).reshape(-1))[0]
        weights = WordWeights.of(at, case.w)
        was, now = old.reshape(-1)[at], new.reshape(-1)[at]
        sums.append((weights.lanes(was), weights.change(was, now)))
    return planes, sums


def updated(case: CompactCase) -> bool:
    """Whether the snapshot holds the new bytes of every region."""
    flat = case.snapshot.cpu().numpy()
    for r in case.plan.regions:
        t = int(case.plan.tiles.tensors[r.tile])
        cut = tuple(slice(a, a + b) for a, b in zip(r.start or (0,), tuple(r.live.shape) or (1,), strict=True))
        want = np.ascontiguousarray(case.new[t][cut]).view(np.uint8).reshape(-1)
        if not np.array_equal(flat[r.snapshot_offset : r.snapshot_offset + want.size], want):
            return False
    return True


def join(parts: list[Planes]) -> Planes:
    """Planes of consecutive spans as one, on the CPU."""
    return Planes(
        parts[0].word_nbytes,
        torch.cat([p.counts.cpu() for p in parts]),
        torch.cat([p.entries.cpu() for p in parts], dim=1),
        torch.cat([p.dense.cpu() for p in parts], dim=1),
    )


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
