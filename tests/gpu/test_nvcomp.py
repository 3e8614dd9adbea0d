"""nvCOMP on a GPU: raw blocks go between CPU and GPU in both directions, from pinned memory and from HBM.

Only blocks that the CPU decodes are given to a GPU decoder: malformed input is undefined behaviour there.
"""

from __future__ import annotations

import cramjam
import numpy as np
import pytest
import torch

from megasync.codecs import zero_run
from megasync.codecs.nvcomp import BlockBatch, plan_compress, plan_decompress, span_of
from megasync.codecs.nvcomp_library import NvcompLibrary, find_library
from megasync.errors import FormatError, MissingPackageError
from megasync.kernels.zero_run_rules import BLOCK_KINDS, BlockKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS)
# Tails: around 1, 16, 64, the format's own limits, and both block sizes in use.
LENGTHS = [
    1,
    2,
    4,
    5,
    12,
    13,
    15,
    16,
    17,
    63,
    64,
    65,
    100,
    127,
    128,
    1000,
    4095,
    16_383,
    16_384,
    65_535,
    65_536,
    65_537,
]
LENGTHS += [(1 << 20) - 1, 1 << 20]


@pytest.fixture(scope="module")
def library() -> NvcompLibrary:
    try:
        return NvcompLibrary(find_library())
    except MissingPackageError as error:
        pytest.skip(str(error))


def masks(density: float, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    parts = []
    for n in lengths:
        mask = np.zeros(n, dtype=np.uint8)
        changed = rng.random(n) < density
        mask[changed] = rng.integers(1, 256, int(changed.sum()))
        parts.append(mask)
    return parts


def encode(kind: BlockKind, mask: np.ndarray, encoder: str) -> bytes:
    if encoder == "zero-run":
        return zero_run.encode_mask(kind, mask, np.array([0, len(mask)])).data.tobytes()
    if kind == "lz4":
        return bytes(cramjam.lz4.compress_block(mask.tobytes(), store_size=False))
    return bytes(cramjam.snappy.compress_raw(mask.tobytes()))


def laid_out(blocks: list[bytes], gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks in one buffer with ``gap`` poisoned bytes between them: bytes, offsets, sizes."""
    nbytes = np.array([len(b) for b in blocks])
    offsets = np.cumsum(nbytes + gap) - nbytes - gap
    data = np.full(int(offsets[-1] + nbytes[-1]) + gap, 0xA5, dtype=np.uint8)
    for at, block in zip(offsets, blocks, strict=True):
        data[at : at + len(block)] = np.frombuffer(block, np.uint8)
    return data, offsets, nbytes


@KINDS
@pytest.mark.parametrize("encoder", ["zero-run", "stock"])
@pytest.mark.parametrize("density", [0.0, 0.00085, 0.02, 1.0])
@pytest.mark.parametrize("place", ["pinned", "hbm"])
def test_gpu_decodes_what_the_cpu_encoded(
    library: NvcompLibrary, kind: BlockKind, encoder: str, density: float, place: str
) -> None:
    parts = masks(density, LENGTHS)
    data, offsets, nbytes = laid_out([encode(kind, m, encoder) for m in parts], gap=3)
    source = torch.from_numpy(data)
    source = source.pin_memory() if place == "pinned" else source.cuda()
    gap = 5
    out_nbytes = np.array(LENGTHS)
    out_offsets = np.cumsum(out_nbytes + gap) - out_nbytes - gap
    out = torch.full((int(out_offsets[-1] + out_nbytes[-1]) + gap,), 0x5A, dtype=torch.uint8, device="cuda")
    plan = plan_decompress(library, kind, len(parts), 1 << 20, len(data))
    batch = BlockBatch(library, plan, out.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    batch.decompress(span_of(source), offsets, nbytes, span_of(out), out_offsets, out_nbytes, stream)
    with pytest.raises(ValueError, match="finish it first"):
        batch.decompress(span_of(source), offsets, nbytes, span_of(out), out_offsets, out_nbytes, stream)
    assert batch.finish().tolist() == LENGTHS
    found = out.cpu().numpy()
    for at, mask in zip(out_offsets, parts, strict=True):
        assert np.array_equal(found[at : at + len(mask)], mask), f"{kind} block of {len(mask)} bytes"
        assert (found[at + len(mask) : at + len(mask) + gap] == 0x5A).all(), f"written past {len(mask)} bytes"


@KINDS
@pytest.mark.parametrize("density", [0.0, 0.00085, 0.02, 1.0])
def test_cpu_decodes_what_the_gpu_encoded(library: NvcompLibrary, kind: BlockKind, density: float) -> None:
    parts = masks(density, LENGTHS, seed=1)
    data, offsets, nbytes = laid_out([m.tobytes() for m in parts], gap=0)
    source = torch.from_numpy(data).cuda()
    plan = plan_compress(library, kind, len(parts), 1 << 20)
    out = torch.empty(plan.output_nbytes, dtype=torch.uint8, device="cuda")
    batch = BlockBatch(library, plan, out.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    batch.compress(span_of(source), offsets, nbytes, span_of(out), stream)
    sizes = batch.finish()
    found = out.cpu().numpy()
    walk = zero_run.walk_lz4 if kind == "lz4" else zero_run.walk_snappy
    for i, mask in enumerate(parts):
        block = found[i * plan.slot_nbytes : i * plan.slot_nbytes + sizes[i]]
        walk(block, len(mask))
        decoded = np.empty(len(mask), dtype=np.uint8)
        zero_run.decode_into(kind, block, decoded)
        assert np.array_equal(decoded, mask), f"{kind} block of {len(mask)} bytes"


@KINDS
def test_another_length_is_an_error_and_the_batch_goes_on(library: NvcompLibrary, kind: BlockKind) -> None:
    parts = masks(0.01, [5000, 5000], seed=2)
    data, offsets, nbytes = laid_out([encode(kind, m, "zero-run") for m in parts], gap=0)
    source = torch.from_numpy(data).cuda()
    out = torch.zeros(10_001, dtype=torch.uint8, device="cuda")
    batch = BlockBatch(library, plan_decompress(library, kind, 2, 8192, len(data)), out.device)
    stream = torch.cuda.current_stream()
    arguments = (span_of(source), offsets, nbytes, span_of(out), np.array([0, 5000]))
    batch.decompress(*arguments, np.array([5000, 5001]), stream)  # room for one byte more than the block holds
    with pytest.raises(FormatError, match="1 of 2 blocks failed, first block 1"):
        batch.finish()
    batch.decompress(*arguments, np.array([5000, 5000]), stream)
    batch.finish()
    assert np.array_equal(out.cpu().numpy()[:10_000], np.concatenate(parts))
    empty = np.empty(0, dtype=np.int64)
    batch.decompress(span_of(source), empty, empty, span_of(out), empty, empty, stream)
    assert batch.finish().tolist() == []
    with pytest.raises(ValueError, match="no batch is queued"):
        batch.finish()


@pytest.mark.alone
@KINDS
def test_case_64_repeated_batches_are_equal_and_device_memory_is_flat(library: NvcompLibrary, kind: BlockKind) -> None:
    """Long overlapping matches at offset 1, again and again: a race in a decoder would show."""
    lengths = [65_536] * 256
    parts = masks(0.001, lengths, seed=3)
    data, offsets, nbytes = laid_out([encode(kind, m, "zero-run") for m in parts], gap=1)
    source = torch.from_numpy(data).pin_memory()
    expected = torch.from_numpy(np.concatenate(parts)).cuda()
    out = torch.empty_like(expected)
    out_nbytes = np.array(lengths)
    out_offsets = np.cumsum(out_nbytes) - out_nbytes
    batch = BlockBatch(library, plan_decompress(library, kind, 256, 65_536, len(data)), out.device)
    stream = torch.cuda.current_stream()
    free = []
    for _ in range(50):
        out.fill_(0xFF)
        batch.decompress(span_of(source), offsets, nbytes, span_of(out), out_offsets, out_nbytes, stream)
        batch.finish()
        assert torch.equal(out, expected)
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[5]
