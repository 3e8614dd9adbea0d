"""The few CUDA driver calls that the Decompression Engine needs, through ctypes.

Not through cuda-python: its ``cuPointerGetAttribute`` refuses the attribute that tells engine-capable memory (21). Names
and numbers are those of cuda.h of CUDA 12.8 to 13. The library is an argument, so tests pass one of their own. Comes
before ``engine_arena`` and ``engine``. Must not import torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Final

from megasync.errors import MegasyncError, MemoryPlanError, MissingPackageError

HOST_NUMA: Final = 3  # CU_MEM_LOCATION_TYPE_HOST_NUMA
DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ, READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
USAGE_HW_DECOMPRESS: Final = 2  # CU_MEM_CREATE_USAGE_HW_DECOMPRESS
_ALLOCATION_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_GRANULARITY_MINIMUM = 0
_POINTER_IS_HW_DECOMPRESS_CAPABLE = 21
_SUCCESS, _INVALID_VALUE, _OUT_OF_MEMORY = 0, 1, 2
_NO_INDEX = (1 << 64) - 1


class MemoryLocation(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``, its ``allocFlags`` spelt out."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", MemoryLocation),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", MemoryLocation), ("flags", c_int)]


_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(AllocationProperties), c_int],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(AccessDescription), c_size_t],
    "cuMemBatchDecompressAsync": [c_void_p, c_size_t, c_uint, POINTER(c_size_t), c_void_p],
}


def load_libcuda(name: str = "libcuda.so.1") -> ctypes.CDLL:
    """Load the driver's library and declare the functions used here.

    Raises:
        MissingPackageError: There is no NVIDIA driver.
    """
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise MissingPackageError(
            f"the Decompression Engine needs the NVIDIA driver, and {name} cannot be loaded ({error}): choose the scatter, "
            "sm or cpu backend"
        ) from error
    for function, arguments in _SIGNATURES.items():
        if hasattr(library, function):  # drivers before 12.8 have no cuMemBatchDecompressAsync
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = c_int
    return library


class CudaDriver:
    """Driver calls with checked results.

    Attributes:
        version: What the driver supports, 13000 for CUDA 13.0.
        can_decompress: Whether it has ``cuMemBatchDecompressAsync``.
    """

    def __init__(self, library: Any) -> None:
        """Initialise the driver.

        Args:
            library: From ``load_libcuda``, or anything with these functions.
        """
        self._library = library
        self._call("cuInit", c_uint(0))
        version = c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        self.can_decompress = hasattr(library, "cuMemBatchDecompressAsync")

    def device_attribute(self, ordinal: int, attribute: int) -> int:
        """A device attribute; 0 where this driver does not know it."""
        device, value = c_int(), c_int()
        self._call("cuDeviceGet", ctypes.byref(device), c_int(ordinal))
        status = self._library.cuDeviceGetAttribute(ctypes.byref(value), c_int(attribute), device)
        if status == _INVALID_VALUE:
            return 0
        self._check("cuDeviceGetAttribute", status)
        return value.value

    def is_engine_capable(self, address: int) -> bool:
        """Whether the engine can work on the memory at an address; false also for memory the driver does not know."""
        value = c_uint64(0)
        status = self._library.cuPointerGetAttribute(
            ctypes.cast(ctypes.byref(value), c_void_p), c_int(_POINTER_IS_HW_DECOMPRESS_CAPABLE), c_uint64(address)
        )
        if status == _INVALID_VALUE:
            return False
        self._check("cuPointerGetAttribute", status)
        return bool(value.value & 0xFFFFFFFF)

    def granularity(self, properties: AllocationProperties) -> int:
        """Bytes that sizes of such an allocation are a multiple of."""
        out = c_size_t()
        name = "cuMemGetAllocationGranularity"
        self._call(name, ctypes.byref(out), ctypes.byref(properties), c_int(_GRANULARITY_MINIMUM))
        return out.value

    def create(self, nbytes: int, properties: AllocationProperties) -> int:
        """Allocate physical memory; its handle.

        Raises:
            MemoryPlanError: There is not enough.
        """
        handle = c_uint64()
        properties_ref = ctypes.byref(properties)
        status = self._library.cuMemCreate(ctypes.byref(handle), c_size_t(nbytes), properties_ref, c_uint64(0))
        if status == _OUT_OF_MEMORY:
            raise MemoryPlanError(
                f"{nbytes} bytes of host memory on NUMA node {properties.location.id} for the Decompression Engine are "
                "not to be had; nothing was allocated: make the arena smaller"
            )
        self._check("cuMemCreate", status)
        return handle.value

    def release(self, handle: int) -> None:
        """Give physical memory back; it goes when it is unmapped too."""
        self._call("cuMemRelease", c_uint64(handle))

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses."""
        address = c_uint64()
        zero = c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), c_size_t(nbytes), c_size_t(0), zero, zero)
        return address.value

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(nbytes))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map physical memory at reserved addresses."""
        self._call("cuMemMap", c_uint64(address), c_size_t(nbytes), c_size_t(0), c_uint64(handle), c_uint64(0))

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo ``map``."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(nbytes))

    def set_access(self, address: int, nbytes: int, location: MemoryLocation, flags: int) -> None:
        """Let a location (the host's node, a device) use mapped memory."""
        description = AccessDescription(location, flags)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(nbytes), ctypes.byref(description), c_size_t(1))

    def batch_decompress_async(self, params: int, count: int, stream: int) -> None:
        """Queue a batch on the engine.

        Args:
            params: Address of ``count`` parameter rows of 64 bytes in host memory.
            count: Operations.
            stream: ``CUstream``.

        Raises:
            MegasyncError: The driver refused the batch; the message has the operation, where it tells.
        """
        index = c_size_t(_NO_INDEX)
        name = "cuMemBatchDecompressAsync"
        status = self._library.cuMemBatchDecompressAsync(
            c_void_p(params), c_size_t(count), c_uint(0), ctypes.byref(index), c_void_p(stream)
        )
        self._check(name, status, "" if index.value == _NO_INDEX else f" at operation {index.value} of {count}")

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int, where: str = "") -> None:
        if status == _SUCCESS:
            return
        text = c_char_p()
        self._library.cuGetErrorName(c_int(status), ctypes.byref(text))
        known = text.value.decode() if text.value else "unknown error"
        raise MegasyncError(f"CUDA driver: {name} failed{where}: {known} ({status})")


def pinned_on_host(numa_node: int) -> AllocationProperties:
    """Properties of engine-capable host memory on a node."""
    return AllocationProperties(
        type=_ALLOCATION_PINNED, location=MemoryLocation(HOST_NUMA, numa_node), usage=USAGE_HW_DECOMPRESS
    )
