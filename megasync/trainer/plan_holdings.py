"""What every rank holds, as columns: which box of which tensor lies on which ranks.

Made by metadata.py, read by the plan, the replica check and tools. Boxes are padded with leading axes (start 0,
extent 1) to one number of axes, so that numpy can work on all of them at once. Must not import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from megasync.errors import PlanError
from megasync.schema import Schema
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class HolderSets:
    """Distinct sets of ranks.

    Attributes:
        offsets: int64 ``[S + 1]``; set ``s`` is ``members[offsets[s] : offsets[s + 1]]``.
        members: uint32, the ranks of all sets, ascending inside a set.
    """

    offsets: np.ndarray
    members: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.members[self.offsets[index] : self.offsets[index + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """Ranks of each set, int64 ``[S]``."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, sets: Sequence[np.ndarray]) -> HolderSets:
        """From one ascending array of ranks a set."""
        offsets = np.zeros(len(sets) + 1, dtype=np.int64)
        np.cumsum([len(s) for s in sets], out=offsets[1:])
        members = np.concatenate(sets) if len(sets) else np.empty(0)
        return cls(offsets, members.astype(np.uint32))


@dataclass(frozen=True, slots=True)
class Holdings:
    """The distinct boxes that trainer ranks hold, in (tensor id, start, extent) order.

    Attributes:
        tensor_ids: uint32 ``[B]``.
        starts: int64 ``[B, D]``, in words, leading axes padded with 0.
        extents: int64 ``[B, D]``, leading axes padded with 1.
        set_ids: uint32 ``[B]``, index into ``sets``: the ranks that hold exactly this box.
        sets: The holder sets.
        world_size: Ranks that were asked, also those that hold nothing.
    """

    tensor_ids: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    set_ids: np.ndarray
    sets: HolderSets
    world_size: int

    def __len__(self) -> int:
        return len(self.tensor_ids)

    @property
    def words(self) -> np.ndarray:
        """Words of each box, int64 ``[B]``."""
        return self.extents.prod(axis=1, dtype=np.int64)

    def box(self, index: int, num_axes: int) -> Box:
        """One box without the padding."""
        return unpad(self.starts[index], self.extents[index], num_axes)


class SetTable:
    """Numbers distinct sets of ranks in the order of their first mention."""

    def __init__(self, known: Iterable[np.ndarray] = ()) -> None:
        self._ids: dict[bytes, int] = {}
        self._sets: list[np.ndarray] = []
        for ranks in known:
            self.add(ranks)

    def add(self, ranks: np.ndarray) -> int:
        """Number of a set (any integer dtype, any order)."""
        own = np.unique(ranks).astype(np.uint32)
        index = self._ids.setdefault(own.tobytes(), len(self._sets))
        if index == len(self._sets):
            self._sets.append(own)
        return index

    def sets(self) -> HolderSets:
        """All sets so far."""
        return HolderSets.of(self._sets)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold the garbage collector while many small records are made.

    They have no cycles, and full collections over a growing heap of them would take most of the time (measured: 4.6 s of
    5.5 s for the schema of 176,000 tensors).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def num_axes_of(schema: Schema) -> np.ndarray:
    """Axes of every tensor, int64 ``[tensors]``; 0 for scalars."""
    return np.fromiter((len(t.shape) for t in schema.tensors), dtype=np.int64, count=len(schema.tensors))


def padded_shapes(schema: Schema, num_axes: int) -> np.ndarray:
    """Shape of every tensor with leading 1s, int64 ``[tensors, num_axes]``."""
    out = np.ones((len(schema.tensors), num_axes), dtype=np.int64)
    by_length: dict[int, list[int]] = {}
    for i, tensor in enumerate(schema.tensors):
        by_length.setdefault(len(tensor.shape), []).append(i)
    for length, ids in by_length.items():
        if length:
            out[ids, num_axes - length :] = [schema.tensors[i].shape for i in ids]
    return out


def unpad(start: np.ndarray, extent: np.ndarray, num_axes: int) -> Box:
    """A padded box with its last ``num_axes`` axes only (a scalar's has one)."""
    num_axes = max(num_axes, 1)
    return Box(tuple(start[-num_axes:].tolist()), tuple(extent[-num_axes:].tolist()))


def pad(box: Box, num_axes: int) -> tuple[list[int], list[int]]:
    """Start and extent of a box with leading axes up to ``num_axes``."""
    missing = num_axes - len(box.start)
    return [0] * missing + list(box.start), [1] * missing + list(box.extent)


def brief_ranks(ranks: Iterable[int], limit: int = 12) -> str:
    """Ranks for a message, as ranges: ``0-3, 8, 10-11``."""
    ordered = sorted({int(r) for r in ranks})
    parts: list[str] = []
    first = last = -2
    for rank in [*ordered, -2]:
        if rank == last + 1:
            last = rank
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = rank
    return ", ".join(parts[:limit]) + (f" and {len(parts) - limit} more ranges" if len(parts) > limit else "")


def brief_box(box: Box) -> str:
    """A box for a message, as slices: ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{s}:{s + e}" for s, e in zip(box.start, box.extent, strict=True)) + "]"


def require(faults: Sequence[str], what: str, advice: str, limit: int = 20) -> None:
    """Raise one error for many faults.

    Raises:
        PlanError: When there are any, with the first ``limit``.
    """
    if faults:
        more = f" and {len(faults) - limit} more" if len(faults) > limit else ""
        raise PlanError(f"{what}: " + "; ".join(faults[:limit]) + more + f". {advice}")
