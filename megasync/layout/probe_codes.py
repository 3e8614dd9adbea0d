"""Tensors whose bytes spell their own canonical position, and the reading of what a loader made of them.

Every canonical atom (word, or nibble of packed tensors) has a number over all probed tensors. Each pass writes one
digit of that number as a bit pattern of the dtype; passes after the last digit write a hash of the number, so that
padding, constants and computed values are not taken for codes. Patterns are positive finite normal numbers near 1,
which survive any move and most checks of a loader. Before it comes `probe`; after it the fit. This module must import
nothing of megasync but ``layout`` records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
import torch

from megasync.layout.live import Specs
from megasync.layout.probe_patterns import NIBBLE, Alphabet, as_tensor

CHECK_BITS = 28
"""Bits of hash that a code must match to be believed."""

_CHUNK = 1 << 16


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


def word_round(specs: Specs, alphabets: Mapping[str, Alphabet]) -> Round:
    """A round that numbers the words of all tensors, in the patterns given for each."""
    return _round(specs, alphabets, nibbles=False)


def nibble_round(specs: Specs) -> Round:
    """A round that numbers the nibbles of packed tensors."""
    return _round(specs, dict.fromkeys(specs, NIBBLE), nibbles=True)


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
            for i, mine in _by_target(which, len(starts)):
                t = self._round.targets[i]
                if (t.alphabet.first, t.alphabet.size, t.dtype.itemsize) == self._kinds[k]:
                    out[t.name][storage] = (atoms[mine] - t.first, offsets[mine])
        return out

    def _atoms(self, data: np.ndarray, itemsize: int) -> np.ndarray:
        if self._round.nibbles:
            return np.stack((data & 15, data >> 4), axis=-1).reshape(-1)
        return data[: data.size // itemsize * itemsize].view(f"<u{itemsize}")


def _round(specs: Specs, alphabets: Mapping[str, Alphabet], *, nibbles: bool) -> Round:
    targets, first = [], 0
    for name, (shape, dtype) in specs.items():
        count = prod(shape) * (2 * dtype.itemsize if nibbles else 1)
        if count:
            targets.append(Target(name, tuple(shape), dtype, first, count, alphabets[name]))
        first += count
    return Round(tuple(targets), nibbles)


def _by_target(which: np.ndarray, count: int) -> Iterator[tuple[int, np.ndarray | slice]]:
    """Where each target's entries are, in order; as slices or runs where targets follow one another."""
    edges = np.flatnonzero(np.diff(which)) + 1
    if edges.size > _CHUNK:
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(count + 1))
        yield from ((i, order[bounds[i] : bounds[i + 1]]) for i in range(count) if bounds[i] < bounds[i + 1])
        return
    runs: dict[int, list[tuple[int, int]]] = {}
    if which.size:
        for a, b in pairwise([0, *edges.tolist(), which.size]):
            runs.setdefault(int(which[a]), []).append((a, b))
    for i, mine in runs.items():
        yield i, slice(*mine[0]) if len(mine) == 1 else np.concatenate([np.arange(a, b) for a, b in mine])


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
