"""What a probe loads to verify a plan, and to find what a live tensor is computed from: values of every kind.

Before it come `probe_patterns` and `probe_values`; after it `probe`, `probe_sources`, `plan` and `conformance`. This
module must import nothing of megasync but ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from megasync.layout.live import Specs
from megasync.layout.probe_patterns import (
    FLOATS,
    Alphabet,
    as_tensor,
    dtype_name,
    leveled_tensor,
    ramp_tensors,
    random_tensor,
)
from megasync.layout.probe_values import Ranges, alphabets_of, checked_ranges, held_, special_in, special_words

_NUM_EVEN = 3

Tensors = dict[str, torch.Tensor]
"""Canonical name to CPU tensor."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One set of canonical tensors.

    Attributes:
        tensors: Canonical name to CPU tensor, contiguous.
        finite: Whether no NaN and no infinity is among them.
        kind: What they hold, in words.
        special: Whether they are special values alone.
        fresh: Names whose tensors hold something that no draw before it held; the others need no second look.
    """

    tensors: Tensors
    finite: bool
    kind: str
    special: bool
    fresh: frozenset[str]


class Draws:
    """Draws canonical tensors of one set of specs.

    Args:
        specs: Canonical name to extents and torch dtype.
        seed: Seed of the random ones.
        values: Range to hold floats to, by name or for all.
        any_bytes: Whether NaN and infinity patterns may be drawn.

    Raises:
        ValueError: A dtype cannot be probed, or a range is none.
    """

    def __init__(
        self, specs: Specs, seed: int, *, values: Ranges | tuple[float, float] | None = None, any_bytes: bool = True
    ) -> None:
        self.specs = specs
        self.any_bytes = any_bytes
        self._rng = np.random.default_rng(seed)
        self._ranges = checked_ranges(specs, values)
        self.alphabets: dict[str, Alphabet] = alphabets_of(specs, self._ranges)
        self._whole = alphabets_of({n: specs[n] for n in self._ranges}, self._ranges, near=False)
        self._words = {n: special_words(d) for n, (_, d) in specs.items()}
        self._words |= {n: special_in(specs[n][1], r, self._whole[n]) for n, r in self._ranges.items()}

    def random(self, *, finite: bool = True) -> Tensors:
        """Random bits."""
        return self._made(lambda n: random_tensor(*self.specs[n], self._rng, finite=finite))

    def leveled(self, low: float, high: float) -> Tensors:
        """Random values near 1, from a part of those, 0 to 1."""
        return self._made(lambda n: leveled_tensor(*self.specs[n], self.alphabets[n], self._rng, low, high))

    def ramps(self) -> Iterator[Draw]:
        """Rising and falling values, over all tensors and in each."""
        for falling, apart in ((False, False), (False, True), (True, False), (True, True)):
            found = ramp_tensors(self.specs, self.alphabets, falling=falling, per_tensor=apart)
            yield self._draw(found, True, f"values that {'fall' if falling else 'rise'} from word to word")

    def specials(self, *, finite: bool) -> Iterator[Draw]:
        """Special values alone, as many draws as it takes for each tensor to hold all of its own.

        In draws that a tensor does not need for that, it holds one value throughout: a loader may look whether all
        words are zero, or equal.

        Args:
            finite: Zeros, limits, powers; else NaN and infinities, where there are any.
        """
        lists = {n: w.finite if finite else w.other for n, w in self._words.items()}
        counts = {n: -(-len(words) // max(1, prod(self.specs[n][0]))) for n, words in lists.items()}
        kind = "zeros, subnormals, limits and powers of the dtype" if finite else "infinities and NaN"
        # What one word alone holds, it holds throughout.
        more = {n: _NUM_EVEN if finite and prod(self.specs[n][0]) > 1 else 0 for n in counts}
        num_draws = max((count + more[n] for n, count in counts.items()), default=0)
        for index in range(num_draws):
            found = {}
            for turn, (name, (shape, dtype)) in enumerate(self.specs.items()):
                words = np.array(lists[name] or self._words[name].finite, dtype=f"<u{dtype.itemsize}")
                # Another start in each tensor, so that two of one element seldom hold the same.
                start, size = 13 * turn, prod(shape)
                even = index - counts[name]
                if even < 0:
                    chosen = np.resize(np.roll(words, -(index * size + start)), size)
                else:
                    first = self._even(name, words.tolist())
                    at = first[(even + turn) % len(first)] if even < len(first) else (even + start) % words.size
                    chosen = np.full(size, words[at])
                found[name] = as_tensor(chosen, shape, dtype)
            fresh = frozenset(n for n, count in counts.items() if index < count + more[n])
            yield Draw(found, finite, kind, special=True, fresh=fresh)

    def _even(self, name: str, words: list[int]) -> list[int]:
        """Numbers of the words that a tensor holds throughout before any others: zero, one, and minus one or all bits."""
        size = self.specs[name][1].itemsize
        form = FLOATS.get(dtype_name(self.specs[name][1]))
        one = form.bias << form.mantissa if form else 1
        wanted = (0, one, one | 1 << (8 * size - 1), (1 << (8 * size)) - 1)
        return [words.index(w) for w in wanted if w in words][:_NUM_EVEN] or [0]

    def verification(self, num_draws: int) -> Iterator[Draw]:
        """What a plan is verified on.

        Args:
            num_draws: Draws of random bits, of each kind.
        """
        ramps = list(self.ramps())
        yield from ramps
        yield self._draw(self.opposite(ramps[-1].tensors), True, "values of the other sign")
        yield self._draw(self.zeros(), True, "zeros")
        for finite in (True, False) if self.any_bytes else (True,):
            for _ in range(num_draws):
                yield self._draw(self.random(finite=finite), finite, f"random {'finite values' if finite else 'bytes'}")
            yield from self.specials(finite=finite)

    def zeros(self) -> Tensors:
        """All bits zero."""
        return self._made(lambda n: torch.zeros(self.specs[n][0], dtype=self.specs[n][1]))

    def opposite(self, tensors: Tensors) -> Tensors:
        """The same with the other sign; integers with all bits flipped, booleans with the other value."""
        return self._made(lambda n: _opposite(tensors[n]))

    def _draw(self, tensors: Tensors, finite: bool, kind: str) -> Draw:
        return Draw(tensors, finite, kind, special=False, fresh=frozenset(self.specs))

    def _made(self, one: Callable[[str], torch.Tensor]) -> Tensors:
        return self._held({n: one(n) for n in self.specs})

    def _held(self, tensors: Tensors) -> Tensors:
        for name, span in self._ranges.items():
            held_(tensors[name], span, self._whole[name])
        return tensors


def _opposite(tensor: torch.Tensor) -> torch.Tensor:
    size, name = tensor.dtype.itemsize, dtype_name(tensor.dtype)
    words = tensor.reshape(-1).view(torch.uint8).numpy().view(f"<u{size}").copy()
    if name == "bool":
        words ^= 1
    elif name == "complex64":
        words ^= np.uint64(0x80000000_80000000)
    elif tensor.is_floating_point() and name not in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        words ^= np.array(1 << (8 * size - 1), words.dtype)
    else:
        words = ~words
    return as_tensor(words, tuple(tensor.shape), tensor.dtype)
