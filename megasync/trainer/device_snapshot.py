"""The snapshot of live weights that are on a device: in device memory, or in pinned host memory.

Between plan and the device's mask stage. Seeding and withdrawal go through the host in chunks, since they are rare; digest
sums are computed on the device. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megasync.config import SnapshotPlace
from megasync.schema import Schema
from megasync.trainer.device_arena import host_arena
from megasync.trainer.device_digest import device_lanes
from megasync.trainer.regions import Region
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.types import Entries, Lanes

log = logging.getLogger(__name__)

_CHUNK_WORDS = 1 << 22


class DeviceSnapshot(Snapshot):
    """A snapshot beside live weights on a device.

    Args:
        schema: The run's schema.
        regions: Owned regions in (tensor id, tile) order.
        place: Where its bytes are kept.
        device: Where the live weights are.

    Raises:
        MemoryPlanError: The arena cannot be had, with the bytes needed.
    """

    def __init__(self, schema: Schema, regions: Sequence[Region], place: SnapshotPlace, device: torch.device) -> None:
        def allocate(nbytes: int) -> torch.Tensor:
            if place is SnapshotPlace.HOST:
                return host_arena(nbytes, device)
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        self.place, self.device = place, device
        super().__init__(schema, regions, allocate)

    def xor_(self, entries: Entries) -> None:
        """See ``Snapshot.xor_``. *Stream*: the current stream, for a snapshot on the device."""
        if self.place is SnapshotPlace.HOST:
            super().xor_(entries)
            return
        w = entries.word_nbytes
        found = [(index + int(self.offsets[i]) // w, values) for i, index, values in self.places(entries)]
        if not found:
            return
        at = np.concatenate([index for index, _ in found])
        signed = np.concatenate([values for _, values in found]).view(f"<i{w}" if w > 1 else "u1")
        words = self.arena.view(SAME_SIZE[w])
        for a in range(0, len(at), _CHUNK_WORDS):
            index = torch.from_numpy(at[a : a + _CHUNK_WORDS]).to(self.device)
            words[index] = words[index] ^ torch.from_numpy(signed[a : a + _CHUNK_WORDS]).to(self.device)

    def lanes(self) -> Iterator[tuple[int, Lanes]]:
        """See ``Snapshot.lanes``."""
        for i, region in enumerate(self.regions):
            shape = self.schema.grids[region.tensor_id].shape
            yield region.tensor_id, device_lanes(shape, region.box, self.tensor(i).to(self.device))

    def _write(self, i: int, words: np.ndarray) -> None:
        raw = np.ascontiguousarray(words).view(np.uint8)
        self._bytes(i).copy_(torch.from_numpy(raw if raw.flags.writeable else raw.copy()))


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of live weights: CUDA where any of them is, else the CPU.

    Raises:
        ValueError: They are on several CUDA devices.
    """
    found = {t.device for t in tensors if t.is_cuda}
    if len(found) > 1:
        raise ValueError(f"weights of one rank lie on {sorted(map(str, found))}: start one process for each GPU")
    return next(iter(found), torch.device("cpu"))


def make_snapshot(schema: Schema, regions: Sequence[Region], place: SnapshotPlace, device: torch.device) -> Snapshot:
    """The snapshot for weights on a device.

    Args:
        schema: The run's schema.
        regions: Owned regions in (tensor id, tile) order.
        place: Where to keep it; beside weights on the CPU it is always plain host memory.
        device: Where the live weights are.

    Raises:
        MemoryPlanError: The arena cannot be had, with the bytes needed.
    """
    if device.type == "cpu":
        return Snapshot(schema, regions)
    warn_of_one_queue(place)
    return DeviceSnapshot(schema, regions, place, device)


def one_queue() -> bool:
    """Whether all streams of a GPU share one hardware queue, as Megatron wants it before Blackwell."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def warn_of_one_queue(place: SnapshotPlace) -> None:
    """Warn where a snapshot in host memory is compared by the CPU (see ``copied_masker``)."""
    if place is SnapshotPlace.HOST and one_queue():
        log.warning(
            "megasync: snapshot=host with CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, in which kernels "
            "of a mask pass would hold the trainer up; weights are copied to host memory instead, which takes as much of it "
            "again, and compared by the CPU. A snapshot on the device (snapshot=device) is published sooner"
        )
