"""Fast digest sums against the digest module's own, for every word size, position and cut of segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.digest import WordWeights
from megasync.receiver.sums import CHUNK, Sums, sums_by_segment
from megasync.types import WORD_DTYPES, Lanes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 1 << 46),
    st.integers(0, 1 << 32),
)
def test_sums_are_those_of_the_format(w: int, sizes: list[int], first: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    flat = first + np.sort(rng.integers(0, 1 << 20, n))
    columns = [rng.integers(0, 1 << 8 * w, n, dtype=WORD_DTYPES[w]) for _ in range(2)]
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    found = sums_by_segment(flat, w, bounds, columns)
    for column, sums in zip(columns, found, strict=True):
        for g, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            expected = WordWeights.of(flat[a:b], w).lanes(column[a:b])
            assert Lanes(int(sums[g, 0]), int(sums[g, 1])) == expected


@pytest.mark.parametrize("w", [1, 4, 8])
def test_sums_of_more_than_a_chunk(w: int) -> None:
    rng = np.random.default_rng(w)
    n = 2 * CHUNK + 77
    flat = np.sort(rng.integers(0, 1 << 40, n))
    values = rng.integers(0, 1 << 8 * w, n, dtype=WORD_DTYPES[w])
    bounds = [0, 0, 5, CHUNK - 1, CHUNK, CHUNK, CHUNK, CHUNK + 3, 2 * CHUNK + 1, 2 * CHUNK + 1, n, n]
    (found,) = sums_by_segment(flat, w, bounds, [values])
    for g, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        expected = WordWeights.of(flat[a:b], w).lanes(values[a:b])
        assert (int(found[g, 0]), int(found[g, 1])) == (expected.a, expected.b)


def test_joined_sums_add_up_by_tensor_and_leave_others_out() -> None:
    top = (1 << 64) - 1
    a = Sums(np.array([3, 7, 3]), np.array([[1, 2], [5, 5], [top, 1]], dtype=np.uint64))
    b = Sums(np.array([9]), np.array([[4, 4]], dtype=np.uint64))
    total = Sums.join([a, b, Sums.join([])])
    np.testing.assert_array_equal(total.over(np.array([3, 8, 9])), np.array([[0, 3], [0, 0], [4, 4]], dtype=np.uint64))
    assert total.of(7) == Lanes(5, 5)
    assert total.of(4) == Lanes()
