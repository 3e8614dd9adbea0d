from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs.base import Codec, FrameShape
from megasync.codecs.choice import AUTO, check_codec, encode_frame
from megasync.codecs.dense import ANCHOR_ID, mask_of
from megasync.codecs.registry import codec_by_id, codec_by_name, codecs
from megasync.errors import FormatError
from megasync.types import WORD_DTYPES, Entries, WholeEntries

NAMES = [n for n in codecs() if n != "anchor"]


def make_entries(tile_words: Sequence[int], densities: Sequence[float], w: int, seed: int = 0) -> Entries:
    """Random changed words; at least one in each tile."""
    rng = np.random.default_rng(seed)
    positions = []
    for num, density in zip(tile_words, densities, strict=True):
        found = np.flatnonzero(rng.random(num) < density)
        positions.append(found if len(found) else rng.integers(0, num, 1))
    values = rng.integers(0, 256, sum(map(len, positions)) * w, dtype=np.uint8).view(WORD_DTYPES[w]).copy()
    values[values == 0] = 1
    return Entries(
        w,
        np.zeros(len(tile_words), np.uint32),
        np.arange(len(tile_words), dtype=np.uint32),
        np.array(tile_words, dtype=np.uint32),
        np.array([len(p) for p in positions], dtype=np.uint32),
        np.concatenate(positions).astype(np.uint32),
        values,
    )


def shape_of(e: Entries) -> FrameShape:
    return FrameShape(e.word_nbytes, e.tensor_ids, e.tiles, e.tile_words, e.num_changed)


def round_trip(codec: Codec, e: Entries) -> Entries:
    frame = codec.encode(e)
    assert codec.encode(e).planes == frame.planes
    return codec.decode(shape_of(e), memoryview(b"".join(frame.planes)), frame.plane_nbytes)


def assert_equal(a: Entries, b: Entries) -> None:
    for field in ("tensor_ids", "tiles", "tile_words", "counts", "positions", "values"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
        assert getattr(a, field).dtype == getattr(b, field).dtype, field


@pytest.mark.parametrize("w", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_decode_gives_back_what_was_encoded(name: str, w: int) -> None:
    for words, densities in (
        ([1], [1.0]),
        ([65536], [0.001]),
        ([3, 65535, 65537, 200_001], [1.0, 0.001, 0.3, 0.9]),
        ([131072, 70], [1.0, 0.01]),
    ):
        e = make_entries(words, densities, w)
        assert_equal(round_trip(codec_by_name(name), e), e)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 70_000), st.sampled_from([0, 1e-4, 0.01, 0.4, 0.6, 1.0])), min_size=1, max_size=4
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(NAMES),
    st.integers(0, 99),
)
def test_any_entries_round_trip(tiles: list[tuple[int, float]], w: int, name: str, seed: int) -> None:
    e = make_entries([t[0] for t in tiles], [t[1] for t in tiles], w, seed)
    assert_equal(round_trip(codec_by_name(name), e), e)


def test_anchor_frames_may_have_tiles_that_are_all_zero() -> None:
    e = make_entries([10, 20], [1.0, 0.5], 2)
    zero = Entries(
        2,
        np.zeros(3, np.uint32),
        np.arange(3, dtype=np.uint32),
        np.array([10, 5, 20], np.uint32),
        np.array([e.counts[0], 0, e.counts[1]], np.uint32),
        e.positions,
        e.values,
    )
    assert_equal(round_trip(codec_by_id(ANCHOR_ID), zero), zero)


def test_sparse_planes_are_those_of_the_specification() -> None:
    e = Entries(
        2,
        np.array([7], np.uint32),
        np.array([0], np.uint32),
        np.array([65536 * 2], np.uint32),
        np.array([4], np.uint32),
        np.array([0, 300, 65535, 65536 + 5], np.uint32),
        np.array([1, 0x0203, 4, 5], "<u2"),
    )
    planes = codec_by_name("sparse").encode(e).planes
    assert planes[0] == bytes([3, 1, 0, 0, 0, 0, 0, 0])  # lowest bytes first
    gaps = [0, 299, 65234, 5]
    assert planes[1] == bytes(g & 255 for g in gaps)
    assert planes[2] == bytes(g >> 8 for g in gaps)
    assert planes[3] == bytes([1, 3, 4, 5])
    assert planes[4] == bytes([0, 2, 0, 0])
    assert planes[5:] == (b"", b"")


@pytest.mark.parametrize(("w", "count"), [(1, 34), (2, 50), (4, 67), (8, 80)])
def test_a_segment_is_dense_exactly_from_the_rule_on(w: int, count: int) -> None:
    for num, dense in ((count - 1, False), (count, True)):
        assert (num * (2 + w) >= 100 * w) is dense
        e = Entries(
            w,
            np.zeros(1, np.uint32),
            np.zeros(1, np.uint32),
            np.array([100], np.uint32),
            np.array([num], np.uint32),
            np.arange(num, dtype=np.uint32),
            np.ones(num, WORD_DTYPES[w]),
        )
        frame = codec_by_name("sparse").encode(e)
        assert bool(sum(frame.plane_nbytes[3 + w :])) is dense
        assert_equal(round_trip(codec_by_name("sparse"), e), e)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.001, 0.6])
def test_truncated_or_flipped_frames_never_pass_for_the_entries(name: str, density: float) -> None:
    codec = codec_by_name(name)
    e = make_entries([5000, 300], [density, density], 2)
    frame = codec.encode(e)
    stored = b"".join(frame.planes)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(stored), 150):
        flipped = bytearray(stored)
        flipped[at] ^= 1 << int(rng.integers(8))
        try:
            found = codec.decode(shape_of(e), memoryview(flipped), frame.plane_nbytes)
        except FormatError:
            continue
        # A flip inside values cannot be seen here (the digest sees it), but every rule still holds.
        assert found.values.all()
        assert (found.positions < np.repeat(found.tile_words, found.counts)).all()
        assert found.num_changed == e.num_changed
    for cut in (0, 1, len(stored) // 2, len(stored) - 1):
        with pytest.raises(FormatError):
            codec.decode(shape_of(e), memoryview(stored[:cut]), frame.plane_nbytes)


def planes_of(e: Entries) -> list[bytearray]:
    return [bytearray(p) for p in codec_by_name("sparse").encode(e).planes]


def small() -> Entries:
    return Entries(
        1,
        np.zeros(1, np.uint32),
        np.zeros(1, np.uint32),
        np.array([100], np.uint32),
        np.array([3], np.uint32),
        np.array([1, 5, 99], np.uint32),
        np.array([7, 8, 9], np.uint8),
    )


@pytest.mark.parametrize(
    ("plane", "at", "value", "message"),
    [
        (0, 0, 101, "101 changed words of 100"),
        (0, 0, 2, "add up to 2"),
        (1, 2, 94, "past its 100 words"),
        (3, 1, 0, "never 0"),
    ],
)
def test_case_23_a_sparse_frame_that_breaks_a_rule_is_refused_on_the_host(
    plane: int, at: int, value: int, message: str
) -> None:
    e = small()
    planes = planes_of(e)
    planes[plane][at] = value
    with pytest.raises(FormatError, match=message):
        codec_by_name("sparse").decode(shape_of(e), memoryview(b"".join(planes)), [len(p) for p in planes])


def test_planes_that_do_not_add_up_are_refused() -> None:
    e = small()
    frame = codec_by_name("sparse").encode(e)
    stored = memoryview(b"".join(frame.planes))
    with pytest.raises(FormatError, match="add up"):
        codec_by_name("sparse").decode(shape_of(e), stored, [*frame.plane_nbytes[:-1], 1])
    with pytest.raises(FormatError, match="4 planes, expected 5"):
        codec_by_name("sparse").decode(shape_of(e), stored, frame.plane_nbytes[:-1])


def test_a_zstd_bomb_is_refused_before_it_is_inflated() -> None:
    import zstandard

    e = make_entries([65536], [0.01], 1)
    frame = codec_by_name("sparse").encode(e)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    nbytes = [len(bomb), *frame.plane_nbytes[1:]]
    e4 = make_entries([65536] * 4000, [1e-9] * 4000, 1)
    with pytest.raises(FormatError, match=r"stored bytes for|content size"):
        codec_by_name("sparse").decode(shape_of(e4), memoryview(bomb + b"".join(frame.planes[1:])), nbytes)


def test_masks_of_all_codecs_are_the_same() -> None:
    e = make_entries([70_000, 5], [0.02, 1.0], 2)
    expected = mask_of(e)
    for name in NAMES:
        np.testing.assert_array_equal(mask_of(round_trip(codec_by_name(name), e)), expected)


def test_auto_follows_its_rule() -> None:
    for density, expected in ((0.001, "sparse"), (0.45, "sparse"), (0.99, "stored")):
        e = make_entries([65536], [density], 2)
        assert codec_by_id(encode_frame("auto", e).codec).name == expected
    e = make_entries([65536], [0.9], 2)
    e.values[:] = 1  # one value everywhere compresses
    assert codec_by_id(encode_frame("auto", e).codec).name == "sparse"


def test_whole_entries_are_the_entries_of_their_words() -> None:
    """Tiles with some, all and no words that differ from 0, through every codec."""
    words = np.array([0, 5, 0, 9, 1, 2, 0, 0, 0, 7], dtype="<u2")
    sizes = np.array([4, 2, 3, 1], dtype=np.uint32)
    ids, tiles = np.array([0, 0, 3, 4], dtype=np.uint32), np.array([0, 1, 0, 9], dtype=np.uint32)
    whole = WholeEntries(2, ids, tiles, sizes, words)
    assert whole.counts.tolist() == [2, 2, 0, 1]
    assert (whole.num_changed, whole.num_words) == (5, 10)
    assert whole.positions.tolist() == [1, 3, 0, 1, 0]
    assert whole.values.tolist() == [5, 9, 1, 2, 7]
    assert whole.positions is whole.positions  # readers take them tile by tile: never made anew
    assert whole.values is whole.values
    plain = Entries(2, ids, tiles, sizes, whole.counts, whole.positions, whole.values)
    np.testing.assert_array_equal(mask_of(plain), words)
    np.testing.assert_array_equal(mask_of(whole), words)
    for t, mine in enumerate(([0, 5, 0, 9], [1, 2], [0, 0, 0], [7])):
        assert plain.mask(t).tolist() == whole.mask(t).tolist() == mine
    for name in (*NAMES, "anchor"):
        assert codec_by_name(name).encode(whole) == codec_by_name(name).encode(plain)


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(ValueError, match="known: sparse"):
        codec_by_name("zip")
    with pytest.raises(FormatError, match="codec id 99"):
        codec_by_id(99)


def test_the_codec_of_anchors_cannot_be_chosen_and_auto_can() -> None:
    assert [check_codec(name) for name in [*NAMES, AUTO]] == [*NAMES, AUTO]
    for name in ("anchor", "foo", ""):
        with pytest.raises(ValueError, match=f"codec {name!r} cannot be chosen; take one of .*sparse.*, auto$") as e:
            check_codec(name)
        assert "anchor," not in str(e.value)
