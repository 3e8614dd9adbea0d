"""Planes: encoder and decoder specifications against each other, against the codec's, and against bytes by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync import digest
from megasync.codecs.sparse import raw_planes
from megasync.kernels import weights
from megasync.kernels.planes import (
    Planes,
    expand_reference,
    is_dense,
    planes_from_words,
    planes_reference,
    segments_of,
    words_from_planes,
)
from megasync.types import Entries
from tests.gpu.kernel_cases import random_words


@st.composite
def changed(draw: st.DrawFn) -> tuple[int, list[int], list[np.ndarray], int]:
    """Word size, words of tiles, and changed positions of each."""
    w = draw(st.sampled_from([1, 2, 4, 8]))
    tiles = draw(st.lists(st.sampled_from([1, 2, 100, 65_536, 65_537, 140_000]), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.001, 0.2, 0.34, 0.5, 0.9, 1.0]))
    return w, tiles, [np.nonzero(rng.random(n) < share)[0] for n in tiles], int(rng.integers(1 << 30))


@settings(max_examples=40, deadline=None)
@given(changed())
def test_planes_round_trip_and_equal_the_codecs(case: tuple[int, list[int], list[np.ndarray], int]) -> None:
    w, tiles, positions, seed = case
    tile_of, _, words = segments_of(np.array(tiles))
    first = np.searchsorted(tile_of, np.arange(len(tiles)))
    values = random_words(sum(map(len, positions)), w, np.random.default_rng(seed))
    segment = np.concatenate([f + p // 65_536 for f, p in zip(first, positions, strict=True)])
    position = np.concatenate(positions) % 65_536
    planes = planes_reference(segment, position, values, words, w)
    got = expand_reference(planes, words)
    np.testing.assert_array_equal(got[0].numpy(), segment)
    np.testing.assert_array_equal(got[1].numpy(), position)
    np.testing.assert_array_equal(got[2].numpy().astype(f"<u{w}") if w < 8 else got[2].numpy().view("<u8"), values)
    if not all(len(p) for p in positions):
        return  # a frame has no unchanged tiles
    u32 = np.uint32
    ids, numbers = np.zeros(len(tiles), u32), np.arange(len(tiles), dtype=u32)
    counts = np.array([len(p) for p in positions], dtype=u32)
    entries = Entries(w, ids, numbers, np.array(tiles, u32), counts, np.concatenate(positions).astype(u32), values)
    want_counts, want_entries, want_dense = raw_planes(entries)
    np.testing.assert_array_equal(planes.counts.numpy(), want_counts)
    np.testing.assert_array_equal(planes.entries.numpy(), want_entries)
    np.testing.assert_array_equal(planes.dense.numpy(), want_dense)


def test_planes_by_hand() -> None:
    planes = planes_reference(
        np.array([0, 0, 1]), np.array([3, 300, 1]), np.array([1, 2, 0x1FF], "<u2"), np.array([1000, 2]), 2
    )
    assert planes.counts.tolist() == [2, 1]
    assert planes.entries.tolist() == [[3, 40], [0, 1], [1, 2], [0, 0]]
    assert planes.dense.tolist() == [[0, 0xFF], [0, 1]]


def test_planes_that_disagree_with_their_counts_are_refused() -> None:
    planes = Planes(
        1, torch.tensor([2], dtype=torch.int32), torch.zeros((3, 1), dtype=torch.uint8), torch.zeros((1, 0))
    )
    with pytest.raises(ValueError, match="counts say otherwise"):
        expand_reference(planes, np.array([1000]))


@pytest.mark.parametrize(("w", "first"), [(1, 21_846), (2, 32_768), (4, 43_691), (8, 52_429)])
def test_the_dense_rule_changes_at_the_formats_count(w: int, first: int) -> None:
    words = np.array([65_536, 65_536])
    assert is_dense(np.array([first - 1, first]), words, w).tolist() == [False, True]


@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_words_and_planes_are_inverse(w: int) -> None:
    words = torch.from_numpy(random_words(100, w, np.random.default_rng(w)).view(f"<i{w}" if w > 1 else "u1"))
    wide = words.to(torch.int64) if w == 8 else words.to(torch.int64) & ((1 << 8 * w) - 1)
    assert torch.equal(words_from_planes(planes_from_words(wide, w)), wide)


def test_constants_and_weights_are_those_of_the_digest_module() -> None:
    assert weights.LANE_C == digest.C
    assert weights.LANE_S == digest.S
    units = np.random.default_rng(0).integers(0, 1 << 40, 1000).astype(np.uint64)
    for lane, want in enumerate(digest.unit_weights(units)):
        got = weights.unit_weights_reference(torch.from_numpy(units.astype(np.int64)), lane)
        np.testing.assert_array_equal(got.numpy().view(np.uint64), want)
