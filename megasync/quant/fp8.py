"""FP8 (e4m3) from boxes of a weight, bit-exact: per 128 x 128 block, per output row or per tensor.

Block and row formulas need nothing from other ranks; tensor formulas take the amax reduced over all owners and fused
partners, like NVFP4. Rounding is to nearest even, saturating at 448; -0.0 keeps its sign; every scale is finite and
positive, of an all-zero block too, so nothing decodes to NaN. Must import nothing above kernels.

Next to the top of fp32, a power-of-two scale (``fp8/deepgemm-128-ue8m0``, ``fp8/te-128-pow2``) does not decode to a finite
number: weights from 31/32 of 2^128 (about 3.297e38) on meet the scale 2^120, their code rounds up to 256, and 256 * 2^120
passes the largest fp32. The published formulas do the same.

Divisions are IEEE divisions. Libraries that run the same order on a GPU through torch with a number as divisor
compute a product with its reciprocal instead, which can differ in the last bit of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megasync.kernels import fp8_reference as reference
from megasync.kernels.fp8_batch import Batch, Region
from megasync.kernels.fp8_reference import Fp8Order, ceil_power_of_two, e8m0_bytes
from megasync.quant.blocks import check_box, check_source, require_finite
from megasync.quant.formulas import Formula
from megasync.types import Box

__all__ = [
    "Fp8",
    "ceil_power_of_two",
    "constants",
    "dequantize",
    "e8m0_bytes",
    "e8m0_values",
    "fill_",
    "quantize",
    "scale_and_factor",
]


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


def scale_and_factor(a: torch.Tensor, formula: Formula) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode scale of each amax, and what the weights meet: a factor, or a divisor for the ``DIVIDE`` order.

    Args:
        a: fp32, any shape, finite and not negative.
        formula: An ``fp8`` formula.

    Returns:
        Two fp32 tensors of the same shape, finite and positive.
    """
    assert isinstance(formula.order, Fp8Order)
    return reference.scale_and_factor(a, formula.order, formula.pow2)


def constants(amax: torch.Tensor, formula: Formula) -> torch.Tensor:
    """Scale and factor of whole tensors, as the quantising pass takes them.

    Args:
        amax: fp32 ``[...]``, finite: reduced amaxes.
        formula: An ``fp8`` formula per tensor.

    Returns:
        fp32 ``[..., 2]`` on the same device.
    """
    return torch.stack(scale_and_factor(amax, formula), dim=-1)


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
    assert isinstance(formula.order, Fp8Order)
    whole = None
    if not formula.block[0]:
        assert amax is not None
        whole = constants(amax.reshape(1), formula)
        if scales is not None:
            scales.copy_(whole[0, 0].reshape(scales.shape))
    region = Region(data.detach(), 0, codes, scales if whole is None else None)
    Batch([region], formula.block, formula.order, formula.pow2).quantize_(whole)


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
        float32 ``[rows, columns]``; infinite where ``code * scale`` passes the largest fp32, as power-of-two scales of
        weights from about 3.297e38 on do (module docstring).
    """
    values = codes.view(torch.float8_e4m3fn).float()
    return values * (reference.spread(scales, formula.block, values.shape) if formula.block[0] else scales)
