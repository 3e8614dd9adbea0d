"""The model-like list: one trainer rank's share of a GLM-5-like mixture of experts, and how an engine holds it.

A layer's share is 32 of 256 experts (packed 4-bit weights, FP8 block scales, FP32 global scales) and an eighth of
everything else (BF16 attention, shared experts, norms): about 0.86 GB. Eight layers are what one of 64 ranks owns. The
engine stacks the experts, lets groups of 64 gate and up rows take turns, and keeps block scales in 128 x 4 tiles. Before
it: nothing. After it: bench_payload, bench_cpu. Must not import a codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from launch.bench.moe_shapes import EXPERT, EXPERTS, HIDDEN
from megasync.layout.compose import arrange
from megasync.layout.experts import Place, stacked, swizzled, w2_rows, w13_interleaved
from megasync.layout.modes import Layout
from megasync.receiver.engine import TORCH_DTYPES, Engine, Tensors
from megasync.schema import Schema
from megasync.types import WORD_DTYPES, CutAxis, TensorSpec

PART = 8
"""Ranks that share a layer."""

SLOTS = EXPERTS // PART

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def layer_specs(layer: int) -> Iterator[TensorSpec]:
    """The share of one layer."""
    p = f"model.layers.{layer}"
    a, shared = f"{p}.self_attn", EXPERT // PART
    yield _bf16(f"{a}.q_a_proj.weight", (2048 // PART, HIDDEN), layer)
    yield _bf16(f"{a}.q_b_proj.weight", (64 * 256 // PART, 2048), layer)
    yield _bf16(f"{a}.kv_a_proj_with_mqa.weight", (576 // PART, HIDDEN), layer)
    yield _bf16(f"{a}.kv_b_proj.weight", (64 * 448 // PART, 512), layer)
    yield _bf16(f"{a}.o_proj.weight", (HIDDEN, 64 * 256 // PART), layer, "last")
    yield _bf16(f"{p}.mlp.shared_experts.gate_proj.weight", (shared, HIDDEN), layer)
    yield _bf16(f"{p}.mlp.shared_experts.up_proj.weight", (shared, HIDDEN), layer)
    yield _bf16(f"{p}.mlp.shared_experts.down_proj.weight", (HIDDEN, shared), layer, "last")
    yield _bf16(f"{p}.mlp.gate.weight", (EXPERTS // PART, HIDDEN), layer)
    yield _bf16(f"{p}.input_layernorm.weight", (HIDDEN,), layer)
    yield _bf16(f"{p}.post_attention_layernorm.weight", (HIDDEN,), layer)
    for expert in range(SLOTS):
        for part, rows, columns, cut in _MATRICES:
            name = f"{p}.mlp.experts.{expert}.{part}"
            yield TensorSpec(f"{name}.weight", "U8", (rows, columns // 2), layer, cut, (1, 8))
            yield TensorSpec(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), layer, cut)
            yield TensorSpec(f"{name}.weight_scale_2", "F32", (), layer)


_MATRICES: tuple[tuple[str, int, int, CutAxis], ...] = (
    ("gate_proj", EXPERT, HIDDEN, "row"),
    ("up_proj", EXPERT, HIDDEN, "row"),
    ("down_proj", HIDDEN, EXPERT, "last"),
)


def model_list(nbytes: int) -> list[TensorSpec]:
    """Layers until ``nbytes`` are reached; the last one keeps whole experts only as far as they fit."""
    out: list[TensorSpec] = []
    total = layer = 0
    while total < nbytes:
        for spec in layer_specs(layer):
            if total < nbytes:
                out.append(spec)
                total += spec.nbytes
        layer += 1
    return out


def is_weight(spec: TensorSpec) -> bool:
    """Whether the article's generator would touch a tensor: weights, but neither scales nor the router."""
    return spec.name.endswith(".weight") and ".mlp.gate." not in spec.name and spec.dtype in ("U8", "BF16")


class ListEngine(Engine):
    """An engine that holds the list in its own layout, in host memory.

    Args:
        specs: The list.
    """

    name = "bench"

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.places = {t.name: _place(t) for t in specs}
        self._live = {n: torch.zeros(size, dtype=torch.uint8) for n, size in _storages(specs, self.places).items()}
        self._views: dict[str, torch.Tensor] = {}
        for t in specs:
            storage = self.places[t.name].records[0].storage
            self._views[storage] = self._live[storage].view(TORCH_DTYPES[t.dtype])

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        """See ``Engine.layouts``."""
        return self.places

    def tensors(self) -> Tensors:
        """See ``Engine.tensors``."""
        return self._views

    def load(self, name: str, words: np.ndarray) -> None:
        """Load the whole of one canonical tensor, as a cold start would.

        Args:
            name: Canonical name.
            words: ``<u{w}``, canonical shape.
        """
        for record in self.places[name].records:
            live = self._live[record.storage].numpy().view(WORD_DTYPES[words.dtype.itemsize])
            rows = max(1, (1 << 20) // max(words[0].size, 1))
            for at in range(0, words.shape[0], rows):
                part = words[at : at + rows]
                index = np.indices(part.shape).reshape(part.ndim, -1)
                index[0] += at
                live[record.local_offsets(list(index))] = part.reshape(-1)


def live_words(tensor: torch.Tensor) -> np.ndarray:
    """Words of a CPU tensor, flat, writable."""
    same = _SAME_SIZE[tensor.element_size()]
    return tensor.reshape(-1).view(same).numpy().view(WORD_DTYPES[tensor.element_size()])


def random_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A tensor of random bytes that depend on its name and the seed alone."""
    key = [seed, *spec.name.encode()]
    data = np.frombuffer(np.random.default_rng(key).bytes(spec.nbytes), np.uint8).copy()
    flat = torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype])
    return flat.reshape(spec.shape)


def _bf16(name: str, shape: tuple[int, ...], layer: int, cut: CutAxis = "row") -> TensorSpec:
    return TensorSpec(name, "BF16", shape, layer, cut)


def _place(spec: TensorSpec) -> Layout:
    head, _, tail = spec.name.partition(".mlp.experts.")
    if not tail or not spec.shape:
        return arrange(spec.shape or (1,), word_nbytes=spec.word_nbytes).to(spec.name)
    expert, part, kind = tail.split(".")
    place = Place(int(expert), SLOTS)
    scales = kind == "weight_scale"
    if part == "down_proj":
        rows = w2_rows(spec.shape, place, word_nbytes=1)
        storage = f"{head}.mlp.w2.{kind}"
        return stacked(rows, place, storage, swizzled) if scales else stacked(rows, place, storage)
    half = "gate" if part == "gate_proj" else "up"
    return w13_interleaved(half, spec.shape, place, f"{head}.mlp.w13.{kind}", word_nbytes=1, scales=scales)  # type: ignore[arg-type]


def _storages(specs: Sequence[TensorSpec], places: Mapping[str, Layout]) -> dict[str, int]:
    """Bytes of each live storage: stacks have all their slots, whether the list fills them or not."""
    out: dict[str, int] = {}
    for t in specs:
        for record in places[t.name].records:
            # 128 x 4 tiles do not pad these shapes: rows divide by 128, columns by 4.
            slots = 1 if ".mlp.experts." not in t.name or not t.shape else SLOTS * (2 if ".w13." in record.storage else 1)
            out[record.storage] = t.nbytes * slots
    return out
