"""Weights that the quantisation golden files are about, made from integers alone so that no generator can change them."""

from __future__ import annotations

import numpy as np
import torch

ROWS, COLUMNS = 48, 128
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def _hash(n: int, seed: int) -> np.ndarray:
    """splitmix64 of 0..n-1, uint64."""
    with np.errstate(over="ignore"):
        z = (np.arange(n, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def bell(rows: int, columns: int, seed: int) -> np.ndarray:
    """Bell-shaped values of deviation about 1, float64: the sum of four 16-bit parts of a hash."""
    h = _hash(rows * columns, seed)
    parts = sum(((h >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4))
    return ((parts / 65536.0 - 2.0) * np.sqrt(3.0)).reshape(rows, columns)


def _ties() -> np.ndarray:
    """Every block has amax 6 * 2^k, so that scaled values lie on the midpoints of E2M1 and around them."""
    grid = np.array([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0])
    x = np.tile(grid, (ROWS, COLUMNS // 16))
    x[1::3] *= 1.0 + 2.0**-8
    x[2::3] *= 1.0 - 2.0**-8
    x[:, 0::16] = 6.0
    return x * np.exp2((np.arange(COLUMNS) // 16 % 4).astype(np.float64))


def _sparse() -> np.ndarray:
    """Zero blocks, zeros of both signs, negatives too small for their block."""
    x = bell(ROWS, COLUMNS, 3) * 0.02
    x[:16, :32] = 0.0
    x[17, 16:64] = -0.0
    x[18, 1::2] = -1e-9
    x[19] *= 1e-6
    x[20, ::3] = -0.0
    return x


def inputs(dtype: str) -> dict[str, torch.Tensor]:
    """Weights ``[48, 128]`` by case name.

    Args:
        dtype: ``bf16`` or ``f32``.
    """
    wide = bell(ROWS, COLUMNS, 2) * np.exp2(np.arange(ROWS) % 25 - 12.0)[:, None]
    cases = {
        "normal": bell(ROWS, COLUMNS, 1) * 0.02,
        "wide": wide,
        "ties": _ties(),
        "sparse": _sparse(),
        "tiny": bell(ROWS, COLUMNS, 4) * 1e-37,
        "huge": bell(ROWS, COLUMNS, 5) * 6e37,
        "zero": np.zeros((ROWS, COLUMNS)),
    }
    return {name: torch.from_numpy(x.astype(np.float32)).to(DTYPES[dtype]) for name, x in cases.items()}


def scattered(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Finite weights whose exponents lie anywhere in fp32's range, near or far from each other in a block.

    Args:
        rows: Rows.
        columns: Columns, a multiple of 16.
        seed: Which of them; the spread of exponents goes with it.
        dtype: bfloat16 or float32.
    """
    spread = (0, 4, 20, 60, 250)[seed % 5]
    h = _hash(rows * columns, seed + 100).reshape(rows, columns // 16, 16)
    centre = int(h[0, 0, 0] % np.uint64(241)) - 120
    near = (h >> np.uint64(52)).astype(np.int64) % 9 - 8
    far = (_hash(rows * columns // 16, seed + 200).astype(np.int64) % (2 * spread + 3) - spread - 1).reshape(
        rows, -1, 1
    )
    exponent = np.clip(centre + near + far, -149, 127)
    mantissa = 1.0 + (h & np.uint64(0xFFFFFF)).astype(np.float64) / 2.0**24
    x = np.ldexp(np.where(h & np.uint64(1 << 40), -mantissa, mantissa), exponent).reshape(rows, columns)
    x[0, : columns // 4] = 0.0
    x[1, ::3] = -0.0
    made = torch.from_numpy(x).to(dtype)
    return torch.where(torch.isfinite(made), made, torch.ones_like(made))
