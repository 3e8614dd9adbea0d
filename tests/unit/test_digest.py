import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.digest import (
    C,
    S,
    WordWeights,
    box_lanes,
    bytes_lanes,
    content_digest,
    state_digest,
    state_lanes,
)
from megasync.types import WORD_DTYPES, Box, Lanes, TensorSpec

MASK = (1 << 64) - 1


def by_definition(data: bytes) -> tuple[int, int]:
    """The formula of the specification in plain integers."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    data += bytes(-len(data) % 4)
    sums = [0, 0]
    for i in range(len(data) // 4):
        unit = int.from_bytes(data[4 * i : 4 * i + 4], "little")
        for lane in range(2):
            k = (splitmix64(((i >> 2) + S[lane]) & MASK) | 1) * C[lane][i & 3]
            sums[lane] = (sums[lane] + unit * k) & MASK
    return sums[0], sums[1]


def test_constants_are_those_of_the_specification() -> None:
    import hashlib

    def first(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    assert [[first(f"megasync state digest C {lane} {k}") | 1 for k in range(4)] for lane in range(2)] == [
        list(C[0]),
        list(C[1]),
    ]
    assert [first(f"megasync state digest S {lane} 0") for lane in range(2)] == list(S)


@given(st.binary(min_size=0, max_size=300), st.integers(0, 70))
def test_runs_of_bytes_equal_the_definition(data: bytes, split: int) -> None:
    whole = np.frombuffer(data, np.uint8)
    expected = Lanes(*by_definition(data))
    assert bytes_lanes(whole) == expected
    split = min(split, len(data))
    assert bytes_lanes(whole[:split]) + bytes_lanes(whole[split:], split) == expected


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_words_boxes_and_bytes_agree(w: int) -> None:
    rng = np.random.default_rng(w)
    shape = (5, 7, 12)
    words = rng.integers(0, 256, 5 * 7 * 12 * w, dtype=np.uint8).view(WORD_DTYPES[w]).reshape(shape)
    whole = bytes_lanes(words.reshape(-1).view(np.uint8))
    assert WordWeights.of(np.arange(words.size), w).lanes(words.ravel()) == whole
    total = Lanes()
    for halves in itertools.product([0, 1], repeat=3):
        start = tuple(h * (e // 2) for h, e in zip(halves, shape, strict=True))
        extent = tuple((e - e // 2) if h else e // 2 for h, e in zip(halves, shape, strict=True))
        box = Box(start, extent)
        total += box_lanes(shape, box, words[tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))])
    assert total == whole


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_long_rows_take_the_fast_path_to_the_same_sum(w: int) -> None:
    rng = np.random.default_rng(w)
    shape = (3, 9001)
    words = rng.integers(0, 256, 3 * 9001 * w, dtype=np.uint8).view(WORD_DTYPES[w]).reshape(shape)
    left = box_lanes(shape, Box((0, 0), (3, 5000)), words[:, :5000])
    right = box_lanes(shape, Box((0, 5000), (3, 4001)), words[:, 5000:])
    assert left + right == bytes_lanes(words.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_a_change_is_the_difference_of_the_sums(w: int) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 1000 * w, dtype=np.uint8).view(WORD_DTYPES[w])
    new = old.copy()
    index = rng.choice(1000, 50, replace=False)
    new[index] ^= rng.integers(1, 255, 50).astype(WORD_DTYPES[w])
    change = WordWeights.of(index, w).change(old[index], new[index])
    assert bytes_lanes(old.view(np.uint8)) + change == bytes_lanes(new.view(np.uint8))


def test_name_dtype_and_shape_are_mixed_in_and_taken_out() -> None:
    lanes = Lanes(5, 7)
    a = TensorSpec("a", "BF16", (2, 3))
    assert (
        len(
            {
                state_digest(s, lanes)
                for s in (
                    a,
                    TensorSpec("b", "BF16", (2, 3)),
                    TensorSpec("a", "F16", (2, 3)),
                    TensorSpec("a", "BF16", (3, 2)),
                )
            }
        )
        == 4
    )
    assert state_lanes(a, state_digest(a, lanes)) == lanes
    assert state_digest(TensorSpec("e", "BF16", (0, 3)), Lanes()) == bytes(16)


def test_content_digest_of_parts_is_that_of_the_whole() -> None:
    for algorithm, nbytes in ((1, 16), (3, 32)):
        assert content_digest([b"ab", b"c"], algorithm) == content_digest(b"abc", algorithm)
        assert len(content_digest(b"", algorithm)) == nbytes
    with pytest.raises(ValueError, match="algorithm 9"):
        content_digest(b"", 9)


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize(
    ("shape", "start", "extent"), [((37, 512), (5, 128), (20, 128)), ((3, 9, 64), (1, 2, 16), (2, 5, 48))]
)
def test_bands_of_columns_count_by_groups_as_by_words(
    dtype: str, shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...]
) -> None:
    """Runs of whole 16-byte groups take another path than runs that cut one, and give the same sums."""
    rng = np.random.default_rng(7)
    words = rng.integers(0, 256, (*extent, int(dtype[2])), dtype=np.uint8).view(dtype)[..., 0]
    index = np.ravel_multi_index(np.indices(extent).reshape(len(extent), -1) + np.array(start)[:, None], shape)
    expected = WordWeights.of(index, words.itemsize).lanes(words.ravel())
    assert box_lanes(shape, Box(start, extent), words) == expected
