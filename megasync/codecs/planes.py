"""Stored planes: each plane of a frame is its own Zstd frame, or raw where that is not larger.

Shared by all codecs. The parameters are part of what makes publications byte-reproducible: library version and level
go in the manifest. Any Zstd decoder reads the result.
"""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import zstandard

from megasync.errors import FormatError

LEVEL = 1
# Planes have no long repeats: a small hash table and long minimum match leave the work to the entropy coder, which
# is both smaller and 1.7 times faster than level 1 as it comes (measured on masks A to D).
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    LEVEL, min_match=7, hash_log=6, write_content_size=True, write_checksum=False, write_dict_id=False
)
MAX_WINDOW = 0x88
"""Window descriptor of 128 MiB, which decoders take at their defaults; larger windows are refused by every reader alike."""
_MAGIC = b"\x28\xb5\x2f\xfd"
LIBRARY = f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"
# Masks of the dense codecs do repeat: they take level 1 as it comes.
_BLOCK_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
)

_local = threading.local()  # zstandard's contexts must not be shared between threads


def _compressor(name: str, parameters: zstandard.ZstdCompressionParameters) -> zstandard.ZstdCompressor:
    found = getattr(_local, name, None)
    if found is None:
        found = zstandard.ZstdCompressor(compression_params=parameters)
        setattr(_local, name, found)
    return cast(zstandard.ZstdCompressor, found)


def plane_compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor with the parameters of planes."""
    return _compressor("plane", _PARAMETERS)


def compress(raw: bytes | memoryview | np.ndarray, *, block: bool = False) -> bytes:
    """One Zstd frame of ``raw`` with its content size, always (also where larger).

    Args:
        raw: Contiguous bytes.
        block: Use plain level 1, for mask bytes, rather than the parameters tuned for planes.
    """
    name, parameters = ("block", _BLOCK_PARAMETERS) if block else ("plane", _PARAMETERS)
    return _compressor(name, parameters).compress(memoryview(raw).cast("B"))  # type: ignore[arg-type]


def pack(raw: np.ndarray, *, block: bool = False) -> bytes:
    """The stored form of a plane: a Zstd frame where that is strictly smaller, else the raw bytes.

    Args:
        raw: Any dtype, contiguous.
        block: See ``compress``.
    """
    if not raw.size:
        return b""
    view = np.ascontiguousarray(raw).data.cast("B")
    packed = compress(view, block=block)
    return packed if len(packed) < len(view) else bytes(view)


def unpack(stored: memoryview, raw_nbytes: int, what: str) -> memoryview:
    """The raw bytes of a stored plane.

    Args:
        stored: Stored bytes.
        raw_nbytes: Length that follows from tiles and counts, never from the wire.
        what: Name of the plane for messages.

    Returns:
        ``raw_nbytes`` bytes; the stored memory itself where it was not compressed.

    Raises:
        FormatError: Stored larger than raw, or anything but one Zstd frame (not a skippable one) without a dictionary
            id and with the right content size.
    """
    if len(stored) == raw_nbytes:
        return stored
    if len(stored) > raw_nbytes:
        raise FormatError(f"{what}: {len(stored)} stored bytes for {raw_nbytes} raw ones; expected at most as many")
    if stored[:4] != _MAGIC or len(stored) < 6:
        raise FormatError(f"{what}: {len(stored)} stored bytes for {raw_nbytes} raw ones that are not a Zstd frame")
    flags = stored[4]
    if flags & 3:
        raise FormatError(f"{what}: a Zstd frame with a dictionary id; the format has no dictionaries")
    if not flags & 0x20 and stored[5] > MAX_WINDOW:
        raise FormatError(f"{what}: a Zstd frame with a window above 128 MiB (descriptor {stored[5]:#x})")
    try:
        size = zstandard.frame_content_size(stored)
        if size != raw_nbytes:
            raise FormatError(
                f"{what}: Zstd content size {size}, expected {raw_nbytes}; fetch it again or report the publisher"
            )
        found = getattr(_local, "decompressor", None)
        if found is None:
            found = _local.decompressor = zstandard.ZstdDecompressor()
        raw = cast(bytes, found.decompress(stored, allow_extra_data=False))
    except zstandard.ZstdError as e:
        raise FormatError(f"{what}: not a Zstd frame of {raw_nbytes} bytes: {e}") from e
    if len(raw) != raw_nbytes:
        raise FormatError(f"{what}: Zstd frame holds {len(raw)} bytes, expected {raw_nbytes}")
    return memoryview(raw)


def split_planes(stored: memoryview, plane_nbytes: tuple[int, ...], num_planes: int) -> list[memoryview]:
    """Cut a frame's stored bytes in its planes.

    Raises:
        FormatError: Wrong number of planes, or lengths that do not add up.
    """
    if len(plane_nbytes) != num_planes:
        raise FormatError(f"frame has {len(plane_nbytes)} planes, expected {num_planes}")
    if sum(plane_nbytes) != len(stored):
        raise FormatError(f"planes of a frame add up to {sum(plane_nbytes)} bytes, the frame has {len(stored)}")
    out, at = [], 0
    for nbytes in plane_nbytes:
        out.append(stored[at : at + nbytes])
        at += nbytes
    return out
