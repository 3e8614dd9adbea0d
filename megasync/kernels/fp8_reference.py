"""What the FP8 kernels compute, in plain torch: the specification that every implementation must match bit for bit.

Before it in the flow: ``quant.fp8`` has checked the box and, for scales of whole tensors, the amax is reduced. After it: e4m3
bytes and decode scales. Used for CPU tensors and wherever Triton is absent. All arithmetic is IEEE fp32 with round to
nearest even, subnormals kept, in exactly the written order. Must import nothing above kernels.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch.nn.functional import pad

from megasync.kernels.nvfp4_reference import E4M3_MAX, FLT_MAX

DEEPGEMM_FLOOR = 1e-4
_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000
_CHUNK_ELEMENTS = 1 << 20


class Fp8Order(Enum):
    """Order of operations of the FP8 formulas; ``a`` is the amax of the block, row or tensor.

    * ``DEEPGEMM``: scale = max(a, 1e-4) / 448, rounded up to a power of two for power-of-two scales; code =
      e4m3(x * (1 / scale)).
    * ``TE``: f = 448 / a (1 where a is 0, FLT_MAX where that overflows), its mantissa cleared for power-of-two scales;
      scale = 1 / f, code = e4m3(x * f).
    * ``DIVIDE``: scale = a / 448 (1 where that is 0), code = e4m3(x / scale).

    ``e4m3`` rounds to nearest even, saturates at 448 and keeps the sign of zero.
    """

    DEEPGEMM = "deepgemm"
    TE = "te"
    DIVIDE = "divide"


def block_amax(data: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block or row of a box.

    Args:
        data: bfloat16 or float32 ``[rows, columns]``, any strides.
        block: Rows and columns of a block; 0 columns: whole rows.

    Returns:
        fp32 ``[blocks of rows, blocks of columns]``; not finite where an element is not finite.
    """
    height, width = block
    if not width:
        return data.abs().amax(dim=1, keepdim=True).float()
    rows, columns = data.shape
    padded = pad(data.abs(), (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax(dim=(1, 3)).float()


def scale_and_factor(a: torch.Tensor, order: Fp8Order, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode scale of each amax, and what the weights meet: a factor, or a divisor for the ``DIVIDE`` order.

    Args:
        a: fp32, any shape, finite and not negative.
        order: Order of operations.
        pow2: Scales are powers of two.

    Returns:
        Two fp32 tensors of the same shape, finite and positive.
    """
    # Tensors as divisors and dividends: with a number torch may multiply by a reciprocal instead, which rounds twice.
    top = torch.full_like(a, E4M3_MAX)
    if order is Fp8Order.TE:
        factor = torch.div(top, a).clamp(max=FLT_MAX)
        factor = torch.where(a == 0, 1.0, factor)
        if pow2:
            factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
        return factor.reciprocal(), factor
    if order is Fp8Order.DEEPGEMM:
        scale = torch.div(a.clamp(min=DEEPGEMM_FLOOR), top)
        if pow2:
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


def quantize_reference_(
    data: torch.Tensor,
    block: tuple[int, int],
    order: Fp8Order,
    pow2: bool,
    constants: torch.Tensor | None,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    e8m0: torch.Tensor | None = None,
) -> None:
    """Quantise one box cut at block multiples; what ``fp8_batch`` computes.

    Args:
        data: bfloat16 or float32 ``[rows, columns]``, finite, any device, any strides.
        block: Rows and columns that share a scale; 0 means all of that axis.
        order: Order of operations.
        pow2: Scales are powers of two.
        constants: fp32 ``[2]``, scale and factor of the whole tensor, where that is what shares a scale.
        codes: uint8 ``[rows, columns]`` to fill with e4m3 bytes. None: not wanted.
        scales: fp32 to fill with decode scales: one a block or row, or the tensor's. None: not wanted.
        e8m0: uint8 of the shape of ``scales``, to fill with the exponents of power-of-two scales. None: not wanted.
    """
    rows, columns = data.shape
    height = block[0]
    if not height:
        assert constants is not None
        if scales is not None:
            scales.copy_(constants[0].reshape(scales.shape))
    step = _CHUNK_ELEMENTS // max(columns, 1) // 128 * 128 or 128
    for start in range(0, rows, step):
        part = data[start : start + step]
        if height:
            scale, factor = scale_and_factor(block_amax(part, block), order, pow2)
            first = start // height
            if scales is not None:
                scales[first : first + scale.shape[0]] = scale
            if e8m0 is not None:
                e8m0[first : first + scale.shape[0]] = e8m0_bytes(scale)
            factor = spread(factor, block, part.shape)
        else:
            assert constants is not None
            factor = constants[1]
        if codes is not None:
            y = torch.div(part.float(), factor) if order is Fp8Order.DIVIDE else part.float() * factor
            e4m3 = y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            codes[start : start + step] = e4m3.view(torch.uint8)


def spread(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """One value per element from one per block (rows broadcast instead)."""
    height, width = block
    if not width:
        return blocks
    return blocks.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]
