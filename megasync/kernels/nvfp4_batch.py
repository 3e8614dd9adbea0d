"""NVFP4 codes and scales of many regions at once: one launch for all that a rank owns of a formula.

Triton where there is a GPU and Triton, plain torch elsewhere, with equal bytes. Before it in the flow: the exchange of
amaxes, which became two constants a tensor; after it: the bytes lie in the buffers that mask and encode read. Regions do not
move while the trainer lives, so their addresses lie in a table on the device, made once (see ``amax``). Must import nothing
above kernels.

A table row adds to those of ``amax``, whose columns are blocks of 16 here: codes address (0: not wanted), codes row stride,
scales address (0: not wanted), scales row stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.kernels.amax import check_source, is_aligned, kernels_for, num_programs, place, table_of
from megasync.kernels.nvfp4_reference import BLOCK, Order, quantize_reference_

_SHAPES = {True: (16, 8, 16, 1), False: (8, 16, 16, 1)}
"""Rows, blocks along a row and tiles of a program, and its warps, for blocks of two dimensions and of one.

One warp needs no barrier for its amaxes; many tiles a program pay for reading the table. On an H200 (copy 4.22 TB/s) these
reach 2.97 TB/s (TE, 16 x 16), 2.90 (TE, 1 x 16), 2.22 (ModelOpt) and 2.11 (compressed-tensors: a division more), one tile a
program 2.37, 2.34, 1.97 and 1.88, four warps over 16 x 512 elements 2.00, and 512 elements along few rows 1.37 to 2.05.
"""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a weight and where its bytes go.

    Attributes:
        data: bfloat16 or float32 ``[rows, 16 n]``, cut at block multiples, any strides; must not move.
        slot: Index of its constants.
        codes: uint8 ``[rows, 8 n]`` to fill, last axis contiguous, or None.
        scales: uint8 ``[rows, n]`` to fill, last axis contiguous, or None.
    """

    data: torch.Tensor
    slot: int
    codes: torch.Tensor | None
    scales: torch.Tensor | None


class Batch:
    """Regions of one formula, one dtype and one device, ready for the quantising pass.

    Args:
        regions: The regions.
        order: Order of operations.
        two_d: 16 x 16 blocks counted from each region's first row, else 1 x 16.

    Raises:
        TypeError, ValueError: Regions that do not fit the pass, or differ in dtype or device.
    """

    def __init__(self, regions: Sequence[Region], order: Order, two_d: bool) -> None:
        self._regions = [r for r in regions if r.data.numel() and (r.codes is not None or r.scales is not None)]
        self._order, self._two_d = order, two_d
        for r in self._regions:
            check_region(r)
        if len({(r.data.dtype, r.data.device) for r in self._regions}) > 1:
            raise ValueError("regions of a batch must share dtype and device")
        self._launches: list[tuple[bool, torch.Tensor, torch.Tensor]] = []
        self._kernels = kernels_for(self._regions[0].data.device, "_nvfp4_triton") if self._regions else None
        if self._kernels is None:
            return
        rows, blocks, steps, _ = _SHAPES[two_d]
        for aligned in (True, False):
            mine = [r for r in self._regions if _is_aligned(r) == aligned]
            if mine:
                programs = [num_programs(r.data.shape, rows, blocks * BLOCK, steps) for r in mine]
                self._launches.append((aligned, *table_of([_row(r) for r in mine], programs, mine[0].data.device)))

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that a pass reads, and writes."""
        read = sum(r.data.numel() * r.data.element_size() for r in self._regions)
        return read, sum(t.numel() for r in self._regions for t in (r.codes, r.scales) if t is not None)

    def quantize_(self, constants: torch.Tensor) -> None:
        """Fill the codes and scales of every region; weights must be finite.

        Args:
            constants: float32 ``[slots, 2]``, contiguous, same device, see ``Order``.

        Raises:
            TypeError, ValueError: On other constants.

        *Stream*: the current stream; nothing is synchronised.
        """
        if constants.dtype is not torch.float32 or constants.dim() != 2 or constants.shape[1] != 2:
            raise TypeError(f"constants are float32 [slots, 2], not {constants.dtype} {tuple(constants.shape)}")
        if self._regions and (constants.device != self._regions[0].data.device or not constants.is_contiguous()):
            raise ValueError(
                f"constants on {constants.device} of strides {constants.stride()}: contiguous, with the weights"
            )
        if self._kernels is None:
            for r in self._regions:
                quantize_reference_(r.data.detach(), constants[r.slot], self._order, self._two_d, r.codes, r.scales)
            return
        rows, blocks, steps, warps = _SHAPES[self._two_d]
        for aligned, table, region in self._launches:
            self._kernels.quantize_kernel[(len(region),)](
                table,
                region,
                constants,
                steps,
                ORDER=int(self._order),
                IS_BF16=self._regions[0].data.dtype is torch.bfloat16,
                TWO_D=self._two_d,
                ALIGNED=aligned,
                WIDTH=table.shape[1],
                ROWS=rows,
                BLOCKS=blocks,
                num_warps=warps,
                enable_fp_fusion=False,
            )


def check_region(region: Region) -> None:
    """Refuse a region and buffers that the quantising pass cannot take.

    Raises:
        TypeError: On another dtype.
        ValueError: On another shape, device or stride.
    """
    x = region.data
    check_source(x)
    rows, columns = x.shape
    if columns % BLOCK:
        raise ValueError(f"a box of {columns} columns: NVFP4 blocks need a multiple of {BLOCK}")
    for name, out, width in (("codes", region.codes, columns // 2), ("scales", region.scales, columns // BLOCK)):
        if out is None:
            continue
        if out.device != x.device:
            raise ValueError(f"{name} is on {out.device}, the weights on {x.device}")
        if out.dtype is not torch.uint8:
            raise TypeError(f"{name} must be uint8, not {out.dtype}")
        if out.shape != (rows, width) or (out.numel() > 1 and width > 1 and out.stride(1) != 1):
            raise ValueError(
                f"{name} of shape {tuple(out.shape)} and strides {out.stride()}: expected {(rows, width)}, last axis "
                "contiguous"
            )


def _row(r: Region) -> list[int]:
    to_codes = (r.codes.data_ptr(), r.codes.stride(0)) if r.codes is not None else (0, 0)
    to_scales = (r.scales.data_ptr(), r.scales.stride(0)) if r.scales is not None else (0, 0)
    return [*place(r.data), r.data.shape[0], r.data.shape[1] // BLOCK, r.slot, *to_codes, *to_scales]


def _is_aligned(region: Region) -> bool:
    """Wide loads, and codes rows that start at 8 bytes: stores go wide too."""
    codes = region.codes
    return is_aligned(region.data) and (codes is None or (codes.data_ptr() % 8 == 0 and codes.stride(0) % 8 == 0))
