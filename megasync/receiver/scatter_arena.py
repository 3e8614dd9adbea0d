"""Arenas: where decoded planes and their tables lie between staging and apply, made once and used again for every version.

An arena is one `Store` in host memory (pinned where a GPU reads it, shared where worker processes write it), and, unless entries
are streamed from there, a twin of its planes in HBM. A publication takes as many as it needs, nearly always one a word size; they
go back when nothing refers to the publication any more. Comes before staging. Must import nothing above errors but kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from threading import Lock
from typing import TypeVar, cast

import numpy as np
import torch

from megasync.errors import MemoryPlanError
from megasync.kernels.planes import Planes
from megasync.receiver.scatter_memory import HostMemory
from megasync.receiver.scatter_store import DENSE, ENTRIES, Store, StoreShape

T = TypeVar("T")

Upload = Callable[[torch.Tensor, torch.Tensor], None]

_HOST_SLACK = 8  # an eighth of the entries more than asked for: versions differ, and an arena is dear to make
_DEVICE_GRAIN = 1 << 20  # entries: a twin that grows by less would be made anew at every version
_numbers = count(1)


class Arena:
    """Room for planes and tables of one word size.

    Attributes:
        shape: How much of each.
        store: The arrays.
        memory: Where they are.
        number: Tells it from every other arena of this process.
        entries: uint8 ``[2 + word_nbytes, capacity]``, host.
        dense: uint8 ``[word_nbytes, capacity]``, host.

    *Memory*: who took it from the pool owns it; uploads must have ended before it is written again.
    """

    def __init__(self, shape: StoreShape, device: torch.device, *, shared: bool = False) -> None:
        """Allocate the host side.

        Raises:
            MemoryPlanError: The host has not enough memory to pin.
        """
        room = list(shape.room)
        room[ENTRIES] += room[ENTRIES] // _HOST_SLACK
        self.shape, self.device, self.number = shape.with_room(room), device, next(_numbers)
        try:
            self.memory = HostMemory(self.shape.nbytes, pin=device.type == "cuda", shared=shared)
        except (RuntimeError, OSError) as e:
            raise MemoryPlanError(
                f"an arena of {room[ENTRIES]} entries and {room[DENSE]} mask words of {shape.word_nbytes} bytes: the host "
                f"cannot give it ({e}); nothing was touched. Free host memory or publish smaller versions"
            ) from e
        self.store = Store.over(np.asarray(self.memory.bytes), self.shape)
        self.entries, self.dense = torch.from_numpy(self.store.entries), torch.from_numpy(self.store.dense)
        self._twins: dict[str, torch.Tensor] = {}

    @property
    def word_nbytes(self) -> int:
        """Word size."""
        return self.shape.word_nbytes

    def on_host(self, counts: torch.Tensor, num_entries: int, num_dense: int) -> Planes:
        """The first entries and mask words, where they are."""
        return Planes(self.word_nbytes, counts, self.entries[:, :num_entries], self.dense[:, :num_dense])

    def on_device(self, counts: torch.Tensor, num_entries: int, num_dense: int, upload: Upload) -> Planes:
        """Copy the first entries and mask words to the device.

        Args:
            counts: See `Planes`.
            num_entries: How many entries.
            num_dense: How many mask words.
            upload: Copies a plane into its part of the twin.

        Returns:
            The twin's part; on the CPU the host side itself.

        Raises:
            MemoryPlanError: The device has not enough memory.

        *Stream*: the current one; nothing is waited for. *Memory*: the twin is written again by the next call.
        """
        if self.device.type != "cuda":
            return self.on_host(counts, num_entries, num_dense)
        parts = []
        for name, source, num in (("entries", self.entries, num_entries), ("dense", self.dense, num_dense)):
            target = self._twin(name, source.shape[0], num)[:, :num]
            for row in range(source.shape[0] if num else 0):
                upload(target[row], source[row, :num])
            parts.append(target)
        return Planes(self.word_nbytes, counts, *parts)

    def _twin(self, name: str, rows: int, num: int) -> torch.Tensor:
        found = self._twins.get(name)
        if found is None or found.shape[1] < num:
            self._twins.pop(name, None)
            del found  # freed before the larger one is made
            columns = -(-(num + num // 8) // _DEVICE_GRAIN) * _DEVICE_GRAIN if num else 1
            try:
                found = torch.empty((rows, columns), dtype=torch.uint8, device=self.device)
            except torch.cuda.OutOfMemoryError as e:
                raise MemoryPlanError(
                    f"{rows * columns} bytes of staged planes do not fit {self.device} ({e}); nothing was touched. Give the "
                    "engine less, or let entries be read from pinned memory"
                ) from e
            self._twins[name] = found
        return found

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return self.shape.nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes in HBM."""
        return sum(t.numel() for t in self._twins.values())


class ArenaPool:
    """Arenas of one backend. Thread-safe.

    Attributes:
        device: Whose planes they hold.
        shared: Whether other processes write them.
    """

    def __init__(self, device: torch.device, *, shared: bool = False) -> None:
        self.device, self.shared = device, shared
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._lock = Lock()
        self._made: dict[Hashable, object] = {}

    def take(self, shape: StoreShape) -> Arena:
        """A free arena that is large enough, else a new one in the place of a free one that is too small.

        Raises:
            MemoryPlanError: Not enough memory.
        """
        with self._lock:
            mine = sorted((a for a in self._free if a.word_nbytes == shape.word_nbytes), key=lambda a: a.host_nbytes)
            found = next((a for a in mine if a.shape.fits(shape.room)), None)
            if found is None:
                if mine:
                    self._free.remove(mine[-1])
                    both = zip(shape.room, mine[-1].shape.room, strict=True)
                    shape = shape.with_room([max(a, b) for a, b in both])
                    mine.clear()
                found = Arena(shape, self.device, shared=self.shared)
            else:
                self._free.remove(found)
            self._taken.append(found)
            return found

    def give(self, arenas: list[Arena]) -> None:
        """Take arenas back; the list is emptied, so that a second call does nothing."""
        with self._lock:
            for arena in arenas:
                self._taken.remove(arena)
                self._free.append(arena)
            arenas.clear()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave the first time: facts of the rank that every publication needs."""
        if name not in self._made:
            self._made[name] = make()
        return cast(T, self._made[name])

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the arenas that are still there."""
        with self._lock:
            return frozenset(a.number for a in (*self._free, *self._taken))

    @property
    def host_nbytes(self) -> int:
        """Bytes of all arenas in host memory."""
        with self._lock:
            return sum(a.host_nbytes for a in (*self._free, *self._taken))

    @property
    def device_nbytes(self) -> int:
        """Bytes of all arenas in HBM."""
        with self._lock:
            return sum(a.device_nbytes for a in (*self._free, *self._taken))
