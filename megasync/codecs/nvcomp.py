"""Batches of raw LZ4 and Snappy blocks on the GPU's SMs, through nvCOMP's C interface.

Before it in the flow, on a receiver: outer decode into pinned memory, blocks of an unsigned source walked (``zero_run``).
After it: the dense XOR of a layer. A trainer may compress with it as well; ``kernels.zero_run`` needs no nvCOMP and makes
smaller payloads. Buffers are planned (``BatchPlan``) and made once; a batch is one table copy and one call on the stream
passed in, and nothing waits for the device until ``finish``. Blocks are standard raw blocks, at most 1 MiB unencoded.

A decoder of nvCOMP does undefined things on malformed input, so it is fed only bytes whose digest was checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.codecs.nvcomp_abi import CUDA_ERROR, SUCCESS, Direction, status_name
from megasync.codecs.nvcomp_library import NvcompLibrary
from megasync.errors import FormatError, MegasyncError, TaintedError
from megasync.kernels.zero_run_rules import MAX_BLOCK_NBYTES, BlockKind, check_kind

_SLOT_ALIGNMENT = 16  # more than nvCOMP asks for; its headers advise it for speed
_TABLE_ROW_NBYTES = 5 * 8 + 4  # two pointers, two sizes, the actual size, the status


@dataclass(frozen=True, slots=True)
class Span:
    """Device-accessible memory: HBM, or pinned host memory.

    Attributes:
        address: Where it begins, as the device sees it.
        nbytes: How long it is.

    *Memory*: the caller keeps it alive and in place until the batch that uses it is finished.
    """

    address: int
    nbytes: int


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


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch of blocks needs, before anything is allocated.

    Attributes:
        kind: Block format.
        direction: Compress or decompress.
        num_blocks: Blocks of the largest batch.
        block_nbytes: Unencoded bytes of the largest block.
        input_nbytes: Bytes of all inputs of the largest batch.
        output_nbytes: Bytes of all outputs; for compression ``num_blocks`` slots.
        slot_nbytes: Bytes from one output slot to the next in a compression, 0 in a decompression.
        temp_nbytes: Scratch in HBM.
        table_nbytes: Pointers, sizes and statuses, once in HBM and once in pinned host memory.
        alignments: Bytes, of input blocks, output blocks and scratch.
    """

    kind: BlockKind
    direction: Direction
    num_blocks: int
    block_nbytes: int
    input_nbytes: int
    output_nbytes: int
    slot_nbytes: int
    temp_nbytes: int
    table_nbytes: int
    alignments: tuple[int, int, int]


def plan_compress(library: NvcompLibrary, kind: BlockKind, num_blocks: int, block_nbytes: int) -> BatchPlan:
    """Plan batches of up to ``num_blocks`` blocks of up to ``block_nbytes`` for compression.

    Raises:
        ValueError: A number is out of range.
    """
    _check_plan(kind, num_blocks, block_nbytes)
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
    _check_plan(kind, num_blocks, block_nbytes)
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
            self._launch(rows, n, stream)
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


def batch_rows(
    plan: BatchPlan,
    direction: Direction,
    source: Span,
    source_offsets: np.ndarray,
    source_nbytes: np.ndarray,
    out: Span,
    out_offsets: np.ndarray,
    out_nbytes: np.ndarray,
) -> np.ndarray:
    """Check a batch against its plan and its memory, and lay out what nvCOMP reads.

    Returns:
        int64 ``[4, n]``: input addresses, input sizes, output addresses, output sizes.

    Raises:
        ValueError: On the first rule that is broken.
    """
    where = f"{plan.kind} {direction} batch"
    if plan.direction != direction:
        raise ValueError(f"{where}: the plan is for {plan.direction}")
    columns = [np.asarray(c, dtype=np.int64) for c in (source_offsets, source_nbytes, out_offsets, out_nbytes)]
    n = len(columns[0])
    if any(c.shape != (n,) for c in columns):
        raise ValueError(f"{where}: offsets and sizes of shapes {[c.shape for c in columns]}, expected ({n},) each")
    if n > plan.num_blocks:
        raise ValueError(f"{where}: {n} blocks, planned for {plan.num_blocks}")
    in_at, in_size, out_at, out_size = columns
    plain = in_size if direction == "compress" else out_size
    if n and (plain.min() < 1 or plain.max() > plan.block_nbytes):
        raise ValueError(
            f"{where}: blocks of {plain.min()} to {plain.max()} bytes, planned for 1 to {plan.block_nbytes}"
        )
    if int(in_size.sum()) > plan.input_nbytes:
        raise ValueError(f"{where}: {int(in_size.sum())} input bytes, planned for {plan.input_nbytes}")
    for name, span, at, size in (("input", source, in_at, in_size), ("output", out, out_at, out_size)):
        if n and (at.min() < 0 or size.min() < 1 or int((at + size).max()) > span.nbytes):
            raise ValueError(f"{where}: an {name} block lies outside its {span.nbytes} bytes, or is empty")
    if (out_at[1:] < out_at[:-1] + out_size[:-1]).any():
        raise ValueError(f"{where}: output blocks overlap or do not ascend")
    rows = np.stack((in_at + source.address, in_size, out_at + out.address, out_size))
    for name, row, alignment in (("input", 0, plan.alignments[0]), ("output", 2, plan.alignments[1])):
        if (rows[row] % alignment).any():
            raise ValueError(f"{where}: {name} blocks must be aligned to {alignment} bytes")
    return rows


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


def _check_plan(kind: BlockKind, num_blocks: int, block_nbytes: int) -> None:
    check_kind(kind)
    if not 1 <= num_blocks < 1 << 31 or not 1 <= block_nbytes <= MAX_BLOCK_NBYTES:
        raise ValueError(
            f"cannot plan {num_blocks} blocks of {block_nbytes} bytes: 1 to 2^31 - 1 blocks of 1 to {MAX_BLOCK_NBYTES}"
        )
