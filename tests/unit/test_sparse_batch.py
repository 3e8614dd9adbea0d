"""Sparse frames decoded many at a time: the same words as one at a time, and the same refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs.base import FrameShape
from megasync.codecs.planes import compress
from megasync.codecs.sparse import SparseCodec, counts_plane
from megasync.codecs.sparse_batch import RawFrames, check_planes, unpack_frames
from megasync.codecs.zstd_walk import check_zstd_frames
from megasync.errors import FormatError
from megasync.kernels.planes import Planes, expand_reference
from megasync.types import WORD_DTYPES, Entries


def frames_of(rng: np.random.Generator, w: int, num: int) -> list[Entries]:
    """Frames of a few tiles, some with segments so full that they are masks."""
    out = []
    for f in range(num):
        words = rng.integers(1, 150_000, rng.integers(1, 4)).astype(np.uint32)
        counts, positions = [], []
        for n in words.tolist():
            k = max(1, int(n * rng.choice([0.0005, 0.02, 0.9])))
            positions.append(np.sort(rng.choice(n, k, replace=False)).astype(np.uint32))
            counts.append(k)
        values = rng.integers(1, 256, sum(counts)).astype(WORD_DTYPES[w]) << (8 * (w - 1) if w < 8 else 0)
        ids = np.full(len(words), f, np.uint32)
        out.append(
            Entries(
                w,
                ids,
                np.arange(len(words), dtype=np.uint32),
                words,
                np.array(counts, np.uint32),
                np.concatenate(positions),
                values.astype(WORD_DTYPES[w]),
            )
        )
    return out


def unpack(frames: list[Entries], edit: int | None = None) -> RawFrames:
    encoded = [SparseCodec().encode(e) for e in frames]
    stored = [bytearray(b"".join(e.planes)) for e in encoded]
    if edit is not None:
        stored[edit % len(stored)][edit % len(stored[edit % len(stored)])] ^= 1 + edit % 255
    return unpack_frames(
        FrameShape(
            frames[0].word_nbytes,
            np.concatenate([e.tensor_ids for e in frames]),
            np.concatenate([e.tiles for e in frames]),
            np.concatenate([e.tile_words for e in frames]),
            0,
        ),
        np.array([len(e.tiles) for e in frames]),
        np.array([e.num_changed for e in frames]),
        [memoryview(s) for s in stored],
        np.array([e.plane_nbytes for e in encoded]),
    )


def joined(raw: RawFrames) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.stack([np.concatenate(p) for p in planes]) for planes in (raw.entries, raw.masks))  # type: ignore[return-value]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), w=st.sampled_from([1, 2, 4, 8]), num=st.integers(1, 4))
def test_planes_expand_to_the_entries(seed: int, w: int, num: int) -> None:
    frames = frames_of(np.random.default_rng(seed), w, num)
    raw = unpack(frames)
    entries, masks = joined(raw)
    check_planes(entries, masks, raw.counts, raw.segments.words, raw.dense, w)
    planes = Planes(w, torch.from_numpy(raw.counts), torch.from_numpy(entries), torch.from_numpy(masks))
    segment, position, value = expand_reference(planes, raw.segments.words)
    np.testing.assert_array_equal(
        raw.segments.base[segment.numpy()] + position.numpy(), np.concatenate([e.positions for e in frames])
    )
    np.testing.assert_array_equal(
        value.numpy().astype(np.uint64), np.concatenate([e.values for e in frames]).astype(np.uint64)
    )
    np.testing.assert_array_equal(
        np.add.reduceat(raw.counts, raw.segments.first), np.concatenate([e.counts for e in frames])
    )
    for e in frames:  # the same planes as those that entries of a dense codec are cut into
        one = RawFrames.of(e)
        np.testing.assert_array_equal(joined(one)[0], joined(unpack([e]))[0])


@settings(max_examples=60, deadline=None)
@given(edit=st.integers(0, 1 << 30), w=st.sampled_from([1, 2]))
def test_a_flipped_byte_is_refused_or_still_a_frame(edit: int, w: int) -> None:
    frames = frames_of(np.random.default_rng(w), w, 2)
    try:
        raw = unpack(frames, edit)
        check_planes(*joined(raw), raw.counts, raw.segments.words, raw.dense, w)
    except FormatError:
        return
    entries, _ = joined(raw)
    assert (np.add.reduceat(raw.counts, raw.segments.first) > 0).all()
    assert entries[2:].any(axis=0).all()


def test_counts_that_lie_are_refused() -> None:
    (frame,) = frames_of(np.random.default_rng(0), 1, 1)
    shape = FrameShape(1, frame.tensor_ids, frame.tiles, frame.tile_words, 0)
    encoded = SparseCodec().encode(frame)
    stored = [memoryview(b"".join(encoded.planes))]
    lengths = np.array([encoded.plane_nbytes])
    tiles = np.array([len(frame.tiles)])
    with pytest.raises(FormatError, match="counts add up"):
        unpack_frames(shape, tiles, np.array([frame.num_changed + 1]), stored, lengths)
    with pytest.raises(FormatError, match="do not add up"):
        unpack_frames(shape, tiles, np.array([frame.num_changed]), stored, lengths + 1)
    with pytest.raises(FormatError, match="planes"):
        unpack_frames(shape, tiles, np.array([frame.num_changed]), stored, lengths[:, :-1])
    none = counts_plane(np.zeros(int(lengths[0, 0]) and len(RawFrames.of(frame).counts)))
    bad = [memoryview(none.tobytes() + stored[0][int(lengths[0, 0]) :].tobytes())]
    lengths[0, 0] = len(none)
    with pytest.raises(FormatError, match=r"counts add up|unchanged|stored bytes"):
        unpack_frames(shape, tiles, np.array([frame.num_changed]), bad, lengths)


@pytest.mark.parametrize("size", [1, 100, 255, 256, 300, 70_000, 140_000, 600_000])
def test_zstd_frames_are_walked_to_their_ends(size: int) -> None:
    rng = np.random.default_rng(size)
    raw = (rng.random(size) < 0.1).astype(np.uint8) * rng.integers(0, 256, size, dtype=np.uint8)
    parts = [compress(raw), compress(raw, block=True), compress(np.zeros(size, np.uint8))]
    data = np.frombuffer(b"".join(parts), np.uint8)
    nbytes = np.array([len(p) for p in parts])
    starts, sizes = np.cumsum(nbytes) - nbytes, np.full(3, size)
    check_zstd_frames(data, starts, nbytes, sizes)
    with pytest.raises(FormatError, match="content size"):
        check_zstd_frames(data, starts, nbytes, sizes + [0, 1, 0])
    longer = np.append(data, np.uint8(7))
    with pytest.raises(FormatError, match="shorter or longer"):
        check_zstd_frames(longer, starts, nbytes + [0, 0, 1], sizes)
    with pytest.raises(FormatError):
        check_zstd_frames(data, starts, nbytes - [0, 0, 1], sizes)
    bad = data.copy()
    bad[int(starts[1])] ^= 0xFF
    with pytest.raises(FormatError):
        check_zstd_frames(bad, starts, nbytes, sizes)


def test_positions_and_values_are_checked() -> None:
    entries = np.array([[5, 250], [0, 255], [1, 1]], np.uint8)
    counts, words, dense = np.array([2]), np.array([65_536]), np.array([False])
    none = np.empty((1, 0), np.uint8)
    with pytest.raises(FormatError, match="position 65536 is past the 65536 words"):
        check_planes(entries, none, counts, words, dense, 1)
    entries[0, 1] = 249
    check_planes(entries, none, counts, words, dense, 1)
    entries[2, 0] = 0
    with pytest.raises(FormatError, match="1 values are 0"):
        check_planes(entries, none, counts, words, dense, 1)
    mask = np.array([[0, 3, 0, 9]], np.uint8)
    check_planes(np.empty((3, 0), np.uint8), mask, np.array([2]), np.array([4]), np.array([True]), 1)
    with pytest.raises(FormatError, match="has 2 changed words, its count is 3"):
        check_planes(np.empty((3, 0), np.uint8), mask, np.array([3]), np.array([4]), np.array([True]), 1)


@pytest.mark.parametrize("nbytes", range(12))
def test_stored_bytes_that_end_early_are_no_frame(nbytes: int) -> None:
    """Also where they are the last of all: nothing is read past the end."""
    whole = np.frombuffer(compress(b"a" * 500), np.uint8)
    data = np.concatenate((whole, whole[:nbytes]))
    starts = np.array([0, len(whole)])
    with pytest.raises(FormatError):
        check_zstd_frames(data, starts, np.array([len(whole), nbytes]), np.array([500, 500]))
    with pytest.raises(FormatError):
        check_zstd_frames(whole[:nbytes], np.array([0]), np.array([nbytes]), np.array([500]))
