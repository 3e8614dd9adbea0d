"""NVFP4 from boxes of a weight, bit-exact: one amax scalar first, then codes, block scales and the global scale.

The two steps are apart because only amax scalars cross ranks: ``amax`` of every owned box, reduced with MAX over all
owners and fused partners (``quant.exchange``), then ``quantize_`` of each box on its own. Boxes quantised apart with
the reduced amax are the bytes of the whole quantised at once. Rounding and orders of operations are those of
``kernels.nvfp4_reference``. Must import nothing above kernels.

Edge rules: an all-zero weight has global scale 1 and only zero codes; -0.0 gives code 0 and a negative that rounds to
zero code 8; NaN and infinity are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megasync.kernels.nvfp4 import amax_, quantize_
from megasync.kernels.nvfp4_reference import BLOCK, FLT_MAX, Order
from megasync.quant.blocks import check_box, check_source, require_finite
from megasync.quant.formulas import Formula
from megasync.types import Box

_GLOBAL_MAX = 448.0 * 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """A quantised box.

    Attributes:
        codes: uint8 ``[rows, columns / 2]``, element 2i in the low nibble.
        scales: uint8 ``[rows, columns / 16]``, e4m3 bytes, never negative.
        global_scale: fp32 scalar, decode form: ``value = code * (scale * global_scale)``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor


def amax(data: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a box, the only thing of it that other ranks need.

    Args:
        data: bfloat16 or float32 ``[rows, columns]``, any device, any strides, may be empty.

    Returns:
        fp32 scalar on the same device; not finite where an element is not finite.
    """
    out = torch.zeros((), dtype=torch.float32, device=data.device)
    amax_(data.detach(), out)
    return out


def encode_scale(amax: torch.Tensor, formula: Formula) -> torch.Tensor:
    """The factor that maps amax to 448 * 6, as compressed-tensors checkpoints store it (``weight_global_scale``).

    Args:
        amax: fp32, any shape, finite: the reduced amax.
        formula: The formula; ``compressed-tensors-1d`` rounds the factor to the source's dtype.

    Returns:
        fp32 of the same shape, finite and positive: 1 for an all-zero weight.
    """
    if formula.order is Order.COMPRESSED:
        source = formula.torch_source
        # The library divides a number by a tensor, which torch runs as a reciprocal and a product, each rounded.
        inverse = amax.to(source).clamp(min=torch.finfo(source).tiny).reciprocal()
        g = (inverse * torch.full_like(inverse, _GLOBAL_MAX)).float()
        return torch.where(torch.isfinite(g), g, 1.0)
    # torch.div of two tensors rounds once.
    top = torch.full_like(amax, _GLOBAL_MAX)
    return torch.where(amax == 0, 1.0, torch.div(top, amax).clamp(max=FLT_MAX))


def decode_scale(amax: torch.Tensor, formula: Formula) -> torch.Tensor:
    """The factor that decodes, as ModelOpt checkpoints store it (``weight_scale_2``).

    Args:
        amax: fp32, any shape, finite: the reduced amax.
        formula: The formula.

    Returns:
        fp32 of the same shape: amax / 2688 (the reciprocal of the encode scale for ``compressed-tensors-1d``), finite
        and positive: 1 for an all-zero weight.
    """
    if formula.order is Order.COMPRESSED:
        return torch.reciprocal(encode_scale(amax, formula))
    # A tensor as divisor: torch on CUDA turns division by a number into a product with its reciprocal.
    scale = torch.div(amax, torch.full_like(amax, _GLOBAL_MAX))
    return torch.where(scale == 0, 1.0, scale)


def constants(amax: torch.Tensor, formula: Formula) -> torch.Tensor:
    """The two numbers of a tensor that enter each of its blocks (see ``Order``).

    Args:
        amax: fp32 ``[...]``, finite: reduced amaxes.
        formula: The formula.

    Returns:
        fp32 ``[..., 2]`` on the same device.
    """
    if formula.order is Order.TE:
        encode = torch.div(torch.full_like(amax, _GLOBAL_MAX), amax).clamp(max=FLT_MAX)
        return torch.stack((encode * torch.full_like(amax, 6.0).reciprocal(), encode.reciprocal()), dim=-1)
    if formula.order is Order.MODELOPT:
        decode = decode_scale(amax, formula)
        return torch.stack((decode * 6.0, decode), dim=-1)
    encode = encode_scale(amax, formula)
    return torch.stack((encode, encode), dim=-1)


def fill_(
    data: torch.Tensor,
    tensor_constants: torch.Tensor,
    formula: Formula,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Quantise one aligned box into given buffers; the inner step of ``quantize`` without its checks.

    Args:
        data: Source dtype of the formula, ``[rows, columns]``, any strides; cut at block multiples.
        tensor_constants: fp32 ``[2]`` from ``constants``, same device.
        formula: The formula.
        codes: uint8 ``[rows, columns / 2]`` to fill, or None.
        scales: uint8 ``[rows, columns / 16]`` to fill, or None.

    *Stream*: the current stream; nothing is synchronised.
    """
    assert isinstance(formula.order, Order)
    quantize_(data.detach(), tensor_constants, formula.order, formula.block[0] == BLOCK, codes, scales)


def quantize(
    data: torch.Tensor,
    amax: torch.Tensor,
    formula: Formula,
    *,
    name: str = "weight",
    box: Box | None = None,
    shape: tuple[int, ...] | None = None,
) -> Nvfp4:
    """Quantise one box of a weight.

    Args:
        data: Source dtype of the formula, ``[rows, columns]``, any device, any strides.
        amax: fp32 scalar on the same device: reduced over the whole tensor and its fused partners.
        formula: An ``nvfp4`` formula.
        name: Canonical name, for messages.
        box: Where ``data`` lies in the weight, in elements; None: it is the whole weight.
        shape: Shape of the whole weight; needed with ``box``.

    Returns:
        Codes, scales and global scale, freshly allocated on the device of ``data``.

    Raises:
        PlanError: The box cuts a block.
        NonFiniteError: amax is not finite.
        TypeError, ValueError: Another formula family, dtype or shape.

    *Stream*: the current stream, synchronised once to look at amax.
    """
    if formula.family != "nvfp4":
        raise ValueError(f"{formula.id} is no NVFP4 formula")
    if box is not None and (shape is None or box.extent != tuple(data.shape)):
        raise ValueError(f"{name}: a box of extent {box.extent} for data {tuple(data.shape)} of a whole {shape}")
    check_source(data, formula, name)
    whole = tuple(data.shape) if shape is None else shape
    check_box(box or Box((0,) * len(whole), whole), whole, formula, name)
    require_finite(float(amax), name)
    rows, columns = data.shape
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=data.device)
    scales = torch.empty((rows, columns // BLOCK), dtype=torch.uint8, device=data.device)
    fill_(data, constants(amax, formula), formula, codes, scales)
    return Nvfp4(codes, scales, decode_scale(amax, formula))


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 values of packed codes.

    Args:
        codes: uint8 ``[..., n]``.

    Returns:
        float32 ``[..., 2 n]``, low nibble first; code 8 is -0.0.
    """
    table = torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return table[nibbles.int()]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Decode: ``code * (scale * global_scale)`` in fp32, the product of scales rounded first.

    Args:
        codes: uint8 ``[rows, n / 2]``.
        scales: ``[rows, n / 16]`` e4m3, as uint8 or float8_e4m3fn.
        global_scale: fp32 scalar, decode form (the reciprocal of a compressed-tensors ``weight_global_scale``).

    Returns:
        float32 ``[rows, n]``.
    """
    s = scales.view(torch.float8_e4m3fn).float() * global_scale.reshape(())
    return (unpack(codes).unflatten(-1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(-2)
