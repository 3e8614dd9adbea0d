"""Canonical names, shapes, blocks and groups of quantised checkpoints, and how their boxes map to the source weight.

``describe`` turns the spec of a source weight into the specs of the tensors that a checkpoint holds in its place;
``select`` does it for a model by rules. Comes before the schema and the ownership plan: blocks keep tiles at block
multiples, groups tie together what must change together. Must import nothing above quant.

| checkpoint | codes | block scales | global scale | activation scale (frozen) |
|---|---|---|---|---|
| ``modelopt``, NVFP4 | ``weight`` U8 (M, K/2) | ``weight_scale`` F8_E4M3 (M, K/16) | ``weight_scale_2`` F32 (), decodes | ``input_scale`` F32 () |
| ``compressed-tensors``, NVFP4 | ``weight_packed``, the same | ``weight_scale``, the same | ``weight_global_scale`` F32 (1,), encodes | ``input_global_scale`` F32 (1,) |
| ``deepseek``, FP8 blocks | ``weight`` F8_E4M3 (M, K) | ``weight_scale_inv`` F32 or F8_E8M0 (M/128, K/128) | | ``input_scale`` F32 () |
| ``modelopt``, ``compressed-tensors``, FP8 | ``weight`` F8_E4M3 (M, K) | ``weight_scale`` F32: per block as above, per row (M, 1) | ``weight_scale`` F32 () or (1,), per tensor | ``input_scale`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megasync.errors import PlanError
from megasync.quant.blocks import check_shape
from megasync.quant.formulas import Formula, formula
from megasync.quant.rules import PACKED, Checkpoint, QuantRule
from megasync.types import Box, TensorSpec

__all__ = [
    "FUSED_PARTNERS",
    "Checkpoint",
    "Member",
    "QuantRule",
    "QuantisedWeight",
    "describe",
    "fused_group",
    "select",
]

Role = Literal["codes", "scales", "global", "input"]

FUSED_PARTNERS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Modules that engines run as one matrix: they share one global scale, as the checkpoints of both formats do."""


@dataclass(frozen=True, slots=True)
class Member:
    """One canonical tensor made from a source weight.

    Attributes:
        role: What it holds.
        spec: Its spec.
        step: Source elements along each axis that one word stands for; empty for a scalar.
    """

    role: Role
    spec: TensorSpec
    step: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A source weight and the canonical tensors in its place.

    Attributes:
        source: Spec of the source weight, which is not in the schema.
        formula: How the bytes are made.
        members: Codes first, then scales, global scale, activation scale, as the format has them.
        reciprocal: The global scale encodes (compressed-tensors) rather than decodes.
    """

    source: TensorSpec
    formula: Formula
    members: tuple[Member, ...]
    reciprocal: bool

    @property
    def group(self) -> str:
        """Atomic group: everything that shares the global scale."""
        return self.members[0].spec.group

    def source_box(self, member: Member, box: Box) -> Box:
        """The elements of the source weight behind a box of one of its tensors (all of it for a scalar).

        Args:
            member: Codes, scales or global scale.
            box: A box of the member, in words.
        """
        if not member.step:
            return Box((0,) * len(self.source.shape), self.source.shape)
        start = tuple(s * n for s, n in zip(box.start, member.step, strict=True))
        stop = tuple(
            min((s + e) * n, whole)
            for s, e, n, whole in zip(box.start, box.extent, member.step, self.source.shape, strict=True)
        )
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def member_box(self, member: Member, box: Box) -> Box:
        """The box of a member that an aligned box of the source weight makes; the whole member for a scalar.

        Args:
            member: Codes, scales or global scale.
            box: A box of the source weight, in elements, cut at block multiples.
        """
        if not member.step:
            return Box((0,) * len(member.spec.shape), member.spec.shape)
        start = tuple(s // n for s, n in zip(box.start, member.step, strict=True))
        stop = tuple(-(-(s + e) // n) for s, e, n in zip(box.start, box.extent, member.step, strict=True))
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def fused_group(name: str, partners: Iterable[tuple[str, ...]] = FUSED_PARTNERS) -> str:
    """Group name of a weight: its module, or the fused modules that it belongs to.

    Args:
        name: Canonical name, ``prefix.module.weight``.
        partners: Module names that share a global scale.

    Returns:
        ``prefix.module``, or ``prefix.q_proj+k_proj+v_proj`` and the like.
    """
    prefix, _, module = name.rpartition(".")[0].rpartition(".")
    for fused in partners:
        if module in fused:
            module = "+".join(fused)
            break
    return f"{prefix}.{module}" if prefix else module


def describe(
    source: TensorSpec, rule: QuantRule, partners: Iterable[tuple[str, ...]] = FUSED_PARTNERS
) -> QuantisedWeight:
    """The canonical tensors in place of one weight.

    Args:
        source: Spec of the weight, ``BF16`` or ``F32`` as the formula wants it.
        rule: The rule that selects it, with a formula.
        partners: Module names that share a global scale.

    Raises:
        PlanError: A weight that the formula or the checkpoint cannot hold.
        ValueError: An unknown formula id.
    """
    f = formula(rule.formula)
    check_shape(source.shape, f, source.name)
    base, _, last = source.name.rpartition(".")
    if last != "weight" or not base:
        raise PlanError(f"{source.name} does not end in .weight: no checkpoint has a name for its scales")
    if source.dtype != f.source:
        raise PlanError(
            f"{source.name} is {source.dtype}, {f.id} quantises {f.source}; fp32 masters need the +f32 formula"
        )
    if source.aliases:
        raise PlanError(f"{source.name} is tied to {', '.join(source.aliases)}: leave tied weights unquantised")
    if rule.checkpoint == "deepseek" and (f.family == "nvfp4" or not all(f.block)):
        raise PlanError(f"{source.name}: checkpoint 'deepseek' has no names for {f.id}")
    if rule.scale_dtype == "F8_E8M0" and not f.pow2:
        raise PlanError(f"{source.name}: {f.id} has scales that are no powers of two, F8_E8M0 cannot store them")
    shared = f.needs_amax
    group = fused_group(source.name, partners if shared else ())
    members = _nvfp4(source, f, rule, base, group) if f.family == "nvfp4" else _fp8(source, f, rule, base, group)
    return QuantisedWeight(source, f, tuple(members), f.family == "nvfp4" and rule.checkpoint == "compressed-tensors")


def select(
    specs: Sequence[TensorSpec], rules: Sequence[QuantRule], partners: Sequence[tuple[str, ...]] = FUSED_PARTNERS
) -> dict[str, QuantisedWeight]:
    """Apply rules to a model, or to the part of it that a rank holds.

    Args:
        specs: Specs of the source tensors.
        rules: Tried in order; tensors that none matches stay as they are, as do frozen ones.
        partners: Module names that share a global scale.

    Returns:
        Quantised weight by source name.

    Raises:
        PlanError: Listing every weight that cannot be held, every fused set whose members take different formulas, and
            every canonical name that two tensors would get.
        ValueError: An unknown formula id.
    """
    chosen: dict[str, QuantisedWeight] = {}
    wrong: list[str] = []
    ids: dict[str, dict[str, str]] = {}
    for spec in specs:
        rule = next((r for r in rules if r.matches(spec)), None)
        taken = rule.formula if rule is not None and not spec.frozen else ""
        if spec.name.endswith(".weight"):
            ids.setdefault(fused_group(spec.name, partners), {})[spec.name] = taken
        if rule is None or not taken:
            continue
        try:
            chosen[spec.name] = describe(spec, rule, partners)
        except PlanError as e:
            wrong.append(str(e))
    for group, by_name in ids.items():
        if len(set(by_name.values())) > 1:
            listed = ", ".join(f"{n}: {i or 'unquantised'}" for n, i in sorted(by_name.items()))
            wrong.append(f"fused modules of {group} must take one formula, found {listed}")
    seen: dict[str, str] = {s.name: s.name for s in specs if s.name not in chosen}
    for weight in chosen.values():
        for member in weight.members:
            if (other := seen.setdefault(member.spec.name, weight.source.name)) != weight.source.name:
                wrong.append(f"{member.spec.name} would be made from {weight.source.name} and exists from {other}")
    if wrong:
        raise PlanError(f"{len(wrong)} weights cannot be quantised as asked: " + "; ".join(wrong[:20]))
    return chosen


def _spec(source: TensorSpec, name: str, dtype: str, shape: tuple[int, ...], **more: object) -> TensorSpec:
    return TensorSpec(name, dtype, shape, layer=source.layer, cut=source.cut, **more)  # type: ignore[arg-type]


def _nvfp4(source: TensorSpec, f: Formula, rule: QuantRule, base: str, group: str) -> list[Member]:
    rows, columns = source.shape
    height, width = f.block
    ours = rule.checkpoint == "modelopt"
    scalar: tuple[int, ...] = () if ours else (1,)
    codes = _spec(
        source,
        f"{base}.weight" if ours else f"{base}{PACKED}",
        "U8",
        (rows, columns // 2),
        block=(height, width // 2),
        formula=f.id,
        group=group,
    )
    scales = _spec(
        source,
        f"{base}.weight_scale",
        "F8_E4M3",
        (rows, columns // width),
        block=(height, 1),
        formula=f.id,
        group=group,
    )
    name = "weight_scale_2" if ours else "weight_global_scale"
    whole = _spec(source, f"{base}.{name}", "F32", scalar, formula=f.id, group=group)
    members = [
        Member("codes", codes, (1, 2)),
        Member("scales", scales, (1, width)),
        Member("global", whole),
    ]
    if rule.input_scale:
        name = "input_scale" if ours else "input_global_scale"
        members.append(Member("input", _spec(source, f"{base}.{name}", "F32", scalar, frozen=True, group=group)))
    return members


def _fp8(source: TensorSpec, f: Formula, rule: QuantRule, base: str, group: str) -> list[Member]:
    rows, columns = source.shape
    height, width = f.block
    scalar: tuple[int, ...] = (1,) if rule.checkpoint == "compressed-tensors" else ()
    # A row-wide scale needs whole rows; a tensor-wide one cuts anywhere.
    block = (height or 1, (width or max(columns, 1)) if height else 1)
    codes = _spec(source, f"{base}.weight", "F8_E4M3", source.shape, block=block, formula=f.id, group=group)
    members = [Member("codes", codes, (1, 1))]
    name = "weight_scale_inv" if rule.checkpoint == "deepseek" else "weight_scale"
    if not height:
        whole = _spec(source, f"{base}.{name}", rule.scale_dtype, scalar, formula=f.id, group=group)
        members.append(Member("global", whole))
    else:
        step = (height, width or max(columns, 1))
        extents = (-(-rows // step[0]), -(-columns // step[1]))
        scales = _spec(source, f"{base}.{name}", rule.scale_dtype, extents, block=(1, 1), formula=f.id, group=group)
        members.append(Member("scales", scales, step))
    if rule.input_scale:
        members.append(Member("input", _spec(source, f"{base}.input_scale", "F32", scalar, frozen=True, group=group)))
    return members
