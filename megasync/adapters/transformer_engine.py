"""Parameters that TransformerEngine already keeps quantised, as canonical pieces over its own memory.

An exporter beside the trainer's main one: with ``fp4_param`` or ``fp8_param`` the trainer's bytes are authoritative
and are sent as they lie, so nothing is quantised again. Codes and block scales are views; the only thing made is
NVFP4's global scale, since TransformerEngine keeps the amax instead. Known by their attributes (as of
TransformerEngine 2.20), so that this module never imports TransformerEngine, whose half-installed form fails with
errors other than ImportError.

| storage | codes | scales | global |
|---|---|---|---|
| ``NVFP4Tensor`` | ``_rowwise_data`` uint8 (M, K/2) | ``_rowwise_scale_inv`` uint8, padded to (128 n, 4 n) | amax in ``_amax_rowwise`` |
| ``Float8Tensor`` | ``_data`` uint8 (M, K) | | ``_scale_inv`` fp32 (1,) |
| ``Float8BlockwiseQTensor`` | ``_rowwise_data`` uint8 (M, K) | ``_rowwise_scale_inv`` fp32 (M/128, K/128 padded to 4 n) | |

Column-wise copies are TransformerEngine's own business. Must not import receiver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megasync.errors import PlanError
from megasync.kernels.nvfp4_reference import FLT_MAX
from megasync.quant.blocks import check_box
from megasync.quant.checkpoint import FUSED_PARTNERS, Checkpoint, QuantisedWeight, QuantRule, describe
from megasync.quant.exchange import exchange_amax
from megasync.trainer.exporter import Exporter, Piece
from megasync.types import Box, CutAxis, TensorSpec

Storage = Literal["nvfp4", "fp8-tensor", "fp8-block"]

# What describes the layout, and the formula id that the schema records: the bytes are TransformerEngine's, not ours.
_LAYOUT: dict[Storage, tuple[str, str]] = {
    "nvfp4": ("nvfp4/te-1d", "nvfp4/te-stored@1"),
    "fp8-tensor": ("fp8/te-tensor", "fp8/te-stored-tensor@1"),
    "fp8-block": ("fp8/te-128", "fp8/te-stored-128@1"),
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised parameter, or a region of one, and where it lies in the canonical weight.

    Attributes:
        name: Canonical name of the weight, ``prefix.module.weight``.
        param: The TransformerEngine tensor.
        shape: Shape of the whole canonical weight, in elements.
        box: Where the region lies in the canonical weight, in elements.
        local: Where it starts in the parameter, in elements (row of a fused projection, say).
        layer: Global layer, -1 for none.
        cut: Cut axis of the tile grid.
        chunk: Model chunk.
    """

    name: str
    param: Any
    shape: tuple[int, int]
    box: Box
    local: tuple[int, int] = (0, 0)
    layer: int = -1
    cut: CutAxis = "row"
    chunk: int = 0


def storage_of(param: object) -> Storage | None:
    """How a parameter is stored, by its attributes.

    Args:
        param: Any tensor or parameter.

    Returns:
        The storage, or None where it is no quantised tensor of a known layout.
    """
    if hasattr(param, "_fp4_dtype") and hasattr(param, "_amax_rowwise"):
        return "nvfp4"
    if hasattr(param, "_is_2D_scaled"):
        return "fp8-block"
    if hasattr(param, "_fp8_dtype") and hasattr(param, "_data") and hasattr(param, "_scale_inv"):
        return "fp8-tensor"
    return None


class StoredExporter(Exporter):
    """Canonical pieces over TransformerEngine's quantised parameters.

    Args:
        weights: The parameters this rank holds.
        checkpoint: Whose names and shapes NVFP4 and per-tensor FP8 take; block FP8 takes ``deepseek``'s.
        group: Process group of all ranks, for the check that all parts of a weight share one amax; None: alone.
        partners: Modules that share a global scale (NVFP4).

    Raises:
        PlanError: Listing every parameter whose storage cannot be read as canonical bytes, and why.
    """

    settle_always = True

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        *,
        checkpoint: Checkpoint = "modelopt",
        group: dist.ProcessGroup | None = None,
        partners: Sequence[tuple[str, ...]] = FUSED_PARTNERS,
    ) -> None:
        self._stored = list(weights)
        self._group = group
        wrong: list[str] = []
        self._described: list[QuantisedWeight] = []
        for stored in self._stored:
            try:
                self._described.append(_describe(stored, checkpoint, partners))
            except PlanError as e:
                wrong.append(str(e))
        if wrong:
            raise PlanError(f"{len(wrong)} quantised parameters cannot be read: " + "; ".join(wrong[:20]))
        self._globals = {
            i: torch.ones(1, dtype=torch.float32, device=_codes(s.param).device)
            for i, s in enumerate(self._stored)
            if storage_of(s.param) == "nvfp4"
        }
        self._addresses = [_address(s.param) for s in self._stored]
        self._slots: dict[str, int] = {}

    def specs(self) -> list[TensorSpec]:
        """Specs of the codes, scales and global scales; one each, however many regions of a weight this rank holds."""
        found = {m.spec.name: m.spec for w in self._described for m in w.members}
        return list(found.values())

    def pieces(self) -> list[Piece]:
        """Views of the storages; a global scale comes once per weight, and is filled by ``settle``."""
        out: list[Piece] = []
        scalars: set[str] = set()
        for i, (stored, weight) in enumerate(zip(self._stored, self._described, strict=True)):
            for member in weight.members:
                if not member.step:
                    if member.spec.name in scalars:
                        continue
                    scalars.add(member.spec.name)
                box = weight.member_box(member, stored.box)
                data = _view(stored, member.role, member.step, box, self._globals.get(i))
                out.append(Piece(member.spec.name, box, data, chunk=stored.chunk))
        return out

    def own(self, boxes: Sequence[tuple[str, Box]], specs: Sequence[TensorSpec]) -> list[Piece]:
        """See ``Exporter.own``; also fixes the order in which ``settle`` compares amaxes."""
        ours = {stored_id for _, stored_id in _LAYOUT.values()}
        self._slots = {g: i for i, g in enumerate(sorted({s.group for s in specs if s.formula in ours}))}
        return super().own(boxes, specs)

    @property
    def num_compared(self) -> int:
        """Atomic groups of the run that are kept quantised, on any rank: those whose amaxes ``settle`` compares."""
        return len(self._slots)

    def settle(self) -> float:
        """Derive the global scales, after checking that all parts and fused partners of a weight share one.

        Returns:
            Seconds that it took.

        Raises:
            PlanError: On every rank, naming the weights whose parts have different amaxes or scales: one canonical
                global scale cannot decode them.

        *Collective*: every rank of the group, at the same step end, after ``own``.
        """
        start = time.perf_counter()
        if self._slots:
            self._check_shared()
        for i, out in self._globals.items():
            param, weight = self._stored[i].param, self._described[i]
            out.copy_(_global_scale(param, weight.reciprocal))
        return time.perf_counter() - start

    def check_alive(self) -> None:
        """See ``Exporter.check_alive``: a parameter that was cast again into new memory is named."""
        lost = [s.name for s, at in zip(self._stored, self._addresses, strict=True) if at != _address(s.param)]
        if lost:
            raise PlanError(f"the quantised storage of {', '.join(lost[:20])} moved since the plan: plan again")

    def _check_shared(self) -> None:
        device = _codes(self._stored[0].param).device if self._stored else torch.device("cpu")
        n = len(self._slots)
        # Row 0 finds the largest, row 1 the smallest, by floats in reversed order; ranks without a part send 0 in both.
        both = torch.zeros(2, n, dtype=torch.float32, device=device)
        for stored, weight in zip(self._stored, self._described, strict=True):
            if storage_of(stored.param) == "fp8-block" or weight.group not in self._slots:
                continue
            slot = self._slots[weight.group]
            value = stored.param._amax_rowwise if storage_of(stored.param) == "nvfp4" else stored.param._scale_inv
            value = value.detach().reshape(-1)[0].float()
            both[0, slot] = torch.maximum(both[0, slot], value)
            turned = (0x7F7FFFFF - value.view(torch.int32)).view(torch.float32)
            both[1, slot] = torch.maximum(both[1, slot], turned)
        reduced, _ = exchange_amax(both.flatten(), self._group)
        largest, turned = reduced.view(2, n).cpu()
        smallest = (0x7F7FFFFF - turned.view(torch.int32)).view(torch.float32)
        taken = largest + turned > 0
        bad = [g for g, i in self._slots.items() if taken[i] and float(largest[i]) != float(smallest[i])]
        if bad:
            raise PlanError(
                f"{len(bad)} weights have parts with different global scales: {', '.join(bad[:20])}; reduce the amax "
                "over the tensor-parallel group in the trainer, or quantise on export instead"
            )


def _describe(stored: StoredWeight, checkpoint: Checkpoint, partners: Sequence[tuple[str, ...]]) -> QuantisedWeight:
    kind = storage_of(stored.param)
    if kind is None:
        raise PlanError(f"{stored.name}: {type(stored.param).__name__} is no quantised storage of a known layout")
    layout, stored_id = _LAYOUT[kind]
    source = TensorSpec(stored.name, "BF16", stored.shape, layer=stored.layer, cut=stored.cut)
    rule = QuantRule("*", layout, "deepseek" if kind == "fp8-block" else checkpoint)
    weight = describe(source, rule, partners if kind == "nvfp4" else ())
    check_box(stored.box, stored.shape, weight.formula, stored.name)
    _check_storage(stored, kind)
    members = tuple(replace(m, spec=replace(m.spec, formula=stored_id)) for m in weight.members)
    return replace(weight, members=members)


def _check_storage(stored: StoredWeight, kind: Storage) -> None:
    param, name = stored.param, stored.name
    codes = codes_of(param)
    if codes is None:
        raise PlanError(f"{name}: only its column-wise (transposed) copy is stored; keep row-wise usage on")
    scales = param._scale_inv if kind == "fp8-tensor" else param._rowwise_scale_inv
    if scales is None or (kind == "nvfp4" and param._amax_rowwise is None):
        raise PlanError(f"{name}: its row-wise scales are not stored")
    if kind == "nvfp4":
        if getattr(param, "_with_gemm_swizzled_scales", False):
            raise PlanError(f"{name}: its scales are stored swizzled for the matrix product; keep them compact")
        if getattr(param, "_row_scaled_nvfp4", False) or param._amax_rowwise.numel() != 1:
            raise PlanError(f"{name}: one amax per row has no canonical form; use one per tensor")
    elif "E4M3" not in str(getattr(param._fp8_dtype, "name", param._fp8_dtype)).upper():
        raise PlanError(f"{name}: stored as {param._fp8_dtype}, canonical FP8 weights are e4m3")
    if kind == "fp8-block" and not param._is_2D_scaled:
        raise PlanError(f"{name}: 1 x 128 scales have no canonical form for weights; use 128 x 128 blocks")
    pack = 2 if kind == "nvfp4" else 1
    need = [a + b for a, b in zip(stored.local, stored.box.extent, strict=True)]
    if codes.ndim != 2 or need[0] > codes.shape[0] or need[1] > codes.shape[1] * pack:
        raise PlanError(
            f"{name}: region {stored.local}+{stored.box.extent} lies outside a storage of {tuple(codes.shape)}"
        )
    for axis, unit in enumerate({"nvfp4": (1, 16), "fp8-tensor": (1, 1), "fp8-block": (128, 128)}[kind]):
        if stored.local[axis] % unit:
            raise PlanError(f"{name}: its region starts at {stored.local} in the parameter, inside a block of {unit}")


def codes_of(param: Any) -> torch.Tensor | None:
    """The row-wise codes of a quantised parameter, uint8; None where only the column-wise copy is stored.

    Args:
        param: A parameter of a known storage (``storage_of``).
    """
    codes: torch.Tensor | None = param._data if storage_of(param) == "fp8-tensor" else param._rowwise_data
    return codes


def _codes(param: Any) -> torch.Tensor:
    codes = codes_of(param)
    assert codes is not None, "checked when the exporter was made"
    return codes


def _view(stored: StoredWeight, role: str, step: tuple[int, ...], box: Box, made: torch.Tensor | None) -> torch.Tensor:
    """Live memory of one member's region, never a copy (but for NVFP4's made global scale)."""
    if not step:
        return (made if made is not None else stored.param._scale_inv.detach()).view(box.extent)
    whole = _codes(stored.param) if role == "codes" else stored.param._rowwise_scale_inv
    start = tuple(a // n for a, n in zip(stored.local, step, strict=True))
    return whole.detach()[tuple(slice(a, a + n) for a, n in zip(start, box.extent, strict=True))]


def _global_scale(param: Any, reciprocal: bool) -> torch.Tensor:
    """amax / (6 * largest block scale) or its inverse, 1 for an all-zero weight; 4over6 has a smaller largest scale."""
    amax = param._amax_rowwise.detach().reshape(1).float()
    top = torch.full_like(amax, 6.0 * float(getattr(param, "_nvfp4_e4m3_max", 448)))
    scale = torch.div(top, amax).clamp(max=FLT_MAX) if reciprocal else torch.div(amax, top)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _address(param: Any) -> tuple[int, ...]:
    kind = storage_of(param)
    parts = (param._data, param._scale_inv) if kind == "fp8-tensor" else (param._rowwise_data, param._rowwise_scale_inv)
    return tuple(0 if t is None else t.data_ptr() for t in parts)
