"""nvCOMP's C library through ctypes: found by distribution metadata, told apart by its symbols.

The library is never vendored and never imported at module level. Comes after ``nvcomp_abi``, before ``codecs.nvcomp``.
Must not import the Python package ``nvidia.nvcomp``, whose interface changed shape in 6.0 and which allocates and waits
behind its caller's back.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from megasync.codecs.block_batch import Direction
from megasync.codecs.nvcomp_abi import FUNCTION_PREFIX, SUCCESS, Alignments, Properties, options, status_name
from megasync.errors import MegasyncError, MissingPackageError
from megasync.kernels.zero_run_rules import BlockKind

DISTRIBUTIONS: Final = ("nvidia-libnvcomp-cu13", "nvidia-libnvcomp-cu12")
MIN_VERSION: Final = 5300
"""5.3.0: older Snappy decoders can hang on malformed input."""

_FORCING_VARIABLE: Final = "NVCOMP_HW_DECOMPRESSION"


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """Where nvCOMP was found.

    Attributes:
        distribution: Installed package that it belongs to.
        version: Version of that package.
        path: The shared object.
    """

    distribution: str
    version: str
    path: Path


def find_library(search_path: Sequence[str] | None = None) -> LibraryFile:
    """Find nvCOMP's shared object among the installed packages.

    Args:
        search_path: Folders that hold packages; ``sys.path`` by default.

    Raises:
        MissingPackageError: None is installed, or both, which overwrite each other's files.
    """
    extra = {"path": list(search_path)} if search_path is not None else {}
    found = {
        name: next(
            iter(metadata.Distribution.discover(context=metadata.DistributionFinder.Context(name=name, **extra))), None
        )
        for name in DISTRIBUTIONS
    }
    present = {name: d for name, d in found.items() if d is not None}
    if not present:
        raise MissingPackageError(
            f"nvCOMP is not installed (none of {', '.join(DISTRIBUTIONS)}): install megasync[cu13] or megasync[cu12]"
        )
    if len(present) > 1:
        raise MissingPackageError(
            f"{' and '.join(present)} are both installed: they share their folders and overwrite each other; uninstall "
            "both, then install megasync[cu13] or megasync[cu12]"
        )
    name, distribution = next(iter(present.items()))
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if re.fullmatch(r"libnvcomp\.so\.\d+", path.name) and path.exists():
            return LibraryFile(name, distribution.version, path)
    raise MissingPackageError(f"{name} {distribution.version} has no libnvcomp.so on disk: install it again")


class NvcompLibrary:
    """The functions of one loaded nvCOMP; host-only queries work without a GPU.

    Attributes:
        file: Which file was loaded, for reports.
        version: Its version as a number, 6000 for 6.0.0.
        cudart_version: CUDA runtime it was built with, 13040 for 13.4.
        asks_with_stream: True for the interface of 6.x, False for that of 5.x.
    """

    def __init__(self, file: LibraryFile) -> None:
        """Load a library.

        Args:
            file: From ``find_library``.

        Raises:
            MissingPackageError: It cannot be loaded, is too old, or has neither interface.
        """
        self.file = file
        try:
            self._library = ctypes.CDLL(str(file.path))
        except OSError as error:
            raise MissingPackageError(
                f"{file.path} ({file.distribution} {file.version}) cannot be loaded: {error}"
            ) from error
        properties = Properties()
        self._call("nvcompGetProperties", ctypes.byref(properties))
        self.version, self.cudart_version = int(properties.version), int(properties.cudart_version)
        if self.version < MIN_VERSION:
            raise MissingPackageError(
                f"{file.distribution} {file.version} is older than 5.3, the first that survives malformed Snappy: "
                "upgrade it"
            )
        if hasattr(self._library, "nvcompBatchedLZ4DecompressGetTempSize"):
            self.asks_with_stream = True
        elif hasattr(self._library, "nvcompBatchedLZ4DecompressGetTempSizeAsync"):
            self.asks_with_stream = False
        else:
            raise MissingPackageError(
                f"{file.distribution} {file.version} has neither the interface of nvCOMP 5 nor that of 6: install 5.3 to 6.x"
            )

    @property
    def forced_backend(self) -> str | None:
        """Value of the environment variable by which nvCOMP overrides our choice of decoder; None where it is unset."""
        return os.environ.get(_FORCING_VARIABLE)

    def describe(self) -> str:
        """One line for logs: package, version, path, and a forced backend."""
        forced = f", {_FORCING_VARIABLE}={self.forced_backend} forces its decoder" if self.forced_backend else ""
        return f"{self.file.distribution} {self.file.version} at {self.file.path}{forced}"

    def max_output_nbytes(self, kind: BlockKind, block_nbytes: int) -> int:
        """Bytes that a block of ``block_nbytes`` may compress to."""
        out = c_size_t()
        name = f"{FUNCTION_PREFIX[kind]}CompressGetMaxOutputChunkSize"
        self._call(name, c_size_t(block_nbytes), options(kind, "compress"), ctypes.byref(out))
        return out.value

    def alignments(self, kind: BlockKind, direction: Direction) -> tuple[int, int, int]:
        """Alignment of each input block, each output block and the scratch buffer, bytes."""
        out = Alignments()
        name = f"{FUNCTION_PREFIX[kind]}{direction.capitalize()}GetRequiredAlignments"
        self._call(name, options(kind, direction), ctypes.byref(out))
        return int(out.input), int(out.output), int(out.temp)

    def temp_nbytes(
        self, kind: BlockKind, direction: Direction, num_blocks: int, block_nbytes: int, total_nbytes: int
    ) -> int:
        """Scratch bytes of a batch: ``num_blocks`` of at most ``block_nbytes``, ``total_nbytes`` together, unencoded."""
        out = c_size_t()
        name = f"{FUNCTION_PREFIX[kind]}{direction.capitalize()}GetTempSize{'' if self.asks_with_stream else 'Async'}"
        arguments = [
            c_size_t(num_blocks),
            c_size_t(block_nbytes),
            options(kind, direction),
            ctypes.byref(out),
            c_size_t(total_nbytes),
        ]
        if self.asks_with_stream:
            arguments.append(c_void_p(None))
        self._call(name, *arguments)
        return out.value

    def compress_async(
        self,
        kind: BlockKind,
        *,
        in_ptrs: int,
        in_nbytes: int,
        block_nbytes: int,
        num_blocks: int,
        temp: int,
        temp_nbytes: int,
        out_ptrs: int,
        out_nbytes: int,
        statuses: int,
        stream: int,
    ) -> None:
        """Queue a batch; all pointers are addresses of device-accessible memory that outlives the work.

        Args:
            kind: Block format.
            in_ptrs: uint64 ``[num_blocks]``, address of each block.
            in_nbytes: uint64 ``[num_blocks]``.
            block_nbytes: The largest of them.
            num_blocks: Blocks.
            temp: Scratch.
            temp_nbytes: Its size.
            out_ptrs: uint64 ``[num_blocks]``, where each result goes.
            out_nbytes: uint64 ``[num_blocks]``, receives the size of each.
            statuses: int32 ``[num_blocks]``, receives the status of each.
            stream: ``cudaStream_t``.

        Raises:
            MegasyncError: nvCOMP refused the call.
        """
        self._call(
            f"{FUNCTION_PREFIX[kind]}CompressAsync",
            c_void_p(in_ptrs),
            c_void_p(in_nbytes),
            c_size_t(block_nbytes),
            c_size_t(num_blocks),
            c_void_p(temp),
            c_size_t(temp_nbytes),
            c_void_p(out_ptrs),
            c_void_p(out_nbytes),
            options(kind, "compress"),
            c_void_p(statuses),
            c_void_p(stream),
        )

    def decompress_async(
        self,
        kind: BlockKind,
        *,
        in_ptrs: int,
        in_nbytes: int,
        out_capacity: int,
        out_nbytes: int,
        num_blocks: int,
        temp: int,
        temp_nbytes: int,
        out_ptrs: int,
        statuses: int,
        stream: int,
    ) -> None:
        """Queue a batch for the SM decoder; as ``compress_async``, with ``out_capacity`` uint64 ``[num_blocks]``."""
        self._call(
            f"{FUNCTION_PREFIX[kind]}DecompressAsync",
            c_void_p(in_ptrs),
            c_void_p(in_nbytes),
            c_void_p(out_capacity),
            c_void_p(out_nbytes),
            c_size_t(num_blocks),
            c_void_p(temp),
            c_size_t(temp_nbytes),
            c_void_p(out_ptrs),
            options(kind, "decompress"),
            c_void_p(statuses),
            c_void_p(stream),
        )

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name)
        function.restype = c_int
        status = function(*arguments)
        if status != SUCCESS:
            raise MegasyncError(f"nvCOMP: {name} returned {status_name(status)}; library: {self.describe()}")
