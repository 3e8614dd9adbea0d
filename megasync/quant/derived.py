"""Value transforms of quantised weights that engines make after loading: exact, deterministic, ready for a derivation.

An engine adapter names one of these as ``derive`` of a receiver ``Derivation``; the receiver then keeps the canonical bytes of
the inputs, XORs those, and derives the live tensors again in the pause. Every function here gives equal bytes for equal inputs
on one device type, reads nothing but its inputs and writes nothing. Fused parts whose scales differ are handled as parts or
refused by name; no part's scale is ever taken for another's. Must import nothing above quant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megasync.errors import PlanError
from megasync.kernels.nvfp4_reference import E4M3_MAX
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import formula

Tensors = Mapping[str, torch.Tensor]
Derive = Callable[[Tensors], dict[str, torch.Tensor]]


def global_scale_product(
    parts: Sequence[str], inputs: Sequence[str], live: str, *, encodes: bool = False, as_pair: bool = False
) -> Derive:
    """The alphas of a fused NVFP4 or FP8 product: input scale x weight scale, in fp32.

    Args:
        parts: Canonical global scales of the fused parts (gate and up; q, k and v; one where nothing is fused), F32 scalars.
        inputs: Canonical activation scales, whose largest counts; none: 1.
        live: Live name of the alphas.
        encodes: The checkpoint's scales encode (compressed-tensors), so their reciprocals decode.
        as_pair: The engine keeps one alpha a part: float32 ``[len(parts)]``. Else it keeps one for all, float32 ``[1]``.

    Returns:
        The transform. It raises PlanError, naming the parts, where one alpha must do for parts whose scales differ: before
        anything is touched at join, and undone where a later version brings it.
    """

    def derive(x: Tensors) -> dict[str, torch.Tensor]:
        scales = torch.stack([_decoding(x[n], encodes) for n in parts])
        if not as_pair and bool((scales != scales[0]).any()):
            listed = ", ".join(f"{n} = {float(s):.9g}" for n, s in zip(parts, scales, strict=True))
            raise PlanError(
                f"{live} is one factor for parts with different global scales: {listed}; let the trainer share one amax "
                "over fused parts, or use an engine path that keeps one factor a part"
            )
        activations = [_decoding(x[n], encodes) for n in inputs]
        factor = torch.stack(activations).amax() if activations else torch.ones_like(scales[0])
        return {live: (scales if as_pair else scales[:1]) * factor}

    return derive


def reciprocal_of_largest(names: Sequence[str], live: str) -> Derive:
    """One over the largest of some scales, as engines keep activation scales: float32 ``[1]``.

    Args:
        names: Canonical scales, F32 scalars.
        live: Live name.
    """

    def derive(x: Tensors) -> dict[str, torch.Tensor]:
        return {live: torch.stack([x[n].reshape(()).float() for n in names]).amax().reciprocal().reshape(1)}

    return derive


def requantised_to_largest(codes: Sequence[str], scales: Sequence[str], live: str, live_scale: str) -> Derive:
    """Per-tensor FP8 parts of a fused matrix, brought to one scale: the largest, so that nothing saturates.

    A part whose scale is the largest keeps its codes. The others are decoded and divided by the largest scale, rounded to
    nearest even (``fp8/tensor``'s rounding).

    Args:
        codes: Canonical codes of the parts, uint8 or float8_e4m3fn ``[rows, columns]``, equal columns.
        scales: Their F32 scales.
        live: Live name of the fused codes: float8_e4m3fn ``[all rows, columns]``.
        live_scale: Live name of the scale: float32 ``[1]``.
    """

    def derive(x: Tensors) -> dict[str, torch.Tensor]:
        own = [x[n].reshape(()).float() for n in scales]
        top = torch.stack(own).amax()
        out = []
        for name, scale in zip(codes, own, strict=True):
            part = x[name].view(torch.float8_e4m3fn)
            again = torch.div(part.float() * scale, top).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            same = (scale == top).expand(part.shape)
            out.append(torch.where(same, part.view(torch.uint8), again.view(torch.uint8)))
        return {live: torch.cat(out).view(torch.float8_e4m3fn), live_scale: top.reshape(1)}

    return derive


def absorbed_key_value(
    weight: str,
    live_key: str,
    live_value: str,
    *,
    num_heads: int,
    key_rows: int,
    value_rows: int,
    dtype: torch.dtype = torch.bfloat16,
    block_scales: str | None = None,
) -> Derive:
    """The two halves of a latent attention's ``kv_b_proj`` that engines absorb into the query and output projections.

    Args:
        weight: Canonical ``kv_b_proj``, ``[num_heads * (key_rows + value_rows), rank]``: BF16, or FP8 codes with
            ``block_scales``.
        live_key: Live name of ``w_kc``, ``[num_heads, key_rows, rank]``.
        live_value: Live name of ``w_vc``, ``[num_heads, rank, value_rows]``.
        num_heads: Heads of this rank.
        key_rows: Rows of a head without rotary part.
        value_rows: Rows of a head's values.
        dtype: Live dtype.
        block_scales: Canonical ``weight_scale_inv`` of 128 x 128 blocks, F32.
    """

    def derive(x: Tensors) -> dict[str, torch.Tensor]:
        w = x[weight]
        if block_scales is not None:
            w = fp8.dequantize(w, x[block_scales], formula("fp8/deepgemm-128"))
        heads = w.to(dtype).view(num_heads, key_rows + value_rows, -1)
        return {
            live_key: heads[:, :key_rows].contiguous(),
            live_value: heads[:, key_rows:].transpose(1, 2).contiguous(),
        }

    return derive


def dequantised_nvfp4(codes: str, scales: str, global_scale: str, live: str, *, encodes: bool = False) -> Derive:
    """An NVFP4 weight as BF16, where an engine has no kernel for it.

    Args:
        codes: Canonical codes, uint8 ``[rows, columns / 2]``.
        scales: Canonical block scales.
        global_scale: Canonical global scale.
        live: Live name: bfloat16 ``[rows, columns]``.
        encodes: The global scale encodes (compressed-tensors).
    """

    def derive(x: Tensors) -> dict[str, torch.Tensor]:
        scale = _decoding(x[global_scale], encodes)
        return {live: nvfp4.dequantize(x[codes], x[scales], scale).to(torch.bfloat16)}

    return derive


def _decoding(scale: torch.Tensor, encodes: bool) -> torch.Tensor:
    value = scale.reshape(()).float()
    return value.reciprocal() if encodes else value
