"""Lines of layouts: in straight tiles they give the offsets that the record gives word by word; others are told apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.layout.compose import arrange
from megasync.layout.experts import Place, swizzled, w13_interleaved, w13_stack
from megasync.layout.modes import Digit, Remap
from megasync.layout.named import marlin_nibbles
from megasync.receiver.straight import lines_of
from megasync.tiles import Lines, make_grid, spread

Boxes = tuple[np.ndarray, np.ndarray]


def offsets(record: Remap, box: Boxes) -> np.ndarray:
    """The oracle: every word of one tile, coordinate by coordinate."""
    mask, found = record.offsets(spread(*box, np.arange(int(box[1].prod()))))
    assert mask.all()
    return found


def check(record: Remap, starts: np.ndarray, extents: np.ndarray) -> tuple[Lines, np.ndarray]:
    """Compare all words of the straight tiles, each by itself and then together."""
    lines, straight = lines_of(record, starts, extents)
    chosen = np.flatnonzero(straight)
    if not len(chosen):
        return lines, straight
    expected = [offsets(record, (starts[[t]], extents[[t]])) for t in chosen]
    counts = np.array([len(e) for e in expected])
    positions = [np.arange(n, dtype=np.uint32) for n in counts]
    for t, n, p, e in zip(chosen, counts, positions, expected, strict=True):
        np.testing.assert_array_equal(lines.at(np.array([t]), np.array([n]), p), e)
    base = 1000 * chosen
    found = lines.at(chosen, counts, np.concatenate(positions), base)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.concatenate(expected) + np.repeat(base, counts))
    return lines, straight


@st.composite
def records(draw: st.DrawFn) -> Remap:
    """Records of any digits, which need not be a bijection: only the arithmetic is looked at."""
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    origin, local, start, stop = [], [], [], []
    for n in shape:
        a, b = sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        c, d = sorted(draw(st.lists(st.integers(a, b), min_size=2, max_size=2, unique=True)))
        origin.append(a), local.append(b - a), start.append(c), stop.append(d)
    cuts = [draw(st.booleans()) for _ in shape[1:]]
    merge: list[tuple[int, ...]] = [(0,)]
    for axis, cut in enumerate(cuts, 1):
        merge[-1:] = [merge[-1], (axis,)] if cut else [(*merge[-1], axis)]
    digits = []
    for group in range(len(merge)):
        stride = 1
        for _ in range(draw(st.integers(0, 2))):
            extent = draw(st.integers(1, 4))
            digits.append(Digit(group, extent, stride, draw(st.integers(1, 500)) * draw(st.sampled_from([1, -1]))))
            stride *= draw(st.sampled_from([extent, 2 * extent])) + (extent == 1)
        digits.append(Digit(group, 0, stride, draw(st.integers(1, 500))))
    shapes = (tuple(x) for x in (shape, start, stop, origin, local))
    return Remap(*shapes, tuple(merge), tuple(digits[:8]), draw(st.integers(0, 99)), "word", 1, "live", True)


@settings(max_examples=300, deadline=None)
@given(records(), st.integers(0, 1 << 30))
def test_lines_of_straight_tiles_are_the_record(record: Remap, seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.sort(np.stack([rng.integers(0, n, (20, 2)) for n in record.shape], axis=2), axis=1)
    starts, extents = edges[:, 0], edges[:, 1] - edges[:, 0] + 1
    _, straight = check(record, starts, extents)
    leaves = ((starts < record.start) | (starts + extents > record.stop)).any(axis=1)
    assert not straight[leaves].any()


def test_tiles_of_known_layouts_are_straight() -> None:
    place = Place(1, 3)
    shape = (512, 1024)
    grid = make_grid(shape, 1)
    boxes = grid.boxes(np.arange(grid.num_tiles))
    scales = make_grid((512, 64), 1)
    for layout, of in (
        (arrange(shape, word_nbytes=1).to("a"), boxes),
        (w13_stack("gate", shape, place, "a", word_nbytes=1), boxes),
        (w13_interleaved("up", shape, place, "a", word_nbytes=1), boxes),
        (
            w13_interleaved("gate", (512, 64), place, "a", word_nbytes=1, scales=True),
            scales.boxes(np.arange(scales.num_tiles)),
        ),
    ):
        for record in layout.records:
            lines, straight = check(record, *of)
            assert straight.all()
            assert len(lines.divisors) == len(lines.factors)


def test_tiles_that_cut_digits_and_nibbles_are_not_straight() -> None:
    layout = swizzled(arrange((256, 16), word_nbytes=1)).to("a")
    (record,) = layout.records
    starts = np.array([[0, 0], [0, 0], [3, 0], [32, 4], [0, 1]])
    extents = np.array([[256, 16], [100, 16], [60, 16], [64, 8], [32, 3]])
    _, straight = check(record, starts, extents)
    assert straight.tolist() == [True, True, False, True, True]
    nibbles = marlin_nibbles((64, 32), storage="a")
    assert not any(lines_of(r, *make_grid((64, 32), 1).boxes(np.array([0])))[1].any() for r in nibbles.records)
