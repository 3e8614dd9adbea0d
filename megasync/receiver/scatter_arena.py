"""Arenas: where decoded planes lie between staging and apply, made once and used again for every version.

An arena holds planes of one word size in host memory (pinned where a GPU reads it), and, unless entries are streamed from
there, its twin in HBM. A publication takes as many as it needs, nearly always one; they go back when nothing refers to the
publication any more. Comes before staging. Must import nothing above errors but kernels.
"""

from __future__ import annotations

from threading import Lock

import torch

from megasync.errors import MemoryPlanError
from megasync.kernels.planes import Planes

MIN_NBYTES = 4 << 20
"""Smallest host buffer of an arena."""

_DEVICE_GRAIN = 1 << 20  # entries: a twin that grows by less would be made anew at every version


class Arena:
    """Room for planes of one word size.

    Attributes:
        word_nbytes: Word size.
        entries: uint8 ``[2 + word_nbytes, capacity]``, host.
        dense: uint8 ``[word_nbytes, capacity]``, host.

    *Memory*: who took it from the pool owns it; uploads must have ended before it is written again.
    """

    def __init__(self, word_nbytes: int, device: torch.device, num_entries: int, num_dense: int) -> None:
        """Allocate the host side.

        Raises:
            MemoryPlanError: The host has not enough memory to pin.
        """
        self.word_nbytes, self.device = word_nbytes, device
        # Pinned memory comes in powers of two whatever is asked for: take all of it.
        columns = [_columns(num_entries, 2 + word_nbytes), _columns(num_dense, word_nbytes)]
        pin = device.type == "cuda"
        try:
            self.entries = torch.empty((2 + word_nbytes, columns[0]), dtype=torch.uint8, pin_memory=pin)
            self.dense = torch.empty((word_nbytes, columns[1]), dtype=torch.uint8, pin_memory=pin)
        except RuntimeError as e:
            raise MemoryPlanError(
                f"an arena of {num_entries} entries and {num_dense} mask words of {word_nbytes} bytes: the host cannot give "
                f"it ({e}); nothing was touched. Free host memory or publish smaller versions"
            ) from e
        self._twins: dict[str, torch.Tensor] = {}

    def fits(self, num_entries: int, num_dense: int) -> bool:
        """Whether this much fits."""
        return num_entries <= self.entries.shape[1] and num_dense <= self.dense.shape[1]

    def on_host(self, counts: torch.Tensor, num_entries: int, num_dense: int) -> Planes:
        """The first entries and mask words, where they are."""
        return Planes(self.word_nbytes, counts, self.entries[:, :num_entries], self.dense[:, :num_dense])

    def on_device(self, counts: torch.Tensor, num_entries: int, num_dense: int) -> Planes:
        """Copy the first entries and mask words to the device.

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
                target[row].copy_(source[row, :num], non_blocking=True)
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
        return self.entries.numel() + self.dense.numel()

    @property
    def device_nbytes(self) -> int:
        """Bytes in HBM."""
        return sum(t.numel() for t in self._twins.values())


class ArenaPool:
    """Arenas of one backend. Thread-safe.

    Attributes:
        device: Whose planes they hold.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._lock = Lock()

    def take(self, word_nbytes: int, num_entries: int, num_dense: int) -> Arena:
        """A free arena that is large enough, else a new one in the place of a free one that is too small.

        Raises:
            MemoryPlanError: Not enough memory.
        """
        with self._lock:
            mine = sorted((a for a in self._free if a.word_nbytes == word_nbytes), key=lambda a: a.host_nbytes)
            found = next((a for a in mine if a.fits(num_entries, num_dense)), None)
            if found is None:
                if mine:
                    self._free.remove(mine[-1])
                    num_entries = max(num_entries, mine[-1].entries.shape[1])
                    num_dense = max(num_dense, mine[-1].dense.shape[1])
                    mine.clear()
                found = Arena(word_nbytes, self.device, num_entries, num_dense)
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


def _columns(num: int, rows: int) -> int:
    """Columns of a buffer of a power of two of bytes that holds ``num``."""
    nbytes = max(MIN_NBYTES, num * rows)
    return int((1 << (nbytes - 1).bit_length()) // rows)
