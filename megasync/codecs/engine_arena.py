"""Host memory that the Decompression Engine can read: ordinary pinned memory is not.

Physical memory on the device's NUMA node, made with the driver's virtual memory calls and the engine's usage flag, then
mapped for host and device. Drivers take the flag on GPUs without an engine too, so success proves nothing; each arena asks
the driver whether its memory is engine-capable. Comes after ``engine_driver``; the outer decoder fills it. Must not import
torch.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from megasync.codecs.block_batch import Span
from megasync.codecs.engine_driver import (
    DEVICE,
    HOST_NUMA,
    READ,
    READ_WRITE,
    CudaDriver,
    MemoryLocation,
    pinned_on_host,
)
from megasync.errors import PlanError

_ATTRIBUTE_HOST_NUMA_ID = 134
_ATTRIBUTE_HOST_NUMA_VMM = 141


class HostArena:
    """Engine-capable host memory, mapped until closed. A context manager.

    Attributes:
        span: Where it is; host and device use the same address.
        numa_node: Node that holds it.

    *Memory*: owned by this object; ``view`` and everything queued on it must be gone before ``close``.
    """

    def __init__(self, driver: CudaDriver, ordinal: int, nbytes: int, *, device_writes: bool = False) -> None:
        """Allocate and map.

        Args:
            driver: The driver. The device's context must be current on this thread.
            ordinal: Device that will read it, in the order of the visible devices.
            nbytes: At least; rounded up to the driver's granularity (2 MiB).
            device_writes: Let the device write too (the rows that receive actual sizes need it).

        Raises:
            ValueError: ``nbytes`` is not positive.
            PlanError: Device or driver cannot do this; what was made on the way is gone.
            MemoryPlanError: Not enough memory.
        """
        if nbytes < 1:
            raise ValueError(f"an arena of {nbytes} bytes")
        if not driver.device_attribute(ordinal, _ATTRIBUTE_HOST_NUMA_VMM):
            raise PlanError(
                f"device {ordinal} cannot map memory of a host NUMA node (attribute {_ATTRIBUTE_HOST_NUMA_VMM} is 0), so "
                "the Decompression Engine has nothing to read from: choose the sm backend"
            )
        self.numa_node = max(driver.device_attribute(ordinal, _ATTRIBUTE_HOST_NUMA_ID), 0)
        properties = pinned_on_host(self.numa_node)
        unit = driver.granularity(properties)
        size = -(-nbytes // unit) * unit
        with ExitStack() as undo:  # newest first, whatever fails
            handle = driver.create(size, properties)
            undo.callback(driver.release, handle)
            address = driver.reserve(size)
            undo.callback(driver.free_addresses, address, size)
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
            driver.set_access(address, size, MemoryLocation(HOST_NUMA, self.numa_node), READ_WRITE)
            driver.set_access(address, size, MemoryLocation(DEVICE, ordinal), READ_WRITE if device_writes else READ)
            if not driver.is_engine_capable(address):
                raise PlanError(
                    f"the driver mapped host memory for device {ordinal} but says that the Decompression Engine cannot use "
                    "it: update the driver, or choose the sm backend"
                )
            self._undo = undo.pop_all()
        self.span = Span(address, size)

    @property
    def view(self) -> np.ndarray:
        """uint8 ``[nbytes]``, writeable view of the arena."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.span.nbytes).from_address(self.span.address))

    def close(self) -> None:
        """Unmap and free; a second call does nothing."""
        self._undo.close()

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
