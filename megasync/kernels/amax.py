"""Largest magnitudes of many regions at once: what ranks exchange before they quantise, and where NaN is seen.

One launch for all regions of a rank that share a dtype: a trainer owns thousands of small ones (a tile, or a query group's
part of one), for which a launch each would cost more than the work. The regions do not move while the trainer lives, so their
addresses lie in a table on the device, made once. On CPU, and where Triton is absent, plain torch: equal results. Before it
in the flow: the ownership plan (``quant.passes``); after it: the exchange of amaxes. Must import nothing above kernels.

A table row, int64: address, row stride, column stride, rows, columns (or blocks of columns), slot, first program; the
quantising passes add where bytes go (``table_of``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch

SOURCES = (torch.bfloat16, torch.float32)
HEAD = 7
"""Columns of a table row that all passes share."""

# 98 % of copy bandwidth on an H200; one tile a program 47 %, four warps over twice the tile 82 %.
_ROWS, _PAIRS, _STEPS, _WARPS = 8, 128, 16, 1
_WIDEST = 1 << 26  # elements of a row stride up to which offsets inside a tile of 16 rows fit 31 bits


class AmaxBatch:
    """Regions of one device, ready for the amax pass.

    Args:
        regions: Each region, bfloat16 or float32 ``[rows, columns]``, any strides, with the index of its slot; regions must
            not move.

    Raises:
        TypeError, ValueError: Another dtype or rank, or regions of several devices.
    """

    def __init__(self, regions: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._regions = [(x.detach(), slot) for x, slot in regions if x.numel()]
        for x, _ in self._regions:
            check_source(x)
        if len({x.device for x, _ in self._regions}) > 1:
            raise ValueError("regions of a batch must share a device")
        self._launches: list[tuple[bool, bool, torch.Tensor, torch.Tensor]] = []
        self._kernels = kernels_for(self._regions[0][0].device, "_amax_triton") if self._regions else None
        if self._kernels is None:
            return
        for bf16 in (True, False):
            for aligned in (True, False):
                mine = [
                    (x, slot)
                    for x, slot in self._regions
                    if (x.dtype is torch.bfloat16) == bf16 and is_aligned(x) == aligned
                ]
                if mine:
                    rows = [[*place(x), *x.shape, slot] for x, slot in mine]
                    programs = [num_programs(x.shape, _ROWS, 2 * _PAIRS, _STEPS) for x, _ in mine]
                    self._launches.append((bf16, aligned, *table_of(rows, programs, mine[0][0].device)))

    @property
    def nbytes(self) -> int:
        """Bytes that a pass reads."""
        return sum(x.numel() * x.element_size() for x, _ in self._regions)

    def raise_(self, values: torch.Tensor) -> None:
        """Raise each slot to the largest magnitude of its regions.

        Args:
            values: float32 ``[slots]``, contiguous, same device, >= 0, updated in place; NaN or +inf where an element is
                not finite.

        Raises:
            TypeError: On another dtype.
            ValueError: On another device.

        *Stream*: the current stream; nothing is synchronised.
        """
        if values.dtype is not torch.float32 or not values.is_contiguous():
            raise TypeError(f"amaxes go to contiguous float32, not {values.dtype} of strides {values.stride()}")
        if self._regions and values.device != self._regions[0][0].device:
            raise ValueError(f"amaxes are on {values.device}, the weights on {self._regions[0][0].device}")
        if self._kernels is None:
            flat = values.view(-1)
            for x, slot in self._regions:
                torch.maximum(flat[slot], amax_reference(x), out=flat[slot])
            return
        for bf16, aligned, table, region in self._launches:
            self._kernels.amax_kernel[(len(region),)](
                table,
                region,
                values.view(torch.int32),
                _STEPS,
                IS_BF16=bf16,
                ALIGNED=aligned,
                WIDTH=table.shape[1],
                ROWS=_ROWS,
                PAIRS=_PAIRS,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )


def amax_reference(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a region; the specification.

    Args:
        x: bfloat16 or float32, any shape (empty allowed), any device, any strides.

    Returns:
        fp32 scalar on the same device; +inf where any element is NaN or infinite, 0 for an empty region.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    largest = magnitude_bits(x).amax().view(x.dtype).float()
    return torch.where(torch.isfinite(largest), largest, torch.inf)


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """Bits of ``|x|``, which order like the magnitudes, NaN above infinity above all; integers reduce twice as fast.

    Args:
        x: bfloat16 or float32, any shape, any strides.

    Returns:
        int16 or int32 of the same shape.
    """
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF
    return x.view(torch.int32) & 0x7FFFFFFF


def check_source(x: torch.Tensor) -> None:
    """Refuse what is quantised from nothing: another dtype than bfloat16 or float32, another rank than 2.

    Raises:
        TypeError: On another dtype.
        ValueError: On another rank.
    """
    if x.dtype not in SOURCES:
        raise TypeError(f"weights are quantised from bfloat16 or float32, not {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"matrices are quantised, not a tensor of shape {tuple(x.shape)}")


def kernels_for(device: torch.device, name: str) -> ModuleType | None:
    """A module of Triton kernels, or None where tensors on a device take the reference path."""
    if device.type == "cpu" or not has_triton():
        return None
    return importlib.import_module(f"megasync.kernels.{name}")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True where Triton can be imported (whether or not a GPU is there)."""
    return importlib.util.find_spec("triton") is not None


def place(x: torch.Tensor) -> tuple[int, int, int]:
    """First three columns of a region's table row."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def is_aligned(x: torch.Tensor) -> bool:
    """Adjacent elements in whole eights, rows that start at 16 bytes and are not too far apart: loads go wide then."""
    rows = x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) < _WIDEST
    return x.stride(1) == 1 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and (rows or x.shape[0] == 1)


def num_programs(shape: Sequence[int], rows: int, columns: int, steps: int) -> int:
    """Programs of a region that is worked on in tiles of ``rows`` x ``columns``, ``steps`` tiles each."""
    return -(-(-(-shape[0] // rows) * -(-shape[1] // columns)) // steps)


def table_of(
    rows: Sequence[Sequence[int]], programs: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of a launch and the region of each of its programs.

    Args:
        rows: One row a region, without the column of its first program, which becomes column ``HEAD - 1``.
        programs: How many programs each has.
        device: Where both go.

    Returns:
        int64 ``[regions, columns]`` and int32 ``[programs]``.
    """
    num = torch.tensor(programs, dtype=torch.int64)
    first = (num.cumsum(0) - num).tolist()
    full = [[*r[: HEAD - 1], f, *r[HEAD - 1 :]] for r, f in zip(rows, first, strict=True)]
    region = torch.arange(len(full), dtype=torch.int32).repeat_interleave(num)
    return torch.tensor(full, dtype=torch.int64).to(device), region.to(device)
