"""FP8 codes and scales of many regions at once: one launch for all that a rank owns of a formula.

Triton where there is a GPU and Triton, plain torch elsewhere, with equal bytes. Scales of 128 x 128 blocks, of rows or of
whole tensors; scales that are stored as exponents (ue8m0) are written as such. Before it in the flow: the exchange of
amaxes, which only scales of whole tensors need; after it: the bytes lie in the buffers that mask and encode read. Must
import nothing above kernels.

A table row adds to those of ``amax``: codes address (0: not wanted), codes row stride, scales address (0: not wanted), scales
row stride, exponents address (0: not wanted), exponents row stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.kernels.amax import check_source, is_aligned, kernels_for, num_programs, place, table_of
from megasync.kernels.fp8_reference import Fp8Order, quantize_reference_

_ORDERS = (Fp8Order.DEEPGEMM, Fp8Order.TE, Fp8Order.DIVIDE)
_BLOCK = (128, 128)
_TILE = {"block": (128, 64, 4, 4), "row": (8, 128, 1, 4), "tensor": (16, 128, 4, 4)}
"""Rows, pairs along a row and tiles of a program, and its warps, by what shares a scale.

On an H200 (copy 4.22 TB/s) these reach 2.26, 2.34 and 3.30 TB/s, elements of a row counted once. Eight and sixteen warps a
block reach 1.92 and 2.14; one row of 2,048 elements at a time 0.54.
"""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a weight and where its bytes go.

    Attributes:
        data: bfloat16 or float32 ``[rows, columns]``, cut at block multiples, any strides; must not move.
        slot: Index of its constants (scales of whole tensors).
        codes: uint8 ``[rows, columns]`` to fill, last axis contiguous, or None.
        scales: fp32 to fill, last axis contiguous, or None: ``[ceil(rows / 128), ceil(columns / 128)]`` per block,
            ``[rows, 1]`` per row; not for scales of whole tensors.
        e8m0: uint8 of the shape of ``scales``, takes exponents of power-of-two scales, or None.
    """

    data: torch.Tensor
    slot: int
    codes: torch.Tensor | None
    scales: torch.Tensor | None
    e8m0: torch.Tensor | None = None


class Batch:
    """Regions of one formula, one dtype and one device, ready for the quantising pass.

    Args:
        regions: The regions.
        block: Rows and columns that share a scale: (128, 128), (1, 0) for a row, (0, 0) for the whole tensor.
        order: Order of operations.
        pow2: Scales are powers of two.

    Raises:
        TypeError, ValueError: Regions that do not fit the pass, or differ in dtype or device, or another block.
    """

    def __init__(self, regions: Sequence[Region], block: tuple[int, int], order: Fp8Order, pow2: bool) -> None:
        if block not in (_BLOCK, (1, 0), (0, 0)):
            raise ValueError(f"scales are of blocks of {_BLOCK}, rows (1, 0) or tensors (0, 0), not {block}")
        self._regions = [
            r for r in regions if r.data.numel() and any(t is not None for t in (r.codes, r.scales, r.e8m0))
        ]
        self._block, self._order, self._pow2 = block, order, pow2
        for r in self._regions:
            check_region(r, block)
        if len({(r.data.dtype, r.data.device) for r in self._regions}) > 1:
            raise ValueError("regions of a batch must share dtype and device")
        self._tile = _TILE["block" if block == _BLOCK else ("row" if block[0] else "tensor")]
        self._launches: list[tuple[bool, torch.Tensor, torch.Tensor]] = []
        self._kernels = kernels_for(self._regions[0].data.device, "_fp8_triton") if self._regions else None
        if self._kernels is None:
            return
        rows, pairs, steps, _ = self._tile
        for aligned in (True, False):
            mine = [r for r in self._regions if _is_aligned(r) == aligned]
            if mine:
                shapes = [(r.data.shape[0], 1 if block == (1, 0) else r.data.shape[1]) for r in mine]
                programs = [num_programs(s, rows, 2 * pairs, steps) for s in shapes]
                self._launches.append((aligned, *table_of([_row(r) for r in mine], programs, mine[0].data.device)))

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that a pass reads (each element once), and writes."""
        read = sum(r.data.numel() * r.data.element_size() for r in self._regions)
        outs = [t for r in self._regions for t in (r.codes, r.scales, r.e8m0) if t is not None]
        return read, sum(t.numel() * t.element_size() for t in outs)

    def quantize_(self, constants: torch.Tensor | None = None) -> None:
        """Fill the codes and scales of every region; weights must be finite.

        Args:
            constants: float32 ``[slots, 2]``, contiguous, same device: scale and factor of whole tensors; else ignored.

        Raises:
            TypeError, ValueError: No constants, or other ones, where they are needed.

        *Stream*: the current stream; nothing is synchronised.
        """
        if not self._regions:
            return
        if not self._block[0]:
            _check_constants(constants, self._regions[0].data.device)
        if self._kernels is None:
            for r in self._regions:
                mine = None if constants is None or self._block[0] else constants[r.slot]
                quantize_reference_(
                    r.data.detach(), self._block, self._order, self._pow2, mine, r.codes, r.scales, r.e8m0
                )
            return
        rows, pairs, steps, warps = self._tile
        kernel = self._kernels.row_kernel if self._block == (1, 0) else self._kernels.tile_kernel
        for aligned, table, region in self._launches:
            kernel[(len(region),)](
                table,
                region,
                table if constants is None else constants,
                steps,
                ORDER=_ORDERS.index(self._order),
                POW2=self._pow2,
                BLOCKED=self._block == _BLOCK,
                IS_BF16=self._regions[0].data.dtype is torch.bfloat16,
                ALIGNED=aligned,
                WIDTH=table.shape[1],
                ROWS=rows,
                PAIRS=pairs,
                num_warps=warps,
                enable_fp_fusion=False,
            )


def check_region(region: Region, block: tuple[int, int]) -> None:
    """Refuse a region and buffers that the quantising pass cannot take.

    Raises:
        TypeError: On another dtype.
        ValueError: On another shape, device or stride.
    """
    x = region.data
    check_source(x)
    rows, columns = x.shape
    height, width = block
    extents = (-(-rows // (height or 1)), -(-columns // width) if width else 1)
    wanted = (
        ("codes", region.codes, torch.uint8, (rows, columns)),
        ("scales", region.scales, torch.float32, extents),
        ("exponents", region.e8m0, torch.uint8, extents),
    )
    for name, out, dtype, shape in wanted:
        if out is None:
            continue
        if name != "codes" and not height:
            raise ValueError(f"{name} of a region: one scale of the whole tensor is written by its owner")
        if out.device != x.device:
            raise ValueError(f"{name} are on {out.device}, the weights on {x.device}")
        if out.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, not {out.dtype}")
        if out.shape != shape or (out.numel() > 1 and shape[1] > 1 and out.stride(1) != 1):
            raise ValueError(
                f"{name} of shape {tuple(out.shape)} and strides {out.stride()}: expected {shape}, last axis contiguous"
            )


def _check_constants(constants: torch.Tensor | None, device: torch.device) -> None:
    if constants is None:
        raise ValueError("a scale of the whole tensor needs its constants")
    if constants.dtype is not torch.float32 or constants.dim() != 2 or constants.shape[1] != 2:
        raise TypeError(f"constants are float32 [slots, 2], not {constants.dtype} {tuple(constants.shape)}")
    if constants.device != device or not constants.is_contiguous():
        raise ValueError(f"constants on {constants.device}, strides {constants.stride()}: contiguous, with the weights")


def _row(r: Region) -> list[int]:
    outs = [(t.data_ptr(), t.stride(0)) if t is not None else (0, 0) for t in (r.codes, r.scales, r.e8m0)]
    return [*place(r.data), *r.data.shape, r.slot, *(n for out in outs for n in out)]


def _is_aligned(region: Region) -> bool:
    """Wide loads, and codes rows that start at 8 bytes: stores go wide too."""
    codes = region.codes
    return is_aligned(region.data) and (codes is None or (codes.data_ptr() % 8 == 0 and codes.stride(0) % 8 == 0))
