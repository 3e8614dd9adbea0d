"""Host memory of arenas: pages that a GPU may read by itself, and that worker processes may map.

Shared memory is a file without a name: it goes when the last process that maps it ends, however that ends. Used by
``scatter_arena`` and ``scatter_workers``. Must import nothing above errors.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch


class HostMemory:
    """Some bytes of host memory, zero at first, touched only when they are written unless they are pinned.

    Attributes:
        nbytes: How many.
        bytes: uint8, all of them.
        file: Descriptor that other processes map, -1 where the memory is not shared.

    Args:
        nbytes: How many, 0 counts as 1.
        pin: Let the GPU read them while the host goes on.
        shared: Let other processes map them. Linux only.

    Raises:
        OSError: The host has not that much memory, or cannot share it.
        RuntimeError: It cannot be pinned.

    *Memory*: freed once this and every array over it are gone.
    """

    def __init__(self, nbytes: int, *, pin: bool, shared: bool) -> None:
        self.nbytes = max(nbytes, 1)
        self.file = os.memfd_create("megasync") if shared else -1
        if shared:
            # The file goes with this object even if the rest of this fails.
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, self.nbytes)
        self.map = mmap.mmap(self.file, self.nbytes)
        self.bytes = np.frombuffer(self.map, np.uint8)
        if pin:
            self._pin()

    def _pin(self) -> None:
        address = int(self.bytes.ctypes.data)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, self.nbytes, 0)))
        # At exit the driver lets go of everything by itself, and may be gone before this.
        weakref.finalize(self, _unpin, self.map, address).atexit = False


def _unpin(held: mmap.mmap, address: int) -> None:
    """Pages stay mapped until here: ``held`` is what keeps them."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    del held
