"""NVFP4 amax and quantising passes over one box: batches of one (``amax``, ``nvfp4_batch``), for callers without a plan.

Before it in the flow: ``quant.nvfp4`` checks the box and turns the reduced amax into constants. Must import nothing above
kernels.
"""

from __future__ import annotations

import torch

from megasync.kernels.amax import AmaxBatch
from megasync.kernels.nvfp4_batch import Batch, Region
from megasync.kernels.nvfp4_reference import Order


def amax_(x: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ``out`` to the largest magnitude of a box; NaN and infinity give +inf or NaN, never a finite number.

    Args:
        x: bfloat16 or float32 ``[rows, columns]``, any device, any strides, may be empty.
        out: float32, one element, on the same device, >= 0, updated in place.

    Raises:
        TypeError: On another dtype of ``x`` or ``out``.
        ValueError: On another rank, or devices that differ.

    *Stream*: the current stream; nothing is synchronised.
    """
    if out.numel() != 1:
        raise TypeError(f"amax goes to one float32, not to shape {tuple(out.shape)}")
    AmaxBatch([(x, 0)]).raise_(out.view(1))


def quantize_(
    x: torch.Tensor,
    constants: torch.Tensor,
    order: Order,
    two_d: bool,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Quantise one box of a weight into given buffers.

    Reads the box once and writes 9/16 byte an element (bf16: 2.56 bytes an element moved in all).

    Args:
        x: bfloat16 or float32 ``[rows, 16 n]``, finite, any device, any strides.
        constants: float32 ``[2]`` on the same device, see ``Order``.
        order: Order of operations.
        two_d: Blocks of 16 x 16 elements counted from the box's first row (the last may be shorter), else 1 x 16.
        codes: uint8 ``[rows, 8 n]``, last axis contiguous, filled with packed codes, low nibble first; None: not
            wanted.
        scales: uint8 ``[rows, n]``, last axis contiguous, filled with e4m3 bytes; None: not wanted.

    Raises:
        TypeError: On a dtype other than these.
        ValueError: On shapes, strides or devices other than these.

    *Stream*: the current stream; nothing is synchronised.
    """
    Batch([Region(x.detach(), 0, codes, scales)], order, two_d).quantize_(constants.view(1, -1))
