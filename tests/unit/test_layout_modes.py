"""Records and their evaluation: against the formula written out for one word at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasync.layout import Digit, Layout, Remap, arrange, normalised


def one_word(r: Remap, x: tuple[int, ...]) -> int | None:
    """The contract, literally."""
    if not all(a <= v < b for a, v, b in zip(r.start, x, r.stop, strict=True)):
        return None
    y = [v - o for v, o in zip(x, r.origin, strict=True)]
    z = []
    for axes in r.merge:
        joined = 0
        for a in axes:
            joined = joined * r.local_shape[a] + y[a]
        z.append(joined)
    total = r.base
    for d in r.digits:
        value = z[d.axis] // d.src_stride
        total += (value % d.extent if d.extent else value) * d.dst_stride
    return total


@st.composite
def records(draw: st.DrawFn) -> Remap:
    """Any record that the contract allows, injective or not."""
    steps = st.integers(-20, 20).filter(bool)
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    origin = tuple(draw(st.integers(0, n - 1)) for n in shape)
    local = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, origin, strict=True))
    start = tuple(draw(st.integers(o, o + m - 1)) for o, m in zip(origin, local, strict=True))
    stop = tuple(draw(st.integers(a + 1, o + m)) for a, o, m in zip(start, origin, local, strict=True))
    cuts = sorted(draw(st.sets(st.integers(1, rank - 1)))) if rank > 1 else []
    edges = [0, *cuts, rank]
    merge = tuple(tuple(range(a, b)) for a, b in zip(edges, edges[1:], strict=False))
    digits = []
    for g in range(len(merge)):
        if draw(st.booleans()):
            # Digits that follow on one another, as engines' do.
            extents = draw(st.lists(st.integers(2, 4), max_size=2))
            strides = [prod(extents[:i]) for i in range(len(extents) + 1)]
            digits += [Digit(g, e, s, draw(steps)) for e, s in zip([*extents, 0], strides, strict=True)]
            continue
        strides = sorted(draw(st.sets(st.integers(1, 12), max_size=2)))
        for i, s in enumerate(strides):
            extent = draw(st.integers(0 if i + 1 == len(strides) else 1, 5))
            digits.append(Digit(g, extent, s, draw(steps)))
    assume(len(digits) <= 8)
    base = draw(st.integers(-50, 50))
    return Remap(shape, start, stop, origin, local, merge, tuple(digits), base, "word", 2, "live", True)


@given(records())
@settings(max_examples=100, deadline=None)
def test_offsets_follow_the_contract_word_by_word(r: Remap) -> None:
    coords = [c.reshape(-1).astype(np.int64) for c in np.indices(r.shape)]
    mask, offsets = r.offsets(coords)
    expected = [one_word(r, tuple(int(c[i]) for c in coords)) for i in range(prod(r.shape))]
    assert mask.tolist() == [e is not None for e in expected]
    assert offsets.tolist() == [e for e in expected if e is not None]


@given(records())
@settings(max_examples=100, deadline=None)
def test_normalised_records_are_the_same_function(r: Remap) -> None:
    coords = [c.reshape(-1).astype(np.int64) for c in np.indices(r.shape)]
    short = normalised(r)
    assert len(short.digits) <= len(r.digits)
    assert normalised(short) == short
    for a, b in zip(r.offsets(coords), short.offsets(coords), strict=True):
        assert np.array_equal(a, b)


def test_neighbouring_digits_are_joined() -> None:
    digits = (Digit(0, 4, 1, 3), Digit(0, 5, 4, 12), Digit(0, 0, 20, 60))
    r = Remap((100,), (0,), (100,), (0,), (100,), ((0,),), digits, 7, "word", 1, "s", True)
    assert normalised(r).digits == (Digit(0, 0, 1, 3),)


GOOD = arrange((8, 6), word_nbytes=2).to("s").records[0]


@pytest.mark.parametrize(
    "change",
    [
        {"start": (9, 0)},
        {"stop": (0, 6)},
        {"stop": (9, 6)},
        {"origin": (1, 0)},
        {"local_shape": (9, 6)},
        {"merge": ((0,),)},
        {"merge": ((1,), (0,))},
        {"merge": ((0, 1), ())},
        {"digits": tuple(Digit(0, 2, 1 << i, 1 << i) for i in range(9))},
        {"digits": (Digit(2, 0, 1, 1),)},
        {"digits": (Digit(0, 0, 0, 1),)},
        {"digits": (Digit(0, 0, 1, 0),)},
        {"digits": (Digit(0, 0, 1, 6), Digit(0, 2, 4, 1))},
        {"digits": (Digit(0, 2, 1, 6), Digit(0, 2, 1, 1))},
        {"unit": "nibble"},
        {"unit": "bit"},
        {"word_nbytes": 3},
        {"storage": ""},
    ],
)
def test_records_that_break_the_contract_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="layout record into storage"):
        replace(GOOD, **change)


def test_layouts_refuse_records_of_another_tensor() -> None:
    layout = arrange((8, 6), word_nbytes=2, start=(2, 0), stop=(4, 6)).to("s")
    with pytest.raises(ValueError, match="is not of a tensor"):
        replace(layout, shape=(8, 7))
    with pytest.raises(ValueError, match="leaves the slice"):
        replace(layout, start=(3, 0))
    with pytest.raises(ValueError, match="not inside the tensor"):
        Layout((8,), 2, (4,), (9,), ())
    with pytest.raises(ValueError, match="word_nbytes"):
        Layout((8,), 3, (0,), (8,), ())


def test_case_62_offsets_beyond_4_gib_are_exact() -> None:
    # 6 GiB of bf16: rows of 2^20 words, stacked as the third of four such tensors.
    r = arrange((3072, 1 << 20), word_nbytes=2).stack(2, 4).to("s").records[0]
    _, offsets = r.offsets([np.array([3071, 0]), np.array([(1 << 20) - 1, 5])])
    assert offsets.tolist() == [3 * 3072 * (1 << 20) - 1, 2 * 3072 * (1 << 20) + 5]


def test_a_million_words_through_five_digits_take_well_under_60_ms() -> None:
    r = arrange((160, 450), word_nbytes=1).interleave(0, 64, 1).swizzle_128x4().to("s").records[0]
    assert len(r.digits) == 5
    rng = np.random.default_rng(0)
    coords = [rng.integers(0, 160, 1 << 20), rng.integers(0, 450, 1 << 20)]
    best = 1.0
    for _ in range(7):
        begin = time.process_time()
        r.offsets(coords)
        best = min(best, time.process_time() - begin)
    assert best < 0.06
