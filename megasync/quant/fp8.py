"""FP8 (e4m3) from boxes of a weight, bit-exact: per 128 x 128 block, per output row or per tensor.

Block and row formulas need nothing from other ranks; tensor formulas take the amax reduced over all owners and fused
partners, like NVFP4. Rounding is to nearest even, saturating at 448; -0.0 keeps its sign; every scale is finite and
positive, of an all-zero block too, so nothing decodes to NaN. Must import nothing above kernels.

Divisions are IEEE divisions. Libraries that run the same order on a GPU through torch with a number as divisor
compute a product with its reciprocal instead, which can differ in the last bit of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from megasync.kernels.nvfp4_reference import E4M3_MAX, FLT_MAX
from megasync.quant.blocks import check_box, check_source, require_finite
from megasync.quant.formulas import Formula, Fp8Order
from megasync.types import Box

_DEEPGEMM_FLOOR = 1e-4
_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Fp8:
    """A quantised box.

    Attributes:
        codes: uint8 ``[rows, columns]``, e4m3 bytes.
        scales: fp32, decode form (``value = code * scale``): ``[ceil(rows / 128), ceil(columns / 128)]`` per block,
            ``[rows, 1]`` per row, ``[]`` per tensor.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def block_amax(data: torch.Tensor, formula: Formula) -> torch.Tensor:
    """Largest magnitude of each block or row of a box.

    Args:
        data: bfloat16 or float32 ``[rows, columns]``, any strides.
        formula: An ``fp8`` formula per block or per row.

    Returns:
        fp32 ``[blocks of rows, blocks of columns]``; not finite where an element is not finite.
    """
    height, width = formula.block
    if not width:
        return data.abs().amax(dim=1, keepdim=True).float()
    rows, columns = data.shape
    padded = pad(data.abs(), (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax(dim=(1, 3)).float()


def scale_and_factor(a: torch.Tensor, formula: Formula) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode scale of each amax, and what the weights meet: a factor, or a divisor for the ``DIVIDE`` order.

    Args:
        a: fp32, any shape, finite and not negative.
        formula: An ``fp8`` formula.

    Returns:
        Two fp32 tensors of the same shape, finite and positive.
    """
    # Tensors as divisors and dividends: with a number torch may multiply by a reciprocal instead, which rounds twice.
    top = torch.full_like(a, E4M3_MAX)
    if formula.order is Fp8Order.TE:
        factor = torch.div(top, a).clamp(max=FLT_MAX)
        factor = torch.where(a == 0, 1.0, factor)
        if formula.pow2:
            factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
        return factor.reciprocal(), factor
    if formula.order is Fp8Order.DEEPGEMM:
        scale = torch.div(a.clamp(min=_DEEPGEMM_FLOOR), top)
        if formula.pow2:
            scale = ceil_power_of_two(scale)
        return scale, scale.reciprocal()
    scale = torch.div(a, top)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale, scale


def ceil_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below each scale, by bits (ue8m0 range 2^-126 to 2^127).

    Args:
        scale: fp32, any shape, finite and positive.

    Returns:
        fp32 of the same shape.
    """
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & _MANTISSA) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def e8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Bytes of power-of-two scales as ``F8_E8M0`` checkpoints store them: the biased exponent.

    Args:
        scale: fp32, any shape, powers of two from 2^-127 to 2^127, as the ue8m0 and pow2 formulas make them.

    Returns:
        uint8 of the same shape.
    """
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def e8m0_values(raw: torch.Tensor) -> torch.Tensor:
    """Scales from ``F8_E8M0`` bytes.

    Args:
        raw: uint8, any shape, 0 to 254.

    Returns:
        fp32 of the same shape.
    """
    bits = torch.where(raw == 0, 1 << 22, raw.to(torch.int32) << 23)  # 2^-127 is subnormal in fp32
    return bits.to(torch.int32).view(torch.float32)


def fill_(
    data: torch.Tensor,
    formula: Formula,
    amax: torch.Tensor | None,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Quantise one aligned box into given buffers; the inner step of ``quantize`` without its checks.

    Args:
        data: Source dtype of the formula, ``[rows, columns]``, any strides; cut at block multiples.
        formula: An ``fp8`` formula.
        amax: fp32 scalar on the same device for tensor formulas, else ignored.
        codes: uint8 ``[rows, columns]`` to fill, or None.
        scales: fp32 of the shape in ``Fp8`` to fill, or None.

    *Stream*: the current stream; nothing is synchronised.
    """
    data = data.detach()
    rows, columns = data.shape
    height = formula.block[0]
    whole = None
    if formula.block == (0, 0):
        assert amax is not None
        whole = scale_and_factor(amax.reshape(()), formula)
        if scales is not None:
            scales.copy_(whole[0].reshape(scales.shape))
        if codes is None:
            return
    step = _CHUNK_ELEMENTS // max(columns, 1) // 128 * 128 or 128
    for start in range(0, rows, step):
        part = data[start : start + step]
        if whole is None:
            scale, factor = scale_and_factor(block_amax(part, formula), formula)
            if scales is not None:
                first = start // height
                scales[first : first + scale.shape[0]] = scale
            factor = _spread(factor, formula.block, part.shape)
        else:
            factor = whole[1]
        if codes is not None:
            y = torch.div(part.float(), factor) if formula.order is Fp8Order.DIVIDE else part.float() * factor
            e4m3 = y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            codes[start : start + step] = e4m3.view(torch.uint8)


def quantize(
    data: torch.Tensor,
    formula: Formula,
    *,
    amax: torch.Tensor | None = None,
    name: str = "weight",
    box: Box | None = None,
    shape: tuple[int, ...] | None = None,
) -> Fp8:
    """Quantise one box of a weight.

    Args:
        data: Source dtype of the formula, ``[rows, columns]``, any device, any strides.
        formula: An ``fp8`` formula.
        amax: fp32 scalar on the same device, reduced over the whole tensor and its fused partners; needed by tensor
            formulas only.
        name: Canonical name, for messages.
        box: Where ``data`` lies in the weight; None: it is the whole weight.
        shape: Shape of the whole weight; needed with ``box``.

    Returns:
        Codes and scales, freshly allocated on the device of ``data``.

    Raises:
        PlanError: The box cuts a block (a row, for the row formula).
        NonFiniteError: NaN or infinity among the weights.
        TypeError, ValueError: Another formula family, dtype or shape, or no amax for a tensor formula.

    *Stream*: the current stream, synchronised once to look for NaN and infinity.
    """
    if formula.family != "fp8":
        raise ValueError(f"{formula.id} is no FP8 formula")
    if formula.needs_amax and amax is None:
        raise ValueError(f"{name}: {formula.id} needs the reduced amax")
    if box is not None and (shape is None or box.extent != tuple(data.shape)):
        raise ValueError(f"{name}: a box of extent {box.extent} for data {tuple(data.shape)} of a whole {shape}")
    check_source(data, formula, name)
    data = data.detach()
    whole = tuple(data.shape) if shape is None else shape
    check_box(box or Box((0,) * len(whole), whole), whole, formula, name)
    if data.numel():
        require_finite(float(data.abs().amax() if amax is None else amax), name)
    rows, columns = data.shape
    height, width = formula.block
    extents = () if not height else (-(-rows // height), -(-columns // width) if width else 1)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=data.device)
    scales = torch.empty(extents, dtype=torch.float32, device=data.device)
    fill_(data, formula, amax, codes, scales)
    return Fp8(codes, scales)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, formula: Formula) -> torch.Tensor:
    """Decode: ``code * scale`` in fp32.

    Args:
        codes: ``[rows, columns]`` e4m3, as uint8 or float8_e4m3fn.
        scales: fp32 of the shape in ``Fp8``.
        formula: The ``fp8`` formula, for its granularity.

    Returns:
        float32 ``[rows, columns]``.
    """
    values = codes.view(torch.float8_e4m3fn).float()
    return values * (_spread(scales, formula.block, values.shape) if formula.block[0] else scales)


def _spread(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """One value per element from one per block (rows broadcast instead)."""
    height, width = block
    if not width:
        return blocks
    return blocks.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]
