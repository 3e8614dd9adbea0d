"""NVFP4 passes over many regions at once: one launch for the amaxes of a rank, one for its codes and scales.

A trainer rank owns thousands of small regions (a tile, or a query group's part of one), for which a launch each would cost
more than the work. The regions do not move while the trainer lives, so their addresses lie in a table on the device, made
once. On CPU, and where Triton is absent, the regions go through ``nvfp4`` one by one: equal bytes. Comes after the
ownership plan (``trainer.quantised``). Must import nothing above kernels.

A table row, int64: address, rows, blocks of 16 columns, row stride, column stride, codes address (0: not wanted), codes row
stride, scales address (0: not wanted), scales row stride, slot, first program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.kernels.nvfp4 import amax_, check_region, quantize_, triton_kernels
from megasync.kernels.nvfp4_reference import BLOCK, Order

_WIDTH = 11
_BLOCKS, _STEPS = 8, 8  # a program takes 16 rows x 1,024 columns in 8 steps


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a weight and where its bytes go.

    Attributes:
        data: bfloat16 or float32 ``[rows, 16 n]``, cut at block multiples, any strides; must not move.
        slot: Index of its amax and constants.
        codes: uint8 ``[rows, 8 n]`` to fill, last axis contiguous, or None.
        scales: uint8 ``[rows, n]`` to fill, last axis contiguous, or None.
    """

    data: torch.Tensor
    slot: int
    codes: torch.Tensor | None
    scales: torch.Tensor | None


class Batch:
    """Regions of one formula, one dtype and one device, ready for both passes.

    Args:
        regions: The regions; those with codes enter the amax.
        order: Order of operations.
        two_d: 16 x 16 blocks counted from each region's first row, else 1 x 16.

    Raises:
        TypeError, ValueError: Regions that do not fit the passes, or differ in dtype or device.
    """

    def __init__(self, regions: Sequence[Region], order: Order, two_d: bool) -> None:
        self._regions = [r for r in regions if r.data.numel()]
        self._order, self._two_d = order, two_d
        for r in self._regions:
            check_region(r.data, r.codes, r.scales)
        if len({(r.data.dtype, r.data.device) for r in self._regions}) > 1:
            raise ValueError("regions of a batch must share dtype and device")
        self._kernels = triton_kernels(self._regions[0].data) if self._regions else None
        if self._kernels is not None:
            owners = [r for r in self._regions if r.codes is not None]
            self._amax_table, self._amax_region = _table(owners)
            self._table, self._region = _table(self._regions)
            self._bf16 = self._regions[0].data.dtype is torch.bfloat16
            self._aligned = all(_is_aligned(r) for r in self._regions)

    def amax_(self, values: torch.Tensor) -> None:
        """Raise each slot to the largest magnitude of its regions.

        Args:
            values: float32 ``[slots]``, contiguous, same device, >= 0, updated in place; NaN or +inf where an element is
                not finite.

        *Stream*: the current stream; nothing is synchronised.
        """
        if self._kernels is None:
            for r in self._regions:
                if r.codes is not None:
                    amax_(r.data, values[r.slot])
        elif len(self._amax_region):
            self._kernels.batch_amax_kernel[(len(self._amax_region),)](
                self._amax_table,
                self._amax_region,
                values.view(torch.int32),
                IS_BF16=self._bf16,
                ALIGNED=self._aligned,
                WIDTH=_WIDTH,
                BLOCKS=_BLOCKS,
                STEPS=_STEPS,
                enable_fp_fusion=False,
            )

    def quantize_(self, constants: torch.Tensor) -> None:
        """Fill the codes and scales of every region.

        Args:
            constants: float32 ``[slots, 2]``, contiguous, same device, see ``Order``.

        *Stream*: the current stream; nothing is synchronised.
        """
        if self._kernels is None:
            for r in self._regions:
                quantize_(r.data, constants[r.slot], self._order, self._two_d, r.codes, r.scales)
        elif len(self._region):
            self._kernels.batch_quantize_kernel[(len(self._region),)](
                self._table,
                self._region,
                constants,
                ORDER=int(self._order),
                IS_BF16=self._bf16,
                TWO_D=self._two_d,
                ALIGNED=self._aligned,
                WIDTH=_WIDTH,
                BLOCKS=_BLOCKS,
                STEPS=_STEPS,
                enable_fp_fusion=False,
            )


def _table(regions: Sequence[Region]) -> tuple[torch.Tensor, torch.Tensor]:
    """The table, and the region of each program (int32), on the regions' device."""
    rows: list[list[int]] = []
    programs: list[int] = []
    first = 0
    for r in regions:
        height, blocks = r.data.shape[0], r.data.shape[1] // BLOCK
        to_codes = (r.codes.data_ptr(), r.codes.stride(0)) if r.codes is not None else (0, 0)
        to_scales = (r.scales.data_ptr(), r.scales.stride(0)) if r.scales is not None else (0, 0)
        rows.append([r.data.data_ptr(), height, blocks, *r.data.stride(), *to_codes, *to_scales, r.slot, first])
        num = -(-height // BLOCK) * -(-blocks // (_BLOCKS * _STEPS))
        programs.append(num)
        first += num
    device = regions[0].data.device if regions else "cpu"
    numbers = torch.arange(len(rows), dtype=torch.int32)
    region = numbers.repeat_interleave(torch.tensor(programs, dtype=torch.int64))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, _WIDTH).to(device), region.to(device)


def _is_aligned(region: Region) -> bool:
    """Rows of adjacent elements that start at 16 bytes, and codes rows that start at 8: loads and stores go wide then."""
    data, codes = region.data, region.codes
    rows = data.stride(0) * data.element_size() % 16 == 0 or data.shape[0] == 1
    wide = codes is None or (codes.data_ptr() % 8 == 0 and codes.stride(0) % 8 == 0)
    return data.stride(1) == 1 and data.data_ptr() % 16 == 0 and rows and wide
