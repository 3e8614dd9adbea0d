"""Shapes and rank layout of a 445 GB mixture of experts, for benchmarks that need a realistic model and no weights.

GLM-5-like: 78 layers (3 dense), 256 experts, hidden 7168, packed fp4 experts, bf16 attention, one MTP layer, an embedding
that first and last stage share. Experts are split over 32 ranks, fewer than there are data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megasync.trainer.plan_merge import describe
from megasync.types import Box, CutAxis, TensorSpec

HIDDEN, EXPERT, DENSE, VOCABULARY = 7168, 2048, 18432, 154_880
LAYERS, DENSE_LAYERS, EXPERTS = 78, 3, 256
_CUT = 256  # greatest common divisor of the axes that tensor parallelism cuts
_EXPERT_MATRICES: tuple[tuple[str, tuple[int, int], CutAxis], ...] = (
    ("gate_proj", (EXPERT, HIDDEN), "row"),
    ("up_proj", (EXPERT, HIDDEN), "row"),
    ("down_proj", (HIDDEN, EXPERT), "last"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model lies on ranks: rank = (stage * data + replica) * tensor + shard; experts go round in a stage.

    Attributes:
        stages: Pipeline stages.
        tensor: Tensor-parallel shards.
        data: Data-parallel replicas.
        expert: Expert-parallel shards of a stage; divides ``data * tensor`` and the experts, a multiple of ``tensor``.
    """

    stages: int = 8
    tensor: int = 2
    data: int = 64
    expert: int = 32

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.stages * self.tensor * self.data

    def faults(self) -> list[str]:
        """Why the model does not lie so, each with what would; sizes are at least 1."""
        faults: list[str] = []
        if self.stages > LAYERS:
            faults.append(f"stages={self.stages}: the model has {LAYERS} layers, a stage at least one of them")
        if _CUT % self.tensor:
            faults.append(f"tensor={self.tensor}: every cut matrix must divide evenly: give a power of 2 up to {_CUT}")
        if EXPERTS % self.expert:
            faults.append(
                f"expert={self.expert} does not divide the {EXPERTS} experts: give a power of 2 up to {EXPERTS}"
            )
        if self.data * self.tensor % self.expert or self.expert % self.tensor:
            faults.append(
                f"expert={self.expert}: must divide the {self.data * self.tensor} ranks of a stage (data x tensor) and be a "
                f"multiple of tensor={self.tensor}"
            )
        return faults


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor and who holds it: its stages, the axis that tensor parallelism cuts, or its expert shard."""

    spec: TensorSpec
    stages: tuple[int, ...]
    cut_axis: int | None = None
    expert: int | None = None


def parts(layout: Layout, *, scales: bool) -> Iterator[Part]:
    """Every tensor of the model; ``scales`` adds NVFP4 block scales and global scales of the experts."""
    last = layout.stages - 1
    yield Part(_bf16("model.embed_tokens.weight", (VOCABULARY, HIDDEN), -1, aliases=("lm_head.weight",)), (0, last), 0)
    yield Part(_bf16("model.norm.weight", (HIDDEN,), -1), (last,))
    for layer in range(LAYERS + 1):  # the last one is the MTP layer
        at = (min(layer * layout.stages // LAYERS, last),)
        p = f"model.layers.{layer}"
        a = f"{p}.self_attn"
        yield Part(_bf16(f"{a}.q_a_proj.weight", (2048, HIDDEN), layer), at)
        yield Part(_bf16(f"{a}.q_a_layernorm.weight", (2048,), layer), at)
        yield Part(_bf16(f"{a}.q_b_proj.weight", (64 * 256, 2048), layer), at, 0)
        yield Part(_bf16(f"{a}.kv_a_proj_with_mqa.weight", (576, HIDDEN), layer), at)
        yield Part(_bf16(f"{a}.kv_a_layernorm.weight", (512,), layer), at)
        yield Part(_bf16(f"{a}.kv_b_proj.weight", (64 * 448, 512), layer), at, 0)
        yield Part(_bf16(f"{a}.o_proj.weight", (HIDDEN, 64 * 256), layer, cut="last"), at, 1)
        yield Part(_bf16(f"{p}.input_layernorm.weight", (HIDDEN,), layer), at)
        yield Part(_bf16(f"{p}.post_attention_layernorm.weight", (HIDDEN,), layer), at)
        if layer < DENSE_LAYERS:
            yield from _mlp(f"{p}.mlp", DENSE, layer, at)
            continue
        yield from _mlp(f"{p}.mlp.shared_experts", EXPERT, layer, at)
        yield Part(_bf16(f"{p}.mlp.gate.weight", (EXPERTS, HIDDEN), layer), at)
        bias = TensorSpec(f"{p}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,), layer)
        yield Part(bias, at)
        for expert in range(EXPERTS):
            shard = expert // (EXPERTS // layout.expert)
            for name, shape, cut in _EXPERT_MATRICES:
                full = f"{p}.mlp.experts.{expert}.{name}"
                for spec in _fp4(full, shape, layer, cut, scales):
                    yield Part(spec, at, expert=shard)


def classes(layout: Layout, *, scales: bool) -> list[tuple[list[int], bytes]]:
    """Ranks and description of every class of equal ranks."""
    held: dict[tuple[int, int], tuple[list[TensorSpec], list[tuple[str, Box]]]] = {}
    for stage in range(layout.stages):
        for shard in range(layout.expert):
            held[stage, shard] = ([], [])
    for part in parts(layout, scales=scales):
        shape = part.spec.shape
        for stage in part.stages:
            for shard in range(layout.expert) if part.expert is None else (part.expert,):
                start, extent = [0] * len(shape), list(shape)
                if part.cut_axis is not None:
                    extent[part.cut_axis] //= layout.tensor
                    start[part.cut_axis] = shard % layout.tensor * extent[part.cut_axis]
                specs, boxes = held[stage, shard]
                specs.append(part.spec)
                boxes.append((part.spec.name, Box(tuple(start), tuple(extent))))
    width = layout.tensor * layout.data
    return [
        (list(range(stage * width + shard, (stage + 1) * width, layout.expert)), describe(specs, boxes))
        for (stage, shard), (specs, boxes) in held.items()
    ]


def _mlp(prefix: str, width: int, layer: int, at: tuple[int, ...]) -> Iterator[Part]:
    yield Part(_bf16(f"{prefix}.gate_proj.weight", (width, HIDDEN), layer), at, 0)
    yield Part(_bf16(f"{prefix}.up_proj.weight", (width, HIDDEN), layer), at, 0)
    yield Part(_bf16(f"{prefix}.down_proj.weight", (HIDDEN, width), layer, cut="last"), at, 1)


def _bf16(
    name: str, shape: tuple[int, ...], layer: int, cut: CutAxis = "row", aliases: tuple[str, ...] = ()
) -> TensorSpec:
    return TensorSpec(name, "BF16", shape, layer, cut, aliases=aliases)


def _fp4(name: str, shape: tuple[int, int], layer: int, cut: CutAxis, scales: bool) -> Iterator[TensorSpec]:
    rows, columns = shape
    yield TensorSpec(f"{name}.weight", "U8", (rows, columns // 2), layer, cut, (1, 8))
    if scales:
        yield TensorSpec(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), layer, cut)
        yield TensorSpec(f"{name}.weight_scale_2", "F32", (), layer)
