"""The Triton zero-run encoders on a GPU give the bytes of the numpy encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync.codecs import zero_run
from megasync.kernels.zero_run import changed_positions, encode_zero_run
from megasync.kernels.zero_run_rules import BLOCK_KINDS, BlockKind

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS)


def sample(nbytes: int, density: float, seed: int, value: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mask = np.zeros(nbytes, dtype=np.uint8)
    changed = rng.random(nbytes) < density
    mask[changed] = value or rng.integers(1, 256, int(changed.sum()))
    return mask


def check(kind: BlockKind, mask: np.ndarray, bounds: np.ndarray) -> None:
    expected = zero_run.encode_mask(kind, mask, bounds)
    data, ends = encode_zero_run(kind, torch.from_numpy(mask).cuda(), torch.from_numpy(bounds))
    assert ends.cpu().tolist() == expected.bounds.tolist()
    found = data.cpu().numpy()
    different = np.flatnonzero(found != expected.data)
    assert not len(different), f"{len(different)} bytes differ, first at {different[0]}"


@KINDS
@pytest.mark.parametrize("density", [0.0, 0.00085, 0.01, 0.3, 1.0])
def test_equal_bytes_at_any_density(kind: BlockKind, density: float) -> None:
    mask = sample((9 << 20) + 4321, density, seed=1)
    check(kind, mask, zero_run.block_bounds(len(mask)))
    check(kind, mask, zero_run.block_bounds(len(mask), 65_536))


@KINDS
def test_equal_bytes_of_odd_blocks(kind: BlockKind) -> None:
    rng = np.random.default_rng(2)
    lengths = np.concatenate((np.arange(1, 300), rng.integers(1, 5000, 500), [1 << 20, 70_000]))
    bounds = np.cumsum(np.concatenate(([3], lengths)))
    mask = sample(int(bounds[-1]) + 5, 0.02, seed=3)
    mask[bounds[-2] + 10 : bounds[-2] + 66_500] = 7  # literals with three length bytes
    check(kind, mask, bounds)


@KINDS
@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 16, 63, 64, 65])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_equal_bytes_of_tiny_masks(kind: BlockKind, nbytes: int, density: float) -> None:
    check(kind, sample(nbytes, density, seed=nbytes), np.array([0, nbytes]))


def test_positions_equal_torch() -> None:
    for nbytes in (5, 8, 16_384, 16_385, (3 << 20) + 3):
        mask = torch.from_numpy(sample(nbytes, 0.03, seed=nbytes)).cuda()
        assert torch.equal(changed_positions(mask), torch.nonzero(mask).squeeze(1))
    with pytest.raises(ValueError, match="aligned"):
        changed_positions(mask[1:])


@KINDS
def test_large_mask_decodes_and_walks(kind: BlockKind) -> None:
    """One call over 1 GiB, checked by decoding on the CPU in part and by size in full."""
    nbytes = 1 << 30
    generator = torch.Generator("cuda").manual_seed(4)
    positions = torch.randint(nbytes, (nbytes // 1176,), generator=generator, device="cuda")
    mask = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    mask[positions] = 1
    bounds = zero_run.block_bounds(nbytes)
    data, ends = encode_zero_run(kind, mask, torch.from_numpy(bounds))
    ends_host, blocks = ends.cpu().numpy(), data.cpu().numpy()
    zero_run.walk_blocks(kind, blocks, ends_host[:-1], np.diff(ends_host), np.diff(bounds))
    out = np.empty(1 << 20, dtype=np.uint8)
    for i in (0, 1, 511, 1023):
        zero_run.decode_into(kind, blocks[ends_host[i] : ends_host[i + 1]], out)
        assert np.array_equal(out, mask[i << 20 : (i + 1) << 20].cpu().numpy())
