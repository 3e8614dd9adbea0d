"""Weights of the linear state digest, in torch: what a changed word contributes to the two lanes.

The formula is that of ``megasync.digest`` (format 1), which is above this floor; the constants are made here from the
same strings, and a test holds the two together. 64-bit sums wrap, so signed int64 arithmetic gives the same bits.
Comes before every kernel that sums digests. Must import nothing of megasync.
"""

from __future__ import annotations

from hashlib import sha256

import torch

_MASK64 = (1 << 64) - 1


def _constant(kind: str, lane: int, k: int) -> int:
    """First eight bytes, little-endian, of sha256 of the constant's name."""
    return int.from_bytes(sha256(f"megasync state digest {kind} {lane} {k}".encode()).digest()[:8], "little")


LANE_C: tuple[tuple[int, ...], ...] = tuple(tuple(_constant("C", lane, k) | 1 for k in range(4)) for lane in (0, 1))
"""Odd factor of each 4-byte unit in its group of four, by lane (unsigned)."""

LANE_S: tuple[int, int] = (_constant("S", 0, 0), _constant("S", 1, 0))
"""Seed of each lane (unsigned)."""


def signed(x: int) -> int:
    """The int64 with the bits of ``x`` modulo 2^64."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def splitmix64_reference(x: torch.Tensor) -> torch.Tensor:
    """Steele, Lea and Flood's splitmix64 finaliser (Java 8 SplittableRandom), element-wise.

    Args:
        x: int64, any shape; the bits are taken as unsigned.

    Returns:
        int64 of the same shape.
    """
    z = x + signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def unit_weights_reference(units: torch.Tensor, lane: int) -> torch.Tensor:
    """``K_lane`` of 4-byte unit numbers: ``(splitmix64((i >> 2) + S_lane) | 1) * C_lane[i & 3]``.

    Args:
        units: int64, any shape, >= 0.
        lane: 0 or 1.

    Returns:
        int64 of the same shape.
    """
    factors = torch.tensor([signed(c) for c in LANE_C[lane]], dtype=torch.int64, device=units.device)
    return (splitmix64_reference((units >> 2) + signed(LANE_S[lane])) | 1) * factors[units & 3]


def word_terms_reference(
    flat: torch.Tensor, values: torch.Tensor, word_nbytes: int, bit: int | None = None
) -> torch.Tensor:
    """What words, or nibbles of words, contribute to the two lanes.

    Args:
        flat: int64 ``[n]``, row-major word numbers in the canonical tensor.
        values: int64 ``[n]``, zero-extended (8-byte words as they are), or nibbles.
        word_nbytes: 1, 2, 4 or 8.
        bit: First bit of the nibble in its word; None where values are whole words.

    Returns:
        int64 ``[n, 2]``; sum it over words.
    """
    if bit is not None:  # a nibble lies in one byte: count bytes, whatever the word size
        return word_terms_reference(flat * word_nbytes + bit // 8, values << (bit % 8), 1)
    unit = (flat * word_nbytes) >> 2
    lanes = []
    for lane in (0, 1):
        weight = unit_weights_reference(unit, lane)
        if word_nbytes == 8:
            upper = unit_weights_reference(unit + 1, lane)
            lanes.append((values & 0xFFFFFFFF) * weight + _shift(values, 32) * upper)
        else:
            lanes.append(values * (weight << (((flat * word_nbytes) & 3) * 8)))
    return torch.stack(lanes, dim=1)


def change_terms_reference(
    flat: torch.Tensor, old: torch.Tensor, new: torch.Tensor, word_nbytes: int, bit: int | None = None
) -> torch.Tensor:
    """Touched-old terms and terms of new minus old, in the order of the kernels' sums.

    Args:
        flat: int64 ``[n]``, canonical word numbers.
        old: int64 ``[n]``, old values.
        new: int64 ``[n]``, new values.
        word_nbytes: 1, 2, 4 or 8.
        bit: See `word_terms_reference`.

    Returns:
        int64 ``[n, 4]``: touched-old lanes a and b, then new minus old lanes a and b.
    """
    before = word_terms_reference(flat, old, word_nbytes, bit)
    return torch.cat((before, word_terms_reference(flat, new, word_nbytes, bit) - before), dim=1)
