"""Host memory that a device can read and write at full speed: pinned once, reused for ever.

The snapshot's arena where it is kept in host memory, and the landing arenas that changed words come down into. Pages are
registered rather than taken from torch's pinned allocator, which rounds up to a power of two. Must not import receiver or
an adapter.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from threading import Condition

import torch

_REGISTER_FLAGS = 1 | 2  # portable, mapped: kernels write changed words straight into it
_ALIGN = 64


def host_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory for work with a device: pinned for CUDA, plain for the CPU.

    Args:
        nbytes: Size.
        device: Where the live weights are.

    Returns:
        uint8 ``[nbytes]``, contiguous, bytes undefined.

    Raises:
        MemoryError: The driver does not pin it, with its reason.

    *Memory*: unpinned when the last view is gone. Pinning takes about 0.4 s a GB, once.
    """
    if device.type != "cuda" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    arena = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(arena.data_ptr(), nbytes, _REGISTER_FLAGS))
    if status:
        raise MemoryError(f"pinning {nbytes / 1e9:.2f} GB of host memory failed: CUDA error {status}")
    weakref.finalize(arena, runtime.cudaHostUnregister, arena.data_ptr()).atexit = False
    return arena


class Landing:
    """One pass's changed words on their way to the encoder, in one arena made once.

    What a denser pass than planned does not get here goes to ordinary memory: slower, never lost.

    Args:
        nbytes: Size of the arena.
        device: Where the words come from.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._arena = host_arena(nbytes, device)
        self._used = 0
        self.overflow_nbytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for an array of the pass, contiguous; ordinary memory where the arena is full."""
        nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
        if self._used + nbytes > self._arena.numel():
            self.overflow_nbytes += nbytes
            return torch.empty(tuple(shape), dtype=dtype)
        out = self._arena[self._used : self._used + nbytes].view(dtype).view(tuple(shape))
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return out

    def clear(self) -> None:
        """Give the arena to the next pass; nothing may read the last one's arrays any more."""
        self._used = self.overflow_nbytes = 0


class Landings:
    """The landing arenas of a run, handed to one pass each.

    Args:
        num: How many: one lands while another is encoded.
        nbytes: Size of each.
        device: Where the words come from.
    """

    def __init__(self, num: int, nbytes: int, device: torch.device) -> None:
        self._free = [Landing(nbytes, device) for _ in range(num)]
        self._changed = Condition()
        self._closed = False

    def take(self) -> Landing:
        """An arena; waits until an earlier pass is encoded.

        Raises:
            RuntimeError: The run was closed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise RuntimeError("the publisher was closed before the weights were read")
            return self._free.pop()

    def give(self, landing: Landing) -> None:
        """Back from the encoder."""
        landing.clear()
        with self._changed:
            self._free.append(landing)
            self._changed.notify()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
