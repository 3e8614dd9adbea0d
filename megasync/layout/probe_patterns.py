"""Bit patterns of every dtype that a probe may write: codes, random bytes, raised and lowered values.

Codes are positive finite normal numbers near 1, which survive any move and most checks of a loader, and whose patterns
are ordered as their values are. Before it comes `probe`; after it `probe_codes`. This module must import nothing of
megasync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Bit patterns ``first + symbol`` for symbols below ``size``."""

    first: int
    size: int


_FLOAT_8 = Alphabet(0x08, 119)
ALPHABETS: dict[str, Alphabet] = {
    "bool": Alphabet(0, 2),
    "uint8": Alphabet(1, 255),
    "int8": Alphabet(1, 255),
    "uint16": Alphabet(1, 1 << 15),
    "int16": Alphabet(1, (1 << 15) - 1),
    "uint32": Alphabet(1, 1 << 30),
    "int32": Alphabet(1, 1 << 30),
    "uint64": Alphabet(1, 1 << 40),
    "int64": Alphabet(1, 1 << 40),
    "bfloat16": Alphabet(0x3E00, 1024),
    "float16": Alphabet(0x3000, 4096),
    "float32": Alphabet(0x3F000000, 1 << 24),
    "float64": Alphabet(0x3FE0 << 48, 1 << 40),
    "complex64": Alphabet(0x3F000000_3F000000, 1 << 23),
    "float8_e4m3fn": _FLOAT_8,
    "float8_e4m3fnuz": _FLOAT_8,
    "float8_e5m2": Alphabet(0x04, 120),
    "float8_e5m2fnuz": Alphabet(0x04, 120),
    "float8_e8m0fnu": Alphabet(0x40, 128),
    "float4_e2m1fn_x2": Alphabet(1, 255),
}
NIBBLE = Alphabet(1, 15)
"""Patterns of a packed 4-bit element."""

_EXPONENTS: dict[str, int] = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float64": 0x7FF0 << 48,
    "complex64": 0x7F800000_7F800000,
    "float8_e4m3fn": 0x78,
    "float8_e4m3fnuz": 0x78,
    "float8_e5m2": 0x7C,
    "float8_e5m2fnuz": 0x7C,
    "float8_e8m0fnu": 0x80,
}
PACKED = frozenset({"uint8", "int8", "int32", "float4_e2m1fn_x2"})
"""dtypes that may hold 4-bit elements."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype without its prefix.

    Raises:
        ValueError: The dtype cannot be probed.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ALPHABETS:
        raise ValueError(f"tensors of dtype {name} cannot be probed; supported are {sorted(ALPHABETS)}")
    return name


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator, *, finite: bool
) -> torch.Tensor:
    """A tensor of random bit patterns.

    Args:
        shape: Extents.
        dtype: torch dtype.
        rng: Source of the bits.
        finite: Clear the top exponent bit where the exponent is all ones, so that no NaN and no infinity is among them.

    Returns:
        Tensor, CPU, contiguous.
    """
    name, size = dtype_name(dtype), dtype.itemsize
    bits = np.frombuffer(rng.bytes(prod(shape) * size), dtype=f"<u{size}").copy()
    if name == "bool":
        bits &= 1
    if finite and name in _EXPONENTS:
        mask = _EXPONENTS[name]
        parts = (mask & 0xFFFFFFFF, mask & ~0xFFFFFFFF) if name == "complex64" else (mask,)
        for part in parts:
            full = bits & np.array(part, bits.dtype) == part
            top = 1 << (part.bit_length() - 1)
            bits[full] &= np.array(~top & ((1 << (8 * size)) - 1), bits.dtype)
    return as_tensor(bits, shape, dtype)


def leveled_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator, low: float, high: float
) -> torch.Tensor:
    """A tensor of random patterns from a part of its dtype's alphabet, which is ordered as its values are.

    Args:
        shape: Extents.
        dtype: torch dtype.
        rng: Source of the symbols.
        low: Start of the part, from 0 to 1.
        high: End of the part.

    Returns:
        Tensor, CPU, contiguous.
    """
    alphabet = ALPHABETS[dtype_name(dtype)]
    first, last = int(low * alphabet.size), max(int(low * alphabet.size) + 1, int(high * alphabet.size))
    symbols = rng.integers(first, last, prod(shape), dtype=np.uint64) + np.uint64(alphabet.first)
    return as_tensor(symbols.astype(f"<u{dtype.itemsize}"), shape, dtype)


def ramp_tensors(
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, falling: bool, per_tensor: bool
) -> dict[str, torch.Tensor]:
    """Tensors whose values rise, or fall, from word to word.

    A maximum or minimum over words or tensors picks different words of a rising and a falling ramp, so that it is not
    taken for a move, which over random draws it may be when it has few inputs.

    Args:
        specs: Canonical name to extents and torch dtype.
        falling: Fall instead of rise.
        per_tensor: A ramp in each tensor; else one over all tensors of a dtype, in the order of ``specs``.

    Returns:
        Canonical name to tensor, CPU, contiguous.
    """
    totals: dict[torch.dtype, int] = {}
    for shape, dtype in specs.values():
        totals[dtype] = totals.get(dtype, 0) + prod(shape)
    before: dict[torch.dtype, int] = {}
    out = {}
    for name, (shape, dtype) in specs.items():
        first, total = (0, prod(shape)) if per_tensor else (before.get(dtype, 0), totals[dtype])
        before[dtype] = before.get(dtype, 0) + prod(shape)
        alphabet = ALPHABETS[dtype_name(dtype)]
        levels = (
            (first + np.arange(prod(shape), dtype=np.float64)) / max(total - 1, 1) * (min(alphabet.size, 1 << 50) - 1)
        )
        symbols = levels.astype(np.uint64)
        if falling:
            symbols = np.uint64(alphabet.size - 1) - symbols
        out[name] = as_tensor((symbols + np.uint64(alphabet.first)).astype(f"<u{dtype.itemsize}"), shape, dtype)
    return out


def as_tensor(words: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Reads an array of words, or bytes, as a tensor of a dtype and shape, sharing memory."""
    return torch.from_numpy(np.ascontiguousarray(words).view(np.uint8)).view(dtype).reshape(shape)
