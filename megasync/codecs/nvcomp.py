"""Batches of raw LZ4 and Snappy blocks on the GPU's SMs, through nvCOMP's C interface.

Before it in the flow, on a receiver: outer decode into pinned memory, blocks of an unsigned source walked (``zero_run``).
After it: the dense XOR of a layer. A trainer may compress with it as well; ``kernels.zero_run`` needs no nvCOMP and makes
smaller payloads. Buffers are planned (``BatchPlan``) and made once; a batch is one table copy and one call on the stream
passed in, and nothing waits for the device until ``finish``. Blocks are standard raw blocks, at most 1 MiB unencoded.

A decoder of nvCOMP does undefined things on malformed input, so it is fed only bytes whose digest was checked.
"""

from __future__ import annotations

import numpy as np
import torch

from megasync.codecs.block_batch import BatchPlan, Span, batch_rows, check_plan
from megasync.codecs.nvcomp_abi import CUDA_ERROR, SUCCESS, status_name
from megasync.codecs.nvcomp_library import NvcompLibrary
from megasync.errors import FormatError, MegasyncError, TaintedError
from megasync.kernels.zero_run_rules import BlockKind

_SLOT_ALIGNMENT = 16  # more than nvCOMP asks for; its headers advise it for speed
_TABLE_ROW_NBYTES = 5 * 8 + 4  # two pointers, two sizes, the actual size, the status


def span_of(tensor: torch.Tensor) -> Span:
    """The memory of a tensor.

    Args:
        tensor: uint8, contiguous, on a GPU or in pinned host memory.

    Raises:
        ValueError: It is none of these.
    """
    if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
        raise ValueError(f"blocks lie in contiguous uint8 memory, not {tensor.dtype} with strides {tensor.stride()}")
    if tensor.device.type != "cuda" and not tensor.is_pinned():
        raise ValueError(f"the GPU cannot read memory on {tensor.device} that is not pinned")
    return Span(tensor.data_ptr(), tensor.numel())


def plan_compress(library: NvcompLibrary, kind: BlockKind, num_blocks: int, block_nbytes: int) -> BatchPlan:
    """Plan batches of up to ``num_blocks`` blocks of up to ``block_nbytes`` for compression.

    Raises:
        ValueError: A number is out of range.
    """
    check_plan(kind, num_blocks, block_nbytes)
    total = num_blocks * block_nbytes
    slot = -(-library.max_output_nbytes(kind, block_nbytes) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    return BatchPlan(
        kind=kind,
        direction="compress",
        num_blocks=num_blocks,
        block_nbytes=block_nbytes,
        input_nbytes=total,
        output_nbytes=num_blocks * slot,
        slot_nbytes=slot,
        temp_nbytes=library.temp_nbytes(kind, "compress", num_blocks, block_nbytes, total),
        table_nbytes=num_blocks * _TABLE_ROW_NBYTES,
        alignments=library.alignments(kind, "compress"),
    )


def plan_decompress(
    library: NvcompLibrary, kind: BlockKind, num_blocks: int, block_nbytes: int, encoded_nbytes: int
) -> BatchPlan:
    """Plan batches of up to ``num_blocks`` blocks that decode to up to ``block_nbytes`` each.

    Args:
        library: The library that will run them.
        kind: Block format.
        num_blocks: Blocks of the largest batch.
        block_nbytes: Unencoded bytes of the largest block.
        encoded_nbytes: Encoded bytes of the largest batch.

    Raises:
        ValueError: A number is out of range.
    """
    check_plan(kind, num_blocks, block_nbytes)
    if encoded_nbytes < 1:
        raise ValueError(f"a batch of {encoded_nbytes} encoded bytes cannot be planned")
    total = num_blocks * block_nbytes
    return BatchPlan(
        kind=kind,
        direction="decompress",
        num_blocks=num_blocks,
        block_nbytes=block_nbytes,
        input_nbytes=encoded_nbytes,
        output_nbytes=total,
        slot_nbytes=0,
        temp_nbytes=library.temp_nbytes(kind, "decompress", num_blocks, block_nbytes, total),
        table_nbytes=num_blocks * _TABLE_ROW_NBYTES,
        alignments=library.alignments(kind, "decompress"),
    )


class BlockBatch:
    """Runs batches of one plan, one at a time: queue with ``compress`` or ``decompress``, then ``finish``.

    *Memory*: scratch and tables are made here and reused; inputs and outputs are the caller's.
    Not thread-safe.
    """

    def __init__(self, library: NvcompLibrary, plan: BatchPlan, device: torch.device) -> None:
        """Allocate scratch and tables.

        Args:
            library: The library that ``plan`` was made with.
            plan: What the batches need.
            device: The GPU.
        """
        self.library = library
        self.plan = plan
        n = plan.num_blocks
        self._device = device
        self._temp = torch.empty(plan.temp_nbytes, dtype=torch.uint8, device=device)
        self._rows = torch.empty(5 * n, dtype=torch.int64, device=device)
        self._statuses = torch.empty(n, dtype=torch.int32, device=device)
        self._host_rows = torch.empty(5 * n, dtype=torch.int64, pin_memory=True)
        self._host_statuses = torch.empty(n, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()
        self._expected: np.ndarray | None = None
        # What these bytes held before may still be in use on the current stream; batches run on others.
        torch.cuda.current_stream(device).synchronize()

    def compress(
        self,
        source: Span,
        source_offsets: np.ndarray,
        source_nbytes: np.ndarray,
        out: Span,
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the compression of some blocks; block ``i`` goes to ``out`` at ``i * plan.slot_nbytes``.

        Args:
            source: The memory of all blocks.
            source_offsets: int64 ``[n]``, where each begins in it.
            source_nbytes: int64 ``[n]``, 1 to ``plan.block_nbytes``.
            out: Room for ``n`` slots, in HBM.
            stream: Where the work goes.

        Raises:
            ValueError: An argument breaks the plan, or a batch is unfinished.
            MegasyncError: nvCOMP refused the call.

        *Stream*: ``stream``; nothing is waited for.
        """
        out_offsets = np.arange(len(source_offsets), dtype=np.int64) * self.plan.slot_nbytes
        slots = np.full(len(source_offsets), self.plan.slot_nbytes, dtype=np.int64)
        rows = batch_rows(self.plan, "compress", source, source_offsets, source_nbytes, out, out_offsets, slots)
        self._run(rows, slots, stream)

    def decompress(
        self,
        source: Span,
        source_offsets: np.ndarray,
        source_nbytes: np.ndarray,
        out: Span,
        out_offsets: np.ndarray,
        out_nbytes: np.ndarray,
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the decompression of some blocks.

        Args:
            source: The memory of all encoded blocks; pinned host memory is read in place.
            source_offsets: int64 ``[n]``, where each begins in it.
            source_nbytes: int64 ``[n]``, encoded bytes of each.
            out: Where they go, in HBM.
            out_offsets: int64 ``[n]``, ascending, where each goes in it.
            out_nbytes: int64 ``[n]``, bytes that each must decode to, 1 to ``plan.block_nbytes``.
            stream: Where the work goes.

        Raises:
            ValueError: An argument breaks the plan, or a batch is unfinished.
            MegasyncError: nvCOMP refused the call.

        *Stream*: ``stream``; nothing is waited for.
        """
        rows = batch_rows(self.plan, "decompress", source, source_offsets, source_nbytes, out, out_offsets, out_nbytes)
        self._run(rows, np.array(out_nbytes, dtype=np.int64), stream)

    def finish(self) -> np.ndarray:
        """Wait for the queued batch and check it.

        Returns:
            int64 ``[n]``, bytes of each result.

        Raises:
            FormatError: A block did not decode, or not to its length.
            TaintedError: The device failed.
            ValueError: No batch is queued.

        *Stream*: waits for the batch alone.
        """
        if self._expected is None:
            raise ValueError("finish: no batch is queued")
        expected, self._expected = self._expected, None
        n = len(expected)
        if n:
            self._done.synchronize()
        actual = self._host_rows.numpy()[4 * n : 5 * n].copy()
        check_results(self.plan, self._host_statuses.numpy()[:n], actual, expected)
        return actual

    def _run(self, rows: np.ndarray, expected: np.ndarray, stream: torch.cuda.Stream) -> None:
        if self._expected is not None:
            raise ValueError("a batch is queued already: finish it first")
        n = len(expected)
        if n:
            try:
                self._launch(rows, n, stream)
            except MegasyncError:
                stream.synchronize()  # the table may still be on its way
                raise
        self._expected = expected

    def _launch(self, rows: np.ndarray, n: int, stream: torch.cuda.Stream) -> None:
        plan = self.plan
        self._host_rows.numpy()[: 4 * n] = rows.reshape(-1)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._rows[: 4 * n].copy_(self._host_rows[: 4 * n], non_blocking=True)
            in_ptrs, in_nbytes, out_ptrs, out_capacity, out_nbytes = (
                self._rows[i * n : (i + 1) * n].data_ptr() for i in range(5)
            )
            common = {
                "in_ptrs": in_ptrs,
                "in_nbytes": in_nbytes,
                "out_ptrs": out_ptrs,
                "out_nbytes": out_nbytes,
                "num_blocks": n,
                "temp": self._temp.data_ptr(),
                "temp_nbytes": plan.temp_nbytes,
                "statuses": self._statuses.data_ptr(),
                "stream": stream.cuda_stream,
            }
            if plan.direction == "compress":
                self.library.compress_async(plan.kind, block_nbytes=plan.block_nbytes, **common)
            else:
                self.library.decompress_async(plan.kind, out_capacity=out_capacity, **common)
            self._host_rows[4 * n : 5 * n].copy_(self._rows[4 * n : 5 * n], non_blocking=True)
            self._host_statuses[:n].copy_(self._statuses[:n], non_blocking=True)
            self._done.record(stream)


def check_results(plan: BatchPlan, statuses: np.ndarray, actual: np.ndarray, expected: np.ndarray) -> None:
    """Check what a finished batch reports.

    Args:
        plan: Of the batch.
        statuses: int32 ``[n]``.
        actual: int64 ``[n]``, bytes of each result.
        expected: int64 ``[n]``: exact bytes for a decompression, most bytes for a compression.

    Raises:
        FormatError: A block did not decode, or not to its length.
        TaintedError: The device failed.
        MegasyncError: A block did not compress.
    """
    wrong = actual != expected if plan.direction == "decompress" else (actual < 1) | (actual > expected)
    bad = np.flatnonzero((statuses != SUCCESS) | wrong)
    if not len(bad):
        return
    i = int(bad[0])
    status = int(statuses[i])
    what = f"nvCOMP {plan.kind} {plan.direction}: {len(bad)} of {len(actual)} blocks failed, first block {i}: "
    what += f"status {status_name(status)}, {int(actual[i])} bytes, expected {int(expected[i])}"
    if status >= CUDA_ERROR:
        raise TaintedError(f"{what}; the device failed, replace this process")
    if plan.direction == "decompress":
        raise FormatError(f"{what}; the output is void, report the publisher")
    raise MegasyncError(f"{what}; encode on the CPU or with kernels.zero_run instead")
