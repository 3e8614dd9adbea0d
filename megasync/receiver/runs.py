"""Runs: changed words with their physical offsets, read and written in live memory with numpy.

Made by ``place``, used by ``cpu``. Must import nothing above sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megasync.receiver.sums import Sums, sums_by_segment

Words = Callable[[int, int], np.ndarray]
"""A CPU storage by index, as words of a size (``Binding.words``)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where some of a run's words lie, through one record.

    Attributes:
        lead: Whether it holds words for the first time; the others are copies.
        offsets: int64 ``[m]``, in words of ``unit_nbytes``, each place once.
        select: Which of the run's words, int64 ``[m]``; None where all, in order.
        segments: ``(storage index, first, last)`` ranges of the offsets, one a storage in a row.
        unit_nbytes: Bytes of what the offsets count: the word, or 1 for nibbles.
        nibble: ``(which nibble of the word, bits to shift in its byte)``, None for whole words.
    """

    lead: bool
    offsets: np.ndarray
    select: np.ndarray | None
    segments: tuple[tuple[int, int, int], ...]
    unit_nbytes: int
    nibble: tuple[int, int] | None = None

    def take(self, words: Words) -> np.ndarray:
        """Live words of the part (nibbles: whole bytes)."""
        storage, first, last = self.segments[0]
        live = words(storage, self.unit_nbytes)
        if len(self.segments) == 1:
            return live[self.offsets]
        out = np.empty(len(self.offsets), dtype=live.dtype)
        for storage, first, last in self.segments:
            out[first:last] = words(storage, self.unit_nbytes)[self.offsets[first:last]]
        return out

    def put(self, words: Words, values: np.ndarray) -> None:
        """Write live words of the part."""
        for storage, first, last in self.segments:
            words(storage, self.unit_nbytes)[self.offsets[first:last]] = values[first:last]

    def pick(self, column: np.ndarray) -> np.ndarray:
        """This part's share of a column of the run's words: words, or nibbles at the foot of bytes."""
        mine = column if self.select is None else column[self.select]
        if self.nibble is None:
            return mine
        return ((mine >> (4 * self.nibble[0])) & 15).astype(np.uint8)

    def foot(self, taken: np.ndarray) -> np.ndarray:
        """What ``take`` gave, comparable with what ``pick`` gives."""
        return taken if self.nibble is None else (taken >> self.nibble[1]) & 15


@dataclass(slots=True)
class Run:
    """Changed words of tensors of one kind.

    Attributes:
        ids: int64 ``[G]``, tensor of each segment.
        replica_ids: int64 ``[G]``, under which sums of words that are replicas here are kept.
        bounds: int64 ``[G + 1]``, segments of the words by tensor.
        flat: int64 ``[n]``, canonical word number, for digest weights.
        values: ``<u{w}`` ``[n]``, old XOR new.
        parts: Places, the leading ones first.
        counted: Words that enter digest sums, bool ``[n]``; None where all do.
        old: ``<u{w}`` ``[n]``, live words as proven, None before.
    """

    ids: np.ndarray
    replica_ids: np.ndarray
    bounds: np.ndarray
    flat: np.ndarray
    values: np.ndarray
    parts: tuple[Part, ...]
    counted: np.ndarray | None
    old: np.ndarray | None = None

    def sums(self, *columns: np.ndarray) -> list[Sums]:
        """Digest sums by tensor of several columns of the run's words; replicas apart, under ``replica_ids``."""
        if self.counted is None:
            return [Sums(self.ids, x) for x in self._lanes(columns)]
        mine = self._lanes([c * self.counted for c in columns])
        others = self._lanes([c * ~self.counted for c in columns])
        return [
            Sums(np.concatenate((self.ids, self.replica_ids)), np.concatenate((a, b)))
            for a, b in zip(mine, others, strict=True)
        ]

    def _lanes(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        return sums_by_segment(self.flat, self.values.itemsize, self.bounds, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        places = sum(p.offsets.nbytes + (0 if p.select is None else p.select.nbytes) for p in self.parts)
        return places + self.flat.nbytes + 2 * self.values.nbytes

    def gather(self, words: Words) -> np.ndarray:
        """Live words through the leading parts."""
        first = self.parts[0]
        if first.select is None and first.nibble is None:
            return first.take(words)
        out = np.zeros(len(self.values), dtype=self.values.dtype)
        for p in self.parts:
            if not p.lead:
                break
            taken = p.foot(p.take(words))
            if p.nibble is not None:
                taken = taken.astype(out.dtype) << (4 * p.nibble[0])
            if p.select is None:
                out |= taken
            else:
                out[p.select] |= taken
        return out

    def first_difference(self, words: Words, expected: np.ndarray) -> int | None:
        """Index of a word of which some place does not hold ``expected``, None where all do."""
        for p in self.parts:
            wrong = p.foot(p.take(words)) != p.pick(expected)
            if wrong.any():
                at = int(np.argmax(wrong))
                return at if p.select is None else int(p.select[at])
        return None

    def xor_(self, words: Words) -> None:
        """XOR the values into every place."""
        for p in self.parts:
            live = p.take(words)
            values = p.pick(self.values)
            live ^= values if p.nibble is None else values << p.nibble[1]
            p.put(words, live)

    def write_(self, words: Words, expected: np.ndarray) -> None:
        """Make every place hold ``expected``."""
        for p in self.parts:
            values = p.pick(expected)
            if p.nibble is not None:
                live = p.take(words)
                live ^= (p.foot(live) ^ values) << p.nibble[1]
                values = live
            p.put(words, values)
