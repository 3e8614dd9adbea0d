"""The torch reference and the Triton kernels (under the interpreter) give the bytes of the numpy encoder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs import zero_run
from megasync.kernels.zero_run import changed_positions, encode_zero_run
from megasync.kernels.zero_run_rules import BLOCK_KINDS, BlockKind

_ROOT = Path(__file__).resolve().parents[2]


def check(kind: BlockKind, mask: np.ndarray, bounds: np.ndarray, use_triton: bool) -> None:
    expected = zero_run.encode_mask(kind, mask, bounds)
    data, ends = encode_zero_run(kind, torch.from_numpy(mask.copy()), torch.from_numpy(bounds), use_triton=use_triton)
    assert data.numpy().tobytes() == expected.data.tobytes()
    assert ends.tolist() == expected.bounds.tolist()


def sample(seed: int, nbytes: int, density: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mask = np.zeros(nbytes, dtype=np.uint8)
    changed = rng.random(nbytes) < density
    mask[changed] = rng.integers(1, 256, int(changed.sum()))
    return mask


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.002, 0.02, 0.2, 1.0]),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    skip=st.integers(0, 9),
)
def test_reference_equals_numpy(kind: BlockKind, seed: int, density: float, sizes: list[int], skip: int) -> None:
    bounds = np.cumsum([skip, *sizes])
    check(kind, sample(seed, int(bounds[-1]) + skip, density), bounds, use_triton=False)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_reference_equals_numpy_on_a_full_block(kind: BlockKind) -> None:
    nbytes = (1 << 20) + 300_001
    mask = sample(1, nbytes, 0.001)
    mask[5000:80_000] = 7  # literals that need three length bytes
    mask[90_000:500_000] = 0
    check(kind, mask, zero_run.block_bounds(nbytes), use_triton=False)


def test_positions_and_bad_calls() -> None:
    mask = torch.zeros(100, dtype=torch.uint8)
    mask[[0, 7, 8, 63, 99]] = 3
    assert changed_positions(mask).tolist() == [0, 7, 8, 63, 99]
    whole = torch.tensor([0, 100])
    bad = [
        lambda: encode_zero_run("zstd", mask, whole),  # type: ignore[arg-type]
        lambda: encode_zero_run("lz4", mask.to(torch.int8), whole),
        lambda: encode_zero_run("lz4", mask[::2], torch.tensor([0, 50])),
        lambda: encode_zero_run("lz4", mask, torch.tensor([0, 101])),
        lambda: encode_zero_run("lz4", mask, torch.tensor([0, 50, 50, 100])),
        lambda: encode_zero_run("lz4", mask, torch.tensor([-1, 100])),
        lambda: encode_zero_run("lz4", mask, torch.tensor([0])),
        lambda: encode_zero_run("lz4", mask, whole.to(torch.int32)),
        lambda: encode_zero_run("lz4", torch.zeros(2 << 20, dtype=torch.uint8), torch.tensor([0, 2 << 20])),
        lambda: changed_positions(mask.to(torch.int8)),
    ]
    for call in bad:
        with pytest.raises(ValueError):
            call()


_INTERPRETED = """
import numpy as np, torch
from megasync.kernels.zero_run import changed_positions, encode_zero_run
from tests.unit.test_zero_run_kernels import check, sample

for kind in ("lz4", "snappy"):
    check(kind, sample(1, 1, 0.0), np.array([0, 1]), True)
    check(kind, sample(2, 1, 1.0), np.array([0, 1]), True)
    check(kind, sample(3, 20_011, 0.004), np.array([0, 1, 14, 4000, 20_011]), True)
    check(kind, sample(4, 700, 0.3), np.array([3, 200, 210, 690]), True)
long = sample(5, 67_000, 0.0)
long[100:66_000], long[66_900] = 9, 1  # literals with three length bytes
check("snappy", long, np.array([0, 67_000]), True)
mask = torch.from_numpy(sample(6, 40_003, 0.1))
assert changed_positions(mask, use_triton=True).tolist() == torch.nonzero(mask).squeeze(1).tolist()
try:
    encode_zero_run("lz4", mask[1:], torch.tensor([0, 8]), use_triton=True)
except ValueError as error:
    assert "aligned" in str(error), error
else:
    raise AssertionError("an unaligned mask was taken")
print("interpreted and equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_under_the_interpreter_equal_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "interpreted and equal" in done.stdout
