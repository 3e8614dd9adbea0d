"""The two passes over everything that a rank quantises: amaxes of its regions, then their codes, scales and global scales.

Made once from the owned regions, run at every publication with the exchange of amaxes between the passes. All regions go in
one launch a pass and formula, and all global scales of a formula in one. Comes after the ownership plan (``quant.jobs``
makes the regions), driven by ``trainer.quantised``. Must import nothing above kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.kernels import fp8_batch, nvfp4_batch
from megasync.kernels.amax import AmaxBatch
from megasync.kernels.fp8_reference import Fp8Order
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
        e8m0: uint8 buffer of its block scales where the checkpoint stores exponents, or None.
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


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Bytes that the passes move through memory, each element counted once a pass.

    Attributes:
        amax_read: Read by the amax pass.
        quantise_read: Read by the quantising pass.
        quantise_written: Written by it, global scales included.
    """

    amax_read: int
    quantise_read: int
    quantise_written: int


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
        self._values = torch.zeros(num_slots, dtype=torch.float32, device=device)
        # FP8 scales of blocks and rows need no amax of the whole, but NaN must be seen before a buffer is written.
        self._amax = AmaxBatch([(j.data, j.slot) for j in jobs if j.codes is not None])
        by_formula: dict[Formula, list[Job]] = {}
        for j in jobs:
            by_formula.setdefault(j.formula, []).append(j)
        self._nvfp4: dict[Formula, nvfp4_batch.Batch] = {}
        self._fp8: dict[Formula, fp8_batch.Batch] = {}
        for f, mine in by_formula.items():
            if isinstance(f.order, Order):
                regions = [nvfp4_batch.Region(j.data.detach(), j.slot, j.codes, j.scales) for j in mine]
                self._nvfp4[f] = nvfp4_batch.Batch(regions, f.order, f.block[0] == BLOCK)
            else:
                assert isinstance(f.order, Fp8Order)
                parts = [fp8_batch.Region(j.data.detach(), j.slot, j.codes, j.scales, j.e8m0) for j in mine]
                self._fp8[f] = fp8_batch.Batch(parts, f.block, f.order, f.pow2)
        kinds: dict[tuple[Formula, bool, int], list[ScalarJob]] = {}
        for s in scalars:
            kinds.setdefault((s.formula, s.reciprocal, s.out.untyped_storage().data_ptr()), []).append(s)
        self._scales = [_Scales.of(mine) for mine in kinds.values()]

    @property
    def nbytes(self) -> PassBytes:
        """Bytes that the passes move."""
        moved = [b.nbytes for b in self._nvfp4.values()] + [b.nbytes for b in self._fp8.values()]
        scalars = sum(4 * len(s.slots) for s in self._scales)
        return PassBytes(self._amax.nbytes, sum(r for r, _ in moved), sum(w for _, w in moved) + scalars)

    def amax(self) -> torch.Tensor:
        """First pass.

        Returns:
            float32 ``[num_slots]``: largest magnitude of the regions with codes of each atomic group, 0 where there is
            none, NaN or +inf where an element is not finite. Reused by the next call.

        *Stream*: the current stream; nothing is synchronised.
        """
        self._values.zero_()
        self._amax.raise_(self._values)
        return self._values

    def fill(self, amaxes: torch.Tensor) -> None:
        """Second pass: fill every buffer.

        Args:
            amaxes: float32 ``[num_slots]``, reduced over all ranks, finite, on the weights' device.

        *Stream*: the current stream; nothing is synchronised.
        """
        for f, batch in self._nvfp4.items():
            batch.quantize_(nvfp4.constants(amaxes, f).contiguous())
        for f, parts in self._fp8.items():
            parts.quantize_(fp8.constants(amaxes, f).contiguous() if f.needs_amax else None)
        for s in self._scales:
            s.memory[s.places] = s.made_from(amaxes)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Global scales of one formula in one arena, written by one launch: a rank may own thousands.

    Attributes:
        formula: How their weights are quantised.
        reciprocal: They encode rather than decode.
        slots: int64, device: their slots in the exchange.
        places: int64, device: where they lie in ``memory``.
        memory: fp32 ``[n]``, the arena.
    """

    formula: Formula
    reciprocal: bool
    slots: torch.Tensor
    places: torch.Tensor
    memory: torch.Tensor

    @staticmethod
    def of(jobs: Sequence[ScalarJob]) -> _Scales:
        first = jobs[0]
        memory = first.out.as_strided((first.out.untyped_storage().nbytes() // 4,), (1,), 0)
        slots = torch.tensor([j.slot for j in jobs], device=first.out.device)
        places = torch.tensor([j.out.storage_offset() for j in jobs], device=first.out.device)
        return _Scales(first.formula, first.reciprocal, slots, places, memory)

    def made_from(self, amaxes: torch.Tensor) -> torch.Tensor:
        chosen = amaxes[self.slots]
        if self.formula.family == "fp8":
            return fp8.scale_and_factor(chosen, self.formula)[0]
        if self.reciprocal:
            return nvfp4.encode_scale(chosen, self.formula)
        return nvfp4.decode_scale(chosen, self.formula)
