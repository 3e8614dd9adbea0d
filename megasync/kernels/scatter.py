"""XORs changed words into live weights through the layout: the kernel inside the pause, and its touched-old check.

The mask is never built: each changed word is evaluated through the remap and XORed where it lies, for all tensors of
a word size in one launch. The check reads the same words without writing, and sums the digest of what is there. Comes
after ``scatter_plan``; ``scatter_stream`` drives it from pinned memory. Must import nothing of megasync but ``types``
and kernels.
"""

from __future__ import annotations

import torch

from megasync.kernels import dispatch
from megasync.kernels.planes import Planes
from megasync.kernels.scatter_plan import ScatterLaunch, ScatterPlan
from megasync.kernels.scatter_reference import scatter_reference
from megasync.types import SEGMENT_WORDS

SUMS_NONE, SUMS_NEW, SUMS_CHANGE, SUMS_ALL = 0, 1, 2, 4
"""Digest sums along a pass: none, of the touched words as they are after a write (columns 0 and 1), of new minus old (2 and
3), or of the touched words as they were and of new minus old (all four)."""

# Mean entries of a segment up to which a launch shape was the fastest on an H200: entries taken at a time, warps.
_SHAPES = ((90, 64, 1), (500, 512, 4), (float("inf"), 1024, 8))

# Changed words a 32-byte sector, from which reading and writing back beats atomics (H200: 0.32 not yet, 0.8 clearly).
_SHARED_SECTORS = 0.6


def new_lanes(plan: ScatterPlan) -> torch.Tensor:
    """Zeroed digest sums for a plan: int64 ``[num_tensors, 4]`` on the records' device.

    Columns: touched-old lane a and b, new minus old lane a and b, each modulo 2^64.
    """
    return torch.zeros((plan.records.num_tensors, 4), dtype=torch.int64, device=plan.records.device)


def scatter_xor_(
    plan: ScatterPlan, planes: Planes, lanes: torch.Tensor | None = None, *, sums: int = SUMS_CHANGE
) -> None:
    """XORs the changed words into the live storages.

    Args:
        plan: Tables and layout.
        planes: Entries and dense planes of the plan's segments, on the storages' device (pinned memory: see
            ``scatter_stream``).
        lanes: int64 ``[num_tensors, 4]``, storages' device, contiguous: sums over the records marked for digests, of
            the words that were really there, are added. None sums nothing and is faster, since then no atomic waits
            for its result.
        sums: Which: ``SUMS_NEW``, ``SUMS_CHANGE`` or ``SUMS_ALL``.

    Raises:
        ValueError: When planes or lanes do not fit the plan.

    *Stream*: the current stream; returns before the work is done. *Memory*: writes only the words that change;
    applying the same planes again restores every byte.
    """
    check_planes(plan, planes, lanes, plan.records.device)
    sums = SUMS_NONE if lanes is None else sums
    if not dispatch.uses_triton(plan.records.device):
        scatter_reference(plan, planes, lanes, write=True, sums=sums)
        return
    for launch in plan.launches:
        launch_scatter(launch, plan, planes, lanes, None, write=True, sums=sums)


def touched_sums_(plan: ScatterPlan, planes: Planes, lanes: torch.Tensor, faults: torch.Tensor) -> None:
    """Digests the live words at the touched positions without writing: the touched-old check.

    Args:
        plan: Tables and layout.
        planes: As for `scatter_xor_`.
        lanes: int64 ``[num_tensors, 4]``, storages' device, contiguous: all four columns are added to.
        faults: int32 ``[1]``, storages' device: entries that break the format (position past the segment or tile,
            value 0) are counted into it.

    Raises:
        ValueError: When planes or lanes do not fit the plan.

    *Stream*: the current stream; returns before the work is done.
    """
    check_planes(plan, planes, lanes, plan.records.device)
    if faults.dtype is not torch.int32 or faults.numel() != 1 or faults.device != lanes.device:
        raise ValueError(f"faults must be one int32 on {lanes.device}, got {faults.dtype} {tuple(faults.shape)}")
    if not dispatch.uses_triton(plan.records.device):
        faults += scatter_reference(plan, planes, lanes, write=False, sums=SUMS_ALL)
        return
    for launch in plan.launches:
        launch_scatter(launch, plan, planes, lanes, faults, write=False, sums=SUMS_ALL)


def check_planes(plan: ScatterPlan, planes: Planes, lanes: torch.Tensor | None, device: torch.device) -> None:
    """Tests planes and sums against a plan.

    Args:
        plan: The plan.
        planes: Must hold the plan's entries and dense words, on ``device``.
        lanes: Sums on the records' device, or None.
        device: Where the planes must be.

    Raises:
        ValueError: When something does not fit.
    """
    w = plan.records.word_nbytes
    want = ((2 + w, plan.num_entries), (w, plan.num_dense))
    if planes.word_nbytes != w or (tuple(planes.entries.shape), tuple(planes.dense.shape)) != want:
        raise ValueError(
            f"planes of {planes.word_nbytes}-byte words with entries {tuple(planes.entries.shape)} and dense "
            f"{tuple(planes.dense.shape)} do not fit the plan: {w}-byte words, {want[0]} and {want[1]}"
        )
    for name, t in (("entries", planes.entries), ("dense", planes.dense)):
        if t.dtype is not torch.uint8 or t.device != device or (t.shape[1] > 1 and t.stride(1) != 1):
            raise ValueError(
                f"{name} must be uint8 rows on {device}, got {t.dtype} on {t.device}, strides {t.stride()}"
            )
    if lanes is not None and (
        lanes.dtype is not torch.int64
        or lanes.shape != (plan.records.num_tensors, 4)
        or lanes.device != plan.records.device
        or not lanes.is_contiguous()
    ):
        raise ValueError(f"lanes must be contiguous int64 [{plan.records.num_tensors}, 4] on {plan.records.device}")


def launch_scatter(
    launch: ScatterLaunch,
    plan: ScatterPlan,
    planes: Planes,
    lanes: torch.Tensor | None,
    faults: torch.Tensor | None,
    *,
    write: bool,
    sums: int,
    begin: int = 0,
    end: int | None = None,
    entries_before: int = 0,
    dense_before: int = 0,
    block: int | None = None,
    num_warps: int | None = None,
    atomic: bool | None = None,
    rehearse: bool = False,
) -> None:
    """Launches the kernel on segments ``begin`` to ``end`` of a launch; arguments already checked.

    Args:
        launch: Tables of one record group.
        plan: The plan of the launch.
        planes: Entries from number ``entries_before`` on, and dense words from ``dense_before`` on, on the device.
        lanes: Sums, or None where ``sums`` is 0.
        faults: Fault count, or None for no check.
        write: XOR; else only read.
        sums: ``SUMS_NONE``, or which sums are added to ``lanes``.
        begin: First segment.
        end: End of the segments, None for all.
        entries_before: Entries of the plan that ``planes`` leaves out at its start.
        dense_before: The same of dense words.
        block: Entries a program takes at a time, None to choose by the mean count.
        num_warps: Warps of a program, None to choose.
        atomic: XOR by atomics, or read and write back; None to choose by the mean count.
        rehearse: Launch the same kernel on one segment without changes instead, so that it is compiled and loaded: its
            first launch takes a second otherwise, and not inside a pause.
    """
    from megasync.kernels._scatter_triton import scatter_kernel

    end = len(launch.segments) if end is None else end
    if end <= begin:
        return
    group, w = launch.group, plan.records.word_nbytes
    entries = int(launch.first_entry[end] - launch.first_entry[begin])
    dense = int(launch.first_dense[end] - launch.first_dense[begin])
    mean = (entries + dense) / (end - begin)
    if block is None or num_warps is None:
        block, num_warps = next((b, n) for most, b, n in _SHAPES if mean <= most)
    if atomic is None:
        atomic = mean < _SHARED_SECTORS * SEGMENT_WORDS * w / 32
    unused = launch.segments
    segments = launch.segments[begin:end] if not rehearse else torch.zeros_like(launch.segments[:1])
    scatter_kernel[(len(segments),)](
        segments,
        launch.tiles,
        group.table,
        planes.entries,
        planes.entries.stride(0),
        planes.dense,
        planes.dense.stride(0),
        unused if lanes is None else lanes,
        unused if faults is None else faults,
        entries_before,
        dense_before,
        W=w,
        ND=plan.records.num_axes,
        TT=group.num_terms,
        PARTS=2 * w if group.nibble else 1,
        WIDE=group.wide,
        WRITE=write,
        ATOMIC=atomic,
        SUMS=sums,
        CHECK=faults is not None,
        DENSE=dense > 0,
        BLOCK=block,
        num_warps=num_warps,
    )
