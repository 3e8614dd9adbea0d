"""Zero-run encoders: bytes against a second, byte-at-a-time encoder; decoding by lz4, google/snappy and cramjam."""

from __future__ import annotations

import lz4.block
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs import zero_run
from megasync.codecs.zero_run import BLOCK_KINDS, BlockKind, block_bounds
from megasync.errors import FormatError

KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS)


def plain_sequences(kind: BlockKind, mask: bytes) -> list[tuple[bytes, int]]:
    """Literals and match length of each sequence, byte by byte from the rules."""
    n, sequences, literals, i = len(mask), [], bytearray(), 0
    last_literals, guard = (5, 12) if kind == "lz4" else (0, 0)
    while i < n:
        run_end = i
        while run_end < n and mask[run_end] == 0:
            run_end += 1
        start, stop = i + 1, min(run_end, n - last_literals)
        if stop - start >= 4 and start <= n - guard:
            literals.append(0)
            sequences.append((bytes(literals), stop - start))
            literals, i = bytearray(), stop
            while i < n and mask[i] == 0 and i < run_end:
                literals.append(0)
                i += 1
        else:
            literals += mask[i : max(run_end, i + 1)]
            i = max(run_end, i + 1)
    return [*sequences, (bytes(literals), 0)]


def plain_lz4(mask: bytes) -> bytes:
    def extension(value: int) -> bytes:
        return b"\xff" * (value // 255) + bytes([value % 255]) if value >= 0 else b""

    out = b""
    for literals, match in plain_sequences("lz4", mask):
        token = min(len(literals), 15) << 4 | (min(match - 4, 15) if match else 0)
        out += bytes([token]) + extension(len(literals) - 15) + literals
        if match:
            out += b"\x01\x00" + extension(match - 19)
    return out


def plain_snappy(mask: bytes) -> bytes:
    n, out = len(mask), b""
    while n >= 128:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    out += bytes([n])
    for literals, match in plain_sequences("snappy", mask):
        length = len(literals)
        if length > 60:
            width = (length - 1).bit_length() + 7 >> 3
            out += bytes([59 + width << 2]) + (length - 1).to_bytes(width, "little")
        elif length:
            out += bytes([length - 1 << 2])
        out += literals
        copies = [64] * (match // 64)
        if 0 < match % 64 < 4:
            copies[-1] = 60
            copies.append(match % 64 + 4)
        elif match % 64:
            copies.append(match % 64)
        for copy in copies:
            out += bytes([copy - 4 << 2 | 1, 1]) if copy < 12 else bytes([copy - 1 << 2 | 2, 1, 0])
    return out


PLAIN = {"lz4": plain_lz4, "snappy": plain_snappy}


def decoded_by_all(kind: BlockKind, block: bytes, nbytes: int) -> set[bytes]:
    out = np.full(nbytes, 0x5A, dtype=np.uint8)
    zero_run.decode_into(kind, block, out)
    arrow = pyarrow.decompress(block, decompressed_size=nbytes, codec="lz4_raw" if kind == "lz4" else "snappy")
    found = {out.tobytes(), arrow.to_pybytes()}
    if kind == "lz4":
        found.add(lz4.block.decompress(block, uncompressed_size=nbytes))
    return found


def random_mask(nbytes: int, density: float, seed: int, value: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mask = np.zeros(nbytes, dtype=np.uint8)
    changed = rng.random(nbytes) < density
    mask[changed] = value or rng.integers(1, 256, int(changed.sum()))
    return mask


# Pieces of a mask: runs of zeros around every limit of the formats, and changed bytes.
_zeros = st.sampled_from(
    [*range(14), 18, 19, 20, 59, 60, 61, 63, 64, 65, 66, 67, 68, 69, 75, 76, 77, 128, 192, 273, 274, 275]
)
_pieces = st.one_of(
    _zeros.map(bytes), st.binary(min_size=1, max_size=5), st.sampled_from([b"\x01", b"\xfe\x01", b"\x2f\x2f"])
)
masks = st.one_of(
    st.lists(_pieces, min_size=1, max_size=30).map(b"".join).filter(len),
    st.integers(1, 80).map(bytes),
    st.binary(min_size=1, max_size=80),
)


@KINDS
@settings(max_examples=300, deadline=None)
@given(mask=masks)
def test_bytes_equal_the_plain_encoder_and_decode_everywhere(kind: BlockKind, mask: bytes) -> None:
    array = np.frombuffer(mask, np.uint8)
    encoded = zero_run.encode_mask(kind, array, np.array([0, len(mask)]))
    block = encoded.data.tobytes()
    assert block == PLAIN[kind](mask)
    assert encoded.bounds.tolist() == [0, len(block)]
    assert encoded.num_changed.tolist() == [len(mask) - mask.count(0)]
    assert decoded_by_all(kind, block, len(mask)) == {mask}


@KINDS
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(masks, min_size=1, max_size=8))
def test_a_batch_equals_its_blocks_one_by_one(kind: BlockKind, parts: list[bytes]) -> None:
    array = np.frombuffer(b"".join(parts), np.uint8)
    bounds = np.cumsum([0, *map(len, parts)])
    encoded = zero_run.encode_mask(kind, array, bounds)
    positions, values = zero_run.changed_bytes(array)
    from_entries = zero_run.encode_entries(kind, positions, values, bounds)
    assert [encoded.block(i).tobytes() for i in range(len(encoded))] == [PLAIN[kind](p) for p in parts]
    assert from_entries.data.tobytes() == encoded.data.tobytes()
    assert from_entries.bounds.tolist() == encoded.bounds.tolist()
    assert from_entries.num_changed.tolist() == encoded.num_changed.tolist() == [len(p) - p.count(0) for p in parts]


@KINDS
@pytest.mark.parametrize("density", [0.0, 0.00085, 0.01, 0.2, 0.97, 1.0])
@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) - 1, 65_537])
def test_large_blocks_of_any_density(kind: BlockKind, density: float, nbytes: int) -> None:
    mask = random_mask(nbytes, density, seed=nbytes)
    block = zero_run.encode_mask(kind, mask, block_bounds(nbytes)).data.tobytes()
    assert decoded_by_all(kind, block, nbytes) == {mask.tobytes()}
    (zero_run.walk_lz4 if kind == "lz4" else zero_run.walk_snappy)(block, nbytes)


@KINDS
def test_many_groups_and_a_short_last_block(kind: BlockKind) -> None:
    mask = random_mask((18 << 20) + 12_345, 0.001, seed=1, value=1)
    bounds = block_bounds(len(mask))
    encoded = zero_run.encode_mask(kind, mask, bounds)
    shifted = zero_run.encode_entries(kind, zero_run.changed_bytes(mask)[0] + 777, mask[mask != 0], bounds + 777)
    assert shifted.data.tobytes() == encoded.data.tobytes()
    out = np.empty(len(mask), dtype=np.uint8)
    for i in range(len(encoded)):
        zero_run.decode_into(kind, encoded.block(i), out[bounds[i] : bounds[i + 1]])
    assert np.array_equal(out, mask)
    dense = random_mask(1 << 19, 0.5, seed=2)
    tiny = np.arange(0, len(dense) + 1, 64)
    parts = zero_run.encode_mask(kind, dense, tiny)
    assert [parts.block(i).tobytes() for i in (0, 4095, 4096, 8191)] == [
        PLAIN[kind](dense[64 * i : 64 * i + 64].tobytes()) for i in (0, 4095, 4096, 8191)
    ]


def test_known_bytes() -> None:
    mask = np.zeros(1100, dtype=np.uint8)
    mask[10], mask[1060] = 7, 9
    assert zero_run.encode_mask("lz4", mask, np.array([0, 1100])).data.tobytes() == bytes.fromhex(
        "15 00 0100  2f 0700 0100 ff ff ff ff 09  2f 0900 0100 0e  50 0000000000"
    )
    assert zero_run.encode_mask("snappy", mask, np.array([0, 1100])).data.tobytes() == bytes.fromhex(
        "cc08  00 00 1501  04 0700" + "fe0100" * 16 + "5e0100  04 0900 960100"
    )
    assert zero_run.encode_mask("lz4", np.zeros(1, np.uint8), np.array([0, 1])).data.tobytes() == b"\x10\x00"
    assert zero_run.encode_mask("snappy", np.zeros(1, np.uint8), np.array([0, 1])).data.tobytes() == b"\x01\x00\x00"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.integers(1, 400), st.integers(0, 7))
def test_changed_bytes_of_any_density_and_alignment(seed: int, density: float, nbytes: int, offset: int) -> None:
    mask = random_mask(nbytes + offset, density, seed)[offset:]
    positions, values = zero_run.changed_bytes(mask)
    assert positions.tolist() == np.nonzero(mask)[0].tolist()
    assert values.tolist() == mask[mask != 0].tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_case_51_changed_words_become_changed_bytes(width: int) -> None:
    """A sign bit alone (negative zero) is one changed byte; every other byte of its word stays unchanged."""
    words = np.array([1 << (8 * width - 1), 1, 2 ** (8 * width) - 1], dtype=f"<u{width}")
    positions, values = zero_run.byte_changes(np.array([0, 5, 6], dtype=np.uint32), words)
    dense = np.zeros(8, dtype=f"<u{width}")
    dense[[0, 5, 6]] = words
    flat = dense.view(np.uint8)
    assert positions.tolist() == np.nonzero(flat)[0].tolist()
    assert values.tolist() == flat[flat != 0].tolist()


@KINDS
def test_rule_zero_run_then_stock_then_stored(kind: BlockKind) -> None:
    n = 1 << 16
    sparse = np.zeros(n, dtype=np.uint8)
    sparse[: n : zero_run.ZERO_RUN_MAX_DENSITY_INVERSE] = 3
    assert zero_run.encode_block(kind, sparse) == (False, PLAIN[kind](sparse.tobytes()))
    dense = sparse.copy()
    dense[1] = 3  # one changed byte more than the limit
    stored, block = zero_run.encode_block(kind, dense)
    assert not stored
    assert block != PLAIN[kind](dense.tobytes())
    assert len(block) < len(PLAIN[kind](dense.tobytes()))
    assert decoded_by_all(kind, block, n) == {dense.tobytes()}
    noise = random_mask(n, 1.0, seed=3)
    assert zero_run.encode_block(kind, noise) == (True, noise.tobytes())
    one = np.array([5], dtype=np.uint8)
    assert zero_run.encode_block(kind, one) == (True, b"\x05")


@KINDS
def test_blocks_of_a_mask_each_by_its_own_density(kind: BlockKind) -> None:
    size = 4096
    densities = [0.0, 0.001, 0.3, 1.0, 1.0, 0.002, 0.05, 0.7]
    parts = [random_mask(size, d, seed=i) for i, d in enumerate(densities)]
    encoded = zero_run.encode_blocks(kind, np.concatenate(parts), np.arange(0, size * len(parts) + 1, size))
    for i, part in enumerate(parts):
        assert (bool(encoded.stored[i]), encoded.block(i).tobytes()) == zero_run.encode_block(kind, part)
        assert encoded.num_changed[i] == np.count_nonzero(part)
    assert encoded.stored.tolist() == [False, False, False, True, True, False, False, encoded.stored[7]]
    assert encoded.bounds[-1] == len(encoded.data)


@KINDS
def test_decoding_refuses_another_length(kind: BlockKind) -> None:
    block = zero_run.encode_mask(kind, random_mask(1000, 0.02, seed=4), np.array([0, 1000])).data.tobytes()
    for wrong in (1, 999, 1001, 5000):
        with pytest.raises(FormatError, match=rf"{wrong}"):
            zero_run.decode_into(kind, block, np.zeros(wrong, dtype=np.uint8))
    for cut in (block[:-1], block[:1], b""):
        with pytest.raises(FormatError):
            zero_run.decode_into(kind, cut, np.zeros(1000, dtype=np.uint8))
    zero_run.decode_lz4_into(b"\x10\x07", np.zeros(1, dtype=np.uint8))
    zero_run.decode_snappy_into(b"\x01\x00\x07", np.zeros(1, dtype=np.uint8))


@KINDS
@settings(max_examples=300, deadline=None)
@given(data=st.data(), mask=masks)
def test_decoding_flipped_bytes_raises_or_fills_exactly(kind: BlockKind, data: st.DataObject, mask: bytes) -> None:
    block = bytearray(PLAIN[kind](mask))
    block[data.draw(st.integers(0, len(block) - 1))] ^= data.draw(st.integers(1, 255))
    guarded = np.full(len(mask) + 64, 0xA5, dtype=np.uint8)
    try:
        zero_run.decode_into(kind, bytes(block), guarded[: len(mask)])
    except FormatError:
        pass
    assert (guarded[len(mask) :] == 0xA5).all()


def test_bad_calls_are_refused() -> None:
    mask, whole = np.zeros(64, dtype=np.uint8), np.array([0, 64])
    one, value = np.array([3]), np.array([1], dtype=np.uint8)
    bad = [
        lambda: zero_run.encode_mask("zstd", mask, whole),  # type: ignore[arg-type]
        lambda: zero_run.encode_mask("lz4", mask.astype(np.int8), whole),
        lambda: zero_run.encode_mask("lz4", mask[::2], np.array([0, 32])),
        lambda: zero_run.encode_mask("lz4", mask, np.array([0, 65])),
        lambda: zero_run.encode_mask("lz4", mask, np.array([0, 8, 8, 64])),
        lambda: zero_run.encode_mask("lz4", mask, np.array([-1, 64])),
        lambda: zero_run.encode_mask("lz4", mask, np.array([0])),
        lambda: zero_run.encode_mask("lz4", np.zeros(2 << 20, np.uint8), np.array([0, 2 << 20])),
        lambda: zero_run.encode_entries("lz4", np.array([64]), value, whole),
        lambda: zero_run.encode_entries("lz4", np.array([3, 3]), np.array([1, 1], np.uint8), whole),
        lambda: zero_run.encode_entries("lz4", one, np.array([0], dtype=np.uint8), whole),
        lambda: zero_run.encode_entries("lz4", one, np.array([1]), whole),
        lambda: zero_run.block_bounds(0),
        lambda: zero_run.block_bounds(10, 2 << 20),
        lambda: zero_run.decode_into("lz4", b"\x10\x07", np.zeros(4, dtype=np.uint8)[::2]),
    ]
    for call in bad:
        with pytest.raises(ValueError):
            call()
