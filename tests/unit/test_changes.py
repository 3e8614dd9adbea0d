"""Comparing runs of words: every word size, tails, strided boxes, and both ends of the density."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.digest import WordWeights
from megasync.schema import make_schema
from megasync.types import WORD_DTYPES, TensorSpec
from megasync.versions.changes import TileChange, compact, compare, mask_frame, word_sums


def words(rng: np.random.Generator, num: int, w: int) -> np.ndarray:
    return rng.integers(0, 256, num * w, dtype=np.uint8).view(WORD_DTYPES[w])


def check(old: np.ndarray, new: np.ndarray) -> None:
    flat = np.ascontiguousarray(new).reshape(-1)
    expected = np.flatnonzero(old != flat)
    found = compare(old, new)
    np.testing.assert_array_equal(found.index, expected)
    np.testing.assert_array_equal(found.old, old[expected])
    np.testing.assert_array_equal(found.new, flat[expected])
    assert (found.index.dtype, found.old.dtype, found.new.dtype) == (np.int64, old.dtype, old.dtype)
    np.testing.assert_array_equal(compact(old, new), expected)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    st.integers(0, 1 << 32),
)
def test_changed_words_are_those_that_differ(w: int, num: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = words(rng, num, w)
    new = old.copy()
    new[rng.random(num) < density] ^= 1 << int(rng.integers(8 * w))
    check(old, new)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["columns", "transposed", "every second", "one plane"]),
    st.sampled_from([0.0, 0.01, 0.9]),
    st.integers(0, 1 << 32),
)
def test_boxes_of_any_strides(w: int, shape: tuple[int, int, int], how: str, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = words(rng, shape[0] * shape[1] * shape[2] * 2, w).reshape(shape[0], shape[1], shape[2] * 2)
    view = {
        "columns": whole[:, :, shape[2] // 2 : shape[2]],
        "transposed": whole.transpose(2, 0, 1),
        "every second": whole[:, :, ::2],
        "one plane": whole[:1, :, 3:],
    }[how]
    old = np.ascontiguousarray(view).reshape(-1).copy()
    old[rng.random(old.size) < density] ^= 1
    check(old, view)


@pytest.mark.parametrize(("rows", "columns"), [(1, 3 << 20), (3000, 1024), (2, 1_100_000)])
def test_runs_longer_than_a_chunk(rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    whole = words(rng, rows * (columns + 64), 1).reshape(rows, columns + 64)
    view = whole[:, 64:] if rows > 1 else whole[0, 64:]
    old = np.ascontiguousarray(view).reshape(-1).copy()
    old[rng.integers(0, old.size, 5000)] ^= 7
    old[: 1 << 19] ^= 1  # a dense stretch
    old[-1] ^= 255
    check(old, view)


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_a_frames_sums_are_those_of_the_digest(w: int) -> None:
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}[w]
    specs = [
        TensorSpec(f"l.{n}", dtype, shape, 0) for n, shape in (("a", (1300, 700)), ("b", (7,)), ("c", (3, 500, 900)))
    ]
    schema = make_schema("r", specs)
    rng = np.random.default_rng(w)
    tiles, flats = [], []
    for i, grid in enumerate(schema.grids):
        for tile in range(0, grid.num_tiles, 2):
            num = schema.num_tile_words(i, tile)
            at = np.unique(rng.integers(0, num, min(num, 900)))
            old, new = words(rng, len(at), w), words(rng, len(at), w)
            tiles.append(TileChange(i, tile, at, old, new))
            flats.append((i, grid.flat_index(np.array([tile]), at)))
    frame = mask_frame(schema, tiles)
    again = word_sums(schema, frame.entries, np.concatenate([t.old for t in tiles]))
    for i in range(len(specs)):
        flat = np.concatenate([f for j, f in flats if j == i])
        weights = WordWeights.of(flat, w)
        mine = [t for t in tiles if t.tensor_id == i]
        old, new = np.concatenate([t.old for t in mine]), np.concatenate([t.new for t in mine])
        assert frame.touched_old[i] == weights.lanes(old) == again[i]
        assert frame.change[i] == weights.change(old, new)
    np.testing.assert_array_equal(frame.entries.values, np.concatenate([t.old ^ t.new for t in tiles]))
