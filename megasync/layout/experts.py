"""Named engine layouts of experts: stacks, gate-up orders and interleaves, kernel shuffles, per expert and TP rank.

Checkpoints have one gate, up and down matrix per expert; engines stack them into ``w13`` ``[experts, 2 I, H]`` and
``w2`` ``[experts, H, I]`` and re-lay the stacks for their kernels. `w13_rows` and `w2_rows` do what all have in
common, the named functions add one kernel's steps. Weights and block scales take the same steps up to the last. Before
it comes an engine adapter; after it `prove` and the receiver. This module must import nothing of megasync but
``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megasync.errors import PlanError
from megasync.layout.checks import chosen
from megasync.layout.compose import Arrangement
from megasync.layout.modes import Layout
from megasync.layout.named import HalfPart, cut_evenly

Order = Literal["gate_first", "up_first"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expert's matrices go on one rank.

    Attributes:
        slot: Index in the rank's stack (after expert parallelism).
        num_slots: Experts in the stack.
        tp_rank: Rank in the tensor-parallel group of the experts.
        tp_size: Size of that group.
    """

    slot: int
    num_slots: int
    tp_rank: int = 0
    tp_size: int = 1


Steps = Callable[[Arrangement], Arrangement]
"""What a kernel does to one expert's matrix."""


def as_is(matrix: Arrangement) -> Arrangement:
    """No further steps: the stack is what the loader made."""
    return matrix


def swizzled(matrix: Arrangement) -> Arrangement:
    """Block scales in 128 x 4 tiles."""
    return matrix.swizzle_128x4()


def shuffled_32(matrix: Arrangement) -> Arrangement:
    """TRT-LLM weights: rows shuffled in blocks of 32."""
    return matrix.shuffle_rows(32)


def shuffled_32_swizzled(matrix: Arrangement) -> Arrangement:
    """TRT-LLM block scales: rows shuffled in blocks of 32, then 128 x 4 tiles."""
    return matrix.shuffle_rows(32).swizzle_128x4()


def block_major(shuffle: Literal[16, 32], block: int) -> Steps:
    """TRT-LLM weights in BlockMajorK: rows shuffled in blocks, then blocks of columns outermost.

    Args:
        shuffle: Rows of a shuffle block: 32 for BF16, 16 for block-scaled FP8.
        block: Columns of a block: 128 bytes' worth, so 64 in BF16 and 128 in FP8.

    Returns:
        The steps.

    Raises:
        PlanError: No such shuffle block, or no columns.
    """
    if shuffle not in (16, 32):
        raise PlanError(f"rows are shuffled in blocks of 16 or 32, got {shuffle}")
    if block < 1:
        raise PlanError(f"a block has at least one column, got {block}")
    return lambda matrix: matrix.shuffle_rows(shuffle).block_major_k(block)


def cpu_tiles(matrix: Arrangement) -> Arrangement:
    """vLLM's CPU experts: tiles of 16 rows, K-major inside, ``[rows / 16, K, 16]``."""
    return matrix.split(0, 16).permute((0, 2, 1))


def w13_rows(
    part: HalfPart,
    shape: Sequence[int],
    place: Place,
    *,
    word_nbytes: int,
    order: Order,
    interleave: int = 0,
    row_multiple: int = 1,
    col_multiple: int = 1,
) -> Arrangement:
    """One expert's gate or up rows among the ``2 I`` rows of its ``w13``.

    Args:
        part: Which of the two canonical matrices.
        shape: Canonical ``(I, H)`` in words (packed bytes or block scales alike).
        place: Rank of the expert's tensor-parallel group; its slot is not used here.
        word_nbytes: Canonical word size.
        order: Which half, or which group of an interleave, comes first.
        interleave: 0 for two halves, else groups of this many rows take turns.
        row_multiple: The rank's ``I`` is padded to a multiple of this before the halves are joined.
        col_multiple: The columns are padded to a multiple of this.

    Returns:
        The arrangement ``[2 I padded, H padded]``.

    Raises:
        PlanError: ``I`` does not divide by the group size.
        ValueError: No such part or order.
    """
    first = chosen("part", part, ("gate", "up")) == chosen("order", order, ("gate_first", "up_first"))
    rows = cut_evenly(shape, 0, word_nbytes=word_nbytes, tp_rank=place.tp_rank, tp_size=place.tp_size)
    rows = rows.pad(0, multiple=row_multiple).pad(1, multiple=col_multiple)
    if interleave:
        return rows.interleave(0, interleave, 0 if first else 1)
    return rows.stack(0 if first else 1, 2).merge(0)


def w2_rows(
    shape: Sequence[int], place: Place, *, word_nbytes: int, row_multiple: int = 1, col_multiple: int = 1
) -> Arrangement:
    """One expert's down matrix ``(H, I)``: the rank's columns, padded.

    Args:
        shape: Canonical ``(H, I)`` in words.
        place: Rank of the expert's tensor-parallel group.
        word_nbytes: Canonical word size.
        row_multiple: Rows are padded to a multiple of this.
        col_multiple: The rank's columns are padded to a multiple of this.

    Returns:
        The arrangement ``[H padded, I padded]``.

    Raises:
        PlanError: ``I`` does not divide by the group size.
    """
    matrix = cut_evenly(shape, 1, word_nbytes=word_nbytes, tp_rank=place.tp_rank, tp_size=place.tp_size)
    return matrix.pad(0, multiple=row_multiple).pad(1, multiple=col_multiple)


def stacked(matrix: Arrangement, place: Place, storage: str, steps: Steps = as_is) -> Layout:
    """Ends one expert's matrix in its slot of the stack.

    Args:
        matrix: From `w13_rows` or `w2_rows`.
        place: Gives the slot.
        storage: Name of the stack's live storage.
        steps: What the kernel does to each expert's matrix.

    Returns:
        The layout.

    Raises:
        PlanError: The steps do not divide the padded extents.
    """
    if not 0 <= place.slot < place.num_slots:
        raise PlanError(f"slot {place.slot} is not one of the {place.num_slots} of stack {storage!r}")
    return steps(matrix).stack(place.slot, place.num_slots).to(storage)


def w13_stack(
    part: HalfPart, shape: Sequence[int], place: Place, storage: str, *, word_nbytes: int, order: Order = "gate_first"
) -> Layout:
    """Gate or up in a plain stack: gate-first (Triton) or up-first ``w31`` (FlashInfer CUTLASS).

    Args:
        part: Which of the two canonical matrices.
        shape: Canonical ``(I, H)`` in words.
        place: Slot and rank.
        storage: Name of the live stack, ``[num_slots, 2 I / tp, H]``.
        word_nbytes: Canonical word size.
        order: Which half comes first.

    Returns:
        The layout.
    """
    return stacked(w13_rows(part, shape, place, word_nbytes=word_nbytes, order=order), place, storage)


def w2_stack(shape: Sequence[int], place: Place, storage: str, *, word_nbytes: int) -> Layout:
    """Down in a plain stack, live ``[num_slots, H, I / tp]``; arguments as `w13_stack`."""
    return stacked(w2_rows(shape, place, word_nbytes=word_nbytes), place, storage)


def w13_interleaved(
    part: HalfPart,
    shape: Sequence[int],
    place: Place,
    storage: str,
    *,
    word_nbytes: int,
    group: Literal[16, 64] = 64,
    order: Order = "up_first",
    scales: bool = False,
    col_multiple: int = 1,
) -> Layout:
    """Gate or up in groups that take turns: up-first 64 (CuteDSL) or gate-first 16 (MegaMoE).

    Args:
        part: Which of the two canonical matrices.
        shape: Canonical ``(I, H)`` in words (packed bytes or block scales).
        place: Slot and rank.
        storage: Name of the live stack.
        word_nbytes: Canonical word size.
        group: Rows of a group; the rank's ``I`` is padded to a multiple of it.
        order: Which group comes first.
        scales: Block scales, which are swizzled in 128 x 4 tiles afterwards.
        col_multiple: Columns are padded to a multiple of this.

    Returns:
        The layout.
    """
    rows = w13_rows(
        part,
        shape,
        place,
        word_nbytes=word_nbytes,
        order=order,
        interleave=group,
        row_multiple=group,
        col_multiple=col_multiple,
    )
    return stacked(rows, place, storage, swizzled if scales else as_is)


def w13_trtllm(
    part: HalfPart,
    shape: Sequence[int],
    place: Place,
    storage: str,
    *,
    word_nbytes: int,
    steps: Steps,
    row_multiple: int = 128,
    col_multiple: int = 1,
) -> Layout:
    """Gate or up for TRT-LLM's gated kernels: up-first, ``I`` padded, single rows take turns, then a shuffle.

    Args:
        part: Which of the two canonical matrices.
        shape: Canonical ``(I, H)`` in words.
        place: Slot and rank.
        storage: Name of the live stack.
        word_nbytes: Canonical word size.
        steps: `shuffled_32` (4-bit weights), `shuffled_32_swizzled` (their scales) or `block_major` (BF16).
        row_multiple: The rank's ``I`` is padded to a multiple of this.
        col_multiple: Columns are padded to a multiple of this.

    Returns:
        The layout.
    """
    rows = w13_rows(
        part,
        shape,
        place,
        word_nbytes=word_nbytes,
        order="up_first",
        interleave=1,
        row_multiple=row_multiple,
        col_multiple=col_multiple,
    )
    return stacked(rows, place, storage, steps)
