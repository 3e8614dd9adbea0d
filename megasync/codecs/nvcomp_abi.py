"""Structures and constants of nvCOMP's C interface, as the headers of 5.3 and 6.0 have them.

Option structs of 64 bytes go by value and their unused bytes must be zero; every function returns a status; 6.0 renamed
the temp size query and added a stream to it, the rest is equal. Comes before ``nvcomp_library``. Only ctypes here.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_size_t, c_uint32
from typing import Final

from megasync.codecs.block_batch import Direction
from megasync.kernels.zero_run_rules import BlockKind

SUCCESS: Final = 0
CUDA_ERROR: Final = 1000
BACKEND_CUDA: Final = 2
"""The SM decoder. DEFAULT may take the Decompression Engine or not without telling; ``codecs.engine`` is for that."""

STATUS_NAMES: Final = {
    0: "Success",
    10: "InvalidValue",
    11: "NotSupported",
    12: "CannotDecompress",
    13: "BadChecksum",
    14: "CannotVerifyChecksums",
    15: "OutputBufferTooSmall",
    16: "WrongHeaderLength",
    17: "Alignment",
    18: "ChunkSizeTooLarge",
    19: "CannotCompress",
    20: "WrongInputLength",
    21: "BatchSizeTooLarge",
    1000: "CudaError",
    10000: "Internal",
}

FUNCTION_PREFIX: Final[dict[BlockKind, str]] = {"lz4": "nvcompBatchedLZ4", "snappy": "nvcompBatchedSnappy"}


class SnappyCompressOptions(ctypes.Structure):
    """``nvcompBatchedSnappyCompressOpts_t``."""

    _fields_ = [("reserved", c_char * 64)]


class SnappyDecompressOptions(ctypes.Structure):
    """``nvcompBatchedSnappyDecompressOpts_t``."""

    _fields_ = [("backend", c_int), ("sort_before_hw_decompress", c_int), ("reserved", c_char * 56)]


class Lz4CompressOptions(ctypes.Structure):
    """``nvcompBatchedLZ4CompressOpts_t``; zero means bytes without bit shuffle."""

    _fields_ = [("data_type", c_int), ("bitshuffle_mode", c_int), ("reserved", c_char * 56)]


class Lz4DecompressOptions(ctypes.Structure):
    """``nvcompBatchedLZ4DecompressOpts_t``."""

    _fields_ = [
        ("backend", c_int),
        ("sort_before_hw_decompress", c_int),
        ("data_type", c_int),
        ("bitshuffle_mode", c_int),
        ("reserved", c_char * 48),
    ]


class Properties(ctypes.Structure):
    """``nvcompProperties_t``: library version (6000 is 6.0.0) and the CUDA runtime it was built with."""

    _fields_ = [("version", c_uint32), ("cudart_version", c_uint32)]


class Alignments(ctypes.Structure):
    """``nvcompAlignmentRequirements_t``, bytes."""

    _fields_ = [("input", c_size_t), ("output", c_size_t), ("temp", c_size_t)]


def status_name(status: int) -> str:
    """``CannotDecompress (12)``."""
    return f"{STATUS_NAMES.get(status, 'unknown status')} ({status})"


def options(kind: BlockKind, direction: Direction) -> ctypes.Structure:
    """The options that every call passes: plain bytes, and the SM decoder."""
    if direction == "compress":
        return Lz4CompressOptions() if kind == "lz4" else SnappyCompressOptions()
    chosen = Lz4DecompressOptions() if kind == "lz4" else SnappyDecompressOptions()
    chosen.backend = BACKEND_CUDA
    return chosen
