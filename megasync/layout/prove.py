"""Proves, before anything is written, that layouts address every word once and stay inside their storages.

The proofs are arithmetic over the digits, so their cost does not depend on the number of elements; where digits are
too odd for that, small records are enumerated and large ones refused. Before it come layouts from `compose`, `probe`
or a decoded document; after it binding to live storages. This module must import nothing of megasync but ``errors``
and ``layout`` records, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import gcd, prod

import numpy as np

from megasync.errors import PlanError
from megasync.layout.lines import digit_extent
from megasync.layout.modes import Layout, Remap
from megasync.layout.rules import boxes_apart
from megasync.layout.views import box_offsets, free_parts, physical_range

ENUMERATION_LIMIT = 1 << 22
"""Units that may be enumerated where arithmetic does not decide."""

_MAX_PAIRS = 4096

_Lattice = tuple[int, list[tuple[int, int]]]
"""A base and ``(stride, count)`` digits, in nibbles, strides positive, counts above 1."""


def validate(layout: Layout, storages: Mapping[str, int]) -> None:
    """Checks one layout: whole, one-to-one, inside its storages.

    Args:
        layout: Layout of one canonical tensor.
        storages: Name of each live storage to its bytes.

    Raises:
        PlanError: A word of the slice is held twice or never, two words share a place, or an offset leaves its storage.
    """
    validate_all({"the tensor": layout}, storages)


def validate_all(layouts: Mapping[str, Layout], storages: Mapping[str, int]) -> None:
    """Checks the layouts of one rank together: whole, one-to-one across tensors, inside their storages.

    Args:
        layouts: Canonical name to layout.
        storages: Name of each live storage to its bytes.

    Raises:
        PlanError: As `validate`; the message names the tensors.
    """
    by_storage: dict[str, list[tuple[int, int, str, Remap]]] = {}
    for name, layout in layouts.items():
        _check_cover(name, layout)
        for r in layout.records:
            _check_record(name, r, storages)
            low, high = physical_range(r)
            unit = _unit_nibbles(r)
            by_storage.setdefault(r.storage, []).append((low * unit, (high + 1) * unit, name, r))
    for spans in by_storage.values():
        _check_apart(spans)


def is_injective(record: Remap) -> bool | None:
    """Whether a record never sends two words of its box to one offset.

    Args:
        record: Any record.

    Returns:
        True or False where arithmetic or a small enumeration decides, None where neither does.
    """
    for g in range(len(record.merge)):
        reach = 1
        low, high = record.group_range(g)
        for d in sorted((d for d in record.digits if d.axis == g), key=lambda d: d.src_stride):
            if d.src_stride != reach:
                return _injective_by_enumeration(record)
            reach = d.src_stride * d.extent if d.extent else high + 1
        if reach <= high and low != high:
            return _injective_by_enumeration(record)
    if _stacked(_lattice(record)[1]):
        return True
    return _injective_by_enumeration(record)


def are_apart(a: Remap, b: Remap) -> bool | None:
    """Whether two records of one storage never touch the same nibble.

    Args:
        a: One record.
        b: Another record of the same storage.

    Returns:
        True or False where arithmetic or a small enumeration decides, None where neither does.
    """
    if _lattices_apart(_lattice(a), _lattice(b)):
        return True
    # Rims: a last tile that is shared by two tensors is told apart only where each record is cut at its own rim.
    ones, twos = _lattices(a), _lattices(b)
    if len(ones) * len(twos) <= _MAX_PAIRS and all(_lattices_apart(x, y) for x in ones for y in twos):
        return True
    if a.num_units + b.num_units > ENUMERATION_LIMIT:
        return None
    return not np.intersect1d(_nibbles(a), _nibbles(b)).size


def _check_cover(name: str, layout: Layout) -> None:
    """Every word of the slice once by the leading records."""
    held = layout.leading()
    scale = 2 * layout.word_nbytes
    covered = 0
    for r in held:
        covered += r.num_units * (1 if r.unit == "nibble" else scale)
    for a, b in combinations(held, 2):
        if not boxes_apart(a, b):
            raise PlanError(
                f"layout of {name}: words of {a.start}..{a.stop} and {b.start}..{b.stop} have two primaries"
            )
    whole = prod(layout.slice_shape) * scale
    if covered > whole or (covered < whole and not layout.partial):
        raise PlanError(
            f"layout of {name}: its records hold {covered // scale} of the {whole // scale} words of the slice "
            f"{layout.start}..{layout.stop}; expected each once. Add the missing boxes, or mark the layout partial"
        )


def _check_record(name: str, r: Remap, storages: Mapping[str, int]) -> None:
    nbytes = storages.get(r.storage)
    if nbytes is None:
        raise PlanError(f"layout of {name}: no live storage is called {r.storage!r}; there are {sorted(storages)[:8]}")
    size = nbytes * 2 if r.unit == "nibble" else nbytes // r.word_nbytes
    low, high = physical_range(r)
    if low < 0 or high >= size:
        raise PlanError(
            f"layout of {name}: offsets {low}..{high} leave live storage {r.storage!r} of {nbytes} bytes "
            f"({size} {r.unit}s); an empty or smaller live tensor means that the engine keeps these weights elsewhere"
        )
    one_to_one = is_injective(r)
    if one_to_one is None:
        raise PlanError(f"layout of {name}: it cannot be proved that record {r} sends every word to its own place")
    if not one_to_one:
        raise PlanError(f"layout of {name}: record {r} sends two words to one place")


def _check_apart(spans: list[tuple[int, int, str, Remap]]) -> None:
    """Sweeps the spans of one storage; only records whose spans overlap are compared."""
    spans.sort(key=lambda s: s[0])
    open_spans: list[tuple[int, int, str, Remap]] = []
    for span in spans:
        open_spans = [o for o in open_spans if o[1] > span[0]]
        for other in open_spans:
            apart = are_apart(other[3], span[3])
            if not apart:
                what = "may share" if apart is None else "share"
                raise PlanError(
                    f"layouts of {other[2]} and {span[2]} {what} places of live storage {span[3].storage!r}: "
                    f"{other[3]} and {span[3]}"
                )
        open_spans.append(span)


def _unit_nibbles(r: Remap) -> int:
    return 1 if r.unit == "nibble" else 2 * r.word_nbytes


def _lattice(r: Remap) -> _Lattice:
    """The offsets of a record, in nibbles, as free digits: a set that holds every offset of the record."""
    base, free = r.base, []
    for d in r.digits:
        low, high = r.group_range(d.axis)
        first = low // d.src_stride if not d.extent or high < d.src_stride * d.extent else 0
        base += first * d.dst_stride
        free.append((digit_extent(r, d) - first, d.dst_stride))
    return _in_nibbles(r, base, free)


def _lattices(r: Remap) -> list[_Lattice]:
    """The offsets of a record, in nibbles, as few lattices that hold exactly them; one larger one where that fails."""
    parts = free_parts(r)
    return [_lattice(r)] if parts is None else [_in_nibbles(r, base, free) for base, free in parts]


def _in_nibbles(r: Remap, base: int, free: Iterable[tuple[int, int]]) -> _Lattice:
    unit = _unit_nibbles(r)
    start, digits = base * unit, [(1, unit)] if unit > 1 else []
    for count, stride in free:
        step = stride * unit
        if step < 0:
            start, step = start + (count - 1) * step, -step
        if count > 1:
            digits.append((step, count))
    return start, sorted(digits)


def _stacked(digits: Iterable[tuple[int, int]]) -> bool:
    """Whether each stride passes all that the smaller digits reach: then every combination has its own sum."""
    reach = 0
    for stride, count in digits:
        if stride <= reach:
            return False
        reach += (count - 1) * stride
    return True


def _lattices_apart(one: _Lattice, two: _Lattice) -> bool:
    """Compares two lattices position by position in a radix system that fits the strides of both.

    The strides that divide one another make the radices. Each lattice becomes a range of values at every position (from
    outside, where carries are possible); disjoint ranges at one position prove that no sum is common.
    """
    base = min(one[0], two[0])
    radices = [1]
    for stride in sorted({s for s, _ in one[1]} | {s for s, _ in two[1]}):
        if stride % radices[-1] == 0 and stride != radices[-1]:
            radices.append(stride)
    left, right = _ranges(one, base, radices), _ranges(two, base, radices)
    if left is None or right is None:
        return _apart_by_residue(one, two)
    if any(a[1] < b[0] or b[1] < a[0] for a, b in zip(left, right, strict=True)):
        return True
    return _apart_by_residue(one, two)


def _ranges(lattice: _Lattice, base: int, radices: list[int]) -> list[tuple[int, int]] | None:
    """Values of a lattice at each position of a radix system; None where a stride is no multiple of its radix."""
    spread = [0] * len(radices)
    for stride, count in lattice[1]:
        place = max(i for i, r in enumerate(radices) if r <= stride)
        if stride % radices[place]:
            return None
        left, factor = count, stride // radices[place]
        while left > 1 and place + 1 < len(radices):
            size = radices[place + 1] // radices[place]
            if factor != 1 or left <= size:
                break
            spread[place] += size - 1
            left = -(-left // size)
            place += 1
        spread[place] += (left - 1) * factor
    rest = lattice[0] - base
    out: list[tuple[int, int]] = []
    carry = 0
    for i in range(len(radices)):
        if i + 1 == len(radices):
            low = rest // radices[i]
            out.append((low, low + spread[i] + carry))
            break
        size = radices[i + 1] // radices[i]
        low = rest // radices[i] % size
        high = low + spread[i] + carry
        out.append((low, high) if high < size else (0, size - 1))
        carry = high // size
    return out


def _apart_by_residue(one: _Lattice, two: _Lattice) -> bool:
    """Whether the fine digits of both stay in disjoint residues of a common divisor of all coarser strides."""
    strides = sorted({s for s, _ in one[1]} | {s for s, _ in two[1]})
    for i in range(1, len(strides)):
        modulus = 0
        for s in strides[i:]:
            modulus = gcd(modulus, s)
        reach = [sum((c - 1) * s for s, c in x[1] if s < strides[i]) for x in (one, two)]
        if max(reach) >= modulus:
            continue
        shift = (two[0] - one[0]) % modulus
        if reach[0] < shift and shift + reach[1] < modulus:
            return True
    return False


def _nibbles(r: Remap) -> np.ndarray:
    unit = _unit_nibbles(r)
    parts = [offsets for _, offsets in box_offsets(r)]
    starts = np.concatenate(parts) * unit
    return (starts[:, None] + np.arange(unit)).reshape(-1)


def _injective_by_enumeration(r: Remap) -> bool | None:
    if r.num_units > ENUMERATION_LIMIT:
        return None
    offsets = np.concatenate([o for _, o in box_offsets(r)])
    return np.unique(offsets).size == offsets.size
