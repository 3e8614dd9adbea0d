"""Tensors whose bytes spell their own canonical position, and the reading of what a loader made of them.

Every canonical atom (word, or nibble of packed tensors) has a number over all probed tensors. Each pass writes one
digit of that number as a bit pattern of the dtype; passes after the last digit write a hash of the number, so that
padding, constants and computed values are not taken for codes. Patterns are positive finite normal numbers near 1,
which survive any move and most checks of a loader. Before it comes `probe`; after it the fit. This module must import
nothing of megasync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

CHECK_BITS = 28
"""Bits of hash that a code must match to be believed."""

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Bit patterns ``first + symbol`` for symbols below ``size``."""

    first: int
    size: int


_FLOAT_8 = Alphabet(0x08, 119)
_ALPHABETS: dict[str, Alphabet] = {
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
_NIBBLE = Alphabet(1, 15)
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
    if name not in _ALPHABETS:
        raise ValueError(f"tensors of dtype {name} cannot be probed; supported are {sorted(_ALPHABETS)}")
    return name


@dataclass(frozen=True, slots=True)
class Target:
    """One canonical tensor in a round of passes.

    Attributes:
        name: Canonical name.
        shape: Extents in elements.
        dtype: torch dtype.
        first: Number of its first atom.
        num_atoms: Words, or nibbles in a nibble round.
        alphabet: Patterns of its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    num_atoms: int
    alphabet: Alphabet


@dataclass(frozen=True)
class Round:
    """A numbering of atoms and the passes that spell it.

    Attributes:
        targets: The coded tensors, in number order.
        nibbles: Whether atoms are nibbles.
        num_passes: Loads that the round takes.
    """

    targets: tuple[Target, ...]
    nibbles: bool
    num_passes: int = field(init=False)

    def __post_init__(self) -> None:
        """Counts the passes."""
        needed = [self.num_digits(t.alphabet) + _num_checks(t.alphabet) for t in self.targets]
        object.__setattr__(self, "num_passes", max(needed, default=0))

    @property
    def num_atoms(self) -> int:
        """Atoms over all targets."""
        return sum(t.num_atoms for t in self.targets)

    def num_digits(self, alphabet: Alphabet) -> int:
        """Passes that spell a number in an alphabet; number + 1 is spelt, so 0 never is."""
        digits, reach = 0, 1
        while reach < self.num_atoms + 1:
            digits, reach = digits + 1, reach * alphabet.size
        return digits

    def tensor(self, target: Target, index: int) -> torch.Tensor:
        """The tensor of one target in one pass.

        Args:
            target: One of the targets.
            index: Pass, from 0.

        Returns:
            Tensor of the target's shape and dtype, CPU, contiguous.
        """
        alphabet = target.alphabet
        patterns = np.empty(target.num_atoms, dtype="u1" if self.nibbles else f"<u{target.dtype.itemsize}")
        for lo in range(0, target.num_atoms, _CHUNK):
            part = patterns[lo : lo + _CHUNK]
            numbers = np.arange(target.first + 1 + lo, target.first + 1 + lo + part.size, dtype=np.uint64)
            symbols = _symbols(numbers, index, self.num_digits(alphabet), alphabet)
            part[:] = symbols + np.uint64(alphabet.first)
        if self.nibbles:
            patterns = patterns[0::2] | (patterns[1::2] << 4)
        return as_tensor(patterns, target.shape, target.dtype)


def word_round(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Round:
    """A round that numbers the words of all tensors."""
    return _round(specs, nibbles=False)


def nibble_round(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Round:
    """A round that numbers the nibbles of packed tensors."""
    return _round(specs, nibbles=True)


class Reader:
    """Decodes the storages of one round, pass by pass.

    For each alphabet and word size it keeps, per aligned atom of each storage, the number spelt so far and whether it
    can still be a code.
    """

    def __init__(self, passes: Round) -> None:
        self._round = passes
        self._kinds = sorted({(t.alphabet.first, t.alphabet.size, t.dtype.itemsize) for t in passes.targets})
        self._codes: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    def take(self, index: int, storages: Mapping[str, np.ndarray]) -> None:
        """Takes in the storages after one pass.

        Args:
            index: Pass, from 0, each once and in order.
            storages: Storage name to uint8 ``[nbytes]``.
        """
        for k, (first, size, itemsize) in enumerate(self._kinds):
            digits = self._round.num_digits(Alphabet(first, size))
            for name, data in storages.items():
                atoms = self._atoms(data, itemsize)
                key = (k, name)
                if key not in self._codes:
                    self._codes[key] = (np.zeros(atoms.size, np.uint64), np.ones(atoms.size, np.bool_))
                for lo in range(0, atoms.size, _CHUNK):
                    numbers, alive = (a[lo : lo + _CHUNK] for a in self._codes[key])
                    # Patterns below the first wrap, and are then out of range.
                    symbols = atoms[lo : lo + _CHUNK].astype(np.uint64) - np.uint64(first)
                    alive &= symbols < size
                    if index < digits:
                        numbers += symbols * np.uint64(size**index)
                    else:
                        alive &= symbols == _symbols(numbers, index, digits, Alphabet(first, size))

    def found(self) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """What was read after the last pass.

        Returns:
            Canonical name -> storage name -> ``(atoms, offsets)``: int64 number of each atom in its tensor, and int64
            offset of the place in units of atoms; offsets ascending.
        """
        starts = np.array([t.first for t in self._round.targets], dtype=np.int64)
        out: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {t.name: {} for t in self._round.targets}
        for (k, storage), (numbers, alive) in self._codes.items():
            alive = alive & (numbers > 0) & (numbers <= self._round.num_atoms)
            offsets = np.flatnonzero(alive)
            atoms = numbers[offsets].astype(np.int64) - 1
            which = np.searchsorted(starts, atoms, side="right") - 1
            order = np.argsort(which, kind="stable")
            edges = np.searchsorted(which[order], np.arange(len(starts) + 1))
            for i, t in enumerate(self._round.targets):
                mine = order[edges[i] : edges[i + 1]]
                kind = (t.alphabet.first, t.alphabet.size, t.dtype.itemsize)
                if mine.size and kind == self._kinds[k]:
                    out[t.name][storage] = (atoms[mine] - t.first, offsets[mine])
        return out

    def _atoms(self, data: np.ndarray, itemsize: int) -> np.ndarray:
        if self._round.nibbles:
            return np.stack((data & 15, data >> 4), axis=-1).reshape(-1)
        return data[: data.size // itemsize * itemsize].view(f"<u{itemsize}")


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
    alphabet = _ALPHABETS[dtype_name(dtype)]
    first, last = int(low * alphabet.size), max(int(low * alphabet.size) + 1, int(high * alphabet.size))
    symbols = rng.integers(first, last, prod(shape), dtype=np.uint64) + np.uint64(alphabet.first)
    return as_tensor(symbols.astype(f"<u{dtype.itemsize}"), shape, dtype)


def as_tensor(words: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Reads an array of words, or bytes, as a tensor of a dtype and shape, sharing memory."""
    return torch.from_numpy(np.ascontiguousarray(words).view(np.uint8)).view(dtype).reshape(shape)


def _round(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, nibbles: bool) -> Round:
    targets, first = [], 0
    for name, (shape, dtype) in specs.items():
        count = prod(shape) * (2 * dtype.itemsize if nibbles else 1)
        alphabet = _NIBBLE if nibbles else _ALPHABETS[dtype_name(dtype)]
        if count:
            targets.append(Target(name, tuple(shape), dtype, first, count, alphabet))
        first += count
    return Round(tuple(targets), nibbles)


def _symbols(numbers: np.ndarray, index: int, digits: int, alphabet: Alphabet) -> np.ndarray:
    """What a pass writes for atoms of these numbers (from 1): a digit of the number, then a hash of it."""
    size = np.uint64(alphabet.size)
    if index >= digits:
        return _hash(numbers, index) % size
    return numbers // np.uint64(alphabet.size**index) % size


def _num_checks(alphabet: Alphabet) -> int:
    return max(2, -(-CHECK_BITS // (alphabet.size.bit_length() - 1)))


def _hash(numbers: np.ndarray, index: int) -> np.ndarray:
    """splitmix64 of the number and the pass: spreads neighbouring numbers over all symbols."""
    z = numbers + np.uint64((0x9E3779B97F4A7C15 * (index + 1)) & ((1 << 64) - 1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
