"""The two passes over everything that a rank quantises: amaxes of its regions, then their codes, scales and global scales.

Made once from the owned regions, run at every publication with the exchange of amaxes between the passes. NVFP4 regions go
as batches, one launch a pass and formula; FP8 regions one by one. Comes after the ownership plan, driven by
``trainer.quantised``. Must import nothing above kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.kernels.nvfp4 import amax_
from megasync.kernels.nvfp4_batch import Batch, Region
from megasync.kernels.nvfp4_reference import BLOCK, Order
from megasync.quant import fp8, nvfp4
from megasync.quant.formulas import Formula


@dataclass(slots=True)
class Job:
    """A region of a weight that this rank quantises.

    Attributes:
        formula: How.
        slot: Index of its atomic group in the exchange.
        data: Source dtype of the formula ``[rows, columns]``, live memory cut at block multiples, any strides.
        codes: uint8 buffer of its codes, or None where another rank owns them. Regions with codes make up the amax, so
            that each weight enters it on one rank.
        scales: Buffer of its block scales (uint8 for NVFP4, fp32 for FP8), or None.
        e8m0: uint8 buffer that takes the exponents of ``scales``, where the checkpoint stores those.
    """

    formula: Formula
    slot: int
    data: torch.Tensor
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    e8m0: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScalarJob:
    """A global scale that this rank owns.

    Attributes:
        formula: How its weight is quantised.
        slot: Index of its atomic group in the exchange.
        out: fp32 buffer of one element.
        reciprocal: It encodes (compressed-tensors) rather than decodes.
    """

    formula: Formula
    slot: int
    out: torch.Tensor
    reciprocal: bool


class Passes:
    """Both passes over fixed regions.

    Args:
        jobs: The regions.
        scalars: The global scales.
        num_slots: Atomic groups of the run.
        device: Where the weights are.
    """

    def __init__(
        self, jobs: Sequence[Job], scalars: Sequence[ScalarJob], num_slots: int, device: torch.device | str
    ) -> None:
        self._scalars = list(scalars)
        self._fp8 = [j for j in jobs if j.formula.family == "fp8"]
        self._values = torch.zeros(num_slots, dtype=torch.float32, device=device)
        by_formula: dict[Formula, list[Region]] = {}
        for j in jobs:
            if j.formula.family == "nvfp4":
                region = Region(j.data.detach(), j.slot, j.codes, j.scales)
                by_formula.setdefault(j.formula, []).append(region)
        self._batches: dict[Formula, Batch] = {}
        for f, regions in by_formula.items():
            assert isinstance(f.order, Order)
            self._batches[f] = Batch(regions, f.order, f.block[0] == BLOCK)

    def amax(self) -> torch.Tensor:
        """First pass.

        Returns:
            float32 ``[num_slots]``: largest magnitude of the regions with codes of each atomic group, 0 where there is
            none, NaN or +inf where an element is not finite. Reused by the next call.

        *Stream*: the current stream; nothing is synchronised.
        """
        self._values.zero_()
        for batch in self._batches.values():
            batch.amax_(self._values)
        for j in self._fp8:
            if j.codes is not None:
                amax_(j.data.detach(), self._values[j.slot])
        return self._values

    def fill(self, amaxes: torch.Tensor) -> None:
        """Second pass: fill every buffer.

        Args:
            amaxes: float32 ``[num_slots]``, reduced over all ranks, finite, on the weights' device.

        *Stream*: the current stream; nothing is synchronised.
        """
        for f, batch in self._batches.items():
            batch.quantize_(nvfp4.constants(amaxes, f).contiguous())
        for j in self._fp8:
            fp8.fill_(j.data, j.formula, amaxes[j.slot], j.codes, j.scales)
            if j.e8m0 is not None and j.scales is not None:
                j.e8m0.copy_(fp8.e8m0_bytes(j.scales))
        for s in self._scalars:
            s.out.copy_(_global_scale(amaxes[s.slot], s.formula, s.reciprocal))


def _global_scale(amax: torch.Tensor, f: Formula, reciprocal: bool) -> torch.Tensor:
    if f.family == "fp8":
        return fp8.scale_and_factor(amax, f)[0]
    return nvfp4.encode_scale(amax, f) if reciprocal else nvfp4.decode_scale(amax, f)
