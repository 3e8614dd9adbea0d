"""Named engine layouts of dense tensors: where vLLM, SGLang and their kernels keep attention, MLP, vocabulary and
scales.

Each function is the engine's own weight loading and post-processing written as steps of an `Arrangement`, for one
canonical tensor on one tensor-parallel rank; `experts` has the mixture-of-experts ones. Before it comes an engine
adapter that knows the model; after it `prove` and the receiver. The layouts are also what the probe is tested against.
This module must import nothing of megasync but ``errors`` and ``layout``.

A rank of a tensor-parallel group holds primaries of what it alone holds; of replicated words only the first holder
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from megasync.errors import PlanError
from megasync.layout.checks import chosen, require_rank
from megasync.layout.compose import Arrangement, arrange
from megasync.layout.modes import Layout

QkvPart = Literal["q", "k", "v"]
HalfPart = Literal["gate", "up"]


def cut_evenly(
    shape: Sequence[int],
    axis: int,
    *,
    word_nbytes: int,
    tp_rank: int,
    tp_size: int,
    unit: Literal["word", "nibble"] = "word",
) -> Arrangement:
    """The even slice of one axis that a tensor-parallel rank holds.

    Args:
        shape: Canonical extents in words.
        axis: Axis that is cut.
        word_nbytes: Canonical word size.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.
        unit: Unit of the arrangement.

    Returns:
        An arrangement of the slice.

    Raises:
        PlanError: The axis does not divide by the group size, or the rank is not in the group.
    """
    require_rank(tp_rank, tp_size)
    if not -len(shape) <= axis < len(shape):
        raise PlanError(f"axis {axis} is out of range for {tuple(shape)}")
    if shape[axis] % tp_size:
        raise PlanError(f"axis {axis} of {tuple(shape)} cannot be cut for rank {tp_rank} of {tp_size}")
    size = shape[axis] // tp_size
    start, stop = [0] * len(shape), list(shape)
    start[axis], stop[axis] = tp_rank * size, (tp_rank + 1) * size
    return arrange(shape, word_nbytes=word_nbytes, start=start, stop=stop, unit=unit)


def replicated(shape: Sequence[int], *, word_nbytes: int, storage: str, tp_rank: int = 0) -> Layout:
    """A tensor that every rank holds as it is (norms, routers): primary on rank 0 only.

    Args:
        shape: Canonical extents in words.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, same extents.
        tp_rank: Rank in the tensor-parallel group.

    Returns:
        The layout.
    """
    return arrange(shape, word_nbytes=word_nbytes).to(storage, primary=tp_rank == 0)


def column_parallel(shape: Sequence[int], *, word_nbytes: int, storage: str, tp_rank: int, tp_size: int) -> Layout:
    """A row slice (ColumnParallelLinear).

    Args:
        shape: Canonical ``(out, in)``, or ``(out,)`` of a bias.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, ``[out / tp, in]``.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.

    Returns:
        The layout.

    Raises:
        PlanError: Rows do not divide by the group size.
    """
    return cut_evenly(shape, 0, word_nbytes=word_nbytes, tp_rank=tp_rank, tp_size=tp_size).to(storage)


def row_parallel(shape: Sequence[int], *, word_nbytes: int, storage: str, tp_rank: int, tp_size: int) -> Layout:
    """A column slice (RowParallelLinear: o and down projections).

    Args:
        shape: Canonical ``(out, in)``.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, ``[out, in / tp]``.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.

    Returns:
        The layout.

    Raises:
        PlanError: Columns do not divide by the group size.
    """
    return cut_evenly(shape, len(shape) - 1, word_nbytes=word_nbytes, tp_rank=tp_rank, tp_size=tp_size).to(storage)


def vocab_parallel(
    shape: Sequence[int], *, word_nbytes: int, storage: str, tp_rank: int, tp_size: int, multiple: int = 64
) -> Layout:
    """A row slice of an embedding or head whose vocabulary the engine pads.

    Args:
        shape: Canonical ``(vocabulary, hidden)``.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, ``[padded / tp, hidden]``; padded rows are never addressed.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.
        multiple: The padded vocabulary is a multiple of this.

    Returns:
        The layout; without records where the rank holds padding only.

    Raises:
        PlanError: The padded vocabulary does not divide by the group size, or the rank is not in the group.
    """
    require_rank(tp_rank, tp_size)
    if multiple < 1:
        raise PlanError(f"a vocabulary cannot be padded to a multiple of {multiple}")
    padded = -(-shape[0] // multiple) * multiple
    if padded % tp_size:
        raise PlanError(f"a vocabulary of {shape[0]} padded to {padded} cannot be cut for {tp_size} ranks")
    size = padded // tp_size
    low, high = min(tp_rank * size, shape[0]), min((tp_rank + 1) * size, shape[0])
    start, stop = (low, *(0 for _ in shape[1:])), (high, *shape[1:])
    return arrange(shape, word_nbytes=word_nbytes, start=start, stop=stop).pad(0, to=size).to(storage)


def qkv_part(
    part: QkvPart,
    *,
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    num_kv_heads: int,
    word_nbytes: int,
    tp_rank: int,
    tp_size: int,
) -> tuple[Arrangement, bool]:
    """The q, k or v rows of one rank inside its fused ``[q rows | k rows | v rows]``.

    Args:
        part: Which of the three canonical tensors.
        q_shape: Canonical extents of q, rows first (weights, biases, block scales alike).
        kv_shape: Canonical extents of k and of v.
        num_kv_heads: Key-value heads of the model; where ``tp_size`` exceeds them, each is held by several ranks.
        word_nbytes: Canonical word size.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.

    Returns:
        The arrangement, for further steps, and whether this rank is the first holder.

    Raises:
        PlanError: Heads do not divide, or q and kv rows are not of one size.
        ValueError: ``part`` is none of the three.
    """
    index = chosen("part", part, ("q", "k", "v"))
    require_rank(tp_rank, tp_size)
    if num_kv_heads < 1:
        raise PlanError(f"a model has at least one key-value head, got {num_kv_heads}")
    if tuple(q_shape[1:]) != tuple(kv_shape[1:]):
        raise PlanError(
            f"q rows of {tuple(q_shape[1:])} and kv rows of {tuple(kv_shape[1:])} do not fuse: one size expected"
        )
    copies = max(1, tp_size // num_kv_heads)
    if kv_shape[0] % num_kv_heads or (tp_size % num_kv_heads if copies > 1 else num_kv_heads % tp_size):
        raise PlanError(f"{num_kv_heads} key-value heads of {kv_shape[0]} rows cannot be shared by {tp_size} ranks")
    q_rows, kv_rows = q_shape[0] // tp_size, kv_shape[0] * copies // tp_size
    total = q_rows + 2 * kv_rows
    if not index:
        rows = cut_evenly(q_shape, 0, word_nbytes=word_nbytes, tp_rank=tp_rank, tp_size=tp_size)
        return rows.concat(0, offset=0, total=total), True
    groups = tp_size // copies
    rows = cut_evenly(kv_shape, 0, word_nbytes=word_nbytes, tp_rank=tp_rank // copies, tp_size=groups)
    return rows.concat(0, offset=q_rows + (index - 1) * kv_rows, total=total), tp_rank % copies == 0


def fused_qkv(
    part: QkvPart,
    *,
    q_shape: Sequence[int],
    kv_shape: Sequence[int],
    num_kv_heads: int,
    word_nbytes: int,
    storage: str,
    tp_rank: int,
    tp_size: int,
) -> Layout:
    """q, k or v in the fused projection of one rank (QKVParallelLinear).

    Args:
        part: Which of the three canonical tensors.
        q_shape: Canonical extents of q.
        kv_shape: Canonical extents of k and of v.
        num_kv_heads: Key-value heads of the model.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, ``[q rows + k rows + v rows, in]`` of the rank.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.

    Returns:
        The layout; a copy where another rank is the first holder of the same heads.

    Raises:
        PlanError: Heads do not divide, or q and kv rows are not of one size.
        ValueError: ``part`` is none of the three.
    """
    rows, first = qkv_part(
        part,
        q_shape=q_shape,
        kv_shape=kv_shape,
        num_kv_heads=num_kv_heads,
        word_nbytes=word_nbytes,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    return rows.to(storage, primary=first)


def fused_gate_up(
    part: HalfPart, shape: Sequence[int], *, word_nbytes: int, storage: str, tp_rank: int, tp_size: int
) -> Layout:
    """Gate or up in ``[gate rows | up rows]`` of one rank (MergedColumnParallelLinear).

    Args:
        part: Which of the two canonical matrices.
        shape: Canonical ``(intermediate, hidden)``.
        word_nbytes: Canonical word size.
        storage: Name of the live storage, ``[2 intermediate / tp, hidden]``.
        tp_rank: Rank in the tensor-parallel group.
        tp_size: Size of the group.

    Returns:
        The layout.

    Raises:
        PlanError: Rows do not divide by the group size.
        ValueError: ``part`` is neither.
    """
    index = chosen("part", part, ("gate", "up"))
    rows = cut_evenly(shape, 0, word_nbytes=word_nbytes, tp_rank=tp_rank, tp_size=tp_size)
    size = rows.extents[0]
    return rows.concat(0, offset=index * size, total=2 * size).to(storage)


def padded_matrix(rows: Arrangement, storage: str, *, row_multiple: int = 32, col_multiple: int = 32) -> Layout:
    """A matrix whose rows and columns the kernel pads (packed 4-bit weights of the CUTLASS paths).

    Args:
        rows: The rank's part, two axes.
        storage: Name of the live storage, padded extents; padding is never addressed.
        row_multiple: Rows are padded to a multiple of this.
        col_multiple: Columns, in words, are padded to a multiple of this.

    Returns:
        The layout.
    """
    return rows.pad(0, multiple=row_multiple).pad(1, multiple=col_multiple).to(storage)


def swizzled_scales(rows: Arrangement, storage: str) -> Layout:
    """Block scales in 128 x 4 tiles, rows padded to 128 and columns to 4; see `Arrangement.swizzle_128x4`."""
    return rows.swizzle_128x4().to(storage)


def transposed(rows: Arrangement, storage: str) -> Layout:
    """A matrix stored as its transpose (FP8 channel and tensor kernels): live ``[cols, rows]``, contiguous."""
    return rows.permute((1, 0)).to(storage)


def shuffled_rows(rows: Arrangement, storage: str, *, block: Literal[16, 32] = 32) -> Layout:
    """A dense TRT-LLM weight: rows padded to 128 and shuffled in blocks."""
    return rows.pad(0, multiple=128).shuffle_rows(block).to(storage)


def shuffled_swizzled_scales(rows: Arrangement, storage: str, *, block: Literal[16, 32] = 32) -> Layout:
    """The block scales of a dense TRT-LLM weight: rows padded and shuffled as the weight's, then 128 x 4 tiles."""
    return rows.pad(0, multiple=128).shuffle_rows(block).swizzle_128x4().to(storage)


def marlin_nibbles(shape: Sequence[int], *, storage: str, start: Sequence[int] | None = None) -> Layout:
    """A packed 4-bit weight in Marlin's tiles of 16 inputs x 64 outputs, at nibble granularity.

    Args:
        shape: Canonical ``(out, in / 2)`` in bytes, low nibble = even input; the slice must have a multiple of 64
            outputs and of 16 inputs.
        storage: Name of the live storage (int32 ``[in / 16, out * 2]``).
        start: Start of the slice, whose end is that of the tensor.

    Returns:
        One record of 8 digits: with ``n`` the output and ``k`` the input, nibble ``(k // 16) * 16 N + (n // 64) * 1024
        + (n % 8) * 128 + (k // 2 % 4) * 32 + (n // 16 % 4) * 8 + (k % 2) * 4 + (n // 8 % 2) * 2 + k // 8 % 2``.

    Raises:
        PlanError: The slice is not a whole number of tiles.
    """
    tensor = arrange(shape, word_nbytes=1, start=start, unit="nibble")
    tiles = tensor.split(1, 16).split(2, 8).split(3, 2).split(0, 64).split(1, 16).split(2, 8)
    return tiles.permute((4, 0, 3, 6, 1, 7, 2, 5)).to(storage)


def as_copy(layout: Layout) -> Layout:
    """The same layout with no primary: another rank's, or another tensor's, destinations enter the digest sums."""
    return replace(layout, records=tuple(replace(r, primary=False) for r in layout.records))
