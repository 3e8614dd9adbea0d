"""What a batch of raw blocks needs and where its bytes lie: the host side shared by nvCOMP and the Decompression Engine.

Everything that a GPU decoder is told is checked here, on the host, before the device is touched. Comes before ``nvcomp``
and ``engine``. Must not import torch, nvCOMP or a driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megasync.kernels.zero_run_rules import MAX_BLOCK_NBYTES, BlockKind, check_kind

Direction = Literal["compress", "decompress"]


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
    """Check a batch against its plan and its memory, and lay out what a decoder is told.

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
    for name, span, at, size in (("input", source, in_at, in_size), ("output", out, out_at, out_size)):
        # Each by itself first: the sum of two hostile numbers may wrap around.
        if n and (at.min() < 0 or size.min() < 1 or max(at.max(), size.max(), (at + size).max()) > span.nbytes):
            raise ValueError(f"{where}: an {name} block lies outside its {span.nbytes} bytes, or is empty")
    if int(in_size.sum()) > plan.input_nbytes:
        raise ValueError(f"{where}: {int(in_size.sum())} input bytes, planned for {plan.input_nbytes}")
    if (out_at[1:] < out_at[:-1] + out_size[:-1]).any():
        raise ValueError(f"{where}: output blocks overlap or do not ascend")
    rows = np.stack((in_at + source.address, in_size, out_at + out.address, out_size))
    for name, row, alignment in (("input", 0, plan.alignments[0]), ("output", 2, plan.alignments[1])):
        if (rows[row] % alignment).any():
            raise ValueError(f"{where}: {name} blocks must be aligned to {alignment} bytes")
    return rows


def check_plan(kind: BlockKind, num_blocks: int, block_nbytes: int) -> None:
    """Refuse numbers that no batch can have.

    Raises:
        ValueError: An unknown kind, or a number out of range.
    """
    check_kind(kind)
    if not 1 <= num_blocks < 1 << 31 or not 1 <= block_nbytes <= MAX_BLOCK_NBYTES:
        raise ValueError(
            f"cannot plan {num_blocks} blocks of {block_nbytes} bytes: 1 to 2^31 - 1 blocks of 1 to {MAX_BLOCK_NBYTES}"
        )
