"""Whole-tensor work on live weights: the full audit, and the XOR of decoded masks.

The audit digests every canonical word where the layout put it, in the order of memory; run once at join, its sums
must equal the state digests of the version. The dense XOR takes one layer's decoded masks in one call, reads live
bytes only where the mask is not zero, and digests old and new words on the way. Comes after ``walk_plan``. Must
import nothing of megasync but kernels.
"""

from __future__ import annotations

import torch

from megasync.kernels import dispatch
from megasync.kernels.walk_plan import WalkPlan
from megasync.kernels.walk_reference import walk_reference


def audit_(plan: WalkPlan, lanes: torch.Tensor) -> None:
    """Digests the live weights through the layout.

    Args:
        plan: From ``plan_audit``.
        lanes: int64 ``[num_tensors, 4]``, storages' device, contiguous: the sums of every tensor's canonical words
            that this rank holds are added to columns 0 and 1.

    Raises:
        ValueError: On a plan with masks, or lanes that do not fit it.

    *Stream*: the current stream; returns before the work is done. *Memory*: nothing is written but the sums.
    """
    if plan.mask_nbytes:
        raise ValueError("this plan is of a dense XOR: an audit takes a plan of plan_audit")
    _check_lanes(plan, lanes)
    if not dispatch.uses_triton(plan.records.device):
        walk_reference(plan, None, lanes)
        return
    launch_walk(plan, None, lanes, sums=2)


def dense_xor_(plan: WalkPlan, mask: torch.Tensor, lanes: torch.Tensor | None = None, *, after: bool = False) -> None:
    """XORs decoded masks into the live storages.

    Args:
        plan: From ``plan_dense``.
        mask: uint8 ``[n]``, storages' device, contiguous, 16-byte aligned: the tiles' masks at the plan's offsets.
        lanes: int64 ``[num_tensors, 4]``, storages' device, contiguous: sums of the old words that change are added to
            columns 0 and 1, of new minus old to 2 and 3. None sums nothing.
        after: Add the sums of the words that change, as they are after the XOR, to columns 0 and 1 instead: about half the
            work of both.

    Raises:
        ValueError: When mask or lanes do not fit the plan.

    *Stream*: the current stream; returns before the work is done. *Memory*: writes only where the mask is not zero;
    applying the same masks again restores every byte.
    """
    if lanes is not None:
        _check_lanes(plan, lanes)
    _check_mask(plan, mask)
    if not dispatch.uses_triton(plan.records.device):
        walk_reference(plan, mask, lanes, after=after)
        return
    launch_walk(plan, mask, lanes, sums=0 if lanes is None else 1 if after else 4)


def _check_mask(plan: WalkPlan, mask: torch.Tensor) -> None:
    """Tests the masks.

    Raises:
        ValueError: When they do not fit the plan.
    """
    if mask.dtype is not torch.uint8 or mask.dim() != 1 or not mask.is_contiguous() or mask.data_ptr() % 16:
        raise ValueError(f"the mask must be contiguous uint8 [n] on 16 bytes, got {mask.dtype} {tuple(mask.shape)}")
    if mask.device != plan.records.device or mask.numel() < plan.mask_nbytes:
        raise ValueError(
            f"the mask has {mask.numel()} bytes on {mask.device}; the plan reads {plan.mask_nbytes} on "
            f"{plan.records.device}"
        )


def dense_sums_(plan: WalkPlan, mask: torch.Tensor, lanes: torch.Tensor) -> None:
    """Digests what decoded masks would change, without writing: the touched-old check of a dense delta.

    Args:
        plan: From ``plan_dense``.
        mask: As for ``dense_xor_``.
        lanes: As for ``dense_xor_``, not None.

    Raises:
        ValueError: When mask or lanes do not fit the plan.

    *Stream*: the current stream; returns before the work is done. *Memory*: nothing is written but the sums.
    """
    _check_lanes(plan, lanes)
    _check_mask(plan, mask)
    if not dispatch.uses_triton(plan.records.device):
        walk_reference(plan, mask, lanes, write=False)
        return
    launch_walk(plan, mask, lanes, sums=4, write=False)


def _check_lanes(plan: WalkPlan, lanes: torch.Tensor) -> None:
    """Tests the sums.

    Raises:
        ValueError: When they do not fit the plan.
    """
    want = (plan.records.num_tensors, 4)
    if lanes.dtype is not torch.int64 or lanes.shape != want or not lanes.is_contiguous():
        raise ValueError(f"lanes must be contiguous int64 {want}, got {lanes.dtype} {tuple(lanes.shape)}")
    if lanes.device != plan.records.device:
        raise ValueError(f"lanes are on {lanes.device}, the live weights on {plan.records.device}")


def launch_walk(
    plan: WalkPlan,
    mask: torch.Tensor | None,
    lanes: torch.Tensor | None,
    *,
    sums: int,
    write: bool = True,
    block: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Launches the kernels of a plan; arguments already checked.

    Args:
        plan: The plan.
        mask: Masks, or None to digest.
        lanes: Sums, or None where ``sums`` is 0.
        sums: 0 none, 1 words that change as they are after the XOR, 2 sums of what is there, 4 old words that change,
            and new minus old.
        write: With a mask: XOR it in, else only read.
        block: Steps a program takes at a time, None for the fastest on an H200.
        num_warps: Warps of a program, None likewise.
    """
    from megasync.kernels._walk_triton import walk_kernel, word_kernel

    records = plan.records
    if block is None or num_warps is None:  # a small block is more often free of changes, and then needs no sums
        block, num_warps = (64, 1) if mask is not None and sums else (256, 2)
    address = 0 if mask is None else mask.data_ptr()
    for c in plan.fast:
        walk_kernel[(len(c.pieces),)](
            c.items,
            c.pieces,
            address,
            c.items if lanes is None else lanes,
            DIGITS=c.num_digits,
            CHECKS=c.num_checks,
            PIECE=c.piece_nbytes,
            XOR=mask is not None,
            WRITE=write,
            SUMS=sums,
            W=records.word_nbytes,
            BLOCK=block,
            num_warps=num_warps,
        )
    for s in plan.slow:
        word_kernel[(len(s.pieces),)](
            s.group.table,
            s.boxes,
            s.masks,
            s.pieces,
            address,
            s.masks if lanes is None else lanes,
            ND=records.num_axes,
            TT=s.group.num_terms,
            PARTS=2 * records.word_nbytes if s.group.nibble else 1,
            WIDE=s.group.wide,
            XOR=mask is not None,
            WRITE=write,
            SUMS=sums,
            W=records.word_nbytes,
            BLOCK=128,
            num_warps=2,
        )
