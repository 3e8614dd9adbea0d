"""Checks shared by all quantisation formulas: boxes cut at block multiples, finite weights, the right source dtype.

Called by ``quant.nvfp4``, ``quant.fp8`` and ``quant.checkpoint`` before anything is computed. Must import nothing above
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch

from megasync.errors import NonFiniteError, PlanError
from megasync.quant.formulas import Formula
from megasync.types import Box


def check_shape(shape: Sequence[int], formula: Formula, name: str) -> None:
    """Refuse a weight that a formula cannot hold.

    Args:
        shape: Whole shape of the weight, in elements.
        formula: The formula.
        name: Canonical name, for the message.

    Raises:
        PlanError: Not a matrix, or for NVFP4 a last axis that is no multiple of 16.
    """
    if len(shape) != 2:
        raise PlanError(
            f"{name} has shape {tuple(shape)}: {formula.id} quantises matrices; split it or leave it unquantised"
        )
    if formula.family == "nvfp4" and shape[1] % formula.block[1]:
        raise PlanError(
            f"{name} has {shape[1]} columns: {formula.id} needs a multiple of {formula.block[1]}; leave it unquantised"
        )


def check_box(box: Box, shape: Sequence[int], formula: Formula, name: str) -> None:
    """Refuse a box whose edges cut a block: its bytes would depend on elements outside.

    Args:
        box: A box of the weight, in elements.
        shape: Whole shape of the weight.
        formula: The formula.
        name: Canonical name, for the message.

    Raises:
        PlanError: Naming tensor, box and block, and saying what to do.
    """
    check_shape(shape, formula, name)
    for axis, (start, extent, whole, size) in enumerate(zip(box.start, box.extent, shape, formula.block, strict=True)):
        block = size or whole
        # A tensor-wide scale is known before, so a box may be cut anywhere; a row-wide one needs the whole row.
        if formula.block == (0, 0) or not whole:
            continue
        stop = start + extent
        if start % block or (stop % block and stop != whole) or stop > whole:
            raise PlanError(
                f"box {list(box.start)}+{list(box.extent)} of {name} {list(shape)} cuts blocks of {block} on axis "
                f"{axis} ({formula.id}); cut the trainer's shards at multiples of {block}, or leave it unquantised"
            )


def check_source(data: torch.Tensor, formula: Formula, name: str) -> None:
    """Refuse values of another dtype than the formula's source.

    Args:
        data: A box of the weight.
        formula: The formula.
        name: Canonical name, for the message.

    Raises:
        TypeError: Another dtype (quantising fp32 masters gives other bytes than quantising their bfloat16).
    """
    if data.dtype is not formula.torch_source:
        raise TypeError(
            f"{name} is {data.dtype}: {formula.id} quantises {formula.torch_source}; fp32 masters need the +f32 formula"
        )


def require_finite(amax: float, names: str) -> None:
    """Refuse NaN and infinity: no formula has a code for them and an engine would multiply them into everything.

    Args:
        amax: Reduced largest magnitude; +inf or NaN where any rank met NaN or infinity.
        names: Tensor or tensors that it covers, for the message.

    Raises:
        NonFiniteError: Naming the tensors.
    """
    if not isfinite(amax):
        raise NonFiniteError(
            f"{names}: NaN or infinity among the weights, so it cannot be quantised; nothing was published, skip the "
            "step or restore the trainer"
        )
