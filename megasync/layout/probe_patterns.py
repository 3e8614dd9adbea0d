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


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The bits of a float dtype, and which patterns are no finite number.

    Attributes:
        mantissa: Mantissa bits.
        bias: Of the exponent.
        style: ``ieee`` has infinities and NaN under the top exponent; ``fn`` NaN where all bits but the sign are set;
            ``fnuz`` NaN where only the sign is set; ``scale`` is an exponent without a sign, NaN where all bits are set
            (OCP 8-bit Floating Point Specification 1.0 and OCP Microscaling Formats 1.0).
    """

    mantissa: int
    bias: int
    style: str


FLOATS: dict[str, FloatFormat] = {
    "bfloat16": FloatFormat(7, 127, "ieee"),
    "float16": FloatFormat(10, 15, "ieee"),
    "float32": FloatFormat(23, 127, "ieee"),
    "float64": FloatFormat(52, 1023, "ieee"),
    "float8_e4m3fn": FloatFormat(3, 7, "fn"),
    "float8_e4m3fnuz": FloatFormat(3, 8, "fnuz"),
    "float8_e5m2": FloatFormat(2, 15, "ieee"),
    "float8_e5m2fnuz": FloatFormat(2, 16, "fnuz"),
    "float8_e8m0fnu": FloatFormat(0, 127, "scale"),
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
        finite: Turn each NaN and infinity pattern into a finite one.

    Returns:
        Tensor, CPU, contiguous.
    """
    name, size = dtype_name(dtype), dtype.itemsize
    bits = np.frombuffer(rng.bytes(prod(shape) * size), dtype=f"<u{size}").copy()
    if name == "bool":
        bits &= 1
    if finite:
        _make_finite(bits.view("<u4") if name == "complex64" else bits, "float32" if name == "complex64" else name)
    return as_tensor(bits, shape, dtype)


def _make_finite(bits: np.ndarray, name: str) -> None:
    form = FLOATS.get(name)
    if form is None:
        return
    sign = 1 << (8 * bits.itemsize - 1)
    if form.style == "fnuz":
        bits[bits == sign] = 0
        return
    if form.style == "scale":
        bits[bits == 2 * sign - 1] = form.bias
        return
    exponent = (sign - 1) >> form.mantissa << form.mantissa
    mask = sign - 1 if form.style == "fn" else exponent
    full = bits & np.array(mask, bits.dtype) == mask
    bits[full] &= np.array(2 * sign - 1 - (sign >> 1), bits.dtype)


def leveled_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    alphabet: Alphabet,
    rng: np.random.Generator,
    low: float,
    high: float,
) -> torch.Tensor:
    """A tensor of random patterns from a part of an alphabet, which is ordered as its values are.

    Args:
        shape: Extents.
        dtype: torch dtype.
        alphabet: Its patterns.
        rng: Source of the symbols.
        low: Start of the part, from 0 to 1.
        high: End of the part.

    Returns:
        Tensor, CPU, contiguous.
    """
    first, last = int(low * alphabet.size), max(int(low * alphabet.size) + 1, int(high * alphabet.size))
    symbols = rng.integers(first, last, prod(shape), dtype=np.uint64) + np.uint64(alphabet.first)
    return as_tensor(symbols.astype(f"<u{dtype.itemsize}"), shape, dtype)


def ramp_tensors(
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    alphabets: Mapping[str, Alphabet],
    *,
    falling: bool,
    per_tensor: bool,
) -> dict[str, torch.Tensor]:
    """Tensors whose values rise, or fall, from word to word.

    A maximum or minimum over words or tensors picks different words of a rising and a falling ramp, so that it is not
    taken for a move, which over random draws it may be when it has few inputs.

    Args:
        specs: Canonical name to extents and torch dtype.
        alphabets: Canonical name to patterns.
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
        alphabet = alphabets[name]
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
