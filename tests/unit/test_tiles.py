from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.tiles import MAX_TILE_WORDS, bounds_of, make_grid, spread, stretch_of, strides
from megasync.types import Box


@pytest.mark.parametrize(
    ("shape", "word_nbytes", "cut", "num_tiles"),
    [
        ((7168, 1024), 1, "row", 8),  # a packed fp4 expert w1
        ((7168, 128), 1, "row", 8),  # its scales
        ((7168, 1024), 1, "last", 8),  # w2
        ((7168, 128), 1, "last", 4),  # scales of a w2: a band has at least 32 bytes
        ((1024, 4096), 2, "row", 8),  # a k_proj
        ((151936, 4096), 2, "row", 1024),  # an embedding
        ((), 4, "row", 1),
        ((0, 3), 2, "row", 0),
        ((1,), 8, "last", 1),
        ((3, 5, 7, 11), 2, "row", 1),
    ],
)
def test_number_of_tiles(shape: tuple[int, ...], word_nbytes: int, cut: str, num_tiles: int) -> None:
    assert make_grid(shape, word_nbytes, cut).num_tiles == num_tiles


def test_leading_axes_are_cut_to_single_cells_while_the_rest_is_large() -> None:
    grid = make_grid((4, 512, 256), 2, "row")
    assert [a.num for a in grid.axes] == [4, 2, 1]
    assert grid.box(5) == Box((2, 256, 0), (1, 256, 256))


def test_pieces_restart_in_each_band_and_the_last_is_shorter() -> None:
    grid = make_grid((2 * 1100, 4096), 2, "row")
    axis = grid.axes[0]
    assert (axis.bands, axis.band) == (8, 275)
    assert axis.extents(np.arange(axis.num)).reshape(8, -1).sum(axis=1).tolist() == [275] * 8
    assert axis.extents(np.arange(2)).tolist() == [138, 137]


def test_a_block_is_never_split() -> None:
    grid = make_grid((1000, 4096), 1, "row", (16, 8))
    starts, extents = grid.boxes(np.arange(grid.num_tiles))
    assert not (starts % np.array([16, 8])).any()
    assert (extents[:-1, 0] % 16 == 0).all()


shapes = st.lists(st.integers(0, 70), min_size=0, max_size=4).map(tuple) | st.tuples(
    st.integers(1, 3000), st.integers(1, 3000)
)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["row", "last"]))
def test_tiles_cover_every_word_once(shape: tuple[int, ...], word_nbytes: int, cut: str) -> None:
    grid = make_grid(shape, word_nbytes, cut)
    tiles = np.arange(grid.num_tiles)
    words = grid.tile_words(tiles)
    assert int(words.sum()) == prod(shape)
    assert (words <= MAX_TILE_WORDS).all()
    if prod(shape) > 200_000:
        return
    seen = np.zeros(prod(shape), dtype=np.int64)
    for tile, num in zip(tiles.tolist(), words.tolist(), strict=True):
        np.add.at(seen, grid.flat_index(np.array([tile]), np.arange(num)), 1)
    assert (seen == 1).all()


@given(st.data())
def test_tiles_of_a_box_are_those_that_meet_it(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
    grid = make_grid(shape, 2, data.draw(st.sampled_from(["row", "last"])))
    start = tuple(data.draw(st.integers(0, e - 1)) for e in shape)
    box = Box(start, tuple(data.draw(st.integers(1, e - s)) for s, e in zip(start, shape, strict=True)))
    expected = [t for t in range(grid.num_tiles) if grid.box(t).intersect(box) is not None]
    assert grid.tiles_of(box).tolist() == expected


def test_many_tiles_at_once_equal_one_by_one() -> None:
    grid = make_grid((130, 4099), 2, "row")
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, grid.num_tiles, 500)
    positions = (rng.random(500) * grid.tile_words(tiles)).astype(np.int64)
    together = grid.flat_index(tiles, positions)
    apart = [int(grid.flat_index(np.array([t]), np.array([p]))[0]) for t, p in zip(tiles, positions, strict=True)]
    assert together.tolist() == apart


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["row", "last"]), st.integers(0, 1 << 32))
def test_words_of_many_tiles_by_lines_equal_those_by_coordinates(
    shape: tuple[int, ...], word_nbytes: int, cut: str, seed: int
) -> None:
    grid = make_grid(shape, word_nbytes, cut)
    rng = np.random.default_rng(seed)
    if not grid.num_tiles:
        return
    tiles = np.unique(rng.integers(0, grid.num_tiles, 9))
    counts = rng.integers(1, 30, len(tiles))
    words = np.repeat(grid.tile_words(tiles), counts)
    positions = (rng.random(len(words)) * words).astype(np.uint32)
    found = grid.flat_words(tiles.astype(np.uint32), counts, positions)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, grid.flat_index(np.repeat(tiles, counts), positions))


def test_spread_is_row_major() -> None:
    coords = spread(np.array([[1, 2, 3]]), np.array([[2, 3, 4]]), np.arange(24))
    assert [c.tolist() for c in coords] == [
        (np.indices((2, 3, 4))[i].ravel() + [1, 2, 3][i]).tolist() for i in range(3)
    ]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        make_grid((4, 4), 2, "row", (1,))
    with pytest.raises(IndexError, match="grid of 1 tiles"):
        make_grid((4, 4), 2).boxes(np.array([1]))


def test_case_62_more_than_4_gib() -> None:
    grid = make_grid((5, 1 << 30), 2, "row")
    last = grid.num_tiles - 1
    words = int(grid.tile_words(np.array([last]))[0])
    assert int(grid.flat_index(np.array([last]), np.array([words - 1]))[0]) == 5 * (1 << 30) - 1


@given(sizes=st.lists(st.integers(0, 9), max_size=40), most=st.integers(1, 20))
def test_strides_are_whole_stretches_and_all_of_them(sizes: list[int], most: int) -> None:
    bounds = np.concatenate(([0], np.cumsum(np.array(sizes, dtype=np.int64))))
    found = list(strides(bounds, most))
    assert [a for a, _ in found] == [0, *(b for _, b in found)][: len(found)]
    assert (found[-1][1] if found else 0) == len(sizes)
    assert all(b - a == 1 or bounds[b] - bounds[a] <= most for a, b in found)


@given(st.lists(st.integers(0, 7), max_size=60), st.sampled_from([np.uint8, np.uint32, np.int64]))
def test_bounds_and_stretches_are_those_of_repeat(sizes: list[int], dtype: type) -> None:
    num = np.array(sizes, dtype=dtype)
    bounds = bounds_of(num)
    assert bounds.dtype == np.int64
    assert bounds.tolist() == [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    assert stretch_of(bounds).tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()


def test_bounds_of_narrow_numbers_do_not_wrap() -> None:
    assert bounds_of(np.full(3, 255, np.uint8)).tolist() == [0, 255, 510, 765]
    assert bounds_of(np.full(2, 2**32 - 1, np.uint32))[-1] == 2 * (2**32 - 1)
