"""Blackwell's Decompression Engine, called through the driver directly: no nvCOMP, no kernel, no wait for the stream.

Before it in the flow: raw LZ4 or Snappy blocks in a ``HostArena``, walked where their source is unsigned. After it: the
dense XOR of the layer that the engine filled. One driver call a layer; its parameters are built here from the frame
table, so nothing is asked of the device first.

**It has not run on Blackwell.** No GPU with an engine was at hand: layouts, numbers and rules are from the driver's
documentation and headers, and the parameter bytes are tested against a library that decodes them on the CPU. On an H200
attributes 136 and 137 read 0, which is refused. Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from megasync.codecs.block_batch import BatchPlan, Span, batch_rows, check_plan
from megasync.codecs.engine_driver import CudaDriver
from megasync.codecs.zero_run_lockstep import skip_preamble
from megasync.errors import FormatError, PlanError
from megasync.kernels.zero_run_rules import MAX_BLOCK_NBYTES, BlockKind, check_kind

_ATTRIBUTE_ALGORITHM_MASK = 136
_ATTRIBUTE_MAXIMUM_LENGTH = 137
_MIN_DRIVER_VERSION = 12080
_ALGORITHMS: Final[dict[BlockKind, int]] = {"snappy": 2, "lz4": 4}
_ROW_NBYTES = 64 + 4  # parameters, and the actual size

PARAMS: Final = np.dtype(
    {
        "names": ["src_nbytes", "dst_nbytes", "dst_actual", "src", "dst", "algorithm"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 32, 40],
        "itemsize": 64,
    }
)
"""``CUmemDecompressParams`` of cuda.h: the last 20 bytes are padding and must be zero."""


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """What a device's engine can do.

    Attributes:
        ordinal: The device.
        driver_version: 13000 for CUDA 13.0.
        has_call: The driver can be asked to decompress.
        algorithm_mask: Bits of the formats the engine knows; 0 without an engine.
        max_nbytes: Largest length of one operation, encoded and decoded.
    """

    ordinal: int
    driver_version: int
    has_call: bool
    algorithm_mask: int
    max_nbytes: int

    def refusal(self, kind: BlockKind) -> str | None:
        """Why the engine cannot decode ``kind`` here, or None where it can."""
        check_kind(kind)
        if self.driver_version < _MIN_DRIVER_VERSION or not self.has_call:
            return f"the driver supports CUDA {self.driver_version}, the engine needs {_MIN_DRIVER_VERSION} or newer"
        if not self.algorithm_mask:
            return f"device {self.ordinal} has no Decompression Engine (attribute {_ATTRIBUTE_ALGORITHM_MASK} is 0)"
        if not self.algorithm_mask & _ALGORITHMS[kind]:
            return f"the engine of device {self.ordinal} does not know {kind} (formats: {self.algorithm_mask:#b})"
        if self.max_nbytes < 1:
            return f"the engine of device {self.ordinal} takes no length (attribute {_ATTRIBUTE_MAXIMUM_LENGTH} is 0)"
        return None


def probe_engine(driver: CudaDriver, ordinal: int) -> EngineProbe:
    """Ask a device for its engine. Attributes decide, never the success of an allocation with the engine's flag."""
    return EngineProbe(
        ordinal=ordinal,
        driver_version=driver.version,
        has_call=driver.can_decompress,
        algorithm_mask=driver.device_attribute(ordinal, _ATTRIBUTE_ALGORITHM_MASK),
        max_nbytes=driver.device_attribute(ordinal, _ATTRIBUTE_MAXIMUM_LENGTH),
    )


def build_params(
    kind: BlockKind,
    rows: np.ndarray,
    header_nbytes: np.ndarray,
    actual_address: int,
) -> np.ndarray:
    """Parameters of a batch, as the driver reads them.

    Args:
        kind: Block format.
        rows: int64 ``[4, n]`` of ``batch_rows``.
        header_nbytes: int64 ``[n]``, bytes at the front of each block that the engine must not see.
        actual_address: Address of uint32 ``[n]`` that receive the actual sizes.

    Returns:
        uint8 ``[n, 64]``, C-contiguous.
    """
    in_address, in_nbytes, out_address, out_nbytes = rows
    params = np.zeros(rows.shape[1], dtype=PARAMS)
    params["src_nbytes"] = in_nbytes - header_nbytes
    params["dst_nbytes"] = out_nbytes
    params["dst_actual"] = actual_address + 4 * np.arange(rows.shape[1], dtype=np.int64)
    params["src"] = in_address + header_nbytes
    params["dst"] = out_address
    params["algorithm"] = _ALGORITHMS[kind]
    return params.view(np.uint8).reshape(-1, PARAMS.itemsize)


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch on the engine; keep it until its stream work is done, then ``check``.

    Attributes:
        kind: Block format.
        params: uint8 ``[n, 64]``, kept in place while the driver may read it.
        actual: uint32 ``[n]``, view of the rows that the engine writes.
        expected: int64 ``[n]``.
    """

    kind: BlockKind
    params: np.ndarray
    actual: np.ndarray
    expected: np.ndarray

    def check(self) -> None:
        """Compare actual with expected sizes; only after the batch's stream work is done.

        Raises:
            FormatError: A block decoded to another length. (The engine reports no status for malformed LZ4.)
        """
        bad = np.flatnonzero(self.actual != self.expected)
        if len(bad):
            i = int(bad[0])
            raise FormatError(
                f"Decompression Engine, {self.kind}: {len(bad)} of {len(self.expected)} blocks have another length, first "
                f"block {i}: {int(self.actual[i])} bytes, expected {int(self.expected[i])}; the output is void"
            )


class Engine:
    """The engine of one device, for one block format.

    Attributes:
        probe: What the device said.
        kind: Block format.
    """

    def __init__(self, driver: CudaDriver, probe: EngineProbe, kind: BlockKind) -> None:
        """Take the engine, or refuse.

        Args:
            driver: The driver.
            probe: From ``probe_engine``.
            kind: Block format.

        Raises:
            PlanError: There is no engine for this format here.
        """
        refusal = probe.refusal(kind)
        if refusal is not None:
            raise PlanError(f"Decompression Engine: {refusal}; choose the scatter, sm or cpu backend")
        self._driver = driver
        self.probe = probe
        self.kind = kind

    def plan(self, num_blocks: int, block_nbytes: int, encoded_nbytes: int) -> BatchPlan:
        """Plan batches, as ``nvcomp.plan_decompress`` does.

        Raises:
            ValueError: A number is out of range; blocks also must not pass the engine's limit.
        """
        check_plan(self.kind, num_blocks, block_nbytes)
        limit = min(self.probe.max_nbytes, MAX_BLOCK_NBYTES)
        if block_nbytes > limit or encoded_nbytes < 1:
            raise ValueError(
                f"cannot plan blocks of {block_nbytes} bytes, {encoded_nbytes} encoded in all: the engine takes {limit}"
            )
        return BatchPlan(
            kind=self.kind,
            direction="decompress",
            num_blocks=num_blocks,
            block_nbytes=block_nbytes,
            input_nbytes=encoded_nbytes,
            output_nbytes=num_blocks * block_nbytes,
            slot_nbytes=0,
            temp_nbytes=0,
            table_nbytes=num_blocks * _ROW_NBYTES,
            alignments=(1, 1, 1),
        )

    def decompress(
        self,
        plan: BatchPlan,
        source: np.ndarray,
        source_offsets: np.ndarray,
        source_nbytes: np.ndarray,
        out: Span,
        out_offsets: np.ndarray,
        out_nbytes: np.ndarray,
        actual: np.ndarray,
        stream: int,
    ) -> QueuedBatch:
        """Queue a batch.

        Args:
            plan: What was planned.
            source: uint8, contiguous view of engine-capable host memory (``HostArena.view``) with the encoded blocks.
            source_offsets: int64 ``[n]``, where each block begins in it; ``n >= 1``.
            source_nbytes: int64 ``[n]``.
            out: Engine-capable memory in HBM.
            out_offsets: int64 ``[n]``, ascending.
            out_nbytes: int64 ``[n]``, bytes that each must decode to.
            actual: uint32, at least ``n``, contiguous, in engine-capable memory that the device may write; zeroed here.
            stream: ``CUstream`` of the device, whose context is current.

        Raises:
            ValueError: An argument breaks the plan.
            FormatError: A Snappy block does not begin with its length, or a block passes the engine's limit.
            PlanError: The engine cannot use some of the memory.
            MegasyncError: The driver refused the batch.

        *Stream*: ``stream``; the driver may still block while earlier work of this stream runs.
        """
        if source.dtype != np.uint8 or not source.flags.c_contiguous:
            raise ValueError(f"blocks lie in contiguous uint8 memory, not {source.dtype}")
        base = Span(source.ctypes.data, source.nbytes)
        rows = batch_rows(plan, "decompress", base, source_offsets, source_nbytes, out, out_offsets, out_nbytes)
        n = rows.shape[1]
        if n < 1 or actual.dtype != np.uint32 or not actual.flags.c_contiguous or len(actual) < n:
            raise ValueError(
                f"{n} blocks, and {len(actual)} contiguous {actual.dtype} for their sizes; uint32 is needed"
            )
        header = self._header_nbytes(source, rows, base.address)
        longest = np.maximum(rows[1] - header, rows[3])
        if int(longest.max()) > self.probe.max_nbytes:
            i = int(longest.argmax())
            raise FormatError(
                f"block {i} of {n}: {rows[1, i] - header[i]} bytes that decode to {rows[3, i]}, the engine of device "
                f"{self.probe.ordinal} takes {self.probe.max_nbytes} in one operation; choose the sm backend"
            )
        for name, address in (("input", base.address), ("output", out.address), ("size", actual.ctypes.data)):
            if not self._driver.is_engine_capable(address):
                raise PlanError(
                    f"the Decompression Engine cannot use the {name} memory at {address:#x}: inputs and sizes must lie in "
                    "a HostArena, outputs in memory from cudaMalloc (not expandable segments, not cudaMallocAsync)"
                )
        queued = QueuedBatch(
            kind=self.kind,
            params=build_params(self.kind, rows, header, actual.ctypes.data),
            actual=actual[:n],
            expected=rows[3].copy(),
        )
        queued.actual[:] = 0
        self._driver.batch_decompress_async(queued.params.ctypes.data, n, stream)
        return queued

    def _header_nbytes(self, source: np.ndarray, rows: np.ndarray, base: int) -> np.ndarray:
        """Bytes of each Snappy block's length, which the engine must not see; LZ4 blocks have none."""
        if self.kind == "lz4":
            return np.zeros_like(rows[1])
        starts = rows[0] - base
        elements, bad = skip_preamble(source, starts, starts + rows[1], rows[3])
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"Snappy block {i} of {len(bad)} does not begin with its length {rows[3, i]}, or ends there; it was given "
                "to no decoder, report the publisher"
            )
        return elements - starts
