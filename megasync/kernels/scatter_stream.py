"""The scatter fed from pinned host memory: chunks of entries are copied up while those before them are XORed in.

Device memory is a ring of a few slots instead of all entries. Comes after staging left the planes in pinned memory;
uses ``scatter``'s kernel. Must import nothing of megasync but ``types`` and
kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from megasync.kernels import dispatch
from megasync.kernels.planes import Planes
from megasync.kernels.scatter import SUMS_CHANGE, SUMS_NONE, check_planes, launch_scatter
from megasync.kernels.scatter_plan import ScatterLaunch, ScatterPlan
from megasync.types import SEGMENT_WORDS

CHUNK_NBYTES = 24 << 20
"""Bytes of entries in a chunk by default: 0.45 ms of copying, twice as long as it takes the host to issue it."""


class EntryRing:
    """Device slots for chunks of planes, and the stream that fills them; made once and used for every apply.

    Attributes:
        word_nbytes: Word size of the planes that pass.
        chunk_entries: Entries, and dense words, of a slot.
        stream: The copy stream.
    """

    def __init__(
        self, word_nbytes: int, device: torch.device, *, chunk_entries: int | None = None, num_slots: int = 3
    ) -> None:
        """Allocates the slots.

        Args:
            word_nbytes: Word size of the planes that will pass.
            device: A CUDA device.
            chunk_entries: Entries, and dense words, of a slot; at least one segment of 65,536. None for
                ``CHUNK_NBYTES``.
            num_slots: At least 2.

        Raises:
            ValueError: On a slot below a segment, or fewer than two slots.

        *Memory*: ``num_slots * chunk_entries * (2 + word_nbytes)`` bytes of the device, and ``num_slots *
        chunk_entries * word_nbytes`` more from the first dense segment on.
        """
        chunk_entries = CHUNK_NBYTES // (2 + word_nbytes) if chunk_entries is None else chunk_entries
        if chunk_entries < SEGMENT_WORDS or num_slots < 2:
            raise ValueError(f"{num_slots} slots of {chunk_entries} entries: at least 2 slots of {SEGMENT_WORDS}")
        self.word_nbytes, self.chunk_entries = word_nbytes, chunk_entries
        self.stream = torch.cuda.Stream(device)
        rows = torch.empty((num_slots, 2 + word_nbytes, chunk_entries), dtype=torch.uint8, device=device)
        self._entries, self._dense = rows, torch.empty((num_slots, word_nbytes, 0), dtype=torch.uint8, device=device)
        self._free: list[torch.cuda.Event | None] = [None] * num_slots
        self._next = 0

    def fill(
        self, planes: Planes, entries: tuple[int, int], dense: tuple[int, int]
    ) -> tuple[Planes, int, torch.cuda.Event]:
        """Copies a range of entries and of dense words into the next slot, once its last reader is done.

        Args:
            planes: In pinned memory.
            entries: First entry and end.
            dense: First dense word and end.

        Returns:
            The slot as planes, its number, and the event after the copies.
        """
        at = self._next
        self._next = (at + 1) % len(self._free)
        # A range past the slot belongs to one segment and to entries of another launch behind it: those can go.
        num, num_dense = (min(b - a, self.chunk_entries) for a, b in (entries, dense))
        if num_dense and not self._dense.numel():
            shape = (len(self._free), self.word_nbytes, self.chunk_entries)
            self._dense = torch.empty(shape, dtype=torch.uint8, device=self._entries.device)
        room, dense_room = self._entries[at], self._dense[at]
        with torch.cuda.stream(self.stream):
            free = self._free[at]
            if free is not None:
                self.stream.wait_event(free)
            for first, size, source, target in (
                (entries[0], num, planes.entries, room),
                (dense[0], num_dense, planes.dense, dense_room),
            ):
                for row in range(len(target) if size else 0):
                    target[row, :size].copy_(source[row, first : first + size], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return Planes(planes.word_nbytes, planes.counts, room, dense_room), at, copied

    def release(self, slot: int) -> None:
        """The slot may be filled again once the current stream has come this far."""
        event = torch.cuda.Event()
        event.record()
        self._free[slot] = event


def scatter_xor_streamed_(
    plan: ScatterPlan,
    planes: Planes,
    ring: EntryRing,
    lanes: torch.Tensor | None = None,
    *,
    sums: int = SUMS_CHANGE,
) -> None:
    """XORs changed words from pinned host memory into the live storages.

    Args:
        plan: Tables and layout (the tables are on the device already).
        planes: Entries and dense planes in pinned host memory.
        ring: Slots of the plan's word size.
        lanes: As for ``scatter_xor_``.
        sums: As for ``scatter_xor_``.

    Raises:
        ValueError: When planes, ring or lanes do not fit the plan, or planes are not pinned.

    *Stream*: the current stream, and the ring's for the copies; returns before the work is done. *Memory*: the planes
    must stay as they are until the current stream has come this far.
    """
    check_planes(plan, planes, lanes, torch.device("cpu"))
    if not dispatch.uses_triton(plan.records.device):
        raise ValueError(f"entries are streamed to a GPU with Triton; live weights are on {plan.records.device}")
    if ring.word_nbytes != plan.records.word_nbytes or ring.stream.device != plan.records.device:
        raise ValueError(
            f"the ring is for {ring.word_nbytes}-byte words on {ring.stream.device}, the plan of "
            f"{plan.records.word_nbytes} on {plan.records.device}"
        )
    if any(t.numel() and not t.is_pinned() for t in (planes.entries, planes.dense)):
        raise ValueError("planes must be in pinned host memory: from pageable memory a copy waits for the host")
    sums = SUMS_NONE if lanes is None else sums
    for launch in plan.launches:
        for begin, end in chunks_of(launch, ring.chunk_entries):
            entries = (int(launch.first_entry[begin]), int(launch.first_entry[end]))
            dense = (int(launch.first_dense[begin]), int(launch.first_dense[end]))
            here, slot, copied = ring.fill(planes, entries, dense)
            torch.cuda.current_stream(plan.records.device).wait_event(copied)
            launch_scatter(
                launch,
                plan,
                here,
                lanes,
                None,
                write=True,
                sums=sums,
                begin=begin,
                end=end,
                entries_before=entries[0],
                dense_before=dense[0],
            )
            ring.release(slot)


def chunks_of(launch: ScatterLaunch, chunk_entries: int) -> list[tuple[int, int]]:
    """Cuts a launch into runs of segments whose entries, and dense words, fit a slot.

    Args:
        launch: The launch.
        chunk_entries: Entries of a slot; at least 65,536.

    Returns:
        First segment and end of each chunk.
    """
    out = []
    begin, num = 0, len(launch.segments)
    while begin < num:
        ends = (
            int(np.searchsorted(first, first[begin] + chunk_entries, side="right")) - 1
            for first in (launch.first_entry, launch.first_dense)
        )
        end = min(num, max(begin + 1, min(ends)))
        out.append((begin, end))
        begin = end
    return out
