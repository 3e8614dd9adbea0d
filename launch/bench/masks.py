"""Masks that benchmarks encode, and the fewest bytes that any coder of independent entries could need for them.

``article``: the public benchmark of the article's authors (uniformly random bytes of the weights, XOR 1, 8/9 of all bytes
eligible: block scales stay). ``uniform``: random bytes, random values. ``bf16``: one or a few steps in the last place of
bf16 elements. ``fp4``: one step of a packed e2m1 code. ``fp4-rows`` and ``fp4-blocks`` are clustered: rates that differ
from row to row by a Gamma(0.25), and whole 8-byte blocks 60 % filled; such masks can go below the bound, which knows
nothing of neighbours. Before it: nothing. After it: bench_payload, bench_cpu. Must not import a codec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lgamma, log, log2

import numpy as np

Values = Callable[[np.random.Generator, int], np.ndarray]

ROW_NBYTES = 16_384
"""Row of the matrix that stands for one large tensor."""

_BLOCK, _FILLED = 8, 0.6


@dataclass(frozen=True, slots=True)
class MaskKind:
    """How a mask is drawn.

    Attributes:
        name: Its name.
        letter: A to D as published; empty for the clustered ones.
        dtype: safetensors dtype of the tensor.
        word_nbytes: Bytes of a word of it.
        density: Changed words / all words as published.
        eligible: Share of the words that may change at all.
        values: Draws XOR values, ``<u{word_nbytes}`` ``[k]``, never 0.
        clustered: ``rows``, ``blocks``, or empty for uniformly random positions.
    """

    name: str
    letter: str
    dtype: str
    word_nbytes: int
    density: float
    eligible: float
    values: Values
    clustered: str = ""


def _ones(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.ones(num, dtype=np.uint8)


def _any_byte(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(1, 256, num, dtype=np.uint8)


def _bf16_steps(rng: np.random.Generator, num: int) -> np.ndarray:
    """A random element moves 1, 2 or 3 units in the last place: 89 %, 8 %, 3 % (measured at a learning rate of 1e-6)."""
    old = rng.integers(0, 1 << 15, num, dtype=np.uint16)
    step = rng.choice(np.array([1, 2, 3], np.uint16), num, p=[0.89, 0.08, 0.03])
    return old ^ (old + step)


# XOR of neighbouring e2m1 codes in the order of their values, -6 to 6 (0 and -0 are one value).
_E2M1_ORDER = np.array([15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7], dtype=np.uint8)
_E2M1_STEPS = _E2M1_ORDER[1:] ^ _E2M1_ORDER[:-1]


def _fp4_steps(rng: np.random.Generator, num: int) -> np.ndarray:
    """One of a byte's two codes moves to a neighbouring value."""
    return rng.choice(_E2M1_STEPS, num) << (4 * rng.integers(0, 2, num, dtype=np.uint8))


KINDS: dict[str, MaskKind] = {
    k.name: k
    for k in (
        MaskKind("article", "A", "U8", 1, 0.00085, 8 / 9, _ones),
        MaskKind("uniform", "B", "U8", 1, 0.00085, 1.0, _any_byte),
        MaskKind("bf16", "C", "BF16", 2, 0.0017, 1.0, _bf16_steps),
        MaskKind("fp4", "D", "U8", 1, 0.0017, 1.0, _fp4_steps),
        MaskKind("fp4-rows", "", "U8", 1, 0.0017, 1.0, _fp4_steps, "rows"),
        MaskKind("fp4-blocks", "", "U8", 1, 0.00085, 1.0, _fp4_steps, "blocks"),
    )
}


def draw(
    kind: MaskKind, num_words: int, rng: np.random.Generator, density: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the changed words of one large tensor.

    Args:
        kind: Which mask.
        num_words: Words of the tensor.
        rng: Source of randomness.
        density: Changed words / all words; the published one by default.

    Returns:
        Positions (int64 ``[k]``, ascending, distinct) and XOR values (``<u{w}`` ``[k]``).

    Raises:
        ValueError: A density that the eligible words cannot give.
    """
    density = kind.density if density is None else density
    eligible = int(num_words * kind.eligible)
    if not 0 < density * num_words <= eligible:
        raise ValueError(f"mask {kind.name}: density {density} of {num_words} words, of which {eligible} may change")
    positions = _POSITIONS[kind.clustered](eligible, density * num_words / eligible, rng)
    return positions, kind.values(rng, len(positions))


def uniform_positions(num_words: int, density: float, rng: np.random.Generator) -> np.ndarray:
    """Each word changes with probability ``density``, independently: int64, ascending.

    Sparse draws fill a binomial count with distinct random numbers, which is the same distribution and far cheaper.
    """
    if density > 1 / 16:
        return np.flatnonzero(rng.random(num_words, dtype=np.float32) < density)
    num = int(rng.binomial(num_words, density))
    found = np.unique(rng.integers(0, num_words, num))
    while len(found) < num:
        found = np.unique(np.concatenate((found, rng.integers(0, num_words, num - len(found)))))
    return found


def _by_row(num_words: int, density: float, rng: np.random.Generator) -> np.ndarray:
    rows = num_words // ROW_NBYTES
    rates = np.minimum(rng.gamma(0.25, density / 0.25, rows), 0.5)
    counts = rng.binomial(ROW_NBYTES, rates)
    flat = np.repeat(np.arange(rows, dtype=np.int64) * ROW_NBYTES, counts) + rng.integers(0, ROW_NBYTES, counts.sum())
    return np.unique(flat)


def _by_block(num_words: int, density: float, rng: np.random.Generator) -> np.ndarray:
    blocks = uniform_positions(num_words // _BLOCK, density / _FILLED, rng)
    filled = rng.random((len(blocks), _BLOCK)) < _FILLED
    return np.flatnonzero(filled) % _BLOCK + _BLOCK * np.repeat(blocks, filled.sum(axis=1))


_POSITIONS: dict[str, Callable[[int, float, np.random.Generator], np.ndarray]] = {
    "": uniform_positions,
    "rows": _by_row,
    "blocks": _by_block,
}


def bound_nbytes(num_words: int, values: np.ndarray) -> float:
    """The order-0 bound ``log2 C(n, k) + k H(value)``, in bytes.

    Args:
        num_words: Words that may change (n).
        values: XOR values of the k changed words.
    """
    return (position_bits(num_words, len(values)) + value_bits(values)) / 8


def position_bits(num_words: int, num_changed: int) -> float:
    """``log2 C(n, k)``: bits that say which k of n words changed where every choice is as likely."""
    rest = num_words - num_changed
    return (lgamma(num_words + 1) - lgamma(num_changed + 1) - lgamma(rest + 1)) / log(2)


def value_bits(values: np.ndarray) -> float:
    """``k H(value)``: bits of the values at their measured order-0 entropy."""
    _, counts = np.unique(values, return_counts=True)
    return -float(sum(int(c) * log2(int(c) / len(values)) for c in counts))


def _fp8_steps(rng: np.random.Generator, num: int) -> np.ndarray:
    """An e4m3 code moves to the next one of the same sign."""
    old = rng.integers(0, 126, num, dtype=np.uint8)
    return old ^ (old + np.uint8(1))


STEPS: dict[str, Values] = {"U8": _fp4_steps, "BF16": _bf16_steps, "F8_E4M3": _fp8_steps}
"""XOR values of a small optimizer step by dtype; ``U8`` holds packed e2m1 codes."""


class Histogram:
    """Counts XOR values of one dtype, for the bound of words that are drawn piece by piece."""

    def __init__(self, word_nbytes: int) -> None:
        self.counts = np.zeros(1 << min(8 * word_nbytes, 16), dtype=np.int64)
        self.num_words = 0
        self._wide = np.empty(0, dtype=f"<u{word_nbytes}")  # values that no table of counts has room for: few

    def add(self, num_words: int, values: np.ndarray) -> None:
        """Take in words that may change and the values of those that did."""
        self.num_words += num_words
        if values.itemsize > 2:
            self._wide = np.concatenate((self._wide, values))
            self.counts = np.unique(self._wide, return_counts=True)[1]
        else:
            self.counts += np.bincount(values, minlength=len(self.counts))

    @property
    def num_changed(self) -> int:
        """Words that changed."""
        return int(self.counts.sum())

    @property
    def bound_nbytes(self) -> float:
        """See ``bound_nbytes``."""
        num = self.num_changed
        if not num:
            return 0.0
        share = self.counts[self.counts > 0] / num
        return (position_bits(self.num_words, num) - num * float((share * np.log2(share)).sum())) / 8
