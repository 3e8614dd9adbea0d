"""The mask stage on the CPU: tiles that cuts cross, runs that fill no whole units, batches, and a pass that breaks off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync.schema import Schema, make_schema
from megasync.trainer import mask
from megasync.trainer.mask import mask_regions, words_of
from megasync.trainer.regions import Region
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.types import Box, Entries, TensorSpec
from megasync.versions.changes import CLOSE_ENTRIES, word_sums

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


class World:
    """Live tensors, a snapshot of them, and what they were."""

    def __init__(self, w: int, shapes: list[tuple[int, int]], columns: list[int], seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        specs = [TensorSpec(f"t{i}", DTYPES[w], shape, 0) for i, shape in enumerate(shapes)]
        self.schema: Schema = make_schema("r", specs)
        self.live = [
            torch.from_numpy(self.rng.integers(0, 256, (m, n * w), dtype=np.uint8)).view(SAME_SIZE[w])
            for m, n in shapes
        ]
        regions: list[Region] = []
        for i, grid in enumerate(self.schema.grids):
            for tile in range(grid.num_tiles):
                box = grid.box(tile)
                edges = [0, *[c for c in columns if c < box.extent[1]], box.extent[1]]
                for a, b in zip(edges[:-1], edges[1:], strict=True):
                    inner = Box((0, a), (box.extent[0], b - a))
                    outer = Box((box.start[0], box.start[1] + a), inner.extent)
                    rows, cols = (slice(s, s + n) for s, n in zip(outer.start, outer.extent, strict=True))
                    whole = len(edges) == 2
                    regions.append(Region(i, tile, outer, inner, self.live[i][rows, cols], whole, False, 0))
        self.snapshot = Snapshot(self.schema, regions)
        self.snapshot.arena.fill_(255)  # also between the regions
        self.snapshot.fill_live()
        self.old = self.words()

    def words(self) -> list[np.ndarray]:
        return [words_of(t).reshape(-1).copy() for t in self.live]

    def change(self, share: float) -> None:
        for t in self.live:
            chosen = torch.from_numpy(self.rng.random(tuple(t.shape)) < share)
            t[chosen] ^= 1

    def apply(self, words: list[np.ndarray], entries: Entries) -> None:
        """Entries into flat words, by a reader of its own."""
        stops = np.cumsum(entries.counts)
        for k, (i, tile) in enumerate(zip(entries.tensor_ids, entries.tiles, strict=True)):
            at = slice(int(stops[k] - entries.counts[k]), int(stops[k]))
            positions = entries.positions[at].astype(np.int64)
            assert (np.diff(positions) > 0).all()
            words[i][self.schema.grids[i].flat_index(np.array([tile]), positions)] ^= entries.values[at]

    def kept(self) -> list[np.ndarray]:
        """What the snapshot holds, as flat words of the tensors."""
        out = [np.zeros_like(w).reshape(t.shape) for w, t in zip(self.old, self.live, strict=True)]
        for i, r in enumerate(self.snapshot.regions):
            rows, cols = (slice(s, s + n) for s, n in zip(r.box.start, r.box.extent, strict=True))
            out[r.tensor_id][rows, cols] = self.snapshot.words(i).reshape(r.box.extent)
        return [w.reshape(-1) for w in out]


@pytest.mark.parametrize("share", [1e-3, 0.05, 0.9])
@pytest.mark.parametrize("columns", [[], [7, 130]])
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_frames_are_what_changed_and_the_snapshot_follows(w: int, columns: list[int], share: float) -> None:
    world = World(w, [(301, 333), (5, 3), (900, 150)], columns)
    for _ in range(2):
        world.change(share)
        words = [o.copy() for o in world.old]
        for frame in mask_regions(world.schema, world.snapshot):
            touched = {int(i) for i in frame.entries.tensor_ids}
            olds = [o.copy() for o in words]
            world.apply(words, frame.entries)
            for i in touched:
                mine = frame.entries.tensor_ids == i
                flat = np.flatnonzero(olds[i] != words[i])
                assert len(flat) == int(frame.entries.counts[mine].sum())
            # The values at the changed words, in the order of the entries, give the digest sums once more.
            before, after = (values_at(world, frame.entries, x) for x in (olds, words))
            old_sums, new_sums = (word_sums(world.schema, frame.entries, x) for x in (before, after))
            assert frame.touched_old == old_sums
            assert frame.change == {i: new_sums[i] - old_sums[i] for i in old_sums}
        for found, expected, kept in zip(words, world.words(), world.kept(), strict=True):
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(kept, expected)
        world.old = world.words()
    assert not list(mask_regions(world.schema, world.snapshot))


def values_at(world: World, entries: Entries, words: list[np.ndarray]) -> np.ndarray:
    tensors, tiles = np.repeat(entries.tensor_ids, entries.counts), np.repeat(entries.tiles, entries.counts)
    out = np.empty(len(tensors), dtype=words[0].dtype)
    for i, grid in enumerate(world.schema.grids):
        mine = tensors == i
        out[mine] = words[i][grid.flat_index(tiles[mine], entries.positions[mine])]
    return out


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_pass_that_breaks_off_leaves_what_was_handed_on(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "_BATCH_ENTRIES", 3 * CLOSE_ENTRIES)
    world = World(1, [(700, 1400), (700, 1400)], [500])
    world.change(0.1)
    words = [o.copy() for o in world.old]
    frames = mask_regions(world.schema, world.snapshot)
    first = [next(frames) for _ in range(taken)]
    frames.close()  # type: ignore[attr-defined]
    for frame in first:
        world.apply(words, frame.entries)
    for found, kept in zip(words, world.kept(), strict=True):
        np.testing.assert_array_equal(kept, found)
    for frame in first:
        world.snapshot.xor_(frame.entries)
    for old, kept in zip(world.old, world.kept(), strict=True):
        np.testing.assert_array_equal(kept, old)
