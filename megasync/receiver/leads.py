"""Which records of a layout lead: hold each word of the rank once, primary or not.

Primaries lead. A copy of words whose primary is on another rank (a replicated KV head beside this rank's own rows)
leads too, but its words do not enter digest sums here. All other records are copies that must stay equal to what leads.
Used by bind and the backends. Must import nothing above layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from megasync.errors import PlanError
from megasync.layout.modes import Layout, Remap
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor on one rank, with its leading records told from the copies.

    Attributes:
        layout: As the engine gave it.
        lead: For each record, whether it leads.
        reading: The leading records alone, all as primaries: gathers every word that the rank holds.
    """

    layout: Layout
    lead: tuple[bool, ...]
    reading: Layout

    @classmethod
    def of(cls, name: str, layout: Layout) -> Held:
        """Choose the leading records.

        Args:
            name: Of the tensor, for messages.
            layout: Its layout.

        Raises:
            PlanError: A record cuts a word, or a copy is only partly a copy of what leads.
        """
        boxes = [_box(name, layout, r) for r in layout.records]
        lead = [r.primary for r in layout.records]
        for i, box in enumerate(boxes):
            if not lead[i] and all(box.intersect(b) is None for b, chosen in zip(boxes, lead, strict=True) if chosen):
                lead[i] = True
        for i, box in enumerate(boxes):
            shared = [box.intersect(b) for b, chosen in zip(boxes, lead, strict=True) if chosen]
            if not lead[i] and sum(s.num_words for s in shared if s) != box.num_words:
                raise PlanError(
                    f"layout of {name}: the copy of words {box.start}+{box.extent} is only partly a copy of words that this "
                    "rank holds first; cut it where they end"
                )
        chosen = tuple(replace(r, primary=True) for r, ok in zip(layout.records, lead, strict=True) if ok)
        covered = sum(b.num_words for b, ok in zip(boxes, lead, strict=True) if ok)
        partial = covered != prod(layout.slice_shape)
        return cls(layout, tuple(lead), replace(layout, records=chosen, partial=partial))

    @property
    def whole(self) -> bool:
        """Whether the rank holds every word of the slice, as primaries."""
        return not self.reading.partial and all(
            r.primary for r, ok in zip(self.layout.records, self.lead, strict=True) if ok
        )

    @property
    def copies(self) -> tuple[Remap, ...]:
        """The records that must stay equal to what leads."""
        return tuple(r for r, ok in zip(self.layout.records, self.lead, strict=True) if not ok)

    def clipped(self, box: Box) -> Held | None:
        """The part inside a box of the canonical tensor, None where the rank holds nothing there."""
        layout = clip(self.layout, box)
        if layout is None:
            return None
        lead = tuple(
            ok
            for r, ok in zip(self.layout.records, self.lead, strict=True)
            if _clipped(self.layout, r, layout.start, layout.stop) is not None
        )
        reading = clip(self.reading, box)
        return Held(layout, lead, reading) if reading is not None else None

    def counted(self) -> np.ndarray | None:
        """Words of the slice with their primary place on this rank, bool in the slice's shape; None where all."""
        return self._mask([r for r in self.layout.records if r.primary])

    def here(self) -> np.ndarray | None:
        """Words of the slice that the rank holds, bool in the slice's shape; None where all."""
        return self._mask(self.reading.records)

    def _mask(self, records: Sequence[Remap]) -> np.ndarray | None:
        out = np.zeros(self.layout.slice_shape, dtype=bool)
        for r in records:
            out[inside(self.layout, r)] = True
        return None if out.all() else out


def inside(layout: Layout, record: Remap) -> tuple[slice, ...]:
    """Where a record's box lies in the layout's slice."""
    box = _box("", layout, record)
    return tuple(slice(a - o, a - o + n) for a, o, n in zip(box.start, layout.start, box.extent, strict=True))


def clip(layout: Layout, box: Box) -> Layout | None:
    """The part of a layout inside a box of the canonical tensor, None where it holds nothing there."""
    start = tuple(max(a, b) for a, b in zip(layout.start, box.start, strict=True))
    stop = tuple(min(a, b + n) for a, b, n in zip(layout.stop, box.start, box.extent, strict=True))
    if any(b <= a for a, b in zip(start, stop, strict=True)):
        return None
    records = tuple(c for r in layout.records if (c := _clipped(layout, r, start, stop)) is not None)
    return replace(layout, start=start, stop=stop, records=records) if records else None


def _clipped(layout: Layout, r: Remap, start: tuple[int, ...], stop: tuple[int, ...]) -> Remap | None:
    scale = layout.units_per_word(r)
    first = tuple(max(a, b) for a, b in zip(r.start, (*start[:-1], start[-1] * scale), strict=True))
    last = tuple(min(a, b) for a, b in zip(r.stop, (*stop[:-1], stop[-1] * scale), strict=True))
    return replace(r, start=first, stop=last) if all(a < b for a, b in zip(first, last, strict=True)) else None


def _box(name: str, layout: Layout, r: Remap) -> Box:
    """A record's box in words."""
    scale = layout.units_per_word(r)
    if r.start[-1] % scale or r.stop[-1] % scale:
        raise PlanError(f"layout of {name}: record {r} begins or ends inside a word; let it hold whole words")
    start = (*r.start[:-1], r.start[-1] // scale)
    stop = (*r.stop[:-1], r.stop[-1] // scale)
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
