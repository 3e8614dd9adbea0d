"""Remap records packed for the kernels: one row of int64 a record, read by every kernel that goes through the layout.

Records are duck-typed (the layout floor is above this one): anything with the fields of the record contract. A
record's digits ``((z // s) % e) * t`` telescope into terms ``(z // s) * t - (z // (s * e)) * e * t``: neighbours
share divisions and no modulo is left. Axes are walked from the last to the first; ``z`` collects the axes of a merge
group and the terms of a group are evaluated at its first axis. Division is a multiplication and a shift (Granlund and
Montgomery, "Division by invariant integers using multiplication", PLDI 1994) while ``z`` stays below 2^31, a true
64-bit division otherwise.

Comes after the layout, before scatter, dense and audit. Must import nothing of megasync but ``kernels.planes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from megasync.kernels.planes import WORD_DTYPES

HEAD = 4
"""Leading columns of a row: storage address in bytes, base in units, digest flag, unused."""

AXIS_HEAD = 6
"""Columns of an axis before its terms: low bound, high bound, origin, merge stride, keep (0 where a group ends),
canonical stride in words. Each term is then three columns: multiplier (divisor in wide groups), shift, factor in
units."""

_NARROW = 1 << 31


class DigitLike(Protocol):
    """One mixed-radix digit of the record contract."""

    axis: Any
    extent: Any
    src_stride: Any
    dst_stride: Any


class RecordLike(Protocol):
    """One record of the record contract (see ``layout.modes.Remap``)."""

    shape: Any
    start: Any
    stop: Any
    origin: Any
    local_shape: Any
    merge: Any
    digits: Any
    base: Any
    unit: Any
    word_nbytes: Any
    storage: Any
    primary: Any


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """Records that one kernel variant evaluates.

    Attributes:
        nibble: True where units are nibbles.
        wide: True where a merged coordinate may pass 2^31, so that divisions take 64 bits.
        num_terms: Terms a group of axes may have; shorter ones are padded with factor 0.
        owners: int64 ``[R]``, tensor of each record, ascending.
        storage: int64 ``[R]``, index into the storages of the pack.
        divisors: int64 ``[R, num_axes, num_terms]`` on the CPU, divisor of each term; 0 where there is none.
        rows: int64 ``[R, HEAD + num_axes * (AXIS_HEAD + 3 * num_terms)]`` on the CPU.
        table: The same on the storages' device.
    """

    nibble: bool
    wide: bool
    num_terms: int
    owners: np.ndarray
    storage: np.ndarray
    divisors: np.ndarray
    rows: np.ndarray
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """The layout of many tensors of one word size on one rank.

    Attributes:
        word_nbytes: Canonical word size.
        num_tensors: Tensors; lanes have as many rows.
        num_axes: Axes of every table: the highest rank; shorter shapes get leading axes of extent 1.
        shapes: int64 ``[num_tensors, num_axes]``, canonical extents in words.
        storages: uint8 views of the live storages; held so that the addresses in the tables stay valid.
        groups: At most four: words or nibbles, narrow or wide.
    """

    word_nbytes: int
    num_tensors: int
    num_axes: int
    shapes: np.ndarray
    storages: tuple[torch.Tensor, ...]
    groups: tuple[RecordGroup, ...]

    @property
    def device(self) -> torch.device:
        """Device of the live storages."""
        return self.storages[0].device if self.storages else torch.device("cpu")

    def addresses(self) -> tuple[int, ...]:
        """Current addresses of the storages: compare with those in the tables to see that nothing moved."""
        return tuple(s.data_ptr() for s in self.storages)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole untyped storage under a tensor as flat bytes.

    Args:
        tensor: Any dtype, shape and strides; its storage is what record offsets count from.

    Returns:
        uint8 ``[n]`` sharing memory with the tensor.
    """
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def magic(divisor: int) -> tuple[int, int]:
    """Multiplier and shift with ``(n * m) >> s == n // divisor`` for ``0 <= n < 2^31``; the product fits 63 bits.

    Args:
        divisor: 1 to 2^31.

    Returns:
        ``(m, s)``.
    """
    bits = (divisor - 1).bit_length()
    return (1 << (31 + bits)) // divisor + 1, 31 + bits


def pack_records(
    word_nbytes: int,
    shapes: Sequence[Sequence[int]],
    records: Sequence[Sequence[RecordLike]],
    storages: Mapping[str, torch.Tensor],
    *,
    digest: str = "primary",
) -> PackedRecords:
    """Packs the records of many tensors of one word size.

    Args:
        word_nbytes: Canonical word size of all tensors: 1, 2, 4 or 8.
        shapes: Canonical shape of each tensor, in words; ``()`` is a scalar.
        records: The records of each tensor, any number.
        storages: By name, any tensor that lives in the storage; all on one device. Offsets count from the start of
            the untyped storage.
        digest: Which records enter digest sums: ``primary`` ones, or ``copies`` (the others: sums to compare with
            those of the primaries).

    Returns:
        The pack; the tables are on the storages' device.

    Raises:
        ValueError: On a storage that is missing, misaligned or elsewhere, a record of another word size or rank, or a
            record that can leave its storage.

    *Memory*: the pack holds the storages, not copies of them. It is valid while they stay where they are.
    """
    if word_nbytes not in WORD_DTYPES or digest not in ("primary", "copies") or len(shapes) != len(records):
        raise ValueError(
            f"word_nbytes {word_nbytes} must be 1, 2, 4 or 8, digest {digest!r} primary or copies, and "
            f"{len(shapes)} shapes as many as the {len(records)} tensors' records"
        )
    num_axes = max((len(s) for s in shapes), default=1) or 1
    padded = np.ones((len(shapes), num_axes), dtype=np.int64)
    for i, shape in enumerate(shapes):
        padded[i, num_axes - len(shape) :] = shape
    names = {name: i for i, name in enumerate(storages)}
    flat = tuple(storage_bytes(t) for t in storages.values())
    if len({t.device for t in flat}) > 1:
        raise ValueError(f"live storages are on several devices: {sorted({str(t.device) for t in flat})}")
    for name, t in zip(storages, flat, strict=True):
        if t.numel() and t.data_ptr() % max(4, word_nbytes):
            raise ValueError(f"storage {name!r} starts at {t.data_ptr():#x}, not on {max(4, word_nbytes)} bytes")
    strides = np.ones_like(padded)
    for a in range(num_axes - 2, -1, -1):
        strides[:, a] = strides[:, a + 1] * padded[:, a + 1]
    found: dict[tuple[bool, bool], list[tuple[int, int, list[_Axis], RecordLike]]] = {}
    for i, mine in enumerate(records):
        for r in mine:
            if r.storage not in names:
                raise ValueError(f"record of tensor {i} names storage {r.storage!r}; known: {len(names)} storages")
            axes = _axes(r, num_axes, tuple(strides[i].tolist()))
            _check(i, r, shapes[i], word_nbytes, flat[names[r.storage]])
            wide = any(a.highest >= _NARROW for a in axes)
            found.setdefault((r.unit == "nibble", wide), []).append((i, names[r.storage], axes, r))
    groups = tuple(_group(key, members, flat, digest) for key, members in sorted(found.items()))
    return PackedRecords(word_nbytes, len(shapes), num_axes, padded, flat, groups)


@dataclass(slots=True)
class _Axis:
    """One axis of a record as the kernels walk it."""

    low: int
    high: int
    origin: int
    merge_stride: int
    keep: int
    stride: int
    terms: list[tuple[int, int]]
    highest: int


def _axes(r: RecordLike, num_axes: int, strides: tuple[int, ...]) -> list[_Axis]:
    """The axes of a record, leading axes of extent 1 put before them."""
    pad = num_axes - len(r.shape)
    out = [_Axis(0, 1, 0, 1, 0, strides[a], [], 0) for a in range(pad)]
    for g, group in enumerate(r.merge):
        stride = 1
        merged: list[_Axis] = []
        highest = 0
        for a in reversed(group):
            highest += (r.stop[a] - 1 - r.origin[a]) * stride
            axis = _Axis(r.start[a], r.stop[a], r.origin[a], stride, int(a != group[0]), strides[pad + a], [], 0)
            merged.append(axis)
            stride *= r.local_shape[a]
        merged[-1].terms = _terms([d for d in r.digits if d.axis == g], highest)
        for axis in merged:
            axis.highest = highest
        out += reversed(merged)
    return out


def _terms(digits: Sequence[DigitLike], highest: int) -> list[tuple[int, int]]:
    """Digits of one group as ``(divisor, factor)`` terms; terms that are 0 all over the box are dropped."""
    factors: dict[int, int] = {}
    for d in digits:
        factors[d.src_stride] = factors.get(d.src_stride, 0) + d.dst_stride
        if d.extent:
            above = d.src_stride * d.extent
            factors[above] = factors.get(above, 0) - d.extent * d.dst_stride
    return [(s, f) for s, f in sorted(factors.items()) if f and s <= highest]


def _check(tensor: int, r: RecordLike, shape: Sequence[int], word_nbytes: int, storage: torch.Tensor) -> None:
    """Refuses a record of another tensor, or one that can leave its storage.

    Raises:
        ValueError: See above.
    """
    nibble = r.unit == "nibble"
    units = list(shape) or [1]
    units[-1] *= 2 * word_nbytes if nibble else 1
    if tuple(r.shape) != tuple(units) or r.word_nbytes != (1 if nibble else word_nbytes):
        raise ValueError(
            f"record of tensor {tensor} has shape {tuple(r.shape)} of {r.word_nbytes}-byte words, unit {r.unit}; "
            f"the tensor is {tuple(shape)} of {word_nbytes}-byte words"
        )
    low = high = r.base
    for g, group in enumerate(r.merge):
        stride, top = 1, 0
        for a in reversed(group):
            top += (r.stop[a] - 1 - r.origin[a]) * stride
            stride *= r.local_shape[a]
        for d in r.digits:
            if d.axis == g:
                most = top // d.src_stride
                most = min(most, d.extent - 1) if d.extent else most
                low, high = low + min(0, most * d.dst_stride), high + max(0, most * d.dst_stride)
    capacity = storage.numel() * 2 if nibble else storage.numel() // word_nbytes
    if low < 0 or high >= capacity:
        raise ValueError(
            f"record of tensor {tensor} reaches units {low} to {high} of storage {r.storage!r}, which has {capacity}; "
            "the layout was made for another storage"
        )


def _group(
    key: tuple[bool, bool],
    members: list[tuple[int, int, list[_Axis], RecordLike]],
    storages: tuple[torch.Tensor, ...],
    digest: str,
) -> RecordGroup:
    """The table of one kernel variant."""
    nibble, wide = key
    num_axes = len(members[0][2])
    num_terms = max(1, max(len(a.terms) for _, _, axes, _ in members for a in axes))
    width = AXIS_HEAD + 3 * num_terms
    rows = np.zeros((len(members), HEAD + num_axes * width), dtype=np.int64)
    divisors = np.zeros((len(members), num_axes, num_terms), dtype=np.int64)
    for row, divisor_row, (_, storage, axes, r) in zip(rows, divisors, members, strict=True):
        flag = int(bool(r.primary) == (digest == "primary"))
        row[:HEAD] = (storages[storage].data_ptr(), r.base, flag, 0)
        for i, a in enumerate(axes):
            cells = [a.low, a.high, a.origin, a.merge_stride, a.keep, a.stride]
            for t, (divisor, factor) in enumerate(a.terms):
                divisor_row[i, t] = divisor
                cells += [divisor, 0, factor] if wide else [*magic(divisor), factor]
            for _ in range(num_terms - len(a.terms)):
                cells += [1, 0, 0]
            row[HEAD + i * width : HEAD + (i + 1) * width] = cells
    owners = np.array([m[0] for m in members], dtype=np.int64)
    device = storages[0].device
    table = torch.from_numpy(rows).to(device)
    return RecordGroup(nibble, wide, num_terms, owners, np.array([m[1] for m in members]), divisors, rows, table)
