"""What the NVFP4 kernels compute, in plain torch: the specification that every implementation must match bit for bit.

Before it in the flow: ``quant.nvfp4`` has reduced the global amax and turned it into two fp32 constants. After it:
packed codes and block scale bytes. Used for CPU tensors and wherever Triton is absent; the Triton kernels are tested
against it.

All arithmetic is IEEE fp32 with round to nearest even, subnormals kept, in exactly the written order, without
contraction. Must import nothing above kernels.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from megasync.kernels.amax import magnitude_bits

BLOCK = 16
"""Consecutive elements of the last axis that share a scale; also the rows of a two-dimensional block."""

E4M3_MAX = 448.0
FLT_MAX = torch.finfo(torch.float32).max
_CHUNK_ELEMENTS = 1 << 20  # fp32 temporaries of a chunk stay in cache; whole tensors would need 20 bytes an element


class Order(IntEnum):
    """Order of operations between a block's amax and its codes; ``c0`` and ``c1`` are the tensor's two constants.

    With ``b`` the block's amax, ``x`` an element, ``s`` the decoded scale byte:

    * ``TE``: ``s = e4m3(b * c0)``, ``y = x * min(1 / (s * c1), FLT_MAX)``; c0 = S * (1/6), c1 = 1 / S. Source:
      TransformerEngine 2.20, ``NVFP4QuantizerRef``.
    * ``MODELOPT``: ``s = e4m3(max(b / c0, 2^-9))``, 1 where ``b / c0`` is 0; ``y = x / (s * c1)``; c0 = 6 * c1, c1 the
      decode scale. Source: nvidia-modelopt 0.47, ``NVFP4QTensor``.
    * ``COMPRESSED``: ``s = e4m3(c0 * src(b / 6))``, 0.125 where that is 0; ``y = x / (s / c1)``; c0 = c1 = the encode
      scale; ``src`` rounds to the source's dtype. Source: compressed-tensors 0.20 with llm-compressor 0.14's min-max
      observer.

    ``e4m3`` rounds to nearest even and saturates at 448. A divisor that underflows to 0 counts as 1.
    """

    TE = 0
    MODELOPT = 1
    COMPRESSED = 2


def e2m1_codes(y: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 value, ties to even, saturating; zero is always code 0, whatever its sign.

    Args:
        y: float32, any shape, finite or infinite.

    Returns:
        uint8 of the same shape: bit 3 the sign, bits 0 to 2 the index in 0, .5, 1, 1.5, 2, 3, 4, 6. A negative that
        rounds to zero keeps its sign (code 8).
    """
    a = y.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    return code.bitwise_or_((y < 0).to(torch.uint8) << 3)


def block_amax(x: torch.Tensor, two_d: bool) -> torch.Tensor:
    """Largest magnitude of each block.

    Args:
        x: bfloat16 or float32 ``[rows, 16 n]``, finite.
        two_d: Blocks are 16 x 16, counted from row 0, the last one shorter; else 1 x 16.

    Returns:
        fp32 ``[rows, n]``; for ``two_d`` each value is repeated for the rows of its block.
    """
    rows = x.shape[0]
    b = magnitude_bits(x).unflatten(1, (-1, BLOCK)).amax(dim=2).view(x.dtype).float()
    if not two_d:
        return b
    short = -rows % BLOCK
    padded = torch.nn.functional.pad(b, (0, 0, 0, short)) if short else b
    tops = padded.unflatten(0, (-1, BLOCK)).amax(dim=1)
    return tops.repeat_interleave(BLOCK, dim=0)[:rows]


def scale_bytes(b: torch.Tensor, constants: torch.Tensor, order: Order, source: torch.dtype) -> torch.Tensor:
    """Block scales from block amaxes, as float8_e4m3fn of the same shape.

    Args:
        b: fp32 block amaxes, any shape, finite.
        constants: fp32 ``[2]``, see ``Order``.
        order: Order of operations.
        source: dtype of the weights.
    """
    c0 = constants[0]
    if order is Order.TE:
        v = b * c0
    elif order is Order.MODELOPT:
        v = b / c0
        v = torch.where(v == 0, 1.0, v).clamp(min=2.0**-9)
    else:
        # A tensor, not the number 6: torch on CUDA turns division by a number into a product with its reciprocal.
        six = torch.full((), 6.0, dtype=torch.float32, device=b.device)
        v = c0 * torch.div(b, six).to(source).float()
    s = v.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    if order is Order.COMPRESSED:
        raw = s.view(torch.uint8)
        s = torch.where(raw == 0, 0x20, raw).to(torch.uint8).view(torch.float8_e4m3fn)
    return s


def quantize_reference_(
    x: torch.Tensor,
    constants: torch.Tensor,
    order: Order,
    two_d: bool,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Quantise one box; what ``kernels.nvfp4.quantize_`` computes.

    Args:
        x: bfloat16 or float32 ``[rows, 16 n]``, finite, any device, any strides.
        constants: fp32 ``[2]`` on the same device, see ``Order``.
        order: Order of operations.
        two_d: 16 x 16 blocks counted from row 0 of the box, else 1 x 16.
        codes: uint8 ``[rows, 8 n]`` to fill: element 2i in the low nibble, 2i + 1 in the high one. None: not wanted.
        scales: uint8 ``[rows, n]`` to fill with e4m3 bytes. None: not wanted.
    """
    rows, columns = x.shape
    step = max(BLOCK, _CHUNK_ELEMENTS // max(columns, 1) // BLOCK * BLOCK)
    for start in range(0, rows, step):
        part = x[start : start + step]
        s = scale_bytes(block_amax(part, two_d), constants, order, x.dtype)
        if scales is not None:
            scales[start : start + step] = s.view(torch.uint8)
        if codes is None:
            continue
        blocks = part.float().unflatten(1, (-1, BLOCK))
        if order is Order.TE:
            factor = (1.0 / (s.float() * constants[1])).clamp(max=FLT_MAX)
            y = blocks * factor.unsqueeze(2)
        else:
            d = s.float() * constants[1] if order is Order.MODELOPT else s.float() / constants[1]
            y = blocks / torch.where(d == 0, 1.0, d).unsqueeze(2)
        pairs = e2m1_codes(y).flatten(1)
        codes[start : start + step] = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
