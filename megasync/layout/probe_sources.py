"""Finds which canonical tensors the unexplained live bytes depend on, and which of them are only noise.

A source is told by changing one tensor between two loads and seeing a live byte change with it, from values of every
kind to values of every kind: a sign, a zero, a large or a special value may matter where others do not. Before it comes
`probe`, with verified layouts; after it the plan. This module must import nothing of megasync but ``layout``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megasync.layout.probe_draws import Draws, Tensors
from megasync.layout.probe_loads import Loads

MAX_REPEATS = 8
"""Equal loads that noise is learned from, at most."""

_Bytes = dict[str, np.ndarray]
_Places = Mapping[str, tuple[str, np.ndarray]]
_Sources = dict[str, set[str]]


@dataclass(frozen=True, slots=True)
class Computed:
    """What was learned of the unexplained live bytes.

    Attributes:
        sources: Live name to the canonical names that it is computed from; empty where none was found.
        unstable: Live names with bytes that differ between equal loads.
    """

    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unstable: tuple[str, ...] = ()


class Noise:
    """Live bytes that differ between equal loads, whoever reads them: padding, counters, clocks.

    Args:
        loads: The loads.
        places: Live name to the name of its storage and the offsets of the bytes in question.
    """

    def __init__(self, loads: Loads, places: _Places) -> None:
        self._loads, self._places = loads, places
        self._noisy = {live: np.zeros(at.size, dtype=np.bool_) for live, (_, at) in places.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Live tensors with noise."""
        return tuple(live for live, noisy in self._noisy.items() if noisy.any())

    def left(self) -> tuple[str, ...]:
        """Live tensors with bytes in question that are no noise."""
        return tuple(live for live, noisy in self._noisy.items() if not noisy.all())

    def learn(self, canonical: Tensors) -> _Bytes:
        """Loads the same until no more bytes turn out to differ.

        Returns:
            The live bytes of one such load.
        """
        first = self._loads.run(canonical)
        for repeat in range(2, MAX_REPEATS + 1):
            more = self.note(first, self._loads.run(canonical))
            if repeat >= 3 and not more:
                break
        return first

    def note(self, one: _Bytes, other: _Bytes) -> bool:
        """Takes in two equal loads; whether they show noise that was not known."""
        before = sum(int(n.sum()) for n in self._noisy.values())
        for live, noisy in self._noisy.items():
            storage, at = self._places[live]
            noisy |= one[storage][at] != other[storage][at]
        return sum(int(n.sum()) for n in self._noisy.values()) > before

    def hits(self, one: _Bytes, other: _Bytes) -> frozenset[str]:
        """Live tensors that differ between two loads in bytes that are no noise."""
        out = []
        for live, (storage, at) in self._places.items():
            if ((one[storage][at] != other[storage][at]) & ~self._noisy[live]).any():
                out.append(live)
        return frozenset(out)


class _Search:
    """The state of one search."""

    def __init__(self, loads: Loads, draws: Draws, places: _Places) -> None:
        self.loads, self.draws = loads, draws
        self.noise = Noise(loads, places)
        self.sources: _Sources = {live: set() for live in places}

    def known(self) -> set[str]:
        return {n for found in self.sources.values() for n in found}

    def compare(self, old: Tensors, before: _Bytes, new: Tensors, *, whole: bool = False) -> None:
        """Finds what changes with the tensors between two sets of them, ``before`` being the load of the old."""
        lacking = frozenset(live for live, found in self.sources.items() if not found)
        if whole or lacking:
            self._change(list(new), None if whole else lacking, old, before, new)
        known = self.known()
        if known and not whole:
            self._change([n for n in new if n not in known], None, old, before, new)

    def _change(
        self, names: Sequence[str], lives: frozenset[str] | None, old: Tensors, before: _Bytes, new: Tensors
    ) -> None:
        wanted = frozenset(self.sources) if lives is None else lives
        if not names:
            return
        after = self._load(names, old, new)
        if not wanted & self.noise.hits(before, after):
            return
        # What differs without being repeated is noise that the equal loads did not show.
        self.noise.note(before, self._load((), old, new))
        self.noise.note(after, self._load(names, old, new))
        hit = wanted & self.noise.hits(before, after)
        if hit:
            self._halve(names, hit, old, before, new)

    def _halve(self, names: Sequence[str], hit: frozenset[str], old: Tensors, before: _Bytes, new: Tensors) -> None:
        """Changing all names changes the live tensors of ``hit``: finds which of the names do alone."""
        if len(names) == 1:
            self._add(hit & self._sure(hit, names, (), old, new), names[0])
            return
        explained: frozenset[str] = frozenset()
        half = len(names) // 2
        for part in (names[:half], names[half:]):
            mine = hit & self.noise.hits(before, self._load(part, old, new))
            explained |= mine
            if mine:
                self._halve(part, mine, old, before, new)
        for live in sorted(hit - explained):
            self._together(names, live, old, before, new)

    def _together(self, names: Sequence[str], live: str, old: Tensors, before: _Bytes, new: Tensors) -> None:
        """Only several names together change a live tensor: a smallest such set, each of which does beside the rest."""
        kept: list[str] = []
        rest = list(names)
        while rest:
            low, high = 0, len(rest)  # kept + rest[:high] change it
            while low < high:
                middle = (low + high) // 2
                if live in self.noise.hits(before, self._load((*kept, *rest[:middle]), old, new)):
                    high = middle
                else:
                    low = middle + 1
            if not low:
                break
            kept.append(rest[low - 1])
            rest = rest[: low - 1]
        alone = frozenset((live,))
        for name in kept:
            others = [n for n in kept if n != name]
            self._add(self._sure(alone, (name,), others, old, new), name)
        # Another may do in the place of one of them, as where two of three are enough.
        rest = [n for n in old if n not in kept]
        for name in kept if len(kept) > 1 and rest else ():
            beside = {n: (new if n in kept and n != name else old)[n] for n in old}
            self._change(rest, alone, beside, self.loads.run(beside), new)

    def _sure(
        self, lives: frozenset[str], names: Sequence[str], context: Sequence[str], old: Tensors, new: Tensors
    ) -> frozenset[str]:
        """Of noisy live tensors, those that differ again when the same two loads are made again."""
        doubtful = lives & frozenset(self.noise.names)
        if not doubtful:
            return lives
        one, other = self._load(context, old, new), self._load((*context, *names), old, new)
        self.noise.note(one, self._load(context, old, new))
        self.noise.note(other, self._load((*context, *names), old, new))
        return lives - doubtful | doubtful & self.noise.hits(one, other)

    def _add(self, lives: frozenset[str], name: str) -> None:
        for live in lives:
            self.sources[live].add(name)

    def _load(self, changed: Sequence[str], old: Tensors, new: Tensors) -> _Bytes:
        chosen = set(changed)
        mixed = {n: (new if n in chosen else old)[n] for n in old}
        return self.loads.run(mixed, "values of every kind, mixed")


def sources_of(loads: Loads, draws: Draws, places: _Places, num_draws: int) -> Computed:
    """Finds which canonical tensors the unexplained live bytes depend on.

    Args:
        loads: The loads so far.
        draws: Draws of the canonical tensors.
        places: Live name to the name of its storage and the offsets of its unexplained bytes that changed.
        num_draws: Draws of random bits, of each kind, among the values tried.

    Returns:
        The sources and the noise. A live tensor without sources that is not among the noisy ones changes in a way that
        could not be repeated.
    """
    if not places:
        return Computed()
    search = _Search(loads, draws, places)
    middle = draws.leveled(0.25, 0.75)
    before = search.noise.learn(middle)
    # A maximum notices only what is raised, a minimum only what is lowered, a cast any other value.
    for low, high in ((0.25, 0.75), (0.9, 1.0), (0.0, 0.1)):
        search.compare(middle, before, draws.leveled(low, high), whole=True)
    for new in (draws.opposite(middle), *(d.tensors for d in draws.verification(num_draws))):
        search.compare(middle, before, new)
    # What depends on a tensor only where another is zero, negative, large or no number.
    for old, new in _elsewhere(draws, middle):
        search.compare(old, loads.run(old), new)
    if any(not found for found in search.sources.values()):
        search.noise.note(*loads.first_again())
    noisy = search.noise.names
    found = {live: tuple(sorted(s)) for live, s in search.sources.items() if s or live not in noisy}
    return Computed(found, noisy)


def _elsewhere(draws: Draws, middle: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    """Pairs of draws apart from the usual values."""
    yield draws.zeros(), middle
    yield draws.opposite(middle), draws.opposite(draws.leveled(0.0, 1.0))
    yield draws.opposite(middle), middle
    yield draws.random(), draws.random()
    for finite in (True, False) if draws.any_bytes else (True,):
        special = [d.tensors for _, d in zip(range(2), draws.specials(finite=finite), strict=False)]
        for one in special:
            yield one, middle
        if len(special) > 1:
            yield special[0], special[1]
