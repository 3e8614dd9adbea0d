"""NVFP4 amax and quantising passes: Triton where there is a GPU and Triton, plain torch elsewhere, with equal bytes.

Before it in the flow: ``quant.nvfp4`` checks the box and turns the reduced amax into constants. After it: the bytes
lie in the buffers that mask and encode read. Three layers: private Triton kernels (``_nvfp4_triton``), the
specification (``nvfp4_reference``), and the checked wrappers of this module. Must import nothing above kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from megasync.kernels.nvfp4_reference import BLOCK, Order, amax_reference, quantize_reference_

_SOURCES = (torch.bfloat16, torch.float32)
_BLOCKS = 8  # blocks of 16 elements along a row that one program takes: 256 bytes of bf16 a row
_AMAX_ROWS, _AMAX_COLUMNS = 32, 256


def amax_(x: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ``out`` to the largest magnitude of a box; NaN and infinity give +inf or NaN, never a finite number.

    Args:
        x: bfloat16 or float32 ``[rows, columns]``, any device, any strides, may be empty.
        out: float32 scalar on the same device, >= 0, updated in place.

    Raises:
        TypeError: On another dtype of ``x`` or ``out``.
        ValueError: On another rank, or devices that differ.

    *Stream*: the current stream; nothing is synchronised.
    """
    _check_source(x)
    if out.dtype is not torch.float32 or out.numel() != 1:
        raise TypeError(f"amax goes to one float32, not {out.dtype} of shape {tuple(out.shape)}")
    _check_device(x, out=out)
    kernels = triton_kernels(x)
    if kernels is None:
        torch.maximum(out, amax_reference(x).reshape(out.shape), out=out)
        return
    rows, columns = x.shape
    if not x.numel():
        return
    grid = (-(-rows // _AMAX_ROWS) * -(-columns // _AMAX_COLUMNS),)
    kernels.amax_kernel[grid](
        _bits(x),
        out.view(torch.int32),
        rows,
        columns,
        x.stride(0),
        x.stride(1),
        IS_BF16=x.dtype is torch.bfloat16,
        ROWS=_AMAX_ROWS,
        COLUMNS=_AMAX_COLUMNS,
        enable_fp_fusion=False,
    )


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
    check_region(x, codes, scales)
    if constants.dtype is not torch.float32 or constants.shape != (2,):
        raise TypeError(f"constants are two float32, not {constants.dtype} of shape {tuple(constants.shape)}")
    _check_device(x, constants=constants)
    rows, columns = x.shape
    kernels = triton_kernels(x)
    if not x.numel() or (codes is None and scales is None):
        return
    if kernels is None:
        quantize_reference_(x, constants, order, two_d, codes, scales)
        return
    blocks = columns // BLOCK
    grid = (-(-rows // BLOCK) * -(-blocks // _BLOCKS),)
    kernels.quantize_kernel[grid](
        _bits(x),
        constants,
        codes if codes is not None else constants,
        scales if scales is not None else constants,
        rows,
        blocks,
        x.stride(0),
        x.stride(1),
        codes.stride(0) if codes is not None else 0,
        scales.stride(0) if scales is not None else 0,
        ORDER=int(order),
        IS_BF16=x.dtype is torch.bfloat16,
        TWO_D=two_d,
        WITH_CODES=codes is not None,
        WITH_SCALES=scales is not None,
        BLOCKS=_BLOCKS,
        enable_fp_fusion=False,
    )


def check_region(x: torch.Tensor, codes: torch.Tensor | None, scales: torch.Tensor | None) -> None:
    """Refuse a region and buffers that the quantising pass cannot take; arguments as in ``quantize_``.

    Raises:
        TypeError: On another dtype.
        ValueError: On another shape, device or stride.
    """
    _check_source(x)
    rows, columns = x.shape
    if columns % BLOCK:
        raise ValueError(f"a box of {columns} columns: NVFP4 blocks need a multiple of {BLOCK}")
    for name, out, width in (("codes", codes, columns // 2), ("scales", scales, columns // BLOCK)):
        if out is None:
            continue
        _check_device(x, **{name: out})
        if out.dtype is not torch.uint8:
            raise TypeError(f"{name} must be uint8, not {out.dtype}")
        if out.shape != (rows, width) or (out.numel() > 1 and width > 1 and out.stride(1) != 1):
            raise ValueError(
                f"{name} of shape {tuple(out.shape)} and strides {out.stride()}: expected {(rows, width)}, last axis "
                "contiguous"
            )


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True where Triton can be imported (whether or not a GPU is there)."""
    return importlib.util.find_spec("triton") is not None


def triton_kernels(x: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, or None where ``x`` takes the reference path."""
    if x.device.type == "cpu" or not has_triton():
        return None
    return importlib.import_module("megasync.kernels._nvfp4_triton")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The stored bits: hardware conversions of bf16 may drop subnormals, integers do not."""
    return x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


def _check_source(x: torch.Tensor) -> None:
    if x.dtype not in _SOURCES:
        raise TypeError(f"NVFP4 is made from bfloat16 or float32 weights, not {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"NVFP4 is made from matrices, not from shape {tuple(x.shape)}")


def _check_device(x: torch.Tensor, **others: torch.Tensor) -> None:
    for name, other in others.items():
        if other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, the weights on {x.device}")
