"""Walkers: what any encoder makes passes; what passes is what independent decoders decode to the exact length."""

from __future__ import annotations

import cramjam
import lz4.block
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs import zero_run
from megasync.codecs.zero_run import BLOCK_KINDS, BlockKind
from megasync.codecs.zero_run_lockstep import suspects
from megasync.errors import FormatError

KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS)
WALKS = {"lz4": zero_run.walk_lz4, "snappy": zero_run.walk_snappy}


def accepts(kind: BlockKind, block: bytes, nbytes: int) -> bool:
    try:
        WALKS[kind](block, nbytes)
    except FormatError:
        return False
    return True


def decodes(kind: BlockKind, block: bytes, nbytes: int) -> bool:
    """Whether an independent decoder (lz4 in C, google/snappy in C++) gives exactly ``nbytes``."""
    try:
        if kind == "lz4":
            return len(lz4.block.decompress(block, uncompressed_size=nbytes)) == nbytes
        out = pyarrow.decompress(block, decompressed_size=nbytes, codec="snappy")
        return len(out) == nbytes
    except (lz4.block.LZ4BlockError, OSError, pyarrow.ArrowInvalid):
        return False


def encodings(kind: BlockKind, mask: bytes) -> list[bytes]:
    array = np.frombuffer(mask, np.uint8)
    ours = zero_run.encode_mask(kind, array, np.array([0, len(mask)])).data.tobytes()
    if kind == "snappy":
        return [ours, bytes(cramjam.snappy.compress_raw(mask)), pyarrow.compress(mask, codec="snappy", asbytes=True)]
    return [
        ours,
        bytes(cramjam.lz4.compress_block(mask, store_size=False)),
        lz4.block.compress(mask, mode="high_compression", store_size=False),
        pyarrow.compress(mask, codec="lz4_raw", asbytes=True),
    ]


def walk_all(kind: BlockKind, blocks: list[bytes], lengths: list[int], gap: int = 0) -> None:
    nbytes = np.array([len(b) for b in blocks])
    starts = np.cumsum(nbytes + gap) - nbytes - gap
    data = np.frombuffer(b"".join(b + b"\x2f" * gap for b in blocks), np.uint8)
    zero_run.walk_blocks(kind, data, starts, nbytes, np.array(lengths))


def sparse(rng: np.random.Generator, nbytes: int, density: float) -> bytes:
    mask = np.zeros(nbytes, dtype=np.uint8)
    changed = rng.random(nbytes) < density
    mask[changed] = rng.choice([1, 2, 0x2F, 0x20, 0xFE, 0xFF, 0xEE, 4, 200], int(changed.sum()))
    return mask.tobytes()


_pieces = st.one_of(
    st.sampled_from([1, 3, 4, 5, 6, 20, 63, 64, 65, 68, 200, 300, 700]).map(bytes),
    st.binary(min_size=1, max_size=4),
    st.sampled_from([b"\xfe\x01", b"\x2f\x07", b"\x2f\x01\x00\x01", b"abcabcabcabcabc"]),
)
masks = st.lists(_pieces, min_size=1, max_size=25).map(b"".join)


@KINDS
@settings(max_examples=200, deadline=None)
@given(mask=masks)
def test_blocks_of_every_encoder_pass_at_their_own_length_only(kind: BlockKind, mask: bytes) -> None:
    for block in encodings(kind, mask):
        WALKS[kind](block, len(mask))
        for wrong in (0, len(mask) - 1, len(mask) + 1, 1 << 20):
            assert wrong == len(mask) or not accepts(kind, block, wrong)
        for cut in (block[:-1], block + b"\x00", block[: len(block) // 2], b""):
            assert not accepts(kind, cut, len(mask))


@KINDS
@settings(max_examples=250, deadline=None)
@given(data=st.data(), mask=masks)
def test_what_passes_decodes_to_the_exact_length(kind: BlockKind, data: st.DataObject, mask: bytes) -> None:
    block = bytearray(data.draw(st.sampled_from(encodings(kind, mask))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(block) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                block[at] = data.draw(st.integers(0, 255))
            case "cut" if len(block) > 1:
                del block[at]
            case _:
                block.insert(at, data.draw(st.sampled_from([0, 1, 255, 0x2F, 0xFE])))
    if accepts(kind, bytes(block), len(mask)):
        assert decodes(kind, bytes(block), len(mask))


@pytest.mark.parametrize(
    ("block", "nbytes", "match"),
    [
        ("", 0, "token is due"),
        ("1e 61 0000 50 68656c6c6f", 24, "offset 0 after 1"),  # common decoders take it
        ("1e 61 0200 50 68656c6c6f", 24, "offset 2 after 1"),
        ("1e 61 0100 50 68656c6c6f", 23, "holds 24 bytes"),
        ("1e 61 0100 50 68656c6c6f", 25, "holds 24 bytes"),
        ("1e 61 0100 60 68656c6c6f", 25, "1 bytes before its literals"),
        ("1e 61 0100", 19, "token is due"),
        ("1e 61 01", 19, "inside the offset"),
        ("1e 61 0100 40 68656c6c", 23, "4 literals"),
        ("11 61 0100 50 68656c6c6f", 11, "10 bytes before its end"),
        ("f0", 15, "inside a literal length"),
        ("f0 ff ff", 600, "inside a literal length"),
        ("1f 61 0100 ff", 300, "inside a match length"),
        ("1f 61 0100 ff ff ff 00 50 68656c6c6f", 100, "holds 785 bytes or more"),
    ],
)
def test_lz4_rules(block: str, nbytes: int, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        zero_run.walk_lz4(bytes.fromhex(block), nbytes)


@pytest.mark.parametrize(
    ("block", "nbytes", "match"),
    [
        ("", 5, "varint"),
        ("05", 5, "holds 0 bytes"),
        ("06 10 68656c6c6f", 5, "varint"),
        ("8500 10 68656c6c6f", 5, "varint"),  # common decoders take it
        ("05 10 68656c6c", 5, "1 bytes before its literals"),
        ("05 10 68656c6c6f 00 61", 5, "holds 6 bytes or more"),
        ("05 00 61 01 00", 5, "offset 0 after 1"),
        ("05 00 61 01 02", 5, "offset 2 after 1"),
        ("05 00 61 01", 5, "inside the copy"),
        ("05 00 61 0e 01", 5, "inside the copy"),
        ("05 00 61 0f 01000001", 5, "offset 16777217"),
        ("40 fe 0100", 64, "offset 1 after 0"),
        ("41 00 61 fe 0100 fe 0100", 65, "holds 129 bytes or more"),
        ("05 f0", 5, "inside a literal length"),
        ("05 fc ffffff", 5, "inside a literal length"),
        ("05 fc ffffffff", 5, "before its literals"),
    ],
)
def test_snappy_rules(block: str, nbytes: int, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        zero_run.walk_snappy(bytes.fromhex(block), nbytes)


def test_elements_that_masks_do_not_have() -> None:
    four_byte_offset = bytes.fromhex("08 0c 61626364 0f 04000000")
    assert pyarrow.decompress(four_byte_offset, decompressed_size=8, codec="snappy").to_pybytes() == b"abcdabcd"
    zero_run.walk_snappy(four_byte_offset, 8)
    zero_run.walk_snappy(b"\x00", 0)
    zero_run.walk_lz4(b"\x00", 0)
    walk_all("snappy", [four_byte_offset] * 2000, [8] * 2000)
    for extra in (1, 2, 3, 4):
        length = b"\x05" + bytes(extra - 1)
        block = b"\x06" + bytes([59 + extra << 2]) + length + b"abcdef"
        assert pyarrow.decompress(block, decompressed_size=6, codec="snappy").to_pybytes() == b"abcdef"
        zero_run.walk_snappy(block, 6)
        walk_all("snappy", [block] * 2000, [6] * 2000)


@KINDS
@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3])
def test_many_valid_blocks_pass(kind: BlockKind, density: float) -> None:
    rng = np.random.default_rng(int(density * 1000))
    lengths = [int(n) for n in rng.integers(1, 20_000, 40)] + [1, 2, 12, 13, 128, 16_384, 1 << 17]
    plain = [sparse(rng, n, density) for n in lengths]
    for encoder in range(2):
        blocks = [encodings(kind, p)[encoder] for p in plain]
        walk_all(kind, blocks, lengths)
        walk_all(kind, blocks, lengths, gap=5)


@KINDS
def test_blocks_in_any_order_and_shared(kind: BlockKind) -> None:
    rng = np.random.default_rng(9)
    lengths = np.full(60, 5000)
    blocks = [encodings(kind, sparse(rng, 5000, 0.05))[0] for _ in lengths]
    nbytes = np.array([len(b) for b in blocks])
    starts = np.cumsum(nbytes) - nbytes
    data = np.frombuffer(b"".join(blocks), np.uint8)
    back = slice(None, None, -1)
    zero_run.walk_blocks(kind, data, starts[back], nbytes[back], lengths)
    twice = np.concatenate((starts, starts[:3]))
    zero_run.walk_blocks(kind, data, twice, np.concatenate((nbytes, nbytes[:3])), np.full(63, 5000))
    zero_run.walk_blocks(kind, data, starts[:0], nbytes[:0], lengths[:0])
    with pytest.raises(ValueError, match="outside"):
        zero_run.walk_blocks(kind, data, starts + 1, nbytes, lengths)
    with pytest.raises(ValueError, match="sizes"):
        zero_run.walk_blocks(kind, data, starts, nbytes[1:], lengths)


@KINDS
def test_case_23_one_bad_block_among_many_is_named(kind: BlockKind) -> None:
    rng = np.random.default_rng(5)
    lengths = [20_000] * 50
    blocks = [encodings(kind, sparse(rng, n, 0.02))[0] for n in lengths]
    for victim in (0, 23, 49):
        with pytest.raises(FormatError, match=rf"^block {victim} of 50: .* report the publisher$"):
            walk_all(kind, blocks, [n + (i == victim) for i, n in enumerate(lengths)])


@KINDS
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_the_filter_passes_nothing_that_a_single_walk_refuses(kind: BlockKind, data: st.DataObject, seed: int) -> None:
    """Every block of a large batch is damaged in its own way; a batch passes exactly when all its blocks do."""
    rng = np.random.default_rng(seed)
    density = data.draw(st.sampled_from([0.003, 0.02, 0.1]))
    num, nbytes = 60, 8000 if density < 0.01 else 3000
    blocks = [bytearray(encodings(kind, sparse(rng, nbytes, density))[0]) for _ in range(num)]
    blocks = [b for b in blocks if len(b) > 2]
    blocks *= -(-20_000 // sum(map(len, blocks)))  # enough bytes for the filter to be used
    lengths = [nbytes] * len(blocks)
    for i in range(len(blocks)):
        block = bytearray(blocks[i])
        at = int(rng.integers(0, len(block)))
        change = rng.integers(0, 5)
        if change == 0:
            block[at] = int(rng.choice([0, 1, 2, 5, 0x1F, 0x2F, 0x20, 0xFE, 0xEE, 0xFF]))
        elif change == 1:
            block[at] ^= 1 << int(rng.integers(0, 8))
        elif change == 2:
            del block[at]
        elif change == 3:
            block.insert(at, int(rng.choice([0, 1, 0x2F, 0xFE, 0xFF])))
        else:
            lengths[i] += int(rng.integers(-2, 3))
        blocks[i] = block
    verdicts = [accepts(kind, bytes(b), n) for b, n in zip(blocks, lengths, strict=True)]
    sizes = np.array([len(b) for b in blocks])
    ends = np.cumsum(sizes)
    span = np.frombuffer(b"".join(blocks), np.uint8)
    suspected = set(suspects(kind, span, ends - sizes, ends, np.array(lengths)).tolist())
    assert {i for i, good in enumerate(verdicts) if not good} <= suspected
    good = [(bytes(b), n) for b, n, v in zip(blocks, lengths, verdicts, strict=True) if v]
    if good:
        walk_all(kind, [b for b, _ in good], [n for _, n in good])
